#!/bin/sh
# LXD for the hosts, with a storage pool of the project's own. The user's own LXD or Incus is used if it answers; else
# Debian's packages are installed, and started by hand where systemd is not process 1.
# lxd.sh system | up | down: `system` does what root alone can, `up` that where it is missing, and the pool; `down` stops what was
# started by hand, and removes the pool and the limits that were set: where root did any of that, root alone.
set -eu
cd "$(dirname "$0")/.."
part=lxd
. setup/common.sh
cache=$root/.cache/lxd
pool=scaletier
sysctl=/etc/sysctl.d/60-scaletier.conf

limits() {
  low=$(low_limits)
  [ -n "$low" ] || return 0
  if [ "$(id -u)" != 0 ]; then
    say "the kernel's limits are too low for more than a dozen hosts: \`sudo setup/lxd.sh system\` raises them"
    return 0
  fi
  mkdir -p "$cache"
  for limit in $low; do
    file=/proc/sys/$(echo "${limit%%=*}" | tr . /)
    echo "$file $(cat "$file")" >>"$cache/limits"
    echo "${limit#*=}" >"$file"
  done
  if [ -d /run/systemd/system ] && [ -d /etc/sysctl.d ]; then echo "$low" >"$sysctl"; fi
  say "raised for 31 hosts:" $low
}

start() {
  if [ -d /run/systemd/system ]; then
    say "starting the service"
    systemctl start lxd
    return
  fi
  say "starting lxcfs and lxd by hand, for systemd is not process 1"
  # Killed daemons leave a mount behind that nothing can start over.
  if [ "$(LC_ALL=C stat -c %F /var/lib/lxcfs 2>&1 | grep -c 'not connected')" = 1 ]; then umount -l /var/lib/lxcfs; fi
  mkdir -p "$cache" /var/lib/lxcfs
  grep -q '^root:' /etc/subuid || echo root:1000000:1000000000 >>/etc/subuid
  grep -q '^root:' /etc/subgid || echo root:1000000:1000000000 >>/etc/subgid
  if ! mountpoint -q /var/lib/lxcfs; then
    setsid lxcfs /var/lib/lxcfs >"$cache/lxcfs.log" 2>&1 </dev/null 9<&- &
    echo $! >"$cache/lxcfs.pid"
  fi
  group=$(getent group lxd >/dev/null && echo lxd || echo root)
  setsid lxd --group "$group" --logfile "$cache/lxd.log" >/dev/null 2>&1 </dev/null 9<&- &
  echo $! >"$cache/lxd.pid"
  lxd waitready --timeout 60 || { echo "lxd: LXD did not start: see $cache/lxd.log" >&2; exit 1; }
}

system() {
  if [ "$(id -u)" = 0 ]; then mkdir -p "$cache"; owned "$cache"; fi
  if ! answers && refuses; then fail "no right to LXD's socket: be root, or \`sudo usermod -aG lxd \$USER\` and log in again"; fi
  needed=$(missing_tools)
  answers || needed="$needed $(missing_daemon)"
  needed=$(echo $needed)
  if [ -n "$needed" ]; then
    may_install || fail "install $needed first$(command -v apt-get >/dev/null && echo ': `sudo setup/lxd.sh system` does')"
    apt $needed
  fi
  if ! answers; then
    [ "$(id -u)" = 0 ] || fail "LXD does not run: \`sudo setup/lxd.sh system\` starts it"
    start
  fi
  limits
  if [ "$(id -u)" = 0 ]; then owned "$cache"; fi
}

up() {
  system
  made=$(.venv/bin/python -m infra.lxd.pool make "$pool")
  case $made in *"is there") unchanged "${made#lxd: }" ;; *) finish "${made#lxd: }" ;; esac
}

down() {
  # If the pool stays, the daemons are still needed.
  if answers && ! .venv/bin/python -m infra.lxd.pool remove "$pool"; then return 0; fi
  if [ "$(id -u)" != 0 ]; then
    for file in "$cache"/*.pid "$cache/limits"; do
      [ ! -e "$file" ] || fail "root started LXD or raised the kernel's limits here: \`sudo setup/lxd.sh down\` first"
    done
  fi
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
    rm -f "$sysctl" "$cache/limits"
    say "the limits are what they were"
  fi
}

alone lxd
case "${1:-up}" in
  system | up | down) "${1:-up}" ;;
  *) fail "say system, up or down" ;;
esac
