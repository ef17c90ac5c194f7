#!/bin/sh
# .venv with what `pulumi up`, `fab` and `make image` need, in the versions of constraints.txt. `venv.sh train` adds what training on
# this machine needs, `venv.sh dev` what the tests do.
set -eu
cd "$(dirname "$0")/.."
part=venv
. setup/common.sh
extra=${1:-image}
recipe=$(cat pyproject.toml constraints.txt setup/*.txt trainer/requirements.txt hosts/serving/requirements.txt hosts/tuner/requirements.txt | cksum)
stamp=.venv/.$extra

# compile_checkout: bytecode of this checkout's packages, for an environment that writes none; what is compiled stays if it fits.
compile_checkout() {
  [ -O "$root" ] || return 0
  set --
  for package in */__init__.py; do set -- "$@" "${package%/*}"; done
  .venv/bin/python -m compileall -q fabfile.py "$@"
}

# made_here: false if .venv is of another version than PYTHON, or comes from another folder, by `cp` or `mv` of the checkout: its
# programs name that folder.
made_here() {
  [ ! -L .venv ] || return 0 # another checkout's, shared on purpose
  [ -z "${PYTHON:-}" ] || [ "$("$PYTHON" -V 2>&1)" = "$(.venv/bin/python -V 2>&1)" ] || return 1
  case $(grep '^command = ' .venv/pyvenv.cfg 2>/dev/null) in '' | *" $root/.venv") return 0 ;; esac
  return 1
}

alone
if [ -x .venv/bin/python ] && made_here && [ "$(cat "$stamp" 2>/dev/null)" = "$recipe" ]; then
  compile_checkout
  exit 0
fi
# It is of another folder, or missing, or was left half made.
if ! made_here || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  if ! find_python; then
    may_install || fail "install Python 3.11, 3.12 or 3.13 with its venv module first, or say where it is: make PYTHON=…"
    apt python3 python3-venv
    find_python || fail "the Python of this system is none of 3.11 to 3.13: install one, then make PYTHON=…"
  fi
  "$python" -m venv --clear .venv # with the stamps of its packages
fi
case $extra in
  image) what="the packages that pulumi up and fab need" ;;
  train) what="TensorFlow" ;;
  dev) what="TensorFlow and what the tests need" ;;
  *) fail "there is no part $extra: say train or dev" ;;
esac
say "installing $what into .venv"
progress venv --match '^(?:Collecting|Requirement already satisfied:| *Downloading| *Building) (\S+)' -- \
  .venv/bin/python setup/packages.py "$extra"
.venv/bin/python -c 'import grpc' 2>/dev/null || fail "grpc does not load: the C++ library is missing (on Debian and Ubuntu: apt install libstdc++6)"
ln -sf ../../setup/pulumi.sh .venv/bin/pulumi
compile_checkout
echo "$recipe" >"$stamp"
finish "installed $what"
