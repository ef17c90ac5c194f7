"""What `fab train` left on the host, read and checked; and what the trainer and systemd are told."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from replica.config import Config, ConfigError, load
from replica.notify import notify
from replica.record import Plan

PLAN = Plan("job01", "ps-0", ["master-0", "ps-0"], "trainer.task", ["--x"], "/bucket", "/package")


def write(etc: Path, plan: dict[str, Any], tf_config: str = '{"task": {}}') -> dict[str, str]:
    (etc / "replica.json").write_text(json.dumps(plan))
    (etc / "tf_config.json").write_text(tf_config)
    return {"SCALETIER_ETC": str(etc), "SCALETIER_STATE": "/state"}


def test_load(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, asdict(PLAN)))
    assert loaded == Config(PLAN, '{"task": {}}', Path("/state/logs"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"jobId": "1st"}, "jobId '1st' must be a letter"),
        ({"jobId": 1}, "must be texts"),
        ({"module": ""}, "must be texts"),
        ({"args": "--x"}, "args must be a list of texts"),
        ({"args": [1]}, "args must be a list of texts"),
        ({"replica": "ps-9"}, "'ps-9' is not one of replicas: master-0, ps-0"),
        ({"maxRestarts": -1}, "maxRestarts must be a whole number"),
        ({"pollSeconds": 0}, "pollSeconds must be a number of seconds above 0"),
        ({"stopSeconds": "10"}, "stopSeconds must be a number of seconds above 0"),
    ],
)
def test_a_bad_plan_says_what_is_wrong(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, asdict(PLAN) | changes))
    assert str(caught.value).startswith(f"{tmp_path}/replica.json: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_tf_config(tmp_path: Path) -> None:
    environ = write(tmp_path, asdict(PLAN), tf_config="{")
    with pytest.raises(ConfigError, match=r"tf_config\.json: Expecting"):
        load(environ)
    (tmp_path / "tf_config.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(environ)
    (tmp_path / "tf_config.json").unlink()
    with pytest.raises(ConfigError, match="fab train writes it"):
        load(environ)


def test_the_environment_of_the_trainer() -> None:
    config = Config(PLAN, "{}", Path("/state/logs"))
    env = config.trainer_env({"PYTHONPATH": "/opt/scaletier", "TYPE": "ps", "NOTIFY_SOCKET": "/run/x", "JOURNAL_STREAM": "8:1"})
    assert env == {"PYTHONPATH": "/package:/opt/scaletier", "TYPE": "ps", "TF_CONFIG": "{}", "PYTHONUNBUFFERED": "1"}
    assert replace(config).trainer_env({})["PYTHONPATH"] == "/package"


@pytest.mark.parametrize("address", ["{tmp}/notify", "@scaletier-{tmp}"])
def test_notify(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = address.format(tmp=tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + address[1:] if address.startswith("@") else address)
        systemd.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        notify("READY=1", "STATUS=job job01")
        assert systemd.recv(4096) == b"READY=1\nSTATUS=job job01"
    notify("STATUS=nobody listens")
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify("STATUS=nobody is there")
