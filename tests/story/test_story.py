"""Follow one user's day on real hosts: a ps, a master and a worker start, train, fail, predict, and are destroyed.

Each step builds on those before it. Every feature is tested here once; tests/e2e has the other cases.
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

from connections import list_mismatches, listening
from stacks import TINY, Stack
from waiting import limit, wait_for

from infra.ports import SERVING_PORT, SSH_PORT, TENSORFLOW_PORT

HOSTS = ["ps-0", "master-0", "worker-0"]
HOSTILE = ("--package", "tests/trainers/hostile", "--module", "hostile.task", "--scale-tier", "BASIC")
REFUSED = ("forge", "alter", "read", "keys", "rise", "ask", "knock", "reach", "swap")
_OTHER_PORT = 8080
# The host's records, secrets, code and units, which no trainer may change.
_STATE = (
    "cd /bucket && sudo sha256sum jobs/mnist/*.json jobs/mnist/*.gz jobs/mnist/*/* /usr/lib/scaletier/* /etc/ssh/* "
    "/opt/scaletier/hosts/*/* /etc/systemd/system/scaletier* 2>/dev/null; ls /bucket /bucket/data"
)


def test_up_creates_the_hosts(stack: Stack) -> None:
    stack.up()
    assert stack.hosts() == HOSTS
    assert stack.ssh("worker-0", "hostname; systemctl is-system-running --wait").out.split() == ["worker-0", "running"]
    hosts_entry, address = stack.ssh("worker-0", "getent hosts worker-0; ip -4 -o address show scope global").out.splitlines()
    assert f" {hosts_entry.split()[0]}/" in address, "its own name is its address in the cluster"


def test_a_second_up_changes_nothing(stack: Stack) -> None:
    summary = stack.up().partition("Resources:")[2]
    assert " unchanged" in summary
    assert not [word for word in ("created", "updated", "deleted", "replaced") if word in summary], summary


def test_mnist_trains_on_all_hosts(stack: Stack) -> None:
    stack.must("train", "--job", "mnist", "--labels", "owner=story", "--", "--model", "mlp", "--max-steps", "800")
    record = stack.describe("mnist")
    assert (record["state"], record["labels"]) == ("SUCCEEDED", {"owner": "story"})
    assert {replica["name"] for replica in record["replicas"]} == set(HOSTS)
    assert record["createTime"] < record["startTime"] < record["endTime"]


def test_the_parameter_server_and_the_chief_have_logged(stack: Stack) -> None:
    lines = stack.messages("mnist")
    for replica, start in (("ps-0", "Started [ps/0]"), ("master-0", "Train [master/0]")):
        assert [line for line in lines[replica] if line.startswith(start)], replica
    final = [line for line in lines["master-0"] if line.startswith("Final metrics")]
    assert float(final[-1].rpartition("accuracy: ")[2]) >= 0.9


def test_the_output_is_fetched(stack: Stack, tmp_path: Path) -> None:
    assert list((stack.get("mnist", tmp_path) / "export" / "Servo").glob("*/saved_model.pb"))


def test_the_model_is_deployed_and_predicts(stack: Stack, tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    assert stack.run(sys.executable, "-m", "trainer.request", "--output", str(request)).code == 0
    stack.must("deploy", "--job", "mnist", "--model", "digits", "--version", "v1")
    predictions = stack.must_json("predict", "--model", "digits", "--json-instances", str(request))["predictions"]
    assert len(predictions) == len(request.read_text().splitlines())
    assert all(len(prediction["probabilities"]) == 10 for prediction in predictions)


def test_a_killed_worker_returns(stack: Stack) -> None:
    arguments = ("--model", "mlp", "--max-steps", "10000000")
    stack.must("train", "--job", "endless", "--no-follow", "--", *arguments)

    def worker_lines(replica: str = "worker-0") -> list[str]:
        return stack.messages("endless", replica).get("worker-0", [])

    # In the log of all replicas: a short job may end before its worker trains.
    wait_for(lambda: any(line.startswith("Train [worker/0]") for line in worker_lines("all")), "worker-0 trains", poll=1)
    stack.must_ssh("worker-0", "sudo pkill -KILL -f [t]rainer.task")

    def has_returned() -> dict[str, Any] | None:
        (worker,) = [replica for replica in stack.describe("endless")["replicas"] if replica["name"] == "worker-0"]
        log = worker_lines()
        starts = [index for index, line in enumerate(log) if line.startswith("started trainer")]
        trains = len(starts) == 2 and any(line.startswith("Train [worker/0]") for line in log[starts[1] :])
        return worker if worker["restarts"] and trains else None

    assert wait_for(has_returned, "worker-0 trains again", poll=1)["restarts"] == 1
    assert stack.describe("endless")["state"] == "RUNNING"


def test_the_next_job_starts_after_a_cancel(stack: Stack) -> None:
    stack.must("train", "--job", "raises", *TINY, "--no-follow", "--", "--raise", "worker-0", "--seconds", "600")
    assert stack.describe("raises")["state"] == "QUEUED"
    stack.must("cancel", "endless")
    assert stack.describe("endless")["state"] == "CANCELLED"


def test_a_failed_job_is_explained_in_one_file(stack: Stack, tmp_path: Path) -> None:
    result = stack.fab("wait", "raises", timeout=limit(300))
    assert result.code == 1, result.text
    record = stack.describe("raises")
    assert record["state"] == "FAILED"
    sentence = "The replica worker 0 exited with a non-zero status of 1. First error: RuntimeError: worker-0 was told to raise"
    assert record["errorMessage"].startswith(f"{sentence}\n")
    file = tmp_path / "bundle.tar.gz"
    result = stack.fab("bundle", "raises", str(file))
    assert (result.code, "no diagnosis" in result.err) == (0, False), result.text
    with tarfile.open(file) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
        summary = tar.extractfile(next(name for name in tar.getnames() if name.endswith("/summary.txt")))
        assert summary is not None
        first = summary.read().decode().splitlines()[0]
    for host in HOSTS:
        assert {f"diagnosis/{host}.json", f"logs/{host}.log", f"hosts/{host}.txt"} <= names
    assert first.endswith(": RuntimeError: worker-0 was told to raise")


def test_a_hostile_trainer_is_refused_everything(stack: Stack) -> None:
    before = stack.ssh("master-0", _STATE).out
    assert "job.json" in before
    stack.must("train", "hostile", *HOSTILE, "--", "--victim", "mnist", "--try", *REFUSED)
    outcomes: dict[str, str] = json.loads(stack.ssh("master-0", "cat /bucket/jobs/hostile/output/outcomes.json").out)
    assert set(outcomes) == set(REFUSED)
    assert {attack: outcome for attack, outcome in outcomes.items() if not outcome.startswith("refused: ")} == {}
    assert stack.ssh("master-0", _STATE).out == before
    record = stack.describe("hostile")
    assert record["state"] == "SUCCEEDED"
    assert [(each["name"], each["exitCode"]) for each in record["replicas"]] == [("master-0", 0)]


def test_connections_match_the_firewall_table(stack: Stack) -> None:
    ports = (SSH_PORT, TENSORFLOW_PORT, SERVING_PORT, _OTHER_PORT)
    with listening(stack, HOSTS, ports[1:]):
        assert list_mismatches(stack, stack.addresses, ports) == []


def test_the_doctor_finds_nothing_wrong(stack: Stack) -> None:
    result = stack.fab("doctor", "--json")
    assert "Traceback" not in result.text
    findings = json.loads(result.out)["findings"]
    # Orphans are remains of other checkouts on this machine, not errors of this stack.
    wrong = [finding for finding in findings if finding["severity"] == "error" and finding["check"] != "orphans"]
    assert wrong == []
    checks = {finding["check"] for finding in findings if finding["severity"] == "ok"}
    assert {"daemon", "firewall", "hosts", "keys", "pulumi", "ssh"} <= checks


def test_bad_calls_end_with_one_line(stack: Stack) -> None:
    before = stack.must("jobs", "--json").out
    for arguments, text in [(("train", "--job", "mnist"), "mnist"), (("logs", "worker-9", "--job", "mnist"), "worker-0")]:
        refused = stack.fab(*arguments)
        assert (refused.code, text in refused.err, "Traceback" in refused.text) == (2, True, False), refused.text
        assert len([line for line in refused.err.splitlines() if line.startswith("error: ")]) == 1, refused.err
    assert stack.fab("jobs", "--json").out == before


def test_destroy_leaves_nothing(stack: Stack) -> None:
    stack.pulumi("destroy", "--yes", "--skip-preview")
    stack.wait_for_leftovers()
    assert not stack.folder.exists()
