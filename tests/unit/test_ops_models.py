"""`fab deploy` and other changes of versions, with a bucket that is a directory and a fake server."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opsdata import put_job

from hosts.serving.records import Version, VersionState
from infra.inventory import Inventory
from jobs.folder import FolderBucket, open_bucket
from jobs.ledger import Ledger
from jobs.records import JobRecord
from jobs.states import JobState
from ops.cluster.cluster import ClusterClient
from ops.cluster.fanout import Outcome
from ops.errors import HostError, HostsError, OpsError, UsageError
from ops.models import client, lookup, server, server_status, versions
from ops.models import deploy as deploying
from ops.models import predict as asking

# A SavedModel with one signature `serving_default` without inputs, as protocol buffers have it.
MODEL_PB = b"\x12\x13\x2a\x11\x0a\x0fserving_default"
AVAILABLE = {"model_version_status": [{"version": "v1", "state": "AVAILABLE", "status": {"error_message": ""}}]}
BROKEN = {"model_version_status": [{"version": "v1", "state": "END", "status": {"error_message": "ValueError: odd"}}]}


class FakeServer:
    """The hosts' side: what was sent to each, and what servers say, answer by answer; the last one stays."""

    def __init__(self, names: list[str], *answers: tuple[int, Any]) -> None:
        self.names, self.answers, self.asked = names, list(answers), list[tuple[str, str, Any]]()
        self.sent, self.ended, self.settled = dict[str, bytes](), list[str](), 0
        self.down: dict[str, Exception] = {}
        self.of_host: dict[str, tuple[int, Any]] = {}
        self.interrupted = False
        self.token: Callable[[str], str] = lambda _: ""

    def each(self, names: Iterable[str], work: Callable[[str], Any], seconds: float) -> Outcome[Any]:
        """Do the work of one after the other."""
        found: Outcome[Any] = Outcome()
        for name in names:
            try:
                found.results[name] = work(name)
            except Exception as error:  # noqa: BLE001  each host's error is a result
                found.failures[name] = error
        return found

    def must(self, name: str, command: str, what: str, stdin: bytes | None = None) -> str:
        assert command.startswith("sudo -n /usr/lib/scaletier/root-helper ")
        if name in self.down:
            raise self.down[name]
        if stdin is None:
            assert command.endswith(" end-serving")
            self.ended.append(name)
        else:
            self.sent[name] = stdin
        return ""

    def start(self) -> None:
        """Do nothing: nothing is missing."""

    def finish_start(self) -> None:
        self.settled += 1

    def request_from(self, name: str, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        if name in self.of_host:
            self.answers = [self.of_host[name]]
        return self.request(method, path, body)

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        self.asked.append((method, path, json.loads(body) if body else None))
        if self.interrupted:
            raise KeyboardInterrupt
        status, said = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(said, dict) and "model_version_status" in said:
            named = path.partition("/versions/")[2]
            each = said["model_version_status"][0]
            name = named or each["version"]
            said = {"model_version_status": [{**each, "version": name, "deployment": self.token(name)}]}
        return status, said


Deployed = Callable[..., tuple[ClusterClient, FakeServer]]


@pytest.fixture
def deployed(inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployed:
    bucket = tmp_path / "bucket"
    output = bucket / "jobs/job01/output/export/Servo/1700000000"
    (output / "variables").mkdir(parents=True)
    (output / "saved_model.pb").write_bytes(MODEL_PB)
    (output / "variables/variables.index").write_bytes(b"12345")
    monkeypatch.setattr(server_status, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(server_status, "_GONE_SECONDS", 0.1)
    monkeypatch.setattr(asking, "_POLL_SECONDS", 0.0)

    def make(*answers: tuple[int, Any], on: Inventory = inventory) -> tuple[ClusterClient, FakeServer]:
        fake = FakeServer(server.names_of(on), *(answers or ((200, AVAILABLE),)))

        for module in (server_status, asking):
            monkeypatch.setattr(module, "ServingClient", lambda _: fake)
        here = replace(on, bucket=str(bucket), operator_bucket=str(bucket))
        cluster = ClusterClient(here, fake, open_bucket(str(bucket)), Ledger(FolderBucket(bucket)))  # type: ignore[arg-type]
        fake.token = lambda name: found(cluster, name).token
        if cluster.ledger.job("job01") is None:
            put_job(cluster.ledger, JobRecord("job01", JobState.SUCCEEDED, manifest={"package": {"name": "mine"}}))
        return cluster, fake

    return make


def deploy(cluster: ClusterClient, version: str = "v1", **given: Any) -> int:
    wanted = {"job_id": "job01", "origin": None, **given}
    return deploying.deploy(cluster, "mnist", version, wanted["job_id"], wanted["origin"])


def found(cluster: ClusterClient, name: str = "v1") -> Version:
    model = lookup.catalog_of(cluster).model("mnist")
    assert model is not None
    return model.version(name)


def test_a_job_s_model_is_deployed(deployed: Deployed, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cluster, fake = deployed((503, {"error": "not yet"}), (404, {"error": "unknown"}), (200, AVAILABLE))
    assert deploy(cluster) == 0
    version = found(cluster)
    assert (version.state, version.jobId, version.size, version.manifest) == (
        "READY",
        "job01",
        len(MODEL_PB) + 5,
        {"package": {"name": "mine"}},
    )
    assert sorted(version.files) == ["saved_model.pb", "variables/variables.index"]
    there = tmp_path / "bucket/models/mnist/versions/v1"
    assert (there / "saved_model.pb").read_bytes() == MODEL_PB
    assert fake.asked == [("GET", "/v1/models/mnist/versions/v1", None)] * 3
    assert "model mnist has version v1, the default: fab predict --model mnist" in capsys.readouterr().out
    deploy(cluster, "v2")
    assert "model mnist has version v2, the default is v1" in capsys.readouterr().out


def test_what_a_host_gets_is_the_server_and_its_unit(deployed: Deployed) -> None:
    cluster, fake = deployed()
    server.start(cluster)
    assert list(fake.sent) == ["master-0"]
    names, unit = received(fake.sent["master-0"])
    assert {"jobs/bucket.py", "hosts/serving/__main__.py"} <= names
    assert f'="SERVES=--bucket {cluster.inventory.bucket} --host 127.0.0.1 --port 8501 --poll-seconds' in unit
    assert f"\nMemoryMax={int(cluster.inventory.chief.memory_bytes * 0.4)}\n" in unit


def received(stream: bytes) -> tuple[set[str], str]:
    """Return the names of the files that a host was sent, and the unit."""
    with tarfile.open(fileobj=io.BytesIO(stream), mode="r:gz") as tar:
        member = tar.extractfile("etc/systemd/system/scaletier-serving.service.d/host.conf")
        assert member is not None
        return {name.removeprefix("opt/scaletier/.server/") for name in tar.getnames()}, member.read().decode()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"version": "v-2"}, "--version 'v-2' is no name: a letter, then up to 127 letters, digits and _"),
        ({"job_id": "job02"}, "there is no job 'job02'"),
        ({"job_id": None, "origin": "/nowhere"}, "--origin /nowhere is no folder with a saved_model.pb"),
        ({"origin": "/nowhere"}, "--job takes the model of a job, and --origin another: leave one of them out"),
        ({"job_id": "empty"}, "job empty (SUCCEEDED) has no SavedModel in"),
        ({"job_id": "bad"}, "saved_model.pb: not a SavedModel"),
        ({"job_id": "mute"}, "has no signature: export it with one"),
    ],
)
def test_what_cannot_be_deployed(deployed: Deployed, tmp_path: Path, given: dict[str, Any], says: str) -> None:
    cluster, fake = deployed()
    for name, content in (("empty", None), ("bad", b"\x12\xff"), ("mute", b"")):
        put_job(cluster.ledger, JobRecord(name, JobState.SUCCEEDED))
        if content is not None:
            file = tmp_path / f"bucket/jobs/{name}/output/1/saved_model.pb"
            file.parent.mkdir(parents=True)
            file.write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(says)):
        deploy(cluster, **given)
    assert lookup.catalog_of(cluster).models() == ([], [])
    assert not (tmp_path / "bucket/models").exists(), "nothing was changed"
    assert fake.sent == {}


