"""`fab bundle`: write one file with the evidence of a job: host diagnoses, records, ends of logs.

It is no zip, which would compress its many small files one by one, though they have many lines in common.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs import paths
from jobs.bucket import NO_SPACE
from jobs.chunks import LogFilter
from jobs.firsterror import earliest
from jobs.records import JobRecord, ReplicaRecord
from jobs.states import JobState
from jobs.times import seconds_between
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import format_elapsed, replica_names
from ops.cluster.remote import COMMAND_SECONDS
from ops.errors import DONE, UsageError, one_line
from ops.logs.lines import LogLine
from ops.package.package import tar_gz
from ops.report.command import can_create, write
from ops.report.evidence import JobEvidence
from ops.show.doctor import clock_offset_ms
from ops.show.jobs import describe_to_stdout

LINES = 200
_FULL_PERCENT = 90
_CLOCK_SECONDS = 5.0
# The time limit of a host for its diagnosis (`hosts.agent.diagnosis`).
_DIAGNOSIS_SECONDS = 30.0
_POLL_SECONDS = 0.5
_SECRET, _MIN_SECRET_LENGTH = "[secret]", 4
_NOTIFY_TARGET = re.compile(rb'"notify":"(?:[^"\\]|\\.)+"')
# The encodings in which the files may have a secret.
_ENCODINGS: tuple[Callable[[str], str], ...] = (
    str,
    terminal.sanitize,
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
)
_CONTENTS = """\
Contents:
  describe.txt      what fab describe shows
  job.json, plan.json, manifest.json, cancel.json, replicas/
                    the records in the bucket
  diagnosis/        each host's state when the job FAILED: exit of its trainer, units, disks, memory, TF_CONFIG,
                    packages, clock
  logs/             the last lines of each replica
  hosts/            the state of the reachable hosts when this file was made
"""


@dataclass
class Bundle:
    """The files of a bundle, and what its summary uses: diagnoses, last log lines, and offsets of hosts' clocks."""

    job: JobEvidence
    files: dict[str, bytes] = field(default_factory=dict)
    diagnoses: dict[str, dict[str, Any]] = field(default_factory=dict)
    logs: dict[str, list[LogLine]] = field(default_factory=dict)
    clock_offsets_ms: dict[str, float] = field(default_factory=dict)


def bundle(cluster: ClusterClient, job_id: str | None, dest: str | None, force: bool, as_json: bool) -> int:
    """Write the bundle of a job, by default the newest; overwrite a file only with `force`."""
    job = JobEvidence(cluster, job_id)
    record = job.record
    target = Path(dest if dest is not None else f"{record.jobId}-bundle.tar.gz")
    check_target(target, force)
    with terminal.ProgressLine(f"collecting evidence of {record.jobId}") as step:
        bundle = gather(cluster, job, step)
    for note in job.notes:
        terminal.note(note)
    files = {"summary.txt": summary(bundle).encode(), **bundle.files}
    content = pack(f"{record.jobId}-bundle", redact(files, find_secrets(bundle)))
    write(target, content)
    if as_json:
        result = {"jobId": record.jobId, "state": record.state, "dest": str(target), "bytes": len(content)}
        terminal.print_json({**result, "files": list(files), "diagnosed": list(bundle.diagnoses), "notes": job.notes})
    else:
        terminal.out(f"{target}: {terminal.size(len(content))}, begin with its summary.txt")
    return DONE


def check_target(target: Path, force: bool) -> None:
    """Raise UsageError if the file cannot be written or would be overwritten."""
    if can_create(target):
        return
    if target.is_dir():
        raise UsageError(f"{target} is a folder: --dest is the file to write")
    if not force:
        raise UsageError(f"{target} is there already: give another --dest, or --force to write over it")


