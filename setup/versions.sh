#!/bin/sh
# The library's own tests by each TensorFlow that it knows, each in an environment of its own that stays in .cache/versions.
set -eu
cd "$(dirname "$0")/.."
part=versions
. setup/common.sh
for version in $(.venv/bin/python -c 'from scaletier.private import VERSIONS; print(*VERSIONS)'); do
  python=.cache/versions/$version/bin/python
  keras=$(.venv/bin/python -c "from scaletier.private import VERSIONS as v; print(*(v['$version'][at] for at in (0, -1)), sep=',<=')")
  if ! "$python" -c 'import tensorflow' 2> /dev/null; then
    .venv/bin/python -m venv ".cache/versions/$version"
    "$python" -m pip install --quiet --disable-pip-version-check "tensorflow-cpu==$version.*" "keras>=$keras.99" pytest pytest-timeout hypothesis
  fi
  echo "versions: TensorFlow $version"
  PYTHONPATH=. "$python" -m pytest -q -o addopts="-p no:cacheprovider" -o filterwarnings= tests/unit/test_scaletier_private.py \
    tests/unit/test_scaletier_parts.py tests/unit/test_scaletier_compiled.py tests/unit/test_scaletier_numbers.py
done
