#!/bin/sh
# LXD for the hosts, with a storage pool of the project's own. The user's own LXD or Incus is used if it answers; else
# Debian's packages are installed, and started by hand where systemd is not process 1.
# lxd.sh up | down: down stops what up started by hand, and removes the pool that up made.
set -eu
root=$(dirname "$(dirname "$(readlink -f "$0")")")
cache=$root/.cache/lxd
pool=scaletier
tools="nftables squashfs-tools mmdebstrap btrfs-progs python3"
daemon="lxd lxd-client lxd-tools lxcfs dnsmasq-base attr acl rsync uidmap"
python=$root/.venv/bin/python

say() { echo "lxd: $*"; }

answers() { "$python" -m infra.lxd.api 2>/dev/null; }

need_root() {
  [ "$(id -u)" = 0 ] || { echo "lxd: $1 needs root: run \`sudo make lxd\`" >&2; exit 2; }
}

install() {
  missing=$(for package in "$@"; do dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || echo "$package"; done)
  [ -z "$missing" ] && return 0
  command -v apt-get >/dev/null || { echo "lxd: a tool is missing, and this is not Debian: install LXD (or Incus), nftables, squashfs-tools and mmdebstrap" >&2; exit 2; }
  need_root "installing $missing"
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
    mkdir -p "$cache"
    echo "$file $(cat "$file")" >>"$cache/limits"
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
  group=$(getent group lxd >/dev/null && echo lxd || echo root)
  setsid lxd --group "$group" --logfile "$cache/lxd.log" >/dev/null 2>&1 </dev/null &
  echo $! >"$cache/lxd.pid"
  lxd waitready --timeout 60 || { echo "lxd: LXD did not start: see $cache/lxd.log" >&2; exit 1; }
}

up() {
  install $tools
  if ! answers; then
    install $daemon
    answers || start
  fi
  limits
  "$python" -m infra.lxd.pool make "$pool"
}

down() {
  # Where the pool stays somebody still needs the daemons.
  if answers && ! "$python" -m infra.lxd.pool remove "$pool"; then return 0; fi
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
  if [ -f "$cache/limits" ]; then
    while read -r file before; do echo "$before" >"$file"; done <"$cache/limits"
    say "the limits are what they were"
  fi
}

case "${1:-up}" in
  up) up ;;
  down) down ;;
  *) echo "lxd: say up or down" >&2; exit 2 ;;
esac
