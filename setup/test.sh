#!/bin/bash
# All tests, in two lanes of about one length. Those on hosts wait for hosts most of the time: all others run beside them, and are
# shown after them.
set -euo pipefail
cd "$(dirname "$0")/.."
pytest=".venv/bin/pytest --durations=25 --durations-min=10"
log=.cache/test.log
(
  trap 'kill $! 2>/dev/null; exit 1' TERM
  code=0
  for parts in tests/contract "tests/simulation tests/stack tests/unit" tests/rehearsal; do
    $pytest $parts & wait $! || code=$?
  done
  exit $code
) >$log 2>&1 &
others=$!
trap 'kill $others 2>/dev/null || true' EXIT
code=0
$pytest tests/e2e || code=$?
wait $others || code=$?
cat $log
exit $code
