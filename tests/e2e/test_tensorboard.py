"""`fab tensorboard` in a real browser, and `fab export`: for an ended, a running and a cancelled job."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
from pathlib import Path

from browser import Browser
from stacks import Stack
from waiting import limit, wait_for

LOSS = """
const lines = deep(document, 'path.line').filter(path => (above(path, 'tf-scalar-card') || {}).tag === 'loss');
return lines.map(path => path.getAttribute('d') || '');
"""
PICTURES = """
const shown = deep(document, 'img').filter(image => image.complete && image.naturalWidth === 28);
return shown.map(image => (above(image, 'tf-image-loader') || {}).tag);
"""
NODES = "return deep(document, 'g.node').length"


def interrupt(process: subprocess.Popen[str]) -> str:
    """Send Ctrl-C to `fab tensorboard`, which must end with 0, and return the rest of its output."""
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=limit()) == 0
    assert process.stdout is not None
    return process.stdout.read()


def fetch(url: str, path: str) -> str:
    """Return a page or data of TensorBoard, at once and without a proxy."""
    connection = http.client.HTTPConnection(url.removeprefix("http://").rstrip("/"), timeout=limit())
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200, path
        return answer.read().decode()


def runs_on_host(cluster: Stack) -> bool:
    return cluster.ssh("master-0", "pgrep -u scaletier -f [t]ensorboard.main").code == 0


def has_points(paths: list[str]) -> bool:
    """Return True once TensorBoard has read enough of a job for a curve."""
    return any(path.count(",") >= 10 for path in paths)


def test_the_browser_shows_the_curve_the_digits_and_the_graph(cluster: Stack, original: str, tmp_path: Path) -> None:
    with cluster.serving("tensorboard", "--job", original) as (process, url), Browser(tmp_path / "profile") as browser:
        # A card below the window is not drawn.
        paths = browser.await_value(f"{url}#scalars&tagFilter=%5Eloss%24", LOSS, has_points)
        points = [re.findall(r"[ML](-?[\d.]+),(-?[\d.]+)", path) for path in paths]
        curve = max(points, key=len)
        assert len(curve) >= 10
        assert len({x for x, _ in curve}) == len(curve), "one point a step"
        assert len({y for _, y in curve}) > 5, "the loss changes"
        tags = browser.await_value(f"{url}#images", PICTURES, any)
        assert all(re.fullmatch(r"mistakes/\d predicted as \d", tag) for tag in tags), tags
        browser.await_value(f"{url}#graphs", NODES, lambda count: count > 0)
        assert "Traceback" not in interrupt(process)
    wait_for(lambda: not runs_on_host(cluster), "TensorBoard ended on the host", 300)


def test_a_running_job_grows_and_a_cancelled_one_is_exported(cluster: Stack, tmp_path: Path) -> None:
    endless = ("--scale-tier", "BASIC", "--no-follow", "--", "--model", "mlp", "--max-steps", "10000000")
    cluster.must("train", "--job", "live", *endless)
    cluster.wait("live", "RUNNING")
    refused = cluster.fab("export", "live")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err.endswith("and exports at its end: wait for it, or fab cancel live\n")
    events = "ls /bucket/jobs/live/output/summaries/*tfevents*"
    wait_for(lambda: cluster.ssh("master-0", events).code == 0, "the job has summaries", 300)
    with cluster.serving("tensorboard") as (process, url):  # of the newest job

        def steps() -> list[int]:
            tags = json.loads(fetch(url, "/data/plugin/scalars/tags"))
            if "loss" not in tags.get("summaries", {}):
                return []
            return [point[1] for point in json.loads(fetch(url, "/data/plugin/scalars/scalars?tag=loss&run=summaries"))]

        wait_for(lambda: steps() or None, "there is a point", 300, poll=0.5)
        before = steps()
        wait_for(lambda: len(steps()) > len(before), "there are more points", 300, poll=0.5)
        assert steps()[-1] > before[-1]
        process.kill()  # as when the laptop dies: the host gets no message
        wait_for(lambda: not runs_on_host(cluster), "TensorBoard ended on the host", 300)
    cluster.must("cancel", "live")
    exported = cluster.must_json("export", "live", "--dest", str(tmp_path / "live"))
    assert re.fullmatch(r"/bucket/jobs/live/output/export/Servo/\d{10}", exported["source"])
    assert (tmp_path / "live" / "saved_model.pb").is_file()


def test_a_broken_connection_is_restored_behind_the_same_port(cluster: Stack, original: str) -> None:
    with cluster.serving("tensorboard", "--job", original) as (process, url):
        assert "loss" in fetch(url, "/data/plugin/scalars/tags")
        cluster.ssh("master-0", "sudo -n pkill -KILL -f '^sshd: [s]caletier'")

        def answers() -> bool:
            try:
                return "loss" in fetch(url, "/data/plugin/scalars/tags")
            except (OSError, http.client.HTTPException, AssertionError):
                assert process.poll() is None, "the command still runs"
                return False

        wait_for(answers, "TensorBoard answers again", 300, poll=0.5)
        assert "master-0 broke off" in interrupt(process)  # mostly with the reason, if one is known yet


def test_an_export_overwrites_no_folder(cluster: Stack, original: str, tmp_path: Path) -> None:
    dest = tmp_path / "model"
    exported = cluster.must_json("export", original, "--dest", str(dest))
    assert exported["signatures"]["serving_default"] == {
        "inputs": {"image": "float32 [?, 784]", "key": "int64 [?]"},
        "outputs": {
            "classes": "int64 [?]",
            "key": "int64 [?]",
            "probabilities": "float32 [?, 10]",
            "scores": "float32 [?, 10]",
        },
    }
    assert {path.name for path in dest.iterdir()} >= {"saved_model.pb", "variables"}
    refused = cluster.fab("export", original, "--dest", str(dest))
    assert (refused.code, refused.errors) == (2, [f"error: {dest} is there already: remove it, or give another --dest"])
