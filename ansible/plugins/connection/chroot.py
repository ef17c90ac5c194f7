"""Ansible connection into a root file system on this machine, by chroot(8). Needs root.

The inventory host's address is the folder. Ansible's core has no such connection, and the collection that has one is
a hundred times this size.
"""

import os
import shutil
import subprocess
from pathlib import Path

from ansible.plugins.connection import ConnectionBase

DOCUMENTATION = """
name: chroot
short_description: run tasks in a root file system on this machine
description: Runs each command by chroot(8) in the folder that the inventory names.
options:
  remote_addr:
    description: The folder.
    default: inventory_hostname
    vars:
      - name: inventory_hostname
      - name: ansible_host
"""


class Connection(ConnectionBase):
    """Commands run with a clean environment; files are copied into the folder."""

    transport = "chroot"
    has_pipelining = True
    has_tty = False

    def _connect(self):
        self.root = os.path.realpath(self.get_option("remote_addr"))
        self._connected = True
        return self

    def exec_command(self, cmd, in_data=None, sudoable=False):
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"}
        done = subprocess.run(["chroot", self.root, "/bin/sh", "-c", cmd], input=in_data, capture_output=True, env=environment)
        return done.returncode, done.stdout, done.stderr

    def _inside(self, path):
        return Path(self.root, os.path.normpath(path).lstrip("/"))

    def put_file(self, in_path, out_path):
        super().put_file(in_path, out_path)
        shutil.copyfile(in_path, self._inside(out_path))

    def fetch_file(self, in_path, out_path):
        super().fetch_file(in_path, out_path)
        shutil.copyfile(self._inside(in_path), out_path)

    def close(self):
        self._connected = False
