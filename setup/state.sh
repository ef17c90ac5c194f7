# Find Pulumi's state and its passphrase, as infra/backend.py does; `root` is the checkout, `part` the prefix of messages.

# own_state: true if the state in use is the checkout's own.
own_state() {
  case ${PULUMI_BACKEND_URL:-} in
    '') return 0 ;;
    file://*) folder=${PULUMI_BACKEND_URL#file://} ;;
    *) return 1 ;;
  esac
  folder=${folder%%\?*}
  case $folder in '~'*) folder=$HOME${folder#\~} ;; esac
  folder=$(cd "$folder" 2>/dev/null && pwd -P) && [ "$folder" = "$root/.pulumi-state" ]
}

# choose_passphrase: prefer the checkout's own to another in the environment, with a note; none is ever empty.
choose_passphrase() {
  own_state || return 0
  own=$root/.pulumi-state/passphrase
  if [ -s "$own" ]; then
    unused=''
    if [ -n "${PULUMI_CONFIG_PASSPHRASE+set}" ]; then
      [ "$PULUMI_CONFIG_PASSPHRASE" = "$(cat "$own")" ] || unused=PULUMI_CONFIG_PASSPHRASE
    elif [ -n "${PULUMI_CONFIG_PASSPHRASE_FILE:-}" ]; then
      cmp -s "$PULUMI_CONFIG_PASSPHRASE_FILE" "$own" || unused=PULUMI_CONFIG_PASSPHRASE_FILE
    fi
    [ -z "$unused" ] || echo "$part: $unused is not used: the stacks of this checkout have the passphrase in .pulumi-state/passphrase" >&2
  elif [ -n "${PULUMI_CONFIG_PASSPHRASE:-}" ] || [ -s "${PULUMI_CONFIG_PASSPHRASE_FILE:-}" ]; then
    return 0
  elif [ -e "$own" ]; then
    echo "$part: .pulumi-state/passphrase is empty: put the passphrase back" >&2
    exit 2
  fi
  unset PULUMI_CONFIG_PASSPHRASE
  PULUMI_CONFIG_PASSPHRASE_FILE=$own
  export PULUMI_CONFIG_PASSPHRASE_FILE
}
