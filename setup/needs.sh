#!/bin/sh
# Print what set-up will do for local hosts and what it lacks, before it changes anything.
set -eu
cd "$(dirname "$0")/.."
part=setup
. setup/common.sh

[ "$(uname -s)" = Linux ] || fail "hosts on this machine need Linux; for hosts on Google Cloud: make cloud (docs/google-cloud.md)"
[ "$(uname -m)" = x86_64 ] || fail "hosts on this machine need an x86-64 one; for hosts on Google Cloud: make cloud (docs/google-cloud.md)"

# Everything that is missing is reported at once.
missing=''
lack() { missing="$missing
  $*"; }

packages=$(missing_tools)
start=''
if ! answers; then
  if refuses; then
    lack "the right to LXD's socket: sudo usermod -aG lxd \$USER, and log in again"
  else
    packages="$packages $(missing_daemon)" start="LXD started"
  fi
fi
packages=$(echo $packages)
system="$packages${packages:+${start:+, and }}$start"
if [ -n "$system" ] && [ "$(id -u)" != 0 ]; then lack "$system: sudo setup/lxd.sh system"; fi
if [ ! -x .venv/bin/python ] && ! find_python && ! may_install; then lack "Python 3.11, 3.12 or 3.13 with its venv module"; fi
if ! firewall; then
  lack "the firewall between hosts, which root sets at each pulumi up:"
  lack "  echo \"\$USER ALL=(root) NOPASSWD: $(nft_path)\" | sudo tee /etc/sudoers.d/scaletier"
fi
# LXD alone has an image that another checkout has made; the one here may be of an older recipe.
has_image() {
  image=.cache/image/image.squashfs
  [ ! -e $image ] || [ -n "$(find ansible -type f -newer $image ! -path '*/__pycache__/*')" ] || return 0
  .venv/bin/python -m infra.lxd.image >/dev/null 2>&1
}
if ! has_image && [ "$(id -u)" != 0 ]; then
  lack "the hosts' image, which root makes: make venv && sudo setup/image.sh"
fi
[ -z "$missing" ] || fail "nothing was done, for this is missing:$missing"

# will SECONDS TENTHS TEXT: adds up what is missing, in seconds of two usual processors and in tenths of a gigabyte.
todo='' seconds=0 tenths=0
will() {
  seconds=$((seconds + $1)) tenths=$((tenths + $2))
  shift 2
  todo="$todo
  $*"
}

minutes() { [ "$1" -le 60 ] && echo "a minute" || echo "$((($1 + 59) / 60)) minutes"; }

build=0
[ -z "$packages" ] || will 40 1 "packages of the system: $packages"
[ -z "$start" ] || will 0 0 "the hosts' storage pool: a file that grows to 40 GB at most; 8 GB must be free"
[ -x .venv/bin/python ] || will 10 5 "Python packages: 0.5 GB"
if [ ! -x .cache/pulumi/pulumi ] && ! find_own; then
  build=80
  will 10 1 "Pulumi: 0.1 GB if its download can be fetched, else built by Go, with 2.5 GB of Go's caches"
fi
has_image || will 30 2 "the hosts' image: 0.2 GB"
ls -d .cache/hosts/runtime-* >/dev/null 2>&1 || will 20 14 "the hosts' Python with TensorFlow: 1.4 GB"
[ -e .cache/mnist/manifest.json ] || will 5 1 "MNIST: 0.1 GB, by npm or from Google's storage"
[ -n "$todo" ] || exit 0
gigabytes() { echo "$(($1 / 10)).$(($1 % 10)) GB"; }
free=$(df -Pk . | awk 'NR == 2 { printf "%d", $4 * 1024 / 1e8 }')
[ "$free" -ge "$tenths" ] || fail "$(gigabytes "$tenths") are to be made here, and $PWD has $(gigabytes "$free") free: make room first"
time="in about $(minutes "$seconds")"
[ "$build" = 0 ] || time="$time, or $(minutes $((seconds + build))) if Pulumi is built"
say "to be made here, once, with the package registries: $(gigabytes "$tenths") $time, on two processors:$todo"