def gather(cluster: ClusterClient, job: JobEvidence, step: terminal.ProgressLine) -> Bundle:
    """Collect all readable evidence of a job; add a note for each part that cannot be read."""
    bundle, record, names = Bundle(job), job.record, replica_names(job.record)
    step.detail = "(records)"
    bundle.files["describe.txt"] = job.read_or_note(lambda: _describe(cluster, job), b"", "it cannot be described")
    bundle.files |= {path: _without_target(content) for path, content in job.files.items()}
    step.detail = "(diagnoses)"
    diagnoses: dict[str, bytes] = job.read_or_note(lambda: _diagnoses(cluster, job, step), {}, "the diagnoses were not read")
    for name, content in diagnoses.items():
        try:
            diagnosis = json.loads(content)
            if _is_of_earlier_job(diagnosis, record):
                job.notes.append(f"the diagnosis by the host of {name} is of an earlier job of this id: it is omitted")
                continue
            lines = [LogLine(each["time"], each["severity"], name, each["message"]) for each in diagnosis["lines"]]
            bundle.diagnoses[name], bundle.logs[name] = diagnosis, lines
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            job.notes.append(f"the diagnosis by the host of {name} is damaged")
        bundle.files[f"diagnosis/{name}.json"] = content
    job.notes += _missing_diagnosis_notes(bundle)
    step.detail = "(logs)"
    missing = [name for name in names if name not in bundle.logs]
    if missing and _has_secrets(job):
        why = "the job has secrets, which only a diagnosis hides"
        job.notes.append(f"the log of {', '.join(missing)} is omitted: {why}; fab logs {record.jobId} shows it")
        bundle.files |= {f"logs/{name}.log": f"omitted: {why}\n".encode() for name in missing}
    elif missing:
        log_filter = LogFilter(lines=LINES)
        logs: dict[str, list[LogLine]] = job.read_or_note(
            lambda: job.read_logs(missing, log_filter), {}, "no more logs were read"
        )
        bundle.logs |= logs
    for name in filter(bundle.logs.get, names):
        text = "".join(f"{_format_line(line)}\n" for line in bundle.logs[name])
        bundle.files[f"logs/{name}.log"] = text.encode("utf-8", "replace")
    step.detail = "(reachable hosts)"
    job.read_or_note(lambda: _query_hosts(cluster, bundle), None, "the hosts were not queried")
    return bundle


def _missing_diagnosis_notes(bundle: Bundle) -> list[str]:
    record = bundle.job.record
    if record.state is not JobState.FAILED:
        return [f"job {record.jobId} is {record.state}: no diagnosis was made, as hosts make one when a job FAILED"]
    names = [name for name in replica_names(record) if name not in bundle.diagnoses]
    why = "it never started, was lost, had no bucket, or has not finished it"
    return [f"no diagnosis by {', '.join(names)}: {why}"] if names else []


def _describe(cluster: ClusterClient, job: JobEvidence) -> bytes:
    with redirect_stdout(io.StringIO()) as text:
        describe_to_stdout(cluster, job.record, job.replicas)
    return text.getvalue().encode()


def _without_target(content: bytes) -> bytes:
    """Return a record without its notification target: the path of a URL may be a secret."""
    return _NOTIFY_TARGET.sub(f'"notify":"{_SECRET}"'.encode(), content)


def _diagnoses(cluster: ClusterClient, job: JobEvidence, step: terminal.ProgressLine) -> dict[str, bytes]:
    """Read the diagnoses; if the job has just FAILED, wait for those that its hosts still write."""
    job_id, names = job.record.jobId, [replica.name for replica in job.replicas]
    deadline = time.monotonic() + _seconds_left(job.record)
    while True:
        existing = cluster.bucket.sizes(f"{paths.folder(job_id)}/diagnosis")
        missing = [name for name in names if f"{name}.json" not in existing and name not in job.record.lostReplicas]
        if not missing or time.monotonic() >= deadline:
            items = {name: cluster.bucket.read(paths.diagnosis(job_id, name)) for name in names if f"{name}.json" in existing}
            return {name: item.content for name, item in items.items() if item}
        step.detail = f"(diagnoses: waiting for {terminal.list_some(missing)})"
        time.sleep(_POLL_SECONDS)


