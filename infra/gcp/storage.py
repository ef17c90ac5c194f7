"""The stack's bucket: never public, and destroyed with its content only if `forceDestroy` is set."""

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

_IGNORED_AT_IMPORT = ("forceDestroy", "labels", "lifecycleRules", "versioning")


class Storage(ComponentResource):
    """The bucket, as one component. Output: its name.

    Args:
        retain: True to leave the bucket in place when the stack is destroyed.
        force: True to delete it with its content when the stack is destroyed.
        exists: True if the bucket exists already, left by a killed update or a destroyed stack. It is imported without a
            change, because Pulumi refuses to import a bucket that differs; the next update applies the settings.
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
                # A job overwrites its records many times. Old versions are kept only for a week, to undo mistakes.
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
                ignore_changes=list(_IGNORED_AT_IMPORT) if exists else None,
            ),
        )
        self.bucket = bucket.name
        self.register_outputs({"bucket": self.bucket})
