"""`python -m benchmarks.push_once [DIR]`: one push as by `fab train` to all hosts of PULUMI_STACK.

With DIR it pushes nothing, and writes each host's archive to DIR/HOST.tar.gz, for others to push.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

from ops.cluster.host_files import UNIT_CONF, RemoteFile, render
from ops.cluster.inventory import ROOT, load
from ops.cluster.remote import Fleet
from ops.errors import SeveralHostsError
from ops.package import host_stream
from ops.submit.config import JobFlags
from ops.submit.train import prepare

JOB = "bench_push"
_SECONDS = 300.0


def vary(file: RemoteFile) -> RemoteFile:
    """Return the unit's file with a new line each time, so that systemd must reload; any other file as it is."""
    return dataclasses.replace(file, content=f"{file.content}# {time.time_ns()}\n") if file.path == UNIT_CONF else file


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code; an error is raised as it is."""
    inventory = load()
    submission = prepare(inventory, JobFlags(JOB), None)
    code, version = host_stream.code(ROOT)
    shared = host_stream.shared_stream(code, submission.package.host_files, "bench")
    files = render(inventory)

    def stream(name: str) -> bytes:
        return shared + host_stream.files_stream(vary(file) for file in files[name])

    if arguments:
        for name in inventory.names:
            (Path(arguments[0]) / f"{name}.tar.gz").write_bytes(stream(name))
        return 0
    fleet = Fleet(inventory)
    if failures := fleet.connect_each(inventory.names).failures:
        raise SeveralHostsError(failures, "all hosts are needed")
    command = host_stream.install_command(version)
    outcome = fleet.each(inventory.names, lambda name: fleet.check_output(name, command, "push", stream(name)), _SECONDS)
    for name, error in outcome.failures.items():
        print(f"{name}: {error}", file=sys.stderr)
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
