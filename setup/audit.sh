#!/bin/sh
# Check the pinned versions for known vulnerabilities by pip-audit and PyPI; a version without data counts as vulnerable.
set -eu
cd "$(dirname "$0")/.."
part=audit
. setup/common.sh
if [ ! -x .cache/audit/bin/pip-audit ]; then
  .venv/bin/python -m venv .cache/audit
  .cache/audit/bin/pip install --quiet --disable-pip-version-check pip-audit
fi
exec .cache/audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt -r setup/constraints-dev.txt
