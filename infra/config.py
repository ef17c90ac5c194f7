"""The stack's configuration, checked: `pulumi config set scaleTier STANDARD_1`.

Keys have the names of Cloud ML's, if it has such a key (`projects.jobs#TrainingInput`). A target adds its own in a subclass.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic.alias_generators import to_camel

from infra.scale_tiers import Accelerator, ClusterSpec, Role, RoleSpec, ScaleTier, SpecError, custom, preset
from infra.validation import Section, one_line

_LABEL_KEY = re.compile(r"^[a-z][a-z0-9_-]{0,62}$")
_LABEL_VALUE = re.compile(r"^[a-z0-9_-]{0,63}$")
# Python counts these ranges as private, but no host can use them: "this network", loopback, link-local, broadcast.
_UNUSABLE = [ipaddress.IPv4Network(text) for text in ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "255.255.255.255/32")]


def matches(pattern: str, valid: str) -> AfterValidator:
    """Return a validator for strings that match the whole pattern; its error says what is `valid`."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(valid)
        return text

    return AfterValidator(check)


def private_range(example: str) -> AfterValidator:
    """Return a validator for private address ranges that are as large as the example."""
    prefix = ipaddress.IPv4Network(example).prefixlen

    def check(network: ipaddress.IPv4Network) -> ipaddress.IPv4Network:
        unusable = any(network.overlaps(other) for other in _UNUSABLE)
        if network.prefixlen != prefix or unusable or not network.is_private:
            raise ValueError(f"write a private /{prefix} range, such as {example}")
        return network

    return AfterValidator(check)


