#!/bin/sh
# Known holes in the versions that are pinned: pip-audit asks PyPI, and a version of which PyPI tells nothing counts as one.
set -eu
cd "$(dirname "$0")/.."
part=audit
. setup/common.sh
if [ ! -x .cache/audit/bin/pip-audit ]; then
  .venv/bin/python -m venv .cache/audit
  .cache/audit/bin/pip install --quiet --disable-pip-version-check pip-audit
fi
exec .cache/audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt -r setup/constraints-dev.txt
