"""The trainer's parsing of TF_CONFIG."""

from __future__ import annotations

import json
import socket

import pytest

from scaletier.flags import STRATEGIES
from scaletier.tf_config import Cluster, ClusterError, _accepts, await_peers, parse, strategy_problem

JOBS = {"ps": ["a:2222"], "worker": ["b:2222", "c:2222"]}


def config(task_type: str, index: int = 0, chief: str = "chief") -> str:
    return json.dumps({"cluster": {**JOBS, chief: ["d:2222"]}, "task": {"type": task_type, "index": index}})


@pytest.mark.parametrize("text", [None, "", "{}", '{"cluster": {}}', '{"cluster": null, "task": null}'])
def test_without_a_cluster_there_is_one_process(text: str | None) -> None:
    assert parse(text) == Cluster("chief", 0)
    assert not parse(text).jobs


@pytest.mark.parametrize("key", ["chief", "master"])
def test_a_chief_alone_is_one_process(key: str) -> None:
    assert parse(json.dumps({"cluster": {key: ["d:2222"]}, "task": {"type": key, "index": 0}})) == Cluster("chief", 0)


@pytest.mark.parametrize("key", ["chief", "master"])
def test_the_chief_may_be_called_master(key: str) -> None:
    cluster = parse(config(key, chief=key))
    assert (cluster.task_type, cluster.address) == ("chief", "d:2222")
    assert cluster.jobs["chief"] == ("d:2222",)


def test_a_worker_knows_its_address_and_its_peers() -> None:
    cluster = parse(config("worker", 1))
    assert cluster.address == "c:2222"
    assert cluster.name == "worker/1"
    assert cluster.peers("ps", "worker") == {"ps/0": "a:2222", "worker/0": "b:2222", "worker/1": "c:2222"}
    assert (Cluster().name, Cluster().peers("ps")) == ("chief/0", {})


def test_the_evaluator_is_outside_the_cluster() -> None:
    assert parse(config("evaluator")) == Cluster("evaluator", 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not a JSON object"),
        ("[]", "not a JSON object"),
        ('{"task": {"type": "ps", "index": "x"}}', "not a JSON object"),
        (config("gpu"), "task type 'gpu' is unknown; valid are chief, master, worker, ps, evaluator"),
        (config("worker", 2), "no worker 2"),
        ('{"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": 0}}', "no chief"),
        ('{"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": "ps", "index": 0}}', "no chief"),
    ],
)
def test_an_invalid_tf_config_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_peers_are_awaited_until_they_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"a:2222": iter([False, True]), "b:2222": iter([False, False, True])}
    monkeypatch.setattr("scaletier.tf_config._accepts", lambda address: next(answers[address]))
    monkeypatch.setattr("time.sleep", lambda _: None)
    reports: list[str] = []
    monkeypatch.setattr("time.monotonic", iter(range(0, 100, 4)).__next__)
    await_peers({"ps/0": "a:2222", "worker/0": "b:2222"}, reports.append)
    assert reports == ["Waiting for worker/0"]


def test_a_peer_that_listens_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[object] = []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        addresses.append(address)
        if address[1] == 2223:
            raise ConnectionRefusedError
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)
    assert [_accepts(address) for address in ("10.0.0.2:2222", "[fd00::2]:2222", "10.0.0.2:2223")] == [True, True, False]
    assert addresses == [("10.0.0.2", 2222), ("fd00::2", 2222), ("10.0.0.2", 2223)]


@pytest.mark.parametrize(
    ("jobs", "strategies"),
    [
        ("chief", {"async"}),
        ("chief ps", set()),
        ("chief worker", {"sync", "model-parallel"}),
        ("chief ps worker", {"async", "sync", "model-parallel"}),
    ],
)
def test_a_cluster_supports_these_strategies(jobs: str, strategies: set[str]) -> None:
    cluster = Cluster("chief", 0, dict.fromkeys(jobs.split(), ("a:2222",)))
    assert {strategy for strategy in STRATEGIES if strategy_problem(cluster, strategy) is None} == strategies
    for strategy in {*STRATEGIES} - strategies:
        assert f"--strategy {strategy} needs a " in (strategy_problem(cluster, strategy) or "")
