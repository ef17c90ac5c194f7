# Functions that the scripts of set-up share; each script sets its part's name first: part=lxd; . setup/common.sh. Plain sh and
# tools that macOS has too, except in scripts that are for local hosts only.
root=$(pwd -P)
umask 022 # the hosts' users read what is made here
least_pulumi=3.250.0
export PIP_USER=0 # a user's setting for pip outside of environments, which fails in each
unset PIP_PREFIX PIP_ROOT PIP_TARGET UV_NO_INSTALLER_METADATA

began=$(date +%s)

say() { echo "$part: $*"; }

# finish TEXT: print what was made, and the seconds it took.
finish() {
  seconds=$(($(date +%s) - began))
  minutes=$((seconds / 60))
  say "$*, $([ "$minutes" = 0 ] || echo "$minutes min ")$((seconds % 60)) s"
}

# unchanged TEXT: print that there is nothing to do, except while several parts are made in parallel.
unchanged() { [ -n "${SETUP_LINE_SECONDS:-}" ] || say "$*"; }

fail() { echo "$part: $*" >&2; exit 2; }

# The stacks whose state is in this checkout, compressed or not; Pulumi keeps older states of one beside it, as .bak.
stacks() {
  for state in .pulumi-state/.pulumi/stacks/scaletier/*.json .pulumi-state/.pulumi/stacks/scaletier/*.json.gz; do
    [ ! -e "$state" ] || basename "${state%.gz}" .json
  done
}

# owned PATH …: give what root creates in .cache to the checkout's owner, who can then remove it.
owned() {
  owner=$(ls -ldn "$root" | awk '{ print $3 ":" $4 }')
  chown "$owner" "$root/.cache"
  chown -R "$owner" "$@"
}
[ -O "$root" ] || export PYTHONDONTWRITEBYTECODE=1

# Sets `python` to what can make .venv: PYTHON, or the first of 3.11 to 3.13.
find_python() {
  if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3.11 python3.12 python3.13 python3; fi
  for python; do
    "$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && return 0
  done
  return 1
}

# progress LOG [--match PATTERN --total N] -- COMMAND …: shows how far it is, if there is a Python; its output is in .cache/LOG.log.
progress() {
  log=$root/.cache/$1.log
  shift
  runner=$root/.venv/bin/python
  if [ ! -x "$runner" ]; then
    if ! find_python; then
      while [ "$1" != -- ]; do shift; done
      shift
      "$@" 9<&-
      return
    fi
    runner=$python
  fi
  "$runner" "$root/setup/progress.py" "$part" --log "$log" "$@"
}

# newer A B: true where version A, such as 3.250.0, is B or later.
newer() {
  echo "$1 $2" | awk '{ n = split($1, a, /[^0-9]+/); split($2, b, /[^0-9]+/)
    for (i = 1; i <= 3; i++) if (a[i] + 0 != b[i] + 0) exit a[i] + 0 < b[i] + 0 }'
}

# The file that a link leads to in the end: macOS's readlink follows one link only.
real() {
  path=$1
  while [ -L "$path" ]; do
    link=$(readlink "$path")
    case $link in /*) path=$link ;; *) path=$(dirname "$path")/$link ;; esac
  done
  echo "$path"
}

# Sets `own` to the user's own Pulumi where that is new enough; else `old` to what is there.
find_own() {
  own='' old=''
  IFS=:
  for folder in $PATH "${HOME:-}/.pulumi/bin"; do
    [ -x "$folder/pulumi" ] || continue
    case $(real "$folder/pulumi") in */setup/pulumi.sh) continue ;; esac # a checkout's wrapper, which is called pulumi too
    found=$("$folder/pulumi" version 2>/dev/null) || continue
    if newer "${found#v}" "$least_pulumi"; then own=$folder/pulumi; break; fi
    old="$found, $folder/pulumi"
  done
  unset IFS
  [ -n "$own" ]
}

recent_go() { command -v go >/dev/null && found=$(go env GOVERSION) && newer "${found#go}" "$1"; }

# LXD or Incus: `answers` is true where one does, `refuses` where one is there that this user has no right to.
sockets="${SCALETIER_LXD_SOCKET:-/var/lib/lxd/unix.socket /var/snap/lxd/common/lxd/unix.socket /run/incus/unix.socket /var/lib/incus/unix.socket}"

answers() {
  for socket in $sockets; do
    python3 -c 'import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])' "$socket" 2>/dev/null && return 0
  done
  return 1
}

refuses() {
  for socket in $sockets; do
    if [ -S "$socket" ] && [ ! -w "$socket" ]; then return 0; fi
  done
  return 1
}

# The packages of Debian whose tools are missing here.
missing_tools() {
  for tool in nft=nftables mksquashfs=squashfs-tools mmdebstrap=mmdebstrap mkfs.btrfs=btrfs-progs python3=python3; do
    PATH=$PATH:/usr/sbin:/sbin command -v "${tool%%=*}" >/dev/null || echo "${tool#*=}"
  done
}

# The packages of Debian that LXD is, and that are missing here.
missing_daemon() {
  for each in lxd lxd-client lxd-tools lxcfs dnsmasq-base attr acl rsync uidmap; do
    dpkg-query -W -f='${Status}' "$each" 2>/dev/null | grep -q 'ok installed' || echo "$each"
  done
}

# Limits of the kernel that are lower than 31 hosts need, as name=value: without them host 13 or so and on boots with no address
# and no word of why.
low_limits() {
  for limit in fs.inotify.max_user_instances=8192 fs.inotify.max_user_watches=1048576 kernel.keys.maxkeys=20000 kernel.keys.maxbytes=2000000; do
    file=/proc/sys/$(echo "${limit%%=*}" | tr . /)
    [ "$(cat "$file" 2>/dev/null || echo 0)" -ge "${limit#*=}" ] || echo "$limit"
  done
}

nft_path() { PATH=$PATH:/usr/sbin:/sbin command -v nft || echo /usr/sbin/nft; }

# True where the firewall between hosts can be set: by root, or by this user without a password.
firewall() { [ "$(id -u)" = 0 ] || sudo -n "$(nft_path)" list tables >/dev/null 2>&1; }

# alone [NAME]: waits while this checkout, or with a NAME any checkout of this machine, runs the same part of set-up, and keeps others
# waiting until this script and its commands end. Descriptor 9 is the lock: daemons are started without it. With SETUP_ALONE=NAME it
# takes none, as in tests of these scripts.
alone() {
  [ "${SETUP_ALONE:-}" != "${1:-.}" ] || return 0
  lock=${1:+/run/lock/scaletier-$1} whose=${1:+this or another} # a folder, as other users may lock it too
  mkdir -p "${lock:=$root/.cache/locks/$part}" 2>/dev/null && command -v flock >/dev/null || return 0
  exec 9<"$lock"
  flock -n 9 || { say "waiting for the set-up of ${whose:-this} checkout"; flock 9 || true; } # NFS may have none
}

# apt PACKAGE …: by root, on Debian and its kin; one part of set-up at a time.
apt() {
  say "installing $*"
  progress "$part-packages" --match '^(?:Unpacking|Setting up) (\S+)' -- flock "$root/setup" sh -c \
    'set -- -o DPkg::Lock::Timeout=600 "$@"; apt-get update -qq -o DPkg::Lock::Timeout=600 &&
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"' apt "$@"
}

may_install() { command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; }
