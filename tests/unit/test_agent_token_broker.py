"""The bucket access of trainers on Google's hosts, and of programs that fab runs for a job."""

from __future__ import annotations

import re
import select
import socket
import sys
import threading
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import limit, wait_for

from hosts.agent import token_broker
from hosts.agent.token_broker import PORT, Broker, main
from jobs.records import Plan, Task
from jobs.token_access import MOST_BUCKETS, Access, access, boundary

_ASK = f"""
import json, sys, urllib.request
url = "http://127.0.0.1:" + sys.argv[1] + "/computeMetadata/v1/instance/service-accounts/default/token"
request = urllib.request.Request(url, headers={{"Metadata-Flavor": "Google"}})
answer = json.load(urllib.request.urlopen(request, timeout={limit()}))
assert answer["access_token"] == "narrow", answer
sys.exit(3)
"""
PLAN = Plan("job02", ["master-0"], "trainer.task", [], {})
TASK = Task(tfConfig="{}", environment={"JOB_DIR": "gs://mine/jobs/job02/output", "SCALETIER_DATA": "gs://mine/data"})


def access_of(*args: str, **environment: str) -> Access:
    task = replace(TASK, environment=TASK.environment | environment)
    return access(replace(PLAN, args=list(args)), task, "mine")


def test_a_job_writes_its_output_and_reads_the_stacks_data() -> None:
    assert access_of() == Access("mine", ("jobs/job02/output",), ("data",))


def test_a_job_reads_the_output_it_continues_and_uses_named_buckets() -> None:
    granted = access_of("--resume=gs://mine/jobs/job01/output", "gs://theirs/set/a.csv,gs://more", OUT="gs://results/x")
    assert granted.writes == ("jobs/job02/output",)
    assert "jobs/job01/output" in granted.reads
    assert granted.others == ("theirs", "more", "results")
    assert access_of("gs://mine").reads == ("data",), "a job may not read the whole bucket"


def test_a_job_reads_the_folder_of_files_that_a_pattern_matches() -> None:
    for pattern, folder in {
        "in/part-*.csv": "in",
        "in/[ab]/x?.csv": "in",
        "jobs/job01/output/*/x": "jobs/job01/output",
        "models/m/*": "models/m",
    }.items():
        assert access_of("--train-files", f"gs://mine/{pattern}").reads == ("data", folder)
    for pattern in ("*.csv", "i*/x.csv", "jobs/*/output/x", "jobs/job01/*", "models/*", "cluster/*", "data/part-*"):
        assert access_of(f"gs://mine/{pattern}").reads == ("data",)


def test_a_boundary_has_room_for_more_folders_the_fewer_buckets_a_job_names() -> None:
    """Google accepts ten rules, and conditions of twelve operators and 2048 characters."""
    folders, buckets = [f"gs://mine/in{n}/*.csv" for n in range(30)], [f"gs://bucket{n}" for n in range(8)]
    many = access_of(*folders)
    assert many.reads == ("data", *(f"in{n}" for n in range(23)))
    assert many.left_out == tuple(f"gs://mine/in{n}" for n in range(23, 30))
    both = access_of(*folders[:6], *buckets)
    assert (len(both.reads), len(both.others)) == (6, 6)
    assert both.left_out == ("gs://mine/in5", "gs://bucket6", "gs://bucket7")
    long = access_of(*(f"gs://mine/{n}{'x' * 200}/*.csv" for n in range(20)))
    for granted in (many, both, long):
        conditions = [rule["availabilityCondition"]["expression"] for rule in boundary(granted) if len(rule) == 3]
        assert len(boundary(granted)) <= 10
        assert all(len(text) <= 2048 and text.count("||") <= 12 for text in conditions)
        assert all(f"/{folder}/'" in "".join(conditions) for folder in granted.reads)
    assert len(long.reads) + len(long.left_out) == 21


def test_a_job_that_continues_another_s_output_may_write_there() -> None:
    assert access_of(JOB_DIR="gs://mine/jobs/job01/output").writes == ("jobs/job01/output",)
    other_bucket = access_of(JOB_DIR="gs://results/x")
    assert (other_bucket.writes, other_bucket.others) == (("jobs/job02/output",), ("results",))


