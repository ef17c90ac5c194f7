"""Call Google's APIs through a loopback fake: quotas and names before creation, host keys after."""

from __future__ import annotations

import dataclasses
from typing import Any

import google.auth.exceptions
import pytest
from fakegoogle import FakeGoogle

from infra.gcp import hostkeys
from infra.gcp.api import GcpError, session
from infra.gcp.config import GcpConfig
from infra.gcp.discovery import Discovery, local_catalogue
from infra.gcp.preflight import has_content, preflight, quota_needs
from infra.gcp.zones import Place
from infra.scale_tiers import Accelerator, ClusterSpec, Role, ScaleTier, preset

PLACE = Place("my-project-1", "us-central1", "us-central1-a")
REGION = "/compute/v1/projects/my-project-1/regions/us-central1"
BUCKET = "/storage/v1/b/a-bucket"
OWN_BUCKETS = "/storage/v1/b?project=my-project-1&prefix=a-bucket"
STANDARD = preset(ScaleTier.STANDARD_1)


def quotas_response(**limits: float) -> tuple[int, dict[str, Any]]:
    zones = ["https://www.googleapis.com/compute/v1/projects/my-project-1/zones/us-central1-" + letter for letter in "abcf"]
    return 200, {"zones": zones, "quotas": [{"metric": name, "limit": limit, "usage": 0} for name, limit in limits.items()]}


def error_response(status: int, message: str, reason: str = "") -> tuple[int, dict[str, Any]]:
    details = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": reason}] if reason else []
    return status, {"error": {"code": status, "message": message, "errors": [{"reason": "forbidden"}], "details": details}}


def run_preflight(fake: FakeGoogle, spec: ClusterSpec = STANDARD, place: Place = PLACE) -> None:
    discovery = Discovery(place, spec, local_catalogue(place.zone))
    preflight(discovery, GcpConfig.parse({}), "a-bucket", "dev", fake.config)


def test_quota_needs_of_each_tier() -> None:
    assert quota_needs(preset(ScaleTier.BASIC), "pd-ssd", 100) == {"CPUS": 4, "SSD_TOTAL_GB": 100, "INSTANCES": 1}
    assert quota_needs(STANDARD, "pd-balanced", 100) == {"CPUS": 52, "SSD_TOTAL_GB": 800, "INSTANCES": 8}
    assert quota_needs(preset(ScaleTier.PREMIUM_1), "pd-standard", 100) == {
        "CPUS": 408,
        "DISKS_TOTAL_GB": 3100,
        "INSTANCES": 31,
    }
    gpu = preset(ScaleTier.BASIC_GPU)
    assert quota_needs(gpu, "pd-ssd", 100)["NVIDIA_T4_GPUS"] == 1
    master = dataclasses.replace(gpu.roles[Role.MASTER], machine_type="a2-highgpu-2g", spot=True)
    spot = ClusterSpec(
        ScaleTier.CUSTOM, {Role.MASTER: dataclasses.replace(master, accelerator=Accelerator("nvidia-tesla-a100", 2))}
    )
    common = {"SSD_TOTAL_GB": 100, "INSTANCES": 1}
    assert quota_needs(spot, "pd-ssd", 100) == {"A2_CPUS": 24, "NVIDIA_A100_GPUS": 2, **common}
    limits = {"PREEMPTIBLE_CPUS": 100.0, "PREEMPTIBLE_NVIDIA_A100_GPUS": 4.0}
    assert quota_needs(spot, "pd-ssd", 100, limits) == {"PREEMPTIBLE_CPUS": 24, "PREEMPTIBLE_NVIDIA_A100_GPUS": 2, **common}


