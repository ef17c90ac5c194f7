"""`fab get`: download a job's output; overwrite nothing."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from pathlib import Path

from infra.scale_tiers import suggest
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import existing_job
from ops.cluster.output import JobOutput, find, require_new_or_empty
from ops.errors import DONE, OpsError, UsageError

_SHOWN = 8


def get(cluster: ClusterClient, job_id: str | None, path: str | None, dest: str | None, as_json: bool) -> int:
    """Download a job's output, or a part of it; use `path` as `dest` if the output has no such file."""
    record = existing_job(cluster.ledger, job_id)
    output = find(cluster, record)
    if not output.files:
        raise OpsError(
            f"job {record.jobId} ({record.state}) has no output in {output.job_dir}{_describe_skipped(output.skipped, '; ')}"
        )
    if path and path.strip("/") in output.skipped:
        raise UsageError(_describe_skipped([path]))
    if path and dest is None and not _files_at(output, path) and (like := suggest(path, _paths(output), 0.8)):
        raise UsageError(
            f"job {record.jobId} has no {path} in its output{like}; to download all of it there, use --dest {path}"
        )
    if path and not _files_at(output, path):
        if dest is not None:
            tops = sorted({name.partition("/")[0] for name in output.files})
            what = f"job {record.jobId} has no {path} in its output{suggest(path, output.files)}"
            raise UsageError(f"{what}; there are {terminal.list_some(tops, most=_SHOWN)}")
        path, dest = None, path
    path = path.strip("/") if path else None
    files = _files_at(output, path) if path else list(output.files)
    target = Path(dest) if dest is not None else Path(posixpath.basename(path) if path else record.jobId)
    below = f"{path}/" if path else ""
    if path and files == [path]:
        below = path
        if target.is_dir():
            target /= posixpath.basename(path)
    require_new_or_empty(target)
    fetched = output.fetch(files, target, below, require_all=False)
    size = sum(output.files[name] for name in fetched)
    if removed := sorted(set(files).difference(fetched)):
        terminal.note(f"job {record.jobId} has removed {terminal.list_some(removed, most=_SHOWN)} meanwhile")
    if skipped := [name for name in output.skipped if not path or name.startswith(f"{path}/")]:
        terminal.note(_describe_skipped(skipped))
    if as_json:
        content = {"jobId": record.jobId, "dest": str(target), "files": sorted(fetched), "leftOut": [*removed, *skipped]}
        terminal.print_json({**content, "bytes": size})
    else:
        terminal.out(f"{terminal.plural(len(fetched), 'file')}, {terminal.size(size)}: {target}")
    return DONE


def _describe_skipped(paths: Sequence[str], prefix: str = "") -> str:
    """Return `prefix` and why these paths are not fetched; an empty text if there are none."""
    why = "links to elsewhere, pipes, sockets or not readable"
    return f"{prefix}not fetched, as they are {why}: {terminal.list_some(paths, most=_SHOWN)}" if paths else ""


def _files_at(output: JobOutput, path: str) -> list[str]:
    """Return the file with that path, or all files below that folder."""
    path = path.strip("/") or "."
    return [name for name in output.files if name == path or name.startswith(f"{path}/")]


def _paths(output: JobOutput) -> set[str]:
    """Return the paths of all files, and of all folders that have some."""
    return {"/".join(name.split("/")[:depth]) for name in output.files for depth in range(1, name.count("/") + 2)}
