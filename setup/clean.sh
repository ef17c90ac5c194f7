#!/bin/sh
# Undoes what set-up made in this checkout and on this machine, and only that. A stack that is up stops it.
set -eu
root=$(dirname "$(dirname "$(readlink -f "$0")")")
cd "$root"
for file in .scaletier/*/inventory.json; do
  [ -e "$file" ] || continue
  stack=$(basename "$(dirname "$file")")
  echo "clean: stack $stack is up: \`pulumi destroy --stack $stack\` first" >&2
  exit 2
done
if [ -x .venv/bin/python ]; then
  left=$(.venv/bin/python -m infra.lxd.leftovers 2>/dev/null || true)
  if [ -n "$left" ]; then
    echo "clean: hosts of a stack are still there, of this checkout or another ($left): \`pulumi destroy\` first" >&2
    exit 2
  fi
fi
if [ -x .venv/bin/pulumi ] && [ -f Pulumi.local.yaml ]; then
  # Refuses by itself where resources are left.
  .venv/bin/pulumi stack rm local --yes --non-interactive >/dev/null
  echo "clean: removed stack local"
fi
if ! ls .pulumi-state/.pulumi/stacks/scaletier/*.json >/dev/null 2>&1; then rm -rf .pulumi-state; else echo "clean: .pulumi-state stays, other stacks are in it"; fi
if [ -x .venv/bin/python ]; then
  .venv/bin/python -m infra.lxd.image remove || true
  setup/lxd.sh down
fi
rm -rf .venv .cache scaletier.egg-info
echo "clean: done; what stays: packages of the system, and root's lines in /etc/subuid and /etc/subgid"
