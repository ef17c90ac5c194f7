"""Call Google's APIs through a loopback fake: quotas and names before creation, host keys after."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import google.auth.exceptions
import pytest
import requests
from fakegoogle import FakeGoogle
from shared_fakes import Clock

from infra import dynamic
from infra.dynamic import ModuleProvider
from infra.gcp import api, bucket_guard, hostkeys, target
from infra.gcp.api import GcpError, session
from infra.gcp.bucket_guard import contents
from infra.gcp.config import GcpConfig
from infra.gcp.discovery import Discovery, local_catalogue
from infra.gcp.preflight import preflight, quota_needs
from infra.gcp.zones import Place
from infra.scale_tiers import Accelerator, ClusterSpec, Role, ScaleTier, preset
from jobs.queue import Queue, QueueEntry
from jobs.records import JobRecord
from jobs.states import JobState

PLACE = Place("my-project-1", "us-central1", "us-central1-a")
REGION = "/compute/v1/projects/my-project-1/regions/us-central1"
QUOTAS = "/compute/v1/projects/my-project-1?fields=quotas"
BUCKET = "/storage/v1/b/a-bucket"
OWN_BUCKETS = "/storage/v1/b?project=my-project-1&prefix=a-bucket"
STANDARD = preset(ScaleTier.STANDARD_1)


def quotas_response(**limits: float) -> tuple[int, dict[str, Any]]:
    zones = ["https://www.googleapis.com/compute/v1/projects/my-project-1/zones/us-central1-" + letter for letter in "abcf"]
    return 200, {"zones": zones, "quotas": [{"metric": name, "limit": limit, "usage": 0} for name, limit in limits.items()]}


def error_response(status: int, message: str, reason: str = "") -> tuple[int, dict[str, Any]]:
    details = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": reason}] if reason else []
    return status, {"error": {"code": status, "message": message, "errors": [{"reason": "forbidden"}], "details": details}}


def run_preflight(fake: FakeGoogle, place: Place = PLACE, recorded: bool = False) -> bool:
    discovery = Discovery(place, STANDARD, local_catalogue(place.zone))
    return preflight(discovery, GcpConfig.parse({}), "a-bucket", "dev", fake.config, recorded)


def test_quota_needs_of_each_tier() -> None:
    basic = {"CPUS": 4, "CPUS_ALL_REGIONS": 4, "SSD_TOTAL_GB": 100, "INSTANCES": 1}
    assert quota_needs(preset(ScaleTier.BASIC), "pd-ssd", 100) == basic
    assert quota_needs(preset(ScaleTier.BASIC), "pd-ssd", 100, public_address=True) == {**basic, "IN_USE_ADDRESSES": 1}
    assert quota_needs(STANDARD, "pd-balanced", 100) == {
        "CPUS": 52,
        "CPUS_ALL_REGIONS": 52,
        "SSD_TOTAL_GB": 800,
        "INSTANCES": 8,
    }
    assert quota_needs(preset(ScaleTier.PREMIUM_1), "pd-standard", 100) == {
        "CPUS": 408,
        "CPUS_ALL_REGIONS": 408,
        "DISKS_TOTAL_GB": 3100,
        "INSTANCES": 31,
    }
    gpu = preset(ScaleTier.BASIC_GPU)
    needs = quota_needs(gpu, "pd-ssd", 100)
    assert needs["NVIDIA_T4_GPUS"] == needs["GPUS_ALL_REGIONS"] == 1
    master = dataclasses.replace(gpu.roles[Role.MASTER], machine_type="a2-highgpu-2g", spot=True)
    spot = ClusterSpec(
        ScaleTier.CUSTOM, {Role.MASTER: dataclasses.replace(master, accelerator=Accelerator("nvidia-tesla-a100", 2))}
    )
    common = {"SSD_TOTAL_GB": 100, "INSTANCES": 1}
    all_regions = {"CPUS_ALL_REGIONS": 24, "GPUS_ALL_REGIONS": 2}
    assert quota_needs(spot, "pd-ssd", 100) == {"A2_CPUS": 24, "NVIDIA_A100_GPUS": 2, **all_regions, **common}
    limits = {"PREEMPTIBLE_CPUS": 100.0, "PREEMPTIBLE_NVIDIA_A100_GPUS": 4.0}
    assert quota_needs(spot, "pd-ssd", 100, limits) == {"PREEMPTIBLE_CPUS": 24, "PREEMPTIBLE_NVIDIA_A100_GPUS": 2, **common}


def test_a_project_with_enough_quota_passes(fake: FakeGoogle) -> None:
    fake.answers[REGION] = quotas_response(CPUS=72, SSD_TOTAL_GB=1000)
    run_preflight(fake)
    assert fake.requests == [REGION, QUOTAS, BUCKET]
    assert fake.tokens == {"Bearer token-of-a-test"}


def test_quotas_of_the_project_and_of_addresses_are_checked(fake: FakeGoogle) -> None:
    gpu = Discovery(PLACE, preset(ScaleTier.BASIC_GPU), local_catalogue(PLACE.zone), ())

    def check(**config: str) -> None:
        preflight(gpu, GcpConfig.parse(config), "a-bucket", "dev", fake.config)

    fake.answers |= {REGION: quotas_response(NVIDIA_T4_GPUS=1, IN_USE_ADDRESSES=0), QUOTAS: quotas_response(NETWORKS=0)}
    check()
    with pytest.raises(GcpError, match="quota IN_USE_ADDRESSES in us-central1 is 0 and this cluster needs 1: ask for more"):
        check(publicAddress="true")
    for quota, needed in (("GPUS_ALL_REGIONS", 1), ("CPUS_ALL_REGIONS", 8)):
        fake.answers[QUOTAS] = quotas_response(**{quota: 0})
        with pytest.raises(GcpError, match=f"quota {quota} of project my-project-1 is 0 and this cluster needs {needed}: ask"):
            check()
    fake.answers[QUOTAS] = error_response(403, "no right")
    check()


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
        (error_response(401, "x", "SERVICE_DISABLED"), "Google refused the credentials (x)"),
        (error_response(404, "x", "accessNotConfigured"), "the Compute Engine API is not enabled"),
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


def test_a_bucket_is_this_stacks_if_it_has_its_label(fake: FakeGoogle) -> None:
    fake.answers[REGION] = quotas_response(CPUS=52)
    assert run_preflight(fake) is False, "no bucket"
    fake.answers[OWN_BUCKETS] = (200, {"items": [{"name": "another"}, {"name": "a-bucket"}]})
    for answer, own in (
        ((200, {}), False),
        ((200, {"labels": {}, "location": "US-CENTRAL1"}), False),
        ((200, {"labels": {"scaletier-stack": "dev"}, "location": "US-CENTRAL1"}), True),
        (error_response(500, "busy"), False),
    ):
        fake.answers[BUCKET] = answer
        assert run_preflight(fake, recorded=True) is own


@pytest.mark.parametrize(
    ("answer", "in_project", "error"),
    [
        (error_response(403, "no access"), True, "belongs to another project, or you may not read it"),
        ((200, {"labels": {"scaletier-stack": "other"}}), True, "is that of the stack other"),
        ((200, {"labels": {}, "location": "EU"}), True, "bucket a-bucket is in eu and no bucket can move"),
        ((200, {"labels": {}, "location": "US-CENTRAL1"}), False, "bucket a-bucket is not in project my-project-1"),
        ((200, {"labels": {}}), True, "bucket a-bucket exists and is not this stack's: `pulumi config set bucket ANOTHER"),
    ],
)
def test_the_bucket_of_another_project_is_refused(fake: FakeGoogle, answer: Any, in_project: bool, error: str) -> None:
    fake.answers[REGION] = quotas_response()
    fake.answers[OWN_BUCKETS] = (200, {"items": [{"name": "a-bucket"}]} if in_project else {})
    fake.answers[BUCKET] = answer
    with pytest.raises(GcpError, match=error):
        run_preflight(fake)


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        ({"prefixes": ["runtimes/", "models/", "jobs/"]}, "jobs/, models/ (old versions included)"),
        ({"prefixes": ["runtimes/"]}, ""),
        ({"items": [{"name": "tmp"}]}, "tmp (old versions included)"),
        (
            {"prefixes": ["jobs/"], "items": [{"name": f"a{number:04}"} for number in range(5000)]},
            "jobs/, a0000, a0001, a0002, a0003 and 4996 more (old versions included)",
        ),
        ({}, ""),
    ],
)
def test_a_bucket_has_content_besides_runtimes(fake: FakeGoogle, listing: Any, expected: str) -> None:
    fake.answers[f"{BUCKET}/o?delimiter=%2F&versions=true"] = (200, listing)
    assert contents("a-bucket", fake.config) == expected
    assert not contents("one-that-is-gone", fake.config)
    fake.answers[f"{BUCKET}/o?delimiter=%2F&versions=true"] = error_response(403, "no access")
    assert contents("a-bucket", fake.config) == "what Google refuses to list (no access)"
    for status in (401, 429, 503):
        fake.answers[f"{BUCKET}/o?delimiter=%2F&versions=true"] = error_response(status, "busy")
        error = r"^gs://a-bucket cannot be listed \(busy\), so nothing was changed: try again$"
        with pytest.raises(GcpError, match=error):
            contents("a-bucket", fake.config)
        with pytest.raises(GcpError, match=error):
            target._check_replaced_bucket("a-bucket", "another", False, fake.config)


def test_a_destroy_that_would_delete_data_or_end_a_job_is_refused(
    fake: FakeGoogle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dynamic, "_configuration", {"get": fake.config})
    queue = Queue().added(QueueEntry("job1", ["ps-0"])).added(QueueEntry("job2", ["ps-0"]))
    fake.answers[f"{BUCKET}/o?delimiter=%2F&versions=true"] = (200, {"prefixes": ["cluster/", "jobs/"]})
    fake.answers[f"{BUCKET}/o/cluster%2Fqueue.json?alt=media"] = (200, json.loads(queue.to_json()))
    for job, state in {"job1": JobState.RUNNING, "job2": JobState.FAILED}.items():
        record = JobRecord(job, hosts=["ps-0"], state=state).to_json()
        fake.answers[f"{BUCKET}/o/jobs%2F{job}%2Fjob.json?alt=media"] = (200, json.loads(record))
    provider = ModuleProvider(bucket_guard.__name__)
    _, props = bucket_guard.create({"bucket": "a-bucket", "retain": False, "force": False, "disrupt": False})
    with pytest.raises(
        GcpError, match=r"^the bucket contains cluster/, jobs/ \(old versions included\), so nothing was destroyed"
    ):
        provider.delete("a-bucket", props)
    for setting in ("retain", "force"):
        with pytest.raises(
            GcpError, match=r"^not all jobs have ended \(job1\), so nothing was destroyed\. Wait \(`fab wait`\)"
        ):
            provider.delete("a-bucket", {**props, setting: True})
    provider.delete("a-bucket", {**props, "force": True, "disrupt": True})
    assert capsys.readouterr().err == ""
    provider.delete("a-bucket", {**props, "retain": True, "disrupt": True})
    assert capsys.readouterr().err == "the bucket is retained: gs://a-bucket; the next stack of this name reuses it\n"
    provider.delete("gone", {**props, "bucket": "gone"})


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
    assert refreshed["late"] == []


def test_a_denied_host_key_is_an_error(fake: FakeGoogle, props: dict[str, Any]) -> None:
    fake.answers[KEYS.format("st-ps-0")] = error_response(403, "Required 'compute.instances.getGuestAttributes' permission")
    with pytest.raises(GcpError, match=r"host key of st-ps-0: .* \(needs compute.instances.getGuestAttributes\)"):
        hostkeys.create(props)


@pytest.mark.filterwarnings("ignore:The load_credentials_from_dict method:DeprecationWarning")
def test_credentials_are_a_token_a_key_or_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = {"type": "authorized_user", "client_id": "i", "client_secret": "s", "refresh_token": "r"}
    (file := tmp_path / "key.json").write_text(json.dumps(key | {"client_id": "in-the-file"}))
    monkeypatch.setattr("google.auth.default", lambda scopes: (scopes, "project"))
    monkeypatch.setenv("HOME", str(tmp_path))
    scopes = ["https://www.googleapis.com/auth/cloud-platform"]
    assert api.credentials(lambda _: None) == scopes
    for name, value, client in (
        ("GCLOUD_KEYFILE_JSON", json.dumps(key), "i"),
        ("GOOGLE_CREDENTIALS", "~/key.json", "in-the-file"),
    ):
        monkeypatch.setenv(name, value)
        assert api.credentials(lambda _: None).client_id == client
    configured = {"gcp:credentials": f" {json.dumps(key | {'client_id': 'configured'})}"}
    assert api.credentials(configured.get).client_id == "configured"
    monkeypatch.setenv("GOOGLE_OAUTH_ACCESS_TOKEN", "of the environment")
    assert api.credentials(configured.get).token == "of the environment"
    assert api.credentials({"gcp:accessToken": "configured"}.get).token == "configured"
    file.write_text("{")
    monkeypatch.delenv("GOOGLE_OAUTH_ACCESS_TOKEN")
    with pytest.raises(GcpError, match=r"^no Google credentials \(Expecting property name .*\): run `gcloud auth"):
        api.credentials(lambda _: None)


def test_an_endpoint_is_configured_or_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert api.endpoint(api.IAM, lambda _: None) == "https://iam.googleapis.com/v1/"
    monkeypatch.setenv("GOOGLE_IAM_CUSTOM_ENDPOINT", "http://x")
    assert api.endpoint(api.IAM, lambda _: None) == "http://x/"
    assert api.endpoint(api.IAM, {"gcp:iamCustomEndpoint": "http://y/"}.get) == "http://y/"


class Session:
    """A session that gives one answer, or raises one error."""

    def __init__(self, answer: requests.Response | Exception) -> None:
        self.answer = answer

    def get(self, url: str, params: object, timeout: float) -> requests.Response:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def response(status: int, content: Any, reason: str = "") -> requests.Response:
    answer = requests.Response()
    answer.status_code, answer.reason = status, reason
    answer._content = content if isinstance(content, bytes) else json.dumps(content).encode()
    return answer


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (
            google.auth.exceptions.RefreshError("It expired. Log in again.", {}),
            GcpError,
            f"Google refused the credentials (It expired): run {api.LOGIN}",
        ),
        (google.auth.exceptions.TransportError("x"), api.UnreachableError, "x.example does not answer (TransportError)"),
        (requests.ReadTimeout("x"), api.UnreachableError, "x.example does not answer (ReadTimeout)"),
        (response(200, b"<html>"), api.UnreachableError, "x.example gave an answer that is no JSON"),
    ],
)
def test_a_request_without_an_answer_is_one_line(answer: Any, kind: type[GcpError], message: str) -> None:
    with pytest.raises(GcpError) as caught:
        api.get_json(Session(answer), "https://x.example/v1/y")  # type: ignore[arg-type]
    assert (type(caught.value), str(caught.value)) == (kind, message)


@pytest.mark.parametrize(
    ("status", "content", "error"),
    [
        (403, error_response(403, "not\n yours", "SERVICE_DISABLED")[1], ("not yours", 403, "SERVICE_DISABLED")),
        (403, error_response(403, "no")[1], ("no", 403, "forbidden")),
        (404, {"error": {"message": "gone", "errors": [{}], "details": ["text", {"reason": ""}]}}, ("gone", 404, "")),
        (404, {"error": {"message": "gone"}}, ("gone", 404, "")),
        (500, b"<html>", ("Server Error", 500, "")),
        (500, {"error": "text"}, ("Server Error", 500, "")),
        (500, ["list"], ("Server Error", 500, "")),
    ],
)
def test_an_error_status_has_googles_message_and_reason(status: int, content: Any, error: tuple[str, int, str]) -> None:
    with pytest.raises(api.ApiError) as caught:
        api.get_json(Session(response(status, content, "Server Error")), "https://x.example/v1/y")  # type: ignore[arg-type]
    assert (str(caught.value), caught.value.status, caught.value.reason) == error
    with pytest.raises(api.ApiError, match=r"^$"):
        api.get_json(Session(response(500, b"")), "https://x.example/v1/y")  # type: ignore[arg-type]


def test_guest_attributes_are_those_that_a_host_has_written(fake: FakeGoogle, props: dict[str, Any]) -> None:
    def read() -> dict[str, dict[str, str]]:
        return api.guest_attributes(api.session(fake.config), props, ["master-0"], "hostkeys", "host key")

    path = KEYS.format("st-master-0")
    fake.answers[path] = (200, {"queryValue": {"items": [{"key": "a", "value": " 1\n"}, {"key": "b"}]}})
    assert read() == {"master-0": {"a": "1", "b": ""}}
    for answer in ((200, {}), (200, {"queryValue": {}}), (404, {}), (503, {})):
        fake.answers[path] = answer
        assert read() == {"master-0": {}}
    for status in (401, 403):
        fake.answers[path] = error_response(status, "no")
        with pytest.raises(GcpError, match=r"^host key of st-master-0: no \(needs compute.instances.getGuestAttributes\)$"):
            read()
    props["endpoint"] = "http://127.0.0.1:9/"  # no server listens there
    assert read() == {"master-0": {}}


def test_only_an_instance_s_own_key_is_kept(fake: FakeGoogle, props: dict[str, Any]) -> None:
    """A key goes by the instance and its id; a state without keys has none to keep."""
    fake.answers |= {KEYS.format(f"st-{name}"): attributes_response("AAAA") for name in ("ps-0", "master-0", "worker-0")}
    name, old = hostkeys.create(props)
    assert name == "my-project-1/us-central1-a"
    others = {"hosts": {"master-0": "st-master-0", "worker-0": "st-worker-0"}}
    for changed, read in (
        ({}, []),
        ({"hosts": {**props["hosts"], "ps-0": "st-master-0"}}, ["master-0"]),
        ({"created": {**props["created"], "ps-0": "9"}}, ["ps-0"]),
        ({**others, "created": {"master-0": "2", "worker-0": "4"}}, ["worker-0"]),
        ({**others, "created": {"master-0": "3", "worker-0": "4"}}, ["master-0", "worker-0"]),
    ):
        fake.requests.clear()
        outputs = hostkeys.update("id", old, props | changed)
        assert sorted(fake.requests) == [KEYS.format(f"st-{host}") for host in read]
        assert (outputs["hostKeys"].keys(), outputs["late"]) == ((props | changed)["hosts"].keys(), [])
    for lacking in ("hostKeys", "created", "hosts"):
        fake.requests.clear()
        hostkeys.update("id", {**old, lacking: None}, props)
        assert len(fake.requests) == 2


def test_keys_are_asked_for_until_the_limit_of_time(
    fake: FakeGoogle, props: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(hostkeys, "_POLL", 2.0)
    monkeypatch.setattr(hostkeys, "time", clock)
    for seconds, count in ((0, 1), (1, 1), (2, 2), (5, 3)):
        fake.requests.clear()
        hostkeys.create({**props, "hosts": {"ps-0": "st-ps-0"}, "timeout": seconds})
        assert len(fake.requests) == count
    fake.requests.clear()
    late = {**props, "hosts": {"ps-0": "st-ps-0"}, "late": ["ps-0"], "hostKeys": None, "timeout": 100}
    assert hostkeys.read("id", late) == {**late, "hostKeys": {}}
    assert len(fake.requests) == 1, "a refresh does not wait"