def test_the_access_boundary_in_google_s_format() -> None:
    resource = "//storage.googleapis.com/projects/_/buckets/"
    of_mine, listed = "projects/_/buckets/mine/objects/", "api.getAttribute('storage.googleapis.com/objectListPrefix', '')"
    assert boundary(Access("mine", ("jobs/j/output",), ("data", "jobs/i/output/model-7"), ("theirs",))) == [
        {
            "availableResource": f"{resource}mine",
            "availablePermissions": ["inRole:roles/storage.objectUser"],
            "availabilityCondition": {
                "expression": f"resource.name == '{of_mine}jobs/j/output' || "
                f"resource.name.startsWith('{of_mine}jobs/j/output/') || "
                f"{listed}.startsWith('jobs/j/output/')"
            },
        },
        {
            "availableResource": f"{resource}mine",
            "availablePermissions": ["inRole:roles/storage.objectViewer"],
            "availabilityCondition": {
                "expression": f"resource.name == '{of_mine}data' || resource.name.startsWith('{of_mine}data/') || "
                f"resource.name.startsWith('{of_mine}data.') || {listed}.startsWith('data/') || "
                f"resource.name == '{of_mine}jobs/i/output/model-7' || "
                f"resource.name.startsWith('{of_mine}jobs/i/output/model-7/') || "
                f"resource.name.startsWith('{of_mine}jobs/i/output/model-7.') || "
                f"{listed}.startsWith('jobs/i/output/model-7/')"
            },
        },
        {"availableResource": f"{resource}mine", "availablePermissions": ["inRole:roles/storage.bucketViewer"]},
        {"availableResource": f"{resource}theirs", "availablePermissions": ["inRole:roles/storage.objectUser"]},
    ]


def test_a_name_with_the_same_prefix_gets_no_access() -> None:
    granted = access_of("--warm-start", "gs://mine/jobs/old", "gs://mine/jobs/job02/output-2", JOB_DIR="gs://mine/runs/1")
    assert granted == Access("mine", ("runs/1",), ("data", "jobs/old", "jobs/job02/output-2"))
    for rule in boundary(granted):
        expression = rule.get("availabilityCondition", {}).get("expression", "")
        starts = re.findall(r"startsWith\('([^']*)'\)", expression)
        assert all(start.endswith(("/", ".")) for start in starts)


def test_the_broker_limits_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hosts.agent.token_broker._Handler.disable_nagle_algorithm", False)  # socket pairs lack it
    monkeypatch.setattr("hosts.agent.token_broker._Handler.timeout", None)  # no timeout for slow clients
    broker = Broker(Access("mine", (), ()), lambda _: ("token", 3600.0), lambda _: None)
    pairs = [socket.socketpair() for _ in range(200)]
    others = set(threading.enumerate())

    def handlers() -> set[threading.Thread]:
        return set(threading.enumerate()) - others

    try:
        for server_end, _ in pairs:
            broker._server.process_request(server_end, ("127.0.0.1", 1))
        assert len(handlers()) == 32
        closed = [client for _, client in pairs if select.select([client], [], [], 0)[0]]
        assert closed == [client for _, client in pairs[32:]]
        assert {client.recv(1) for client in closed} == {b""}, "connections beyond the limit are closed"
        for _, client in pairs:
            client.close()
        wait_for(lambda: not handlers(), "the end of all handlers")
        pairs.append(socket.socketpair())
        broker._server.process_request(pairs[-1][0], ("127.0.0.1", 1))
        assert not select.select([pairs[-1][1]], [], [], 0)[0], "a new connection is accepted again"
        assert len(handlers()) == 1
    finally:
        for _, client in pairs:
            client.close()
        broker.close()


def test_a_thread_that_cannot_start_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(Access("mine", (), ()), lambda _: ("token", 3600.0), lambda _: None)
    pairs = [socket.socketpair() for _ in range(40)]

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for server_end, _ in pairs:
                broker._server.process_request(server_end, ("127.0.0.1", 1))
        assert {client.recv(1) for _, client in pairs} == {b""}, "connections without a thread are closed"
        slots = [broker._server._slots.acquire(blocking=False) for _ in range(33)]
        assert slots == [True] * 32 + [False]
    finally:
        for _, client in pairs:
            client.close()
        broker.close()


