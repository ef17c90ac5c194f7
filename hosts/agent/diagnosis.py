"""Write this host's diagnosis of a job that FAILED: one object in the bucket, which `fab bundle` reads.

It runs once, in its own thread, after the job FAILED and its trainer here stopped. It delays neither heartbeats nor
the end of a job, and the host's next job by at most SECONDS. Of the trainer's environment it contains only TF_CONFIG. Each line
of a secret with at least SHORTEST characters is replaced by [secret], also in what a trainer printed.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from hosts.agent.replica_rules import termination_reason
from hosts.agent.supervisor import Assignment
from hosts.agent.trainer import TAIL_CHARACTERS
from jobs import cgroup, chunks
from jobs.background import BackgroundTask
from jobs.bucket import Bucket, Conflict
from jobs.chunks import ChunkFolder, LogFilter
from jobs.firsterror import LONGEST
from jobs.records import HostConfig, JobRecord, ReplicaRecord
from jobs.times import now, seconds_between

LIMIT = 1_000_000
"""The most bytes of a diagnosis: beyond it, the oldest lines of the log are left out, then the largest part."""
LINES = 200
SECONDS = 30.0
"""The longest that the host's next job waits for the diagnosis."""
SHORTEST = 4
"""The fewest characters of a secret that is replaced: a shorter one is part of too many words."""
_MESSAGE = 4000
# Last lines of a log and first errors are truncated to these lengths: a string of such a length may end inside a secret.
_CUT = (TAIL_CHARACTERS, LONGEST)
_UNIT_SECONDS = 20.0
_UNITS = ("scaletier.service", "scaletier-trainer.service")
_PROPERTIES = "Id,LoadState,ActiveState,SubState,Result,ExecMainCode,ExecMainStatus,NRestarts,StatusText"
# The most entries that are read of a package folder: the trainer may have made any number.
_ENTRIES = 10_000


def start(
    files: Bucket, name: str, make: Callable[[], bytes], warn: Callable[[str], None], seconds: float = SECONDS
) -> BackgroundTask[bool]:
    """Begin to write the object of that name once; the result is True if it was written.

    `make` returns its content; if that or the write fails, `warn` gets a line.
    """

    def write() -> bool:
        if files.read_part(name, 0, 1):
            return True  # by an earlier incarnation, which saw more of the end
        with os.fdopen(os.memfd_create("diagnosis"), "wb") as file:  # the host's disk may be what is full
            file.write(make())
            file.flush()
            with suppress(Conflict):  # the job was deleted
                files.upload(name, Path(f"/proc/self/fd/{file.fileno()}"))
        return True

    def failed(why: str) -> bool:
        warn(f"no diagnosis for fab bundle: {why}")
        return False

    return BackgroundTask(write, seconds, failed)


def build(
    host: HostConfig, state: Path, assignment: Assignment, log: Path, job: JobRecord, record: ReplicaRecord, end_seen: str
) -> bytes:
    """Return the whole diagnosis as written; `end_seen` is when this host read of the end, `log` the folder of its log."""
    plan, env = assignment.plan, assignment.environment
    depth = len(assignment.directory.parts) - len(Path(plan.folder).parts)
    buckets = [host.bucket] if host.bucket.startswith("/") else []
    secrets = lines_of(env.get(name, "") for name in plan.secrets)
    content = {
        "schema": 1,
        **summarize_job(job, end_seen),
        "replica": record.name,
        "host": host.name,
        "time": now(),
        "trainer": summarize_trainer(record),
        "lines": truncated(redact(with_tail(last_lines(log), record), secrets)),
        "units": units(),
        "kernel": {"memoryEvents": cgroup.memory_events()},
        "disks": disks(["/", str(state), *buckets]),
        "memory": memory_of_host(),
        "tfConfig": _parse_json(plan.tasks[record.name].tfConfig),
        "python": packages(assignment.python, Path(*assignment.directory.parts[:depth])),
    }
    return encode(redact(content, secrets))


def summarize_job(job: JobRecord, end_seen: str) -> dict[str, Any]:
    """Return when the job ended, by the leader's clock and by this host's; the difference includes the time to read it."""
    leader = job.lease.holder.partition("/")[0]
    summary = {"leader": leader, "leaderTime": job.endTime, "time": end_seen}
    ahead = round(seconds_between(job.endTime, end_seen), 3) if job.endTime else None
    return {"jobId": job.jobId, "clock": {**summary, "aheadSeconds": ahead}}


def summarize_trainer(record: ReplicaRecord) -> dict[str, Any]:
    """Return the exit of this host's trainer, in words too if a signal killed it."""
    keys = ("state", "exitCode", "outOfMemory", "memoryLimit", "restarts", "preempted", "startTime", "endTime", "errorMessage")
    summary = {key: getattr(record, key) for key in keys}
    ended = termination_reason(record) if record.signal else None
    first = asdict(record.firstError) if record.firstError else None
    return {**summary, "ended": ended, "firstError": first, "usage": asdict(record.usage) if record.usage else None}


