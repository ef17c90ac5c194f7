"""The launcher of a host, /usr/lib/scaletier/launch, run on this machine with a fake systemd."""

from __future__ import annotations

import getpass
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from replicahosts import end

from hosts.agent.launcher_client import Launcher

SCRIPT = Path(__file__).parents[1] / "ansible/roles/host/files/root/usr/lib/scaletier/launch"
HOME = "/var/lib/scaletier/jobs/job01"
GOOD: dict[str, Any] = {
    "job": "job01",
    "argv": ["python", "-m", "task"],
    "env": {"A": "b"},
    "cwd": f"{HOME}/package",
    "output": "/bucket/jobs/job01/output",
    "names": ["/bucket/data/mnist", "/bucket/jobs/old/output/model-7"],
    "scratch": "",
    "peers": {},
    "stopSeconds": 10.0,
}
"""A valid request for a program of job01."""
NETWORK = "10.77.0.0/24"
# Run the unit as a process group, and then post-stop. A running unit has its group's id in `transient`.
_SYSTEMD_RUN = """#!{python}
import os, signal, subprocess, sys
words = sys.argv[1:]
open("{root}/systemd-run-calls", "a").write(repr(words) + "\\n")
unit = subprocess.Popen(words[words.index("{python}") :], start_new_session=True)
open("{root}/transient/scaletier-trainer.service", "w").write(str(unit.pid))
code = unit.wait()
try:
    os.killpg(unit.pid, signal.SIGKILL)
except ProcessLookupError:
    pass
if code == 0 and os.path.exists("{root}/left"):
    subprocess.run(["{root}/left"])
how = ("exited", str(code)) if code >= 0 else ("killed", signal.Signals(-code).name.removeprefix("SIG"))
subprocess.run(["{root}/post-stop"], env=os.environ | dict(zip(("EXIT_CODE", "EXIT_STATUS"), how)))
os.unlink("{root}/transient/scaletier-trainer.service")
"""
_SYSTEMCTL = """#!{python}
import os, sys
pid, number = int(open("{root}/transient/scaletier-trainer.service").read()), int(sys.argv[2].partition("=")[2])
(os.kill if "--kill-who=main" in sys.argv else os.killpg)(pid, number)
"""


def load_program(name: str) -> ModuleType:
    """Load the launcher, or a program beside it, as a module."""
    loader = SourceFileLoader(name, str(SCRIPT.with_name(name)))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


def permissions(path: Path) -> str:
    """Return the mode of a file or folder, in octal."""
    return oct(path.stat().st_mode & 0o7777)


class Host:
    """A folder with a listening launcher, a bucket, and the package of job01."""

    def __init__(self, root: Path, caller: str = "") -> None:
        self.root, self.state, self.bucket = root, root / "state", root / "bucket"
        self.package = self.state / "jobs/job01/package"
        for folder in (self.package, self.state / "fetched", self.state / "trials", self.bucket / "jobs"):
            folder.mkdir(parents=True)
        for name in ("run", "bin", "transient", "etc"):
            (root / name).mkdir()
        (root / "etc/host.json").write_text(json.dumps({"name": "master-0", "bucket": str(self.bucket)}))
        user, script = getpass.getuser(), root / "launch"
        text = SCRIPT.read_text().replace("/usr/bin/python3", sys.executable).replace("/var/lib/scaletier", str(self.state))
        text = text.replace('"/run/scaletier"', f'"{root}/run"').replace("/run/systemd/transient", str(root / "transient"))
        text = text.replace("/run/scaletier-stop", f"{root}/run/stop")
        post_stop = (SCRIPT.parent / "post-stop").read_text().replace("/usr/bin/python3", sys.executable)
        exec_program = (SCRIPT.parent / "exec-program").read_text().replace("/usr/bin/python3", sys.executable)
        for name in ("host.json", "network"):
            text = text.replace(f"/etc/scaletier/{name}", str(root / "etc" / name))
        text = text.replace('"replica", "trainer"', f'"{caller or user}", "{user}"')
        if caller:
            text = text.replace("if uid not in (0, ", "if uid not in (-1, ")
        fields = {"python": sys.executable, "root": root, "script": script}
        for file, content in {
            script: text,
            root / "exec-program": exec_program,
            root / "post-stop": post_stop.replace("/run/scaletier", f"{root}/run"),
            root / "bin/systemd-run": _SYSTEMD_RUN.format(**fields),
            root / "bin/systemctl": _SYSTEMCTL.format(**fields),
        }.items():
            file.write_text(content)
            file.chmod(0o755)
        # A socket's path has at most 107 characters, and that of a test's folder may be longer.
        self._socket_folder = tempfile.TemporaryDirectory(dir="/tmp", prefix="launch-")
        self.address = f"{self._socket_folder.name}/launch.sock"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        self.processes: list[subprocess.Popen[bytes]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        environ = os.environ | {"PATH": f"{self.root}/bin:{os.environ['PATH']}"}
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.processes.append(subprocess.Popen([self.root / "launch"], stdin=connection, env=environ))

    @property
    def launcher(self) -> Launcher:
        """Return a client of this launcher."""
        return Launcher(self.address, str(self.bucket))

    @property
    def systemd_run_calls(self) -> str:
        """Return the command lines of systemd-run."""
        file = self.root / "systemd-run-calls"
        return file.read_text() if file.exists() else ""

    def close(self) -> None:
        """Stop the units and remove all files."""
        self._listener.close()
        self._socket_folder.cleanup()
        for unit in (self.root / "transient").iterdir():
            end(int(unit.read_text() or 0))
        for each in self.processes:
            each.kill()
            each.wait()
        subprocess.run(["rm", "-rf", self.state], check=True)  # pytest's own deletion fails at some depth
