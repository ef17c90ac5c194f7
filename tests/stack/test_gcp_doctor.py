"""Check the doctor's findings of a Google cluster, by the Compute API and by the stack's state."""

from __future__ import annotations

import pytest
from fakegoogle import FakeGoogle

from infra.findings import run_checks
from infra.gcp import doctor
from infra.gcp.orphans import Orphan

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
    (finding,) = doctor.hosts(inventory(fake))
    assert (finding.severity, finding.what) == ("ok", "all 3 job hosts run")
    fake.answers[f"/compute/v1/{INSTANCE}-ps-0"] = (200, {"status": "TERMINATED"})
    del fake.answers[f"/compute/v1/{INSTANCE}-worker-0"]
    findings = [(item.severity, item.what, item.remedy) for item in doctor.hosts(inventory(fake))]
    assert findings == [
        ("error", "host ps-0 is TERMINATED", "pulumi up, or fab train --start-hosts"),
        ("error", "host worker-0 is gone", "pulumi up"),
    ]


def test_a_denied_request_is_one_finding(fake: FakeGoogle) -> None:
    fake.answers[f"/compute/v1/{INSTANCE}-master-0"] = (403, {"error": {"code": 403, "message": "Permission denied"}})
    (finding,) = run_checks({"hosts": lambda: doctor.hosts(inventory(fake))}, 30)
    assert (finding.severity, "Permission denied" in finding.what) == ("error", True)
    assert list(doctor.hosts(None)) == []


def test_resources_in_no_state_are_listed_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    leftovers, state_known = [Orphan("instance", f"{INSTANCE}-ps-7", "http://x")], True
    monkeypatch.setattr(doctor, "configuration", lambda: lambda _: None)
    monkeypatch.setattr(doctor, "of_stack", lambda _: (leftovers, state_known))
    (finding,) = doctor.orphans(None)
    assert (finding.severity, finding.what) == ("warning", "instance st-dev-ps-7 is in no state")
    assert finding.remedy == "python -m infra.gcp.orphans --delete"
    leftovers.append(Orphan("instance", f"{INSTANCE}-ps-8", "http://x", runs=True))
    first, second = doctor.orphans(None)
    assert second.what == "instance st-dev-ps-8 is in no state, and runs"
    listing = "python -m infra.gcp.orphans lists them; if nobody needs them, python -m infra.gcp.orphans --delete"
    assert first.remedy == second.remedy == listing, "running hosts are not to be deleted at once"
    leftovers.pop()
    state_known = False
    (finding,) = doctor.orphans(None)
    assert "1 resources at Google have the stack's name" in finding.what
    assert "another state may have them" in finding.what
    assert "--delete" not in finding.remedy
    leftovers.clear()
    (finding,) = doctor.orphans(None)
    assert finding.severity == "ok"
