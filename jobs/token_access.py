"""The rights of a job's token on Google Cloud: what the job names, as rules of a credential access boundary.

Source: Cloud Storage documentation, "Credential Access Boundaries", for the rules and their limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from jobs import paths
from jobs.records import Plan, Task

Boundary = list[dict[str, Any]]

MOST_BUCKETS = 6
"""The most buckets outside the stack: these leave two of a boundary's rules for folders that the job reads."""
_MOST_RULES, _OWN_RULES = 10, 2
_PREFIXES_PER_RULE, _LONGEST_CONDITION = 3, 2048  # a condition may have twelve logical operators
_GLOB = re.compile(r"[*?[]")
_URL = re.compile(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])((?:/[^\s'\",;:]*)?)")


@dataclass(frozen=True)
class Access:
    """A job's rights: prefixes of names in the stack's `bucket`, and whole other buckets, which it may also write.

    `left_out` names folders and buckets for which a boundary has no room.
    """

    bucket: str
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    others: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def access(plan: Plan, task: Task, bucket: str) -> Access:
    """Return a job's rights: write its output, read the stack's data and its configured inputs; pure.

    `bucket` is the stack's, without gs://. A job that continues in the output of another writes there.
    """
    urls = dict.fromkeys(_urls([*plan.args, *plan.command, *plan.data, *task.environment.values()]))
    job_dir = _urls([task.environment.get("JOB_DIR", "")])
    output = next((path.strip("/") for name, path in job_dir if name == bucket), "") or paths.output(plan.jobId)
    named = (path.strip("/") for name, path in urls if name == bucket)
    inputs = [paths.readable_folder(path) if _GLOB.search(path) else path for path in named]
    own_folders = (paths.DATA, output)
    reads = dict.fromkeys(
        (paths.DATA, *(path for path in inputs if path and not f"{path}/".startswith(tuple(f"{k}/" for k in own_folders))))
    )
    others = tuple(dict.fromkeys(name for name, _ in urls if name != bucket))
    groups = _groups(bucket, reads)
    room = _MOST_RULES - _OWN_RULES - len(others[:MOST_BUCKETS])
    left_out = [f"gs://{bucket}/{folder}" for folder in chain(*groups[room:])]
    left_out += [f"gs://{other}" for other in others[MOST_BUCKETS:]]
    return Access(bucket, (output,), tuple(chain(*groups[:room])), others[:MOST_BUCKETS], tuple(left_out))


def _groups(bucket: str, folders: Iterable[str]) -> list[tuple[str, ...]]:
    """Divide folders among conditions of a length and number of operators that Google accepts."""
    groups: list[tuple[str, ...]] = []
    for folder in folders:
        longer = (*groups.pop(), folder) if groups else (folder,)
        fits = len(longer) <= _PREFIXES_PER_RULE and len(_within(bucket, longer, dotted=True)) <= _LONGEST_CONDITION
        groups += [longer] if fits or len(longer) == 1 else [longer[:-1], (folder,)]
    return groups


def boundary(rights: Access) -> Boundary:
    """Return the rules of a credential access boundary, in the form of Google's API; pure."""
    return [
        _rule(rights.bucket, "roles/storage.objectUser", _within(rights.bucket, rights.writes)),
        *(
            _rule(rights.bucket, "roles/storage.objectViewer", _within(rights.bucket, each, dotted=True))
            for each in _groups(rights.bucket, rights.reads)
        ),
        # TensorFlow asks whether the bucket exists before it makes a folder.
        _rule(rights.bucket, "roles/storage.bucketViewer"),
        *(_rule(other, "roles/storage.objectUser") for other in rights.others),
    ]


def _rule(bucket: str, role: str, condition: str = "") -> dict[str, Any]:
    rule: dict[str, Any] = {
        "availableResource": f"//storage.googleapis.com/projects/_/buckets/{bucket}",
        "availablePermissions": [f"inRole:{role}"],
    }
    return rule | ({"availabilityCondition": {"expression": condition}} if condition else {})


def _within(bucket: str, folders: Iterable[str], dotted: bool = False) -> str:
    """Return a condition for objects with these names, objects in folders with these names, and listings of these folders.

    A listing names no object, so its prefix is checked by itself. With `dotted` it includes names that continue with a dot, as
    a checkpoint's files do.
    """
    terms = []
    for folder in folders:
        name = f"projects/_/buckets/{bucket}/objects/{folder}"
        terms += [f"resource.name == '{name}'", f"resource.name.startsWith('{name}/')"]
        terms += [f"resource.name.startsWith('{name}.')"] if dotted else []
        terms.append(f"api.getAttribute('storage.googleapis.com/objectListPrefix', '').startsWith('{folder}/')")
    return " || ".join(terms)


def _urls(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        for match in _URL.finditer(text):
            yield match[1], match[2]
