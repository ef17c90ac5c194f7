"""The doctor's findings of a Google cluster, by the Compute API and by the stack's state."""

from __future__ import annotations

import pytest
from fakegoogle import FakeGoogle

from infra.findings import look
from infra.gcp import doctor
from infra.gcp.orphans import Leftover

INSTANCE = "projects/my-project-1/zones/z/instances/st-dev"


@pytest.fixture(autouse=True)
def stack_configuration(monkeypatch: pytest.MonkeyPatch, fake: FakeGoogle) -> None:
    monkeypatch.setattr(doctor, "configuration", lambda: fake.config)


def inventory(fake: FakeGoogle) -> dict[str, object]:
    hosts = [{"name": name, "start": f"{INSTANCE}-{name}/start"} for name in ("master-0", "ps-0", "worker-0")]
    serving = {"name": "serving-0", "start": None}
    power = {"operatorUrl": f"http://127.0.0.1:{fake.port}/compute/v1/"}
    return {"stack": "dev", "hosts": [*hosts, serving], "power": power}


def test_hosts_that_do_not_run_are_named(fake: FakeGoogle) -> None:
    for name in ("master-0", "ps-0", "worker-0"):
        fake.answers[f"/compute/v1/{INSTANCE}-{name}"] = (200, {"status": "RUNNING"})
    (found,) = doctor.hosts(inventory(fake))
    assert (found.severity, found.what) == ("ok", "all 3 hosts run that jobs are for")
    fake.answers[f"/compute/v1/{INSTANCE}-ps-0"] = (200, {"status": "TERMINATED"})
    del fake.answers[f"/compute/v1/{INSTANCE}-worker-0"]
    said = [(each.severity, each.what, each.remedy) for each in doctor.hosts(inventory(fake))]
    assert said == [
        ("error", "host ps-0 is TERMINATED", "pulumi up, or fab train --start-hosts"),
        ("error", "host worker-0 is gone", "pulumi up"),
    ]


def test_google_that_refuses_is_one_finding(fake: FakeGoogle) -> None:
    fake.answers[f"/compute/v1/{INSTANCE}-master-0"] = (403, {"error": {"code": 403, "message": "Permission denied"}})
    (found,) = look({"hosts": lambda: doctor.hosts(inventory(fake))}, 30)
    assert (found.severity, "Permission denied" in found.what) == ("error", True)
    assert list(doctor.hosts(None)) == []


def test_what_is_in_no_state_is_named_with_what_takes_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    left, known = [Leftover("instance", f"{INSTANCE}-ps-7", "http://x")], True
    monkeypatch.setattr(doctor, "configuration", lambda: lambda _: None)
    monkeypatch.setattr(doctor, "of_stack", lambda _: (left, known))
    (found,) = doctor.belongings(None)
    assert (found.severity, found.what) == ("warning", "instance st-dev-ps-7 is in no state")
    assert found.remedy == "python -m infra.gcp.orphans --delete"
    known = False
    (found,) = doctor.belongings(None)
    assert "1 resources at Google bear the stack's name" in found.what
    assert "another state may have them" in found.what
    assert "--delete" not in found.remedy
    left.clear()
    (found,) = doctor.belongings(None)
    assert found.severity == "ok"
