"""Read a trial's metric from `cloudml-hypertune`, metrics.json or summaries, and decide about early stopping.

The trial writes these files, and the agent's user reads them. So only regular files of limited size are read on the host, and
links are not followed.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from statistics import fmean, median
from typing import IO, Any

import fsspec

from jobs.study import Measurement, Study, Trial, TrialState

# Keys of a report that are not metrics.
_NOT_METRICS = frozenset({"timestamp", "trial", "global_step", "checkpoint_path"})
_MAX_STEP = 2**53
# A word of a name, also in camel case, and the words that name the summaries of training, validation and test.
_WORD = re.compile(r"[A-Z]*[a-z]+|[A-Z]+")
_TRAINING = re.compile(r"train(ing)?")
_VALIDATION = re.compile(r"(val|valid|validation|eval|evaluation|dev)(s|set)?")
_TEST = re.compile(r"test(s|set|ing)?")
_OTHER = 2

LARGEST_FILE = 1 << 20
"""The largest size in bytes of metrics.json and of the file of `cloudml-hypertune`."""
LARGEST_RECORD = 64 << 20
"""The largest record of a summary in bytes: TensorBoard reads a record at once."""
_FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

MIN_HISTORIES = 5
"""A trial is stopped early only if at least this many finished trials can be compared with it."""


class TrialMetrics:
    """Read the metrics of one trial; `file` is its CLOUD_ML_HP_METRIC_FILE, `folder` its output folder.

    `earlier` are the measurements of its runs before a restart. A metric may be infinite or NaN. `tag` is the metric that is
    tuned; `other_metrics` are the names of the other reported ones.
    """

    def __init__(self, tag: str, file: Path, folder: str, earlier: Sequence[Measurement] = ()) -> None:
        self._tag, self._file, self._folder, self._earlier = tag, file, folder, earlier
        scheme, is_url, _ = folder.partition("://")
        if is_url:  # otherwise fsspec caches the first listing and misses later files
            fsspec.config.conf.setdefault(scheme, {})["use_listings_cache"] = False
        self._reported: dict[tuple[str, int], Measurement] = {}
        self._summaries: Any = None
        self.other_metrics: set[str] = set()

    def read_reports(self) -> list[Measurement]:
        """Return all reports of `cloudml-hypertune` so far, in order; those of earlier runs first, up to this run's first step.

        The list is empty until this run reports. The file has a line of JSON for each of the newest hundred reports.
        Source: hypertune.py of cloudml-hypertune.
        """
        lines: list[str] = []
        with suppress(OSError, ValueError), open_file(self._file.parent, self._file) as file:
            lines = _read(file).decode(errors="replace").splitlines()
        for line in lines:
            with suppress(ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
                report = json.loads(line)  # the last line may be incomplete while it is written
                self.other_metrics |= report.keys() - _NOT_METRICS - {self._tag}
                step = int(report["global_step"])
                self._reported[str(report["timestamp"]), step] = _measurement(step, report[self._tag])
        reports = self._reported.values()  # not sorted by timestamp: a clock may have been set back
        first = min((each.trainingStep for each in reports), default=0)
        return [*(each for each in self._earlier if each.trainingStep < first), *reports]

    def read_evaluations(self) -> list[Measurement]:
        """Return the metric so far from TensorBoard's evaluation summaries; early stopping compares trials by these values."""
        return self._read_summaries(evaluations_only=True)

    def _read_summaries(self, evaluations_only: bool) -> list[Measurement]:
        if self._summaries is None:
            self._summaries = _multiplexer()
        with _regular_files(self._folder):
            self._summaries.AddRunsFromDirectory(self._folder).Reload()
        series = {path: points for path, points in self._scalars() if f"/{path}".endswith(f"/{self._tag}")}
        ranks = {path: self._rank(path) for path in series}
        if evaluations_only:
            ranks = {path: rank for path, rank in ranks.items() if min(rank) < _OTHER}
        return series[min(ranks, key=lambda path: (ranks[path], path))] if ranks else []

    def _rank(self, path: str) -> tuple[int, int]:
        """Return the lower of the ranks of a series' run and of the metric's tag, and the run's rank.

        So a run of an evaluation counts although the tag has the word `training`, as Cloud ML's default tag has.
        """
        run = _rank(path.removesuffix(self._tag))
        return min(run, _rank(self._tag)), run

    def read_metrics_file(self, last_step: int = 0) -> list[Measurement]:
        """Return the metric in metrics.json, such as `{"steps": 5006, "loss": 0.228}`, which a trainer writes at its end.

        `last_step` is the step if the file has no `steps`.
        """
        content: Any = None
        name = f"{self._folder}/metrics.json"
        with (
            suppress(OSError, ValueError, RecursionError),
            fsspec.open(name, "rb") if "://" in name else open_file(self._folder, name) as file,
        ):
            content = json.loads(_read(file))
        if not isinstance(content, dict):
            return []
        numbers = {
            name: value for name, value in content.items() if isinstance(value, int | float) and not isinstance(value, bool)
        }
        self.other_metrics |= numbers.keys() - {self._tag, "steps"}
        if self._tag not in numbers:
            return []
        with suppress(ArithmeticError, ValueError):
            return [_measurement(numbers.get("steps", last_step), numbers[self._tag])]
        return []

    def final_measurements(self) -> list[Measurement]:
        """Return all measurements at the trial's end.

        They are the reports. Without reports they are the summaries, or else those of earlier runs, followed by metrics.json.
        Of several summaries with the metric's name, prefer one of a validation, then one of a test.
        """
        if measurements := self.read_reports():
            return measurements
        damage: Exception | None = None
        try:
            measurements = self._read_summaries(evaluations_only=False)
        except Exception as error:  # noqa: BLE001  TensorBoard's reader, of files that a trainer wrote
            damage = error
        measurements = measurements or [*self._earlier]
        last = self.read_metrics_file(measurements[-1].trainingStep if measurements else 0)
        if damage and not last:
            raise damage
        return [*measurements, *last]

    def _scalars(self) -> Iterator[tuple[str, list[Measurement]]]:
        """Yield the path `RUN/TAG` and the values of each series of numbers in the summaries."""
        from tensorboard.util.tensor_util import make_ndarray

        for run in self._summaries.Runs():
            events = self._summaries.GetAccumulator(run)
            prefix = "" if run == "." else f"{run}/"
            tags = events.Tags()
            scalars = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in tags["scalars"]}
            for tag in tags["tensors"]:
                if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
                    scalars[tag] = [(each.step, float(make_ndarray(each.tensor_proto))) for each in events.Tensors(tag)]
            self.other_metrics |= scalars.keys() - {self._tag}
            for tag, points in scalars.items():
                yield prefix + tag, [_measurement(step, value) for step, value in points]


