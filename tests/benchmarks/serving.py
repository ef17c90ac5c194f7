"""Models that answer: what the server adds to a model, how much it answers, and how soon it does."""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import LIMIT_SECONDS, MeasureError, must
from benchmarks.registry import Figure, benchmark
from benchmarks.stack import ROOT, BenchStack, job_id, say
from infra.spec import Role, ScaleTier
from ops.cluster.fanout import Background
from ops.package.push import PYTHON

_HERE = Path(__file__).parent
MODEL = "bench"
_HOST = "master-0"
_SECONDS = 5.0
_CLIENTS = 32
_TIMES = 3
_SWAPS = 20
_KILLS, _KILL_SECONDS = 4, 20.0
_ASKER = "worker-0"
_KILL = "sudo -n systemctl kill --signal SIGKILL scaletier-serving"
_PREDICT = f"/v1/models/{MODEL}:predict"
# The server on one core and who asks it on the other: so that it has just the core that the peer has.
_SERVER_CORE, _ASKING_CORE = "0", "1"


@cache
def deployed(stack: BenchStack) -> str:
    """A cnn that was trained for a moment, deployed twice; where its job left it, as the hosts see it."""
    stack.require(ScaleTier.STANDARD_1)
    job = job_id("served")
    stack.fab("train", job, "--scale-tier", "BASIC", "--", "--model", "cnn", "--max-steps", "20")
    for version in ("v1", "v2"):
        stack.fab("deploy", "--job", job, "--model", MODEL, "--version", version)
    (found,) = [v for v in json.loads(stack.fab("versions", MODEL, "--json").out) if v["version"] == "v1"]
    return str(found["origin"])


def stop_server(stack: BenchStack) -> None:
    """Until something is deployed again: what is measured beside it has the processors for itself."""
    must(stack.run(*stack.ssh(_HOST, "sudo -n systemctl stop scaletier-serving")), "stopping the server")


def _on_host(stack: BenchStack, program: str, core: str, *arguments: object) -> dict[str, Any]:
    """What one of the programs beside this one says, run on the host and one of its cores."""
    line = shlex.join(["env", "TF_CPP_MIN_LOG_LEVEL=3", "taskset", "-c", core, PYTHON, "-", *map(str, arguments)])
    ran = must(stack.run(*stack.ssh(_HOST, line), stdin=(_HERE / program).read_bytes()), program)
    found: dict[str, Any] = json.loads(ran.out.strip().splitlines()[-1])
    if found.get("failed"):
        raise MeasureError(f"{found['failed']} of {found['asked']} requests failed: {found['why']}")
    return found


def _pin_server(stack: BenchStack) -> None:
    pid = "$(systemctl show scaletier-serving -p MainPID --value)"
    must(stack.run(*stack.ssh(_HOST, f"sudo -n taskset -apc {_SERVER_CORE} {pid}")), "pinning the server")


@cache
def _compared(stack: BenchStack) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """In turn, `_TIMES` times: one client's requests, many clients' requests, and the model called in its own process."""
    folder = deployed(stack)
    _pin_server(stack)
    one, many, called = [], [], []
    for number in range(_TIMES):
        say(f"asking, {number + 1} of {_TIMES}")
        one.append(_on_host(stack, "asking_once.py", _ASKING_CORE, _PREDICT, 1, _SECONDS))
        many.append(_on_host(stack, "asking_once.py", _ASKING_CORE, _PREDICT, _CLIENTS, _SECONDS))
        called.append(_on_host(stack, "called_once.py", _SERVER_CORE, folder, _SECONDS))
    return one, many, called


def _added(stack: BenchStack, which: str) -> Figure:
    one, _, called = _compared(stack)
    return Figure(1000 * (median(o[which] for o in one) - median(c[which] for c in called)))


@benchmark(
    "predict-p50",
    what="ms that one client's request (one image, cnn, on the host) takes longer than the model called in a process of its "
    "own, the median of 5 s; medians of 3",
    against=None,
    bar=4.0,
    aim=1.5,
    unit="ms",
)
def predict_p50(stack: BenchStack) -> Figure:
    """The server has one core, the client another."""
    return _added(stack, "p50")


@benchmark(
    "predict-p99",
    what="the same at the 99th percentile, of both",
    against=None,
    bar=15.0,
    aim=5.0,
    unit="ms",
)
def predict_p99(stack: BenchStack) -> Figure:
    """As predict-p50."""
    return _added(stack, "p99")


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
    """What batching gives back of what HTTP takes."""
    _, many, called = _compared(stack)
    return Figure(median(m["rate"] for m in many), median(c["rate"] for c in called))


