"""Test clusters of the Google Cloud target: all tiers, with and without GPUs and spot."""

from __future__ import annotations

from stackmocks import PROJECT, Recorded, Stack
from test_firewall_answers import CUSTOM, SERVING, TIERS

from infra.scale_tiers import ScaleTier

GPUS = {
    **CUSTOM,
    "acceleratorType": '{"worker": "NVIDIA_TESLA_V100", "evaluator": "nvidia-tesla-t4"}',
    "acceleratorCount": '{"worker": 2}',
    "provisioningModel": '{"worker": "SPOT", "ps": "SPOT"}',
}
L4 = {"scaleTier": "CUSTOM", "masterType": "g2-standard-24", "provisioningModel": '{"master": "SPOT"}'}
A100 = {"scaleTier": "CUSTOM", "masterType": "a2-highgpu-2g"}
ALL = [*TIERS, *SERVING, GPUS, L4, A100, {"scaleTier": "BASIC_GPU", "publicAddress": "true"}]
HOSTS = {ScaleTier.BASIC: 1, ScaleTier.STANDARD_1: 8, ScaleTier.PREMIUM_1: 31, ScaleTier.BASIC_GPU: 1}


def account_email(role: str, stack: Stack) -> str:
    return f"{stack.one('Account', f'account-{role}').inputs['accountId']}@{PROJECT}.iam.gserviceaccount.com"


def role_of(instance: Recorded) -> str:
    return instance.name.rpartition("-")[0]
