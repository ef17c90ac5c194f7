"""`fab report`: read jobs and write their page; overwrite only pages of this command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jobs.bucket import replacing
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.errors import DONE, UsageError, one_line
from ops.report.evidence import JobEvidence
from ops.report.make import make
from ops.report.page import MARK, as_json, page

MAX_JOBS = 6
"""The most jobs that can be distinguished on one page."""
_HEAD_BYTES = 512


def report(cluster: ClusterClient, job_ids: Sequence[str], output: str | None, json: bool) -> int:
    """Write the report of a job, by default the newest, or of several to compare; with `json` print it."""
    check_ids(job_ids)
    if json and output:
        raise UsageError("--json prints, and --output writes a page: use only one of them")
    if output:
        check_output(Path(output))
    reports = [make(JobEvidence(cluster, job_id)) for job_id in job_ids or (None,)]
    if json:
        terminal.print_json(as_json(reports))
        return DONE
    target = Path(output or f"report-{'-'.join(each.job for each in reports)}.html")
    check_output(target)
    with terminal.ProgressLine("drawing"):
        content = page(reports).encode()
    write(target, content)
    terminal.out(f"{target}: {terminal.size(len(content))}")
    return DONE


def check_ids(job_ids: Sequence[str]) -> None:
    """Check the number of jobs, and that none is named twice."""
    if len(job_ids) > MAX_JOBS:
        raise UsageError(f"fab report compares {MAX_JOBS} jobs at most, not {len(job_ids)}")
    if twice := [job_id for index, job_id in enumerate(job_ids) if job_id in job_ids[:index]]:
        raise UsageError(f"{twice[0]} is named twice: a job is compared with others")


def check_output(target: Path) -> None:
    """Check that the page can be written, and would overwrite nothing but another page of this command."""
    if can_create(target):
        return
    if not target.is_file():
        raise UsageError(f"{target} is there already, and no file: give another --output")
    with _write_errors(target), target.open("rb") as page:
        ours = MARK.encode() in page.read(_HEAD_BYTES)
    if not ours:
        raise UsageError(f"{target} is there already, and was not made by fab report: remove it, or give another --output")


def can_create(target: Path) -> bool:
    """Return whether a file can be created: False if its path exists, UsageError if its folder does not."""
    with _write_errors(target):
        if target.exists():
            return False
        if not target.parent.is_dir():
            raise UsageError(f"{target} cannot be written: there is no folder {target.parent}")
        return True


def write(target: Path, content: bytes) -> None:
    """Write a file atomically; UsageError if the folder does not allow it."""
    with _write_errors(target), replacing(target) as file:
        file.write(content)


@contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror or one_line(error)}") from None
