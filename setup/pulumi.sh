#!/bin/sh
# `pulumi` of this checkout, linked into .venv/bin: the project's Python, no account, and for stacks of this machine no question
# for a passphrase. Those of a team, whose state is at PULUMI_BACKEND_URL, have secrets of their own kind.
# It runs the CLI that set-up chose: the user's own Pulumi, or the one in .cache/pulumi.
self=$0
while [ -L "$self" ]; do
  link=$(readlink "$self")
  case $link in /*) self=$link ;; *) self=$(dirname "$self")/$link ;; esac
done
root=$(unset CDPATH && cd "$(dirname "$self")/.." && pwd -P)
cli=$(cat "$root/.cache/pulumi/cli" 2>/dev/null || echo "$root/.cache/pulumi/pulumi")
if [ ! -x "$cli" ]; then
  echo "pulumi: $cli is not there: run \`make pulumi\`" >&2
  exit 2
fi
part=pulumi
. "$root/setup/state.sh"
choose_passphrase
# The program runs in another folder than its user.
case "${PULUMI_BACKEND_URL:-} $* " in
  *" -C "* | *" --cwd"* | file:///* | file://'~'*) ;;
  file://*) PULUMI_BACKEND_URL=file://$(pwd)/${PULUMI_BACKEND_URL#file://} ;;
esac
# The provider for Google Cloud is fetched for whoever has a stack there; Pulumi would fetch it for everybody. What it makes is made
# elsewhere, so as much as possible is made at once, whatever processors there are here.
if grep -qs '^ *scaletier:target: *"*gcp' "$root"/Pulumi.*.yaml; then
  export PULUMI_PARALLEL="${PULUMI_PARALLEL:-64}"
else
  export PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION="${PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION:-true}"
fi
PATH="$root/.venv/bin:$(dirname "$cli"):$PATH"
export PATH PULUMI_SKIP_UPDATE_CHECK="${PULUMI_SKIP_UPDATE_CHECK:-true}"
exec "$cli" "$@"
