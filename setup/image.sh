#!/bin/sh
# The hosts' image, by Ansible, as root: it makes a root file system.
set -eu
cd "$(dirname "$0")/.."
part=image
. setup/common.sh
bin=$root/.venv/bin
cache=$root/.cache/image

alone image
if found=$("$bin/python" -m infra.lxd.image); then unchanged "$found"; exit 0; fi
[ "$(id -u)" = 0 ] || fail "root makes it: \`sudo setup/image.sh\`"
say "making the image by Ansible"
mkdir -p "$cache"
trap 'owned "$cache"*' EXIT # also if it fails
trap 'exit 130' INT
export PATH="$bin:$PATH:/usr/sbin:/sbin" ANSIBLE_CONFIG=ansible.cfg
set -- ansible-playbook image.yml -e "cache='$cache'" -i localhost,
cd ansible
total=$("$@" --list-tasks 2>/dev/null | grep -c '^      .*TAGS:' || true)
progress image --match 'TASK \[(.*)\]' --total "$total" -- nice -n 5 "$@"
cd ..
imported=$("$bin/python" -m infra.lxd.image import "$cache")
finish "made ${imported%% *}"
