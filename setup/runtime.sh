#!/bin/sh
# The hosts' Python with TensorFlow, as a folder that local hosts mount. Go's build of Pulumi beside it takes longest, and goes first.
set -eu
cd "$(dirname "$0")/.."
part=runtime
. setup/common.sh
alone
there=$(ls -d .cache/hosts/runtime-*/ 2>/dev/null || true)

progress runtime --match '^ Downloaded (\S+)' -- nice -n 5 .venv/bin/python -m infra.runtime
made=$(tail -n 1 .cache/runtime.log)
case $there in *"${made##*/}"/*) unchanged "${made##*/} is there" ;; *) finish "the hosts' Python is made" ;; esac
