"""The live screen of a job: build a frame of text from its events four times a second, in bounded memory."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from rich.text import Text

from jobs.chunks import LogFilter
from jobs.records import JobRecord, ReplicaRecord
from jobs.states import ReplicaState
from jobs.times import seconds_between
from ops import terminal
from ops.client import Client
from ops.cluster.cluster import ClusterClient
from ops.logs.follow import Event, Note, ReplicaRecords, WaitReason
from ops.logs.heuristics import LineMetrics, UnitOfProgress, parse_metrics
from ops.logs.lines import LogLine, clock
from ops.screen.render import SEVERITIES, Frame, Screen, format_cell, layout_columns, print_frame, sanitize, state_text
from ops.screen.series import CountRate, Series, progress_line, sparkline
from ops.screen.trials import TrialScreen

REFRESH_SECONDS = 0.25
LINES_KEPT = 200
"""The number of newest lines, and of newest warnings, that are kept in memory."""
LINES_LEFT = 20
"""The number of last lines that stay on the terminal after the screen, besides the kept warnings."""
_WARNINGS = frozenset({"WARNING", "ERROR", "CRITICAL", "NOTE"})
_SIGTERM_EXIT = 128 + 15  # hosts stop the other replicas by SIGTERM once the job has ended
_MIN_LOG_LINES = 4
_HEADS = ("REPLICA", "STATE", "STEPS/S", "LAST LINE", "RESTARTS", "CPU", "MEMORY")


def follow(cluster: ClusterClient, record: JobRecord, replicas: Sequence[str], log_filter: LogFilter) -> JobRecord | None:
    """Show the job until it ends, and leave its last state on the terminal; return its last record, if there is one."""
    job_screen = JobScreen(record, replicas)
    follower = Client(cluster).follow(record, list(replicas), log_filter, for_screen=True)
    try:
        with Screen() as screen:
            return _show(follower.events(), job_screen, screen)
    finally:
        print_frame(job_screen.final_frame(time.time()))
        sys.stdout.flush()


def _show(events: Iterator[Event], job_screen: JobScreen, screen: Screen) -> JobRecord | None:
    last_record, last_draw = None, 0.0
    try:
        for event in events:
            if isinstance(event, JobRecord):
                last_record = event
            job_screen.add(event, time.time())
            if time.monotonic() - last_draw >= REFRESH_SECONDS:
                screen.show(job_screen.frame(time.time(), screen.lines))
                last_draw = time.monotonic()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(last_record.state if last_record else "") from None
    return last_record


@dataclass
class _Replica:
    """The known state of one replica."""

    name: str
    record: ReplicaRecord | None = None
    step_rate: CountRate = field(default_factory=CountRate)
    local_rate: float | None = None
    last_line_at: float | None = None

    def rate(self, now: float) -> float | None:
        """Return its steps/s: as its lines report them, or else by the global steps of its lines."""
        recent = self.step_rate.rate(now)
        return recent if recent is None or self.local_rate is None else self.local_rate


class JobScreen:
    """The known state of a followed job. In all methods, `now` is a Unix time in seconds."""

    def __init__(self, record: JobRecord, replicas: Iterable[str]) -> None:
        self._record = record
        self._replicas = {name: _Replica(name) for name in replicas}
        self._name_width = max((len(name) for name in self._replicas), default=0)
        self._step_rate, self._unit = CountRate(), UnitOfProgress.STEP
        self._maximum = record.steps
        hyperparameters = record.trainingInput.get("hyperparameters")
        self._trials = TrialScreen(hyperparameters) if isinstance(hyperparameters, dict) else None
        self._series = {"loss": Series(), "accuracy": Series()}
        self._last: dict[str, str] = {}
        self._evaluation: tuple[LineMetrics, dict[str, str]] | None = None
        self._newest: deque[tuple[int, LogLine]] = deque(maxlen=LINES_KEPT)
        self._warnings: deque[tuple[int, LogLine]] = deque(maxlen=LINES_KEPT)
        self._count = 0

    def add(self, event: Event, now: float) -> None:
        """Apply an event."""
        if isinstance(event, LogLine):
            self._add_line(event, now)
        elif isinstance(event, JobRecord):
            self._set_record(event)
        elif isinstance(event, ReplicaRecords):
            for name, record in event.records.items():
                if name in self._replicas:
                    self._replicas[name].record = record
        elif isinstance(event, Note | WaitReason) and event.text:
            self._keep(LogLine(_to_rfc3339(now, "milliseconds"), "NOTE", "", sanitize(event.text)))

    def frame(self, now: float, lines: int) -> Frame:
        """Return a frame of at most `lines` lines: the job, its replicas, and below them the newest log lines."""
        head = self._head(now)
        room = lines - len(head) - 1
        table = self._table(now, room - 2 - _MIN_LOG_LINES)
        if table:
            table = [Text(), *table]
            room -= len(table)
        log = [self._log_row(line) for _, line in list(self._newest)[-room:]] if room > 0 else []
        return [*head, *table, *([Text()] if log else []), *log][: max(lines, 1)]

    def final_frame(self, now: float) -> Frame:
        """Return the last frame: the final state, and the last lines with all kept warnings."""
        log_lines = dict(self._warnings) | dict(list(self._newest)[-LINES_LEFT:])
        rows = [self._log_row(log_lines[number]) for number in sorted(log_lines)]
        if hidden := self._count - len(log_lines):
            what = f"{terminal.plural(hidden, 'line')} not shown here: fab logs {self._record.jobId} --lines all"
            rows.insert(0, Text(what, "dim"))
        return [*self._head(now), Text(), *self._table(now, len(self._replicas)), Text(), *rows]

    def _add_line(self, line: LogLine, now: float) -> None:
        safe_line = LogLine(line.time, sanitize(line.severity), sanitize(line.replica), sanitize(line.message))
        self._keep(safe_line)
        moment = _moment(line.time, now)
        replica = self._replicas.get(line.replica)
        if replica:
            replica.last_line_at = max(moment, replica.last_line_at or moment)
        if self._trials:
            self._trials.add_line(safe_line.message, line.replica, moment, now)
        elif reading := parse_metrics(safe_line.message):  # but not of trials: each counts its own steps
            self._apply(reading, replica, moment, now)

    def _set_record(self, record: JobRecord) -> None:
        """Apply a new record of the job; its final record also holds the results of the replicas."""
        self._record = record
        self._maximum = record.steps or self._maximum
        for item in record.replicas if record.final else ():
            if replica := self._replicas.get(str(item.get("name"))):
                previous = replica.record or ReplicaRecord(replica.name)
                result = {key: item[key] for key in ("state", "exitCode", "restarts") if key in item}
                replica.record = ReplicaRecord.from_dict({**previous.to_dict(), **result})

    def _keep(self, line: LogLine) -> None:
        self._newest.append((self._count, line))
        if line.severity in _WARNINGS:
            self._warnings.append((self._count, line))
        self._count += 1

    def _apply(self, reading: LineMetrics, replica: _Replica | None, moment: float, now: float) -> None:
        metrics = {key: value for key, value in (("loss", reading.loss), ("accuracy", reading.accuracy)) if value is not None}
        if reading.evaluation:
            self._evaluation = (reading, metrics)
            if reading.count is not None and reading.unit is self._unit is UnitOfProgress.STEP:
                self._step_rate.add_point(moment, reading.count, now)
            return
        self._last |= metrics
        for key, value in metrics.items():
            self._series[key].add(float(value))
        counts_steps = self._unit is UnitOfProgress.STEP and self._step_rate.count is not None
        if reading.count is not None and not (counts_steps and reading.unit is UnitOfProgress.EPOCH):
            self._advance(reading, reading.count, replica, moment, now)

    def _advance(self, reading: LineMetrics, count: int, replica: _Replica | None, moment: float, now: float) -> None:
        went_back = replica is not None and replica.step_rate.count is not None and count < replica.step_rate.count
        if went_back or reading.unit is not self._unit:
            # All replicas resume from a checkpoint, or the trainer now reports steps instead of epochs.
            self._step_rate, self._unit = CountRate(), reading.unit
            for each in self._replicas.values():
                each.step_rate = CountRate()
        self._maximum = reading.maximum or self._maximum
        self._step_rate.add_point(moment, count, now)
        if replica:
            replica.step_rate.add_point(moment, count, now)
            replica.local_rate = reading.local_rate

    def _head(self, now: float) -> list[Text]:
        record = self._record
        start = record.startTime or record.createTime
        elapsed = terminal.duration(max(seconds_between(start, record.endTime or _to_rfc3339(now)), 0))
        title = Text.assemble((record.jobId, "bold"), "  ", state_text(record.state), "  ", elapsed)
        why = sanitize(record.errorMessage.partition("\n")[0])
        trials = self._trials.rows(record.final, now) if self._trials else []
        return [title, *([Text(why, "red")] if why else []), *trials, *self._progress(now), *self._metrics()]

    def _progress(self, now: float) -> list[Text]:
        step_rate = self._step_rate
        if step_rate.count is None:
            return []
        has_maximum = self._maximum is not None and (self._unit is UnitOfProgress.EPOCH or self._maximum >= step_rate.count)
        rows = [progress_line(str(self._unit), step_rate, self._maximum if has_maximum else None, self._record.final, now)]
        if self._unit is UnitOfProgress.STEP and step_rate.mean is not None:
            rate = step_rate.mean if self._record.final else step_rate.rate(now)
            shape = sparkline(step_rate.rates.values, least=0.0)
            rows.append(
                Text.assemble(f"{'steps/s':<8} {_rate(rate):<7} ", (shape, "cyan"), f"  {_rate(step_rate.mean)} on average")
            )
        return rows

    def _metrics(self) -> list[Text]:
        rows = [
            Text.assemble(f"{key:<8} {self._last[key]:<7} ", (sparkline(series.values), "cyan"))
            for key, series in self._series.items()
            if key in self._last
        ]
        if self._evaluation and self._evaluation[1]:
            reading, metrics = self._evaluation
            words = ", ".join(f"{key} {value}" for key, value in metrics.items())
            rows.append(
                Text(f"{'eval':<8} {words}" + (f" at {reading.unit} {reading.count}" if reading.count is not None else ""))
            )
        return rows

    def _table(self, now: float, max_lines: int) -> list[Text]:
        """Return a table of the replicas; if they do not fit, a last line counts the rest."""
        if max_lines < 1 or not self._replicas:
            return []
        every = list(self._replicas.values())
        replicas = every if len(every) <= max_lines else every[: max_lines - 1]
        heads = (*_HEADS[:2], "TRIAL", *_HEADS[3:]) if self._trials else _HEADS
        table = layout_columns(heads, [self._replica_row(replica, now) for replica in replicas], right=heads[2:])
        if rest := every[len(replicas) :]:
            states = Counter(str(replica.record.state) if replica.record else "without a report" for replica in rest)
            counts = ", ".join(f"{count} {name}" for name, count in states.items())
            table.append(Text(f"and {len(rest)} more: {counts}", "dim"))
        return table

    def _replica_row(self, replica: _Replica, now: float) -> tuple[Text, ...]:
        record = replica.record
        ended = self._record.final or (record is not None and record.state is ReplicaState.EXITED)
        since = replica.last_line_at
        age = None if since is None or ended else f"{terminal.duration(max(now - since, 0))} ago"
        rate = None if ended else replica.rate(now)
        usage = None if record is None or ended else record.usage
        return (
            Text(replica.name, "bold"),
            _replica_state(self._record, record),
            format_cell(
                self._trials.trial_of(replica.name) if self._trials and not ended else None if rate is None else _rate(rate)
            ),
            format_cell(age),
            format_cell(record.restarts if record else None, "yellow" if record and record.restarts else ""),
            format_cell(None if usage is None or usage.cpus is None else f"{usage.cpus:.0%}"),
            format_cell(None if usage is None or usage.memoryBytes is None else terminal.size(usage.memoryBytes)),
        )

    def _log_row(self, line: LogLine) -> Text:
        style = SEVERITIES.get(line.severity, "")
        time = clock(line.time)
        if line.severity == "NOTE":
            return Text(f"{time} {line.message}", "dim")
        name = f" {line.replica:<{self._name_width}}  "
        return Text.assemble((time, "dim"), " ", (f"{line.severity:<7}", style), (name, "cyan"), (line.message, style))


def _replica_state(job: JobRecord, record: ReplicaRecord | None) -> Text:
    if record is None:
        return format_cell(None)
    if record.name in job.lostReplicas and not job.final:
        return state_text(ReplicaState.LOST)
    if record.state is ReplicaState.EXITED and record.exitCode:
        stopped = job.final and record.exitCode == _SIGTERM_EXIT
        return Text(f"EXITED {record.exitCode}", "dim" if stopped else "red")
    return state_text(record.state)


def _rate(value: float | None) -> str:
    """Format a rate with three significant digits, or as a whole number from 100 on: `0.234`, `18.7`, `1234`."""
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _moment(time: str, now: float) -> float:
    """Return a line's RFC 3339 time as a Unix time, or `now` if it is invalid."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError):
        return now


def _to_rfc3339(now: float, timespec: str = "auto") -> str:
    return datetime.fromtimestamp(now).astimezone().isoformat(timespec=timespec)
