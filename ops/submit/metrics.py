"""The final metrics of a job, from a log line, a file, or its summaries for TensorBoard."""

from __future__ import annotations

import json
from typing import Any

from jobs import progress
from jobs.bucket import BucketError
from jobs.chunks import LogFilter
from jobs.paths import PYTHON
from jobs.records import JobRecord
from ops import terminal
from ops.cluster import root_helper
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import replica_names
from ops.cluster.output import METRICS, WITHOUT_TENSORFLOW, JobOutput, find
from ops.errors import OpsError, one_line
from ops.logs.read import read_logs

# Runs on a host, which has the summaries, and prints up to N points of each scalar, the last among them.
_SCALARS = f"""
import json, os, sys, types
{WITHOUT_TENSORFLOW}
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.util.tensor_util import make_ndarray
most = int(sys.argv[2])
sizes = dict.fromkeys(("images", "audio", "histograms", "graph"), 1)
runs = EventMultiplexer(size_guidance=sizes | dict(scalars=most, tensors=most))
runs.AddRunsFromDirectory(sys.argv[1]).Reload()
values = dict()
for name in runs.Runs():
    prefix = "" if name == "." else name + "/"
    run = runs.GetAccumulator(name)
    tags = run.Tags()
    for tag in tags["scalars"]:
        values[prefix + tag] = [(each.step, each.value) for each in run.Scalars(tag)]
    for tag in tags["tensors"]:
        if run.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
            values[prefix + tag] = [(each.step, float(make_ndarray(each.tensor_proto))) for each in run.Tensors(tag)]
print(json.dumps(values))
"""


def final_metrics(cluster: ClusterClient, record: JobRecord) -> dict[str, str]:
    """Return each metric by name, with `steps` if reported; empty if there are none or they cannot be read.

    The chief's last `Final metrics` line takes precedence, then JOB_DIR/metrics.json, then the summaries below JOB_DIR.
    """
    if not (names := replica_names(record)):
        return {}
    try:
        log = read_logs(cluster, record, names[:1], LogFilter())
        if metrics := progress.parse_final_metrics(line.message for line in log.get(names[0], [])):
            return metrics
        output = find(cluster, record)
        return _read_metrics_file(output) if METRICS in output.files else _read_summary_metrics(cluster, output)
    except (OpsError, BucketError, OSError) as error:
        terminal.note(f"the results of {record.jobId} cannot be read: {one_line(error)}")
        return {}


def _read_metrics_file(output: JobOutput) -> dict[str, str]:
    """Return the metrics of a file such as `{"steps": 5006, "loss": 0.228}`; ignore anything else in it."""
    try:
        document = json.loads(output.read(METRICS))
    except (ValueError, RecursionError):
        return {}
    return _format_values(document) if isinstance(document, dict) else {}


def _read_summary_metrics(cluster: ClusterClient, output: JobOutput) -> dict[str, str]:
    last = {name: points[-1] for name, points in scalars(cluster, output, 1).items()}
    steps = {"steps": max(step for step, _ in last.values())} if last else {}
    return _format_values({**steps, **{name: value for name, (_, value) in last.items()}})


def scalars(cluster: ClusterClient, output: JobOutput, most: int) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars of a job's summaries by `run/tag`, each as (step, value) by time; empty if none.

    Of a scalar with more points, `most` are chosen, the last among them. HostError if the host cannot read the summaries.
    """
    if not output.summaries:
        return {}
    with terminal.ProgressLine(f"reading the summaries of {output.job.jobId}"):
        host = cluster.fleet.any_connection().original_host
        reader = [PYTHON, "-c", _SCALARS, output.job_dir, str(most)]
        command = root_helper.reader_command(cluster.inventory.host(host), reader)
        printed = cluster.fleet.check_output(host, command, "could not read summaries, it ended")
    try:
        series: dict[str, list[list[float]]] = json.loads(printed.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {}
    return {name: [(int(step), value) for step, value in points] for name, points in series.items() if points}


def _format_values(values: dict[Any, Any]) -> dict[str, str]:
    numbers = {
        str(name): value for name, value in values.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in numbers.items()}
