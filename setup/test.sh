#!/bin/sh
# test.sh ARGUMENT …: sets up what the tests need by the command in $SET_UP, then runs them by tests/run.py with these arguments.
set -eu
cd "$(dirname "$0")/.."
part=test
. setup/common.sh
# A team's state is no place for the stacks of tests, another checkout's code is not what they test, and none is left out.
unset PULUMI_BACKEND_URL PYTHONPATH MYPYPATH SCALETIER_PROJECT PYTEST_ADDOPTS PYTEST_PLUGINS
unset $(git rev-parse --local-env-vars 2>/dev/null) # in a git hook these name its repository, and the tests make others
lock=.cache/tests/lock
if [ -e "$lock" ] && ! flock -n "$lock" true; then exec .venv/bin/python tests/run.py "$@"; fi # which reports the holder
trap 'echo "test: stopped in set-up; call it again to go on" >&2; exit 130' INT
setup/needs.sh
$SET_UP
exec .venv/bin/python tests/run.py "$@"