def _seconds_left(record: JobRecord) -> float:
    """Return for how many seconds hosts may still write diagnoses, by the clock of this machine."""
    if record.state is not JobState.FAILED or not record.endTime or not record.hosts:
        return 0.0
    return min(max(_DIAGNOSIS_SECONDS - seconds_between(record.endTime), 0.0), _DIAGNOSIS_SECONDS)


def _is_of_earlier_job(diagnosis: Mapping[str, Any], record: JobRecord) -> bool:
    """Return whether a diagnosis belongs to an earlier job with this id, even if the host's clock is wrong."""
    ended = _part(diagnosis, "clock").get("leaderTime")
    return ended != record.endTime and str(diagnosis.get("time", record.createTime)) < record.createTime


def _has_secrets(job: JobEvidence) -> bool:
    """Return whether the job's plan names secrets; True if the plan is unknown."""
    if "job.json" not in job.files:
        return True
    try:
        return bool(json.loads(job.files.get("plan.json", b"{}")).get("secrets"))
    except (ValueError, AttributeError, RecursionError):
        return True


def _format_line(line: LogLine) -> str:
    return terminal.sanitize(f"{line.time} {line.severity:<8} {line.message}".replace("\n", "␊"))


def host_state_command(since: str) -> str:
    """Return the diagnostic shell command for a host.

    Its output begins with a line with the host's clock; units, disks, memory and the kernel's lines about memory follow.
    """
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


def _query_hosts(cluster: ClusterClient, bundle: Bundle) -> None:
    """Query the job's hosts, which may run another job by now; add a note for each that does not answer."""
    record, fleet = bundle.job.record, cluster.fleet
    hosts = {name: host for name, host in record.placement.items() if host in cluster.inventory.names}
    command = host_state_command(record.createTime)

    def ask(name: str) -> tuple[float, str]:
        fleet.connection(hosts[name])
        sent = time.time()
        return sent, fleet.run(hosts[name], command).output

    outcome = fleet.each(hosts, ask, COMMAND_SECONDS)
    for name, (sent, output) in outcome.results.items():
        bundle.files[f"hosts/{hosts[name]}.txt"] = output.encode("utf-8", "replace")
        with suppress(ValueError, IndexError):
            bundle.clock_offsets_ms[name] = clock_offset_ms(output, sent)
    bundle.job.notes += [f"{one_line(error)}: it was not queried" for error in outcome.failures.values()]


def summary(bundle: Bundle) -> str:
    """Format the summary: the job's first error, how it ended, and a line for each replica."""
    record = bundle.job.record
    first = earliest((replica.name, replica.firstError) for replica in bundle.job.replicas)
    lines = [f"First error: {first[0]}, {first[1].time}: {first[1].message}" if first else "No replica printed an error."]
    elapsed = format_elapsed(record)
    why = record.errorMessage.partition("\n")[0]
    lines.append(f"Job {record.jobId} {record.state}{f' after {elapsed}' if elapsed else ''}{f': {why}' if why else ''}")
    lines += ["", *(_describe_replica(bundle, replica) for replica in bundle.job.replicas)]
    if bundle.job.notes:
        lines += ["", *(f"Note: {note}" for note in bundle.job.notes)]
    return terminal.sanitize("\n".join(lines) + "\n\n") + _CONTENTS


def _describe_replica(bundle: Bundle, replica: ReplicaRecord) -> str:
    diagnosis = bundle.diagnoses.get(replica.name, {})
    parts = [*_describe_end(replica, diagnosis), *_describe_disks(replica, diagnosis, bundle.logs.get(replica.name, []))]
    if replica.firstError:
        parts.append(f"its first error: {replica.firstError.message}")
    ahead = _number(_part(diagnosis, "clock").get("aheadSeconds"))
    if abs(ahead) > _CLOCK_SECONDS:
        way = "ahead of" if ahead > 0 else "behind"
        parts.append(f"its clock was {abs(ahead):.0f} s {way} that of {_part(diagnosis, 'clock').get('leader')}")
    if abs(offset := bundle.clock_offsets_ms.get(replica.name, 0.0)) > _CLOCK_SECONDS * 1000:
        parts.append(f"its clock is now {offset / 1000:+.0f} s off that of this machine")
    host = bundle.job.record.placement.get(replica.name, replica.name)
    return f"{replica.name}{f' on {host}' if host != replica.name else ''}: {'; '.join(parts)}"