def test_a_project_with_enough_quota_passes(fake: FakeGoogle) -> None:
    fake.answers[REGION] = quotas_response(CPUS=72, SSD_TOTAL_GB=1000)
    run_preflight(fake)
    assert fake.requests == [REGION, BUCKET]
    assert fake.tokens == {"Bearer token-of-a-test"}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (
            quotas_response(CPUS=24),
            "quota CPUS in us-central1 is 24 and this cluster needs 52: ask for more at https://console",
        ),
        (quotas_response(CPUS=72, SSD_TOTAL_GB=500), "quota SSD_TOTAL_GB in us-central1 is 500"),
        (
            error_response(403, "has not been used", "SERVICE_DISABLED"),
            "`gcloud services enable compute.googleapis.com --project my-project-1`",
        ),
        (error_response(403, "Required permission"), "no right to use project my-project-1 (Required permission)"),
        (error_response(401, "Invalid Credentials"), "Google refused the credentials (Invalid Credentials)"),
        (
            error_response(404, "us-central1 was not found"),
            "project my-project-1 has no region us-central1 (us-central1 was not found)",
        ),
    ],
)
def test_a_definite_error_of_google_stops_the_update(fake: FakeGoogle, answer: Any, error: str) -> None:
    fake.answers[REGION] = answer
    with pytest.raises(GcpError) as caught:
        run_preflight(fake)
    assert error in str(caught.value)


def test_a_missing_zone_is_an_error_with_the_regions_zones(fake: FakeGoogle) -> None:
    fake.answers[REGION] = quotas_response()
    run_preflight(fake)
    error = "region us-central1 has no zone us-central1-x; it has us-central1-a, us-central1-b, us-central1-c, us-central1-f"
    with pytest.raises(GcpError, match=error):
        run_preflight(fake, place=Place("my-project-1", "us-central1", "us-central1-x"))


def test_an_unavailable_api_does_not_stop_the_update(fake: FakeGoogle) -> None:
    fake.answers[REGION] = (500, {})
    run_preflight(fake)
    fake.port = 9  # no server listens there
    run_preflight(fake)


def test_the_bucket_of_another_project_is_refused(fake: FakeGoogle) -> None:
    fake.answers[REGION] = quotas_response()
    fake.answers[OWN_BUCKETS] = (200, {"items": [{"name": "a-bucket"}]})
    fake.answers[BUCKET] = error_response(403, "no access")
    with pytest.raises(GcpError, match="belongs to another project"):
        run_preflight(fake)
    fake.answers[BUCKET] = (200, {"labels": {"scaletier-stack": "other"}})
    with pytest.raises(GcpError, match="is that of the stack other"):
        run_preflight(fake)
    for labels in ({"scaletier-stack": "dev"}, {}):
        fake.answers[BUCKET] = (200, {"labels": labels, "location": "US-CENTRAL1"})
        run_preflight(fake)
    fake.answers[BUCKET] = (200, {"labels": {}, "location": "EU"})
    with pytest.raises(GcpError, match="bucket a-bucket is in eu and no bucket can move"):
        run_preflight(fake)
    fake.answers[BUCKET] = (200, {"labels": {}, "location": "US-CENTRAL1"})
    fake.answers[OWN_BUCKETS] = (200, {})
    with pytest.raises(GcpError, match="bucket a-bucket is not in project my-project-1"):
        run_preflight(fake)


@pytest.mark.parametrize(
    ("name", "expected"), [("jobs/a/job.json", True), ("runtimes/b.tar.gz", False), ("tmp", True), (None, False)]
)
def test_a_bucket_has_content_besides_runtimes(fake: FakeGoogle, name: str | None, expected: bool) -> None:
    objects = f"{BUCKET}/o?versions=true&maxResults=1&"
    for query, prefix in (("endOffset=runtimes%2F", "jobs"), ("startOffset=runtimes0", "tmp")):
        fake.answers[objects + query] = (200, {"items": [{"name": name}]} if (name or "").startswith(prefix) else {})
    assert has_content("a-bucket", fake.config) is expected
    assert len(fake.requests) == 2 - (name or "").startswith("jobs")
    assert not has_content("one-that-is-gone", fake.config)


def test_missing_credentials_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_missing(**_: Any) -> Any:
        raise google.auth.exceptions.DefaultCredentialsError("Your default credentials were not found.")

    monkeypatch.setattr("google.auth.default", raise_missing)
    with pytest.raises(
        GcpError, match=r"no Google credentials \(Your .* not found\): run `gcloud auth application-default login`"
    ):
        session(lambda _: None)
    with pytest.raises(GcpError, match="no Google credentials"):
        session(lambda key: "/nowhere/key.json" if key == "gcp:credentials" else None)


