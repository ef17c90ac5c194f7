"""The screen of a job: events in, a picture out. Bounded, and independent of a terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from jobs.records import JobRecord, ReplicaRecord
from jobs.states import ReplicaState
from jobs.times import seconds_between
from ops import terminal
from ops.logs.heuristics import Reading, UnitOfProgress, read
from ops.logs.lines import LogLine, clock
from ops.screen.picture import SEVERITIES, Picture, Row, Span, Table, bar, cell, harmless, height, state
from ops.screen.series import Series, StepRate, sparkline
from ops.screen.trials import TrialScreen

LINES_KEPT = 200
"""The number of newest lines, and of warnings."""
LINES_LEFT = 20
"""The number of last lines that stay after the screen, beside all warnings."""
_LOUD = frozenset({"WARNING", "ERROR", "CRITICAL", "NOTE"})
_SPARK = 32
_STOPPED = 128 + 15  # by SIGTERM, as all are once the job has ended
_LEAST_LOG = 4
_HEADS = ("REPLICA", "STATE", "STEPS/S", "LAST LINE", "RESTARTS", "CPU", "MEMORY")


@dataclass
class _Replica:
    """The known state of one replica."""

    name: str
    record: ReplicaRecord | None = None
    pace: StepRate = field(default_factory=StepRate)
    local_rate: float | None = None
    heard: float | None = None

    def rate(self, now: float) -> float | None:
        """Return its steps/s, as it reports them or else by its lines."""
        of_late = self.pace.rate(now)
        return of_late if of_late is None or self.local_rate is None else self.local_rate


class JobScreen:
    """A job as it is seen by who follows it. `now` is in seconds of the epoch everywhere."""

    def __init__(self, record: JobRecord, replicas: Iterable[str]) -> None:
        self._record = record
        self._replicas = {name: _Replica(name) for name in replicas}
        self._width = max((len(name) for name in self._replicas), default=0)
        self._pace, self._unit = StepRate(), UnitOfProgress.STEP
        self._maximum = record.steps
        tuned = record.trainingInput.get("hyperparameters")
        self._trials = TrialScreen(tuned) if isinstance(tuned, dict) else None
        self._shapes = {"loss": Series(), "accuracy": Series()}
        self._last: dict[str, str] = {}
        self._learned: tuple[int | None, dict[str, str]] | None = None
        self._newest: deque[tuple[int, LogLine]] = deque(maxlen=LINES_KEPT)
        self._loud: deque[tuple[int, LogLine]] = deque(maxlen=LINES_KEPT)
        self._count = 0

    def line(self, line: LogLine, now: float) -> None:
        """Add a line of a replica's log."""
        safe_line = LogLine(line.time, harmless(line.severity), harmless(line.replica), harmless(line.message))
        self._keep(safe_line)
        moment = _moment(line.time, now)
        replica = self._replicas.get(line.replica)
        if replica:
            replica.heard = max(moment, replica.heard or moment)
        if self._trials:
            self._trials.line(safe_line.message, line.replica, moment, now)
        elif reading := read(safe_line.message):  # of several trials at once no step is the job's
            self._take(reading, replica, moment, now)

    def note(self, text: str, now: float) -> None:
        """Add an event beside the logs."""
        moment = datetime.fromtimestamp(now).astimezone().isoformat(timespec="milliseconds")
        self._keep(LogLine(moment, "NOTE", "", harmless(text)))

    def job(self, record: JobRecord) -> None:
        """Apply the job's new record; the final one also holds the results of the replicas."""
        self._record = record
        self._maximum = record.steps or self._maximum
        for item in record.replicas:
            replica = self._replicas.get(str(item.get("name")))
            if replica and record.final:
                before = replica.record or ReplicaRecord(replica.name)
                result = {key: item[key] for key in ("state", "exitCode", "restarts") if key in item}
                replica.record = ReplicaRecord.from_dict({**before.to_dict(), **result})

    def replicas(self, records: Mapping[str, ReplicaRecord]) -> None:
        """Apply the new records of the replicas."""
        for name, record in records.items():
            if name in self._replicas:
                self._replicas[name].record = record

    def picture(self, now: float, lines: int) -> Picture:
        """Return a picture of at most `lines` lines: the job, its replicas, and the newest log lines below."""
        head, blank = self._head(now), [Row()]
        room = lines - height(head) - 1
        table = self._table(now, room - 2 - _LEAST_LOG)
        if table:
            table = [*blank, *table]
            room -= height(table)
        log = [self._log_row(line) for _, line in list(self._newest)[-room:]] if room > 0 else []
        return [*head, *table, *(blank if log else []), *log][: max(lines, 1)]

    def left(self, now: float) -> Picture:
        """Return the last picture: the final state, the stored warnings, and the last lines."""
        log_lines = dict(self._loud) | dict(list(self._newest)[-LINES_LEFT:])
        rows = [self._log_row(log_lines[number]) for number in sorted(log_lines)]
        if unseen := self._count - len(log_lines):
            what = f"{terminal.plural(unseen, 'line')} not shown here: fab logs {self._record.jobId} --lines all"
            rows.insert(0, Row.of(Span(what, "dim")))
        return [*self._head(now), Row(), *self._table(now, len(self._replicas)), Row(), *rows]

    def _keep(self, line: LogLine) -> None:
        self._newest.append((self._count, line))
        if line.severity in _LOUD:
            self._loud.append((self._count, line))
        self._count += 1

    def _take(self, reading: Reading, replica: _Replica | None, moment: float, now: float) -> None:
        figures = {key: value for key, value in (("loss", reading.loss), ("accuracy", reading.accuracy)) if value is not None}
        if reading.learned:
            self._learned = (reading.count, figures)
            if reading.count is not None and self._unit is UnitOfProgress.STEP:
                self._pace.mark(moment, reading.count, now)
            return
        self._last |= figures
        for key, value in figures.items():
            self._shapes[key].add(float(value))
        if reading.count is None or (
            reading.unit is UnitOfProgress.EPOCH and self._unit is UnitOfProgress.STEP and self._pace.count is not None
        ):
            return  # who counts steps is not asked for epochs
        self._advance(reading, reading.count, replica, moment, now)

    def _advance(self, reading: Reading, count: int, replica: _Replica | None, moment: float, now: float) -> None:
        went_back = replica is not None and replica.pace.count is not None and count < replica.pace.count
        if went_back or reading.unit is not self._unit:
            # It resumes from a checkpoint, and so do all, or it reports steps after all.
            self._pace, self._unit = StepRate(), reading.unit
            for each in self._replicas.values():
                each.pace = StepRate()
        self._maximum = reading.maximum or self._maximum
        self._pace.mark(moment, count, now)
        if replica:
            replica.pace.mark(moment, count, now)
            replica.local_rate = reading.local_rate

    def _head(self, now: float) -> list[Row]:
        record = self._record
        began = record.startTime or record.createTime
        took = terminal.duration(max(seconds_between(began, record.endTime or _rfc(now)), 0))
        title = Row.of(Span(record.jobId, "bold"), "  ", state(record.state), "  ", took)
        why = harmless(record.errorMessage.partition("\n")[0])
        trials = self._trials.rows(record.final, now) if self._trials else []
        return [title, *([Row.of(Span(why, "red"))] if why else []), *trials, *self._progress(now), *self._figures()]

    def _progress(self, now: float) -> list[Row]:
        pace, unit = self._pace, str(self._unit)
        if pace.count is None:
            return []
        has_maximum = self._maximum is not None and (self._unit is UnitOfProgress.EPOCH or self._maximum >= pace.count)
        maximum = self._maximum if has_maximum else None
        spans = [f"{unit:<8} {pace.count}" + (f" of {maximum}" if maximum else "")]
        if maximum:
            share = pace.count / maximum
            spans.append(f"  {bar(share, _SPARK)} {share:.0%}")
        seconds = None if self._record.final else pace.seconds_to(maximum, now)
        if seconds is not None:
            spans.append(f"  {terminal.duration(seconds)} to go")
        rows = [Row.of(*spans)]
        if self._unit is UnitOfProgress.STEP and pace.mean is not None:
            rate = pace.mean if self._record.final else pace.rate(now)
            shape = Span(sparkline(pace.rates.values, _SPARK, least=0.0), "cyan")
            rows.append(Row.of(f"{'steps/s':<8} {_rate(rate):<7} ", shape, f"  {_rate(pace.mean)} on average"))
        return rows

    def _figures(self) -> list[Row]:
        rows = [
            Row.of(f"{key:<8} {self._last[key]:<7} ", Span(sparkline(shape.values, _SPARK), "cyan"))
            for key, shape in self._shapes.items()
            if key in self._last
        ]
        if self._learned and self._learned[1]:
            step, figures = self._learned
            words = ", ".join(f"{key} {value}" for key, value in figures.items())
            rows.append(Row.of(f"{'eval':<8} {words}" + (f" at step {step}" if step is not None else "")))
        return rows

    def _table(self, now: float, most: int) -> list[Row | Table]:
        """Return one line for each replica, as many as fit."""
        if most < 1 or not self._replicas:
            return []
        every = list(self._replicas.values())
        replicas = every if len(every) <= most else every[: most - 1]
        rows = tuple(self._replica_row(replica, now) for replica in replicas)
        rest = every[len(replicas) :]
        heads = (*_HEADS[:2], "TRIAL", *_HEADS[3:]) if self._trials else _HEADS
        return [Table(heads, rows, frozenset(heads[2:])), *([Row.of(Span(_of_the_rest(rest), "dim"))] if rest else [])]

    def _replica_row(self, replica: _Replica, now: float) -> tuple[Span, ...]:
        record = replica.record
        ended = self._record.final or (record is not None and record.state is ReplicaState.EXITED)
        age = None if replica.heard is None or ended else f"{terminal.duration(max(now - replica.heard, 0))} ago"
        usage = None if record is None or ended else record.usage
        return (
            Span(replica.name, "bold"),
            _replica_state(self._record, record),
            cell(None if ended else self._trials.of(replica.name) if self._trials else _of_late(replica.rate(now))),
            cell(age),
            cell(record.restarts if record else None, "yellow" if record and record.restarts else ""),
            cell(None if usage is None or usage.cpus is None else f"{usage.cpus:.0%}"),
            cell(None if usage is None or usage.memoryBytes is None else terminal.size(usage.memoryBytes)),
        )

    def _log_row(self, line: LogLine) -> Row:
        style = SEVERITIES.get(line.severity, "")
        time = clock(line.time)
        if line.severity == "NOTE":
            return Row.of(Span(f"{time} {line.message}", "dim"))
        who = f" {line.replica:<{self._width}}  "
        return Row.of(Span(time, "dim"), " ", Span(f"{line.severity:<7}", style), Span(who, "cyan"), Span(line.message, style))


