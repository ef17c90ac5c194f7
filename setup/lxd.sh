#!/bin/sh
# LXD for the hosts, with a storage pool of the project's own. The user's own LXD or Incus is used if it answers; else
# Debian's packages are installed, and started by hand where systemd is not process 1.
# lxd.sh up | down: down stops what up started by hand, and removes the pool that up made.
set -eu
root=$(dirname "$(dirname "$(readlink -f "$0")")")
cache=$root/.cache/lxd
pool=scaletier
packages="lxd lxd-client lxd-tools lxcfs dnsmasq-base nftables squashfs-tools attr acl rsync btrfs-progs uidmap mmdebstrap python3"
python=$root/.venv/bin/python

say() { echo "lxd: $*"; }

answers() {
  for socket in ${SCALETIER_LXD_SOCKET:-} /var/lib/lxd/unix.socket /var/snap/lxd/common/lxd/unix.socket /run/incus/unix.socket /var/lib/incus/unix.socket; do
    [ -S "$socket" ] && curl -fs -m 5 --unix-socket "$socket" http://host/1.0 >/dev/null 2>&1 && return 0
  done
  return 1
}

need_root() {
  [ "$(id -u)" = 0 ] || { echo "lxd: $1 needs root: run \`sudo make lxd\`" >&2; exit 2; }
}

install_packages() {
  missing=$(for package in $packages; do dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || echo "$package"; done)
  [ -z "$missing" ] && return 0
  command -v apt-get >/dev/null || { echo "lxd: no LXD or Incus answers, and this is not Debian: install LXD (or Incus), then try again" >&2; exit 2; }
  need_root "installing LXD"
  say "installing" $missing
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

# 31 hosts on one machine: without these, host 15 and on boots with no address and no word of why.
limits() {
  for limit in fs.inotify.max_user_instances=8192 fs.inotify.max_user_watches=1048576 kernel.keys.maxkeys=20000 kernel.keys.maxbytes=2000000; do
    file=/proc/sys/$(echo "${limit%%=*}" | tr . /)
    [ "$(cat "$file")" -ge "${limit#*=}" ] && continue
    need_root "raising ${limit%%=*}"
    echo "${limit#*=}" >"$file"
    say "${limit%%=*} is ${limit#*=} now, until the next restart of this machine"
  done
}

start() {
  need_root "starting LXD"
  if [ -d /run/systemd/system ]; then
    say "starting the service"
    systemctl start lxd
    return
  fi
  say "starting lxcfs and lxd by hand, for systemd is not process 1"
  # Killed daemons leave a mount behind that nothing can start over.
  if [ "$(stat -c %F /var/lib/lxcfs 2>&1 | grep -c 'not connected')" = 1 ]; then umount -l /var/lib/lxcfs; fi
  mkdir -p "$cache" /var/lib/lxcfs
  grep -q '^root:' /etc/subuid || echo root:1000000:1000000000 >>/etc/subuid
  grep -q '^root:' /etc/subgid || echo root:1000000:1000000000 >>/etc/subgid
  if ! mountpoint -q /var/lib/lxcfs; then
    setsid lxcfs /var/lib/lxcfs >"$cache/lxcfs.log" 2>&1 </dev/null &
    echo $! >"$cache/lxcfs.pid"
  fi
  setsid lxd --group root --logfile "$cache/lxd.log" >/dev/null 2>&1 </dev/null &
  echo $! >"$cache/lxd.pid"
  lxd waitready --timeout 60 || { echo "lxd: LXD did not start: see $cache/lxd.log" >&2; exit 1; }
}

up() {
  if answers; then
    command -v mmdebstrap >/dev/null && command -v nft >/dev/null && command -v mksquashfs >/dev/null && [ -x /usr/bin/python3 ] || install_packages
  else
    install_packages
    answers || start
  fi
  limits
  "$python" -m infra.lxd.pool make "$pool"
}

down() {
  if answers; then "$python" -m infra.lxd.pool remove "$pool"; fi
  for daemon in lxd lxcfs; do
    [ -f "$cache/$daemon.pid" ] || continue
    pid=$(cat "$cache/$daemon.pid")
    if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$daemon" ]; then
      say "stopping $daemon, which set-up started"
      kill "$pid"
      while kill -0 "$pid" 2>/dev/null; do sleep 0.2; done
    fi
    rm -f "$cache/$daemon.pid"
  done
}

case "${1:-up}" in
  up) up ;;
  down) down ;;
  *) echo "lxd: say up or down" >&2; exit 2 ;;
esac
