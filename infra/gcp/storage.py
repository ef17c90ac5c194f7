"""The stack's bucket: packages, records, logs, checkpoints.

It is never public, and not destroyed while it holds anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pulumi import ComponentResource, Output, ResourceOptions
from pulumi_gcp.storage import (
    Bucket,
    BucketLifecycleRuleActionArgs,
    BucketLifecycleRuleArgs,
    BucketLifecycleRuleConditionArgs,
    BucketVersioningArgs,
)

from infra.gcp.zones import Place

_NONCURRENT_DAYS = 7
_UPLOAD_DAYS = 1
_NOT_AT_ONCE = ("forceDestroy", "labels", "lifecycleRules", "versioning")


@dataclass(frozen=True)
class StorageArgs:
    """Inputs of the bucket.

    `retain` leaves the bucket in place when the stack is destroyed; `force` deletes it with its content. `left`: it exists,
    from an update that was killed or a stack that was destroyed.
    """

    place: Place
    name: str
    labels: Mapping[str, str]
    retain: bool = False
    force: bool = False
    left: bool = False


class Storage(ComponentResource):
    """Output: the bucket's name."""

    bucket: Output[str]

    def __init__(self, name: str, args: StorageArgs, opts: ResourceOptions | None = None) -> None:
        super().__init__("scaletier:gcp:Storage", name, None, opts)
        bucket = Bucket(
            "bucket",
            name=args.name,
            project=args.place.project,
            location=args.place.region.upper(),
            storage_class="STANDARD",
            labels=args.labels,
            uniform_bucket_level_access=True,
            public_access_prevention="enforced",
            versioning=BucketVersioningArgs(enabled=True),
            lifecycle_rules=[
                # Records are written over many times in a job: versions are for mistakes, not for history.
                BucketLifecycleRuleArgs(
                    action=BucketLifecycleRuleActionArgs(type="Delete"),
                    condition=BucketLifecycleRuleConditionArgs(
                        days_since_noncurrent_time=_NONCURRENT_DAYS, with_state="ARCHIVED"
                    ),
                ),
                BucketLifecycleRuleArgs(
                    action=BucketLifecycleRuleActionArgs(type="AbortIncompleteMultipartUpload"),
                    condition=BucketLifecycleRuleConditionArgs(age=_UPLOAD_DAYS, with_state="ANY"),
                ),
            ],
            force_destroy=args.force,
            opts=ResourceOptions.merge(ResourceOptions(parent=self, retain_on_delete=args.retain), _taken_up(args)),
        )
        self.bucket = bucket.name
        self.register_outputs({"bucket": self.bucket})


def _taken_up(args: StorageArgs) -> ResourceOptions | None:
    """Return the options that import an existing bucket unchanged; the next update changes it.

    The engine refuses to import one that differs. If the bucket is in the state already, they only delay its changes until
    then.
    """
    return ResourceOptions(import_=args.name, ignore_changes=list(_NOT_AT_ONCE)) if args.left else None
