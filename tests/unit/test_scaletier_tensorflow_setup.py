"""A process's share of the machine, and TensorFlow's log messages."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ops.submit import environment
from scaletier.job import Job, JobError
from scaletier.run import main
from scaletier.tensorflow_setup import (
    ACCELERATOR,
    CPU_DEVICES,
    StopRequest,
    available_cpus,
    available_memory,
    devices_of,
    give_memory_back,
    import_tensorflow,
    local_devices,
    one_line,
    say_device,
    say_on_device,
    send,
)


@pytest.fixture(autouse=True)
def whole_tensorflow() -> None:
    """Import all of TensorFlow first: a server imports a part of it, which other tests cannot use."""
    import_tensorflow()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_pauses_while_tensorflow_is_imported(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    before = gc.isenabled()
    monkeypatch.delitem(sys.modules, "tensorflow")
    monkeypatch.setattr("importlib.import_module", lambda name: (name, gc.isenabled()))
    try:
        gc.enable() if enabled else gc.disable()
        assert import_tensorflow() == ("tensorflow", False)
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if before else gc.disable()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("quota", "expected"), [("100000 100000", 1), ("250000 100000", 3), ("1000 100000", 1), ("max 100000", 1024), ("", 1024)]
)
def test_cpus_are_the_minimum_of_affinity_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, quota: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    (tmp_path / "cpu").mkdir()
    if version == 2:
        (tmp_path / "cpu.max").write_text(quota)
    elif quota:
        (tmp_path / "cpu/cpu.cfs_quota_us").write_text(quota.split()[0].replace("max", "-1") + "\n")
        (tmp_path / "cpu/cpu.cfs_period_us").write_text(quota.split()[1] + "\n")
    assert available_cpus(tmp_path) == min(4, expected)
    assert available_cpus(tmp_path / "missing") == 4


def test_an_error_is_one_line_without_the_names_of_nodes() -> None:
    message = "{{function_node __wrapped__X_device_/job:localhost}} corrupted\nrecord at 0 [Op:IteratorGetNext] name: "
    assert one_line(ValueError(message)) == "corrupted record at 0"
    assert one_line(ValueError("\x1b[1mNo such shape.\x1b[0m")) == "No such shape."


def test_log_messages_are_hidden_unless_the_import_fails() -> None:
    script = (
        "import os, sys\nfrom scaletier.tensorflow_setup import quiet_stderr\nwith quiet_stderr():\n os.write(2, b'noise')\n {}"
    )
    quiet = subprocess.run([sys.executable, "-c", script.format("pass")], capture_output=True, text=True, check=True)
    assert quiet.stderr == ""
    loud = subprocess.run([sys.executable, "-c", script.format("sys.exit(3)")], capture_output=True, text=True, check=False)
    assert (loud.returncode, loud.stderr) == (3, "noise")


def test_an_error_within_a_graph_is_printed_without_its_code() -> None:
    code = 'Detected at node while/IteratorGetNext defined at (most recent call last):\n  File "task.py", line 9, in f\n\n'
    message = f"Graph execution error:\n\n{code}/data/train; No such file\n\t [[{{{{node while/IteratorGetNext}}}}]] [Op:f_58]"
    assert one_line(ValueError(message)) == "/data/train; No such file"


@pytest.mark.parametrize("module", ["trainer.task", "trainer.records"])
def test_a_missing_tensorflow_is_one_line(tmp_path: Path, module: str) -> None:
    for number in range(2):
        (folder := tmp_path / "pictures" / f"class{number}").mkdir(parents=True)
        (folder / "x.png").write_bytes(b"x")
    script = (
        "import runpy, sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('tensorflow', 'tensorboard', 'numpy'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
    )
    flags = {"trainer.task": ["--train-data", "x", "--eval-data", "x", "--job-dir", str(tmp_path)]}
    flags["trainer.records"] = ["--source", str(tmp_path / "pictures"), "--dest", str(tmp_path / "made")]
    result = subprocess.run([sys.executable, "-c", script, *flags[module]], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.endswith("error: there is no TensorFlow here: `make tensorflow` installs it for this machine\n")
    assert "Traceback" not in result.stderr


def test_a_host_with_a_paid_gpu_reports_a_missing_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(import_tensorflow().config, "list_physical_devices", lambda kind: [])
    monkeypatch.setattr("scaletier.tensorflow_setup.available_cpus", lambda: 1)
    assert ACCELERATOR == environment.ACCELERATOR
    paid = {ACCELERATOR: "1 nvidia-tesla-t4"}
    with pytest.raises(
        JobError, match=r"^this host has 1 nvidia-tesla-t4 and TensorFlow finds no GPU: .*; --allow-cpu trains "
    ):
        say_device(False, paid)
    assert capsys.readouterr().out == ""
    say_device(True, paid)
    say_device(False, {})
    assert capsys.readouterr().out == "Trains on 1 processor\n" * 2


def test_a_host_computes_on_all_gpus_or_on_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    tf = import_tensorflow()
    assert local_devices() == ("/device:CPU:0",)
    names = ["chief/0:GPU:0", "worker/0:GPU:0", "worker/0:GPU:1", "chief/0:CPU:0", "worker/0:CPU:0", "worker/1:CPU:0"]
    parts = [re.fullmatch(r"(\w+)/(\d):(\w+):(\d)", name) for name in names]
    devices = [(part[3], "/job:{}/replica:0/task:{}/device:{}:{}".format(*part.groups())) for part in parts if part]

    def logical(kind: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for of_kind, name in devices if of_kind == kind]

    monkeypatch.setattr(tf.config, "list_logical_devices", logical)
    assert devices_of("chief", 0) == ("/device:GPU:0",)
    assert devices_of("worker", 0) == ("/device:GPU:0", "/device:GPU:1")
    assert devices_of("worker", 1) == ("/device:CPU:0",)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind] * 2)
    assert local_devices() == ("/device:GPU:0", "/device:GPU:1")


def test_a_line_for_another_host_is_converted_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the other host the conversion would hold Python's lock until that host answers."""
    tf, calls = import_tensorflow(), list[object]()

    @contextlib.contextmanager
    def on_this_host() -> Iterator[None]:
        calls.append("here")
        yield
        calls.append("there")

    monkeypatch.setattr("scaletier.tensorflow_setup.on_this_process", on_this_host)
    monkeypatch.setattr(tf.raw_ops, "PrintV2", lambda **given: calls.append(tf.is_tensor(given["input"])))
    say_on_device("a line")
    assert calls == ["here", "there", True]


