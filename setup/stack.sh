#!/bin/sh
# The stack $STACK, with a passphrase of its own. It is selected where it is `local` and nothing else is.
set -eu
cd "$(dirname "$0")/.."
part=stack
. setup/common.sh
stack=${STACK:-local}
pulumi=.venv/bin/pulumi

if [ -n "${PULUMI_BACKEND_URL:-}" ]; then
  $pulumi stack select "$stack" || fail "none of that name there: make one as docs/team.md says"
  say "$stack of $PULUMI_BACKEND_URL is selected"
  exit 0
fi
mkdir -p .pulumi-state
[ -s .pulumi-state/passphrase ] || (umask 077; head -c 24 /dev/urandom | base64 >.pulumi-state/passphrase)
if [ -f "Pulumi.$stack.yaml" ] && stacks | grep -qxF "$stack"; then
  unchanged "$stack is there"
else
  made=$($pulumi stack init --no-select "$stack" 2>&1) || fail "$made"
  say "made $stack"
fi
# The selection is this user's, by path.
if [ "$stack" = local ] && ! $pulumi stack --show-name >/dev/null 2>&1; then $pulumi stack select local; fi
