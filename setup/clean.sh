#!/bin/sh
# Undoes what set-up made in this checkout and on this machine, and only that. A stack that is up stops it.
set -eu
unset PULUMI_BACKEND_URL # a team's state is none of this checkout
cd "$(dirname "$0")/.."
part=clean
. setup/common.sh

# True where there is an LXD that may have hosts, whether it answers or not.
lxd_is_here() {
  for socket in $sockets .cache/lxd/lxd.pid; do [ ! -e "$socket" ] || return 0; done
  return 1
}

for file in .scaletier/*/inventory.json; do
  [ -e "$file" ] || continue
  stack=$(basename "$(dirname "$file")")
  stacks | grep -qxF "$stack" || continue # another checkout's, reached from here
  fail "stack $stack is up: \`pulumi destroy --stack $stack\` first"
done
if [ -x .venv/bin/python ] && lxd_is_here; then
  left=$(.venv/bin/python -m infra.lxd.orphans --up) || fail "nothing is removed, as it is unknown whether hosts are left"
  [ -z "$left" ] || fail "hosts of a stack are still there, of this checkout or another ($left): \`pulumi destroy\` first"
  .venv/bin/python -m infra.lxd.orphans --kept | while read -r line; do say "$line"; done
elif [ -d .cache ] && lxd_is_here; then
  fail "nothing is removed, as it takes Python to see what is left in LXD: \`make venv\` first"
fi
for stack in $(stacks); do
  [ -x .venv/bin/pulumi ] || continue
  case $stack in local | demo) config='' ;; *) config=--preserve-config ;; esac # set-up made those two
  # Refuses by itself where resources are left.
  .venv/bin/pulumi stack rm "$stack" --yes --non-interactive $config >/dev/null
  say "removed stack $stack"
done
if [ -n "$(stacks)" ]; then
  say ".pulumi-state stays, other stacks are in it"
elif [ -s .pulumi-state/passphrase ] && grep -qs '^encryptionsalt:' Pulumi.*.yaml; then
  rm -rf .pulumi-state/.pulumi
  say ".pulumi-state/passphrase stays, for" $(grep -ls '^encryptionsalt:' Pulumi.*.yaml) "cannot be used without"
else
  rm -rf .pulumi-state
fi
if [ -x .venv/bin/python ]; then
  .venv/bin/python -m infra.lxd.image remove || true
  setup/lxd.sh down
fi
kept=''
for record in .cache/lxd/limits .cache/lxd/*.pid; do [ ! -e "$record" ] || kept=yes; done
if [ -n "$kept" ]; then
  find .cache -mindepth 1 -maxdepth 1 ! -name lxd -exec rm -rf {} +
  say ".cache/lxd stays, with the kernel's limits and the LXD to undo: once its storage pool is unused, \`make venv clean\`"
else
  rm -rf .cache
fi
rm -rf .venv scaletier.egg-info
say "done; what stays: packages of the system, and root's lines in /etc/subuid and /etc/subgid"
