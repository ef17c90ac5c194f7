"""`pulumi up` of a Google stack without Google: the real engine and program with fake services."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import hosts_report
import requests
from fakes import Google
from interrupts import HEARS_CTRL_C, postponed
from machines import Machines
from waiting import limit
from world import Props, World

from infra.templates import ROOT
from ops.errors import WRONG_CALL

PROJECT, ZONE = "my-project-1", "us-central1-a"
BIN = Path(sys.executable).parent
TOOLS = Path(__file__).with_name("tools")
"""A fake gcloud with the operator's token."""
GUARD = "pulumi-python:dynamic/gcp:BucketGuard"
_SECONDS = 900.0
"""The time limit of a command on a typical machine."""
AlterInputs = Callable[[Props], None]


def _alter_nothing(_: Props) -> None:
    """Keep the inputs of an instance."""


class PulumiError(Exception):
    """A failed command, with its output."""


class Step(NamedTuple):
    """One operation that the engine plans for a resource, or for one of its properties, dotted, if named.

    The operation is `create`, `update`, `delete` or `replace`.
    """

    op: str
    kind: str
    name: str
    property: str = ""


def _steps(step: Mapping[str, Any]) -> list[Step]:
    kind, name = step["urn"].split("::")[2].rpartition(":")[2], step["urn"].rpartition("::")[2]
    ops = {path: diff["kind"] for path, diff in (step.get("detailedDiff") or {}).items()} or {"": step["op"]}
    return [Step("replace" if "replace" in op else op, kind, name, path) for path, op in ops.items()]


