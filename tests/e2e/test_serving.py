"""A trained model answers: deployed, asked, shown a drawing, swapped under load, taken away; on real hosts."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from stacks import Stack

# What the page of fab try shows: each version's name, whether it is the default, and its answer.
CARDS = """
return [...document.querySelectorAll('.card')].map(card => [
  card.querySelector('.name').textContent, !card.querySelector('.default').hidden, card.querySelector('.answer').textContent]);
"""


@pytest.fixture(scope="module")
def request_file(tmp_path_factory: pytest.TempPathFactory, cluster: Stack) -> Path:
    file = tmp_path_factory.mktemp("serving") / "request.json"
    made = cluster.fab("make-request", "--output", str(file))
    assert made.code == 0, made.text
    return file


@pytest.fixture(scope="module")
def deployed(cluster: Stack, request_file: Path) -> Iterator[Stack]:
    """A model `digits` with versions v1 and v2, both of one small training; all of it taken away again."""
    trained = cluster.fab("train", "served", "--scale-tier", "BASIC", "--", "--model", "mlp", "--max-steps", "800")
    assert trained.code == 0, trained.text
    try:
        for version in ("v1", "v2"):
            made = cluster.fab("deploy", "--job", "served", "--model", "digits", "--version", version)
            assert made.code == 0, made.text
        yield cluster
    finally:
        for version in ("v2", "v1", "v2"):  # the default goes last, whichever it is
            cluster.fab("delete-version", "digits", version, "--yes")


@contextlib.contextmanager
def tunnel(cluster: Stack, command: str = "serve") -> Iterator[int]:
    """`fab serve`, or another that opens a port until Ctrl-C, and that port."""
    process = cluster.start("fab", command, "digits")
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("http://127.0.0.1:"):
                yield int(line.split(":")[2].partition("/")[0])
                return
        raise AssertionError(f"fab {command} gave no address: {said}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        try:
            assert process.wait(timeout=30) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def ask(port: int, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST" if body is not None else "GET", path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def digits(cluster: Stack) -> dict[str, Any]:
    """What `fab models` says of it."""
    return next(model for model in json.loads(cluster.fab("models", "--json").out) if model["name"] == "digits")


def test_what_is_there(deployed: Stack) -> None:
    model = digits(deployed)
    assert (model["name"], model["default"]) == ("digits", "v1")
    assert [(v["version"], v["state"], v["jobId"]) for v in model["versions"]] == [
        ("v1", "READY", "served"),
        ("v2", "READY", "served"),
    ]
    again = deployed.fab("deploy", "--job", "served", "--model", "digits", "--version", "v2")
    assert (again.code, "a name is used once: take another" in again.text) == (2, True)
    gone = deployed.fab("predict", "--model", "digits", "--version", "v3", "--json-instances", "-")
    assert gone.code == 2


def test_both_versions_say_what_is_drawn(deployed: Stack, tmp_path: Path) -> None:
    """A large 1 by mouse, and a small 0 in a corner by a finger."""
    stroke = [(0.5, 0.2), (0.5, 0.5), (0.5, 0.8)]
    angles = [2 * math.pi * part / 20 for part in range(21)]
    ring = [(0.2 + 0.09 * math.sin(angle), 0.22 - 0.13 * math.cos(angle)) for angle in angles]
    with tunnel(deployed, "try") as port, Browser(tmp_path / "profile") as browser:
        browser.open("about:blank")
        browser.heard()
        browser.open(f"http://127.0.0.1:{port}/")
        browser.await_here(CARDS, lambda cards: [name for name, _, _ in cards] == ["v1", "v2"])
        for digit, points, kind in (("1", stroke, "mouse"), ("0", ring, "touch")):
            browser.draw("#drawing", points, kind)
            browser.await_here(CARDS, lambda cards, digit=digit: cards == [["v1", True, digit], ["v2", False, digit]])
            browser.value("document.querySelector('#clear').click()")
        said, asked = browser.heard()
        assert said == [], "the console is silent"
        assert all(url == "about:blank" or url.startswith((f"http://127.0.0.1:{port}/", "data:")) for url in asked), asked


def test_no_request_fails_while_the_default_changes(deployed: Stack, request_file: Path) -> None:
    body = {"instances": [json.loads(line) for line in request_file.read_text().splitlines()[:1]]}
    ended, answers = threading.Event(), list[int]()
    with tunnel(deployed) as port:
        assert ask(port, "/v1/models/digits/metadata")[0] == 200
        status, said = ask(port, "/v1/models/digits:predict", {"instances": [{"key": 1, "image": [1]}]})
        assert (status, said["error"]) == (400, "input image has the shape [1, 1], and must have [?, 784]")

        def load() -> None:
            while not ended.is_set():
                answers.append(ask(port, "/v1/models/digits:predict", body)[0])

        clients = [threading.Thread(target=load) for _ in range(4)]
        for client in clients:
            client.start()
        for version in ("v2", "v1", "v2"):
            assert deployed.fab("set-default", "digits", version).code == 0
            time.sleep(1.5)  # the server looks once a second
        assert deployed.fab("undeploy", "digits", "v1").code == 0
        deadline = time.monotonic() + 30
        while ask(port, "/v1/models/digits/versions/v1")[0] != 404:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        ended.set()
        for client in clients:
            client.join()
    assert set(answers) == {200}, f"of {len(answers)}"
    back = deployed.fab("deploy", "--model", "digits", "--version", "v1")
    assert back.code == 0, back.text


def test_a_model_that_no_server_can_load(deployed: Stack, tmp_path: Path) -> None:
    fetched = deployed.fab("export", "served", str(tmp_path / "model"))
    assert fetched.code == 0, fetched.text
    for file in (tmp_path / "model" / "variables").iterdir():
        file.write_bytes(b"broken")
    made = deployed.fab("deploy", "--origin", str(tmp_path / "model"), "--model", "digits", "--version", "v3")
    assert made.code == 1
    assert "error: version v3 of model digits cannot be loaded: " in made.text
    model = digits(deployed)
    assert {v["version"]: v["state"] for v in model["versions"]}["v3"] == "FAILED"
    assert model["default"] != "v3"
    assert deployed.fab("delete-version", "digits", "v3", "--yes").code == 0


def test_the_server_is_nobody_s_way_in(deployed: Stack) -> None:
    """It runs as a user of its own, may not write the bucket, and listens to its own host alone."""
    said = deployed.ssh("master-0", "systemctl show scaletier-serving -p MainPID --value")
    user = deployed.ssh("master-0", f"ps -o user= -p {said.out.strip()}").out.strip()
    assert user not in ("root", "trainer", "scaletier")
    assert "127.0.0.1:8501" in deployed.ssh("master-0", "ss -ltn").out
    assert (
        deployed.ssh("worker-0", "timeout 5 python3 -c \"import socket; socket.create_connection(('master-0', 8501), 3)\"").code
        != 0
    )
