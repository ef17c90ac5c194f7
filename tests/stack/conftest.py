"""The Pulumi program under mocks, for both targets, with nothing asked of LXD or of Google."""

from __future__ import annotations

import ipaddress
import json
import os
import pickle
import re
import runpy
from collections.abc import Mapping
from pathlib import Path

import pytest
from gcpcases import ALL
from stackmocks import PROJECT, ZONE, Program, Stack, declared, operator_files, unseen

from infra.gcp import target as gcp_target
from infra.lxd import target as lxd_target
from infra.lxd.layout import Names
from infra.lxd.preflight import Found
from infra.templates import ROOT


@pytest.fixture(autouse=True)
def no_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of LXD or of Google."""
    found = Found(Names("scaletier-dev-abcdef"), "scaletier-image", Path("/runtime"), ipaddress.IPv4Network("10.77.0.0/24"))
    monkeypatch.setattr(lxd_target, "preflight", lambda *_: found)
    monkeypatch.setattr(gcp_target, "survey", unseen)
    monkeypatch.setattr(gcp_target, "preflight", lambda *_: None)
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "GCLOUD_", "CLOUDSDK_"))]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def as_deep_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pulumi wraps this once more for each dynamic resource, and a process of many programs comes to the end of its stack."""
    monkeypatch.setattr(pickle._Pickler, "_batch_setitems", pickle._Pickler._batch_setitems)  # type: ignore[attr-defined]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    """Runs the program itself with a configuration: `program("gcp", scaleTier="BASIC")`; `provider` is that of `gcp:`."""

    def run(target: str, provider: Mapping[str, str] | None = None, **raw: str) -> Stack:
        place = {"project": PROJECT, "zone": ZONE} if provider is None else provider
        config = {f"scaletier:{key}": value for key, value in {"target": target, **raw}.items()}
        config |= {f"gcp:{key}": value for key, value in place.items()} if target == "gcp" else {}
        monkeypatch.setenv("PULUMI_CONFIG", json.dumps(config))
        stack = declared(lambda: runpy.run_path(str(ROOT / "infra" / "__main__.py"), run_name="infra.__main__"))
        stack.files = operator_files(stack)
        return stack

    return run


@pytest.fixture(params=ALL, ids=lambda config: "-".join(re.findall(r"\w+", str([*config.values()])))[:60])
def stack(request: pytest.FixtureRequest, program: Program) -> Stack:
    """Each of the clusters of the Google Cloud target in turn."""
    return program("gcp", **request.param)
