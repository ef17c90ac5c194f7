"""Change every key of the configuration on a live stack, as in docs/operate.md's table; the bucket stays."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml
from stacks import ROOT, Stack

from infra.lxd.layout import candidate_network

_RANGE, _OTHER_RANGE = (candidate_network(str(ROOT), attempt) for attempt in range(2))
"""Ranges that the tests of another checkout do not use."""
_PAIR = {
    "scaleTier": "CUSTOM",
    "masterType": "n1-standard-4",
    "workerType": "n1-standard-4",
    "workerCount": "1",
    "network": str(_RANGE),
}
_FILE = "/bucket/models/kept/v1"


@pytest.fixture(scope="module")
def pair() -> Iterator[Stack]:
    """Bring up a master and a worker, with data in the bucket; changes by tests persist."""
    with Stack("e2e-keys", _PAIR) as stack:
        write_config(stack, forceDestroy=None)
        stack.up()
        stack.must_ssh("master-0", f"mkdir -p {_FILE} && echo weights >{_FILE}/weights")
        yield stack


def write_config(stack: Stack, **values: Any) -> None:
    """Write keys of the configuration, or remove those that are None, in one write like `pulumi config`."""
    settings = yaml.safe_load(stack.file.read_text())
    changed = settings["config"] | {f"scaletier:{key}": value for key, value in values.items()}
    present = {key: value for key, value in changed.items() if value is not None}
    stack.file.write_text(yaml.safe_dump({**settings, "config": present}))


def preview_operations(stack: Stack) -> dict[str, str]:
    """Return the operations of `pulumi preview` by resource name, without unchanged ones."""
    result = stack.run("pulumi", "preview", "--json", "--non-interactive")
    assert result.code == 0, result.text
    changes: dict[str, set[str]] = {}
    for step in json.loads(result.out)["steps"]:
        if step["op"] not in ("same", "refresh"):
            changes.setdefault(step["urn"].rpartition("::")[2], set()).add(step["op"])
    return {name: "replace" if "replace" in ops else "/".join(sorted(ops)) for name, ops in changes.items()}


def run_refused(stack: Stack, command: str, *arguments: str) -> str:
    """Return the one error line of a refused Pulumi command."""
    result = stack.run("pulumi", command, *arguments, "--non-interactive")
    assert result.code != 0, result.text
    assert "Traceback" not in result.text
    lines = {line.partition("error: ")[2] for line in result.text.splitlines() if line.strip().startswith("error: ")}
    (line,) = lines - {"update failed", "preview failed"}
    return line


def bucket_has_data(stack: Stack) -> bool:
    return stack.ssh("master-0", f"cat {_FILE}/weights").out == "weights\n"


_BUSY = """
import time
cpu, start = time.process_time(), time.monotonic()
while time.monotonic() < start + 1:
    pass
print((time.process_time() - cpu) / (time.monotonic() - start))
"""
_FILES = {"ready": "update", "operator-files": "update"}
_HOSTS = {"master-0": "update", "worker-0": "update", **_FILES}
_CHANGES: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"disruptJobs": True, "provisioningModel": {"worker": "SPOT"}, "retainBucket": True}, {"seal": "update"}),
    (
        {
            "cpus": {"master": 1, "worker": 0.25},
            "labels": {"team": "blue"},
            "workerType": "n1-highmem-4",
            "servingCount": 1,
            "workerCount": 2,
        },
        {**_HOSTS, "worker-1": "create", "serving-0": "create", "firewall": "update"},
    ),
    ({"workerCount": 0, "memory": {"master": "900MiB"}}, {**_HOSTS, "worker-0": "delete", "firewall": "update"}),
    (
        {"network": str(_OTHER_RANGE)},
        {**_HOSTS, "master-0": "replace", "worker-0": "replace", "network": "update", "firewall": "update"},
    ),
]
_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"storagePool": "default"}, "storagePool is default, and the bucket is in scaletier"),
    ({"target": "gcp"}, "target is gcp, and this stack is up on lxd"),
]


@contextmanager
def change_config(stack: Stack, keys: dict[str, Any]) -> Iterator[None]:
    """Change keys of the configuration during the context."""
    before = stack.settings
    write_config(stack, **keys)
    try:
        yield
    finally:
        stack.file.write_text(before)


def test_every_key_on_a_live_stack(pair: Stack) -> None:
    for keys, expected in _CHANGES:
        with change_config(pair, keys):
            assert preview_operations(pair) == expected, keys
    for keys, message in _REFUSED:
        with change_config(pair, keys):
            assert message in run_refused(pair, "preview")
    write_config(pair, **_CHANGES[1][0] | _CHANGES[3][0] | {"workerCount": 1, "memory": {"worker": "900MiB"}})
    pair.up()
    assert bucket_has_data(pair)
    assert pair.hosts() == ["master-0", "worker-0", "serving-0"]
    assert {address.rpartition(".")[0] for address in pair.addresses.values()} == {str(_OTHER_RANGE[0]).rpartition(".")[0]}
    assert float(pair.ssh("worker-0", f"python3 -c {shlex.quote(_BUSY)}").out) < 0.35, "seconds of CPU time a second"


def test_a_bucket_survives_a_rename_and_destruction_of_its_stack(pair: Stack) -> None:
    names, hosts = pair.names, pair.hosts()
    pair.rename("e2e-renamed")
    assert preview_operations(pair) == {"project": "update", "operator-files": "replace"}
    pair.up()
    assert (pair.names, pair.hosts(), bucket_has_data(pair)) == (names, hosts, True)
    message = run_refused(pair, "destroy", "--yes", "--skip-preview")
    assert "the bucket contains models (kept), so nothing was destroyed" in message
    assert (pair.hosts(), bucket_has_data(pair)) == (hosts, True)
    write_config(pair, retainBucket=True)
    pair.up()
    assert f"in LXD's project {names.project}" in pair.pulumi("destroy", "--yes", "--skip-preview")
    pair.wait_for_leftovers(f"project {names.project} (its retained bucket)")
    write_config(pair, retainBucket=None, forceDestroy=True, workerCount=0)
    pair.up()
    assert (pair.names, bucket_has_data(pair)) == (names, True)
    pair.pulumi("destroy", "--yes", "--skip-preview")
    pair.wait_for_leftovers()
