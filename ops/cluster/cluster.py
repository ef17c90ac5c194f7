"""A running cluster: its inventory, connections, bucket and ledger, each opened on first use."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from infra.inventory import Inventory
from jobs.ledger import Ledger
from ops import terminal
from ops.cluster.bucket import Bucket, open_bucket
from ops.cluster.inventory import ROOT, load
from ops.cluster.ledger import open_ledger
from ops.cluster.remote import Fleet


class Cluster:
    """The target of a command.

    It is for one thread, except `inventory`, `fleet`, `ledger` and `another_bucket`.
    """

    def __init__(
        self, inventory: Inventory, fleet: Fleet | None = None, bucket: Bucket | None = None, ledger: Ledger | None = None
    ) -> None:
        """Use these parts; those that are None are opened when needed."""
        self.inventory = inventory
        if fleet is not None:
            self.fleet = fleet
        if bucket is not None:
            self.bucket = bucket
        if ledger is not None:
            self.ledger = ledger

    @classmethod
    def load(cls, root: Path = ROOT) -> Cluster:
        """Load the cluster of the stack in use.

        Raises:
            UsageError: if none is up.
        """
        return cls(load(root))

    @cached_property
    def fleet(self) -> Fleet:
        """Connections to the hosts; UsageError where what SSH needs is missing."""
        return Fleet(self.inventory)

    @cached_property
    def bucket(self) -> Bucket:
        """The bucket, through whichever host answers first where it is on hosts."""
        with terminal.Step("opening the bucket"):
            return self.another_bucket()

    @cached_property
    def ledger(self) -> Ledger:
        """The records in the bucket, through whichever host answers first where it is on hosts."""
        return open_ledger(self.inventory.operator_bucket, lambda: self.fleet.any_connection())

    def another_bucket(self) -> Bucket:
        """Open the bucket over another channel, for another thread: an SFTP client cannot be shared."""
        return open_bucket(self.inventory.operator_bucket, lambda: self.fleet.any_connection())
