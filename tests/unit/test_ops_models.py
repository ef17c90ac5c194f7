"""Check `fab deploy` and other changes of versions, with a bucket that is a directory and a fake server."""

from __future__ import annotations

import io
import json
import math
import re
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opsdata import MODEL_PB, put_job, write_files
from shared_fakes import Clock

from infra.inventory import Inventory
from jobs.folder_bucket import FolderBucket
from jobs.model_records import Model, Version, VersionState
from jobs.records import JobRecord
from jobs.states import JobState
from jobs.study import Trial
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.fanout import Outcome
from ops.errors import HostError, OpsError, SeveralHostsError, UsageError
from ops.models import client, lookup, server, server_status, versions
from ops.models import deploy as deploying
from ops.models import export as exporting
from ops.models import predict as predicting

AVAILABLE = {"model_version_status": [{"version": "v1", "state": "AVAILABLE", "status": {"error_message": ""}}]}
BROKEN = {"model_version_status": [{"version": "v1", "state": "END", "status": {"error_message": "ValueError: odd"}}]}


class FakeServer:
    """Fake the hosts and their servers: record what is sent; give the answers in order, the last one again and again."""

    def __init__(self, names: list[str], *answers: tuple[int, Any]) -> None:
        self.names, self.answers, self.requests = names, list(answers), list[tuple[str, str, Any]]()
        self.sent, self.stopped, self.finished_starts = dict[str, bytes](), list[str](), 0
        self.unreachable: dict[str, Exception] = {}
        self.answer_by_host: dict[str, tuple[int, Any]] = {}
        self.interrupted, self.starts = False, list[int]()
        self.token: Callable[[str], str] = lambda _: ""

    def each(self, names: Iterable[str], work: Callable[[str], Any], seconds: float) -> Outcome[Any]:
        """Do the work on one host after the other."""
        outcome: Outcome[Any] = Outcome()
        for name in names:
            try:
                outcome.results[name] = work(name)
            except Exception as error:  # noqa: BLE001  each host's error is a result
                outcome.failures[name] = error
        return outcome

    def check_output(self, name: str, command: str, what: str, stdin: bytes | None = None) -> str:
        assert command.startswith("sudo -n /usr/lib/scaletier/root-helper ")
        if name in self.unreachable:
            raise self.unreachable[name]
        if stdin is None:
            assert command.endswith(" end-serving")
            self.stopped.append(name)
        else:
            self.sent[name] = stdin
        return ""

    def start(self) -> None:
        """Count the calls: all servers run."""
        self.starts.append(len(self.requests))

    def finish_start(self) -> None:
        self.finished_starts += 1

    def request_from(self, name: str, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        if name in self.answer_by_host:
            self.answers = [self.answer_by_host[name]]
        return self.request(method, path, body)

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        self.requests.append((method, path, json.loads(body) if body else None))
        if self.interrupted:
            raise KeyboardInterrupt
        status, answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, dict) and "model_version_status" in answer:
            requested_version = path.partition("/versions/")[2]
            status_entry = answer["model_version_status"][0]
            name = requested_version or status_entry["version"]
            answer = {"model_version_status": [{**status_entry, "version": name, "deployment": self.token(name)}]}
        return status, answer


MakeCluster = Callable[..., tuple[ClusterClient, FakeServer]]


