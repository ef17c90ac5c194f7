"""What this host knows of a job that FAILED, as one object in the bucket, from which `fab bundle` tells why.

It is made in a thread of its own, once, when the job has FAILED and its trainer here has stopped: neither a heartbeat nor the
end of the job waits for it, and the host's next job not long. Nothing of a trainer's environment is in it but TF_CONFIG, and
the value of a secret nowhere, whatever a trainer printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from jobs import chunks
from jobs.chunks import Folder, Wanted
from jobs.firsterror import LONGEST
from jobs.records import HostFile, JobRecord, ReplicaRecord
from jobs.store import Conflict, Files
from jobs.times import now, seconds_between
from replica import cgroup
from replica.decide import killer
from replica.supervisor import Assignment
from replica.trainer import TAIL_CHARACTERS

LIMIT = 1_000_000
"""Bytes of it at most: what does not fit of the log, its oldest lines, is left out, then what is largest."""
LINES = 200
SECONDS = 30.0
"""So long the host's next job waits for it at most."""
SHORTEST = 4
"""Characters of a secret that is looked for: a shorter one is part of too many words."""
_MESSAGE = 4000
# So long is what was cut before it came here, a line of the end of a log and the first error.
_CUT = (TAIL_CHARACTERS, LONGEST)
_UNIT_SECONDS = 20.0
_UNITS = ("scaletier.service", "scaletier-trainer.service")
_PROPERTIES = "Id,LoadState,ActiveState,SubState,Result,ExecMainCode,ExecMainStatus,NRestarts,StatusText"
_PACKAGES = 2000


class Diagnosis:
    """One of them, being made and written."""

    def __init__(self, files: Files, name: str, make: Callable[[], bytes], complain: Callable[[str], None]) -> None:
        """`make` gives what the object of that name is to be; where that or the writing fails, `complain` hears a line."""
        self._files, self._name, self._make, self._complain = files, name, make, complain
        self._give_up_at = time.monotonic() + SECONDS
        self._thread = threading.Thread(target=self._run, name="diagnosis", daemon=True)
        self._thread.start()

    def finish(self) -> bool:
        """True once it is written, could not be, or was waited for long enough."""
        return not self._thread.is_alive() or time.monotonic() > self._give_up_at

    def _run(self) -> None:
        try:
            with os.fdopen(os.memfd_create("diagnosis"), "wb") as file:  # the host's disk may be what is full
                file.write(self._make())
                file.flush()
                self._files.upload(self._name, Path(f"/proc/self/fd/{file.fileno()}"))
        except Conflict:
            return  # the job was deleted
        except Exception as error:  # noqa: BLE001  whatever it is, the job has ended all the same
            why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            self._complain(f"no diagnosis for fab bundle: {why}")


def made(
    host: HostFile, state: Path, assignment: Assignment, log: Path, job: JobRecord, record: ReplicaRecord, heard: str
) -> bytes:
    """All of it, as it is written: of a job of whose end this host `heard` then, and whose `log` here is in that folder."""
    plan, env = assignment.plan, assignment.environment
    depth = len(assignment.directory.parts) - len(Path(plan.folder).parts)
    buckets = [host.bucket] if host.bucket.startswith("/") else []
    secrets = lines_of(env.get(name, "") for name in plan.secrets)
    told = {
        "schema": 1,
        **of_job(job, heard),
        "replica": record.name,
        "host": host.name,
        "time": now(),
        "trainer": of_trainer(record),
        "lines": cut(hidden(with_tail(last_lines(log), record), secrets)),
        "units": units(),
        "kernel": {"memoryEvents": cgroup.memory_events()},
        "disks": disks(["/", str(state), *buckets]),
        "memory": memory_of_host(),
        "tfConfig": _parsed(plan.tasks[record.name].tfConfig),
        "python": packages(assignment.python, Path(*assignment.directory.parts[:depth])),
    }
    return encoded(hidden(told, secrets))


def of_job(job: JobRecord, heard: str) -> dict[str, Any]:
    """How the job ended, and this host's clock against that of who said so: `aheadSeconds` has in it the time until `heard`."""
    leader = job.lease.holder.partition("/")[0]
    told = {"leader": leader, "leaderTime": job.endTime, "time": heard}
    ahead = round(seconds_between(job.endTime, heard), 3) if job.endTime else None
    return {"jobId": job.jobId, "clock": {**told, "aheadSeconds": ahead}}


def of_trainer(record: ReplicaRecord) -> dict[str, Any]:
    """How the trainer of this host ended, in words too where a signal killed it."""
    keys = ("state", "exitCode", "outOfMemory", "memoryLimit", "restarts", "preempted", "startTime", "endTime", "errorMessage")
    told = {key: getattr(record, key) for key in keys}
    ended = killer(record) if record.signal else None
    first = asdict(record.firstError) if record.firstError else None
    return {**told, "ended": ended, "firstError": first, "usage": asdict(record.usage) if record.usage else None}


