"""A bucket with content is not destroyed; LXD is a fake here, tests/e2e/test_keys.py uses the real one."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from pylxd.exceptions import LXDAPIException, NotFound

from infra import dynamic
from infra.dynamic import ModuleProvider
from infra.lxd import bucket, bucket_guard, host, project
from infra.lxd.api import LxdError, parse_limit
from jobs.queue import Queue, QueueEntry
from jobs.records import JobRecord
from jobs.states import JobState

VOLUME = {"project": "scaletier-local-abcdef", "pool": "fast", "name": "bucket"}
SIZED = {**VOLUME, "size": 2**34}
IN_PROJECT = {"project": VOLUME["project"]}
QUEUE = "/bucket/cluster/queue.json"
GONE = NotFound(SimpleNamespace(status_code=404, json=lambda: {"error": "not found"}))


def refusal(error: str) -> LXDAPIException:
    return LXDAPIException(SimpleNamespace(status_code=400, json=lambda: {"error": error}))


class Pools:
    """LXD's pools `slow` and `fast`; requests to their volumes are recorded, and an answer may be an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[Any] = []
        self.volume: Any = None
        self.usage: Any = {}
        self.records: dict[str, bytes] = {}
        self.project = True
        monkeypatch.setattr(bucket, "client", self.client)
        monkeypatch.setattr(bucket.quotas, "enable_accounting", lambda pool: self.requests.append(("count", pool)))
        monkeypatch.setattr(bucket.quotas, "is_accounting", lambda _: True)

    @property
    def config(self) -> Any:
        return self.volume and self.volume["config"]

    def client(self, *_: str) -> Any:
        def answer(content: Any, params: Any) -> Any:
            assert params == IN_PROJECT
            if isinstance(content, Exception):
                raise content
            return SimpleNamespace(json=lambda: {"metadata": content})

        def put(params: Any, json: Any) -> None:
            self.requests.append(("put", params, json))
            self.volume = json

        def delete(params: Any) -> None:
            self.requests.append(("delete", params))
            self.volume = None

        held = SimpleNamespace(
            get=lambda params: answer(GONE if self.volume is None else self.volume, params),
            put=put,
            delete=delete,
            state=SimpleNamespace(get=lambda params: answer(self.usage, params)),
        )
        other = SimpleNamespace(get=lambda params: answer(GONE, params))

        class Custom(dict[str, Any]):
            def post(_, params: Any, json: Any) -> None:  # noqa: N805
                self.requests.append(("post", params, json))
                self.volume = {"config": json["config"], "description": "mine"}

        pools = {
            name: SimpleNamespace(volumes=SimpleNamespace(custom=Custom(bucket=volume)))
            for name, volume in (("slow", other), ("fast", held))
        }
        return SimpleNamespace(
            projects=SimpleNamespace(exists=lambda _: self.project),
            storage_pools=SimpleNamespace(all=lambda: [SimpleNamespace(name=name) for name in pools]),
            api=SimpleNamespace(storage_pools=pools),
        )


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    return Pools(monkeypatch)


@pytest.fixture
def files() -> dict[str, list[str]]:
    """Return the content of each folder of the bucket."""
    return {
        "/bucket": ["cluster", "jobs", "models"],
        "/bucket/cluster": ["queue.json"],
        "/bucket/jobs": [],
        "/bucket/models": [],
    }


@pytest.fixture
def volume(pools: Pools, monkeypatch: pytest.MonkeyPatch, files: dict[str, list[str]]) -> Pools:
    """Return LXD with a new bucket, which a running host can list."""
    monkeypatch.setattr(bucket, "purge", lambda _: None)
    monkeypatch.setattr(bucket_guard, "_checked", set())

    def read(path: str) -> bytes:
        if path not in pools.records:
            raise GONE
        return pools.records[path]

    listing = SimpleNamespace(get=lambda params: _answer(files[params["path"]]))
    running = SimpleNamespace(api=SimpleNamespace(files=listing), files=SimpleNamespace(get=read))
    monkeypatch.setattr(bucket_guard, "running_host", lambda _: running)
    bucket.create(SIZED)
    return pools


def _answer(names: object) -> Any:
    return SimpleNamespace(headers={"X-LXD-type": "directory"}, content=json.dumps({"metadata": names}).encode())


def props(**changes: bool) -> dict[str, Any]:
    return {**VOLUME, "retain": False, "force": False, **changes}


