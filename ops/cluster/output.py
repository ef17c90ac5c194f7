"""The output files of a job, in whichever bucket."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jobs import paths
from jobs.bucket import Bucket
from jobs.folder_bucket import open_bucket
from jobs.records import JobRecord
from jobs.study import Trial
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.errors import OpsError, UsageError

WITHOUT_TENSORFLOW = """
sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
"""
"""Python code, after `import os, sys, types`, that lets TensorBoard run without TensorFlow: it starts in a fifth of the time,
uses little memory, and reads any bucket by fsspec. By default gcsfs asks for the kind of bucket by gRPC, which takes 90 s if a
firewall passes only HTTPS."""
METRICS = "metrics.json"
"""The optional file of a trainer's metrics."""
EVALUATION = "evaluation.json"
"""The optional file of a trainer's final evaluation."""
MAX_RESULT_BYTES = 1 << 20
"""The size limit of METRICS and of EVALUATION."""
_EVENTS = "tfevents"
# The folder of exported models, as in Cloud ML.
_EXPORTS = "export/"


@dataclass(frozen=True)
class JobOutput:
    """A job's output.

    `job_dir` is its path on the hosts; `files` maps each path below it to its bytes; `skipped` are the paths of links
    that lead elsewhere, of pipes and sockets, and of what cannot be read.
    """

    job: JobRecord
    job_dir: str
    files: dict[str, int]
    _bucket: Bucket
    _folder: str
    skipped: Sequence[str] = ()

    @property
    def summaries(self) -> list[str]:
        """The files that TensorBoard reads."""
        return [name for name in self.files if _EVENTS in name.rpartition("/")[2]]

    @property
    def checkpoints(self) -> list[str]:
        """The files from which a trainer may resume: no summaries, no metrics, none below export/ or left/.

        left/ has what the job wrote outside JOB_DIR.
        """
        results = {*self.summaries, METRICS, EVALUATION}
        return [
            name for name in self.files if name not in results and not name.startswith((_EXPORTS, f"{paths.UNSAVED_FOLDER}/"))
        ]

    def of_trial(self, trial: Trial | None) -> JobOutput:
        """Return the output in the folder of a trial; all of it if `trial` is None."""
        if trial is None:
            return self
        folder = str(trial.trialId)
        files = {path.removeprefix(f"{folder}/"): size for path, size in self.files.items() if path.startswith(f"{folder}/")}
        return replace(self, job_dir=f"{self.job_dir}/{folder}", files=files, _folder=f"{self._folder}/{folder}".lstrip("/"))

    def read(self, name: str, max_bytes: int = MAX_RESULT_BYTES) -> bytes:
        """Return the content of a small file; OpsError if it has more than `max_bytes`, as a job's sparse file may."""
        if (size := self.files.get(name, 0)) > max_bytes:
            raise OpsError(f"{name} has {terminal.size(size)}; {terminal.size(max_bytes)} is the most")
        return self._bucket.read_part(f"{self._folder}/{name}" if self._folder else name, 0, size)

    def fetch(self, names: Sequence[str], target: Path, below: str = "", require_all: bool = True) -> list[str]:
        """Download files to the directory `target`, and return the downloaded ones.

        Their paths there lack the prefix `below`; a file of that whole path becomes `target` itself. OpsError if a file is
        missing, unless `require_all` is False and the job still runs: it may have removed older checkpoints.
        """
        for path in names:
            if posixpath.isabs(path) or ".." in path.split("/"):
                raise OpsError(f"the output of {self.job.jobId} has a file of the name {path!r}, which would leave {target}")
        fetched = list[str]()
        with terminal.ProgressLine(f"fetching {terminal.plural(len(names), 'file')}") as step:
            progress = terminal.byte_counter(step, sum(self.files[path] for path in names))
            for path in names:
                name = f"{self._folder}/{path}" if self._folder else path
                file = target / path.removeprefix(below)
                file.parent.mkdir(parents=True, exist_ok=True)
                if self._bucket.download(name, file, progress):
                    fetched.append(path)
                elif require_all or self.job.final:
                    raise OpsError(f"{self.job_dir}/{path} is gone")
        return fetched


def find(cluster: ClusterClient, record: JobRecord) -> JobOutput:
    """Return a job's output, which may have no file yet; OpsError if it is in another cluster's bucket."""
    inventory = cluster.inventory
    job_dir = str(record.trainingInput.get("jobDir") or f"{inventory.bucket}/{paths.output(record.jobId)}").rstrip("/")
    if job_dir.startswith(f"{inventory.bucket}/"):
        bucket, folder = cluster.bucket, job_dir.removeprefix(f"{inventory.bucket}/")
    elif "://" in job_dir:
        bucket, folder = open_bucket(job_dir), ""
    else:
        raise OpsError(f"the output of {record.jobId} is in {job_dir}, which is not in the bucket of stack {inventory.stack}")
    with terminal.ProgressLine(f"looking through {job_dir}"):
        files, skipped = bucket.walk_following_links(folder)
    return JobOutput(record, job_dir, files, bucket, folder, skipped)


def require_new_or_empty(target: Path) -> None:
    """Raise UsageError unless the target of a download is new or an empty directory: nothing is overwritten."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is there already: remove it, or give another --dest")
