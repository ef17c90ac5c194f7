"""One service account a role. It may use the stack's bucket, and nothing else of the project; who serves models reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pulumi import ComponentResource, Output, ResourceOptions
from pulumi_gcp.serviceaccount import Account
from pulumi_gcp.storage import BucketIAMMember

from infra.gcp.names import Names
from infra.spec import Role

# Objects: read, write, list, delete. The bucket: that it exists, which TensorFlow asks before it makes a folder.
# Source: Cloud Storage documentation, "IAM roles for Cloud Storage".
BUCKET_ROLES = {"objects": "roles/storage.objectUser", "bucket": "roles/storage.legacyBucketReader"}
READER_ROLES = {"objects": "roles/storage.objectViewer", "bucket": "roles/storage.legacyBucketReader"}


@dataclass(frozen=True)
class IdentityArgs:
    """The roles that the cluster has."""

    project: str
    names: Names
    roles: Sequence[Role]


class Identity(ComponentResource):
    """Output: the e-mail address of each role's service account."""

    emails: Mapping[Role, Output[str]]

    def __init__(self, name: str, args: IdentityArgs, opts: ResourceOptions | None = None) -> None:
        super().__init__("scaletier:gcp:Identity", name, None, opts)
        self._inside = ResourceOptions(parent=self)
        accounts = {
            role: Account(
                f"account-{role}",
                account_id=args.names.of(role),
                project=args.project,
                display_name=f"scaletier {role}",
                description=f"Hosts of the role {role}, stack {args.names.stack}",
                opts=self._inside,
            )
            for role in args.roles
        }
        self.emails = {role: account.email for role, account in accounts.items()}
        self.register_outputs({"emails": {str(role): email for role, email in self.emails.items()}})

    def grant(self, bucket: Output[str]) -> dict[Role, list[BucketIAMMember]]:
        """Lets every role use a bucket: the bindings by role."""
        return {
            role: [
                BucketIAMMember(
                    f"{role}-{what}",
                    bucket=bucket,
                    role=granted,
                    member=email.apply(lambda address: f"serviceAccount:{address}"),
                    opts=self._inside,
                )
                for what, granted in (BUCKET_ROLES if role.runs_jobs else READER_ROLES).items()
            ]
            for role, email in self.emails.items()
        }