def test_a_bucket_with_content_is_kept_with_an_error_that_names_it(volume: Pools, files: dict[str, list[str]]) -> None:
    bucket_guard.create(props())
    files["/bucket/jobs"] = ["job4", "job1", "job3", "job2"]
    files["/bucket/models"] = ["mnist"]
    with pytest.raises(LxdError) as refused:
        bucket_guard.delete("seal", props())
    message = str(refused.value)
    assert message.startswith(
        "the bucket contains jobs (job1, job2, job3 and 1 more), models (mnist), so nothing was destroyed."
    )
    assert all(f"`pulumi config set {key} true`" in message for key in ("retainBucket", "forceDestroy"))
    assert "\n" not in message
    with pytest.raises(LxdError, match="may contain data and was not deleted"):
        bucket.delete("bucket", VOLUME)
    assert volume.config is not None


def test_an_empty_bucket_and_an_unused_one_are_deleted(volume: Pools) -> None:
    bucket_guard.create(props())
    bucket_guard.delete("seal", props())
    bucket.delete("bucket", VOLUME)
    assert volume.config is None
    bucket.delete("bucket", VOLUME)
    bucket.create(SIZED)
    bucket.delete("bucket", VOLUME)
    assert volume.config is None, "the bucket of an incomplete stack is deleted"


