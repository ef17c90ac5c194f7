"""The states of a model's versions; no concurrent change is lost."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import limit

from jobs.folder_bucket import FolderBucket
from jobs.model_catalog import Catalog
from jobs.model_records import Model, ModelError, Version, VersionState, folder_of, path_of
from jobs.serialization import RecordError

READY, FAILED, CREATING = VersionState.READY, VersionState.FAILED, VersionState.CREATING
FILES = {"saved_model.pb": "00"}


def make_model(*names: str) -> Model:
    model = Model("mnist")
    for name in names:
        model = model.add_version(Version(name, token=name)).set_files(name, name, FILES, 3).mark_ready(name, name)
    return model


def test_the_first_version_that_is_ready_is_the_default() -> None:
    model = Model("mnist").add_version(Version("v1", token="a"))
    assert (model.default, model.version("v1").loadable) == ("", False), "its files are being uploaded"
    assert model.version("v1").size == 0
    for change in (lambda: model.redeploy("v1", "b"), lambda: model.undeploy("v1")):
        with pytest.raises(ModelError, match="version v1 of model mnist is CREATING: "):
            change()
    assert [v.name for v in model.add_version(Version("v2", token="a")).versions] == ["v1", "v2"]
    model = model.set_files("v1", "a", FILES, 3)
    assert (model.default, model.version("v1").loadable) == ("", True), "servers try it"
    model = model.mark_ready("v1", "a")
    assert (model.default, model.version("v1").state) == ("v1", "READY")
    assert model.add_version(Version("v2", token="b")).set_files("v2", "b", FILES, 3).mark_ready("v2", "b").default == "v1"


def test_an_undeployed_version_has_no_error() -> None:
    model = (
        Model("mnist").add_version(Version("v1", token="a")).set_files("v1", "a", FILES, 3).mark_failed("v1", "a", "damaged")
    )
    assert (model.version("v1").errorMessage, model.undeploy("v1").version("v1").errorMessage) == ("damaged", "")


def test_a_failed_version_is_never_the_default() -> None:
    model = (
        Model("mnist")
        .add_version(Version("v1", token="a"))
        .set_files("v1", "a", FILES, 3)
        .mark_failed("v1", "a", "no SavedModel")
    )
    assert (model.default, model.version("v1").loadable, model.version("v1").errorMessage) == ("", False, "no SavedModel")
    with pytest.raises(
        ModelError, match="only a READY version can be the default; v1 of model mnist is FAILED, READY are none"
    ):
        model.with_default("v1")
    with pytest.raises(ModelError, match="v1 of model mnist is FAILED by now: another command changed it"):
        model.mark_ready("v1", "a")
    creating = Model("mnist").add_version(Version("v1", token="a"))
    for change in (lambda: creating.set_files("v1", "b", FILES, 3), lambda: creating.mark_ready("v1", "b")):
        with pytest.raises(ModelError, match="is CREATING by now: another command changed it"):
            change()


def test_a_name_is_used_once() -> None:
    model = make_model("v1", "v2").delete("v2")
    for name, was in (("v1", "it is READY"), ("v2", "it was deleted")):
        with pytest.raises(
            ModelError, match=rf"version {name} of model mnist was made at .* \({was}\), and a name is used once"
        ):
            model.add_version(Version(name, token="another"))
    assert [v.name for v in model.existing_versions] == ["v1"]
    with pytest.raises(ModelError, match=r"model mnist has no version 'v2'; there are v1$"):
        model.version("v2")
    with pytest.raises(ModelError, match=r"model mnist has no version 'v1'; there are none$"):
        Model("mnist").version("v1")
    creating = Model("mnist").add_version(Version("v1", token="a"))
    for model in (creating, creating.set_files("v1", "a", FILES, 3).mark_failed("v1", "a", "no SavedModel")):
        with pytest.raises(ModelError, match="and a name is used once: take another"):
            model.add_version(Version("v1", token="b"))


def test_a_deleted_version_keeps_its_name_alone() -> None:
    version = replace(make_model("v1").version("v1"), manifest={"jobId": "job01"})
    deleted = Model("mnist", versions=[version]).delete("v1").versions[0]
    assert deleted == replace(version, state=VersionState.DELETED, files={}, size=0, manifest={})


def test_a_failed_deployment_frees_the_name() -> None:
    model = Model("mnist").add_version(Version("v1", token="a"))
    assert model.add_version(Version("v1", token="a")) == model, "the same change again has no effect"
    model = model.mark_failed("v1", "a", "interrupted").add_version(Version("v1", token="b"))
    assert [(v.name, v.state, v.token) for v in model.versions] == [("v1", "CREATING", "b")]


def test_the_default_is_deleted_last() -> None:
    model = make_model("v1", "v2")
    for change in (model.undeploy, model.delete):
        with pytest.raises(ModelError, match="version v1 is the default of model mnist: fab set-default mnist v2 first"):
            change("v1")
    model = model.with_default("v2").undeploy("v1")
    assert (model.default, model.version("v1").state, model.version("v1").loadable) == ("v2", "UNDEPLOYED", False)
    assert model.delete("v2").default == "", "no other version is served"
    redeployed = model.redeploy("v1", "token")
    assert (redeployed.version("v1").state, redeployed.version("v1").files, redeployed.version("v1").token) == (
        "CREATING",
        FILES,
        "token",
    )
    assert redeployed.mark_ready("v1", "token").default == "v2"
    assert redeployed.mark_failed("v1", "token", "why").redeploy("v1", "new").version("v1").state is CREATING, (
        "a failed version is retried"
    )
    assert redeployed.redeploy("v1", "token") == redeployed, "the same change again has no effect"
    undeployed = "only a READY version can be the default; v1 of model mnist is UNDEPLOYED, READY are v2"
    with pytest.raises(ModelError, match=f"^{undeployed}$"):
        model.with_default("v1")
    with pytest.raises(ModelError, match="only a version that has files and is not served can be redeployed"):
        model.redeploy("v2", "token")


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(
            ["add_version", "set_files", "mark_ready", "mark_failed", "with_default", "undeploy", "delete", "redeploy"]
        ),
        st.sampled_from(["v1", "v2", "v3"]),
    ),
    max_size=40,
)


@given(CHANGES)
def test_after_any_changes_the_default_is_ready_and_names_are_unique(changes: list[tuple[str, str]]) -> None:
    model = Model("mnist")
    more = {"set_files": ("t", FILES, 3), "mark_ready": ("t",), "mark_failed": ("t", "why"), "redeploy": ("t",)}
    for number, (change, name) in enumerate(changes):
        try:
            argument = Version(name, token=str(number) if number % 2 else "t") if change == "add_version" else name
            model = getattr(model, change)(argument, *more.get(change, ()))
        except ModelError:
            continue
        names = [version.name for version in model.versions]
        assert len(names) == len(set(names))
        assert not model.default or model.version(model.default).state is READY
        assert Model.from_json(model.to_json()) == model


def test_a_catalog_lists_models_and_invalid_records(tmp_path: Path) -> None:
    catalog = Catalog(FolderBucket(tmp_path))
    assert catalog.models() == ([], [])
    with pytest.raises(ModelError, match="there is no model 'mnist'"):
        catalog.change("mnist", lambda model: model.with_default("v1"))
    mnist = catalog.change("mnist", lambda model: model.add_version(Version("v1", token="a")), create=True)
    assert (catalog.model("mnist"), catalog.models()) == (mnist, ([mnist], []))
    assert (path_of("mnist"), folder_of("mnist", "v1")) == ("models/mnist/model.json", "models/mnist/versions/v1")
    (tmp_path / "models/bad").mkdir()
    (tmp_path / "models/bad/model.json").write_text("{")
    (tmp_path / "models/odd").mkdir()
    odd = Model("odd", versions=[Version("../../x", token="a")])
    (tmp_path / "models/odd/model.json").write_bytes(odd.to_json())
    (tmp_path / "models/token").mkdir()
    token = Model("token", versions=[Version("v1", token="../../x")])
    (tmp_path / "models/token/model.json").write_bytes(token.to_json())
    (tmp_path / "models/other").mkdir()
    (tmp_path / "models/other/model.json").write_bytes(mnist.to_json())
    models, invalid = catalog.models()
    assert (models, [line.partition(":")[0] for line in invalid]) == ([mnist], ["bad", "odd", "other", "token"])
    with pytest.raises(RecordError, match=r"model\.json says that it is that of model 'mnist'"):
        catalog.model("other")


def test_of_twenty_concurrent_deployments_one_gets_each_name(tmp_path: Path) -> None:
    winners: list[str] = []

    def deploy(number: int) -> None:
        name, token = f"v{number % 10}", str(number)
        try:
            Catalog(FolderBucket(tmp_path, limit())).change(
                "mnist", lambda model: model.add_version(Version(name, token=token)), create=True
            )
            Catalog(FolderBucket(tmp_path, limit())).change(
                "mnist", lambda model: model.set_files(name, token, FILES, 3).mark_ready(name, token)
            )
        except ModelError:
            return
        winners.append(name)

    threads = [threading.Thread(target=deploy, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model = Catalog(FolderBucket(tmp_path)).model("mnist")
    assert sorted(winners) == sorted(version.name for version in model.versions) == [f"v{number}" for number in range(10)]
    assert {version.state for version in model.versions} == {READY}
    assert model.default in winners
