"""Names of objects in the bucket: those of a job, the queue and the data; and of folders on a host."""

from __future__ import annotations

import re

JOB_ID = re.compile(r"^[A-Za-z][A-Za-z0-9_]{0,127}$")
JOBS = "jobs"
DATA = "data"
QUEUE = "cluster/queue.json"
UNSAVED_FOLDER = "left"
"""The folder in a job's output for files that its replicas left behind outside it; it has a folder for each replica."""
EVERY_JOB = f"{JOBS}/*/job.json"
STATE_DIR, CODE_DIR = "/var/lib/scaletier", "/opt/scaletier"
"""On a host: the files of jobs, and scaletier's own code with its Python."""
# Matches a path in a folder of the bucket that a job may read. Local hosts have the same rule.
_READABLE = re.compile(r"jobs/[^/]+/output(?![^/])|models/[^/]+|(?!(?:cluster|jobs|models)(?![^/]))[^/]+")
VENV = f"{CODE_DIR}/venv"
PYTHON = f"{VENV}/bin/python"


def folder(job_id: str) -> str:
    """Return the folder of all objects of a job, by default including its output. Raises ValueError for an invalid id."""
    if not JOB_ID.fullmatch(job_id):
        raise ValueError(f"{job_id!r} is no id of a job")
    return f"{JOBS}/{job_id}"


def job(job_id: str) -> str:
    """Return the name of the job's record: its state and its lease."""
    return f"{JOBS}/{job_id}/job.json"


def plan(job_id: str) -> str:
    """Return the name of the plan that the job's replicas read; it is written once."""
    return f"{JOBS}/{job_id}/plan.json"


def package(job_id: str) -> str:
    """Return the name of the archive with the trainer package and its dependencies, a gzipped tar."""
    return f"{JOBS}/{job_id}/package.tar.gz"


def manifest(job_id: str) -> str:
    """Return the name of the record of the job's inputs, from which `fab reproduce` runs it again."""
    return f"{JOBS}/{job_id}/manifest.json"


def cancel(job_id: str) -> str:
    """Return the name of the request to end the job."""
    return f"{JOBS}/{job_id}/cancel.json"


def replica(job_id: str, name: str) -> str:
    """Return the name of a replica's own record."""
    return f"{JOBS}/{job_id}/replicas/{name}.json"


def log(job_id: str, name: str) -> str:
    """Return the name of the folder with the chunks of a replica's log."""
    return f"{JOBS}/{job_id}/logs/{name}"


def diagnosis(job_id: str, name: str) -> str:
    """Return the name of a replica's diagnosis, written once, when the job FAILED."""
    return f"{JOBS}/{job_id}/diagnosis/{name}.json"


def trial(job_id: str, number: int) -> str:
    """Return the name of a trial's record, of a job that tunes hyperparameters."""
    return f"{JOBS}/{job_id}/trials/{number}.json"


def output(job_id: str) -> str:
    """Return the default folder of a job's output."""
    return f"{JOBS}/{job_id}/output"


def readable_folder(pattern: str) -> str:
    """Return a glob pattern's folder before the first wildcard, or a name without wildcards; empty if no job may read it."""
    fixed = re.split(r"[*?[]", pattern, maxsplit=1)[0]
    folder = fixed if fixed == pattern else fixed.rpartition("/")[0]
    return folder if _READABLE.match(folder) else ""


def job_of(name: str) -> str:
    """Return the id of the job that an object below jobs/ belongs to."""
    return name.split("/")[1]
