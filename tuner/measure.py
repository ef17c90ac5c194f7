"""What a trial tells of its metric: by the public package `cloudml-hypertune`, by metrics.json, or by summaries."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import fsspec

from jobs.study import Measurement

_BESIDE = frozenset({"timestamp", "trial", "global_step", "checkpoint_path"})
_LAST_STEP = 2**53
_EVALUATED = re.compile(r"eval|valid|test", re.IGNORECASE)


class Metrics:
    """One trial's. `file` is CLOUD_ML_HP_METRIC_FILE, `folder` the trial's output.

    The value may be one that is not finite. `others` are the names of what else was told.
    """

    def __init__(self, tag: str, file: Path, folder: str) -> None:
        self._tag, self._file, self._folder = tag, file, folder
        self._reported: dict[tuple[str, int], Measurement] = {}
        self._summaries: Any = None
        self.others: set[str] = set()

    def reported(self) -> list[Measurement]:
        """What `cloudml-hypertune` has reported up to now, in the order of time.

        Its file has a line of JSON for each report, of which the newest hundred are left there. Source: its hypertune.py.
        """
        lines: list[str] = []
        with suppress(OSError):
            lines = self._file.read_text(errors="replace").splitlines()
        for line in lines:
            with suppress(ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
                told = json.loads(line)  # or half a line, while it is written
                self.others |= told.keys() - _BESIDE - {self._tag}
                step = int(told["global_step"])
                self._reported[str(told["timestamp"]), step] = _measurement(step, told[self._tag])
        return list(self._reported.values())  # as they came: a clock may have been set back

    def evaluated(self) -> list[Measurement]:
        """What the summaries for TensorBoard below the folder tell up to now of an evaluation, by which trials are judged."""
        return self._summarized(evaluations_alone=True)

    def _summarized(self, evaluations_alone: bool) -> list[Measurement]:
        if self._summaries is None:
            self._summaries = _multiplexer()
        self._summaries.AddRunsFromDirectory(self._folder).Reload()
        found = {path: points for path, points in self._scalars() if f"/{path}".endswith(f"/{self._tag}")}
        if evaluations_alone:
            found = {path: points for path, points in found.items() if _EVALUATED.search(path)}
        if not found:
            return []
        return found[min(found, key=lambda path: (not _EVALUATED.search(path), path))]

    def in_file(self) -> list[Measurement]:
        """That of metrics.json in the folder, `{"steps": 5006, "loss": 0.228}`, which a trainer writes at its end."""
        told: Any = None
        with suppress(OSError, ValueError), fsspec.open(f"{self._folder}/metrics.json", "rb") as file:
            told = json.loads(file.read())
        if not isinstance(told, dict):
            return []
        numbers = {
            name: value for name, value in told.items() if isinstance(value, int | float) and not isinstance(value, bool)
        }
        self.others |= numbers.keys() - {self._tag, "steps"}
        if self._tag not in numbers:
            return []
        with suppress(ArithmeticError, ValueError):
            return [_measurement(numbers.get("steps", 0), numbers[self._tag])]
        return []

    def whole(self) -> list[Measurement]:
        """All, at the trial's end: what was reported, else what summaries tell, and behind that metrics.json.

        Of several summaries of that name it is an evaluation's.
        """
        if found := self.reported():
            return found
        last = self.in_file()
        with suppress(Exception) if last else nullcontext():  # whatever a reader of damaged files raises
            found = self._summarized(evaluations_alone=False)
        return [*found, *last]

    def _scalars(self) -> Iterator[tuple[str, list[Measurement]]]:
        from tensorboard.util.tensor_util import make_ndarray

        for run in self._summaries.Runs():
            of = self._summaries.GetAccumulator(run)
            into = "" if run == "." else f"{run}/"
            tags = of.Tags()
            told = {tag: [(each.step, each.value) for each in of.Scalars(tag)] for tag in tags["scalars"]}
            for tag in tags["tensors"]:
                if of.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
                    told[tag] = [(each.step, float(make_ndarray(each.tensor_proto))) for each in of.Tensors(tag)]
            self.others |= told.keys() - {self._tag}
            for tag, points in told.items():
                yield into + tag, [_measurement(step, value) for step, value in points]


def _measurement(step: Any, value: Any) -> Measurement:
    """ValueError or OverflowError for a step that is no place in a training."""
    if not 0 <= (number := int(step)) <= _LAST_STEP:
        raise ValueError(f"there is no step {step}")
    return Measurement(number, float(value))


def _multiplexer() -> Any:
    """TensorBoard's reader, without TensorFlow: it starts in a fifth of the time, and reads what fsspec reads."""
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    return EventMultiplexer(
        size_guidance={"images": 1, "audio": 1, "histograms": 1, "graph": 1, "scalars": 200, "tensors": 200}
    )
