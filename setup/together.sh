#!/bin/sh
# together.sh MAKE …: makes parts of set-up side by side. A terminal shows a line for each; elsewhere each writes a line a minute.
set -eu
cd "$(dirname "$0")/.."
part=setup
. setup/common.sh
if [ -t 1 ] && [ "${TERM:-dumb}" != dumb ] && find_python; then exec "$python" setup/progress.py --board -- "$@"; fi
SETUP_LINE_SECONDS=60 exec "$@"
