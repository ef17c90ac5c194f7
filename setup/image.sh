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
# Of a user's environment, Ansible refuses a locale that this machine lacks, or that is not UTF-8, and a home that it cannot write.
unset $(env | sed -n 's/^\(ANSIBLE_[A-Z_]*\)=.*/\1/p')
export PATH="$bin:$PATH:/usr/sbin:/sbin" LC_ALL=C.UTF-8 ANSIBLE_CONFIG=ansible.cfg ANSIBLE_HOME="$cache/ansible"
set -- ansible-playbook image.yml -e "cache='$cache'" -i localhost,
cd ansible
total=$("$@" --list-tasks 2>/dev/null | grep -c '^      .*TAGS:' || true)
progress image --match 'TASK \[(.*)\]' --total "$total" -- nice -n 5 "$@"
cd ..
imported=$("$bin/python" -m infra.lxd.image import "$cache")
finish "made ${imported%% *}"
