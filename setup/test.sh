#!/bin/bash
# All tests, in two lanes of the same length. Those on hosts wait for hosts most of the time: all others run beside them, and are
# shown after them. Of the rehearsal, what needs no hosts can run beside what does.
set -euo pipefail
cd "$(dirname "$0")/.."
pytest=.venv/bin/pytest
log=.cache/test.log
interrupted=tests/rehearsal/test_interrupted.py
(
  trap 'kill $! 2>/dev/null; exit 1' TERM
  code=0
  for parts in tests/contract "tests/simulation tests/stack tests/unit" "tests/rehearsal --ignore=$interrupted"; do
    $pytest $parts & wait $! || code=$?
  done
  exit $code
) >$log 2>&1 &
others=$!
trap 'kill $others 2>/dev/null || true' EXIT
code=0
for part in tests/e2e $interrupted; do $pytest $part || code=$?; done
wait $others || code=$?
cat $log
exit $code