def _describe_end(replica: ReplicaRecord, diagnosis: Mapping[str, Any]) -> list[str]:
    code = "" if replica.exitCode is None else f" with {replica.exitCode}"
    how = _part(diagnosis, "trainer").get("ended") or replica.terminationReason
    limit = f" of {terminal.size(replica.memoryLimit)}" if replica.outOfMemory and replica.memoryLimit else ""
    parts = [f"{replica.state}{code}{f', {how}' if how else ''}{limit}"]
    return [*parts, terminal.plural(replica.restarts, "restart")] if replica.restarts else parts


def _describe_disks(replica: ReplicaRecord, diagnosis: Mapping[str, Any], log: list[LogLine]) -> list[str]:
    """List full disks, and the trainer's out-of-disk error: the files that filled a disk are removed when it ends."""
    parts = []
    disks = diagnosis.get("disks")
    for disk in filter(_is_object, disks if isinstance(disks, list) else []):
        total, free = _number(disk.get("totalBytes")), _number(disk.get("freeBytes"))
        if total and (full := 100 * (1 - free / total)) >= _FULL_PERCENT:
            parts.append(f"{disk.get('path')} is {full:.0f} % full")
    texts = "\n".join((replica.errorMessage, *(line.message for line in log)))
    return [*parts, f'it ran out of disk, "{match[0]}"'] if (match := NO_SPACE.search(texts)) else parts


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _part(diagnosis: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = diagnosis.get(key)
    return part if isinstance(part, dict) else {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def find_secrets(bundle: Bundle) -> dict[str, str]:
    """Return the values to hide, each with its replacement.

    A diagnosis has [secret] in lines that the records have as the trainer printed them. Such lines are replaced by their
    redacted form, and secrets that follow from a comparison of the two by [secret].
    """
    values: dict[str, str] = {}
    for replica in bundle.job.replicas:
        trainer = _part(bundle.diagnoses.get(replica.name, {}), "trainer")
        first = replica.firstError.message if replica.firstError else ""
        first_redacted = _part(trainer, "firstError").get("message")
        for printed, redacted in ((replica.errorMessage, trainer.get("errorMessage")), (first, first_redacted)):
            for line, redacted_line in zip(printed.splitlines(), str(redacted).splitlines(), strict=False):
                values |= _match_redacted(line, redacted_line)
    return values


def _match_redacted(original: str, redacted: str) -> dict[str, str]:
    """Compare a line with its redacted form; map the line to that form, and the secret to [secret] if one value fits."""
    first, *rest = parts = redacted.split(_SECRET)
    least = len("".join(parts)) + _MIN_SECRET_LENGTH * len(rest)
    fits = rest and original.startswith(first) and original.endswith(rest[-1])
    if original == redacted or len(original) < least or not fits:
        return {}
    same = "(?P=value)".join(map(re.escape, rest))
    match = re.fullmatch(f"{re.escape(first)}(?P<value>.+?){same}", original, re.DOTALL)
    return {original: redacted, **({match["value"]: _SECRET} if match else {})}


def redact(files: Mapping[str, bytes], values: Mapping[str, str]) -> dict[str, bytes]:
    """Replace the keys of `values` by their values in the files, in each encoding."""
    forms = {encode(value): encode(instead) for value, instead in values.items() for encode in _ENCODINGS}
    redacted = dict(files)
    for form in sorted(forms, key=len, reverse=True):
        old, new = (text.encode("utf-8", "replace") for text in (form, forms[form]))
        redacted = {name: content.replace(old, new) for name, content in redacted.items()}
    return redacted


def pack(folder: str, files: Mapping[str, bytes]) -> bytes:
    """Return a tar.gz with these files in a folder."""
    return tar_gz(((f"{folder}/{name}", content, 0o644) for name, content in files.items()), 9, time=int(time.time()))
