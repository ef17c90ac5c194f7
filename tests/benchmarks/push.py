"""Our push of package, files and unit to all hosts, against OpenSSH, pyinfra and Ansible with the same bytes.

Each side is a whole command, over connections that it opens itself. The peers' archives are packed before; ours packs them.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.measure import must, run
from benchmarks.registry import Benchmark, Figure, add, in_turn
from benchmarks.stack import BIN, ROOT, BenchStack, say
from infra.inventory import JOBS_UNIT, Inventory
from infra.scale_tiers import ScaleTier
from ops.cluster.shell import USER
from ops.package.host_stream import code, install_command

PEERS = Path(__file__).with_name("peers")
_FORKS = 64
# A unit that does nothing and counts as running, so that each push restarts it. systemd reads this folder first.
_PLACE = f"/run/systemd/system.control/{JOBS_UNIT}"
_UNIT = """[Unit]
Description=What a push restarts
StartLimitIntervalSec=0

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/true
"""
_PUT = f"""sudo -n sh -ec 'mkdir -p {Path(_PLACE).parent} && cat >{_PLACE} && systemctl daemon-reload' <<'END'
{_UNIT}END"""
_TAKE_AWAY = f"sudo -n sh -c 'systemctl stop {JOBS_UNIT}; rm -f {_PLACE}; systemctl daemon-reload'"
Command = tuple[list[str], dict[str, str]]


def by_ssh(inventory: Inventory, folder: Path) -> Command:
    """Return the command of OpenSSH: one process per host, all at once, the archive on stdin."""
    ssh = f"ssh -F {shlex.quote(str(inventory.folder / 'ssh_config'))}"
    command = shlex.quote(install_command(code(ROOT)[1]))
    starts = "\n".join(
        f"{ssh} {name} {command} <{shlex.quote(str(folder))}/{name}.tar.gz & all+=($!)" for name in inventory.names
    )
    return ["bash", "-c", f'all=()\n{starts}\nfor one in "${{all[@]}}"; do wait "$one" || exit; done'], {}


def by_pyinfra(inventory: Inventory, folder: Path) -> Command:
    """Return the command of pyinfra: put the archive, unpack it, reload and restart."""
    data = {
        "ssh_config_file": str(inventory.folder / "ssh_config"),
        "ssh_known_hosts_file": str(inventory.folder / "known_hosts"),
        "ssh_strict_host_key_checking": "yes",
        "ssh_user": USER,
        "ssh_key": str(inventory.folder / "id_ed25519"),
        "archives": str(folder),
    }
    hosts = [(host.name, {**data, "ssh_hostname": host.address}) for host in inventory.hosts]
    (folder / "inventory.py").write_text(f"hosts = {hosts!r}\n")
    command = ["pyinfra", "--yes", "--parallel", str(_FORKS), str(folder / "inventory.py"), str(PEERS / "pyinfra_push.py")]
    return [str(BIN / command[0]), *command[1:]], {}


def by_ansible(inventory: Inventory, folder: Path) -> Command:
    """Return the command of ansible-core with pipelining, a fork per host, and shared connections that it opens itself."""
    hosts = {name: {"archive": str(folder / f"{name}.tar.gz")} for name in inventory.names}
    (folder / "inventory.json").write_text(json.dumps({"all": {"hosts": hosts}}))
    (folder / "ansible.cfg").write_text("")
    config = shlex.quote(str(inventory.folder / "ssh_config"))
    env = {
        "ANSIBLE_CONFIG": str(folder / "ansible.cfg"),
        "ANSIBLE_INVENTORY": str(folder / "inventory.json"),
        "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_FORKS": str(_FORKS),
        "ANSIBLE_REMOTE_USER": USER,
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(folder / "cm"),
        "ANSIBLE_SSH_ARGS": f"-F {config} -o ControlMaster=auto -o ControlPersist=60s",
        "ANSIBLE_PYTHON_INTERPRETER": "/usr/bin/python3",
    }
    return [str(BIN / "ansible-playbook"), str(PEERS / "ansible_push.yml")], env


def forget(folder: Path) -> None:
    """End the connections that Ansible keeps open."""
    for socket in (folder / "cm").glob("*"):
        run(["ssh", "-o", f"ControlPath={socket}", "-O", "exit", "host"], {}, ROOT)


def measure(stack: BenchStack, tier: ScaleTier, peer: Callable[[Inventory, Path], Command], repetitions: int) -> Figure:
    """Measure ours and a peer's in turn.

    Raises:
        MeasureError: one of them fails on a host.
    """
    inventory = stack.require(tier)
    ours = [sys.executable, "-m", "benchmarks.push_once"]

    def timed(command: list[str], env: Mapping[str, str]) -> float:
        say(f"push by {Path(command[0]).name if command != ours else 'scaletier'}")
        return must(run(command, {**stack.env, **env}, ROOT), command[0]).seconds

    with tempfile.TemporaryDirectory(prefix="st") as name:
        folder = Path(name)
        must(stack.run(*ours, name), "packing")
        command, env = peer(inventory, folder)

        def theirs() -> float:
            try:
                return timed(command, env)
            finally:
                forget(folder)

        try:
            _on_each(stack, inventory, _PUT)
            timed(ours, {})  # the first push to these hosts, and the first use of every file here
            return in_turn(repetitions, lambda: timed(ours, {}), theirs)
        finally:
            # The restarted unit counts as running, so the next job would only wake it, and there is no agent to wake.
            _on_each(stack, inventory, _TAKE_AWAY)


def _on_each(stack: BenchStack, inventory: Inventory, command: str) -> None:
    with ThreadPoolExecutor(len(inventory.names)) as pool:
        list(pool.map(lambda name: stack.on(name, command), inventory.names))


def _rows() -> Iterable[Benchmark]:
    peers = (
        ("ssh", by_ssh, "ssh in parallel, an OpenSSH process per host, the archive on stdin", 1.1, 0.9, {8: 5, 31: 3}),
        ("pyinfra", by_pyinfra, "pyinfra: files.put, server.shell, systemd.service", 0.7, 0.5, {8: 5, 31: 3}),
        ("ansible", by_ansible, "ansible-core, pipelining, 64 forks: unarchive, systemd_service", 0.15, 0.1, {8: 2, 31: 1}),
    )
    for count, tier in ((8, ScaleTier.STANDARD_1), (31, ScaleTier.PREMIUM_1)):
        for name, peer, against, bar, aim, repetitions in peers:
            often = "once" if repetitions[count] == 1 else f"median of {repetitions[count]}"
            what = f"seconds to push package, files and unit to {count} hosts, and restart it: whole command, cold, {often}"
            work = partial(measure, tier=tier, peer=peer, repetitions=repetitions[count])
            yield Benchmark(f"push-{count}-{name}", what, against, bar, aim, work, tier)


for _row in _rows():
    add(_row)
