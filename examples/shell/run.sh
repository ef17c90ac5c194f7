#!/bin/sh
# Any program can be a job: this one counts the words of its arguments and writes the sum.
set -eu
count=$(printf '%s\n' "$@" | wc -w)
echo "$TYPE $INDEX counted $count words"
echo "$count" >"$JOB_DIR/count.txt"
