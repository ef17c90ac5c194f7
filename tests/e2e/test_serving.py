"""A trained model on real hosts: deployed, queried, shown a drawing, swapped under load, undeployed."""

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
from reaching import listening, mistakes
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
    made = cluster.run(sys.executable, "-m", "trainer.request", "--output", str(file))
    assert made.code == 0, made.text
    return file


@pytest.fixture(scope="module")
def deployed(cluster: Stack, served: str, request_file: Path) -> Iterator[Stack]:
    """Deploy a model `digits` with versions v1 and v2 of one small training; undeploy it afterwards."""
    try:
        for version in ("v1", "v2"):
            cluster.must("deploy", "--job", "served", "--model", "digits", "--version", version)
        yield cluster
    finally:
        for version in ("v2", "v1", "v2"):  # the default goes last, whichever it is
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
def load(once: Callable[[], None], pause: float = 0.0) -> Iterator[None]:
    """Call it by four clients again and again during the context."""
    ended = threading.Event()

    def client() -> None:
        while not ended.is_set():
            once()
            time.sleep(pause)

    clients = [threading.Thread(target=client) for _ in range(4)]
    for thread in clients:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in clients:
            thread.join()


@pytest.fixture(scope="module")
def apart(deployed: Stack, request_file: Path) -> Iterator[Stack]:
    """Give the cluster two hosts for models, whose server a prediction installs; restore it afterwards."""
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


def available(cluster: Stack, version: str = "v1") -> dict[str, str]:
    """Return the state of a version on each server, by `fab versions`."""
    versions = cluster.json("versions", "digits")
    return {on["server"]: on["state"] for each in versions if each["version"] == version for on in each["servers"]}


def await_available(cluster: Stack, version: str = "v1", count: int = 2) -> None:
    """Wait until all servers have loaded a version."""
    wait_for(
        lambda: [*available(cluster, version).values()] == ["AVAILABLE"] * count, f"{version} is AVAILABLE on {count}", 300
    )


def kill_server(cluster: Stack, host: str) -> None:
    cluster.must_ssh(host, "sudo systemctl kill --signal SIGKILL scaletier-serving")


def default(port: int) -> str:
    """Return the version that the server uses for a request without one."""
    return str(ask(port, "/v1/models/digits/metadata")[1]["model_spec"]["version"])


def digits(cluster: Stack) -> dict[str, Any]:
    """Return the entry of `digits` in `fab models`."""
    return next(model for model in cluster.json("models") if model["name"] == "digits")


def test_both_versions_say_what_is_drawn(deployed: Stack, tmp_path: Path) -> None:
    """A large 1 by mouse, and a small 0 in a corner by a finger."""
    stroke = [(0.5, 0.2), (0.5, 0.5), (0.5, 0.8)]
    angles = [2 * math.pi * part / 20 for part in range(21)]
    ring = [(0.2 + 0.09 * math.sin(angle), 0.22 - 0.13 * math.cos(angle)) for angle in angles]
    with tunnel(deployed) as api, draw.Server(0, f"127.0.0.1:{api}", []) as page, Browser(tmp_path / "profile") as browser:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        port = page.server_port
        browser.open("about:blank")
        browser.heard()
        browser.open(f"http://127.0.0.1:{port}/?model=digits")
        browser.await_here(CARDS, lambda cards: [name for name, _, _ in cards] == ["v1", "v2"])
        for digit, points, kind in (("1", stroke, "mouse"), ("0", ring, "touch")):
            browser.draw("#drawing", points, kind)
            browser.await_here(CARDS, lambda cards, digit=digit: cards == [["v1", True, digit], ["v2", False, digit]])
            browser.value("document.querySelector('#clear').click()")
        browser.check_quiet(f"http://127.0.0.1:{port}/", "data:")
        page.shutdown()


def test_no_request_fails_while_the_default_changes(deployed: Stack, request_file: Path) -> None:
    body = {"instances": [json.loads(line) for line in request_file.read_text().splitlines()[:1]]}
    answers: list[int] = []
    with tunnel(deployed) as port:
        assert ask(port, "/v1/models/digits/metadata")[0] == 200
        status, answer = ask(port, "/v1/models/digits:predict", {"instances": [{"key": 1, "image": [1]}]})
        assert (status, answer["error"]) == (400, "input image has the shape [1, 1], and must have [?, 784]")

        with load(lambda: answers.append(ask(port, "/v1/models/digits:predict", body)[0])):
            for version in ("v2", "v1", "v2"):
                deployed.must("set-default", "digits", version)
                wait_for(lambda version=version: default(port) == version, f"the server's default is {version}")
                answered = len(answers)
                wait_for(lambda answered=answered: len(answers) > answered + 20, "it has answered by it")
            deployed.must("undeploy", "digits", "v1")
            wait_for(lambda: ask(port, "/v1/models/digits/versions/v1")[0] == 404, "the server has dropped v1")
    assert set(answers) == {200}, f"of {len(answers)}"
    deployed.must("deploy", "--model", "digits", "--version", "v1")


