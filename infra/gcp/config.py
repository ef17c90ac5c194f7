"""Configuration of the Google Cloud target; project, region and zone are keys of Pulumi's provider, such as `gcp:zone`."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from infra.config import ClusterConfig, matches, private_range
from infra.gcp.machines import gpu_name
from infra.gcp.names import BUCKET, MAX_HOSTS
from infra.scale_tiers import ClusterSpec, Role, SpecError

_MIN_IDLE = 300
_MAX_LABELS = 56


def _seconds(value: object) -> int:
    """Return the seconds of a time such as 30m, 0 for never."""
    match = re.match(r"^(\d+)(s|m|h)?$", str(value))
    if not match or 0 < (seconds := int(match[1]) * {"s": 1, "m": 60, "h": 3600, None: 1}[match[2]]) < _MIN_IDLE:
        raise ValueError("write a time of 5 minutes or more, such as 30m or 2h, or 0 for never")
    return seconds


Account = Annotated[
    str,
    matches(
        r"[a-z][a-z0-9-]{4,28}[a-z0-9]@[a-z][a-z0-9.:-]*\.iam\.gserviceaccount\.com",
        "it is no service account of a project's own: write NAME@PROJECT.iam.gserviceaccount.com",
    ),
]
Bucket = Annotated[
    str,
    matches(
        BUCKET,
        "a bucket's name has 3 to 63 lowercase letters, digits, -, _ and ., a letter or digit at both ends, no .., "
        "no google or the like, no goog in front, and is no IP address",
    ),
]
Image = Annotated[
    str,
    matches(
        r"(projects/)?[a-z0-9.:-]+/(global/images/(family/)?)?[a-z][a-z0-9-]{0,62}",
        "write PROJECT/FAMILY, or projects/PROJECT/global/images/NAME",
    ),
]
Subnet = Annotated[
    str,
    matches(
        r"(projects/[a-z0-9.:-]+/regions/[a-z0-9-]+/subnetworks/)?[a-z]([a-z0-9-]{0,61}[a-z0-9])?",
        "write NAME, or projects/PROJECT/regions/REGION/subnetworks/NAME",
    ),
]
Version = Annotated[str, matches(r"2\.\d{1,2}\.\d{1,2}", "write a whole version of TensorFlow 2, such as 2.21.0")]


class GcpConfig(ClusterConfig):
    """Configuration keys of the Google Cloud target.

    `network` is the address range of the stack's own subnet; `subnetwork` names an existing subnet instead. Hosts are in the
    first of `zones` that offers the whole cluster; `service_account` is by role. `idle_timeout`, `host_key_timeout` and
    `ready_timeout` are in seconds, `boot_disk_size` in GiB, `max_hourly_cost` in US dollars.
    """

    image: Image | None = None
    boot_disk_type: Literal["pd-ssd", "pd-balanced", "pd-standard"] = "pd-ssd"
    boot_disk_size: int = Field(100, ge=20, le=65536)
    zones: tuple[str, ...] = ()
    network: Annotated[ipaddress.IPv4Network, private_range("10.64.0.0/20")] = ipaddress.IPv4Network("10.64.0.0/20")
    subnetwork: Subnet | None = None
    firewall: bool = True
    egress: Literal["closed", "open"] = "closed"
    flow_logs: bool = False
    service_account: dict[Role, Account] = Field(default_factory=dict)
    public_address: bool = False
    operator_cidr: ipaddress.IPv4Network | None = None
    bucket: Bucket | None = None
    runtime_version: Version = "2.21.0"
    max_hourly_cost: float | None = Field(None, gt=0)
    idle_timeout: Annotated[int, BeforeValidator(_seconds)] = 0
    host_key_timeout: int = Field(120, ge=0, le=3600)
    ready_timeout: int = Field(900, ge=0, le=7200)

    json_keys: ClassVar[frozenset[str]] = ClusterConfig.json_keys | {"serviceAccount"}
    role_keys: ClassVar[tuple[str, ...]] = (*ClusterConfig.role_keys, "service_account")
    max_hosts: ClassVar[Mapping[Role, int]] = MAX_HOSTS

    @property
    def egress_closed(self) -> bool:
        """True if the stack restricts outbound traffic. False with `subnetwork`: that network's owner decides."""
        return self.egress == "closed" and self.subnetwork is None

    @field_validator("zones", mode="before")
    @classmethod
    def _zones(cls, value: object) -> object:
        """Parse zones: a list, as in Pulumi's YAML, or names with commas between them."""
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value) if value.startswith("[") else [zone.strip() for zone in value.split(",") if zone.strip()]
        except ValueError:
            raise ValueError("write zones of one region, such as us-central1-a,us-central1-b") from None

    @field_validator("service_account")
    @classmethod
    def _accounts(cls, value: dict[Role, str]) -> dict[Role, str]:
        if len(set(value.values())) < len(value):
            raise ValueError("two roles have the same: the firewall tells them apart by their accounts")
        return value

    @field_validator("operator_cidr")
    @classmethod
    def _operator(cls, value: ipaddress.IPv4Network | None) -> ipaddress.IPv4Network | None:
        if value and value.prefixlen < 8:
            raise ValueError(
                "ssh from a range larger than /8 is refused; write the range you come from, such as 203.0.113.7/32"
            )
        return value

    @field_validator("labels")
    @classmethod
    def _own_labels(cls, value: dict[str, str]) -> dict[str, str]:
        for key in value:
            if key.startswith("goog"):
                raise ValueError(f"label {key} is Google's own: begin it otherwise")
            if key.startswith("scaletier-"):
                raise ValueError(f"label {key} is set by the stack itself: begin it otherwise")
        if len(value) > _MAX_LABELS:
            raise ValueError(f"there are {len(value)} labels; Google takes 64, of which {64 - _MAX_LABELS} are the stack's own")
        return value

    @field_validator("accelerator_type")
    @classmethod
    def _gpus(cls, value: dict[Role, str]) -> dict[Role, str]:
        return {role: gpu_name(text) for role, text in value.items()}

    def spec(self) -> ClusterSpec:
        """Return the cluster of this configuration; SpecError also if keys of this target do not go together."""
        spec = super().spec()
        if self.subnetwork is None and not self.firewall:
            raise SpecError(
                "scaletier:firewall false goes with a subnetwork only: the stack's own network has no other firewall"
            )
        if self.subnetwork and (self.flow_logs or "network" in self.model_fields_set):
            key = "flowLogs" if self.flow_logs else "network"
            raise SpecError(
                f"scaletier:{key} applies only to the stack's own subnet and cannot be combined with scaletier:subnetwork: "
                "remove one of them"
            )
        return spec
