"""Downloads: shown by name and size, refused before they start, and replaced by CPU builds."""

from __future__ import annotations

import functools
import http.server
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_ops_dependencies import refused, trainer, wheel
from test_ops_runtimes import HOSTS_SEE, requirements

from infra.inventory import Inventory
from infra.runtime import uv
from ops import terminal
from ops.errors import UsageError
from ops.package import dependencies, package, runtimes
from ops.package.install import _Progress
from ops.submit.config import JobFlags, build_job
from ops.submit.runtimes import _list


class Web:
    """A package index on this machine, of a folder of wheels."""

    def __init__(self, folder: Path) -> None:
        self.fetched: list[str] = []
        fetched = self.fetched

        class Handler(http.server.SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                fetched.append(self.path.rpartition("/")[2])
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
    made = Web(index)
    monkeypatch.setenv("PIP_FIND_LINKS", made.url)
    monkeypatch.setenv("UV_NO_CACHE", "1")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield made
    made.close()


def large(folder: Path, name: str, size: int, needs: str = "") -> Path:
    return wheel(folder, name, files={f"{name}/data": "x" * size}, needs=needs)


def test_what_is_too_much_is_refused_before_it_is_fetched(
    web: Web, index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(package, "LIMIT", package.MEGABYTE)
    large(index, "xgboost", 30_000_000)
    says = refused(trainer(tmp_path, "xgboost\n"))
    assert says.startswith("mine and its dependencies have 30 MB, 1 MB at most; largest is xgboost with 30 MB: ")
    assert "xgboost-cpu is xgboost for processors; a Python of the job's own has no limit (--runtime requirements.txt)" in says
    assert not list((tmp_path / "cache").glob("*"))


def test_a_dependency_is_shown_by_name_and_size(
    web: Web, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    large(index, "far", 2_000_000, "near")
    large(index, "near", 2_000_000)
    monkeypatch.setattr(dependencies.terminal, "Step", functools.partial(terminal.Step, always=True))
    package.build(trainer(tmp_path, "far\n"), "mine.task")
    assert re.search(r"fetching dependencies 4\.0 MB \(", capsys.readouterr().err)


def test_the_line_that_is_shown() -> None:
    seen: list[dict[str, int]] = []
    shown = _Progress(lambda sizes: seen.append(dict(sizes)))
    assert (shown.line(), shown.total) == ("", "")
    shown.read("   Building six==1.0")
    assert shown.line() == "building six==1.0"
    shown = _Progress(lambda sizes: seen.append(dict(sizes)))
    for line in ("Downloading torch (858.1MiB)", "Downloading nvidia-cudnn-cu12 (1.5GiB)", " Downloaded torch"):
        shown.read(line)
    assert shown.line() == "1 of 2 large packages fetched, 2.5 GB in all"
    assert seen == [{"torch": 899_783_066}, {"torch": 899_783_066, "nvidia-cudnn-cu12": 1_610_612_736}]
    shown.read("Prepared 3 packages in 1s")
    assert (shown.line(), shown.total) == ("installing", "2.5 GB")


def test_what_is_raised_by_a_line_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(line: str) -> None:
        raise UsageError(line)

    endless = [sys.executable, "-uc", "import time\nprint('enough')\ntime.sleep(600)"]
    monkeypatch.setattr(uv, "command", lambda *_: endless)
    with pytest.raises(UsageError, match=r"^enough$"):
        uv.install(tmp_path, "3.11", [], on_line=stop)


@pytest.mark.parametrize(
    ("line", "instead"),
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
def test_builds_for_processors(line: str, instead: str) -> None:
    assert runtimes.cpu_builds([line]) == [instead]


def test_pytorch_with_cuda_is_seen() -> None:
    assert runtimes.asks_for_cuda(["numpy", "torch==2.9.0"])
    assert not runtimes.asks_for_cuda(["numpy"])
    assert not runtimes.asks_for_cuda([runtimes.TORCH_INDEX, "torch"])
    assert not runtimes.asks_for_cuda(["torch==2.9.0+cpu"])
    assert "download.pytorch.org/whl/cpu" in runtimes.cpu_remedy(["torch", "nvidia_cublas_cu12"])
    assert runtimes.cpu_remedy(["far"]) == ""


@pytest.fixture
def local(inventory: Inventory, tmp_path: Path) -> Inventory:
    return replace(inventory, runtimes=HOSTS_SEE, operator_runtimes=str(tmp_path / "runtimes"))


@pytest.fixture
def built(local: Inventory) -> Callable[[str, Inventory], dict[str, str]]:
    def build(asked: str, inventory: Inventory) -> dict[str, str]:
        job = build_job(JobFlags("j", runtime=asked), inventory, "mine")
        assert job.runtime
        return runtimes.build(inventory, job.runtime)

    return build


def test_a_runtime_has_builds_for_processors(
    local: Inventory, index: Path, tmp_path: Path, built: Callable[..., dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("xgboost_cpu", "xgboost", "torch", "tensorflow"):
        wheel(index, name)
    asked = requirements(tmp_path, "xgboost==1.0\n")
    assert built(asked, local) == {"xgboost-cpu": "1.0"}
    assert "no host has a GPU: xgboost-cpu==1.0 is taken, its build for processors" in capsys.readouterr().err
    gpus = tuple(replace(host, accelerator={"type": "t4", "count": 1}) for host in local.hosts)
    assert built(asked, replace(local, hosts=gpus)) == {"xgboost": "1.0"}
    assert built(requirements(tmp_path, "tensorflow==1.0\n"), local) == {"tensorflow": "1.0"}, "it has no such build"
    capsys.readouterr()
    assert built(requirements(tmp_path, "torch\n"), local) == {"torch": "1.0"}
    assert capsys.readouterr().err.count("PyTorch comes with CUDA, some 5 GB") == 1
    built(requirements(tmp_path, "torch\n"), local)
    assert "CUDA" not in capsys.readouterr().err, "of one that is built nothing is said"


def test_runtimes_show_what_was_asked_for(
    local: Inventory, index: Path, tmp_path: Path, built: Callable[..., dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(index, needs="near")
    wheel(index, "near")
    built(requirements(tmp_path, "far\n"), local)
    (kept,) = (tmp_path / "runtimes").iterdir()
    (told,) = _list({kept.name: kept}, as_json=False)
    assert told["requirements"] == ["far"]
    heads, row = capsys.readouterr().out.splitlines()
    assert heads.endswith("ASKED FOR")
    assert row.endswith(" far")


def test_a_runtime_of_files_beside_its_own(local: Inventory, tmp_path: Path, built: Callable[..., dict[str, str]]) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "more").mkdir()
    wheel(tmp_path / "wheels")
    wheel(tmp_path, "near")
    (tmp_path / "more/more.txt").write_text("far\n")
    asked = requirements(tmp_path, "--find-links ./wheels\n-r more/more.txt\n./near-1.0-py3-none-any.whl\n")
    assert built(asked, local) == {"far": "1.0", "near": "1.0"}