def test_an_interrupted_destroy_checks_the_bucket_again(
    volume: Pools, files: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its guard is gone from the state, and the user may have trained since; each operation is a process of its own."""
    removed: list[str] = []
    monkeypatch.setattr(host, "remove", lambda _, name: removed.append(name))
    props_of_host = {"project": VOLUME["project"], "pool": "fast", "bucket": "bucket"}
    bucket_guard.create(props())
    bucket_guard.delete("seal", props())
    host.delete("ps-0", props_of_host)
    monkeypatch.setattr(bucket_guard, "_checked", set())
    files["/bucket/jobs"] = ["job1"]
    for name in ("ps-1", "master-0"):
        with pytest.raises(LxdError, match=r"^the bucket contains jobs \(job1\), so nothing more was destroyed"):
            host.delete(name, props_of_host)
    files["/bucket/jobs"] = []
    with monkeypatch.context() as patch:
        host.delete("ps-1", props_of_host)
        patch.setattr(bucket_guard, "running_host", lambda _: None)
        host.delete("master-0", props_of_host)  # the last host, which no other could check
    assert removed == ["ps-0", "ps-1", "master-0"]
    bucket.delete("bucket", VOLUME)
    assert volume.config is None


def test_an_update_after_an_interrupted_destroy_replaces_hosts_of_a_bucket_with_data(
    volume: Pools, files: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "remove", lambda *_: None)
    bucket_guard.delete("seal", props())
    monkeypatch.setattr(bucket_guard, "_checked", set())
    files["/bucket/jobs"] = ["job1"]
    props_of_host = {"project": VOLUME["project"], "pool": "fast", "bucket": "bucket"}
    with monkeypatch.context() as patch:
        patch.setattr(dynamic, "_updating", threading.Event())
        assert ModuleProvider(host.__name__).check({}, props_of_host).inputs == props_of_host
        host.delete("ps-0", props_of_host)
    # The update ends before the guard exists again, and a destroy follows, which is another process.
    monkeypatch.setattr(bucket_guard, "_checked", set())
    with pytest.raises(LxdError, match=r"^the bucket contains jobs \(job1\), so nothing more was destroyed"):
        host.delete("ps-1", props_of_host)
    bucket_guard.create(props())
    host.delete("ps-1", props_of_host)
    with pytest.raises(LxdError, match="may contain data and was not deleted"):
        bucket.delete("bucket", VOLUME)


def test_an_update_after_an_interrupted_destroy_does_not_replace_the_bucket(
    volume: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket_guard.delete("seal", props())
    with monkeypatch.context() as patch:
        patch.setattr(dynamic, "_updating", threading.Event())
        ModuleProvider(bucket.__name__).check({}, VOLUME)
        with pytest.raises(LxdError, match="may contain data and was not deleted"):
            bucket.delete("bucket", VOLUME)
    bucket.delete("bucket", VOLUME)
    assert volume.config is None


@pytest.mark.parametrize(
    ("changes", "label"), [({}, bucket.EMPTY), ({"force": True}, bucket.REMOVE), ({"retain": True}, bucket.RETAIN)]
)
def test_the_guard_of_a_lost_pool_marks_the_bucket_in_the_other_one(
    volume: Pools, changes: dict[str, bool], label: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket_guard.delete("seal", {**props(**changes), "pool": "slow"})
    assert volume.config[bucket.ON_DESTROY] == label
    assert ("volume bucket of storage pool fast" in capsys.readouterr().err) is bool(changes.get("retain"))


def test_an_interrupted_destroy_without_a_running_host_names_the_command(
    volume: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket_guard.create(props())
    bucket_guard.delete("seal", props())
    monkeypatch.setattr(bucket_guard, "_checked", set())
    monkeypatch.setattr(bucket_guard, "running_host", lambda _: None)
    for hosts, remedy in ((["ps-1", "ps-2"], "`fab doctor --fix; pulumi destroy`"), ([], "`pulumi up`")):
        monkeypatch.setattr(bucket_guard, "hosts_of", lambda _, hosts=hosts: hosts)
        with pytest.raises(LxdError, match=f"list the bucket, so nothing more was destroyed: {remedy}"):
            bucket_guard.check_again(VOLUME)


def test_a_bucket_that_is_created_again_is_still_retained(volume: Pools, files: dict[str, list[str]]) -> None:
    """It was deleted by hand; the next update creates a volume, and finds the guard unchanged."""
    bucket_guard.create(props(retain=True))
    volume.volume = None
    bucket.create(SIZED)
    files["/bucket/jobs"] = ["job1"]
    bucket_guard.delete("seal", props(retain=True))
    bucket.delete("bucket", VOLUME)
    assert volume.config is not None


@pytest.mark.parametrize("setting", ["force", "retain"])
def test_a_destroy_refuses_while_a_job_has_not_ended(volume: Pools, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, settings = Queue(), props(**{setting: True})
    for number in range(1, 5):
        queue = queue.added(QueueEntry(f"job{number}", ["ps-0"]))
    for job, state in {"job1": JobState.RUNNING, "job2": JobState.QUEUED, "job3": JobState.FAILED}.items():
        volume.records[f"/bucket/jobs/{job}/job.json"] = JobRecord(job, hosts=["ps-0"], state=state).to_json()
    volume.records[QUEUE] = queue.to_json()
    with pytest.raises(LxdError) as refused:
        bucket_guard.delete("seal", settings)
    assert str(refused.value) == (
        "not all jobs have ended (job1, job2, job4), so nothing was destroyed. Wait (`fab wait`), `fab cancel`, or "
        "`pulumi config set disruptJobs true && pulumi up`"
    )
    bucket_guard.delete("seal", {**settings, "disrupt": True})
    volume.records[QUEUE] = b"x"
    with pytest.raises(LxdError, match=r"^a record of jobs cannot be read \(.*\), so nothing was destroyed"):
        bucket_guard.delete("seal", settings)
    with monkeypatch.context() as patch:
        patch.setattr(bucket_guard, "running_host", lambda _: None)
        bucket_guard.delete("seal", settings)
    volume.records[QUEUE] = Queue().to_json()
    bucket_guard.delete("seal", settings)


def test_without_a_running_host_nothing_is_destroyed(volume: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket_guard.create(props())
    monkeypatch.setattr(bucket_guard, "running_host", lambda _: None)
    with pytest.raises(LxdError, match="no running host can list the bucket, so nothing was destroyed: `pulumi up` first"):
        bucket_guard.delete("seal", props())
    with pytest.raises(LxdError):
        bucket.delete("bucket", VOLUME)
    assert volume.config is not None


@pytest.mark.parametrize(
    ("changes", "kept"), [({"force": True}, False), ({"retain": True}, True), ({"force": True, "retain": True}, True)]
)
def test_force_destroy_and_retain_bucket_skip_the_content_check(
    volume: Pools, files: dict[str, list[str]], changes: dict[str, bool], kept: bool
) -> None:
    bucket_guard.create(props())
    files["/bucket/jobs"] = ["job1"]
    ModuleProvider(bucket_guard.__name__).update("seal", props(), props(**changes))
    bucket_guard.delete("seal", props(**changes))
    bucket.delete("bucket", VOLUME)
    assert (volume.config is not None) is kept


def test_unset_force_destroy_guards_the_bucket_again(volume: Pools, files: dict[str, list[str]]) -> None:
    bucket_guard.create(props(force=True))
    ModuleProvider(bucket_guard.__name__).update("seal", props(force=True), props())
    with pytest.raises(LxdError):
        bucket.delete("bucket", VOLUME)


def test_hosts_are_kept_with_a_kept_bucket(volume: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    purged: list[str] = []
    for module in (bucket, project):
        monkeypatch.setattr(module, "purge", purged.append)
    monkeypatch.setattr(project, "client", bucket.client)
    volume.volume = {"config": {}, "description": ""}
    with pytest.raises(LxdError, match="may contain data and was not deleted"):
        bucket.delete("bucket", VOLUME)
    with pytest.raises(LxdError, match="may contain data and was not deleted"):
        project.delete(VOLUME["project"], {})
    assert purged == []
    volume.volume = {"config": {bucket.ON_DESTROY: bucket.REMOVE}, "description": ""}
    bucket.delete("bucket", VOLUME)
    assert purged == [VOLUME["project"]]


def test_a_manually_removed_volume_is_one_error_line(volume: Pools) -> None:
    volume.volume = None
    with pytest.raises(LxdError, match="volume bucket does not exist any more: `pulumi refresh`"):
        bucket_guard.create(props())


def test_a_manually_set_limit_is_parsed_or_kept_as_text() -> None:
    assert [parse_limit(text) for text in ("2", "2147483648", "2GiB", "0-1", "50%", "")] == [2, 2**31, "2GiB", "0-1", "50%", ""]


def test_the_bucket_s_size_changes_in_place_and_the_mark_is_kept(volume: Pools) -> None:
    assert volume.config == {bucket.ON_DESTROY: bucket.REMOVE, "size": str(2**34)}
    bucket_guard.create(props())
    assert volume.config == {"size": str(2**34)}
    assert bucket.read("bucket", SIZED) == SIZED
    volume.config["size"] = "1GiB"
    drifted = bucket.read("bucket", SIZED)
    assert drifted == {**SIZED, "size": "1GiB"}, "the next update restores it"
    assert bucket.update("bucket", drifted, SIZED) == SIZED
    assert volume.config["size"] == str(2**34)
    bucket.update("bucket", SIZED, {**SIZED, "size": 0})
    assert "size" not in volume.config
    assert bucket.read("bucket", SIZED) == {**SIZED, "size": 0}


def test_the_first_running_host_lists_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    status = {"ps-0": "Stopped", "ps-1": "Running", "ps-2": "Running"}
    instances = SimpleNamespace(get=lambda name: SimpleNamespace(name=name, status=status[name]))
    monkeypatch.setattr(bucket_guard, "client", lambda _: SimpleNamespace(instances=instances))
    monkeypatch.setattr(bucket_guard, "hosts_of", lambda _: list(status))
    assert bucket_guard.running_host("p").name == "ps-1"
    status |= {"ps-1": "Stopped", "ps-2": "Frozen"}
    assert bucket_guard.running_host("p") is None


def test_three_entries_of_a_folder_are_named() -> None:
    folders = {"models": ["b", "a"], "jobs": ["3", "1", "2"], "tmp": ["d", "c", "b", "a"], "empty": [], "cluster": ["x"]}
    assert bucket_guard.describe_content(folders) == "jobs (1, 2, 3), models (a, b), tmp (a, b, c and 1 more)"


def test_a_retained_bucket_is_reported_and_a_missing_one_needs_no_host(
    volume: Pools, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, retained = bucket_guard.create(props(retain=True))
    assert retained == props(retain=True)
    bucket_guard.delete("seal", retained)
    assert capsys.readouterr().err == (
        "the bucket is retained: volume bucket of storage pool fast, in LXD's project scaletier-local-abcdef; "
        "the next stack of this name reuses it\n"
    )
    volume.volume = None
    monkeypatch.setattr(bucket_guard, "running_host", lambda _: None)
    bucket_guard.delete("seal", props())
    bucket_guard.delete("seal", retained)
    assert capsys.readouterr().err == ""


def test_a_bucket_is_created_once_and_found_in_its_pool(pools: Pools) -> None:
    assert bucket.read("bucket", SIZED) is None
    assert bucket.pool_of(VOLUME["project"]) is None
    assert bucket.create(SIZED) == ("scaletier-local-abcdef/fast/bucket", SIZED)
    config = {bucket.ON_DESTROY: bucket.REMOVE}
    body = {"name": "bucket", "config": config, "content_type": "filesystem"}
    sized = {"config": {**config, "size": str(2**34)}, "description": "mine"}
    assert pools.requests == [("post", IN_PROJECT, body), ("put", IN_PROJECT, sized), ("count", "fast")]
    pools.requests.clear()
    bucket.create(SIZED)
    assert [request[0] for request in pools.requests] == ["put", "count"], "an interrupted run left it"
    assert bucket.pool_of(VOLUME["project"]) == "fast"
    pools.project = False
    assert bucket.pool_of(VOLUME["project"]) is None


def test_a_bucket_s_usage_is_unknown_if_its_pool_does_not_count(pools: Pools) -> None:
    assert bucket.used_bytes(SIZED) is None, "there is no bucket"
    pools.volume = {"config": {}, "description": ""}
    for usage, expected in (
        ({"usage": {"used": "7"}}, 7),
        ({"usage": {"used": 0}}, None),
        ({"usage": None}, None),
        (None, None),
        (refusal("no"), None),
    ):
        pools.usage = usage
        assert bucket.used_bytes(SIZED) == expected


def test_a_refused_look_at_a_bucket_is_an_error_and_does_not_count_as_none(pools: Pools) -> None:
    pools.volume = refusal("busy")
    for look in (bucket.create, bucket.used_bytes, lambda props: bucket.read("bucket", props)):
        with pytest.raises(LxdError, match=r"^volume bucket: busy$"):
            look(SIZED)
