"""Detection of a trainer that ran out of memory: by the kernel's files, and in a job's message."""

from __future__ import annotations

from pathlib import Path

import pytest

from hosts.agent import cgroup, trainer
from hosts.agent.cgroup import memory_events, oom_kills
from hosts.agent.log import Log
from hosts.agent.process import ProcessRun


@pytest.mark.parametrize(
    ("own", "file", "text"),
    [
        ("0::/unit\n", "unit/memory.events", "low 0\noom 7\noom_kill 3\noom_group_kill 9\n"),
        ("9:name=systemd:/unit\n4:memory:/unit\n0::/unit\n", "memory/unit/memory.oom_control", "under_oom 0\noom_kill 3\n"),
    ],
)
def test_kills_are_counted_where_the_unit_is(tmp_path: Path, own: str, file: str, text: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    (tmp_path / "cgroup").write_text(own)
    assert oom_kills(tmp_path / "cgroup", tmp_path) == 3


@pytest.mark.parametrize("own", ["1:cpu:/a\n", "0::/gone\n", "0::/empty\n", ""])
def test_nothing_is_counted_where_the_kernel_does_not_tell(tmp_path: Path, own: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "memory.events").write_text("")
    (tmp_path / "cgroup").write_text(own)
    assert oom_kills(tmp_path / "cgroup", tmp_path) == 0
    assert oom_kills(tmp_path / "nothing", tmp_path) == 0


def test_kills_before_a_trainer_are_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = 2
    monkeypatch.setattr(cgroup, "oom_kills", lambda: kills)
    started = trainer.Trainer(ProcessRun("job01", ["true"], tmp_path, {}), Log(tmp_path, "job01", "master-0"))
    while started.poll() is None:
        pass
    assert not started.out_of_memory
    kills = 3
    assert started.out_of_memory


@pytest.mark.parametrize(
    ("own", "folder", "file"),
    [("0::/slice/unit\n", "slice", "memory.events"), ("4:memory:/slice/unit\n", "memory/slice", "memory.oom_control")],
)
def test_all_that_the_kernel_counts_here_and_one_above(tmp_path: Path, own: str, folder: str, file: str) -> None:
    (tmp_path / folder / "unit").mkdir(parents=True)
    (tmp_path / folder / "unit" / file).write_text("oom 7\noom_kill 3\n")
    (tmp_path / folder / file).write_text("oom_kill 4\n")
    (tmp_path / "cgroup").write_text(own)
    above = f"/{folder}"
    assert memory_events(tmp_path / "cgroup", tmp_path) == {f"{above}/unit": {"oom": 7, "oom_kill": 3}, above: {"oom_kill": 4}}
    assert memory_events(tmp_path / "gone", tmp_path) == {}