KEYS = "/compute/v1/projects/my-project-1/zones/us-central1-a/instances/{}/getGuestAttributes?queryPath=hostkeys%2F"


def attributes_response(key: str) -> tuple[int, dict[str, Any]]:
    items = [
        {"namespace": "hostkeys", "key": "ssh-rsa", "value": "AAAAB3"},
        {"namespace": "hostkeys", "key": "ssh-ed25519", "value": key},
    ]
    return 200, {"queryPath": "hostkeys/", "queryValue": {"items": items}}


@pytest.fixture
def props(fake: FakeGoogle, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(hostkeys, "_POLL", 0.01)
    monkeypatch.setattr(hostkeys, "configuration", fake.config)
    return {
        "endpoint": fake.config("gcp:computeCustomEndpoint"),
        "project": "my-project-1",
        "zone": "us-central1-a",
        "hosts": {"ps-0": "st-ps-0", "master-0": "st-master-0"},
        "created": {"ps-0": "1", "master-0": "2"},
        "timeout": 5,
    }


def test_create_waits_for_host_keys(fake: FakeGoogle, props: dict[str, Any]) -> None:
    fake.answers[KEYS.format("st-ps-0")] = [(404, {}), (404, {}), attributes_response("AAAAps")]
    fake.answers[KEYS.format("st-master-0")] = attributes_response("AAAAmaster")
    _, outputs = hostkeys.create(props)
    assert outputs["hostKeys"] == {"ps-0": "ssh-ed25519 AAAAps", "master-0": "ssh-ed25519 AAAAmaster"}
    assert outputs["late"] == []
    assert fake.requests.count(KEYS.format("st-master-0")) == 1
    fake.requests.clear()
    assert hostkeys.read("id", outputs) == outputs
    assert fake.requests == []


def test_a_host_without_a_key_is_not_trusted_and_is_read_again(fake: FakeGoogle, props: dict[str, Any]) -> None:
    fake.answers[KEYS.format("st-ps-0")] = attributes_response("AAAAps")
    fake.answers[KEYS.format("st-master-0")] = attributes_response("no key; rm -rf /\nps-0")
    _, outputs = hostkeys.create(props | {"timeout": 0})
    assert outputs["hostKeys"] == {"ps-0": "ssh-ed25519 AAAAps"}
    assert outputs["late"] == ["master-0"]
    assert hostkeys.read("id", outputs) == outputs
    fake.answers[KEYS.format("st-master-0")] = attributes_response("AAAAmaster")
    refreshed = hostkeys.read("id", outputs)
    assert refreshed
    assert refreshed["late"] == []


def test_an_update_reads_keys_of_new_hosts_only(fake: FakeGoogle, props: dict[str, Any]) -> None:
    fake.answers |= {
        KEYS.format(f"st-{name}"): attributes_response(f"AAAA{at}") for at, name in enumerate(("ps-0", "master-0", "worker-0"))
    }
    _, old = hostkeys.create(props)
    fake.requests.clear()
    new = props | {
        "hosts": {"master-0": "st-master-0", "worker-0": "st-worker-0"},
        "created": {"master-0": "3", "worker-0": "4"},
    }
    assert set(hostkeys.update("id", old, new | {"created": {"master-0": "2", "worker-0": "4"}})["hostKeys"]) == set(
        new["hosts"]
    )
    assert fake.requests == [KEYS.format("st-worker-0")]
    fake.requests.clear()
    hostkeys.update("id", old, new)
    assert sorted(fake.requests) == [KEYS.format("st-master-0"), KEYS.format("st-worker-0")]


def test_a_denied_host_key_is_an_error(fake: FakeGoogle, props: dict[str, Any]) -> None:
    fake.answers[KEYS.format("st-ps-0")] = error_response(403, "Required 'compute.instances.getGuestAttributes' permission")
    with pytest.raises(GcpError, match=r"host key of st-ps-0: .* \(needs compute.instances.getGuestAttributes\)"):
        hostkeys.create(props)
