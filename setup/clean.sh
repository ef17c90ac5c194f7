#!/bin/sh
# Undoes what set-up made in this checkout and on this machine. Stacks that still have resources stay, and stop it.
set -eu
root=$(dirname "$(dirname "$(readlink -f "$0")")")
cd "$root"
if ls .scaletier/*/inventory.json >/dev/null 2>&1; then
  for file in .scaletier/*/inventory.json; do
    stack=$(basename "$(dirname "$file")")
    echo "clean: stack $stack is up: \`pulumi destroy --stack $stack\` first" >&2
  done
  exit 2
fi
if [ -x .venv/bin/python ]; then
  .venv/bin/python -m infra.lxd.image remove || true
  setup/lxd.sh down
fi
# Only what set-up itself writes; a user's own stacks and configuration stay.
rm -rf .venv .cache scaletier.egg-info
echo "clean: done. Pulumi's state stays in .pulumi-state; packages of the system stay too"
