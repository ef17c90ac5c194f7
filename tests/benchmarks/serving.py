"""Served models: what the server adds to a call of a model, its rate, and the time to the first answer."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from typing import Any

from benchmarks.measure import LIMIT_SECONDS, MeasureError
from benchmarks.registry import Figure, benchmark, in_turn
from benchmarks.stack import BenchStack, job_id, say
from infra.scale_tiers import Role, ScaleTier
from jobs.background import Background
from jobs.paths import PYTHON

_HERE = Path(__file__).parent
MODEL = "bench"
_HOST = "master-0"
_CLIENTS_PROGRAM = "asking_once.py"
_SECONDS = 5.0
_CLIENTS = 32
_TIMES = 3
_SWAPS = 20
_KILLS, _KILL_SECONDS = 4, 20.0
_CLIENT_HOST = "worker-0"
_KILL = "sudo -n systemctl kill --signal SIGKILL scaletier-serving"
_PREDICT = f"/v1/models/{MODEL}:predict"
# The server has one core, like the peer, and its clients the other.
_SERVER_CORE, _CLIENT_CORE = "0", "1"


@cache
def deployed(stack: BenchStack) -> str:
    """Train a cnn for a few steps, deploy it twice, and return its folder on the hosts."""
    stack.require(ScaleTier.STANDARD_1)
    job = job_id("served")
    stack.fab("train", job, "--scale-tier", "BASIC", "--", "--model", "cnn", "--max-steps", "20")
    for version in ("v1", "v2"):
        stack.fab("deploy", "--job", job, "--model", MODEL, "--version", version)
    return next(str(each["origin"]) for each in _versions(stack) if each["version"] == "v1")


def _versions(stack: BenchStack) -> list[dict[str, Any]]:
    versions: list[dict[str, Any]] = json.loads(stack.fab("versions", MODEL, "--json").out)
    return versions


def stop_server(stack: BenchStack) -> None:
    """Stop the server until the next deployment, so that other measurements have the processors."""
    stack.on(_HOST, "sudo -n systemctl stop scaletier-serving")


def _result(stack: BenchStack, host: str, program: str, *arguments: object, core: str = "") -> dict[str, Any]:
    """Run a program of this folder on a host, perhaps on one of its cores, and return the JSON that it prints."""
    pin = ["taskset", "-c", core] if core else []
    line = shlex.join(["env", "TF_CPP_MIN_LOG_LEVEL=3", *pin, PYTHON, "-", *map(str, arguments)])
    result: dict[str, Any] = json.loads(stack.on(host, line, (_HERE / program).read_bytes()).strip().splitlines()[-1])
    return result


def _requests(stack: BenchStack, clients: int) -> dict[str, Any]:
    """Return the result of requests to the server of the host, none of which may fail."""
    result = _result(stack, _HOST, _CLIENTS_PROGRAM, _PREDICT, clients, _SECONDS, "127.0.0.1", core=_CLIENT_CORE)
    if result["failed"]:
        raise MeasureError(f"{result['failed']} of {result['asked']} requests failed: {result['why']}")
    return result


@cache
def _compared(stack: BenchStack) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure in turn, `_TIMES` times: requests of one client, of many clients, and the model called in its own process."""
    folder = deployed(stack)
    stack.on(_HOST, f"sudo -n taskset -apc {_SERVER_CORE} $(systemctl show scaletier-serving -p MainPID --value)")
    one, many, called = [], [], []
    for number in range(_TIMES):
        say(f"requests and calls, {number + 1} of {_TIMES}")
        one.append(_requests(stack, 1))
        many.append(_requests(stack, _CLIENTS))
        called.append(_result(stack, _HOST, "called_once.py", folder, _SECONDS, core=_SERVER_CORE))
    return one, many, called


def _added(stack: BenchStack, which: str) -> Figure:
    one, _, called = _compared(stack)
    return Figure(1000 * (median(o[which] for o in one) - median(c[which] for c in called)))


for _which, _percentile, _bar, _aim in (("p50", "median", 4.0, 1.5), ("p99", "99th percentile", 15.0, 5.0)):
    benchmark(
        f"predict-{_which}",
        what="ms of one client's request (one image, cnn, on the host) beyond a call of the model in a process of its own, "
        f"the {_percentile} of 5 s of both; medians of 3; the server has one core, the client another",
        against=None,
        bar=_bar,
        aim=_aim,
        unit="ms",
    )(partial(_added, which=_which))


@benchmark(
    "predict-rate",
    what=f"requests/s of one image each, {_CLIENTS} clients on another core, the server on one; medians of 3",
    against="the model called in a process of its own on that core, one image after the other: no JSON, no HTTP",
    bar=1.0,
    aim=2.0,
    unit="/s",
    at_least=True,
)
def predict_rate(stack: BenchStack) -> Figure:
    """Compare the gain of batching with the cost of HTTP."""
    _, many, called = _compared(stack)
    return Figure(median(m["rate"] for m in many), median(c["rate"] for c in called))


