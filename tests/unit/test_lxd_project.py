"""The LXD project of a stack: its labels, and all that goes with it; LXD is a fake here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pylxd.exceptions import LXDAPIException, NotFound

from infra.lxd import project
from infra.lxd.api import LxdError
from infra.lxd.project import StackProject

NAME = "scaletier-local-abcdef"
PROPS = {"name": NAME, "stack": "local", "checkout": "/me", "backend": "file:///me/state"}
LABELS = {"user.scaletier.stack": "local", "user.scaletier.checkout": "/me", "user.scaletier.backend": "file:///me/state"}
FEATURES = {"features.images": "false", "features.profiles": "true", "features.storage.volumes": "true"}


class Projects:
    """LXD's projects by name; their deletion may fail."""

    def __init__(self) -> None:
        self.configs: dict[str, dict[str, str]] = {}
        self.refusal: Exception | None = None

    def exists(self, name: str) -> bool:
        return name in self.configs

    def create(self, name: str, description: str, config: dict[str, str]) -> None:
        assert (name in self.configs, description) == (False, "A scaletier cluster")
        self.configs[name] = config

    def get(self, name: str) -> SimpleNamespace:
        found = SimpleNamespace(config=self.configs[name])

        def save(wait: bool) -> None:
            assert wait
            self.configs[name] = found.config

        def delete(wait: bool) -> None:
            assert wait
            if self.refusal:
                raise self.refusal
            del self.configs[name]

        found.save, found.delete = save, delete
        return found


@pytest.fixture
def projects(monkeypatch: pytest.MonkeyPatch) -> Projects:
    projects = Projects()

    def get(params: dict[str, int]) -> Any:
        assert params == {"recursion": 1}
        listed = [{"name": name, "config": config} for name, config in projects.configs.items()]
        return SimpleNamespace(json=lambda: {"metadata": listed})

    api = SimpleNamespace(projects=SimpleNamespace(get=get))
    monkeypatch.setattr(project, "client", lambda: SimpleNamespace(projects=projects, api=api))
    return projects


def test_a_project_has_its_labels_which_change_in_place(projects: Projects) -> None:
    assert project.read(NAME, PROPS) is None
    assert project.create(PROPS) == (NAME, PROPS)
    assert projects.configs == {NAME: {**FEATURES, **LABELS}}
    assert project.read(NAME, PROPS) == PROPS
    projects.configs[NAME] |= {"user.scaletier.kept": "true", "user.mine": "x"}
    renamed = {**PROPS, "stack": "prod"}
    assert project.create(renamed) == (NAME, renamed), "one that an interrupted run or a destroy left"
    assert projects.configs == {NAME: {**FEATURES, **LABELS, "user.scaletier.stack": "prod", "user.mine": "x"}}
    assert project.update(NAME, renamed, PROPS) == PROPS
    assert projects.configs[NAME]["user.scaletier.stack"] == "local"


def test_stack_projects_are_those_of_all_stacks_and_no_others(projects: Projects) -> None:
    projects.configs = {
        "default": {},
        NAME: LABELS,
        "scaletier-old-111111": {"user.scaletier.kept": "true"},
        "scaletier-odd-222222": {"user.scaletier.kept": "false"},
    }
    assert project.stack_projects() == [
        StackProject(NAME, "local", "/me", False, "file:///me/state"),
        StackProject("scaletier-old-111111", "", "", True),
        StackProject("scaletier-odd-222222", "", "", False),
    ]


class Rest:
    """All else that a project's deletion removes: its bucket in pool `fast`, hosts, bridge and firewall."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
        self.calls: list[Any] = []
        self.pool: str | None = "fast"

        def delete_bucket(name: str, props: Any) -> None:
            self.calls.append((name, props))
            self.pool = "fast" if keep else None

        monkeypatch.setattr(project.bucket, "pool_of", lambda name: self.pool)
        monkeypatch.setattr(project.bucket, "delete", delete_bucket)
        monkeypatch.setattr(project, "purge", lambda name: self.calls.append(("hosts", name)))
        monkeypatch.setattr(project.network, "delete", lambda name, props: self.calls.append(("network", name)))
        monkeypatch.setattr(project.firewall, "delete", lambda name, props: self.calls.append(("firewall", name)))


@pytest.mark.parametrize("keep", [False, True])
def test_a_project_goes_with_all_that_is_in_it_unless_its_bucket_stays(
    projects: Projects, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    rest = Rest(monkeypatch, keep)
    projects.configs = {NAME: dict(LABELS)}
    project.delete(NAME, PROPS)
    assert rest.calls == [
        ("bucket", {"project": NAME, "pool": "fast", "name": "bucket"}),
        ("hosts", NAME),
        ("network", "stabcdef"),
        ("firewall", "scaletier_abcdef"),
    ]
    assert projects.configs == ({NAME: {**LABELS, "user.scaletier.kept": "true"}} if keep else {})


def test_a_project_that_is_gone_is_no_error_and_one_in_use_is(projects: Projects, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = Rest(monkeypatch, False)
    rest.pool = None
    projects.configs = {NAME: {}}
    projects.refusal = NotFound(SimpleNamespace(status_code=404, text=""))
    project.delete(NAME, PROPS)
    assert [call[0] for call in rest.calls] == ["hosts", "network", "firewall"], "there is no bucket to delete"
    answer = SimpleNamespace(status_code=400, text="", json=lambda: {"error": "Only empty projects can be removed"})
    projects.refusal = LXDAPIException(answer)
    with pytest.raises(LxdError, match=f"^project {NAME}: Only empty projects can be removed$"):
        project.delete(NAME, PROPS)
