"""A runtime in the stack's bucket: built and uploaded if it is missing, deleted with the stack."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
from pulumi import Output

from infra.dynamic import ModuleResource, Props, configuration
from infra.gcp.api import GcpError, UnreachableError, credentials
from infra.runtime import build
from infra.runtime.recipe import RuntimeSpec

REPLACE_ON_CHANGES = frozenset({"bucket", "python", "requirements", "constraints"})
# Hosts get the name of the new runtime before the old one is deleted, so a host that boots meanwhile finds its runtime.
DELETE_FIRST = False
_PART_BYTES = 32 << 20  # a broken connection repeats one part
_PART_SECONDS = 120.0  # the time limit of one part
# The archive's metadata: the hash of its content, and which resource uses it.
_SHA256, _USER = "sha256", "user"


class RuntimeArchive(ModuleResource, module="gcp", name="Runtime"):
    """A runtime in the bucket, as a resource.

    Inputs: endpoint (of the storage API), project, bucket, and the spec's python, requirements and constraints.

    Outputs: path (of the archive in the bucket), sha256 (of its content), user (random; also in the archive's metadata).
    """

    module_name = __name__
    outputs = ("path", "sha256", "user")
    path: Output[str]
    sha256: Output[str]


def create(props: Props) -> tuple[str, Props]:
    spec, user = _runtime_spec(props), secrets.token_hex(8)
    with _bucket(props, spec.path) as bucket:
        stored = bucket.get_blob(spec.path)
        if sha256 := _metadata(stored).get(_SHA256):
            stored.metadata = {_SHA256: sha256, _USER: user}
            stored.patch()
        else:
            # The engine shows a provider's output beside the resource.
            print(f"building the hosts' Python {spec.python} (a minute or three, once)", flush=True)
            archive = build.ensure_archive(spec)
            print(f"uploading {archive.stat().st_size / 1e6:.0f} MB to gs://{props['bucket']}/{spec.path}", flush=True)
            sha256 = _sha256(archive)
            blob = bucket.blob(spec.path, chunk_size=_PART_BYTES)
            blob.metadata = {_SHA256: sha256, _USER: user}
            blob.upload_from_filename(archive, content_type="application/gzip", timeout=_PART_SECONDS)
    return spec.name, {**props, "path": spec.path, "sha256": sha256, "user": user}


def read(name: str, props: Props) -> Props | None:
    try:
        with _bucket(props, props["path"]) as bucket:
            sha256 = _metadata(bucket.get_blob(props["path"])).get(_SHA256)
            return {**props, "sha256": sha256} if sha256 else None
    except UnreachableError:
        return props


def update(name: str, old: Props, new: Props) -> Props:
    return {**old, **new}


def delete(name: str, props: Props) -> None:
    """Delete all versions of the archive: the bucket keeps old versions, and only an empty bucket can be destroyed.

    Keep an archive that a later resource uses: after a failed update, the next one may go back to the earlier runtime.
    """
    with _bucket(props, props["path"]) as bucket:
        stored = bucket.get_blob(props["path"])
        if stored and _metadata(stored).get(_USER) != props.get("user"):  # older states and archives have none
            return
        for blob in list(bucket.list_blobs(prefix=props["path"], versions=True)):
            blob.delete()


def _metadata(blob: Any) -> dict[str, str]:
    """Return the metadata of the bucket's archive, empty if there is no archive."""
    return (blob and blob.metadata) or {}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _runtime_spec(props: Props) -> RuntimeSpec:
    return RuntimeSpec(props["python"], tuple(props["requirements"]), tuple(props["constraints"]))


@contextmanager
def _bucket(props: Props, path: str) -> Iterator[Any]:
    """Yield the bucket of Google's library; GcpError if Google refuses, UnreachableError if it does not answer."""
    import google.api_core.exceptions  # takes half a second, and not every run needs it
    from google.cloud import storage

    what = f"gs://{props['bucket']}/{path}"
    try:
        client = storage.Client(
            project=props["project"],
            credentials=credentials(configuration),
            client_options={"api_endpoint": props["endpoint"].partition("/storage/v1")[0]},
        )
        yield client.bucket(props["bucket"])
    except google.api_core.exceptions.GoogleAPIError as error:
        raise GcpError(f"{what}: {' '.join(str(error).split())}") from None
    except (google.auth.exceptions.GoogleAuthError, requests.exceptions.RequestException) as error:
        raise UnreachableError(f"{what}: Google does not answer ({type(error).__name__})") from None
    except build.BuildError as error:
        raise GcpError(f"{what}: {error}") from None
