#!/bin/bash
# The whole story on this machine, with the commands that a user types: up, train, logs, get, destroy.
# Whatever happens on the way, Ctrl-C or a closed terminal included, the stack is destroyed at the end.
set -euo pipefail
unset PULUMI_BACKEND_URL  # a team's stack of that name is no demo's to destroy
cd "$(dirname "$0")/.."
export PULUMI_STACK=${STACK:-demo}
job=demo_$(date -u +%Y%m%d_%H%M%S)

if [ -e ".scaletier/$PULUMI_STACK" ]; then
  echo "demo: stack $PULUMI_STACK is up already: \`pulumi destroy --stack $PULUMI_STACK\` first, or \`make demo STACK=other\`" >&2
  exit 2
fi
make setup STACK="$PULUMI_STACK"
source .venv/bin/activate

held=$(pulumi stack export)
if [[ $held == *'"urn"'* ]]; then
  echo "demo: stack $PULUMI_STACK has resources already: \`pulumi destroy --stack $PULUMI_STACK\` first, or \`make demo STACK=other\`" >&2
  exit 2
fi
claimed=$(python -m infra.lxd.orphans --claimed "$PULUMI_STACK")
if [ -n "$claimed" ]; then
  echo "demo: stack $PULUMI_STACK has something on this machine already ($claimed): \`make demo STACK=other\` leaves it alone" >&2
  exit 2
fi

# What this stack has on this machine, and what no stack known here has, one a line.
list_leftovers() {
  local found
  found=$(python -m infra.lxd.orphans "$PULUMI_STACK") || return
  [ -z "$found" ] || printf '%s\n' "${found//; /$'\n'}" | sort
}
strangers=$(list_leftovers)

run() {
  printf '\n$ %s\n' "$*"
  "$@"
}

print_next() {
  cat <<'END'

Next, in a stack of your own:
  make setup                       # the stack `local`; all else is there
  source .venv/bin/activate
  pulumi up                        # the hosts
  fab train -- --max-steps 500     # a job, followed to its end; Ctrl-C leaves it running
  fab logs                         # what its replicas print
  fab get                          # its output: checkpoints, summaries, the exported model
  pulumi config set forceDestroy true && pulumi up    # if what is in the bucket may go too
  pulumi destroy
END
}

destroy() {
  status=$?
  trap '' INT TERM HUP PIPE
  echo 2>/dev/null || exec >/dev/null 2>&1  # the terminal is closed
  pulumi config rm disruptJobs || true
  [ "$status" = 0 ] || pulumi cancel --yes --non-interactive >/dev/null 2>&1 || true  # a killed Pulumi's lock
  pulumi config rm forceDestroy || true  # the last `pulumi up` counts
  run pulumi destroy --yes --skip-preview --non-interactive
  leftovers=$(list_leftovers)
  leftovers=$(comm -13 <(printf '%s\n' "$strangers") <(printf '%s\n' "$leftovers"))
  if [ -n "$leftovers" ]; then
    echo "demo: destroy left behind: ${leftovers//$'\n'/; }" >&2
    exit 1
  fi
  echo "Nothing is left: no instance, volume, network, nft table or process of the stack."
  [ "$status" != 0 ] || print_next
  exit "$status"
}
trap destroy EXIT
trap 'exit 130' INT TERM
trap 'exit 129' HUP PIPE

pulumi config set forceDestroy true  # what the demo trains is its own
pulumi config set disruptJobs true   # Ctrl-C destroys it while its job runs

run pulumi up --yes --skip-preview --non-interactive
run fab train --job "$job" -- --model cnn --max-steps "${STEPS:-600}"
run fab describe "$job"
run fab logs master-0 --lines 15
run fab get "$job" --dest ".cache/$job"
accuracy=$(fab logs master-0 --job "$job" --lines 1000 | sed -n 's/.*Final metrics after .* accuracy: //p' | tail -1)
echo
echo "Accuracy on the 10,000 test images: ${accuracy:-none}"
if ! awk -v accuracy="${accuracy:-0}" 'BEGIN { exit !(accuracy >= 0.97) }'; then
  echo "demo: the accuracy is below 0.97" >&2
  exit 1
fi
