"""The helpers of tests on hosts: stacks of killed runs, jobs that a test leaves, and the lock of the fake Google Cloud."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import waiting

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("e2e", "gcp_emulation")]

import leftovers
import run
import stacks
from machines import exclusive_lock
from stacks import Result, Stack


class FakeStack(Stack):
    """A stack whose commands are recorded; `failing` lists those that fail once, `active` the jobs after each `fab cancel`."""

    def __init__(self, *existing: str) -> None:
        super().__init__("mine", {})
        self.existing, self.failing, self.commands = list(existing), list[str](), list[str]()
        self.active: Iterator[list[str]] = iter(())

    def run(self, *command: str, timeout: float = 0) -> Result:
        text = " ".join(command).removesuffix(" --non-interactive")
        self.commands.append(text)
        if text in self.failing:
            self.failing.remove(text)
            return Result(1, "", f"{text} failed")
        return Result(0, json.dumps([{"name": name} for name in self.existing]) if "stack ls" in text else "", "")

    def active_jobs(self) -> list[str]:
        return next(self.active)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty checkout without hosts."""
    monkeypatch.delenv("PULUMI_BACKEND_URL", raising=False)
    monkeypatch.setattr(stacks, "ROOT", tmp_path)
    monkeypatch.setattr(stacks, "MARKS", tmp_path / "marks")
    monkeypatch.setattr(stacks, "claimed_projects", lambda name: [])
    monkeypatch.setattr(stacks, "stack_objects", lambda name: [])
    monkeypatch.setattr(stacks, "existing_names", lambda name: [])
    (tmp_path / "marks").mkdir()
    (tmp_path / "Pulumi.mine.yaml").touch()
    return tmp_path


LIST = "pulumi stack ls --json"
REMOVE = ["pulumi cancel --yes", "pulumi destroy --yes --skip-preview", "pulumi stack rm mine --yes"]


def test_a_stack_of_the_user_s_own_is_kept() -> None:
    stack = FakeStack("mine", "other")
    with pytest.raises(AssertionError, match="stack mine exists, and no test created it"):
        stack.clear()
    assert stack.commands == [LIST]
    assert stack.file.exists()


def test_a_stack_of_a_killed_run_is_removed() -> None:
    stack = FakeStack("mine")
    stack._mark.touch()
    stack.clear()
    assert stack.commands == [LIST, *REMOVE]
    assert (stack.file.exists(), stack._mark.exists()) == (False, False)


def test_stacks_that_cannot_be_removed_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cleared: list[str] = []
    monkeypatch.setenv("PULUMI_BACKEND_URL", "gs://team")
    monkeypatch.setattr(Stack, "clear", lambda self: cleared.append(self.name + self.env.get("PULUMI_BACKEND_URL", "")))
    assert (leftovers.main("story", "e2e"), cleared) == (0, ["story", "e2e"])
    for error, code, message in ((AssertionError("it is up"), 1, "error: it is up\n"), (KeyboardInterrupt(), 130, "")):
        monkeypatch.setattr(Stack, "clear", lambda self, error=error: (_ for _ in ()).throw(error))
        assert (leftovers.main("story"), capsys.readouterr().err) == (code, message)


