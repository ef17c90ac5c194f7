"""One service account per role, the stack's own or a configured one, with the least rights.

The account of a role that runs jobs may use the stack's bucket, and start the stack's hosts on which jobs run. The account of
serving hosts may only read the bucket. The stack grants no other rights. A custom IAM role has only the permission
`compute.instances.start`, which is all that the API's `instances.start` needs. The role is granted on each instance, not on the
project: so it starts no other instance, and the operator needs no right to the project's policy. One binding per instance names
the accounts of all roles that run jobs, so 31 hosts have 31 bindings, not 93. Source: Compute Engine's reference,
"instances.start"; IAM documentation, "Custom roles".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pulumi import ComponentResource, Output, ResourceOptions
from pulumi_gcp.compute import InstanceIAMBinding
from pulumi_gcp.projects import IAMCustomRole
from pulumi_gcp.serviceaccount import Account
from pulumi_gcp.storage import BucketIAMMember

from infra.gcp.names import GoogleNames
from infra.scale_tiers import Role

# On objects: read, write, list, delete. On the bucket: TensorFlow checks that it exists before it creates a folder.
# Source: Cloud Storage documentation, "IAM roles for Cloud Storage".
BUCKET_ROLES = {"objects": "roles/storage.objectUser", "bucket": "roles/storage.legacyBucketReader"}
START_PERMISSIONS = ("compute.instances.start",)
READER_ROLES = {"objects": "roles/storage.objectViewer", "bucket": "roles/storage.legacyBucketReader"}


class ServiceIdentity(ComponentResource):
    """The service accounts. `existing` are the configured ones by role. Output: the e-mail address of each role's account."""

    emails: Mapping[Role, Output[str]]

    def __init__(
        self, project: str, names: GoogleNames, roles: Iterable[Role], existing: Mapping[Role, str], opts: ResourceOptions
    ) -> None:
        super().__init__("scaletier:gcp:Identity", "identity", None, opts)
        self._project, self._names, self._child_opts = project, names, ResourceOptions(parent=self)
        self.emails = {role: Output.from_input(existing[role]) if role in existing else self._account(role) for role in roles}
        self.register_outputs({"emails": {str(role): email for role, email in self.emails.items()}})

    def _account(self, role: Role) -> Output[str]:
        account = Account(
            f"account-{role}",
            account_id=self._names.resource_name(role),
            project=self._project,
            display_name=f"scaletier {role}",
            description=f"Hosts of the role {role}, stack {self._names.stack}",
            opts=self._child_opts,
        )
        return account.email

    def allow_start(self, zone: str, instances: Mapping[str, Output[str]]) -> None:
        """Allow the account of every role that runs jobs to start these instances, which are by host name."""
        # Google reserves the id of a deleted role for weeks. None is given here, so Pulumi adds random digits to the name.
        start_role = IAMCustomRole(
            "start",
            project=self._project,
            title=self._names.role_title,
            description=f"Start hosts of stack {self._names.stack}",
            permissions=list(START_PERMISSIONS),
            opts=self._child_opts,
        )
        members = [
            email.apply(lambda address: f"serviceAccount:{address}") for role, email in self.emails.items() if role.runs_jobs
        ]
        for name, instance in instances.items():
            InstanceIAMBinding(
                f"start-{name}",
                project=self._project,
                zone=zone,
                instance_name=instance,
                role=start_role.name,
                members=members,
                opts=self._child_opts,
            )

    def grant(self, bucket: Output[str]) -> dict[Role, list[BucketIAMMember]]:
        """Allow accounts of job roles to use a bucket, and that of serving hosts to read it; return the bindings by role."""
        return {
            role: [
                BucketIAMMember(
                    f"{role}-{what}",
                    bucket=bucket,
                    role=bucket_role,
                    member=email.apply(lambda address: f"serviceAccount:{address}"),
                    # IAM stores equal grants once: if the new one were created first, deleting the old one would remove both.
                    opts=ResourceOptions(parent=self, delete_before_replace=True),
                )
                for what, bucket_role in (BUCKET_ROLES if role.runs_jobs else READER_ROLES).items()
            ]
            for role, email in self.emails.items()
        }
