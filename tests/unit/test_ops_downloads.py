"""Check downloads: shown by name and size, refused before they start, and replaced by CPU builds."""

from __future__ import annotations

import functools
import http.server
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from opsdata import write_files
from test_ops_dependencies import build_error, make_trainer, make_wheel
from test_ops_runtimes import local_inventory, write_requirements

from infra.inventory import Inventory
from infra.runtime import uv
from ops import terminal
from ops.errors import UsageError
from ops.package import dependencies, package, runtimes
from ops.package.install import _Progress
from ops.submit.config import JobFlags, build_job
from ops.submit.runtimes import _list

__all__ = ["local_inventory"]


class Web:
    """Serve a folder of wheels as a package index on this machine."""

    def __init__(self, folder: Path) -> None:
        self.downloads: list[str] = []
        downloads = self.downloads

        class Handler(http.server.SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                downloads.append(self.path.rpartition("/")[2])
                super().do_GET()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def web(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(dependencies, "CACHE", tmp_path / "cache")
    server = Web(index)
    monkeypatch.setenv("PIP_FIND_LINKS", server.url)
    monkeypatch.setenv("UV_NO_CACHE", "1")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.close()


def make_large_wheel(folder: Path, name: str, size: int, needs: str = "") -> Path:
    return make_wheel(folder, name, files={f"{name}/data": "x" * size}, needs=needs)


def test_too_large_dependencies_are_refused_before_the_download(
    web: Web, index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(package, "LIMIT", package.MEGABYTE)
    make_large_wheel(index, "xgboost", 30_000_000)
    error = build_error(make_trainer(tmp_path, "xgboost\n"))
    assert error.startswith("mine and its dependencies have 30 MB, 1 MB at most; largest is xgboost with 30 MB: ")
    assert (
        "xgboost-cpu is the CPU build of xgboost; a Python of the job's own has no limit (--runtime requirements.txt)" in error
    )
    assert not list((tmp_path / "cache").glob("*"))


def test_a_download_shows_its_size(
    web: Web, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_large_wheel(index, "far", 2_000_000, "near")
    make_large_wheel(index, "near", 2_000_000)
    monkeypatch.setattr(dependencies.terminal, "ProgressLine", functools.partial(terminal.ProgressLine, always=True))
    package.build(make_trainer(tmp_path, "far\n"), "mine.task")
    assert re.search(r"fetching dependencies 4\.0 MB \(", capsys.readouterr().err)


def test_the_progress_line() -> None:
    updates: list[dict[str, int]] = []
    progress = _Progress(lambda sizes: updates.append(dict(sizes)))
    assert (progress.describe(), progress.total) == ("", "")
    progress.read("   Building six==1.0")
    assert progress.describe() == "building six==1.0"
    progress = _Progress(lambda sizes: updates.append(dict(sizes)))
    for line in ("Downloading torch (858.1MiB)", "Downloading nvidia-cudnn-cu12 (1.5GiB)", " Downloaded torch"):
        progress.read(line)
    assert progress.describe() == "1 of 2 large packages fetched, 2.5 GB in all"
    assert updates == [{"torch": 899_783_066}, {"torch": 899_783_066, "nvidia-cudnn-cu12": 1_610_612_736}]
    progress.read("Downloading six")
    progress.read("   Downloaded nvidia-cudnn-cu12")
    assert progress.describe() == "2 of 2 large packages fetched, 2.5 GB in all"
    progress.read("Prepared 3 packages in 1s")
    assert (progress.describe(), progress.total) == ("installing", "2.5 GB")


@pytest.mark.parametrize(
    ("size", "count"), [("5B", 5), ("1.5KiB", 1536), ("2MiB", 2_097_152), ("1GiB", 1_073_741_824), ("1XB", None)]
)
def test_the_units_of_a_download(size: str, count: int | None) -> None:
    updates: list[dict[str, int]] = []
    _Progress(lambda sizes: updates.append(dict(sizes))).read(f"Downloading far ({size})")
    assert updates == ([] if count is None else [{"far": count}])


def test_an_exception_of_on_line_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(line: str) -> None:
        raise UsageError(line)

    endless = [sys.executable, "-uc", "import time\nprint('enough')\ntime.sleep(600)"]
    monkeypatch.setattr(uv, "command", lambda *_: endless)
    with pytest.raises(UsageError, match=r"^enough$"):
        uv.install(tmp_path, "3.11", [], on_line=stop)


@pytest.mark.parametrize(
    ("line", "replacement"),
    [
        ("tensorflow==2.19.1", "tensorflow-cpu==2.19.1"),
        ("TensorFlow[and-cuda]>=2.18,<2.20; python_version < '3.12'", 'tensorflow-cpu<2.20,>=2.18; python_version < "3.12"'),
        ("xgboost", "xgboost-cpu"),
        ("tensorflow==2.19.1 --hash=sha256:00", "tensorflow==2.19.1 --hash=sha256:00"),
        ("tensorflow @ https://example.org/x.whl", "tensorflow @ https://example.org/x.whl"),
        ("tensorflow-cpu", "tensorflow-cpu"),
        ("--index-url https://example.org", "--index-url https://example.org"),
        ("torch", "torch"),
    ],
)
def test_cpu_builds_replace_gpu_builds(line: str, replacement: str) -> None:
    assert runtimes.cpu_builds([line]) == [replacement]


def test_torch_without_an_index_or_a_hash_is_detected() -> None:
    assert runtimes.names_torch(["numpy", "torch==2.9.0"])
    assert runtimes.names_torch(["torch==2.9.0+cpu"])
    assert not runtimes.names_torch(["numpy"])
    assert not runtimes.names_torch([runtimes.TORCH_INDEX, "torch"])
    assert not runtimes.names_torch(["torch==2.9.0 --hash=sha256:00"])
    of_torch = f"a line {runtimes.TORCH_INDEX} above torch fetches its CPU build; "
    assert runtimes.cpu_remedy(["far", "Torch"]) == runtimes.cpu_remedy(["torch", "nvidia_cublas_cu12"]) == of_torch
    both = "tensorflow-cpu is the CPU build of tensorflow; xgboost-cpu is the CPU build of xgboost; "
    assert runtimes.cpu_remedy(["xgboost", "far", "TensorFlow", "nvidia_cublas_cu12"]) == both
    assert runtimes.cpu_remedy(["far", "nvidia-cublas-cu12"]) == ""


def build_runtime(requirements_file: str, inventory: Inventory) -> dict[str, str]:
    job = build_job(JobFlags("j", runtime=requirements_file), inventory, "mine")
    assert job.runtime
    return runtimes.build(inventory, job.runtime)


def test_a_runtime_has_cpu_builds_without_gpus(
    local_inventory: Inventory, index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("xgboost_cpu", "xgboost", "tensorflow"):
        make_wheel(index, name)
    requirements_file = write_requirements(tmp_path, "xgboost==1.0\n")
    assert build_runtime(requirements_file, local_inventory) == {"xgboost-cpu": "1.0"}
    assert "no host has a GPU, so CPU builds are installed: xgboost-cpu==1.0\n" in capsys.readouterr().err
    gpus = tuple(replace(host, accelerator={"type": "t4", "count": 1}) for host in local_inventory.hosts)
    assert build_runtime(requirements_file, replace(local_inventory, hosts=gpus)) == {"xgboost": "1.0"}
    requirements_file = write_requirements(tmp_path, "tensorflow==1.0\n")  # which has no CPU build
    assert build_runtime(requirements_file, local_inventory) == {"tensorflow": "1.0"}


def test_runtimes_list_their_requirements(
    local_inventory: Inventory, index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_wheel(index, needs="near")
    make_wheel(index, "near")
    build_runtime(write_requirements(tmp_path, "far\n"), local_inventory)
    (runtime,) = (tmp_path / "runtimes").iterdir()
    (row_data,) = _list({runtime.name: runtime}, as_json=False)
    assert row_data["requirements"] == ["far"]
    header, row = capsys.readouterr().out.splitlines()
    assert header.endswith("ASKED FOR")
    assert row.endswith(" far")


def test_a_runtime_can_use_files_beside_its_requirements(local_inventory: Inventory, index: Path, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    make_wheel(tmp_path / "wheels")
    make_wheel(tmp_path, "near")
    write_files(tmp_path, {"more/more.txt": "far\n"})
    requirements_file = write_requirements(tmp_path, "--find-links ./wheels\n-r more/more.txt\n./near-1.0-py3-none-any.whl\n")
    assert build_runtime(requirements_file, local_inventory) == {"far": "1.0", "near": "1.0"}
