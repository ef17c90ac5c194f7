#!/bin/sh
# The library's own tests by each TensorFlow that it knows, with the first and the last Keras that it knows with that, each in an
# environment of its own that stays in .cache/versions.
set -eu
cd "$(dirname "$0")/.."
part=versions
. setup/common.sh
list='from scaletier.private import VERSIONS; print(*(f"{one}/{every[at]}" for one, every in VERSIONS.items() for at in (0, -1)))'
for pair in $(.venv/bin/python -c "$list"); do
  version=${pair%/*} keras=${pair#*/}
  folder=.cache/versions/$version-$keras python=$folder/bin/python
  if ! "$python" -c 'import tensorflow' 2> /dev/null; then
    .venv/bin/python -m venv "$folder"
    "$python" -m pip install --quiet --disable-pip-version-check "tensorflow-cpu==$version.*" "keras==$keras.*" pytest pytest-timeout hypothesis
  fi
  echo "versions: TensorFlow $version, Keras $keras"
  PYTHONPATH=. "$python" -m pytest -q -o addopts="-p no:cacheprovider" -o filterwarnings= tests/unit/test_scaletier_private.py \
    tests/unit/test_scaletier_parts.py tests/unit/test_scaletier_compiled.py tests/unit/test_scaletier_numbers.py
done