@benchmark(
    "swap-failures",
    what=f"requests of 4 clients that fail while the default changes {_SWAPS} times, without retries",
    against=None,
    bar=0,
    aim=0,
    unit="",
)
def swap_failures(stack: BenchStack) -> Figure:
    """Send requests all the time."""
    deployed(stack)
    seconds = 3.0 * _SWAPS
    clients = Background(lambda: _result(stack, _HOST, _CLIENTS_PROGRAM, _PREDICT, 4, seconds, "127.0.0.1"))
    began, swaps = time.monotonic(), 0
    while swaps < _SWAPS or time.monotonic() - began < seconds:
        stack.fab("set-default", MODEL, "v2" if swaps % 2 == 0 else "v1")
        swaps += 1
        time.sleep(max(0.0, began + swaps * seconds / _SWAPS - time.monotonic()))
    result = _many(clients.join(LIMIT_SECONDS))
    say(f"{result['asked']} requests while the default changed {swaps} times")
    return Figure(result["failed"])


def _many(result: dict[str, Any]) -> dict[str, Any]:
    if result["asked"] < 100:
        raise MeasureError(f"too few requests for a figure: {result}")
    return result


@benchmark(
    "kill-failures",
    what=f"requests of 4 clients that fail while two servers are killed in turn, {_KILLS} times in all, with one "
    "retry at the other",
    against=None,
    bar=0,
    aim=0,
    unit="",
)
def kill_failures(stack: BenchStack) -> Figure:
    """Kill the unit's process, which systemd restarts; the next one when both answer. Clients are on a worker."""
    deployed(stack)
    with _two_servers(stack) as addresses:
        seconds = _KILL_SECONDS * _KILLS
        clients = Background(lambda: _result(stack, _CLIENT_HOST, _CLIENTS_PROGRAM, _PREDICT, 4, seconds, *addresses))
        began = time.monotonic()
        for number in range(_KILLS):
            time.sleep(max(0.0, began + (number + 0.2) * _KILL_SECONDS - time.monotonic()))
            _await_both(stack)
            stack.on(f"serving-{number % 2}", _KILL)
            if time.monotonic() - began > seconds:
                raise MeasureError("the last server was killed when the clients had ended")
        result = _many(clients.join(LIMIT_SECONDS))
    say(f"{result['asked']} requests while servers were killed {_KILLS} times; without retries {result['failed']} had failed")
    return Figure(result["failedTwice"])


@contextmanager
def _two_servers(stack: BenchStack) -> Iterator[list[str]]:
    """Yield the addresses of two hosts that serve the models; then the master serves them again."""
    with _request() as request:
        ask = ("predict", "--model", MODEL, "--json-instances", request)
        try:
            _servers(stack, 2)
            stack.fab(*ask)
            _await_both(stack)
            yield [host.address for host in stack.inventory.of_role(Role.SERVING)]
        finally:
            _servers(stack, 0)
            stack.fab(*ask)


@contextmanager
def _request() -> Iterator[str]:
    """Yield the path of a file with one instance."""
    with NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"key": 1, "image": [0.0] * 784}, file)
        file.flush()
        yield file.name


def _servers(stack: BenchStack, count: int) -> None:
    stack.pulumi("config", "set", "servingCount", str(count))
    stack.pulumi("up", "--yes", "--skip-preview")


def _await_both(stack: BenchStack) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        if all(on["state"] == "AVAILABLE" for version in _versions(stack) for on in version["servers"]):
            return
        time.sleep(0.5)
    raise MeasureError("one of the servers does not answer again")


@benchmark(
    "deploy-first-answer",
    what="seconds of `fab deploy` of a first model, no server running, and then `fab predict` of one image; medians of 3",
    against="python on the host: import of TensorFlow, load of the model, first call",
    bar=1.5,
    aim=1.2,
)
def deploy_first_answer(stack: BenchStack) -> Figure:
    """Measure ours with two commands, 13 MB copied into the bucket and a unit; the peer has the files already."""
    folder = deployed(stack)
    job = folder.split("/")[3]
    for version in ("v1", "v2", "v1"):  # the default version must be deleted last
        stack.run("fab", "delete-version", MODEL, version, "--yes")

    def ours(request: str) -> float:
        stop_server(stack)
        model = job_id("first")
        began = time.monotonic()
        stack.fab("deploy", "--job", job, "--model", model, "--version", "v1")
        stack.fab("predict", "--model", model, "--json-instances", request)
        seconds = time.monotonic() - began
        stack.fab("delete-version", model, "v1", "--yes")
        return seconds

    def theirs() -> float:
        began = time.monotonic()
        _result(stack, _HOST, "called_once.py", folder, "0.01")
        return time.monotonic() - began

    with _request() as request:
        return in_turn(_TIMES, lambda: ours(request), theirs)
