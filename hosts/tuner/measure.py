"""Read a trial's metric from `cloudml-hypertune`, metrics.json or summaries, and decide about early stopping.

The trial writes these files, and the agent's user reads them: of the host only regular files, without following links, and in
limited size.
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
_LAST_STEP = 2**53
# The words of a name, also in camel case, and those of summaries by training and by evaluation.
_WORD = re.compile(r"[A-Z]*[a-z]+|[A-Z]+")
_TRAINED = re.compile(r"train(ing)?")
_VALIDATED = re.compile(r"(val|valid|validation|eval|evaluation|dev)(s|set)?")
_TESTED = re.compile(r"test(s|set|ing)?")
_OTHER = 2

LARGEST_FILE = 1 << 20
"""The most bytes of metrics.json, and of the file of `cloudml-hypertune`."""
LARGEST_READ = 64 << 20
"""The most bytes that are read of a summary at once: a record is read whole."""
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

FEWEST_HISTORIES = 5
"""A trial is stopped early only if at least this many finished trials can be compared with it."""


class TrialMetrics:
    """Read the metrics of one trial; `file` is its CLOUD_ML_HP_METRIC_FILE, `folder` its output folder.

    `earlier` are the measurements of its runs before a restart. A metric may be infinite or NaN. `other_metrics` has the names
    of reported metrics besides `tag`, the one that is tuned.
    """

    def __init__(self, tag: str, file: Path, folder: str, earlier: Sequence[Measurement] = ()) -> None:
        self._tag, self._file, self._folder, self._earlier = tag, file, folder, earlier
        scheme, is_url, _ = folder.partition("://")
        if is_url:  # fsspec would cache the names that it read first, and miss later files
            fsspec.config.conf.setdefault(scheme, {})["use_listings_cache"] = False
        self._reported: dict[tuple[str, int], Measurement] = {}
        self._summaries: Any = None
        self.other_metrics: set[str] = set()

    def reported(self) -> list[Measurement]:
        """Return all reports of `cloudml-hypertune` so far, in the order in which they arrived; none before this run's first.

        Measurements of earlier runs precede them up to their first step. Its file has a line of JSON for each of the newest
        hundred reports. Source: its hypertune.py.
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

    def evaluated(self) -> list[Measurement]:
        """Return the metric's values so far in TensorBoard's evaluation summaries, by which running trials are compared."""
        return self._summarized(evaluations_only=True)

    def _summarized(self, evaluations_only: bool) -> list[Measurement]:
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
        """Return the better rank of a series' run and of the metric's tag, then the run's.

        So the word `training` in a tag, such as Cloud ML's default one, hides no evaluation.
        """
        run = _rank(path.removesuffix(self._tag))
        return min(run, _rank(self._tag)), run

    def from_file(self, last_step: int = 0) -> list[Measurement]:
        """Return the metric in metrics.json, which a trainer writes at its end, such as `{"steps": 5006, "loss": 0.228}`.

        `last_step` is its step if the file names none.
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

        They come from the reports; if there are none, from the summaries, or else earlier runs, and then metrics.json. If
        several summaries have the metric's name, one of a validation is preferred, and then one of a test.
        """
        if measurements := self.reported():
            return measurements
        damage: Exception | None = None
        try:
            measurements = self._summarized(evaluations_only=False)
        except Exception as error:  # noqa: BLE001  TensorBoard's reader, of files that a trainer wrote
            damage = error
        measurements = measurements or [*self._earlier]
        last = self.from_file(measurements[-1].trainingStep if measurements else 0)
        if damage and not last:
            raise damage
        return [*measurements, *last]

    def _scalars(self) -> Iterator[tuple[str, list[Measurement]]]:
        """Yield the path of each series of numbers in the summaries, `RUN/TAG`, and its values."""
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
    """Open a file below a folder that a trial writes to; OSError if it, or a folder in between, is a link or anything else."""
    *between, name = PurePath(path).relative_to(folder).parts
    here = os.open(folder, _FOLDER)
    try:
        for part in between:
            below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = below
        file = os.fdopen(os.open(name, _FILE, dir_fd=here), "rb")
    finally:
        os.close(here)
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
    """Return 0 for a path of a validation, 1 of a test and 2 of anything else.

    Its last part that names training or evaluation counts.
    """
    for name in reversed(path.split("/")):
        words = [word.lower() for word in _WORD.findall(name)]
        if any(_TRAINED.fullmatch(word) for word in words):
            return _OTHER
        if any(_VALIDATED.fullmatch(word) for word in words):
            return 0
        if any(_TESTED.fullmatch(word) for word in words):
            return 1
    return _OTHER


def _measurement(step: Any, value: Any) -> Measurement:
    """Return a measurement; ValueError or OverflowError if the step is invalid."""
    if not 0 <= (number := int(step)) <= _LAST_STEP:
        raise ValueError(f"invalid step {step}. Valid: 0 to {_LAST_STEP}")
    return Measurement(number, float(value))


def _multiplexer() -> Any:
    """Return TensorBoard's reader without TensorFlow: so it loads five times as fast, and reads URLs with fsspec."""
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    # Keep only one item of each kind that we do not read.
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
            if size is None or size > LARGEST_READ:
                raise OSError(f"a record in {os.fsdecode(filename)} has more than {LARGEST_READ} bytes")
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

    The averages are over the values up to this trial's last step. Source: the median stopping rule of Golovin et al., Google
    Vizier (2017).
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
    if len(averages) < FEWEST_HISTORIES:
        return False
    return study.goal.better(median(averages), study.goal.best(each.objectiveValue for each in measured))
