"""A bucket with content is not destroyed; LXD is a fake here, and real in tests/e2e/test_keys.py."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from pylxd.exceptions import NotFound

from infra.dynamic import ModuleProvider
from infra.lxd import bucket, project, seal
from infra.lxd.api import LxdError, number

VOLUME = {"project": "scaletier-local-abcdef", "pool": "scaletier", "name": "bucket"}
SIZED = {**VOLUME, "size": 2**34}


class Volume:
    """A storage volume, by LXD's API; what became of it."""

    def __init__(self) -> None:
        self.config: dict[str, str] | None = None

    def get(self, params: Any) -> Any:
        assert params == {"project": VOLUME["project"]}
        if self.config is None:
            raise NotFound(SimpleNamespace(status_code=404, text=""))
        return SimpleNamespace(json=lambda: {"metadata": {"config": self.config, "description": ""}})

    def put(self, params: Any, json: Any) -> None:
        self.config = json["config"]

    def delete(self, params: Any) -> None:
        self.config = None


class Custom:
    """The custom volumes of a pool, of which there is one."""

    def __init__(self, volume: Volume) -> None:
        self.volume = volume

    def __getitem__(self, name: str) -> Volume:
        return self.volume

    def post(self, json: Any, params: Any) -> None:
        self.volume.config = json["config"]


@pytest.fixture
def files() -> dict[str, list[str]]:
    """Return the bucket's folders, and the content of each."""
    return {
        "/bucket": ["cluster", "jobs", "models"],
        "/bucket/cluster": ["queue.json"],
        "/bucket/jobs": [],
        "/bucket/models": [],
    }


@pytest.fixture
def volume(monkeypatch: pytest.MonkeyPatch, files: dict[str, list[str]]) -> Volume:
    found = Volume()
    api = SimpleNamespace(storage_pools={"scaletier": SimpleNamespace(volumes=SimpleNamespace(custom=Custom(found)))})
    lxd = SimpleNamespace(
        api=api,
        projects=SimpleNamespace(exists=lambda _: True),
        storage_pools=SimpleNamespace(all=lambda: [SimpleNamespace(name="scaletier")]),
    )
    monkeypatch.setattr(bucket, "client", lambda *_: lxd)
    monkeypatch.setattr(bucket, "purge", lambda _: None)

    def get(params: dict[str, str]) -> Any:
        content = json.dumps({"metadata": files[params["path"]]}).encode()
        return SimpleNamespace(headers={"X-LXD-type": "directory"}, content=content)

    running = SimpleNamespace(api=SimpleNamespace(files=SimpleNamespace(get=get)))
    monkeypatch.setattr(seal, "running", lambda _: running)
    bucket.create(dict(SIZED))
    return found


def props(**wish: bool) -> dict[str, Any]:
    return {**VOLUME, "retain": False, "force": False, **wish}


def test_a_bucket_that_holds_something_stays_and_says_what_and_what_to_do(volume: Volume, files: dict[str, list[str]]) -> None:
    seal.create(props())
    files["/bucket/jobs"] = ["job4", "job1", "job3", "job2"]
    files["/bucket/models"] = ["mnist"]
    with pytest.raises(LxdError) as refused:
        seal.delete("seal", props())
    said = str(refused.value)
    assert said.startswith(
        "the bucket holds jobs (job1, job2, job3 and 1 more), models (mnist), so nothing is destroyed: `fab get`"
    )
    assert all(f"`pulumi config set {key} true`" in said for key in ("retainBucket", "forceDestroy"))
    assert "\n" not in said
    with pytest.raises(LxdError, match="may hold something, so it stays"):
        bucket.delete("bucket", dict(VOLUME))
    assert volume.config is not None


def test_an_empty_bucket_and_an_unused_one_are_deleted(volume: Volume) -> None:
    seal.create(props())
    seal.delete("seal", props())
    bucket.delete("bucket", dict(VOLUME))
    assert volume.config is None
    bucket.delete("bucket", dict(VOLUME))
    bucket.create(dict(SIZED))
    bucket.delete("bucket", dict(VOLUME))
    assert volume.config is None, "an up that was killed before the stack was whole"


def test_without_a_running_host_nothing_is_destroyed(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    seal.create(props())
    monkeypatch.setattr(seal, "running", lambda _: None)
    with pytest.raises(
        LxdError, match="no host runs, so nobody can list the bucket, and nothing is destroyed: `pulumi up` first"
    ):
        seal.delete("seal", props())
    with pytest.raises(LxdError):
        bucket.delete("bucket", dict(VOLUME))
    assert volume.config is not None


@pytest.mark.parametrize(
    ("wish", "stays"), [({"force": True}, False), ({"retain": True}, True), ({"force": True, "retain": True}, True)]
)
def test_what_the_configuration_says_is_done_unseen(
    volume: Volume, files: dict[str, list[str]], wish: dict[str, bool], stays: bool
) -> None:
    seal.create(props())
    files["/bucket/jobs"] = ["job1"]
    ModuleProvider(seal.__name__).update("seal", props(), props(**wish))
    seal.delete("seal", props(**wish))
    bucket.delete("bucket", dict(VOLUME))
    assert (volume.config is not None) is stays


def test_who_takes_the_word_back_is_guarded_again(volume: Volume, files: dict[str, list[str]]) -> None:
    seal.create(props(force=True))
    ModuleProvider(seal.__name__).update("seal", props(force=True), props())
    with pytest.raises(LxdError):
        bucket.delete("bucket", dict(VOLUME))


def test_hosts_stay_with_a_bucket_that_stays(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[str] = []
    for module in (bucket, project):
        monkeypatch.setattr(module, "purge", gone.append)
    monkeypatch.setattr(project, "client", bucket.client)
    volume.config = {}
    with pytest.raises(LxdError, match="may hold something, so it stays"):
        bucket.delete("bucket", dict(VOLUME))
    with pytest.raises(LxdError, match="may hold something, so it stays"):
        project.delete(VOLUME["project"], {})
    assert gone == []
    volume.config = {bucket.MARK: bucket.REMOVE}
    bucket.delete("bucket", dict(VOLUME))
    assert gone == [VOLUME["project"]]


def test_a_volume_that_was_removed_by_hand_is_one_line(volume: Volume) -> None:
    volume.config = None
    with pytest.raises(LxdError, match="volume bucket is not there any more: `pulumi refresh`"):
        seal.create(props())


def test_a_limit_that_was_set_by_hand_is_a_change_and_no_error() -> None:
    assert [number(text) for text in ("2", "2147483648", "2GiB", "0-1", "50%", "")] == [
        2,
        2**31,
        "2GiB",
        "0-1",
        "50%",
        "",
    ]


def test_what_the_bucket_may_hold_changes_in_place_and_the_mark_stays(volume: Volume) -> None:
    assert volume.config == {bucket.MARK: bucket.REMOVE, "size": str(2**34)}
    seal.create(props())
    assert volume.config == {"size": str(2**34)}
    assert bucket.read("bucket", dict(SIZED)) == SIZED
    volume.config["size"] = "1GiB"
    found = bucket.read("bucket", dict(SIZED))
    assert found == {**SIZED, "size": "1GiB"}, "and so the next update puts it back"
    assert bucket.update("bucket", found, dict(SIZED)) == SIZED
    assert volume.config["size"] == str(2**34)
    bucket.update("bucket", dict(SIZED), {**SIZED, "size": 0})
    assert "size" not in volume.config
    assert bucket.read("bucket", dict(SIZED)) == {**SIZED, "size": 0}