def last_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the end of a log: time, severity and message of each line."""
    entries = []
    for entry in chunks.last_entries(ChunkFolder(folder), LogFilter(lines=LINES))[0]:
        text = entry.line.decode("utf-8", "replace")
        try:
            line = json.loads(text)
            fields = {key: str(line[key]) for key in ("time", "severity", "message")}
        except (ValueError, KeyError, TypeError):
            fields = {"time": "", "severity": "INFO", "message": text}
        entries.append(fields)
    return entries


def with_tail(lines: list[dict[str, Any]], record: ReplicaRecord) -> list[dict[str, Any]]:
    """Return the end of a log with the trainer's last output if that is missing. A full disk loses the line that reports it."""
    tail = record.errorMessage.splitlines()
    messages = {line["message"][:TAIL_CHARACTERS] for line in lines}
    if not tail or tail[-1] in messages:
        return lines
    missing = [text for text in tail if text not in messages]
    return [*lines, *({"time": record.endTime or "", "severity": "ERROR", "message": text} for text in missing)]


def truncated(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines, each truncated; secrets are removed before, as half of one would not be found."""
    return [{**line, "message": line["message"][:_MESSAGE]} for line in lines]


def units() -> dict[str, Any]:
    """Return systemd's properties of the agent's and the trainer's units, as far as readable."""
    argv = ["systemctl", "show", "--no-pager", f"--property={_PROPERTIES}", *_UNITS]
    try:
        ran = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=_UNIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"notReadable": f"systemctl: {error}"}
    if ran.returncode:
        return {"notReadable": f"systemctl: {ran.stderr.strip() or ran.returncode}"}
    blocks = [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in ran.stdout.split("\n\n")]
    forgotten = {"LoadState": "not-found"}  # as systemd reports a unit that has ended
    loaded = {block.pop("Id"): block for block in blocks if "Id" in block}
    return {name: forgotten if forgotten.items() <= block.items() else block for name, block in loaded.items()}


def disks(paths: Iterable[str]) -> list[dict[str, Any]]:
    """Return the use of the file systems of these paths."""
    usage: list[dict[str, Any]] = []
    for path in paths:
        try:
            stat = os.statvfs(path)
        except OSError as error:
            usage.append({"path": path, "notReadable": error.strerror})
            continue
        sizes = {"totalBytes": stat.f_blocks * stat.f_frsize, "freeBytes": stat.f_bavail * stat.f_frsize}
        usage.append({"path": path, **sizes, "files": stat.f_files, "freeFiles": stat.f_favail})
    return usage


def memory_of_host() -> dict[str, Any]:
    """Return the machine's memory and its free part; null for what this unit cannot see."""
    page = os.sysconf("SC_PAGE_SIZE")
    pages = {"machineBytes": "SC_PHYS_PAGES", "machineFreeBytes": "SC_AVPHYS_PAGES"}
    sizes: dict[str, Any] = dict.fromkeys(pages)
    for key, name in pages.items():
        with suppress(OSError, ValueError):
            sizes[key] = os.sysconf(name) * page
    return {**sizes, "unitLimitBytes": cgroup.memory_limit()}


def packages(python: str, package_folder: Path) -> dict[str, Any]:
    """Return the trainer's Python, and the packages of it and of the job, by folder names."""
    folders = [*sorted(Path(python).parent.parent.glob("lib/python3*/site-packages")), package_folder]
    versions: dict[str, str] = {}
    for folder in folders:
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in islice(entries, _ENTRIES):
                name, dash, version = entry.name.removesuffix(".dist-info").rpartition("-")
                if dash and entry.name.endswith(".dist-info"):
                    versions[name] = version
    return {
        "path": python,
        "versions": [folder.parent.name for folder in folders[:-1]],
        "packages": dict(sorted(versions.items())),
    }


def redact(value: Any, secrets: Collection[str]) -> Any:
    """Return the value with each line of a secret in its strings replaced, also a part of one at a truncated end."""
    if isinstance(value, str):
        return "\n".join(_redact_line(line, secrets) for line in value.split("\n"))
    if isinstance(value, dict):
        return {key: redact(item, secrets) for key, item in value.items()}
    return [redact(item, secrets) for item in value] if isinstance(value, list) else value


def _redact_line(line: str, secrets: Collection[str]) -> str:
    if len(line) in _CUT:
        lengths = (n for secret in secrets for n in range(SHORTEST, len(secret) + 1) if line.endswith(secret[:n]))
        if longest := max(lengths, default=0):
            line = f"{line[:-longest]}[secret]"
    for secret in secrets:
        line = line.replace(secret, "[secret]")
    return line


def lines_of(values: Iterable[str]) -> list[str]:
    """Return the lines of secrets to search for, the longest first, as one may contain another."""
    lines = {line.strip() for value in values for line in value.splitlines()}
    return sorted((line for line in lines if len(line) >= SHORTEST), key=len, reverse=True)


def encode(content: dict[str, Any]) -> bytes:
    """Return the diagnosis as it is written, in at most LIMIT bytes."""
    while len(text := _json(content)) > LIMIT:
        if lines := content.get("lines"):
            content = {**content, "lines": lines[len(lines) // 2 + 1 :]}
            continue
        largest = max(content, key=lambda key: len(_json(content[key])))
        content = {**content, largest: "left out, as it was too large"}
    return text


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode("utf-8", "replace")
