"""A running cluster: its inventory, connections, bucket and ledger, each opened on first use."""

from __future__ import annotations

import threading
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from infra.inventory import Inventory
from jobs import paths
from jobs.background import Background
from jobs.bucket import Bucket
from jobs.folder_bucket import open_bucket
from jobs.ledger import Ledger
from ops.cluster import ssh_bucket
from ops.cluster.bucket import SshChannel
from ops.cluster.inventory import ROOT, load
from ops.cluster.remote import Fleet

T = TypeVar("T")


class _OpenedOnce(cached_property[T]):
    """A cached property that threads may read at the same time; cached_property has no lock since Python 3.12."""

    def __get__(self, instance: ClusterClient, owner: type[Any] | None = None) -> T:  # type: ignore[override]
        if instance is None:
            return self
        with instance.opening_lock:
            return super().__get__(instance, owner)


class ClusterClient:
    """The cluster that a command works on."""

    def __init__(
        self, inventory: Inventory, fleet: Fleet | None = None, bucket: Bucket | None = None, ledger: Ledger | None = None
    ) -> None:
        """Use these parts; those that are None are opened when needed."""
        self.inventory = inventory
        self.opening_lock = threading.RLock()
        if fleet is not None:
            self.fleet = fleet
        if bucket is not None:
            self.bucket = bucket
        if ledger is not None:
            self.ledger = ledger

    @classmethod
    def load(cls, root: Path = ROOT) -> ClusterClient:
        """Load the cluster of the stack in use; UsageError if none is up."""
        return cls(load(root))

    @_OpenedOnce
    def fleet(self) -> Fleet:
        """Connections to the hosts; UsageError if a file that SSH needs is missing."""
        return Fleet(self.inventory)

    @_OpenedOnce
    def bucket(self) -> Bucket:
        """The bucket; if it is on the hosts, the first one that answers gives access to it."""
        url = self.inventory.operator_bucket
        if not self.inventory.bucket_on_hosts:
            return open_bucket(url)
        command = ssh_bucket.command(url.removeprefix("sftp://"))
        return ssh_bucket.SshBucket(lambda: SshChannel(self.fleet.any_connection(), command))

    @_OpenedOnce
    def ledger(self) -> Ledger:
        """The records in the bucket."""
        return Ledger(self.bucket)


def connect_early(cluster: ClusterClient) -> None:
    """Begin to connect to the bucket in the background; an error is ignored, as the first use of the bucket raises it."""
    Background(lambda: cluster.bucket.read(paths.QUEUE))