class Stack:
    """One stack with its own project folder, backend and home; leaving `Cloud.up` destroys it."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str], config: Mapping[str, str]) -> None:
        self.name, self.folder, self.config = name, folder, dict(config)
        self.env = {**os.environ, **environment}

    def command(self, *arguments: str) -> list[str]:
        return [str(ROOT / "setup" / "pulumi.sh"), *arguments, "--stack", self.name, "--non-interactive"]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=limit(_SECONDS),
            check=False,
        )

    def pulumi(self, *arguments: str) -> str:
        """Run a command that must succeed."""
        result = self.run(*arguments)
        if result.returncode:
            raise PulumiError(f"pulumi {' '.join(arguments)} ended with {result.returncode}:\n{result.stdout}{result.stderr}")
        return result.stdout

    def configure(self, **values: str | None) -> None:
        """Change the configuration as `pulumi config` does; None removes a key."""
        self.config = self._merged(values)
        self._write(self.folder / f"Pulumi.{self.name}.yaml", self.config)

    def _merged(self, values: Mapping[str, str | None]) -> dict[str, str]:
        changed = {**self.config, **{key if ":" in key else f"scaletier:{key}": value for key, value in values.items()}}
        return {key: value for key, value in changed.items() if value is not None}

    def _write(self, file: Path, config: Mapping[str, str]) -> None:
        stack_file = self.folder / f"Pulumi.{self.name}.yaml"
        salt = [line for line in stack_file.read_text().splitlines() if line.startswith("encryptionsalt:")]
        values = {key: json.loads(value) if value.startswith("{") else value for key, value in config.items()}
        file.write_text("\n".join([*salt, f"config: {json.dumps(values)}", ""]))

    def up(self, **values: str | None) -> str:
        self.configure(**values)
        return self.pulumi("up", "--yes", "--skip-preview")

    def plan(self, refresh: bool = True, **values: str | None) -> list[Step]:
        """Return the steps of `pulumi up` after a change of configuration.

        Without `refresh` it assumes that the state is up to date.

        Raises:
            PulumiError: the change is refused.
        """
        file = self.folder / "preview.yaml"
        self._write(file, self._merged(values))
        result = self.run("preview", "--json", f"--refresh={str(refresh).lower()}", "--config-file", str(file))
        report = json.loads(result.stdout)
        errors = [message["message"] for message in report.get("diagnostics", []) if message["severity"] == "error"]
        if errors or result.returncode:
            raise PulumiError("".join(errors) or result.stderr)
        steps = [step for step in report["steps"] if step["op"] not in ("same", "read", "refresh")]
        return [operation for step in steps for operation in _steps(step)]

    @property
    def inventory(self) -> dict[str, Any]:
        """The content of inventory.json, which `fab` reads."""
        inventory: dict[str, Any] = json.loads((ROOT / ".scaletier" / self.name / "inventory.json").read_text())
        return inventory


class WatchedCloud:
    """A stack for hosts_report, which reads its hosts after a failed test."""

    class Answer(NamedTuple):
        """The output of a command: stdout, and both streams as `text`."""

        out: str
        text: str

    def __init__(self, cloud: Cloud) -> None:
        self._cloud, self.name = cloud, cloud.name

    @property
    def host_names(self) -> list[str]:
        """Return the names of the instances; none if they are records."""
        return [machine.name for machine in self._cloud.google.machines.values()] if self._cloud.machines else []

    def fab(self, *arguments: str, timeout: float) -> Answer:
        """Run a command of fab."""
        result = self._cloud.run(*arguments, seconds=timeout)
        return self.Answer(result.stdout, result.stdout + result.stderr)

    def ssh(self, host: str, command: str, timeout: float) -> Answer:
        """Run a command on a host, through LXD."""
        assert self._cloud.machines
        answer = self._cloud.machines.run(host, "timeout", str(timeout), "sh", "-c", command)
        return self.Answer(answer, answer)


@dataclass(frozen=True)
class Cloud:
    """The fakes, with the ports of the Compute API, the storage API and the provider.

    `machines` is None for records. `name` is the stack's name; only one exists at a time.
    """

    name: str
    google: Google
    world: World
    compute: int
    buckets: int
    provider: int
    folder: Path
    range: str = "10.64.0.0/20"
    machines: Machines | None = None

    @contextmanager
    def up(self, alter_inputs: AlterInputs = _alter_nothing, **raw: str) -> Iterator[Stack]:
        """Bring up a stack with these values of `pulumi config`; destroy it at the end.

        `alter_inputs` may change the inputs that an instance receives.
        """
        self.world.alter_inputs = alter_inputs
        stack = self.stack(**raw)
        watched = WatchedCloud(self)
        hosts_report.WATCHED.append(watched)
        try:
            stack.up()
            yield stack
        except Exception as error:
            if alter_inputs is _alter_nothing:  # altered inputs are expected to fail
                error.add_note(hosts_report.write(f"{self.name}.up"))
            raise
        finally:
            hosts_report.WATCHED.remove(watched)
            with postponed():
                self.destroy(stack)

    def stack(self, **raw: str) -> Stack:
        """Create a stack without resources."""
        provider = {
            "project": PROJECT,
            "zone": ZONE,
            "accessToken": "token-of-the-operator",
            "computeCustomEndpoint": f"http://127.0.0.1:{self.compute}/compute/v1/",
            "iamCustomEndpoint": f"http://127.0.0.1:{self.compute}/v1/",
            "storageCustomEndpoint": f"http://127.0.0.1:{self.buckets}/storage/v1/",
        }
        config = {"target": "gcp", "network": self.range, **raw}
        if self.machines:
            config["operatorCidr"] = f"{self.machines.gateway}/32"
        project, home = self.folder / "project", self.folder / "home"
        shutil.rmtree(self.folder, ignore_errors=True)
        for folder in (project, home, self.folder / "state"):
            folder.mkdir(parents=True)
        shutil.copy(ROOT / "Pulumi.yaml", project)
        (project / "infra").symlink_to(ROOT / "infra")
        environment = {
            "PULUMI_BACKEND_URL": f"file://{self.folder / 'state'}",
            "PULUMI_HOME": str(home),
            "PULUMI_CONFIG_PASSPHRASE": self.name,
            "PULUMI_DEBUG_PROVIDERS": f"gcp:{self.provider}",
            "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
            "PYTHONPATH": str(ROOT),
        }
        stack = Stack(self.name, project, environment, {f"gcp:{key}": value for key, value in provider.items()})
        stack.pulumi("stack", "init", "--no-select")
        stack.configure(**config)
        return stack

    def destroy(self, stack: Stack) -> None:
        """Destroy the stack with its bucket's content, without its guard, which would refuse."""
        stack.run("state", "delete", f"urn:pulumi:{stack.name}::scaletier::{GUARD}::guard", "--yes")
        for bucket in self.world.resources_of("Bucket"):
            bucket["forceDestroy"] = True
        stack.pulumi("destroy", "--yes", "--skip-preview")
        assert not self.world.resources, f"a destroyed stack leaves {[*self.world.resources]}"
        self.world.history.clear()

    def objects(self, prefix: str) -> list[str]:
        """Return the objects in the stack's bucket, with older versions."""
        (bucket,) = self.world.resources_of("Bucket")
        return [name for name, _ in self.world.objects(bucket["name"]) if name.startswith(prefix)]

    def put(self, bucket: str, name: str, content: bytes) -> None:
        """Write an object to a bucket."""
        url = f"http://127.0.0.1:{self.google.storage}/upload/storage/v1/b/{bucket}/o"
        parameters = {"uploadType": "media", "name": name}
        requests.post(url, params=parameters, data=content, timeout=limit()).raise_for_status()

    def fab(self, *arguments: str) -> str:
        """Run an operator's command that must succeed, and return its output."""
        result = self.run(*arguments)
        assert result.returncode == 0, (
            f"fab {' '.join(arguments)} ended with {result.returncode}:\n{result.stdout}{result.stderr}"
        )
        return result.stdout

    def fab_refused(self, *arguments: str) -> str:
        """Run an operator's command that must be refused, and return its stderr."""
        result = self.run(*arguments)
        assert result.returncode == WRONG_CALL, f"fab {' '.join(arguments)} ended with {result.returncode}:\n{result.stdout}"
        return result.stderr

    def run(self, *arguments: str, seconds: float = _SECONDS) -> subprocess.CompletedProcess[str]:
        """Run an operator's command."""
        command, environment = [*HEARS_CTRL_C, str(BIN / "fab"), *arguments], self._environment()
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit(seconds), check=False
        )

    @contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run an operator's command that does not end by itself; interrupt it when the context ends."""
        command, environment = [*HEARS_CTRL_C, str(BIN / "fab"), *arguments], self._environment()
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                yield process
            finally:
                process.send_signal(signal.SIGINT)

    def _environment(self) -> dict[str, str]:
        return os.environ | {
            "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}",
            "PULUMI_STACK": self.name,
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{self.google.storage}",
            "FSSPEC_GS_TOKEN": "anon",
            "COLUMNS": "200",
        }
