#!/bin/sh
# The stack $STACK, with a passphrase of its own. It is selected where it is `local` and nothing else is.
set -eu
cd "$(dirname "$0")/.."
part=stack
. setup/common.sh
stack=${STACK:-local}
pulumi=.venv/bin/pulumi

alone
. setup/state.sh
if ! own_state; then
  why=$($pulumi stack select "$stack" --non-interactive 2>&1) ||
    fail "${why##*error: } in $PULUMI_BACKEND_URL (PULUMI_BACKEND_URL): make one as docs/team.md says"
  why=$($pulumi stack output --json --show-secrets --non-interactive 2>&1 >/dev/null) ||
    fail "$(.venv/bin/python -m infra.backend "$why")"
  say "$stack of $PULUMI_BACKEND_URL is selected"
  exit 0
fi
mkdir -p .pulumi-state
if [ ! -s .pulumi-state/passphrase ]; then
  sealed=$(stacks | paste -sd ' ' -)
  if [ -z "$sealed" ]; then
    (umask 077; head -c 24 /dev/urandom | base64 >.pulumi-state/passphrase)
  elif [ -z "${PULUMI_CONFIG_PASSPHRASE:-}" ] && [ ! -s "${PULUMI_CONFIG_PASSPHRASE_FILE:-}" ]; then
    fail ".pulumi-state/passphrase is missing, and stack $sealed cannot be read without it: put it back"
  fi
fi
choose_passphrase
if [ -f "Pulumi.$stack.yaml" ] && stacks | grep -qxF "$stack"; then
  unchanged "$stack is there"
else
  made=$($pulumi stack init --no-select "$stack" 2>&1) || fail "$made"
  say "made $stack"
fi
# The selection is this user's, by path.
if [ "$stack" = local ] && ! $pulumi stack --show-name >/dev/null 2>&1; then $pulumi stack select local; fi
