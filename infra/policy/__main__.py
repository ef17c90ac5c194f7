"""`pulumi preview --policy-pack infra/policy`."""

from __future__ import annotations

from pulumi_policy import PolicyPack

from infra.policy.rules import policies

PolicyPack("scaletier", policies())