def test_an_array_is_sent_in_parts_that_are_smaller_than_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    tf, sizes = import_tensorflow(), list[int]()
    monkeypatch.setattr("scaletier.tensorflow_setup.MAX_MESSAGE_BYTES", 64)
    constant = tf.constant

    def record(value: Any, *arguments: Any) -> Any:
        sizes.append(getattr(value, "nbytes", 0))
        return constant(value, *arguments)

    monkeypatch.setattr(tf, "constant", record)
    for shape in ((), (3,), (5, 4), (16,), (17, 1), (1, 40), (2, 100)):
        for value in (
            np.ones(shape, np.float32) * 0.5,
            np.zeros(shape, np.float64),
            np.ones(shape, bool),
            np.zeros(shape, bool),
        ):
            sent = send(value, "/device:CPU:0")
            np.testing.assert_array_equal(sent, value)
            assert sent.dtype == value.dtype
    assert max(sizes) <= 64


@pytest.mark.parametrize("role", ["ps", "worker", "chief"])
@pytest.mark.parametrize("text", ["two", "0", "-1", ""])
def test_an_invalid_number_of_devices_is_one_line(
    role: str, text: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "chief": ["127.0.0.1:3"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": role, "index": 0}}))
    monkeypatch.setenv(CPU_DEVICES, text)
    assert main(Job(None, None), []) == 2
    expected = f"error: SCALETIER_CPU_DEVICES={text!r} is not a number of devices; valid are 1 and above\n"
    assert capfd.readouterr().err.endswith(expected)


@pytest.mark.parametrize("role", ["worker", "chief"])
def test_a_missing_paid_gpu_ends_each_training_replica(
    role: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "chief": ["127.0.0.1:3"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": role, "index": 0}}))
    monkeypatch.setenv(ACCELERATOR, "1 nvidia-tesla-t4")
    monkeypatch.setattr(import_tensorflow().config, "list_physical_devices", lambda kind=None: [])
    monkeypatch.setattr(importlib.import_module("scaletier.run"), "server_library", lambda: pytest.fail("it serves for ever"))
    assert main(Job(None, None), []) == 2
    assert capfd.readouterr().err.startswith("error: this host has 1 nvidia-tesla-t4 and TensorFlow finds no GPU: ")


def test_the_memory_of_a_host_is_the_least_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert available_memory(tmp_path) == 4_096_000
    for name, texts in {"memory.max": ("max", "5000"), "memory/memory.limit_in_bytes": ("9223372036854771712", "4000")}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        for text in texts:
            (tmp_path / name).write_text(f"{text}\n")
            assert available_memory(tmp_path) == min(int(text) if text != "max" else 4_096_000, 4_096_000)
        (tmp_path / name).unlink()


def test_free_memory_is_released_once_a_process_is_large_and_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, trims = iter([0.9e9, 1.5e9, 1.6e9, 1.7e9]), list[int]()
    monkeypatch.setattr("scaletier.tensorflow_setup.resident_bytes", lambda: next(sizes))
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace(malloc_trim=trims.append))
    least, released = 1e9, []
    for _ in range(4):
        least = give_memory_back(least)
        released.append(len(trims))
    assert released == [0, 1, 1, 2]


@pytest.mark.parametrize("role", ["ps", "worker"])
def test_a_server_returns_memory_as_it_grows(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, events = importlib.import_module("scaletier.run"), list[str]()
    server = SimpleNamespace(join=lambda: events.append("serves"))
    monkeypatch.setattr(run, "server_library", lambda: (lambda *_, **__: server, lambda **_: None))
    monkeypatch.setattr(run, "reuse_memory", lambda: None)
    monkeypatch.setattr(run, "give_memory_back_on_growth", lambda: events.append("watches"))
    cluster = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "chief": ["127.0.0.1:3"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": role, "index": 0}}))
    with pytest.raises(SystemExit):
        main(Job(None, None), [])
    assert events == ["watches", "serves"]


KEEP_AND_FREE = """
import ctypes
from scaletier.tensorflow_setup import give_memory_back, reuse_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4 // 1024

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
reuse_memory()
pieces = [libc.malloc(1 << 20) for _ in range(200)]
for piece in pieces:
    ctypes.memset(piece, 1, 1 << 20)
full = resident()
for piece in pieces:
    libc.free(piece)
kept = resident()
give_memory_back(0)
print(full - kept, full - resident())
"""


def test_free_memory_is_kept_until_it_is_released() -> None:
    result = subprocess.run([sys.executable, "-c", KEEP_AND_FREE], capture_output=True, text=True, check=True)
    kept_mb, returned_mb = map(int, result.stdout.split())
    assert kept_mb < 20 and returned_mb > 150, "MB of 200"


def test_a_stop_request_is_noted_while_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.signal(signal.SIGUSR1, stop := StopRequest())
    try:
        assert not stop.wait(0.0)
        monkeypatch.setattr("time.sleep", lambda _: signal.raise_signal(signal.SIGUSR1))
        assert stop.wait()
        assert stop.is_set()
        assert not any(hasattr(value, "acquire") or hasattr(value, "notify") for value in vars(stop).values()), "it has no lock"
    finally:
        signal.signal(signal.SIGUSR1, handler)
