"""Check a job until a target: the environment of its processes, their output, and when they are late."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import limit

from ops.errors import UsageError
from ops.plan import profile, runs
from ops.plan.time_to_target import MetricTarget


def make_setup(target: MetricTarget, *args: str, servers: bool = False) -> runs.RunSetup:
    return runs.RunSetup(target, ["mine", *args], dict(os.environ), servers, limit())


def test_all_reduce_has_no_servers_and_each_process_its_own_port(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: dict[str, socket.socket] = {}
    create_server = socket.create_server

    def create_and_record(address: tuple[str, int]) -> socket.socket:
        assert address == ("127.0.0.1", 0)
        server = create_server(address)
        servers[f"127.0.0.1:{server.getsockname()[1]}"] = server
        return server

    monkeypatch.setattr(socket, "create_server", create_and_record)
    starts = runs.replica_commands(make_setup(MetricTarget("loss", 1)), 4)
    assert [start.name for start in starts] == ["master/0", "worker/0", "worker/1", "worker/2"]
    configs = [json.loads(start.env["TF_CONFIG"]) for start in starts]
    (cluster,) = {json.dumps(config["cluster"]) for config in configs}
    addresses = [address for role_addresses in json.loads(cluster).values() for address in role_addresses]
    assert len(set(addresses)) == 4
    assert [config["task"] for config in configs][1:3] == [{"type": "worker", "index": 0}, {"type": "worker", "index": 1}]
    assert {*addresses} == servers.keys()
    assert all(server.fileno() == -1 for server in servers.values()), "the ports are free again"


def test_the_last_line_of_an_ended_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_DRAIN_SECONDS", limit())
    ended = threading.Event()

    def read() -> Iterator[bytes]:
        ended.wait()
        yield from (b"\n", b"bad \xff\n")

    process: Any = SimpleNamespace(wait=ended.set, stdout=read(), returncode=3)
    group = profile.ProcessGroup(["master/0"], [process])
    assert list(group.lines(lambda: time.monotonic() + limit())) == ["", "bad \ufffd"]
    assert (group.failed, group.last_lines) == (("master/0", 3), {"master/0": "bad \ufffd"})


@pytest.mark.parametrize(
    ("replicas", "lines", "late"),
    [
        (1, ["Train [master/0], step 7: x (0.1 sec) y"], 0),
        (2, [], 0),
        (2, ["Train [master/0], step 2: x (0.1 sec) y", "Train [worker/0], step 7: x (0.1 sec) y"], 7),
        (2, ["Train [master/0], step 2: x (0.1 sec) y", "Train [master/0], step 9: x (0.1 sec) y"], 2),
        (2, [f"Train [master/0], step {'9' * 5000}: x (0.1 sec) y"], 0),
        (3, ["Train [worker/1], step 4: x (0.1 sec) y", "Train [worker/0], step 3: x (0.1 sec) y"], 4),
    ],
)
def test_the_last_replica_is_late_by_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int, lines: list[str], late: int
) -> None:
    evaluations = [f"Eval, step {step}: accuracy: {step / 100}" for step in (10, 20)]
    group = SimpleNamespace(lines=lambda _: iter([*lines, *evaluations, "too late"]))
    monkeypatch.setattr(runs, "start_processes", lambda *_: nullcontext(group))
    run_result = runs.run(make_setup(MetricTarget("accuracy", 0.15)), replicas, tmp_path)
    assert (run_result.replicas, run_result.crossing.step, run_result.late_steps) == (replicas, pytest.approx(15), late)


def test_an_eval_line_without_the_metric_is_skipped_unless_it_is_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "Eval, step 10: loss: 0.9, accuracy: 0.1",
        "Eval, step 20: loss: nan, accuracy: nan",
        "Final metrics after 25 steps, loss: 0.7",
        "Eval, step 30: loss: 0.5, accuracy: 0.3",
    ]
    group = SimpleNamespace(lines=lambda _: iter(lines), failed=None)
    monkeypatch.setattr(runs, "start_processes", lambda *_: nullcontext(group))
    run_result = runs.run(make_setup(MetricTarget("accuracy", 0.2)), 1, tmp_path)
    assert (run_result.crossing.before.step, run_result.crossing.after.step) == (10, 30)
    del lines[0]
    with pytest.raises(UsageError, match=r"the Eval lines of mine have no 'accuracy'; they have none$"):
        runs.run(make_setup(MetricTarget("accuracy", 0.2)), 1, tmp_path)


def test_the_environment_of_each_replica() -> None:
    setup = make_setup(MetricTarget("loss", 1), "--a", servers=True)
    starts = runs.replica_commands(setup, 3)
    tasks = [json.loads(start.env["TF_CONFIG"])["task"] for start in starts]
    assert [(start.name, start.env["TYPE"], start.env["INDEX"], task) for start, task in zip(starts, tasks, strict=True)] == [
        ("master/0", "master", "0", {"type": "chief", "index": 0}),
        ("worker/0", "worker", "0", {"type": "worker", "index": 0}),
        ("worker/1", "worker", "1", {"type": "worker", "index": 1}),
        ("ps/0", "ps", "0", {"type": "ps", "index": 0}),
    ]
    assert [start.argv for start in starts] == [["mine", "--a"]] * 4
    args = "--log=${JOB_DIR}/${TYPE}-$INDEX", "$$TYPE", "${HOME}"
    setup = replace(setup, argv=["mine", *args], env={**setup.env, "JOB_DIR": "/out"})
    of_replicas = [start.argv for start in runs.replica_commands(setup, 2)]
    assert of_replicas == [
        ["mine", f"--log=/out/{replica}", "$TYPE", "${HOME}"] for replica in ("master-0", "worker-0", "ps-0")
    ]
    setup = replace(setup, env={**setup.env, "FILE": "${JOB_DIR}/$INDEX", "INHERITED": "$JOB_DIR"}, job_variables=["FILE"])
    starts = runs.replica_commands(setup, 3)
    assert [start.env["FILE"] for start in starts] == ["/out/0", "/out/0", "/out/1", "/out/0"]
    assert {start.env["INHERITED"] for start in starts} == {"$JOB_DIR"}
    (alone,) = runs.replica_commands(setup, 1)
    assert (alone.env["FILE"], alone.env["INHERITED"]) == ("/out/0", "$JOB_DIR")
    assert alone.argv == of_replicas[0]
    assert (alone.name, alone.env["TYPE"], alone.env["INDEX"], "TF_CONFIG" in alone.env) == ("master/0", "master", "0", False)
    assert alone.env["PATH"] == os.environ["PATH"]
