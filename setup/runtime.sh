#!/bin/sh
# The hosts' Python with TensorFlow, as a folder that local hosts mount.
set -eu
cd "$(dirname "$0")/.."
part=runtime
. setup/common.sh

progress runtime --match '^Collecting (\S+)' --total "$(grep -c == constraints.txt)" -- .venv/bin/python -m infra.runtime
