"""`fab bundle`: all that tells why a job failed, in one file: what each host wrote down when it did, records, ends of logs.

A tar.gz and no zip, as the same names and lines in many small files are compressed together.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import tarfile
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs import paths
from jobs.chunks import Wanted
from jobs.firsterror import earliest
from jobs.records import JobRecord, ReplicaRecord
from jobs.states import JobState
from ops import terminal
from ops.cluster.cluster import Cluster
from ops.cluster.ledger import existing_job, replicas_of
from ops.cluster.remote import LOOK_SECONDS
from ops.errors import DONE, UsageError, one_line
from ops.logs.lines import Line
from ops.logs.read import read_logs
from ops.report.command import write
from ops.report.sources import tried
from ops.show.doctor import clock
from ops.show.views import describe_to_stdout, took

LINES = 200
_FULL = 90
_CLOCK_SECONDS = 5.0
_SECRET, _SHORTEST = "[secret]", 4
_TARGET = re.compile(rb'"notify":"(?:[^"\\]|\\.)+"')
# How a text is in one or another of the files.
_WRITTEN: tuple[Callable[[str], str], ...] = (
    str,
    terminal.harmless,
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
)
_NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded")
_CONTENT = """\
What is in here:
  describe.txt      what fab describe shows
  job.json, plan.json, manifest.json, cancel.json, replicas/
                    the records in the bucket
  diagnosis/        what each host wrote down when the job FAILED: how its trainer ended, units, disks, memory,
                    TF_CONFIG, packages, clock
  logs/             the last lines of each replica
  hosts/            what hosts that answered said when this file was made
"""


@dataclass
class Found:
    """What there is of a job: the files of a bundle, and of each replica what its host wrote down and how its log ends."""

    record: JobRecord
    replicas: list[ReplicaRecord]
    files: dict[str, bytes] = field(default_factory=dict)
    diagnoses: dict[str, dict[str, Any]] = field(default_factory=dict)
    logs: dict[str, list[Line]] = field(default_factory=dict)
    clocks: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def bundle(cluster: Cluster, job_id: str | None, dest: str | None, force: bool, as_json: bool) -> int:
    """Write a job's bundle, of the newest where none is named; nothing is written over unless with `force`."""
    record = existing_job(cluster.ledger, job_id)
    target = Path(dest if dest is not None else f"{record.jobId}-bundle.tar.gz")
    check_target(target, force)
    with terminal.Step(f"gathering what is known of {record.jobId}") as step:
        found = gather(cluster, record, step)
    for note in found.notes:
        terminal.note(note)
    files = {"summary.txt": summary(found).encode(), **found.files}
    content = packed(f"{record.jobId}-bundle", hidden(files, secrets(found)))
    write(target, content)
    if as_json:
        told = {"jobId": record.jobId, "state": record.state, "dest": str(target), "bytes": len(content)}
        terminal.as_json({**told, "files": list(files), "diagnosed": list(found.diagnoses), "notes": found.notes})
    else:
        terminal.out(f"{target}: {terminal.size(len(content))}, begin with its summary.txt")
    return DONE


def check_target(target: Path, force: bool) -> None:
    """UsageError where the file cannot be there, or would be written over what is."""
    try:
        if target.is_dir():
            raise UsageError(f"{target} is a folder: --dest is the file to write")
        if not target.parent.is_dir():
            raise UsageError(f"{target} cannot be written: there is no folder {target.parent}")
        if not force and target.exists():
            raise UsageError(f"{target} is there already: give another --dest, or --force to write over it")
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror or one_line(error)}") from None