@pytest.fixture
def make_cluster(inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeCluster:
    bucket = tmp_path / "bucket"
    model = {"saved_model.pb": MODEL_PB, "variables/variables.index": b"12345"}
    write_files(bucket / "jobs/job01/output/export/Servo/1700000000", model)
    monkeypatch.setattr(server_status, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(server_status, "_UNLOAD_SECONDS", 0.1)
    monkeypatch.setattr(predicting, "_POLL_SECONDS", 0.0)

    def make(*answers: tuple[int, Any], target: Inventory = inventory) -> tuple[ClusterClient, FakeServer]:
        fake = FakeServer(server.serving_host_names(target), *(answers or ((200, AVAILABLE),)))

        for module in (server_status, predicting):
            monkeypatch.setattr(module, "ServingClient", lambda _: fake)
        local_inventory = replace(target, bucket=str(bucket), operator_bucket=str(bucket))
        cluster = ClusterClient(local_inventory, fake)  # type: ignore[arg-type]
        fake.token = lambda name: stored_version(cluster, name).token
        if cluster.ledger.job("job01") is None:
            put_job(cluster.ledger, JobRecord("job01", JobState.SUCCEEDED, manifest={"package": {"name": "mine"}}))
        return cluster, fake

    return make


def deploy(cluster: ClusterClient, version: str | None = "v1", job_id: str | None = "job01", origin: str | None = None) -> int:
    return deploying.deploy(cluster, "mnist", version, job_id, origin)


def stored_version(cluster: ClusterClient, name: str = "v1") -> Version:
    model = lookup.catalog_of(cluster).model("mnist")
    assert model is not None
    return model.version(name)


def test_a_jobs_model_is_deployed(make_cluster: MakeCluster, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cluster, fake = make_cluster((503, {"error": "not yet"}), (404, {"error": "unknown"}), (200, AVAILABLE))
    assert deploy(cluster) == 0
    version = stored_version(cluster)
    mine = {"package": {"name": "mine"}}
    assert (version.state, version.jobId, version.size, version.manifest) == ("READY", "job01", len(MODEL_PB) + 5, mine)
    assert sorted(version.files) == ["saved_model.pb", "variables/variables.index"]
    version_folder = tmp_path / "bucket/models/mnist/versions/v1"
    assert (version_folder / "saved_model.pb").read_bytes() == MODEL_PB
    assert fake.requests == [("GET", "/v1/models/mnist/versions/v1", None)] * 3
    assert "model mnist has version v1, the default: fab predict --model mnist" in capsys.readouterr().out
    deploy(cluster, "v2")
    assert "model mnist has version v2, the default is v1" in capsys.readouterr().out


def test_a_host_gets_the_server_and_its_unit(make_cluster: MakeCluster) -> None:
    cluster, fake = make_cluster()
    server.start(cluster)
    assert list(fake.sent) == ["master-0"]
    names, unit = read_stream(fake.sent["master-0"])
    assert {"jobs/bucket.py", "hosts/serving/__main__.py"} <= names
    assert f'="SERVES=--bucket {cluster.inventory.bucket} --host 127.0.0.1 --port 8501 --poll-seconds' in unit
    assert f"\nMemoryMax={int(cluster.inventory.chief.memory_bytes * 0.4)}\n" in unit


def read_stream(stream: bytes) -> tuple[set[str], str]:
    """Return the names of the files that a host was sent, and the unit."""
    with tarfile.open(fileobj=io.BytesIO(stream), mode="r:gz") as tar:
        member = tar.extractfile("etc/systemd/system/scaletier-serving.service.d/host.conf")
        assert member is not None
        return {name.removeprefix("opt/scaletier/.server/") for name in tar.getnames()}, member.read().decode()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"version": "v-2"}, "--version 'v-2' is no name: a letter, then up to 127 letters, digits and _"),
        ({"job_id": "job02"}, "there is no job 'job02'"),
        ({"job_id": None, "origin": "/nowhere"}, "--origin /nowhere is no folder with a saved_model.pb"),
        ({"origin": "/nowhere"}, "--job takes the model of a job, and --origin another: use only one of them"),
        ({"job_id": "empty"}, "job empty (SUCCEEDED) has no SavedModel in"),
        ({"job_id": "bad"}, "saved_model.pb: not a SavedModel"),
        ({"job_id": "mute"}, "has no signature: export it with one"),
        ({"job_id": "runs"}, "job runs is RUNNING, and has no SavedModel in {bucket}/jobs/runs/output yet: fab wait runs"),
        ({"version": None}, "--version is missing: fab deploy --job ID --model mnist --version v1"),
    ],
)
def test_an_invalid_deployment_changes_nothing(
    make_cluster: MakeCluster, tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    cluster, fake = make_cluster()
    for name in ("empty", "bad", "mute"):
        put_job(cluster.ledger, JobRecord(name, JobState.SUCCEEDED))
    models = {"bad/output/1/saved_model.pb": b"\x12\xff", "mute/output/1/saved_model.pb": b""}
    write_files(tmp_path / "bucket/jobs", models)
    put_job(cluster.ledger, JobRecord("runs", JobState.RUNNING))
    with pytest.raises(UsageError, match=re.escape(message.replace("{bucket}", str(tmp_path / "bucket")))):
        deploy(cluster, **flags)
    assert lookup.catalog_of(cluster).models() == ([], [])
    assert not (tmp_path / "bucket/models").exists(), "nothing was changed"
    assert fake.sent == {}


def test_a_model_larger_than_its_hosts_memory_is_refused(make_cluster: MakeCluster) -> None:
    cluster, _ = make_cluster()

    def set_memory(size: int) -> None:
        hosts = tuple(replace(host, memory_bytes=size) for host in cluster.inventory.hosts)
        cluster.inventory = replace(cluster.inventory, hosts=hosts)

    set_memory(1_000_000_005)
    message = "the model has 26 B, and the server on master-0 has room for {} more: fab undeploy what is not needed, or give"
    with pytest.raises(UsageError, match=f"^{message.format('2 B')} the master a larger machine type$"):
        deploy(cluster)
    set_memory(1_000_000_065)  # 26 B are free
    assert deploy(cluster) == 0
    set_memory(1_000_000_125)  # 50 B are free without that version
    with pytest.raises(UsageError, match=f"^{message.format('24 B')}"):
        deploy(cluster, "v2")
    set_memory(1_000_000_000)
    with pytest.raises(UsageError, match=f"^{message.format('0 B')}"):
        deploy(cluster, "v2")


@pytest.mark.parametrize("origin", [None, "mine"])
def test_a_model_larger_than_any_is_not_read(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str | None
) -> None:
    cluster, _ = make_cluster()
    folder = write_files(tmp_path / "mine", {"saved_model.pb": MODEL_PB})
    for module in (deploying, exporting):
        monkeypatch.setattr(module, "LARGEST_MODEL_FILE", 9)
    with pytest.raises(OpsError, match=rf"saved_model.pb has {len(MODEL_PB)} B; 9 B is the most$"):
        deploy(cluster, job_id=None if origin else "job01", origin=str(folder) if origin else None)


def test_a_local_folder_is_deployed(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster, _ = make_cluster()
    write_files(tmp_path / "mine", {"saved_model.pb": MODEL_PB, "assets/words.txt": "a b"})
    assert deploy(cluster, job_id=None, origin=f"{tmp_path}/mine/../mine") == 0
    version = stored_version(cluster)
    assert (version.origin, version.jobId, version.size, version.manifest) == (f"{tmp_path}/mine", "", len(MODEL_PB) + 3, {})
    assert sorted(version.files) == ["assets/words.txt", "saved_model.pb"]
    assert (tmp_path / "bucket/models/mnist/versions/v1/assets/words.txt").read_text() == "a b"


def test_the_best_trials_model_is_deployed(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, _ = make_cluster()
    folder = write_files(tmp_path / "bucket/jobs/job01/output/2/export/Servo/1", {"saved_model.pb": MODEL_PB})
    monkeypatch.setattr(deploying, "best_trial", lambda *_: Trial(2, {"units": "32"}, "master-0"))
    assert deploy(cluster) == 0
    assert stored_version(cluster).origin == str(folder)
    assert "job01 tuned hyperparameters; trial 2 is the best: --units=32\n" in capsys.readouterr().err


def test_a_version_that_was_deleted_during_its_upload_leaves_no_files(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, _ = make_cluster()
    deploy(cluster, "v0")
    upload = FolderBucket.upload

    def upload_and_delete(bucket: FolderBucket, name: str, *args: Any) -> None:
        upload(bucket, name, *args)
        if name.endswith(".index"):
            lookup.change_model(lookup.catalog_of(cluster), "mnist", lambda record: record.delete("v1"))

    monkeypatch.setattr(FolderBucket, "upload", upload_and_delete)
    with pytest.raises(UsageError, match="model mnist has no version 'v1'"):
        deploy(cluster)
    assert not (tmp_path / "bucket/models/mnist/versions/v1").exists()
    assert "FAILED" not in capsys.readouterr().err


def test_a_deployment_that_another_one_replaced_is_left_to_that(
    make_cluster: MakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, fake = make_cluster()

    def replace_and_fail(*_: Any) -> Any:
        catalog, token = lookup.catalog_of(cluster), stored_version(cluster).token
        lookup.change_model(catalog, "mnist", lambda record: record.mark_failed("v1", token, "why"))
        lookup.change_model(catalog, "mnist", lambda record: record.redeploy("v1", "other"))
        raise KeyboardInterrupt

    fake.request_from = replace_and_fail  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        deploy(cluster)
    assert (stored_version(cluster).state, stored_version(cluster).token) == ("CREATING", "other")
    assert "FAILED" not in capsys.readouterr().err


def test_a_used_version_name_is_refused_before_the_copy(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster, _ = make_cluster()
    deploy(cluster)
    (tmp_path / "bucket/jobs/job01/output/export/Servo/1700000000/saved_model.pb").write_bytes(b"another")
    with pytest.raises(UsageError, match=r"version v1 of model mnist was made at .* and a name is used once: take another"):
        deploy(cluster)
    assert (tmp_path / "bucket/models/mnist/versions/v1/saved_model.pb").read_bytes() == MODEL_PB


def test_a_version_that_no_server_can_load_is_failed(make_cluster: MakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, _ = make_cluster((200, BROKEN))
    with pytest.raises(OpsError, match="version v1 of model mnist cannot be loaded: ValueError: odd"):
        deploy(cluster)
    failed = stored_version(cluster)
    assert (failed.state, failed.errorMessage) == ("FAILED", "version v1 of model mnist cannot be loaded: ValueError: odd")
    remedy = "fab deploy --model mnist --version v1 tries it again, and fab delete-version mnist v1 deletes it"
    assert f"version v1 of model mnist is FAILED: {remedy}" in capsys.readouterr().err
    cluster, _ = make_cluster()
    assert deploy(cluster, job_id=None) == 0
    assert stored_version(cluster).state is VersionState.READY


def test_an_interrupted_deployment_records_its_error(make_cluster: MakeCluster) -> None:
    cluster, fake = make_cluster()
    fake.unreachable = {"master-0": HostError("master-0", "is gone")}
    with pytest.raises(HostError):
        deploy(cluster)
    assert (stored_version(cluster).state, stored_version(cluster).errorMessage) == ("FAILED", "master-0 is gone")
    cluster, fake = make_cluster()
    fake.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        deploy(cluster, "v2")
    stopped = stored_version(cluster, "v2")
    assert (stopped.state, stopped.errorMessage) == ("FAILED", "fab deploy was stopped")


def test_a_version_is_undeployed_and_deployed_again(make_cluster: MakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, fake = make_cluster()
    deploy(cluster)
    deploy(cluster, "v2")
    with pytest.raises(UsageError, match="version v1 is the default of model mnist: fab set-default mnist v2 first"):
        versions.undeploy(cluster, "mnist", "v1")
    capsys.readouterr()
    assert versions.set_default(cluster, None, "v2") == 0
    assert capsys.readouterr().out == "version v2 of model mnist is READY; the default is v2\n"
    fake.requests.clear()
    assert versions.undeploy(cluster, "mnist", "v1") == 0
    assert capsys.readouterr().out == "version v1 of model mnist is UNDEPLOYED; the default is v2\n"
    assert fake.requests[0] == ("GET", "/v1/models/mnist/versions/v1", None), "it is unloaded"
    assert deploy(cluster, job_id=None) == 0
    assert stored_version(cluster).state is VersionState.READY
    with pytest.raises(UsageError, match="and a name is used once"):
        deploy(cluster)


def test_the_json_output_of_each_command(make_cluster: MakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, _ = make_cluster()
    deploy(cluster)

    def run_json(*arguments: Any) -> Any:
        call, *args = arguments
        capsys.readouterr()
        assert call(cluster, *args) == 0
        return json.loads(capsys.readouterr().out)

    deployed = run_json(deploying.deploy, "mnist", "v2", "job01", None, True)
    assert (deployed["model"], deployed["version"], deployed["state"], deployed["isDefault"]) == ("mnist", "v2", "READY", False)
    assert [version["version"] for version in run_json(versions.versions, "mnist", True)] == ["v1", "v2"]
    assert run_json(versions.set_default, "mnist", "v2", True)["isDefault"]
    assert run_json(versions.undeploy, "mnist", "v1", True)["state"] == "UNDEPLOYED"
    deleted = run_json(versions.delete_version, "mnist", "v1", True, True)
    assert deleted == {"deleted": {"model": "mnist", "version": "v1"}, "default": "v2"}


def test_an_unknown_version_cannot_be_deployed_again(make_cluster: MakeCluster) -> None:
    cluster, _ = make_cluster()
    with pytest.raises(UsageError, match="version v1 has no origin"):
        deploy(cluster, job_id=None)
    deploy(cluster)
    deploy(cluster, "v2")
    versions.undeploy(cluster, "mnist", "v2")
    with pytest.raises(UsageError, match=r"version v22 has no origin: .*; without both, fab deploy restores v2"):
        deploy(cluster, "v22", job_id=None)


def test_a_version_is_deleted_with_its_files(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, _ = make_cluster()
    deploy(cluster)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(UsageError, match="this would delete version v1 of model mnist, 26 B: say --yes"):
        versions.delete_version(cluster, "mnist", "v1", sure=False)
    assert stored_version(cluster).state is VersionState.READY
    capsys.readouterr()
    assert versions.delete_version(cluster, "mnist", "v1", sure=True) == 0
    assert capsys.readouterr().out == "version v1 of model mnist is deleted\n"
    assert not (tmp_path / "bucket/models/mnist/versions/v1").exists()
    with pytest.raises(UsageError, match="there is no model 'mnist'; no model is deployed: fab deploy"):
        versions.delete_version(cluster, "mnist", "v1", sure=True)
    with pytest.raises(UsageError, match=r"\(it was deleted\), and a name is used once"):
        deploy(cluster)
    late = write_files(tmp_path / "bucket/models/mnist/versions/v1", {"late": ""})
    with pytest.raises(UsageError, match="there is no model 'mnist'"):
        versions.delete_version(cluster, "mnist", "v1", sure=True)
    assert not late.exists(), "what an upload left that ended later"
    with pytest.raises(UsageError, match=r"there is no model '\.\./x'"):
        versions.delete_version(cluster, "../x", "v1", sure=True)
    for version in ("v2", "v3"):
        deploy(cluster, version)
    with pytest.raises(UsageError, match="version v2 is the default of model mnist: fab set-default mnist v3 first"):
        versions.delete_version(cluster, "mnist", "v2", sure=False)
    with pytest.raises(UsageError, match="has no version 'v9'"):
        versions.delete_version(cluster, "mnist", "v9", sure=True)
    assert (tmp_path / "bucket/models/mnist/versions/v2/saved_model.pb").exists()


def test_models_and_versions_are_listed(make_cluster: MakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, _ = make_cluster()
    assert versions.models(cluster, as_json=False) == 0
    assert "no model is deployed: fab deploy --job ID" in capsys.readouterr().err
    for call in (lambda: versions.versions(cluster, None, False), lambda: versions.set_default(cluster, "m", "v1")):
        with pytest.raises(UsageError, match="no model is deployed: fab deploy"):
            call()
    deploy(cluster)
    capsys.readouterr()
    versions.models(cluster, as_json=True)
    (model,) = json.loads(capsys.readouterr().out)
    assert (model["name"], model["default"], [v["version"] for v in model["versions"]]) == ("mnist", "v1", ["v1"])
    created = terminal.local_time(stored_version(cluster).createTime)
    assert versions.versions(cluster, "mnist", as_json=False) == 0
    assert capsys.readouterr().out.splitlines() == [
        "VERSION  STATE  DEFAULT  SERVERS  ORIGIN  SIZE  CREATED",
        f"v1       READY  default  1 of 1   job01   26 B  {created}",
    ]
    write_files(tmp_path / "bucket/models/bad", {"model.json": "{"})
    record = lookup.catalog_of(cluster).model("mnist")
    assert record
    assert versions.models(cluster, as_json=False) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "MODEL  DEFAULT  SERVERS  VERSIONS  CREATED",
        f"mnist  v1       1 of 1          1  {terminal.local_time(record.createTime)}",
    ]
    assert err.startswith("bad: ")
    assert err.count("\n") == 1
    lookup.catalog_of(cluster).change("mnist", lambda record: record.add_version(Version("v2", origin="/x", token="t")))
    lookup.catalog_of(cluster).change("mnist", lambda record: record.mark_failed("v2", "t", "it broke"))
    assert versions.versions(cluster, None, as_json=False) == 0
    out, err = capsys.readouterr()
    created = terminal.local_time(stored_version(cluster, "v2").createTime)
    assert out.splitlines()[2] == f"v2       FAILED  -        -        /x      -     {created}"
    assert err == "v2: it broke\n"
    with pytest.raises(UsageError, match=r"there is no model 'mnits'; did you mean mnist\?; there are mnist"):
        versions.versions(cluster, "mnits", False)
    with pytest.raises(UsageError, match=r"model mnist has no version 'v11'; there are v1, v2; did you mean v1\?"):
        versions.undeploy(cluster, "mnist", "v11")
    with pytest.raises(UsageError, match=r"^which version of model mnist\? There are v1, v2$"):
        versions.undeploy(cluster, "mnist", None)
    with pytest.raises(UsageError, match=r"^there is no model 'nobody'$"):
        lookup.change_model(lookup.catalog_of(cluster), "nobody", lambda record: record.add_version(Version("v1")))
    lookup.change_model(lookup.catalog_of(cluster), "more", lambda record: record.add_version(Version("v1")), create=True)
    with pytest.raises(UsageError, match=r"^which model\? There are mnist, more$"):
        versions.versions(cluster, None, False)


def version_status(version: str, state: str, error_message: str = "") -> tuple[int, Any]:
    """Return a server's answer on a version."""
    return 200, {"model_version_status": [{"version": version, "state": state, "status": {"error_message": error_message}}]}


def test_serving_hosts_get_the_server_and_the_masters_stops(make_cluster: MakeCluster, served: Inventory) -> None:
    cluster, fake = make_cluster(target=served)
    deploy(cluster)
    assert list(fake.sent) == ["serving-0", "serving-1"]
    assert fake.stopped == ["master-0"], "after the others have loaded it"
    for index, name in enumerate(fake.sent):
        _, unit = read_stream(fake.sent[name])
        assert f" --host 127.0.0.1 10.0.0.{192 + index} --port 8501 " in unit, "the host's own address"
        assert f"\nMemoryMax={int(cluster.inventory.host(name).memory_bytes * 0.9)}\n" in unit, "no job runs beside it"
    cluster, fake = make_cluster()
    deploy(cluster, "v2")
    assert (list(fake.sent), fake.stopped) == (["master-0"], []), "without serving hosts the master is the server"
    cluster, fake = make_cluster(target=served)
    fake.unreachable = {"master-0": HostError("master-0", "is gone")}
    assert deploy(cluster, "v3") == 0, "the master's server need not end"


def test_an_unreachable_server_is_named_and_blocks_no_deployment(
    make_cluster: MakeCluster, served: Inventory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, fake = make_cluster(target=served)
    fake.unreachable = {"serving-1": HostError("serving-1", "does not answer")}
    assert deploy(cluster) == 0
    assert stored_version(cluster).state is VersionState.READY
    assert "serving-1 does not answer: it loads mnist v1 when it is back\n" in capsys.readouterr().err
    assert fake.stopped == ["master-0"]
    monkeypatch.setattr(server_status, "_DOWN_SECONDS", 0.0)
    cluster, fake = make_cluster(target=served)
    fake.answer_by_host = {"serving-0": (200, AVAILABLE), "serving-1": (client.NO_SERVER, {"error": "nobody"})}
    assert deploy(cluster, "v2") == 0
    error = "serving-1 has no model server that answers (fab shell serving-1 -- journalctl -u scaletier-serving)"
    assert f"{error}: it loads mnist v2 when it is back\n" in capsys.readouterr().err


def test_a_hanging_server_blocks_no_deployment(
    make_cluster: MakeCluster, served: Inventory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_status, "_DOWN_SECONDS", 0.0)
    cluster, fake = make_cluster(target=served)
    original = fake.request_from

    def hang(name: str, *args: Any) -> tuple[int, Any]:
        if name == "serving-1":
            raise OpsError("the model server on serving-1 does not answer: timed out")
        return original(name, *args)

    fake.request_from = hang  # type: ignore[method-assign]
    assert deploy(cluster) == 0
    assert stored_version(cluster).state is VersionState.READY
    assert "it loads mnist v1 when it is back" in capsys.readouterr().err


def test_a_server_that_cannot_load_a_version_is_named(make_cluster: MakeCluster, served: Inventory) -> None:
    cluster, fake = make_cluster(target=served)
    fake.answer_by_host = {"serving-0": (200, AVAILABLE), "serving-1": (200, BROKEN)}
    with pytest.raises(OpsError, match="version v1 of model mnist cannot be loaded on serving-1: ValueError: odd"):
        deploy(cluster)
    assert stored_version(cluster).state is VersionState.FAILED
    assert fake.stopped == []


def test_a_deployment_fails_if_no_server_is_reachable(make_cluster: MakeCluster, served: Inventory) -> None:
    cluster, fake = make_cluster(target=served)
    fake.unreachable = {name: HostError(name, "is gone") for name in fake.names}
    with pytest.raises(SeveralHostsError, match="serving-0 is gone; serving-1 is gone"):
        deploy(cluster)
    assert (stored_version(cluster).state, fake.stopped) == ("FAILED", [])


def test_the_state_on_each_server_is_listed(
    make_cluster: MakeCluster, served: Inventory, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, fake = make_cluster(target=served)
    deploy(cluster)
    deploy(cluster, "v2")
    fake.answer_by_host = {
        "serving-0": version_status("v1", "AVAILABLE"),
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
        "no model server answers on serving-1: fab predict starts one",
        "serving-0 is loading version v2 of model mnist",
    ]
    versions.models(cluster, False)
    assert capsys.readouterr().out.splitlines()[1].split()[:5] == ["mnist", "v1", "1", "of", "2"]
    fake.answer_by_host["serving-1"] = version_status("v1", "END", "ValueError: odd")
    versions.models(cluster, True)
    (model,) = json.loads(capsys.readouterr().out)
    assert model["versions"][0]["servers"] == [
        {"server": "serving-0", "state": "AVAILABLE", "errorMessage": ""},
        {"server": "serving-1", "state": "END", "errorMessage": "ValueError: odd"},
    ]
    assert [entry["state"] for entry in model["versions"][1]["servers"]] == ["LOADING", "LOADING"]
    fake.token = lambda _: "of an earlier deployment"
    states = server_status.query(cluster, lookup.catalog_of(cluster).models()[0])
    assert [entry.state for entry in states["mnist", "v1"]] == ["LOADING"] * 2
    fake.token = lambda name: stored_version(cluster, name).token
    versions.versions(cluster, None, False)
    assert capsys.readouterr().err.splitlines() == [
        "version v1 of model mnist on serving-1: ValueError: odd",
        "serving-0 is loading version v2 of model mnist",
        "serving-1 is loading version v2 of model mnist",
    ]


def test_servers_are_not_queried_if_no_version_is_served(make_cluster: MakeCluster, served: Inventory) -> None:
    cluster, fake = make_cluster(target=served)
    deploy(cluster)
    fake.answer_by_host = dict.fromkeys(fake.names, (404, {}))
    versions.undeploy(cluster, "mnist", "v1")
    fake.requests.clear()
    assert versions.versions(cluster, None, True) == versions.models(cluster, True) == 0
    assert fake.requests == []


def test_a_server_that_ended_is_started_again(make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, started = Clock(), list[tuple[float, list[str]]]()
    monkeypatch.setattr(server_status, "_POLL_SECONDS", 1.0)
    monkeypatch.setattr(server_status, "time", clock)
    silent = (client.NO_SERVER, {"error": "nobody"})
    cluster, fake = make_cluster(*[silent] * 9, (503, {"error": "loading"}), *[silent] * 7, (200, AVAILABLE))
    fake.token = lambda _: "t"
    monkeypatch.setattr(server, "start", lambda _, names: started.append((clock() - 1000, names)))
    version, outcome = Version("v1", token="t"), Outcome({"master-0": ""}, {})
    server_status.wait_loaded(cluster, "mnist", version, outcome)
    assert started == [(6.0, ["master-0"]), (15.0, ["master-0"])], "5 s after its last answer or start"
    cluster, _ = make_cluster(silent)
    with pytest.raises(HostError, match="master-0 has no model server that answers"):
        server_status.wait_loaded(cluster, "mnist", version, outcome)
    assert clock() == 1000 + 17 + 121
    cluster, _ = make_cluster((503, {"error": "loading"}))
    message = "the model server on master-0 has not loaded mnist v1 in 180 s: fab shell master-0 -- journalctl -u"
    with pytest.raises(OpsError, match=message):
        server_status.wait_loaded(cluster, "mnist", version, outcome)
    assert clock() == 1000 + 17 + 121 + 181


@pytest.fixture
def instances(tmp_path: Path) -> str:
    (tmp_path / "request.json").write_text('{"x": 1}\n\n{"x": 2}\n')
    return str(tmp_path / "request.json")


def test_predict_prints_a_table_or_json(make_cluster: MakeCluster, instances: str, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, _ = make_cluster()
    deploy(cluster)
    answer = {"predictions": [{"classes": 7, "key": 0, "scores": [0.5], "probabilities": [0.5]}]}
    cluster, fake = make_cluster((503, {"error": "loading"}), (200, answer))
    capsys.readouterr()
    assert predicting.predict(cluster, None, None, instances, None, False) == 0
    assert capsys.readouterr().out == "KEY  CLASSES  PROBABILITIES\n  0        7  [0.5]\n"
    assert fake.requests[-1] == ("POST", "/v1/models/mnist:predict", {"instances": [{"x": 1}, {"x": 2}]})
    assert (fake.starts, fake.finished_starts) == ([0], 1), "hosts without a server get it before the first request"
    predicting.predict(cluster, "mnist", "v1", instances, "other", True)
    assert json.loads(capsys.readouterr().out) == answer
    body = {"instances": [{"x": 1}, {"x": 2}], "signature_name": "other"}
    assert fake.requests[-1][1:] == ("/v1/models/mnist/versions/v1:predict", body)


def test_predictions_that_are_not_finite_are_strings_of_json(
    make_cluster: MakeCluster, instances: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, _ = make_cluster()
    deploy(cluster)
    cluster, _ = make_cluster((200, {"predictions": [{"x": [math.nan, 1.5]}, math.inf, -math.inf]}))
    capsys.readouterr()
    assert predicting.predict(cluster, None, None, instances, None, True) == 0
    output = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert output == {"predictions": [{"x": ["NaN", 1.5]}, "Infinity", "-Infinity"]}


def test_predict_sends_the_signature_of_a_request(make_cluster: MakeCluster, instances: str) -> None:
    cluster, _ = make_cluster()
    deploy(cluster)
    body = {"instances": [1], "signature_name": "other"}
    Path(instances).write_text(json.dumps(body))
    for signature in (None, "other"):
        cluster, fake = make_cluster((200, {"predictions": [2]}))
        assert predicting.predict(cluster, None, None, instances, signature, False) == 0
        assert fake.requests[-1][2] == body
    with pytest.raises(UsageError, match=r"^--signature mine differs from signature_name 'other' in .*: give only one$"):
        predicting.predict(cluster, None, None, instances, "mine", False)


def test_predict_refuses_an_undeployed_version_without_a_request(make_cluster: MakeCluster, instances: str) -> None:
    cluster, _ = make_cluster()
    deploy(cluster)
    deploy(cluster, "v2")
    assert versions.undeploy(cluster, "mnist", "v2", False) == 0
    cluster, fake = make_cluster()
    with pytest.raises(
        UsageError, match="version v2 of model mnist is UNDEPLOYED: fab deploy --model mnist --version v2 restores"
    ):
        predicting.predict(cluster, "mnist", "v2", instances, None, False)
    versions.undeploy(cluster, "mnist", "v1", False)
    cluster, fake = make_cluster()
    unserved = "no version of model mnist is served: v1 is UNDEPLOYED, v2 is UNDEPLOYED; "
    with pytest.raises(UsageError, match=f"^{unserved}fab deploy --model mnist --version v1 restores it$"):
        predicting.predict(cluster, "mnist", None, instances, None, False)
    lost = Model("mnist", versions=[Version("v1", VersionState.FAILED)])
    with pytest.raises(
        UsageError, match=r"v1 is FAILED; fab deploy --model mnist --version NAME --job ID deploys another one$"
    ):
        lookup.served_model(SimpleNamespace(models=lambda: ([lost], [])), "mnist")  # type: ignore[arg-type]
    assert fake.requests == []


def test_a_request_is_as_large_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicting, "_MAX_REQUEST_BYTES", 10)
    assert [*predicting.request_bodies([11, 22, 333, 4, "much too long", 5], {})] == [
        b'{"instances": [11,22]}',  # 2 of 8 bytes are those of no more keys
        b'{"instances": [333,4]}',
        b'{"instances": ["much too long"]}',
        b'{"instances": [5]}',
    ]
    monkeypatch.setattr(predicting, "_MAX_REQUEST_BYTES", 22)
    assert [*predicting.request_bodies([11, 22, 3], {"signature": "x"})] == [
        b'{"instances": [11], "signature": "x"}',
        b'{"instances": [22], "signature": "x"}',
        b'{"instances": [3], "signature": "x"}',
    ]


def test_split_requests_use_one_version(
    make_cluster: MakeCluster, instances: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, _ = make_cluster()
    deploy(cluster)
    cluster, fake = make_cluster((200, {"predictions": [1]}), (200, {"predictions": [2]}))
    monkeypatch.setattr(predicting, "_MAX_REQUEST_BYTES", 1)
    counts: list[object] = []
    monkeypatch.setattr(predicting.terminal, "counter", lambda _, total: counts.append(total) or counts.append)  # type: ignore[func-returns-value]
    capsys.readouterr()
    assert predicting.predict(cluster, None, None, instances, None, True) == 0
    assert json.loads(capsys.readouterr().out) == {"predictions": [1, 2]}
    assert counts == [2, b'{"instances": [{"x": 1}]}', b'{"instances": [{"x": 2}]}'], "the progress"
    path = "/v1/models/mnist/versions/v1:predict"
    assert fake.requests[-2:] == [("POST", path, {"instances": [{"x": 1}]}), ("POST", path, {"instances": [{"x": 2}]})]


@pytest.mark.parametrize(
    ("answer", "kind"), [((400, {"error": "input x"}), UsageError), ((500, {"error": "odd"}), OpsError), ((502, []), OpsError)]
)
def test_a_servers_error_is_one_error(
    make_cluster: MakeCluster, instances: str, answer: tuple[int, Any], kind: type[OpsError]
) -> None:
    cluster, _ = make_cluster()
    deploy(cluster)
    cluster, _ = make_cluster(answer)
    with pytest.raises(OpsError, match=answer[1]["error"] if answer[1] else "the model server answers 502") as caught:
        predicting.predict(cluster, None, None, instances, None, False)
    assert type(caught.value) is kind
    with pytest.raises(UsageError, match="model mnist has no version 'v9'; there are v1"):
        predicting.predict(cluster, "mnist", "v9", instances, None, False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no instance: give a JSON value on each line"),
        (b'{"x": 1}\n{"x": NaN}\n', "line 2 is no JSON: NaN is no number of JSON"),
        (b"{", "line 1 is no JSON"),
        (b'[{"x": 1e999}]', "line 1 has a number that is too large; each line is a JSON value of its own"),
        (b"[1, 1e999]", "line 1 has a number that is too large; each line is a JSON value of its own"),
        (b"[" * 9999, "line 1 is nested too deeply; each line is a JSON value of its own"),
        (b"1\n" + b"[" * 9999, "line 2 is nested too deeply; each line is a JSON value of its own"),
        (b"\xff", "cannot be read (it is no text)"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_invalid_instances_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "request.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=f"^{re.escape(str(file))},? {re.escape(message)}"):
        predicting.read_instances(str(file))
    with pytest.raises(UsageError, match="--json-instances is missing"):
        predicting.read_instances(None)


@pytest.mark.parametrize(
    "text",
    ['{"x": 1}\n{"x": 2}\n', '\ufeff{"x": 1}\n\n{"x": 2}', '[{"x": 1},\n {"x": 2}]', '{"instances": [{"x": 1}, {"x": 2}]}'],
)
def test_instances_may_be_lines_a_list_or_a_request(tmp_path: Path, text: str) -> None:
    (tmp_path / "request.json").write_text(text)
    assert predicting.read_instances(str(tmp_path / "request.json")) == ([{"x": 1}, {"x": 2}], None)
    (tmp_path / "list.json").write_text("[1, 2]\n")
    assert predicting.read_instances(str(tmp_path / "list.json")) == ([[1, 2]], None), "a list may be one instance"
    for one in ("[]", '{"x": 1}', '{"instances": 7}', "[{}, 1]"):
        (tmp_path / "one.json").write_text(one)
        assert predicting.read_instances(str(tmp_path / "one.json")) == ([json.loads(one)], None)


def test_only_newlines_end_an_instance(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c"
    (tmp_path / "lines.json").write_bytes(f'"{text}"\r\n\r\n"{text}"\r\n'.encode())
    assert predicting.read_instances(str(tmp_path / "lines.json")) == ([text, text], None)


def test_instances_are_read_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"1\n2\n")))
    assert predicting.read_instances("-") == ([1, 2], None)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"1\n{\n")))
    with pytest.raises(UsageError, match=r"^stdin, line 2 is no JSON: "):
        predicting.read_instances("-")


def test_predictions_of_any_shape_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    predicting.show([[1, 2], "cat"])
    assert capsys.readouterr().out == "PREDICTIONS\n[1, 2]\ncat\n"
    predicting.show([{"classes": 3, "key": 3, "scores": [0.5], "probabilities": [0.5]}])
    assert capsys.readouterr().out == "KEY  CLASSES  PROBABILITIES\n  3        3  [0.5]\n", "a class equal to its key"
    predicting.show([{"age": 5, "classes": 5, "scores": [0.5]}])
    assert capsys.readouterr().out == "AGE  CLASSES  SCORES\n  5        5  [0.5]\n", "outputs that happen to be equal"
    predicting.show([{"a b": 1}, {"c": "x"}])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [["A_B", "C"], ["1", "null"], ["null", "x"]]
