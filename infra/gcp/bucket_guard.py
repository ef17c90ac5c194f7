"""A resource that is deleted first: a destroy that would delete data, or end a job, changes nothing."""

from __future__ import annotations

import sys
from urllib.parse import quote

import google.auth.exceptions
import requests

from infra.dynamic import ModuleResource, Props, configuration
from infra.gcp.api import STORAGE, TIMEOUT, ApiError, GcpError, ReadConfig, endpoint, get_pages, session
from infra.guard import destroy_problem, list_some
from infra.runtime.recipe import RUNTIMES_FOLDER

_SHOWN = 5


class GcpBucketGuard(ModuleResource, module="gcp", name="BucketGuard"):
    """Inputs: bucket; retain (retainBucket), force (forceDestroy) and disrupt (disruptJobs).

    Created last and so deleted first. If the deletion fails, nothing else is destroyed.
    """

    module_name = __name__


def create(props: Props) -> tuple[str, Props]:
    return props["bucket"], props


def delete(name: str, props: Props) -> None:
    """Raise GcpError if the destroy would delete a bucket with content, or end a job."""
    bucket = props["bucket"]
    if problem := destroy_problem(
        props, lambda: contents(bucket, configuration), lambda path: read_object(bucket, path, configuration)
    ):
        raise GcpError(problem)
    if props["retain"]:
        sys.stderr.write(f"the bucket is retained: gs://{bucket}; the next stack of this name reuses it\n")


def contents(bucket: str, read_config: ReadConfig) -> str:
    """Describe a bucket's objects and old versions except the hosts' Python; empty if there are no others.

    GcpError if it is unknown, except if the operator may not list the bucket: trying again would not help.
    """
    url = f"{endpoint(STORAGE, read_config)}b/{bucket}/o"
    try:
        pages = list(get_pages(session(read_config), url, delimiter="/", versions="true"))
    except ApiError as error:
        if error.status == requests.codes.not_found:
            return ""
        if error.status == requests.codes.forbidden:
            return f"what Google refuses to list ({error})"
        raise GcpError(f"gs://{bucket} cannot be listed ({error}), so nothing was changed: try again") from None
    folders = {folder for page in pages for folder in page.get("prefixes", ())} - {f"{RUNTIMES_FOLDER}/"}
    names = {item["name"] for page in pages for item in page.get("items", ())}
    content = list_some([*sorted(folders), *sorted(names)], _SHOWN)
    return f"{content} (old versions included)" if content else ""


def read_object(bucket: str, path: str, read_config: ReadConfig) -> bytes | None:
    """Return an object, or None if it or the bucket does not exist."""
    url = f"{endpoint(STORAGE, read_config)}b/{bucket}/o/{quote(path, safe='')}"
    try:
        answer = session(read_config).get(url, params={"alt": "media"}, timeout=TIMEOUT)
    except (GcpError, requests.RequestException, google.auth.exceptions.GoogleAuthError) as error:
        raise GcpError(f"the bucket does not answer ({' '.join(str(error).split())}): try again") from None
    if answer.status_code == requests.codes.not_found:
        return None
    if not answer.ok:
        raise GcpError(f"the bucket does not answer (HTTP {answer.status_code} for {path}): try again")
    return answer.content