def test_a_model_that_no_server_can_load(deployed: Stack, tmp_path: Path) -> None:
    deployed.must("export", "served", str(tmp_path / "model"))
    for file in (tmp_path / "model" / "variables").iterdir():
        file.write_bytes(b"broken")
    made = deployed.fab("deploy", "--origin", str(tmp_path / "model"), "--model", "digits", "--version", "v3")
    assert made.code == 1
    assert "error: version v3 of model digits cannot be loaded: " in made.text
    model = digits(deployed)
    assert {v["version"]: v["state"] for v in model["versions"]}["v3"] == "FAILED"
    assert model["default"] != "v3"
    deployed.must("delete-version", "digits", "v3", "--yes")


def test_the_server_is_nobody_s_way_in(deployed: Stack) -> None:
    """It runs as its own user, sees models and no jobs, cannot write the bucket, and listens to its own host only."""
    pid = deployed.ssh("master-0", "systemctl show scaletier-serving -p MainPID --value").out.strip()
    assert deployed.ssh("master-0", f"ps -o user= -p {pid}").out.strip() not in ("root", "trainer", "scaletier")
    assert deployed.ssh("master-0", f"sudo nsenter -m -t {pid} ls /bucket").out == "models\n"
    assert "127.0.0.1:8501" in deployed.ssh("master-0", "ss -ltn").out
    connect = "import socket; socket.create_connection(('master-0', 8501), 3)"
    assert deployed.ssh("worker-0", f'timeout 5 python3 -c "{connect}"').code != 0


def test_the_server_moves_to_hosts_of_its_own(apart: Stack) -> None:
    """It answers the hosts that train, and no others; the operator connects through ssh."""
    await_available(apart)
    hosts = {host["name"]: host for host in apart.json("hosts")["hosts"]}
    assert [hosts[f"serving-{index}"]["unit"] for index in range(2)] == ["active", "active"]
    on_master = apart.ssh(
        "master-0", "systemctl is-active scaletier-serving; systemctl is-enabled scaletier-serving"
    ).out.split()
    assert on_master == ["inactive", "disabled"]
    ends = apart.ssh("serving-0", f"ss -Hltn 'sport = {SERVING_PORT}'").out.split()[3::5]
    assert sorted(ends) == sorted([f"{hosts['serving-0']['address']}:{SERVING_PORT}", f"127.0.0.1:{SERVING_PORT}"])
    others = [name for name in hosts if not name.startswith("serving")]
    with listening(apart, others, [SERVING_PORT]):
        assert mistakes(apart, {name: host["address"] for name, host in hosts.items()}, [SERVING_PORT]) == []


def test_a_request_is_asked_again_of_the_other_server_when_one_is_killed(apart: Stack, request_file: Path) -> None:
    """Each server is killed once; systemd starts it again."""
    body = {"instances": [json.loads(line) for line in request_file.read_text().splitlines()[:1]]}
    answers, again = list[int](), list[int]()
    with tunnel(apart) as port:

        def once() -> int:
            try:
                return ask(port, "/v1/models/digits:predict", body)[0]
            except (OSError, http.client.HTTPException):
                return 0

        def twice() -> None:
            answers.append(status := once())
            if status != 200:
                again.append(once())

        with load(twice, pause=0.02):  # processors are for the server that starts again
            wait_for(lambda: len(answers) > 50, "there is load")
            kill_server(apart, "serving-0")
            assert predict(apart, request_file).code == 0
            await_available(apart)
            kill_server(apart, "serving-1")
            answered = len(answers)
            wait_for(lambda: len(answers) > answered + 50, "the other answers")
    assert len(answers) > 100
    assert set(again) <= {200}, f"of {len(answers)} requests {len(again)} were asked again"
    await_available(apart)


def test_a_host_that_is_down_does_not_hold_a_deployment_and_loads_it_when_it_is_back(apart: Stack) -> None:
    apart.stop("serving-0")
    try:
        made = apart.fab("deploy", "--job", "served", "--model", "digits", "--version", "v4")
        assert (made.code, "does not answer: it loads digits v4 when it is back" in made.text) == (0, True), made.text
        assert available(apart, "v4") == {"serving-0": "NO ANSWER", "serving-1": "AVAILABLE"}
    finally:
        apart.up()
        await_available(apart, "v4")
        apart.must("delete-version", "digits", "v4", "--yes")
