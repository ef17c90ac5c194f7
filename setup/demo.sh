#!/bin/bash
# The whole story on this machine, with the commands that a user types: up, train, logs, destroy.
# Whatever happens on the way, Ctrl-C included, the stack is destroyed at the end.
set -euo pipefail
root=$(dirname "$(dirname "$(readlink -f "$0")")")
cd "$root"
export PULUMI_STACK=${STACK:-local}
source .venv/bin/activate
job=demo_$(date -u +%Y%m%d_%H%M%S)

if [ -e ".scaletier/$PULUMI_STACK" ]; then
  echo "demo: stack $PULUMI_STACK is up already: \`pulumi destroy\` it first, or \`make demo STACK=demo\`" >&2
  exit 2
fi

run() {
  printf '\n$ %s\n' "$*"
  "$@"
}

destroy() {
  status=$?
  trap '' INT TERM
  run pulumi destroy --yes --skip-preview --non-interactive
  leftovers=$(python -m infra.lxd.leftovers "$PULUMI_STACK")
  if [ -n "$leftovers" ]; then
    echo "demo: destroy left behind: $leftovers" >&2
    exit 1
  fi
  echo "Nothing is left: no instance, volume, network, nft table or process of the stack."
  exit "$status"
}
trap destroy EXIT
trap 'exit 130' INT TERM

run pulumi up --yes --skip-preview --non-interactive
run fab train --job "$job" -- --model cnn --max-steps "${STEPS:-2000}"
run fab describe "$job"
run fab logs master-0 --lines 15
accuracy=$(fab logs master-0 --job "$job" --lines 1000 | sed -n 's/.*Final metrics after .* accuracy: //p' | tail -1)
echo
echo "Accuracy on the 10,000 test images: ${accuracy:-none}"
if ! awk -v accuracy="${accuracy:-0}" 'BEGIN { exit !(accuracy >= 0.97) }'; then
  echo "demo: the accuracy is below 0.97" >&2
  exit 1
fi
