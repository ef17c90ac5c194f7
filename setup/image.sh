#!/bin/sh
# The hosts' image, by Ansible, as root: it makes a root file system.
set -eu
cd "$(dirname "$0")/.."
part=image
. setup/common.sh
bin=$root/.venv/bin
cache=$root/.cache/image

if found=$("$bin/python" -m infra.lxd.image); then say "$found"; exit 0; fi
[ "$(id -u)" = 0 ] || fail "root makes it: \`sudo setup/image.sh\`"
say "Ansible is making it (about a minute, once)"
mkdir -p "$cache"
export PATH="$bin:$PATH:/usr/sbin:/sbin" ANSIBLE_CONFIG=ansible.cfg
set -- ansible-playbook image.yml -e "cache='$cache'" -i localhost,
cd ansible
total=$("$@" --list-tasks 2>/dev/null | grep -c '^      .*TAGS:' || true)
progress image --match 'TASK \[(.*)\]' --total "$total" -- "$@"
cd ..
owned "$cache" "$root/.cache/image.log"
imported=$("$bin/python" -m infra.lxd.image import "$cache")
say "$imported"
