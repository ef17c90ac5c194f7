#!/bin/bash
# All tests, in three lanes of about one length. Those on hosts wait for hosts most of the time: all others run beside them, and are
# shown after them.
set -euo pipefail
cd "$(dirname "$0")/.."
pytest=".venv/bin/pytest --durations=25 --durations-min=10"
pids=() logs=()

# A lane: the name of its log, and the arguments of one pytest after the other.
beside() {
  local log=.cache/test-$1.log
  shift
  (
    trap 'kill $! 2>/dev/null; exit 1' TERM
    code=0
    for parts; do
      $pytest $parts & wait $! || code=$?
    done
    exit $code
  ) >$log 2>&1 &
  pids+=($!) logs+=($log)
}

beside here tests/contract "tests/simulation tests/stack tests/unit" tests/processes
beside rehearsal tests/rehearsal
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
code=0
$pytest tests/e2e || code=$?
for lane in "${!pids[@]}"; do
  wait "${pids[$lane]}" || code=$?
  cat "${logs[$lane]}"
done
exit $code
