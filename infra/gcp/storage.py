"""The stack's bucket: packages, records, logs, checkpoints.

It is never public, and not destroyed while it holds anything.
"""

from __future__ import annotations

from collections.abc import Mapping

from pulumi import ComponentResource, Output, ResourceOptions
from pulumi_gcp.storage import (
    Bucket,
    BucketLifecycleRuleActionArgs,
    BucketLifecycleRuleArgs,
    BucketLifecycleRuleConditionArgs,
    BucketVersioningArgs,
)

from infra.gcp.zones import Place

_NOT_AT_ONCE = ("forceDestroy", "labels", "lifecycleRules", "versioning")


class Storage(ComponentResource):
    """Output: the bucket's name.

    Args:
        retain: leaves the bucket in place when the stack is destroyed.
        force: deletes it with its content.
        exists: a killed update or a destroyed stack left it. It is imported unchanged, as the engine refuses to import one that
            differs; the next update applies these settings.
    """

    bucket: Output[str]

    def __init__(
        self, place: Place, name: str, labels: Mapping[str, str], retain: bool, force: bool, exists: bool, opts: ResourceOptions
    ) -> None:
        super().__init__("scaletier:gcp:Storage", "storage", None, opts)
        bucket = Bucket(
            "bucket",
            name=name,
            project=place.project,
            location=place.region.upper(),
            storage_class="STANDARD",
            labels=labels,
            uniform_bucket_level_access=True,
            public_access_prevention="enforced",
            versioning=BucketVersioningArgs(enabled=True),
            lifecycle_rules=[
                # Records are written over many times in a job: versions are for mistakes, not for history.
                BucketLifecycleRuleArgs(
                    action=BucketLifecycleRuleActionArgs(type="Delete"),
                    condition=BucketLifecycleRuleConditionArgs(days_since_noncurrent_time=7, with_state="ARCHIVED"),
                ),
                BucketLifecycleRuleArgs(
                    action=BucketLifecycleRuleActionArgs(type="AbortIncompleteMultipartUpload"),
                    condition=BucketLifecycleRuleConditionArgs(age=1, with_state="ANY"),
                ),
            ],
            force_destroy=force,
            opts=ResourceOptions(
                parent=self,
                retain_on_delete=retain,
                import_=name if exists else None,
                ignore_changes=list(_NOT_AT_ONCE) if exists else None,
            ),
        )
        self.bucket = bucket.name
        self.register_outputs({"bucket": self.bucket})
