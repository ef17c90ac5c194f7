#!/bin/sh
# MNIST as TFRecords, checked by hash.
set -eu
cd "$(dirname "$0")/.."
part=data
. setup/common.sh
alone
there=$([ ! -e .cache/mnist/manifest.json ] || echo yes)

progress data -- .venv/bin/python -m trainer.records --dest .cache/mnist
made=$(tail -n 1 .cache/data.log)
if [ -n "$there" ]; then unchanged "$made"; else finish "MNIST is in .cache/mnist"; fi