def _replica_state(job: JobRecord, record: ReplicaRecord | None) -> Span:
    if record is None:
        return cell(None)
    if record.name in job.lost and not job.final:
        return state(ReplicaState.LOST)
    if record.state is ReplicaState.EXITED and record.exitCode:
        stopped = job.final and record.exitCode == _STOPPED
        return Span(f"EXITED {record.exitCode}", "dim" if stopped else "red")
    return state(record.state)


def _of_the_rest(replicas: list[_Replica]) -> str:
    """Format the remaining replicas: `and 12 more: 11 RUNNING, 1 LOST`."""
    states: dict[str, int] = {}
    for replica in replicas:
        name = str(replica.record.state) if replica.record else "not heard of"
        states[name] = states.get(name, 0) + 1
    return f"and {len(replicas)} more: " + ", ".join(f"{count} {name}" for name, count in states.items())


def _of_late(rate: float | None) -> str | None:
    return None if rate is None else _rate(rate)


def _rate(value: float | None) -> str:
    """Format a rate with three significant digits: `0.234`, `18.7`, `1200`."""
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _moment(time: str, now: float) -> float:
    """Return a line's RFC 3339 time in seconds of the epoch, or now if it has none."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError):
        return now


def _rfc(now: float) -> str:
    return datetime.fromtimestamp(now).astimezone().isoformat()
