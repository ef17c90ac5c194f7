"""A trained model on real hosts: deployment, queries, drawings, swaps under load, removal."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import draw
import pytest
from browser import Browser
from connections import list_mismatches, listening
from stacks import Result, Stack
from waiting import limit, wait_for

from infra.ports import SERVING_PORT

# What the page of examples/draw shows: each version's name, whether it is the default, and its answer.
CARDS = """
return [...document.querySelectorAll('.card')].map(card => [
  card.querySelector('.name').textContent, !card.querySelector('.default').hidden, card.querySelector('.answer').textContent]);
"""


@pytest.fixture(scope="module")
def request_file(tmp_path_factory: pytest.TempPathFactory, cluster: Stack) -> Path:
    file = tmp_path_factory.mktemp("serving") / "request.json"
    result = cluster.run(sys.executable, "-m", "trainer.request", "--output", str(file))
    assert result.code == 0, result.text
    return file


@pytest.fixture(scope="module")
def deployed(cluster: Stack, served: str, request_file: Path) -> Iterator[Stack]:
    """Deploy a model `digits` with versions v1 and v2 of one small training; undeploy it afterwards."""
    try:
        for version in ("v1", "v2"):
            cluster.must("deploy", "--job", "served", "--model", "digits", "--version", version)
        yield cluster
    finally:
        for version in ("v2", "v1", "v2"):  # the default is deleted last
            cluster.fab("delete-version", "digits", version, "--yes")


@contextlib.contextmanager
def tunnel(cluster: Stack) -> Iterator[int]:
    """Run `fab serve`, and return its port; Ctrl-C ends it with 0."""
    with cluster.serving("serve", "digits") as (process, url):
        yield int(url.split(":")[2].partition("/")[0])
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=limit()) == 0


def ask(port: int, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit())
    with contextlib.closing(connection):
        connection.request("POST" if body is not None else "GET", path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


@contextlib.contextmanager
def generate_load(send: Callable[[], None], pause: float = 0.0) -> Iterator[None]:
    """Send requests from four clients during the context."""
    stop = threading.Event()

    def client() -> None:
        while not stop.is_set():
            send()
            time.sleep(pause)

    clients = [threading.Thread(target=client) for _ in range(4)]
    for thread in clients:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in clients:
            thread.join()


@pytest.fixture(scope="module")
def serving_hosts(deployed: Stack, request_file: Path) -> Iterator[Stack]:
    """Add two serving hosts to the cluster, whose server a prediction installs; restore it afterwards."""
    deployed.configure(servingCount="2")
    try:
        deployed.up()
        assert predict(deployed, request_file).code == 0
        yield deployed
    finally:
        deployed.configure(servingCount="0")
        deployed.up()
        predict(deployed, request_file)


def predict(cluster: Stack, request_file: Path) -> Result:
    return cluster.fab("predict", "--model", "digits", "--json-instances", str(request_file))


def version_states(cluster: Stack, version: str = "v1") -> dict[str, str]:
    """Return the state of a version on each server, by `fab versions`."""
    versions = cluster.json("versions", "digits")
    return {on["server"]: on["state"] for each in versions if each["version"] == version for on in each["servers"]}


def await_available(cluster: Stack, version: str = "v1", count: int = 2) -> None:
    """Wait until all servers have loaded a version."""
    wait_for(
        lambda: [*version_states(cluster, version).values()] == ["AVAILABLE"] * count, f"{version} is AVAILABLE on {count}", 300
    )


def kill_server(cluster: Stack, host: str) -> None:
    cluster.must_ssh(host, "sudo systemctl kill --signal SIGKILL scaletier-serving")


def default_version(port: int) -> str:
    """Return the version that the server uses for a request without one."""
    return str(ask(port, "/v1/models/digits/metadata")[1]["model_spec"]["version"])


def digits_entry(cluster: Stack) -> dict[str, Any]:
    """Return the entry of `digits` in `fab models`."""
    return next(model for model in cluster.json("models") if model["name"] == "digits")


def test_both_versions_predict_the_drawn_digit(deployed: Stack, tmp_path: Path) -> None:
    """A large 1 by mouse, and a small 0 in a corner by a finger."""
    stroke = [(0.5, 0.2), (0.5, 0.5), (0.5, 0.8)]
    angles = [2 * math.pi * part / 20 for part in range(21)]
    ring = [(0.2 + 0.09 * math.sin(angle), 0.22 - 0.13 * math.cos(angle)) for angle in angles]
    with tunnel(deployed) as api, draw.Server(0, f"127.0.0.1:{api}", []) as page, Browser(tmp_path / "profile") as browser:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        port = page.server_port
        browser.open("about:blank")
        browser.read_logs()
        browser.open(f"http://127.0.0.1:{port}/?model=digits")
        browser.await_script(CARDS, lambda cards: [name for name, _, _ in cards] == ["v1", "v2"])
        for digit, points, kind in (("1", stroke, "mouse"), ("0", ring, "touch")):
            browser.draw("#drawing", points, kind)
            browser.await_script(CARDS, lambda cards, digit=digit: cards == [["v1", True, digit], ["v2", False, digit]])
            browser.value("document.querySelector('#clear').click()")
        browser.check_no_messages(f"http://127.0.0.1:{port}/", "data:")
        page.shutdown()


def test_no_request_fails_while_the_default_changes(deployed: Stack, request_file: Path) -> None:
    body = {"instances": [json.loads(line) for line in request_file.read_text().splitlines()[:1]]}
    answers: list[int] = []
    with tunnel(deployed) as port:
        assert ask(port, "/v1/models/digits/metadata")[0] == 200
        status, answer = ask(port, "/v1/models/digits:predict", {"instances": [{"key": 1, "image": [1]}]})
        assert (status, answer["error"]) == (400, "input image has the shape [1, 1], and must have [?, 784]")

        with generate_load(lambda: answers.append(ask(port, "/v1/models/digits:predict", body)[0])):
            for version in ("v2", "v1", "v2"):
                deployed.must("set-default", "digits", version)
                wait_for(lambda version=version: default_version(port) == version, f"the server's default is {version}")
                answered = len(answers)
                wait_for(lambda answered=answered: len(answers) > answered + 20, "the new default has answered")
            deployed.must("undeploy", "digits", "v1")
            wait_for(lambda: ask(port, "/v1/models/digits/versions/v1")[0] == 404, "the server has unloaded v1")
    assert set(answers) == {200}, f"of {len(answers)}"
    deployed.must("deploy", "--model", "digits", "--version", "v1")


def test_a_model_that_no_server_can_load(deployed: Stack, tmp_path: Path) -> None:
    deployed.must("export", "served", str(tmp_path / "model"))
    for file in (tmp_path / "model" / "variables").iterdir():
        file.write_bytes(b"broken")
    result = deployed.fab("deploy", "--origin", str(tmp_path / "model"), "--model", "digits", "--version", "v3")
    assert result.code == 1
    assert "error: version v3 of model digits cannot be loaded: " in result.text
    model = digits_entry(deployed)
    assert {v["version"]: v["state"] for v in model["versions"]}["v3"] == "FAILED"
    assert model["default"] != "v3"
    deployed.must("delete-version", "digits", "v3", "--yes")


def test_the_server_is_isolated(deployed: Stack) -> None:
    """Check its user, that it sees models and no jobs, cannot write the bucket, and listens on loopback only."""
    pid = deployed.ssh("master-0", "systemctl show scaletier-serving -p MainPID --value").out.strip()
    assert deployed.ssh("master-0", f"ps -o user= -p {pid}").out.strip() not in ("root", "trainer", "scaletier")
    assert deployed.ssh("master-0", f"sudo nsenter -m -t {pid} ls /bucket").out == "models\n"
    assert "127.0.0.1:8501" in deployed.ssh("master-0", "ss -ltn").out
    connect = "import socket; socket.create_connection(('master-0', 8501), 3)"
    assert deployed.ssh("worker-0", f'timeout 5 python3 -c "{connect}"').code != 0


def test_the_server_moves_to_dedicated_hosts(serving_hosts: Stack) -> None:
    """Check that only training hosts reach it; the operator connects through ssh."""
    await_available(serving_hosts)
    hosts = {host["name"]: host for host in serving_hosts.json("hosts")["hosts"]}
    assert [hosts[f"serving-{index}"]["unit"] for index in range(2)] == ["active", "active"]
    on_master = serving_hosts.ssh(
        "master-0", "systemctl is-active scaletier-serving; systemctl is-enabled scaletier-serving"
    ).out.split()
    assert on_master == ["inactive", "disabled"]
    ends = serving_hosts.ssh("serving-0", f"ss -Hltn 'sport = {SERVING_PORT}'").out.split()[3::5]
    assert sorted(ends) == sorted([f"{hosts['serving-0']['address']}:{SERVING_PORT}", f"127.0.0.1:{SERVING_PORT}"])
    training_hosts = [name for name in hosts if not name.startswith("serving")]
    with listening(serving_hosts, training_hosts, [SERVING_PORT]):
        assert list_mismatches(serving_hosts, {name: host["address"] for name, host in hosts.items()}, [SERVING_PORT]) == []


def test_a_request_is_retried_on_the_other_server_if_one_is_killed(serving_hosts: Stack, request_file: Path) -> None:
    """Kill each server once; systemd restarts it."""
    body = {"instances": [json.loads(line) for line in request_file.read_text().splitlines()[:1]]}
    answers, retries = list[int](), list[int]()
    with tunnel(serving_hosts) as port:

        def send() -> int:
            try:
                return ask(port, "/v1/models/digits:predict", body)[0]
            except (OSError, http.client.HTTPException):
                return 0

        def send_with_retry() -> None:
            answers.append(status := send())
            if status != 200:
                retries.append(send())

        with generate_load(send_with_retry, pause=0.02):  # leave processors for the restarting server
            wait_for(lambda: len(answers) > 50, "clients send requests")
            kill_server(serving_hosts, "serving-0")
            assert predict(serving_hosts, request_file).code == 0
            await_available(serving_hosts)
            kill_server(serving_hosts, "serving-1")
            answered = len(answers)
            wait_for(lambda: len(answers) > answered + 50, "the other server answers")
    assert len(answers) > 100
    assert set(retries) <= {200}, f"of {len(answers)} requests {len(retries)} were retried"
    await_available(serving_hosts)


def test_a_stopped_host_delays_no_deployment_and_loads_it_later(serving_hosts: Stack) -> None:
    serving_hosts.stop("serving-0")
    try:
        result = serving_hosts.fab("deploy", "--job", "served", "--model", "digits", "--version", "v4")
        assert (result.code, "does not answer: it loads digits v4 when it is back" in result.text) == (0, True), result.text
        assert version_states(serving_hosts, "v4") == {"serving-0": "NO ANSWER", "serving-1": "AVAILABLE"}
    finally:
        serving_hosts.up()
        await_available(serving_hosts, "v4")
        serving_hosts.must("delete-version", "digits", "v4", "--yes")
