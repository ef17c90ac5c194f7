#!/bin/sh
# `pulumi` of this checkout, linked into .venv/bin: the project's Python, no account, no question for a passphrase.
# It runs the user's own Pulumi, or the one that set-up built.
root=$(dirname "$(dirname "$(readlink -f "$0")")")
cli=
if [ -x "$root/.cache/pulumi/pulumi" ]; then
  cli=$root/.cache/pulumi/pulumi
else
  IFS=:
  for folder in $PATH "$HOME/.pulumi/bin"; do
    [ -x "$folder/pulumi" ] || continue
    case $(readlink -f "$folder/pulumi") in
      */setup/pulumi.sh) ;; # this script, or another checkout's
      *) cli=$folder/pulumi; break ;;
    esac
  done
  unset IFS
fi
if [ -z "$cli" ]; then
  echo "pulumi: not found: make it with \`make pulumi\`" >&2
  exit 2
fi
if [ -z "${PULUMI_CONFIG_PASSPHRASE+set}${PULUMI_CONFIG_PASSPHRASE_FILE:-}" ]; then
  PULUMI_CONFIG_PASSPHRASE_FILE=$root/.pulumi-state/passphrase
  export PULUMI_CONFIG_PASSPHRASE_FILE
fi
# The provider for Google Cloud is fetched for whoever has a stack there; Pulumi would fetch it for everybody.
if ! grep -qs '^ *scaletier:target: *"*gcp' "$root"/Pulumi.*.yaml; then
  export PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION="${PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION:-true}"
fi
PATH="$root/.venv/bin:$(dirname "$cli"):$PATH"
export PATH PULUMI_SKIP_UPDATE_CHECK="${PULUMI_SKIP_UPDATE_CHECK:-true}"
exec "$cli" "$@"
