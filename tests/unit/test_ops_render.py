"""The files of a host: TF_CONFIG, the plan, the environment and the unit, and that no value can break out of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opsdata import inventory_json

from ops.cluster.inventory import Inventory, parse
from ops.train.config import Flags, Job, build_job
from ops.train.render import environment_quoted, render, unit_quoted
from replica.record import Plan


def files(inventory: Inventory, job: Job, host: str) -> dict[str, str]:
    return {file.path: file.content for file in render(inventory, job)[host]}


def read_environment_file(text: str) -> dict[str, str]:
    """What systemd makes of an EnvironmentFile: after its parse_env_file_internal, for double-quoted values."""
    values: dict[str, str] = {}
    at = 0
    while at < len(text):
        if text[at] in "\n ":
            at += 1
        elif text[at] in "#;":
            at = text.index("\n", at)
        else:
            equals = text.index("=", at)
            name, at, value = text[at:equals], equals + 1, ""
            assert text[at] == '"'
            at += 1
            while text[at] != '"':
                if text[at] == "\\":
                    at += 1
                    value += text[at] if text[at] in '"\\`$' else "" if text[at] == "\n" else "\\" + text[at]
                else:
                    value += text[at]
                at += 1
            values[name], at = value, at + 1
    return values


PRINTABLE = st.characters(exclude_categories=["Cs", "Cc"], include_characters="\t\n")


@given(st.text(PRINTABLE))
def test_a_value_arrives_in_the_environment_as_it_was(value: str) -> None:
    assert read_environment_file(f"A={environment_quoted(value)}\nB={environment_quoted('b')}\n") == {"A": value, "B": "b"}


@pytest.mark.parametrize("value", ["\0", "\r", "\x1b[0m", "\x7f", "\udcff"])
def test_a_value_that_systemd_would_drop_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="control characters"):
        environment_quoted(value)


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_a_path_in_a_unit_stays_one_word(value: str) -> None:
    quoted = unit_quoted(value)
    inner = quoted[1:-1].replace("%%", "").replace("\\\\", "").replace('\\"', "")
    assert quoted[0] == quoted[-1] == '"'
    assert not {"%", "\\", '"'} & set(inner)


def test_every_host_has_the_same_files(inventory: Inventory) -> None:
    rendered = render(inventory, build_job(Flags("job01"), inventory))
    assert list(rendered) == list(inventory.names)
    for host_files in rendered.values():
        assert [(file.path, oct(file.mode), file.group) for file in host_files] == [
            ("/etc/scaletier/replica.json", "0o640", "trainer"),
            ("/etc/scaletier/tf_config.json", "0o640", "trainer"),
            ("/etc/scaletier/environment", "0o640", "trainer"),
            ("/etc/systemd/system/scaletier.service", "0o644", "root"),
            ("/etc/systemd/system/multi-user.target.wants/scaletier.service", "0o777", "root"),
        ]


def test_tf_config(inventory: Inventory) -> None:
    job = build_job(Flags("job01", args="--name 'a b'"), inventory)
    cluster = {"ps": ["10.0.0.32:2222"], "chief": ["10.0.0.2:2222"], "worker": ["10.0.0.64:2222", "10.0.0.65:2222"]}
    for host, task in {"master-0": ("chief", 0), "worker-1": ("worker", 1), "evaluator-0": ("evaluator", 0)}.items():
        config = json.loads(files(inventory, job, host)["/etc/scaletier/tf_config.json"])
        assert config["cluster"] == cluster
        assert config["task"] == {"type": task[0], "index": task[1]}
        assert config["job"]["args"] == ["--name", "a b"]
        assert config["environment"] == "cloud"


def test_tf_config_as_the_seeds_code_reads_it(inventory: Inventory) -> None:
    job = dataclasses.replace(build_job(Flags("job01"), inventory), use_chief=False)
    config = json.loads(files(inventory, job, "master-0")["/etc/scaletier/tf_config.json"])
    assert "master" in config["cluster"]
    assert "chief" not in config["cluster"]
    assert config["task"]["type"] == "master"


def test_the_environment(inventory: Inventory) -> None:
    job = build_job(Flags("job01"), inventory)
    assert read_environment_file(files(inventory, job, "master-0")["/etc/scaletier/environment"]) == {
        "TYPE": "master",
        "INDEX": "0",
        "JOB_ID": "job01",
        "JOB_DIR": "/bucket/jobs/job01/output",
        "SCALETIER_DATA": "/bucket/data/mnist",
        "HOME": "/var/lib/scaletier",
        "PYTHONUNBUFFERED": "1",
    }


@given(st.lists(st.text(), max_size=4))
def test_the_plan_has_every_argument_byte_for_byte(args: list[str]) -> None:
    inventory = parse(inventory_json(), Path("/nowhere"))
    job = Job("job01", "trainer.task", tuple(args), "/bucket/jobs/job01/output", training_input={"args": args})
    content = files(inventory, job, "worker-0")["/etc/scaletier/replica.json"]
    assert content.isascii()
    assert Plan.from_json(content).args == args


def test_the_unit(inventory: Inventory) -> None:
    unit = files(inventory, build_job(Flags("job01"), inventory), "ps-0")["/etc/systemd/system/scaletier.service"]
    lines = unit.splitlines()
    for line in (
        "ExecStart=/opt/scaletier/venv/bin/python -m replica",
        "User=trainer",
        "UMask=0002",
        "Restart=on-failure",
        "MemoryMax=1800000000",
        "PrivateDevices=yes",
        'ReadWritePaths=/var/lib/scaletier "/bucket"',
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "CapabilityBoundingSet=",
        "SystemCallFilter=@system-service",
        "TimeoutStopSec=20",
        "WantedBy=multi-user.target",
    ):
        assert line in lines
    assert "{" not in unit


def test_the_unit_of_a_host_with_a_gpu_and_a_bucket_elsewhere(tmp_path: Path) -> None:
    hosts = json.loads(inventory_json())["hosts"]
    hosts[1]["accelerator"] = {"type": "nvidia-tesla-t4", "count": 1}
    inventory = parse(inventory_json(hosts=hosts, bucket="gs://b", operatorBucket="gs://b"), tmp_path)
    job = build_job(Flags("job01"), inventory)
    unit = files(inventory, job, "master-0")["/etc/systemd/system/scaletier.service"]
    assert "PrivateDevices=no" in unit
    assert "ReadWritePaths=/var/lib/scaletier\n" in unit
    assert job.job_dir == "gs://b/jobs/job01/output"