def test_leftovers_are_found_by_the_code_of_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a shared .venv, `infra` would be that of another checkout, which knows other stacks."""
    monkeypatch.setattr(sys, "path", [])
    runpy.run_path(str(leftovers.__file__))
    assert sys.path[0] == str(run.ROOT)


def test_a_bucket_with_content_is_removed_too() -> None:
    stack = FakeStack("mine")
    stack._mark.touch()
    stack.failing = [REMOVE[1]]
    stack.clear()
    force = [
        "pulumi config set-all --plaintext forceDestroy=true --plaintext disruptJobs=true",
        "pulumi up --yes --skip-preview",
    ]
    assert stack.commands == [LIST, *REMOVE[:2], *force, *REMOVE[1:]]


def test_a_state_that_a_killed_pulumi_left_cut_off_is_restored(root: Path) -> None:
    (states := root / ".pulumi-state/.pulumi/stacks/scaletier").mkdir(parents=True)
    for name in ("mine", "mine2"):
        (states / f"{name}.json.attrs").touch()
    stack = FakeStack("mine")
    stack._mark.touch()
    stack.clear()
    assert stack.commands == [LIST, f"rm {states}/mine.json.attrs", *REMOVE]


@pytest.mark.parametrize("marked", [True, False])
def test_hosts_without_a_state_are_removed_if_a_test_created_them(monkeypatch: pytest.MonkeyPatch, marked: bool) -> None:
    hosts, volumes, stack = ["master-0"], list[tuple[Any, str]](), FakeStack("other")
    monkeypatch.setattr(stacks, "claimed_projects", lambda name: [f"{host} of {name}" for host in hosts])
    monkeypatch.setattr(stacks, "existing_names", lambda name: [SimpleNamespace(project=f"project of {name}", bucket="bucket")])
    monkeypatch.setattr(stacks.bucket, "pool_of", lambda project: "pool")
    monkeypatch.setattr(stacks.bucket, "set_on_destroy", lambda *volume: volumes.append(volume))
    monkeypatch.setattr(stacks.project, "delete", lambda name, _: hosts.clear())
    if marked:
        stack._mark.touch()
        stack.clear()
        assert not stack._mark.exists()
    else:
        with pytest.raises(AssertionError, match=r"no state here but these hosts: \['master-0 of mine'\]. `fab doctor` shows"):
            stack.clear()
    assert (hosts == [], stack.commands) == (marked, [LIST])
    volume = {"project": "project of mine", "pool": "pool", "name": "bucket"}
    assert volumes == ([(volume, stacks.bucket.REMOVE)] if marked else [])


def test_a_mark_is_there_from_before_the_stack_until_after_it() -> None:
    stack, marked = FakeStack(), dict[str, bool]()
    run = stack.run

    def observe(*command: str, timeout: float = 0) -> Result:
        marked[" ".join(command[:3])] = stack._mark.exists()
        return run(*command)

    stack.run = observe  # type: ignore[method-assign]
    with stack:
        assert stack._mark.exists()
    assert marked["pulumi stack init"]
    assert marked["pulumi stack rm"]
    assert not stack._mark.exists()


def test_what_was_there_before_a_stack_is_none_of_its_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bridges and processes of an LXD in a container may be in sight of this machine."""
    there = ["network stffffff"]
    monkeypatch.setattr(stacks, "stack_objects", lambda name: [*there])
    monkeypatch.setattr(waiting, "limit", lambda *_: 0.0)
    with FakeStack() as stack:
        stack.wait_for_leftovers()
        there.append("network staaaaaa")
        stack.wait_for_leftovers("network staaaaaa")
        with pytest.raises(AssertionError, match="network staaaaaa"):
            stack.wait_for_leftovers()


def test_a_renamed_stack_keeps_its_mark(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = FakeStack("mine")
    monkeypatch.setattr(Stack, "pulumi", lambda self, *arguments: "[]")
    stack._mark.touch()
    stack.rename("renamed")
    assert ([mark.name for mark in (root / "marks").iterdir()], stack.name) == (["renamed"], "renamed")


@pytest.mark.parametrize(
    ("active", "failing", "left"),
    [
        ([[]], [], []),
        ([["a", "b"], []], ["fab cancel b"], []),  # b has ended by itself
        ([["a", "b"], ["b"]], ["fab cancel b"], ["b: fab cancel b failed"]),
    ],
)
def test_jobs_that_cannot_be_cancelled_are_reported(active: list[list[str]], failing: list[str], left: list[str]) -> None:
    stack = FakeStack()
    stack.active, stack.failing = iter(active), list(failing)
    assert stack.cancel_jobs() == left
    assert stack.commands == [f"fab cancel {job}" for job in active[0]]


def test_a_second_checkout_waits_for_the_emulation(tmp_path: Path) -> None:
    lock, messages = tmp_path / "lock", list[str]()
    with ExitStack() as first:
        first.enter_context(exclusive_lock(messages.append, lock))

        def end_first(message: str) -> None:
            messages.append(message)
            first.close()

        with exclusive_lock(end_first, lock):
            assert messages == [f"waiting for another checkout's emulation of Google Cloud, which holds {lock}"]