class ClusterConfig(Section):
    """Configuration keys of every target, in camelCase in `Pulumi.<stack>.yaml`; frozen.

    `accelerator_type`, `accelerator_count` and `provisioning_model` map roles to values:
    `acceleratorType.worker: nvidia-tesla-t4`. The LXD target later refuses accelerators, before it declares any resource.
    """

    model_config = ConfigDict(alias_generator=to_camel)

    target: Literal["lxd", "gcp"] = "lxd"
    scale_tier: ScaleTier = ScaleTier.STANDARD_1
    master_type: str | None = None
    worker_type: str | None = None
    parameter_server_type: str | None = None
    evaluator_type: str | None = None
    serving_type: str | None = None
    worker_count: int = Field(0, ge=0)
    parameter_server_count: int = Field(0, ge=0)
    evaluator_count: int = Field(0, ge=0)
    serving_count: int = Field(0, ge=0)
    accelerator_type: dict[Role, str] = Field(default_factory=dict)
    accelerator_count: dict[Role, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    provisioning_model: dict[Role, Literal["STANDARD", "SPOT"]] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    disrupt_jobs: bool = False
    retain_bucket: bool = False
    force_destroy: bool = False

    json_keys: ClassVar[frozenset[str]] = frozenset({"labels", "acceleratorType", "acceleratorCount", "provisioningModel"})
    role_keys: ClassVar[tuple[str, ...]] = ("accelerator_type", "accelerator_count", "provisioning_model")
    """Keys whose maps may name only roles of the cluster."""
    max_hosts: ClassVar[Mapping[Role, int]] = {}
    """The number of addresses for each role, if the target limits it."""

    @field_validator("scale_tier", mode="before")
    @classmethod
    def _tier(cls, value: Any) -> ScaleTier:
        return ScaleTier.parse(str(value))

    @field_validator("labels")
    @classmethod
    def _labels(cls, value: dict[str, str]) -> dict[str, str]:
        for key, text in value.items():
            if not _LABEL_KEY.match(key) or not _LABEL_VALUE.match(text):
                raise ValueError(
                    f"label {key}={text} is not valid: keys start with a lowercase letter, and keys and values have up to 63 "
                    "lowercase letters, digits, _ and -"
                )
        return value

    @staticmethod
    def target_of(raw: Mapping[str, str]) -> str:
        """Return the target of a configuration; it is read first, as it decides which keys are valid."""
        name = raw.get("target", "lxd")
        if name not in ("lxd", "gcp"):
            raise SpecError(f"scaletier:target is {name!r}; valid are lxd (hosts on this machine) and gcp (Google Cloud)")
        return name

    @classmethod
    def parse(cls, raw: Mapping[str, str]) -> Self:
        """Return a configuration from Pulumi's strings; SpecError if a key is unknown or a value is invalid."""
        values: dict[str, Any] = dict(raw)
        for key in cls.json_keys & values.keys():
            try:
                values[key] = json.loads(values[key])
            except ValueError:
                raise SpecError(
                    f"scaletier:{key} must be a map: set one with `pulumi config set --path {key}.name value`"
                ) from None
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise SpecError(one_line(error, "scaletier", ":")) from None
        except UnicodeEncodeError as error:
            raise SpecError(f"a value is no UTF-8: {error.object!r}") from None

    def spec(self) -> ClusterSpec:
        """Return the cluster of this configuration; SpecError if there can be no such cluster."""
        spec = self._with_serving_hosts(self._tier_spec())
        for role, role_spec in spec.roles.items():
            if role_spec.count > (limit := self.max_hosts.get(role, role_spec.count)):
                raise SpecError(f"{role} count {role_spec.count} is too high; valid are 0 to {limit}")
        for key in self.role_keys:
            for role in getattr(self, key):
                if role not in spec.roles:
                    name = f"{to_camel(key)}.{role}"
                    raise SpecError(f"scaletier:{name}: this cluster has no {role}; it has {', '.join(spec.roles)}")
        roles = {role: self._with_accelerator(role, role_spec) for role, role_spec in spec.roles.items()}
        return dataclasses.replace(spec, roles=roles)

    def _with_accelerator(self, role: Role, role_spec: RoleSpec) -> RoleSpec:
        gpu_type = self.accelerator_type.get(role) or (role_spec.accelerator.type if role_spec.accelerator else None)
        if role in self.accelerator_count and not gpu_type:
            raise SpecError(
                f"scaletier:acceleratorCount.{role} needs the type too: "
                f"`pulumi config set --path acceleratorType.{role} nvidia-tesla-t4`"
            )
        default = role_spec.accelerator.count if role_spec.accelerator else 1
        accelerator = Accelerator(gpu_type, self.accelerator_count.get(role, default)) if gpu_type else None
        return dataclasses.replace(role_spec, accelerator=accelerator, spot=self.provisioning_model.get(role) == "SPOT")

    def _with_serving_hosts(self, tier: ClusterSpec) -> ClusterSpec:
        """Return the tier with serving hosts, whose default machine type is that of the workers, or of the master if none."""
        if not self.serving_count:
            if self.serving_type:
                raise SpecError(
                    f"scaletier:servingType is {self.serving_type}, and scaletier:servingCount is 0: "
                    "`pulumi config set servingCount 1`, or `pulumi config rm servingType`"
                )
            return tier
        default_type = tier.roles.get(Role.WORKER, tier.roles[Role.MASTER]).machine_type
        servers = RoleSpec(self.serving_count, self.serving_type or default_type)
        return dataclasses.replace(tier, roles={**tier.roles, Role.SERVING: servers})

    def _tier_spec(self) -> ClusterSpec:
        sizes = {
            Role.PS: ("parameterServer", self.parameter_server_count, self.parameter_server_type),
            Role.MASTER: ("master", 1, self.master_type),
            Role.WORKER: ("worker", self.worker_count, self.worker_type),
            Role.EVALUATOR: ("evaluator", self.evaluator_count, self.evaluator_type),
        }
        if self.scale_tier is not ScaleTier.CUSTOM:
            for key, count, machine_type in sizes.values():
                set_key = f"{key}Type" if machine_type else f"{key}Count" if count and key != "master" else None
                if set_key:
                    raise SpecError(
                        f"scaletier:{set_key} goes with scaleTier CUSTOM only, and it is {self.scale_tier}: "
                        f"`pulumi config rm {set_key}`, or `pulumi config set scaleTier CUSTOM`"
                    )
            return preset(self.scale_tier)
        roles, given = {}, {to_camel(name) for name in self.model_fields_set}
        for role, (key, count, machine_type) in sizes.items():
            if count and not machine_type:
                raise SpecError(f"scaleTier CUSTOM needs scaletier:{key}Type: `pulumi config set {key}Type n1-highcpu-8`")
            # A user who sets the count to 0 keeps the type for later.
            if machine_type and not count and f"{key}Count" not in given:
                raise SpecError(
                    f"scaletier:{key}Type is {machine_type}, and scaletier:{key}Count is not set: "
                    f"`pulumi config set {key}Count 1`, or `pulumi config rm {key}Type`"
                )
            roles[role] = RoleSpec(count, machine_type or "")
        return custom(roles)
