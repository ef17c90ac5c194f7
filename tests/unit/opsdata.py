"""A cluster, and the records, logs and files of its bucket."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jobs.bucket import Item
from jobs.chunks import Chunk, ChunkFolder, chunks_of
from jobs.folder_bucket import FolderBucket
from jobs.ledger import Ledger
from jobs.records import JobRecord
from ops.cluster.cluster import ClusterClient
from ops.cluster.inventory import parse
from ops.errors import HostError
from ops.logs.lines import LogLine

HOSTS = (("ps-0", 32), ("master-0", 2), ("worker-0", 64), ("worker-1", 65), ("evaluator-0", 96))
SERVERS = (("serving-0", 192), ("serving-1", 193))
MODEL_PB = b"\x12\x13\x2a\x11\x0a\x0fserving_default"
"""A SavedModel in protocol buffers, with one signature `serving_default` without inputs."""


class FakeStream:
    """A command's output in pieces, an error among them where the connection breaks, and its exit code."""

    def __init__(self, host: str, *pieces: bytes | HostError, exit_code: int = 0, stderr: str = "") -> None:
        self.host, self._pieces, self.exit_code, self.stderr = host, pieces, exit_code, stderr
        self.finished = self.closed = False

    def pieces(self) -> Iterator[bytes]:
        """Yield the output, and raise the error."""
        for piece in self._pieces:
            if isinstance(piece, HostError):
                raise piece
            yield piece

    def finish(self) -> None:
        """Record that its stdin was closed."""
        self.finished = True

    def close(self) -> None:
        """Record that it was closed."""
        self.closed = True


def inventory_json(servers: int = 0, **changes: Any) -> str:
    """Return the inventory.json of a CUSTOM cluster: a ps, a master, two workers, an evaluator; `servers`."""
    hosts = [
        {
            "name": name,
            "role": name.partition("-")[0],
            "index": int(name.partition("-")[2]),
            "address": f"10.0.0.{last}",
            "machineType": "n1-standard-4" if name == "ps-0" else "n1-highcpu-8",
            "cpus": 1,
            "memoryBytes": 2_000_000_000,
            "accelerator": None,
            "hourlyCost": None,
            "createTime": None,
        }
        for name, last in HOSTS + SERVERS[:servers]
    ]
    stack = {"schema": 1, "stack": "test", "target": "lxd", "scaleTier": "CUSTOM", "hosts": hosts, "labels": {}}
    place = {"bucket": "/bucket", "operatorBucket": "sftp:///bucket", "pollSeconds": 0.5}
    return json.dumps(stack | place | changes)


def make_cluster(folder: Path, fleet: object = None, **changes: Any) -> ClusterClient:
    """Return a cluster whose bucket is a folder, which has the same path here and on the hosts."""
    (bucket := folder / "bucket").mkdir(exist_ok=True)
    inventory = parse(inventory_json(bucket=str(bucket), operatorBucket=str(bucket), **changes), folder)
    return ClusterClient(inventory, fleet or object())  # type: ignore[arg-type]


def write_files(root: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files, by their paths below a folder, and return the folder."""
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def put_job(ledger: Ledger, record: JobRecord) -> None:
    """Write a job's record to the bucket, over any other."""
    before = ledger.job(record.jobId)
    if before:
        ledger.change_job(before, record)
    else:
        ledger.create_job(record)


def put_log(folder: Path, lines: Iterable[LogLine], incarnation: int = 1769860800) -> None:
    """Write more lines of a replica's log, as one chunk of its folder, on a host or in the bucket."""
    folder.mkdir(parents=True, exist_ok=True)
    chunks = [chunk for chunk in chunks_of(ChunkFolder(folder).sizes()) if chunk.incarnation == incarnation]
    offset = chunks[-1].end if chunks else 0
    before = sum((folder / chunk.name).read_bytes().count(b"\n") for chunk in chunks)
    (folder / Chunk(incarnation, offset, before, 0).name).write_text("".join(line.to_json() + "\n" for line in lines))


def refuse_packages_as_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no call read a package as a small record, whose time limit a package may exceed."""
    read = FolderBucket.read

    def checked(bucket: FolderBucket, name: str) -> Item | None:
        assert not name.endswith(".tar.gz")
        return read(bucket, name)

    monkeypatch.setattr(FolderBucket, "read", checked)