def gather(cluster: Cluster, record: JobRecord, step: terminal.Step) -> Found:
    """All that can be read of a job; what cannot is a note."""
    replicas = replicas_of(cluster.ledger, record)
    found, names = Found(record, replicas), [replica.name for replica in replicas]
    notes = found.notes
    step.count = "(records)"
    found.files["describe.txt"] = tried(lambda: _described(cluster, record, replicas), b"", notes, "it cannot be described")
    none: dict[str, bytes] = {}
    found.files |= tried(lambda: _records(cluster, record, names), none, notes, "the records were not read")
    step.count = "(what hosts wrote down)"
    written = tried(lambda: _diagnoses(cluster, record, names), none, notes, "what the hosts wrote down was not read")
    for name, content in written.items():
        found.files[f"diagnosis/{name}.json"] = content
        try:
            told = json.loads(content)
            if _earlier(told, record):
                del found.files[f"diagnosis/{name}.json"]
                notes.append(f"what the host of {name} wrote down is of an earlier job of this id: it is left out")
                continue
            found.diagnoses[name] = told
            found.logs[name] = [Line(each["time"], each["severity"], name, each["message"]) for each in told["lines"]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            found.diagnoses.pop(name, None)
            notes.append(f"what the host of {name} wrote down is garbled")
    notes += _undiagnosed(found)
    step.count = "(logs)"
    missing = [name for name in names if name not in found.logs]
    if missing and _has_secrets(found):
        why = "the job has secrets, which nothing but a diagnosis hides"
        notes.append(f"the log of {', '.join(missing)} is left out: {why}; fab logs {record.jobId} shows it")
        found.files |= {f"logs/{name}.log": f"left out: {why}\n".encode() for name in missing}
    elif missing:
        found.logs |= tried(lambda: _logs(cluster, record, missing), dict[str, list[Line]](), notes, "no more logs were read")
    for name in filter(found.logs.get, names):
        found.files[f"logs/{name}.log"] = "".join(f"{_shown(line)}\n" for line in found.logs[name]).encode("utf-8", "replace")
    step.count = "(hosts that answer)"
    tried(lambda: _ask(cluster, found), None, notes, "the hosts were not asked")
    return found


def _undiagnosed(found: Found) -> list[str]:
    record = found.record
    if record.state is not JobState.FAILED:
        return [f"job {record.jobId} is {record.state}: no diagnosis was made, as hosts make one when a job FAILED"]
    names = [replica.name for replica in found.replicas if replica.name not in found.diagnoses]
    why = "it never started, was lost or had no bucket, or is still at it"
    return [f"no diagnosis by {', '.join(names)}: {why}"] if names else []


def _described(cluster: Cluster, record: JobRecord, replicas: list[ReplicaRecord]) -> bytes:
    with redirect_stdout(io.StringIO()) as text:
        describe_to_stdout(cluster, record, replicas)
    return text.getvalue().encode()


def _records(cluster: Cluster, record: JobRecord, names: list[str]) -> dict[str, bytes]:
    job_id, folder = record.jobId, f"{paths.folder(record.jobId)}/"
    wanted = [paths.job(job_id), paths.plan(job_id), paths.manifest(job_id), paths.cancel(job_id)]
    there = cluster.ledger.store.read_all([*wanted, *(paths.replica(job_id, name) for name in names)])
    return {path.removeprefix(folder): _without_target(item.content) for path, item in there.items()}


def _without_target(content: bytes) -> bytes:
    """Return a record without the target of its notification, as the path of a URL is often all that protects it."""
    return _TARGET.sub(f'"notify":"{_SECRET}"'.encode(), content)


def _diagnoses(cluster: Cluster, record: JobRecord, names: list[str]) -> dict[str, bytes]:
    places = {name: paths.diagnosis(record.jobId, name) for name in names}
    there = cluster.bucket.names(f"{paths.folder(record.jobId)}/diagnosis")
    read = {name: cluster.bucket.read(place) for name, place in places.items() if place.rpartition("/")[2] in there}
    return {name: content for name, content in read.items() if content is not None}


def _earlier(told: Mapping[str, Any], record: JobRecord) -> bool:
    """Whether it was written down of a job that had this id before; a clock that is off is no sign of that."""
    ended = _part(told, "clock").get("leaderTime")
    return ended != record.endTime and str(told.get("time", record.createTime)) < record.createTime


def _has_secrets(found: Found) -> bool:
    """Whether the job's plan names secrets, or it is not known."""
    if "job.json" not in found.files:
        return True
    try:
        return bool(json.loads(found.files.get("plan.json", b"{}")).get("secrets"))
    except (ValueError, AttributeError, RecursionError):
        return True


def _logs(cluster: Cluster, record: JobRecord, names: list[str]) -> dict[str, list[Line]]:
    return {name: list(log) for name, log in read_logs(cluster, record, names, Wanted(lines=LINES)).items()}


def _shown(line: Line) -> str:
    return terminal.harmless(f"{line.time} {line.severity:<8} {line.message}".replace("\n", "␊"))


def ask_command(since: str) -> str:
    """What a host is asked: its clock in the first line, then units, disks, memory, and the kernel's lines about memory."""
    moment = shlex.quote(f"{since[:19].replace('T', ' ')} UTC")
    properties = "Id,ActiveState,SubState,Result,ExecMainStatus,NRestarts,StatusText,MemoryCurrent"
    parts = [
        "date +%s.%N",
        "date -u; uptime",
        "systemctl list-units --failed --plain --no-legend --no-pager",
        f"systemctl show --no-pager -p {properties} scaletier.service scaletier-trainer.service",
        "df -h; df -hi",
        "free -m",
        f"journalctl -k --no-pager -q --since {moment} | grep -iE 'out of memory|oom|killed process' | tail -n 50",
    ]
    heads = (f"echo; echo {shlex.quote('# ' + part)}; {part} 2>&1" for part in parts[1:])
    return "; ".join([parts[0], *heads])


def _ask(cluster: Cluster, found: Found) -> None:
    """Those of the job's hosts that answer, which may have another job by now; a host that does not is a note."""
    record, fleet = found.record, cluster.fleet
    hosts = {name: host for name, host in record.placement.items() if host in cluster.inventory.names}
    command = ask_command(record.createTime)

    def ask(name: str) -> tuple[float, str]:
        fleet.connection(hosts[name])
        sent = time.time()
        ran = fleet.run(hosts[name], command)
        return sent, ran.output

    outcome = fleet.each(hosts, ask, LOOK_SECONDS)
    for name, (moment, output) in outcome.results.items():
        found.files[f"hosts/{hosts[name]}.txt"] = output.encode("utf-8", "replace")
        with suppress(ValueError, IndexError):
            found.clocks[name] = clock(output, moment)
    found.notes += [f"{one_line(error)}: it was not asked" for error in outcome.failures.values()]


def summary(found: Found) -> str:
    """What to read first: the job's first error, how it ended, and a line for each replica."""
    record = found.record
    first = earliest((replica.name, replica.firstError) for replica in found.replicas)
    lines = [f"First error: {first[0]}, {first[1].time}: {first[1].message}" if first else "No replica printed an error."]
    ran = took(record)
    why = record.errorMessage.partition("\n")[0]
    lines.append(f"Job {record.jobId} {record.state}{f' after {ran}' if ran else ''}{f': {why}' if why else ''}")
    lines += ["", *(_line(found, replica) for replica in found.replicas)]
    if found.notes:
        lines += ["", *(f"Note: {note}" for note in found.notes)]
    return terminal.harmless("\n".join(lines) + "\n\n") + _CONTENT


def _line(found: Found, replica: ReplicaRecord) -> str:
    told = found.diagnoses.get(replica.name, {})
    said = [*_ended(replica, told), *_rooms(replica, told, found.logs.get(replica.name, []))]
    if replica.firstError:
        said.append(f"its first error: {replica.firstError.message}")
    ahead = _number(_part(told, "clock").get("aheadSeconds"))
    if abs(ahead) > _CLOCK_SECONDS:
        way = "ahead of" if ahead > 0 else "behind"
        said.append(f"its clock was {abs(ahead):.0f} s {way} that of {_part(told, 'clock').get('leader')}")
    if abs(now := found.clocks.get(replica.name, 0.0)) > _CLOCK_SECONDS * 1000:
        said.append(f"its clock is now {now / 1000:+.0f} s off this machine's")
    host = found.record.placement.get(replica.name, replica.name)
    return f"{replica.name}{f' on {host}' if host != replica.name else ''}: {'; '.join(said)}"


def _ended(replica: ReplicaRecord, told: Mapping[str, Any]) -> list[str]:
    code = "" if replica.exitCode is None else f" with {replica.exitCode}"
    how = _part(told, "trainer").get("ended") or replica.death
    limit = f" of {terminal.size(replica.memoryLimit)}" if replica.outOfMemory and replica.memoryLimit else ""
    said = [f"{replica.state}{code}{f', {how}' if how else ''}{limit}"]
    return [*said, terminal.plural(replica.restarts, "restart")] if replica.restarts else said


def _rooms(replica: ReplicaRecord, told: Mapping[str, Any], log: list[Line]) -> list[str]:
    """Where there was no room: what is full now, and what the trainer says, as what it wrote goes when it ends."""
    said = []
    disks = told.get("disks")
    for disk in filter(_is_object, disks if isinstance(disks, list) else []):
        total, free = _number(disk.get("totalBytes")), _number(disk.get("freeBytes"))
        if total and (full := 100 * (1 - free / total)) >= _FULL:
            said.append(f"{disk.get('path')} is {full:.0f} % full")
    texts = "\n".join((replica.errorMessage, *(line.message for line in log)))
    return [*said, f'it ran out of disk, "{lack[0]}"'] if (lack := _NO_ROOM.search(texts)) else said


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _part(told: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = told.get(key)
    return part if isinstance(part, dict) else {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def secrets(found: Found) -> dict[str, str]:
    """What is to be hidden, and what stands for it: lines that hosts wrote down with [secret] in them, as records have the same
    lines as the trainer printed them, and the values that follow from those.
    """
    values: dict[str, str] = {}
    for replica in found.replicas:
        told = _part(found.diagnoses.get(replica.name, {}), "trainer")
        first = replica.firstError.message if replica.firstError else ""
        for printed, written in (
            (replica.errorMessage, told.get("errorMessage")),
            (first, _part(told, "firstError").get("message")),
        ):
            for said, shown in zip(printed.splitlines(), str(written).splitlines(), strict=False):
                values |= _hides(said, shown)
    return values


def _hides(said: str, shown: str) -> dict[str, str]:
    """Of a line, and the same with [secret] in it: the line, and the value where one alone explains it."""
    first, *rest = parts = shown.split(_SECRET)
    least = len("".join(parts)) + _SHORTEST * len(rest)
    if said == shown or not rest or len(said) < least or not (said.startswith(first) and said.endswith(rest[-1])):
        return {}
    same = "(?P=value)".join(map(re.escape, rest))
    match = re.fullmatch(f"{re.escape(first)}(?P<value>.+?){same}", said, re.DOTALL)
    return {said: shown, **({match["value"]: _SECRET} if match else {})}


def hidden(files: Mapping[str, bytes], values: Mapping[str, str]) -> dict[str, bytes]:
    """The files with what stands for these values in their place, however they are written in them."""
    forms = {written(value): written(instead) for value, instead in values.items() for written in _WRITTEN}
    found = dict(files)
    for form in sorted(forms, key=len, reverse=True):
        old, new = (text.encode("utf-8", "replace") for text in (form, forms[form]))
        found = {name: content.replace(old, new) for name, content in found.items()}
    return found


def packed(top: str, files: Mapping[str, bytes]) -> bytes:
    """A tar.gz with these files in a folder."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size, info.mtime, info.mode = len(content), int(time.time()), 0o644
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()
