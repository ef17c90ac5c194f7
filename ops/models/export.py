"""`fab export`: download a job's newest SavedModel; make it first if the job left only checkpoints."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from infra.inventory import Host, Inventory
from infra.templates import ROOT as CHECKOUT
from jobs import paths
from jobs.model_download import LARGEST_MODEL_FILE, MODEL_FILE
from jobs.model_signatures import Tensor, read_signatures, shape_text
from jobs.paths import PYTHON
from jobs.study import flags
from ops import terminal
from ops.cluster import root_helper
from ops.cluster.bucket import read_whole
from ops.cluster.cluster import ClusterClient
from ops.cluster.host_files import host_files
from ops.cluster.ledger import existing_job
from ops.cluster.output import JobOutput, find, require_new_or_empty
from ops.errors import DONE, OpsError
from ops.package import host_stream, runtimes, trainer_config
from ops.submit.trials import best_trial, note_best_trial

_CHECKPOINT_SUFFIX = ".index"  # of a file of every TensorFlow checkpoint; a SavedModel's variables have one, too
# Runs as the jobs' user, who owns their directories. The package comes by stdin, as the host may have deleted the job's.
_RUN = """set -e
umask 0002
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
tar -xzf - -C "$home"
cd "$home"
"$@" 2>&1"""


def export(cluster: ClusterClient, job_id: str | None, dest: str | None, as_json: bool) -> int:
    """Download a job's newest SavedModel, and print its signatures."""
    record = existing_job(cluster.ledger, job_id)
    job_id = record.jobId
    if dest is not None:
        require_new_or_empty(Path(dest))
    if trial := best_trial(cluster.ledger, record):
        note_best_trial(record, trial)
    output = find(cluster, record).of_trial(trial)
    folder = newest_model(output)
    if folder is None:
        exporter = _export_checkpoint(cluster, output, flags(trial.hyperparameters) if trial else [])
        output = find(cluster, record).of_trial(trial)
        folder = newest_model(output)
        if folder is None:
            raise OpsError(f"{exporter} of job {job_id} left no SavedModel in {output.job_dir}")
    target = Path(dest) if dest is not None else Path("export", job_id, folder.rpartition("/")[2] or "model")
    require_new_or_empty(target)
    _fetch(output, folder, target)
    _print_signatures(target, f"{output.job_dir}/{folder}".rstrip("/"), as_json)
    return DONE


def newest_model(output: JobOutput) -> str | None:
    """Return the folder of an output's newest complete SavedModel: by its timestamp, or the last one in natural sort order."""
    folders = {path.rpartition("/")[0] for path in output.files if path.rpartition("/")[2] == MODEL_FILE}
    complete = [folder for folder in folders if not folder.rpartition("/")[2].startswith("temp-")]

    def sort_key(folder: str) -> tuple[int, list[str | int]]:
        name = folder.rpartition("/")[2]
        parts = re.split(r"(\d+)", folder)
        return (int(name) if name.isdecimal() else 0, [int(part) if part.isdecimal() else part for part in parts])

    return max(complete, key=sort_key, default=None)


def read_model_file(folder: Path) -> bytes:
    """Return the saved_model.pb in a local folder; OpsError if it exceeds LARGEST_MODEL_FILE."""
    file = folder / MODEL_FILE
    if (size := file.stat().st_size) > LARGEST_MODEL_FILE:
        raise OpsError(f"{file} has {terminal.size(size)}; {terminal.size(LARGEST_MODEL_FILE)} is the most")
    return file.read_bytes()


def _export_checkpoint(cluster: ClusterClient, output: JobOutput, extra_args: list[str]) -> str:
    """Export the latest checkpoint with the job's own package, on the chief's host; return the module that does it."""
    job_id, state = output.job.jobId, output.job.state
    if not output.job.final:
        raise OpsError(f"job {job_id} is {state} and exports at its end: wait for it, or fab cancel {job_id}")
    if not any(path.endswith(_CHECKPOINT_SUFFIX) for path in output.files):
        raise OpsError(f"job {job_id} ({state}) has neither an exported model nor a checkpoint in {output.job_dir}")
    package = read_whole(cluster.bucket, paths.package(job_id))
    name = output.job.manifest.get("package", {}).get("name")
    exporter = trainer_config.read_from_archive(package, name).export if package and name else None
    if package is None or exporter is None:
        raise OpsError(
            f"job {job_id} ({state}) exported no model, and its trainer declares no export in {trainer_config.FILE} to make "
            f"one from a checkpoint: fab get {job_id} fetches its checkpoints"
        )
    chief = cluster.inventory.chief
    arguments = [*output.job.trainingInput.get("args", []), *extra_args, "--job-dir", output.job_dir]  # the last flag counts
    with terminal.ProgressLine(f"exporting the latest checkpoint on {chief.name}"):
        if not output.job_dir.startswith("/"):
            _install_token_broker(cluster, chief)
        python = runtimes.python_of(cluster.inventory, output.job.manifest) or PYTHON
        line = make_command(cluster.inventory, [python, "-m", exporter, *arguments], output.job_dir)
        cluster.fleet.check_output(chief.name, line, "could not export, it ended", package)
    return exporter


def _install_token_broker(cluster: ClusterClient, host: Host) -> None:
    """Install the token broker: hosts get it with a job, and this host may have another version's."""
    code, version = host_stream.code(CHECKOUT)
    stream = host_stream.shared_stream(code) + host_stream.files_stream(host_files(cluster.inventory, host))
    cluster.fleet.check_output(
        host.name, host_stream.install_command(version), "could not take the replica's code, it ended", stream
    )


def make_command(inventory: Inventory, argv: list[str], folder: str) -> str:
    """Return the command that runs the package from stdin on the chief's host and may write to one folder."""
    return root_helper.writer_command(inventory.chief, ["sh", "-c", _RUN, "sh", *argv], folder)


def _fetch(output: JobOutput, folder: str, target: Path) -> None:
    """Download a folder of the output; the target exists once all of it is there."""
    below = f"{folder}/" if folder else ""
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        output.fetch([path for path in output.files if path.startswith(below)], scratch, below)
        scratch.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _print_signatures(target: Path, source: str, as_json: bool) -> None:
    try:
        available = read_signatures(read_model_file(target))
    except ValueError as error:
        raise OpsError(f"{target / MODEL_FILE}: {error}") from None
    signatures = {
        name: {"inputs": _format_tensors(signature.inputs), "outputs": _format_tensors(signature.outputs)}
        for name, signature in available.items()
    }
    if as_json:
        terminal.print_json({"path": str(target), "source": source, "signatures": signatures})
        return
    terminal.out(str(target))
    for name, sides in signatures.items():
        terminal.out()
        rows = [(kind[:-1], tensor, shape) for kind, tensors in sides.items() for tensor, shape in tensors.items()]
        terminal.table((name, "TENSOR", "SHAPE"), rows)


def _format_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Format the type and shape of each tensor, such as `int64 [?]`."""
    shapes = {name: "of any shape" if each.shape is None else shape_text(each.shape) for name, each in tensors.items()}
    return {name: f"{tensors[name].dtype or 'string'} {shape}" for name, shape in shapes.items()}
