"""Read a program's progress from its output: lines as in Cloud ML's samples, or reports as JSON.

    Train [master/0], step 348: … (1.037 sec) …               global step, and seconds since this replica began to train
    Train [master/0], step 348: loss: 0.729, accuracy: 0.834 (1.037 sec) 200.4 global steps/s, 99.7 local steps/s
    Eval, step 990: loss: 0.400, accuracy: 0.890              any names and numbers, in Train and Eval lines
    Exchange every 8 steps: …                                 from here on, local steps between two exchanges
    Final metrics after 5006 steps, loss: 0.228, NAME: NUMBER, …
    {"scaletier.progress": {"step": 348, …}}                  a report of any program, see `read_report`

… stands for any text. docs/trainers.md defines these lines for authors of trainers.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

TRAIN_LINE = "Train [master/0], step 348: … (1.037 sec) …"
_TRAIN = re.compile(r"Train \[\w+/\d+\], step (\d+): (.*)\((\d+\.\d+) sec\)(.*)")
_LOCAL = re.compile(r"(\d+(?:\.\d+)?) local steps/s")
_EVAL = re.compile(r"\bEval, step (\d+): (.*)")
_PERIOD = re.compile(r"Exchange every (\d+) steps")
_FINAL = re.compile(r"Final metrics after (\d+) steps, (.*)")
_METRIC = re.compile(r"\b(\w+(?:[ ./@-]\w+)*): (\S+?)(?:,|$)")

REPORT_KEY = "scaletier.progress"
LONGEST_REPORT, LONGEST_LINE = 4096, 1000
"""The most characters: a longer report is invalid, any other longer line is ignored."""
MOST_METRICS, LONGEST_NAME = 32, 64
_REPORT = re.compile(rf'\s*\{{\s*"{re.escape(REPORT_KEY)}"\s*:')
_HINTS = ("Train [", "Eval, step", "Final metrics", REPORT_KEY)
_LAST_STEP = 2**53
_WINDOW_SECONDS, _MARKS, _APART_SECONDS = 30.0, 32, 1.0


@dataclass(frozen=True)
class TrainPoint:
    """A Train line: the global step, and the seconds since training began."""

    step: int
    seconds: float


def _search(kind: re.Pattern[str], line: str) -> re.Match[str] | None:
    """Search a line; None if it is too long, or if its steps, the first group, are above the limit.

    The time that the patterns take may rise with the square of the line's length.
    """
    match = kind.search(line) if len(line) <= LONGEST_LINE else None
    return match if match and int(match[1]) <= _LAST_STEP else None


def parse_train_point(line: str) -> TrainPoint | None:
    """Read a Train line; None for any other."""
    match = _search(_TRAIN, line)
    return TrainPoint(int(match[1]), float(match[3])) if match else None


@dataclass(frozen=True)
class MetricPoint:
    """The metrics of a step, and the steps/s of this replica alone if the line has them."""

    step: int
    values: dict[str, float]
    rate: float | None = None


def parse_train_metrics(line: str) -> MetricPoint | None:
    """Read the metrics of a Train line or of a report; None for any other line."""
    if report := valid_report(line):
        return MetricPoint(report.step, report.metrics if report.loss is None else {"loss": report.loss, **report.metrics})
    if not (match := _search(_TRAIN, line)):
        return None
    local = _LOCAL.search(match[4])
    return MetricPoint(int(match[1]), _numbers(match[2].strip()), float(local[1]) if local else None)


def parse_eval_metrics(line: str) -> MetricPoint | None:
    """Read the metrics of an Eval line or of the final line; None for any other line."""
    match = _search(_EVAL, line) or _search(_FINAL, line)
    return MetricPoint(int(match[1]), _numbers(match[2])) if match else None


def _numbers(text: str) -> dict[str, float]:
    """Read `loss: 0.729, accuracy: 0.834`; values that are no finite numbers are left out."""
    numbers = {}
    for name, number in _METRIC.findall(text):
        try:
            value = float(number)
        except ValueError:
            continue
        if math.isfinite(value):
            numbers[name] = value
    return numbers


def is_progress_line(line: str) -> bool:
    """Return True for a line that any of these functions reads."""
    return bool(_REPORT.match(line)) or any(_search(kind, line) for kind in (_TRAIN, _EVAL, _FINAL, _PERIOD))


def parse_period(lines: Iterable[str]) -> int | None:
    """Return the local steps between two exchanges from the last line that has them, or None."""
    periods = [int(match[1]) for line in lines if (match := _search(_PERIOD, line))]
    return periods[-1] if periods else None


def parse_final_metrics(lines: Iterable[str]) -> dict[str, str]:
    """Read the last `Final metrics after 5006 steps, loss: 0.228, accuracy: 0.935`, numbers as printed."""
    matches = [match for line in lines if (match := _search(_FINAL, line))]
    return {"steps": matches[-1][1], **dict(_METRIC.findall(matches[-1][2]))} if matches else {}


@dataclass(frozen=True)
class JobProgress:
    """A program's progress by its own reports; None for what it does not report.

    `time` is when the step was reported. `loss` is that of training, and the names of an evaluation's metrics begin with
    eval_.
    """

    step: int
    totalSteps: int | None = None
    stepsPerSecond: float | None = None
    etaSeconds: float | None = None
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    time: str = ""

    def with_eta(self, total: int | None = None) -> JobProgress:
        """Fill in the total steps if the program reports none, and the time left if it can be computed."""
        total = self.totalSteps if self.totalSteps is not None else total
        eta = self.etaSeconds
        if eta is None and total is not None and self.stepsPerSecond:
            eta = max(total - self.step, 0) / self.stepsPerSecond
        return replace(self, totalSteps=total, etaSeconds=None if eta is None or math.isinf(eta) else round(eta, 1))


def read_report(line: str) -> JobProgress | None:
    """Read a line such as `{"scaletier.progress": {"step": 348, "totalSteps": 5000, "loss": 0.729}}`.

    Returns: the report, or None if the line is not a report.
    Raises: ValueError, in one line, if the report is invalid.
    """
    if not _REPORT.match(line):
        return None
    if len(line) > LONGEST_REPORT:
        raise ValueError(f"it has {len(line)} characters. Valid: {LONGEST_REPORT} at most")
    try:
        report = json.loads(line)[REPORT_KEY]
    except (ValueError, RecursionError):
        raise ValueError("it is not one line of JSON") from None
    if not isinstance(report, dict) or "step" not in report:
        raise ValueError(f"it has no step. Valid keys: {', '.join(_KEYS)}")
    if unknown := [key for key in report if key not in _KEYS]:
        raise ValueError(f"{unknown[0][:LONGEST_NAME]!r} is unknown. Valid keys: {', '.join(_KEYS)}")
    return JobProgress(**{key: _KEYS[key](key, value) for key, value in report.items() if value is not None or key == "step"})


def valid_report(line: str) -> JobProgress | None:
    """Read a report; None if it is invalid, or if the line is not a report."""
    try:
        return read_report(line)
    except (ValueError, RecursionError):
        return None


def _count(key: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LAST_STEP:
        raise ValueError(f"{key} is {_abbreviate(value)}. Valid: a whole number from 0 to {_LAST_STEP}")
    return value


def _number(key: str, value: Any, least: float = -math.inf) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:
        number = math.nan
    if not math.isfinite(number) or number < least:
        raise ValueError(
            f"{key} is {_abbreviate(value)}. Valid: a finite number{'' if math.isinf(least) else f' from {least:g}'}"
        )
    return number


def _positive(key: str, value: Any) -> float:
    return _number(key, value, 0.0)


def _metrics(key: str, value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > MOST_METRICS or any(len(name) > LONGEST_NAME for name in value):
        names = f"{MOST_METRICS} names at most, each of {LONGEST_NAME} characters at most"
        raise ValueError(f"{key} is {_abbreviate(value)}. Valid: an object of numbers, {names}")
    return {name: _number(f"{key}.{name}", number) for name, number in value.items()}


_KEYS: Mapping[str, Callable[[str, Any], Any]] = {
    "step": _count,
    "totalSteps": _count,
    "stepsPerSecond": _positive,
    "etaSeconds": _positive,
    "loss": _number,
    "metrics": _metrics,
}


def _abbreviate(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"


class ProgressFinder:
    """Finds a program's progress in the lines that it prints, in bounded memory."""

    def __init__(self) -> None:
        self.progress: JobProgress | None = None
        self._marks: deque[tuple[float, int]] = deque(maxlen=_MARKS)
        self._error_reported = False

    def add_line(self, line: str, seconds: float, time: str) -> str:
        """Read one more line.

        Args:
            line: what was printed.
            seconds: when it was printed, by a clock that never goes back.
            time: when it was printed, for people.
        Returns: the error in the first invalid report; empty for any other line.
        """
        if not any(hint in line for hint in _HINTS):
            return ""
        try:
            report = read_report(line)
        except (ValueError, RecursionError) as error:
            previously, self._error_reported = self._error_reported, True
            return "" if previously else f"invalid progress reports are ignored: {error}"
        if report is not None:
            self._take(report, seconds, time)
        else:
            self._read(line, seconds, time)
        return ""

    def _read(self, line: str, seconds: float, time: str) -> None:
        """Read a line as in Cloud ML's samples."""
        if point := parse_train_metrics(line):
            values = dict(point.values)
            self._take(JobProgress(point.step, loss=values.pop("loss", None), metrics=values), seconds, time)
        elif point := parse_eval_metrics(line):
            before = self.progress or JobProgress(point.step, time=time)
            metrics = {f"eval_{name}": value for name, value in point.values.items()}
            self.progress = replace(before, step=max(before.step, point.step), metrics=_merged(before.metrics, metrics))

    def _take(self, report: JobProgress, seconds: float, time: str) -> None:
        before = self.progress or report
        rate = report.stepsPerSecond if report.stepsPerSecond is not None else self._rate(report.step, seconds)
        self.progress = JobProgress(
            report.step,
            before.totalSteps if report.totalSteps is None else report.totalSteps,
            None if rate is None else round(rate, 3),
            report.etaSeconds,
            before.loss if report.loss is None else report.loss,
            _merged(before.metrics, report.metrics),
            time,
        ).with_eta()

    def _rate(self, step: int, seconds: float) -> float | None:
        """Compute steps a second over the last reports; None until two of them are _APART_SECONDS apart."""
        marks = self._marks
        if marks and step < marks[-1][1]:
            marks.clear()  # it continues from a checkpoint
        while marks and seconds - marks[0][0] > _WINDOW_SECONDS and len(marks) > 1:
            marks.popleft()
        if not marks or seconds - marks[-1][0] >= _APART_SECONDS:
            marks.append((seconds, step))
        began, first = marks[0]
        return (step - first) / (seconds - began) if seconds - began >= _APART_SECONDS else None


def _merged(before: Mapping[str, float], new: Mapping[str, float]) -> dict[str, float]:
    """Merge metrics; only the newest MOST_METRICS stay."""
    fitting = {name: value for name, value in new.items() if len(name) <= LONGEST_NAME}
    merged = {name: value for name, value in before.items() if name not in fitting} | fitting
    return dict(list(merged.items())[-MOST_METRICS:])


def merge_replicas(
    reports: Mapping[str, JobProgress | None], chief: str, steps: int | None, running: bool
) -> JobProgress | None:
    """Merge the replicas' progress into the job's: the chief's, or that with the most steps, with all metrics.

    Args:
        steps: the step at which the job ends, used if the program does not report its total steps.
        running: False if the job has ended, so that it has no etaSeconds.
    """
    available = {name: report for name, report in reports.items() if report}
    if not available:
        return None
    first = available.get(chief) or max(available.values(), key=lambda report: report.step)
    metrics: dict[str, float] = {}
    for report in available.values():
        metrics = _merged(metrics, report.metrics)
    merged = replace(first, metrics=_merged(metrics, first.metrics)).with_eta(steps)
    return merged if running else replace(merged, etaSeconds=None)
