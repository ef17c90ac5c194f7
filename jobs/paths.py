"""Where everything of a job is in the bucket: the one place that knows."""

from __future__ import annotations

import re

JOB_ID = re.compile(r"^[A-Za-z][A-Za-z0-9_]{0,127}$")
JOBS = "jobs"
DATA = "data"
QUEUE = "cluster/queue.json"
LEFT = "left"
"""The folder of a job's output for what its replicas wrote beside that, a folder each."""
EVERY_JOB = f"{JOBS}/*/job.json"


def folder(job_id: str) -> str:
    """All that is a job's, its output too where nothing else was said; ValueError for what is no id."""
    if not JOB_ID.fullmatch(job_id):
        raise ValueError(f"{job_id!r} is no id of a job")
    return f"{JOBS}/{job_id}"


def job(job_id: str) -> str:
    """The job's record: its state, and who may move it on."""
    return f"{JOBS}/{job_id}/job.json"


def plan(job_id: str) -> str:
    """What its replicas need to know, written once."""
    return f"{JOBS}/{job_id}/plan.json"


def package(job_id: str) -> str:
    """The trainer package and its dependencies, a tar archive."""
    return f"{JOBS}/{job_id}/package.tar.gz"


def manifest(job_id: str) -> str:
    """What the job was made of, so that it can be run again."""
    return f"{JOBS}/{job_id}/manifest.json"


def cancel(job_id: str) -> str:
    """There once somebody asked for the job's end."""
    return f"{JOBS}/{job_id}/cancel.json"


def replica(job_id: str, name: str) -> str:
    """A replica's own record."""
    return f"{JOBS}/{job_id}/replicas/{name}.json"


def log(job_id: str, name: str) -> str:
    """The folder with the chunks of a replica's log."""
    return f"{JOBS}/{job_id}/logs/{name}"


def diagnosis(job_id: str, name: str) -> str:
    """What a replica's host knew when the job FAILED, written once."""
    return f"{JOBS}/{job_id}/diagnosis/{name}.json"


def trial(job_id: str, number: int) -> str:
    """The record of a trial, of a job that tunes hyperparameters."""
    return f"{JOBS}/{job_id}/trials/{number}.json"


def output(job_id: str) -> str:
    """Where a job's output goes where nothing else is said."""
    return f"{JOBS}/{job_id}/output"


def job_of(name: str) -> str:
    """The id of the job that an object below jobs/ belongs to."""
    return name.split("/")[1]
