"""What came out of a job: the numbers that its trainer told, by a line, by a file, or by its summaries for TensorBoard."""

from __future__ import annotations

import json
import shlex
from typing import Any

from jobs.records import JobRecord
from jobs.store import StoreError
from ops import terminal
from ops.cluster.cluster import Cluster
from ops.cluster.ledger import replica_names
from ops.cluster.output import METRICS, WITHOUT_TENSORFLOW, Output, find
from ops.errors import OpsError, one_line
from ops.logs import progress
from ops.logs.read import read_logs
from ops.train.push import PYTHON

# Runs on a host, where the summaries are: the last value of each scalar. Without TensorFlow it starts in a fifth of the time.
_LAST = f"""
import json, sys, types
{WITHOUT_TENSORFLOW}
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.util.tensor_util import make_ndarray
found = EventMultiplexer(size_guidance=dict.fromkeys(("scalars", "tensors", "images", "audio", "histograms", "graph"), 1))
found.AddRunsFromDirectory(sys.argv[1]).Reload()
values = dict()
for run in found.Runs():
    into = "" if run == "." else run + "/"
    of = found.GetAccumulator(run)
    tags = of.Tags()
    for tag in tags["scalars"]:
        values[into + tag] = (of.Scalars(tag)[-1].step, of.Scalars(tag)[-1].value)
    for tag in tags["tensors"]:
        if of.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
            last = of.Tensors(tag)[-1]
            values[into + tag] = (last.step, float(make_ndarray(last.tensor_proto)))
print(json.dumps(values))
"""


def final_metrics(cluster: Cluster, record: JobRecord) -> dict[str, str]:
    """Each number by its name, with `steps` where that is told; empty where a job tells none, or where that cannot be read.

    The chief's last `Final metrics` line counts before JOB_DIR/metrics.json, and that before the summaries below JOB_DIR.
    """
    if not (names := replica_names(record)):
        return {}
    try:
        log = read_logs(cluster, record, names[:1], None)
        if said := progress.final_metrics(line.message for line in log.get(names[0], [])):
            return said
        output = find(cluster, record)
        return _of_file(output) if METRICS in output.files else _of_summaries(cluster, output)
    except (OpsError, StoreError, OSError) as error:
        terminal.note(f"what came out of {record.jobId} cannot be read: {one_line(error)}")
        return {}


def _of_file(output: Output) -> dict[str, str]:
    """Of `{"steps": 5006, "loss": 0.228}`, whatever else may be in it."""
    try:
        told = json.loads(output.read(METRICS))
    except ValueError:
        return {}
    return _as_text(told) if isinstance(told, dict) else {}


def _of_summaries(cluster: Cluster, output: Output) -> dict[str, str]:
    if not output.summaries:
        return {}
    with terminal.Step(f"reading the summaries of {output.job.jobId}"):
        host = cluster.fleet.any_connection().original_host
        printed = cluster.fleet.must(
            host, shlex.join([PYTHON, "-c", _LAST, output.job_dir]), "could not read summaries, it ended"
        )
    try:
        last: dict[str, tuple[int, float]] = json.loads(printed.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {}
    steps = {"steps": max(step for step, _ in last.values())} if last else {}
    return _as_text({**steps, **{name: value for name, (_, value) in last.items()}})


def _as_text(told: dict[Any, Any]) -> dict[str, str]:
    numbers = {
        str(name): value for name, value in told.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in numbers.items()}