def open_file(folder: str | Path, path: str | Path) -> IO[bytes]:
    """Open a file below a folder of a trial; OSError if it is no regular file, or a link is on its path."""
    *folders, name = PurePath(path).relative_to(folder).parts
    parent = os.open(folder, _FOLDER_FLAGS)
    try:
        for part in folders:
            child = os.open(part, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=parent)
            os.close(parent)
            parent = child
        file = os.fdopen(os.open(name, _FILE_FLAGS, dir_fd=parent), "rb")
    finally:
        os.close(parent)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is no file")
    return file


def _read(file: IO[bytes]) -> bytes:
    """Return the content; ValueError if it is too large."""
    content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise ValueError(f"more than {LARGEST_FILE} bytes")
    return content


def _rank(path: str) -> int:
    """Return 0 for the path of a validation, 1 of a test and 2 of anything else.

    The last part of the path that names training, validation or test decides.
    """
    for name in reversed(path.split("/")):
        words = [word.lower() for word in _WORD.findall(name)]
        if any(_TRAINING.fullmatch(word) for word in words):
            return _OTHER
        if any(_VALIDATION.fullmatch(word) for word in words):
            return 0
        if any(_TEST.fullmatch(word) for word in words):
            return 1
    return _OTHER


def _measurement(step: Any, value: Any) -> Measurement:
    """Return a measurement; ValueError or OverflowError if the step is invalid."""
    if not 0 <= (number := int(step)) <= _MAX_STEP:
        raise ValueError(f"invalid step {step}. Valid: 0 to {_MAX_STEP}")
    return Measurement(number, float(value))


def _multiplexer() -> Any:
    """Return TensorBoard's reader without TensorFlow: it loads five times as fast, and reads URLs with fsspec."""
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    # Keep only one item of each kind that is not needed.
    return EventMultiplexer(
        size_guidance={"images": 1, "audio": 1, "histograms": 1, "graph": 1, "scalars": 200, "tensors": 200}
    )


@contextmanager
def _regular_files(folder: str) -> Iterator[None]:
    """Let TensorBoard read only regular files of this host below the folder."""
    from tensorboard.compat.tensorflow_stub.io import gfile

    class RegularFiles(gfile.LocalFileSystem):  # type: ignore[misc]  # tensorboard has no types
        def isdir(self, dirname: str | bytes) -> bool:
            return os.path.isdir(dirname) and not os.path.islink(dirname)  # noqa: PTH112,PTH114  bytes, too

        def read(self, filename: bytes, _: bool, size: int | None = None, continue_from: Any = None) -> tuple[bytes, Any]:
            if size is None or size > LARGEST_RECORD:
                raise OSError(f"a record in {os.fsdecode(filename)} has more than {LARGEST_RECORD} bytes")
            with open_file(folder, os.fsdecode(filename)) as file:
                file.seek(continue_from["opaque_offset"] if continue_from else 0)
                return file.read(size), {"opaque_offset": file.tell()}

    gfile.register_filesystem("", RegularFiles())
    try:
        yield
    finally:
        gfile.register_filesystem("", gfile.LocalFileSystem())


def should_stop(study: Study, measured: Sequence[Measurement], trials: Sequence[Trial]) -> bool:
    """Return True if a trial's best value is worse than the median of the finished trials' averages.

    Each average is over a finished trial's values up to this trial's last step. Source: the median stopping rule
    of Golovin et al., Google Vizier (2017).
    """
    if not measured:
        return False
    step = max(each.trainingStep for each in measured)
    ended = [trial for trial in trials if trial.state is TrialState.SUCCEEDED and not trial.isTrialStoppedEarly]
    histories = [[each.objectiveValue for each in trial.allMetrics if each.trainingStep <= step] for trial in ended]
    try:
        averages = [fmean(values) for values in histories if values]
    except OverflowError:  # the sum of the values is too large for a float
        return False
    if len(averages) < MIN_HISTORIES:
        return False
    return study.goal.better(median(averages), study.goal.best(each.objectiveValue for each in measured))