def test_a_model_that_is_larger_than_its_host(deployed: Deployed, tmp_path: Path) -> None:
    cluster, _ = deployed()
    small = tuple(replace(host, memory_bytes=1_000_000_005) for host in cluster.inventory.hosts)
    cluster.inventory = replace(cluster.inventory, hosts=small)
    with pytest.raises(UsageError, match="the model has 26 B, and the server on master-0 has room for 2 B more"):
        deploy(cluster)


def test_a_name_that_was_used_is_refused_before_anything_is_copied(deployed: Deployed, tmp_path: Path) -> None:
    cluster, _ = deployed()
    deploy(cluster)
    (tmp_path / "bucket/jobs/job01/output/export/Servo/1700000000/saved_model.pb").write_bytes(b"another")
    with pytest.raises(UsageError, match=r"version v1 of model mnist was made at .* and a name is used once: take another"):
        deploy(cluster)
    assert (tmp_path / "bucket/models/mnist/versions/v1/saved_model.pb").read_bytes() == MODEL_PB


def test_a_version_that_no_server_can_load_is_failed(deployed: Deployed, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, _ = deployed((200, BROKEN))
    with pytest.raises(OpsError, match="version v1 of model mnist cannot be loaded: ValueError: odd"):
        deploy(cluster)
    assert (found(cluster).state, found(cluster).errorMessage) == (
        "FAILED",
        "version v1 of model mnist cannot be loaded: ValueError: odd",
    )
    again = "fab deploy --model mnist --version v1 tries it again, and fab delete-version mnist v1 clears it away"
    assert f"version v1 of model mnist is FAILED: {again}" in capsys.readouterr().err
    cluster, _ = deployed()
    assert deploy(cluster, job_id=None) == 0
    assert found(cluster).state is VersionState.READY


def test_whatever_ends_a_deployment_it_is_said(deployed: Deployed) -> None:
    cluster, fake = deployed()
    fake.down = {"master-0": HostError("master-0", "is gone")}
    with pytest.raises(HostError):
        deploy(cluster)
    assert (found(cluster).state, found(cluster).errorMessage) == ("FAILED", "master-0 is gone")
    cluster, fake = deployed()
    fake.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        deploy(cluster, "v2")
    assert (found(cluster, "v2").state, found(cluster, "v2").errorMessage) == ("FAILED", "fab deploy was stopped")


def test_taken_off_and_brought_back(deployed: Deployed, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, _ = deployed()
    deploy(cluster)
    deploy(cluster, "v2")
    with pytest.raises(UsageError, match="version v1 is the default of model mnist: fab set-default mnist v2 first"):
        versions.undeploy(cluster, "mnist", "v1")
    versions.set_default(cluster, None, "v2")
    versions.undeploy(cluster, "mnist", "v1")
    assert "version v1 of model mnist is UNDEPLOYED; the default is v2" in capsys.readouterr().out
    assert deploy(cluster, job_id=None) == 0
    assert found(cluster).state is VersionState.READY
    with pytest.raises(UsageError, match="and a name is used once"):
        deploy(cluster)


def test_what_programs_hear_of_versions(deployed: Deployed, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, _ = deployed()
    deploy(cluster)

    def said(*arguments: Any) -> Any:
        call, *others = arguments
        capsys.readouterr()
        assert call(cluster, *others) == 0
        return json.loads(capsys.readouterr().out)

    made = said(deploying.deploy, "mnist", "v2", "job01", None, True)
    assert (made["model"], made["version"], made["state"], made["isDefault"]) == ("mnist", "v2", "READY", False)
    assert [version["version"] for version in said(versions.versions, "mnist", True)] == ["v1", "v2"]
    assert said(versions.set_default, "mnist", "v2", True)["isDefault"]
    assert said(versions.undeploy, "mnist", "v1", True)["state"] == "UNDEPLOYED"
    gone = said(versions.delete_version, "mnist", "v1", True, True)
    assert gone == {"deleted": {"model": "mnist", "version": "v1"}, "default": "v2"}


def test_a_version_that_is_not_there_is_not_brought_back(deployed: Deployed) -> None:
    cluster, _ = deployed()
    with pytest.raises(UsageError, match="version v1 of what"):
        deploy(cluster, job_id=None)
    deploy(cluster)
    deploy(cluster, "v2")
    versions.undeploy(cluster, "mnist", "v2")
    with pytest.raises(UsageError, match=r"version v22 of what.*kept, and to be deployed again without these, are v2"):
        deploy(cluster, "v22", job_id=None)
    assert lookup.served_model(lookup.catalog_of(cluster), "mnist").default == "v1"
    versions.undeploy(cluster, "mnist", "v1")
    with pytest.raises(UsageError, match="no version of model mnist is served: v1 is UNDEPLOYED, v2 is UNDEPLOYED; fab deploy"):
        lookup.served_model(lookup.catalog_of(cluster), "mnist")


def test_deleted_with_its_files(
    deployed: Deployed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, _ = deployed()
    deploy(cluster)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(UsageError, match="this would delete version v1 of model mnist, 26 B: say --yes"):
        versions.delete_version(cluster, "mnist", "v1", sure=False)
    assert found(cluster).state is VersionState.READY
    capsys.readouterr()
    assert versions.delete_version(cluster, "mnist", "v1", sure=True) == 0
    assert capsys.readouterr().out == "version v1 of model mnist is deleted\n"
    assert not (tmp_path / "bucket/models/mnist/versions/v1").exists()
    with pytest.raises(UsageError, match="there is no model 'mnist'; no model is deployed yet"):
        versions.delete_version(cluster, "mnist", "v1", sure=True)
    with pytest.raises(UsageError, match=r"\(it was deleted\), and a name is used once"):
        deploy(cluster)


def test_lists(deployed: Deployed, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, _ = deployed()
    assert versions.models(cluster, as_json=False) == 0
    assert "no model is deployed yet: fab deploy --job ID" in capsys.readouterr().err
    for call in (lambda: versions.versions(cluster, None, False), lambda: versions.set_default(cluster, "m", "v1")):
        with pytest.raises(UsageError, match="no model is deployed yet"):
            call()
    deploy(cluster)
    capsys.readouterr()
    versions.models(cluster, as_json=True)
    (model,) = json.loads(capsys.readouterr().out)
    assert (model["name"], model["default"], [v["version"] for v in model["versions"]]) == ("mnist", "v1", ["v1"])
    assert set(model["versions"][0]) == {
        *("model", "version", "state", "isDefault", "origin", "jobId"),
        *("createTime", "createdBy", "size", "errorMessage", "manifest", "servers"),
    }
    versions.versions(cluster, "mnist", as_json=False)
    heads, row = capsys.readouterr().out.splitlines()
    assert (heads.split(), row.split()[:4]) == (
        ["VERSION", "STATE", "DEFAULT", "SERVERS", "ORIGIN", "SIZE", "CREATED"],
        ["v1", "READY", "default", "1"],
    )
    with pytest.raises(UsageError, match=r"there is no model 'mnits'; did you mean mnist\?; there are mnist"):
        versions.versions(cluster, "mnits", False)
    with pytest.raises(UsageError, match=r"model mnist has no version 'v11'; there are v1; did you mean v1\?"):
        versions.undeploy(cluster, "mnist", "v11")
    with pytest.raises(UsageError, match=r"which version of model mnist\? There are v1"):
        versions.undeploy(cluster, "mnist", None)


def state(version: str, state: str, why: str = "") -> tuple[int, Any]:
    """Return a server's answer on a version."""
    return 200, {"model_version_status": [{"version": version, "state": state, "status": {"error_message": why}}]}


def test_hosts_of_their_own_get_the_server_and_the_master_s_ends(deployed: Deployed, served: Inventory) -> None:
    cluster, fake = deployed(on=served)
    deploy(cluster)
    assert list(fake.sent) == ["serving-0", "serving-1"]
    assert fake.ended == ["master-0"], "once they have loaded it"
    for index, name in enumerate(fake.sent):
        _, unit = received(fake.sent[name])
        assert f" --host 127.0.0.1 10.0.0.{192 + index} --port 8501 " in unit, "and nobody else's address"
        assert f"\nMemoryMax={int(cluster.inventory.host(name).memory_bytes * 0.9)}\n" in unit, "no job is beside it"
    cluster, fake = deployed()
    deploy(cluster, "v2")
    assert (list(fake.sent), fake.ended) == (["master-0"], []), "without such hosts the master is the server"


def test_a_server_that_is_down_is_named_and_holds_nobody_up(
    deployed: Deployed, served: Inventory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, fake = deployed(on=served)
    fake.down = {"serving-1": HostError("serving-1", "does not answer")}
    assert deploy(cluster) == 0
    assert found(cluster).state is VersionState.READY
    assert "serving-1 does not answer: it loads mnist v1 when it is back\n" in capsys.readouterr().err
    assert fake.ended == ["master-0"]
    monkeypatch.setattr(server_status, "_DOWN_SECONDS", 0.0)
    cluster, fake = deployed(on=served)
    fake.of_host = {"serving-0": (200, AVAILABLE), "serving-1": (client.NO_SERVER, {"error": "nobody"})}
    assert deploy(cluster, "v2") == 0
    said = "serving-1 has no model server that answers (fab shell serving-1 -- journalctl -u scaletier-serving)"
    assert f"{said}: it loads mnist v2 when it is back\n" in capsys.readouterr().err


def test_a_server_that_hangs_holds_nobody_up(
    deployed: Deployed, served: Inventory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_status, "_DOWN_SECONDS", 0.0)
    cluster, fake = deployed(on=served)
    ask_one = fake.request_from

    def hangs(name: str, *asked: Any) -> tuple[int, Any]:
        if name == "serving-1":
            raise OpsError("the model server on serving-1 does not answer: timed out")
        return ask_one(name, *asked)

    fake.request_from = hangs  # type: ignore[method-assign]
    assert deploy(cluster) == 0
    assert found(cluster).state is VersionState.READY
    assert "it loads mnist v1 when it is back" in capsys.readouterr().err


def test_a_server_that_cannot_load_it_is_named(deployed: Deployed, served: Inventory) -> None:
    cluster, fake = deployed(on=served)
    fake.of_host = {"serving-0": (200, AVAILABLE), "serving-1": (200, BROKEN)}
    with pytest.raises(OpsError, match="version v1 of model mnist cannot be loaded on serving-1: ValueError: odd"):
        deploy(cluster)
    assert found(cluster).state is VersionState.FAILED
    assert fake.ended == []


def test_nobody_can_be_reached(deployed: Deployed, served: Inventory) -> None:
    cluster, fake = deployed(on=served)
    fake.down = {name: HostError(name, "is gone") for name in fake.names}
    with pytest.raises(HostsError, match="serving-0 is gone; serving-1 is gone"):
        deploy(cluster)
    assert (found(cluster).state, fake.ended) == ("FAILED", [])


def test_a_master_that_cannot_be_reached_does_not_fail_what_is_done(deployed: Deployed, served: Inventory) -> None:
    cluster, fake = deployed(on=served)
    fake.down = {"master-0": HostError("master-0", "is gone")}
    assert deploy(cluster) == 0


def test_what_each_server_has(deployed: Deployed, served: Inventory, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, fake = deployed(on=served)
    deploy(cluster)
    deploy(cluster, "v2")
    fake.of_host = {
        "serving-0": state("v1", "AVAILABLE"),
        "serving-1": (client.NO_SERVER, {"error": "no model server answers on serving-1"}),
    }
    capsys.readouterr()
    versions.versions(cluster, None, False)
    out, err = capsys.readouterr()
    assert [line.split()[:5] for line in out.splitlines()[1:]] == [
        ["v1", "READY", "default", "1", "of"],
        ["v2", "READY", "-", "0", "of"],
    ]
    assert err.splitlines() == [
        "no model server answers on serving-1: fab predict brings it there",
        "serving-0 is loading version v2 of model mnist",
    ]
    versions.models(cluster, False)
    assert capsys.readouterr().out.splitlines()[1].split()[:5] == ["mnist", "v1", "1", "of", "2"]
    fake.of_host["serving-1"] = state("v1", "END", "ValueError: odd")
    versions.models(cluster, True)
    (model,) = json.loads(capsys.readouterr().out)
    assert model["versions"][0]["servers"] == [
        {"server": "serving-0", "state": "AVAILABLE", "errorMessage": ""},
        {"server": "serving-1", "state": "END", "errorMessage": "ValueError: odd"},
    ]
    assert [on["state"] for on in model["versions"][1]["servers"]] == ["LOADING", "LOADING"]
    fake.token = lambda _: "of an earlier deployment"
    assert [on.state for on in server_status.query(cluster, lookup.catalog_of(cluster).models()[0])["mnist", "v1"]] == [
        "LOADING"
    ] * 2
    fake.token = lambda name: found(cluster, name).token
    versions.versions(cluster, None, False)
    assert capsys.readouterr().err.splitlines() == [
        "version v1 of model mnist on serving-1: ValueError: odd",
        "serving-0 is loading version v2 of model mnist",
        "serving-1 is loading version v2 of model mnist",
    ]


def test_nobody_is_asked_where_nothing_is_to_be_served(deployed: Deployed, served: Inventory) -> None:
    cluster, fake = deployed(on=served)
    deploy(cluster)
    fake.of_host = dict.fromkeys(fake.names, (404, {}))
    versions.undeploy(cluster, "mnist", "v1")
    fake.asked.clear()
    assert versions.versions(cluster, None, True) == versions.models(cluster, True) == 0
    assert fake.asked == []


@pytest.fixture
def instances(tmp_path: Path) -> str:
    (tmp_path / "request.json").write_text('{"x": 1}\n\n{"x": 2}\n')
    return str(tmp_path / "request.json")


def test_predict(deployed: Deployed, instances: str, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, _ = deployed()
    deploy(cluster)
    said = {"predictions": [{"classes": 7, "key": 0, "scores": [0.5], "probabilities": [0.5]}]}
    cluster, fake = deployed((503, {"error": "loading"}), (200, said))
    capsys.readouterr()
    assert asking.predict(cluster, None, None, instances, None, False) == 0
    assert capsys.readouterr().out == "KEY  CLASSES  PROBABILITIES\n  0        7  [0.5]\n"
    assert fake.asked[-1] == ("POST", "/v1/models/mnist:predict", {"instances": [{"x": 1}, {"x": 2}]})
    assert fake.settled == 1
    asking.predict(cluster, "mnist", "v1", instances, "other", True)
    assert json.loads(capsys.readouterr().out) == said
    assert fake.asked[-1][1:] == (
        "/v1/models/mnist/versions/v1:predict",
        {"instances": [{"x": 1}, {"x": 2}], "signature_name": "other"},
    )


def test_a_version_that_was_undeployed_is_said_to_be_so_and_nobody_is_asked(deployed: Deployed, instances: str) -> None:
    cluster, _ = deployed()
    deploy(cluster)
    deploy(cluster, "v2")
    assert versions.undeploy(cluster, "mnist", "v2", False) == 0
    cluster, fake = deployed()
    with pytest.raises(
        UsageError, match="version v2 of model mnist is UNDEPLOYED: fab deploy --model mnist --version v2 brings"
    ):
        asking.predict(cluster, "mnist", "v2", instances, None, False)
    versions.undeploy(cluster, "mnist", "v1", False)
    cluster, fake = deployed()
    with pytest.raises(UsageError, match="no version of model mnist is served: v1 is UNDEPLOYED, v2 is UNDEPLOYED"):
        asking.predict(cluster, "mnist", None, instances, None, False)
    assert fake.asked == []


def test_a_class_that_is_as_its_key_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    asking.show([{"classes": 3, "key": 3, "scores": [0.5], "probabilities": [0.5]}])
    assert capsys.readouterr().out == "KEY  CLASSES  PROBABILITIES\n  3        3  [0.5]\n"


@given(st.lists(st.text(max_size=40), min_size=1), st.sampled_from([{}, {"signature_name": "other"}]))
def test_what_is_too_much_for_a_request_becomes_several(values: list[str], more: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asking, "_MOST_BYTES", 150)
        made = list(asking.request_bodies(values, more))
    told = [json.loads(body) for body in made]
    assert [value for body in told for value in body["instances"]] == values
    assert all({key: value for key, value in body.items() if key != "instances"} == more for body in told)
    assert all(len(raw) <= 170 for raw, body in zip(made, told, strict=True) if len(body["instances"]) > 1)
    assert len(made) == 1 or len(b"".join(made)) > 150, "no more than it takes"


def test_several_requests_are_answered_by_one_version(
    deployed: Deployed, instances: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, _ = deployed()
    deploy(cluster)
    cluster, fake = deployed((200, {"predictions": [1]}), (200, {"predictions": [2]}))
    monkeypatch.setattr(asking, "_MOST_BYTES", 1)
    capsys.readouterr()
    assert asking.predict(cluster, None, None, instances, None, True) == 0
    assert json.loads(capsys.readouterr().out) == {"predictions": [1, 2]}
    path = "/v1/models/mnist/versions/v1:predict"
    assert fake.asked[-2:] == [("POST", path, {"instances": [{"x": 1}]}), ("POST", path, {"instances": [{"x": 2}]})]


@pytest.mark.parametrize(
    ("answer", "kind"), [((400, {"error": "input x"}), UsageError), ((500, {"error": "odd"}), OpsError), ((502, []), OpsError)]
)
def test_a_server_that_refuses(deployed: Deployed, instances: str, answer: tuple[int, Any], kind: type[OpsError]) -> None:
    cluster, _ = deployed()
    deploy(cluster)
    cluster, _ = deployed(answer)
    with pytest.raises(OpsError, match=answer[1]["error"] if answer[1] else "the model server answers 502") as caught:
        asking.predict(cluster, None, None, instances, None, False)
    assert type(caught.value) is kind
    with pytest.raises(UsageError, match="model mnist has no version 'v9'; there are v1"):
        asking.predict(cluster, "mnist", "v9", instances, None, False)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has no instance: give a JSON value on each line"),
        (b'{"x": 1}\n{"x": NaN}\n', "line 2 is no JSON: NaN is no number of JSON"),
        (b"{", "line 1 is no JSON"),
        (b"[1, 1e999]", "line 1 has a number that is too large; each line is a JSON value of its own"),
        (b"\xff", "cannot be read (it is no text)"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_instances_that_are_none(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "request.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(says)):
        asking.read_instances(str(file))
    with pytest.raises(UsageError, match="--json-instances is missing"):
        asking.read_instances(None)


@pytest.mark.parametrize(
    "text",
    ['{"x": 1}\n{"x": 2}\n', '\ufeff{"x": 1}\n\n{"x": 2}', '[{"x": 1},\n {"x": 2}]', '{"instances": [{"x": 1}, {"x": 2}]}'],
)
def test_instances_in_other_forms(tmp_path: Path, text: str) -> None:
    (tmp_path / "request.json").write_text(text)
    assert asking.read_instances(str(tmp_path / "request.json")) == [{"x": 1}, {"x": 2}]
    (tmp_path / "list.json").write_text("[1, 2]\n")
    assert asking.read_instances(str(tmp_path / "list.json")) == [[1, 2]], "a list may be one instance"


def test_predictions_of_other_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    asking.show([[1, 2], "cat"])
    assert capsys.readouterr().out == "PREDICTIONS\n[1, 2]\ncat\n"
    asking.show([{"a b": 1}, {"c": "x"}])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [["A_B", "C"], ["1", "null"], ["null", "x"]]