@given(
    st.lists(
        st.text(alphabet="gs:/mineothr01-_.'\" |)(", max_size=40) | st.from_regex(r"gs://[a-z]{3,8}/[a-z']{0,9}"), max_size=30
    )
)
def test_no_argument_widens_a_rule(args: list[str]) -> None:
    granted = access_of(*args)
    rules = boundary(granted)
    assert granted.writes == ("jobs/job02/output",)
    assert len(rules) <= 10
    assert len(granted.others) <= MOST_BUCKETS
    assert "" not in granted.reads
    for rule in rules:
        expression = rule.get("availabilityCondition", {}).get("expression", "")
        texts = 2 * expression.count("resource.name") + 6 * expression.count("objectListPrefix")
        assert expression.count("'") == texts, "each text is quoted correctly"
        assert expression.count("||") <= 12


def test_a_command_gets_access_to_its_output_only() -> None:
    rules: list[Any] = []

    def mint(rule: Any) -> tuple[str, float]:
        rules.append(rule)
        return "narrow", 3600.0

    assert main(["gs://mine/jobs/job01/output", "--", sys.executable, "-c", _ASK, PORT], mint) == 3
    (granted,) = rules
    conditions = {
        rule["availablePermissions"][0]: rule.get("availabilityCondition", {}).get("expression", "") for rule in granted
    }
    assert "/buckets/mine/objects/jobs/job01/output/'" in conditions["inRole:roles/storage.objectUser"]
    assert "/buckets/mine/objects/data/'" in conditions["inRole:roles/storage.objectViewer"]
    assert {rule["availableResource"].rpartition("/")[2] for rule in granted} == {"mine"}


def test_the_broker_of_a_command_is_closed_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers: list[Broker] = []

    class Kept(Broker):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            brokers.append(self)

    def run(argv: list[str], check: bool) -> SimpleNamespace:
        (broker,) = brokers
        assert (argv, check) == (["sh", str(broker.port)], False)
        assert broker._server.socket.fileno() >= 0
        return SimpleNamespace(returncode=4)

    monkeypatch.setattr(token_broker, "Broker", Kept)
    monkeypatch.setattr(token_broker.subprocess, "run", run)
    assert main(["gs://mine/jobs/job01/output", "--", "sh", PORT], lambda _: ("", 0.0)) == 4
    assert brokers[0]._server.socket.fileno() < 0


def test_no_client_keeps_the_broker_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_broker._Handler, "disable_nagle_algorithm", False)  # no option of these sockets
    broker = Broker(Access("mine", (), ()), lambda _: ("token", 3600.0), lambda _: None)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    before = set(threading.enumerate())
    with theirs:
        broker._server.process_request(ours, ("127.0.0.1", 1))
        assert [thread.daemon for thread in set(threading.enumerate()) - before] == [True]
        broker.close()


@pytest.mark.parametrize("expires", [True, False])
def test_google_s_token_service_narrows_the_host_s_token(monkeypatch: pytest.MonkeyPatch, expires: bool) -> None:
    import google.auth
    from google.auth import downscoped, exceptions

    steps: list[Any] = []

    class Credentials:
        token, expiry = "wide", None

        def __init__(self, source: str, boundary: Any) -> None:
            steps.append((source, boundary.to_json()))

        def refresh(self, request: Any) -> None:
            if steps[-1] == "fail":
                raise exceptions.RefreshError("two\n  lines")
            self.token = "narrow"
            self.expiry = datetime(2026, 1, 31, 13, 0, 0) if expires else None  # type: ignore[assignment]

    def default(scopes: list[str]) -> tuple[str, None]:
        assert scopes == ["https://www.googleapis.com/auth/cloud-platform"]
        return "source", None

    monkeypatch.setattr(google.auth, "default", default)
    monkeypatch.setattr(downscoped, "Credentials", Credentials)
    monkeypatch.setattr(token_broker.time, "time", lambda: 1769860800.0)
    rules = boundary(Access("mine", ("jobs/j/output",), ("data",), ("theirs",)))
    assert token_broker.mint(rules) == ("narrow", 3600.0 if expires else 300.0)
    assert steps == [("source", {"accessBoundary": {"accessBoundaryRules": rules}})]
    monkeypatch.setattr(Credentials, "__init__", lambda *_: steps.append("fail"))
    with pytest.raises(OSError, match=r"^Google's token service: two lines$"):
        token_broker.mint(rules)
