"""Run the Pulumi program under mocks, for both targets, without any call to LXD or Google."""

from __future__ import annotations

import copy
import ipaddress
import json
import os
import re
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fakegoogle import FakeGoogle
from gcpcases import ALL
from stackmocks import PROJECT, ZONE, Program, Stack, discover_offline, operator_files, record_program

from infra.gcp import target as gcp_target
from infra.lxd import target as lxd_target
from infra.lxd.layout import LxdNames
from infra.templates import ROOT

_STACKS: dict[str, Stack] = {}
"""The resources that the program declared in this process, by configuration."""


@pytest.fixture(autouse=True)
def no_external_calls() -> Iterator[None]:
    """Replace all calls to LXD and Google. Do not use `monkeypatch`: tests use it themselves."""
    preflight_result = lxd_target.PreflightResult(
        LxdNames("scaletier-dev-abcdef"), "scaletier-image", Path("/runtime"), ipaddress.IPv4Network("10.77.0.0/24"), 2**34
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lxd_target, "preflight", lambda *_: preflight_result)
        patch.setattr(gcp_target, "discover", discover_offline)
        patch.setattr(gcp_target, "preflight", lambda *_: None)
        for name in [name for name in os.environ if name.startswith(("CLOUDSDK_", "GCLOUD_", "GOOGLE_", "PULUMI_"))]:
            patch.delenv(name)
        yield


@pytest.fixture
def fake() -> Iterator[FakeGoogle]:
    """Serve a fake of Google's APIs."""
    with FakeGoogle().serving() as server:
        yield server


def run_program(config: str) -> Stack:
    """Run the program itself with a configuration in JSON."""
    with mock.patch.dict(os.environ, PULUMI_CONFIG=config):
        stack = record_program(lambda: runpy.run_path(str(ROOT / "infra" / "__main__.py"), run_name="infra.__main__"))
    stack.files = operator_files(stack)
    return stack


def make_config(target: str, provider: Mapping[str, str] | None = None, **raw: str) -> str:
    """Return the configuration of a stack in JSON; `provider` is that of `gcp:`."""
    gcp = {"project": PROJECT, "zone": ZONE} if provider is None else provider
    config = {f"scaletier:{key}": value for key, value in {"target": target, **raw}.items()}
    return json.dumps(config | ({f"gcp:{key}": value for key, value in gcp.items()} if target == "gcp" else {}))


@pytest.fixture
def fresh_program() -> Program:
    """Run the program itself, not a cached result: `fresh_program("gcp", scaleTier="BASIC")`."""
    return lambda *args, **raw: run_program(make_config(*args, **raw))


@pytest.fixture
def program(request: pytest.FixtureRequest, fresh_program: Program) -> Program:
    """Return what the program declares with a configuration: `program("gcp", scaleTier="BASIC")`.

    It runs once in a process for each configuration, and a test gets a copy. A test with `monkeypatch` always runs it.
    """

    def cached_program(*args: Any, **raw: str) -> Stack:
        config = make_config(*args, **raw)
        if config not in _STACKS:
            _STACKS[config] = run_program(config)
        return copy.deepcopy(_STACKS[config])

    return fresh_program if "monkeypatch" in request.fixturenames else cached_program


@pytest.fixture(params=ALL, ids=lambda config: "-".join(re.findall(r"\w+", str([*config.values()])))[:60])
def stack(request: pytest.FixtureRequest, program: Program) -> Stack:
    """Return each of the Google Cloud test clusters in turn."""
    return program("gcp", **request.param)
