"""What a job wrote, wherever it is: `fab get`, and what other commands fetch of it."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs import paths
from jobs.records import JobRecord
from ops import terminal
from ops.cluster.bucket import Bucket, open_bucket
from ops.cluster.cluster import Cluster
from ops.cluster.ledger import existing_job
from ops.errors import DONE, OpsError, UsageError, meant

_SHOWN = 8


@dataclass(frozen=True)
class Output:
    """A job's output. `job_dir` is where it is as the hosts see it; `files` maps each path below it to its size in bytes."""

    job: JobRecord
    job_dir: str
    files: dict[str, int]
    _bucket: Bucket
    _folder: str

    def fetch(self, paths: Sequence[str], target: Path, below: str = "") -> None:
        """Downloads these files into a directory, under their paths without `below`, or one as `target` itself.

        OpsError where a file's name would lead out of the directory.
        """
        for path in paths:
            if posixpath.isabs(path) or ".." in path.split("/"):
                raise OpsError(f"the output of {self.job.jobId} has a file of the name {path!r}, which would leave {target}")
        with terminal.Step(f"fetching {len(paths)} files") as step:
            progress = terminal.sizer(step, sum(self.files[path] for path in paths))
            for path in paths:
                name = f"{self._folder}/{path}" if self._folder else path
                self._bucket.download(name, target / path.removeprefix(below), progress)


def find(cluster: Cluster, record: JobRecord) -> Output:
    """A job's output, which may have no file yet; OpsError where it is in no bucket that can be opened."""
    inventory = cluster.inventory
    job_dir = str(record.trainingInput.get("jobDir") or f"{inventory.bucket}/{paths.output(record.jobId)}").rstrip("/")
    if job_dir.startswith(f"{inventory.bucket}/"):
        bucket, folder = cluster.bucket, job_dir.removeprefix(f"{inventory.bucket}/")
    elif "://" in job_dir:
        bucket, folder = open_bucket(job_dir, lambda: None), ""
    else:
        raise OpsError(f"the output of {record.jobId} is in {job_dir}, which is not in the bucket of stack {inventory.stack}")
    with terminal.Step(f"looking through {job_dir}"):
        return Output(record, job_dir, bucket.walk(folder), bucket, folder)


def check_free(target: Path) -> None:
    """UsageError for what is there already: nothing is merged, and nothing written over."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is there already: remove it, or give another --dest")


def get(cluster: Cluster, job_id: str | None, path: str | None, dest: str | None, as_json: bool) -> int:
    """Fetch a job's output, or a part of it; `path` may be what is meant as `dest`."""
    record = existing_job(cluster.ledger, job_id)
    output = find(cluster, record)
    if not output.files:
        raise OpsError(f"job {record.jobId} ({record.state}) has no output in {output.job_dir}")
    if path and not _below(output, path):
        if dest is not None:
            tops = sorted({name.partition("/")[0] for name in output.files})
            what = f"job {record.jobId} has no {path} in its output{meant(path, output.files)}"
            raise UsageError(f"{what}; there are {_few(tops)}")
        path, dest = None, path
    path = path.strip("/") if path else None
    files = _below(output, path) if path else list(output.files)
    target = Path(dest) if dest is not None else Path(posixpath.basename(path) if path else record.jobId)
    below = f"{path}/" if path else ""
    if path and files == [path]:
        below = path
        if target.is_dir():
            target /= posixpath.basename(path)
    check_free(target)
    output.fetch(files, target, below)
    size = sum(output.files[name] for name in files)
    if as_json:
        terminal.as_json({"jobId": record.jobId, "dest": str(target), "files": sorted(files), "bytes": size})
    else:
        terminal.out(f"{len(files)} files, {terminal.size(size)}: {target}")
    return DONE


def _below(output: Output, path: str) -> list[str]:
    """The file of that path, or all files of the folder."""
    path = path.strip("/") or "."
    return [name for name in output.files if name == path or name.startswith(f"{path}/")]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