@benchmark(
    "swap-failures",
    what=f"requests of 4 clients that fail while the default changes {_SWAPS} times, without asking again",
    against=None,
    bar=0,
    aim=0,
    unit="",
)
def swap_failures(stack: BenchStack) -> Figure:
    """Asked all along by clients that never ask twice."""
    deployed(stack)
    ended: list[dict[str, Any]] = []
    seconds = 3.0 * _SWAPS

    def load() -> None:
        line = shlex.join([PYTHON, "-", _PREDICT, "4", str(seconds)])
        ran = must(stack.run(*stack.ssh(_HOST, line), stdin=(_HERE / "asking_once.py").read_bytes()), "asking")
        ended.append(json.loads(ran.out.strip().splitlines()[-1]))

    asking = threading.Thread(target=load)
    asking.start()
    began, swaps = time.monotonic(), 0
    while swaps < _SWAPS or time.monotonic() - began < seconds:
        stack.fab("set-default", MODEL, "v2" if swaps % 2 == 0 else "v1")
        swaps += 1
        time.sleep(max(0.0, began + swaps * seconds / _SWAPS - time.monotonic()))
    asking.join()
    if not ended or ended[0]["asked"] < 100:
        raise MeasureError(f"too few requests were asked to say anything: {ended}")
    say(f"{ended[0]['asked']} requests while the default changed {swaps} times")
    return Figure(ended[0]["failed"])


@benchmark(
    "kill-failures",
    what=f"requests of 4 clients that fail while two servers are killed in turn, {_KILLS} times in all, and a "
    "client asks the other once more",
    against=None,
    bar=0,
    aim=0,
    unit="",
)
def kill_failures(stack: BenchStack) -> Figure:
    """SIGKILL for the unit's process, which systemd starts again; the next one when both answer. Clients are on a worker."""
    deployed(stack)
    with _two_servers(stack) as addresses:
        line = shlex.join([PYTHON, "-", _PREDICT, "4", str(_KILL_SECONDS * _KILLS), *addresses])
        asking = Background(
            lambda: must(stack.run(*stack.ssh(_ASKER, line), stdin=(_HERE / "asking_two_once.py").read_bytes()), "asking")
        )
        began = time.monotonic()
        for number in range(_KILLS):
            time.sleep(max(0.0, began + (number + 0.2) * _KILL_SECONDS - time.monotonic()))
            _await_both(stack)
            killed = must(stack.run(*stack.ssh(f"serving-{number % 2}", _KILL)), "killing the server")
            if time.monotonic() - began > _KILL_SECONDS * _KILLS:
                raise MeasureError(f"the last server was killed when the clients had ended ({killed.seconds:.0f} s)")
        ran = asking.join(LIMIT_SECONDS)
    found = json.loads(ran.out.strip().splitlines()[-1])
    if found["asked"] < 100:
        raise MeasureError(f"too few requests were asked to say anything: {found}")
    say(f"{found['asked']} requests while servers were killed {_KILLS} times; without asking again {found['once']} had failed")
    return Figure(found["failed"])


@contextmanager
def _two_servers(stack: BenchStack) -> Iterator[list[str]]:
    """The addresses of two hosts that answer for the models; then the master does again."""
    request = ROOT / ".cache" / "bench-request.json"
    request.write_text(json.dumps({"key": 1, "image": [0.0] * 784}))
    ask = ("predict", "--model", MODEL, "--json-instances", str(request))
    try:
        _servers(stack, 2)
        stack.fab(*ask)
        _await_both(stack)
        yield [host.address for host in stack.inventory.of_role(Role.SERVING)]
    finally:
        _servers(stack, 0)
        stack.fab(*ask)
        request.unlink()


def _servers(stack: BenchStack, count: int) -> None:
    stack.pulumi("config", "set", "servingCount", str(count))
    stack.pulumi("up", "--yes", "--skip-preview")


def _await_both(stack: BenchStack) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        found = json.loads(stack.fab("versions", MODEL, "--json").out)
        if all(on["state"] == "AVAILABLE" for version in found for on in version["servers"]):
            return
        time.sleep(0.5)
    raise MeasureError("one of the servers does not come back")


@benchmark(
    "deploy-first-answer",
    what="seconds of `fab deploy` of a first model, no server running, and then `fab predict` of one image; medians of 3",
    against="python on the host: import of TensorFlow, load of the model, first call",
    bar=1.5,
    aim=1.2,
)
def deploy_first_answer(stack: BenchStack) -> Figure:
    """Ours also starts two commands, copies 13 MB into the bucket and starts a unit; the peer has the files already."""
    folder = deployed(stack)
    job = folder.split("/")[3]
    ours, theirs = [], []
    for version in ("v1", "v2", "v1"):  # the default goes last, whichever it is
        stack.run("fab", "delete-version", MODEL, version, "--yes")
    request = ROOT / ".cache" / "bench-request.json"
    request.write_text(json.dumps({"key": 1, "image": [0.0] * 784}))
    try:
        for number in range(_TIMES):
            stop_server(stack)
            model = f"first{number}_{job_id('m')}"
            began = time.monotonic()
            stack.fab("deploy", "--job", job, "--model", model, "--version", "v1")
            stack.fab("predict", "--model", model, "--json-instances", str(request))
            ours.append(time.monotonic() - began)
            stack.fab("delete-version", model, "v1", "--yes")
            began = time.monotonic()
            line = shlex.join(["env", "TF_CPP_MIN_LOG_LEVEL=3", PYTHON, "-", folder, "0.01"])
            must(stack.run(*stack.ssh(_HOST, line), stdin=(_HERE / "called_once.py").read_bytes()), "called_once.py")
            theirs.append(time.monotonic() - began)
    finally:
        request.unlink()
    return Figure(median(ours), median(theirs))