def last_lines(folder: Path) -> list[dict[str, Any]]:
    """The end of a log, of each line time, severity and message."""
    found = []
    for entry in chunks.newest(Folder(folder), Wanted(lines=LINES))[0]:
        text = entry.line.decode("utf-8", "replace")
        try:
            line = json.loads(text)
            told = {key: str(line[key]) for key in ("time", "severity", "message")}
        except (ValueError, KeyError, TypeError):
            told = {"time": "", "severity": "INFO", "message": text}
        found.append(told)
    return found


def with_tail(lines: list[dict[str, Any]], record: ReplicaRecord) -> list[dict[str, Any]]:
    """The end of a log, and what the trainer printed last where that is not in it: a full disk loses the line that says so."""
    tail = record.errorMessage.splitlines()
    there = {line["message"][:TAIL_CHARACTERS] for line in lines}
    if not tail or tail[-1] in there:
        return lines
    lost = [text for text in tail if text not in there]
    return [*lines, *({"time": record.endTime or "", "severity": "ERROR", "message": text} for text in lost)]


def cut(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same lines, none longer than is told of one; secrets are looked for before, as half of one would not be found."""
    return [{**line, "message": line["message"][:_MESSAGE]} for line in lines]


def units() -> dict[str, Any]:
    """What systemd says of the replica's unit and the trainer's, as far as this user may ask."""
    argv = ["systemctl", "show", "--no-pager", f"--property={_PROPERTIES}", *_UNITS]
    try:
        ran = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=_UNIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"notReadable": f"systemctl: {error}"}
    if ran.returncode:
        return {"notReadable": f"systemctl: {ran.stderr.strip() or ran.returncode}"}
    blocks = [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in ran.stdout.split("\n\n")]
    forgotten = {"LoadState": "not-found"}  # which is what systemd says of a unit that has ended
    loaded = {block.pop("Id"): block for block in blocks if "Id" in block}
    return {name: forgotten if forgotten.items() <= block.items() else block for name, block in loaded.items()}


def disks(paths: Iterable[str]) -> list[dict[str, Any]]:
    """How full the file systems are that these paths are on."""
    found: list[dict[str, Any]] = []
    for path in paths:
        try:
            has = os.statvfs(path)
        except OSError as error:
            found.append({"path": path, "notReadable": error.strerror})
            continue
        sizes = {"totalBytes": has.f_blocks * has.f_frsize, "freeBytes": has.f_bavail * has.f_frsize}
        found.append({"path": path, **sizes, "files": has.f_files, "freeFiles": has.f_favail})
    return found


def memory_of_host() -> dict[str, Any]:
    """What the machine has of memory, and how much of it is free; null for what this unit is not shown."""
    page = os.sysconf("SC_PAGE_SIZE")
    pages = {"machineBytes": "SC_PHYS_PAGES", "machineFreeBytes": "SC_AVPHYS_PAGES"}
    told: dict[str, Any] = dict.fromkeys(pages)
    for key, name in pages.items():
        with suppress(OSError, ValueError):
            told[key] = os.sysconf(name) * page
    return {**told, "unitLimitBytes": cgroup.memory_limit()}


def packages(python: str, brought: Path) -> dict[str, Any]:
    """The Python of the trainer, and what packages it and the job's own folder have, by the names of their folders."""
    top = Path(python).parents[1] if len(Path(python).parents) > 1 else Path()
    folders = [*sorted(top.glob("lib/python3*/site-packages")), brought]
    found: dict[str, str] = {}
    for folder in folders:
        for path in islice(folder.glob("*.dist-info"), _PACKAGES):
            name, dash, version = path.name.removesuffix(".dist-info").rpartition("-")
            if dash:
                found[name] = version
    return {
        "path": python,
        "versions": [folder.parent.name for folder in folders[:-1]],
        "packages": dict(sorted(found.items())),
    }


def hidden(value: Any, secrets: Collection[str]) -> Any:
    """The same without a line of a secret in any of its texts, as a trainer may have printed it, nor what a cut left of one."""
    if isinstance(value, str):
        return "\n".join(_hidden(line, secrets) for line in value.split("\n"))
    if isinstance(value, dict):
        return {key: hidden(item, secrets) for key, item in value.items()}
    return [hidden(item, secrets) for item in value] if isinstance(value, list) else value


def _hidden(line: str, secrets: Collection[str]) -> str:
    if len(line) in _CUT:
        begun = (n for secret in secrets for n in range(SHORTEST, len(secret) + 1) if line.endswith(secret[:n]))
        if longest := max(begun, default=0):
            line = f"{line[:-longest]}[secret]"
    for secret in secrets:
        line = line.replace(secret, "[secret]")
    return line


def lines_of(values: Iterable[str]) -> list[str]:
    """What is looked for of secrets: each of their lines, the longest first, as one may be part of another."""
    lines = {line.strip() for value in values for line in value.splitlines()}
    return sorted((line for line in lines if len(line) >= SHORTEST), key=len, reverse=True)


def encoded(told: dict[str, Any]) -> bytes:
    """As it is written, in LIMIT bytes at most."""
    while len(content := _json(told)) > LIMIT:
        if lines := told.get("lines"):
            told = {**told, "lines": lines[len(lines) // 2 + 1 :]}
            continue
        largest = max(told, key=lambda key: len(_json(told[key])))
        told = {**told, largest: "left out, as it was too large"}
    return content


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode("utf-8", "replace")
