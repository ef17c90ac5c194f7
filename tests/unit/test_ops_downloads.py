"""pip's downloads: shown by name and size, refused before they start, and replaced by CPU builds."""

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
from test_ops_runtimes import HOSTS_SEE, requirements
from test_ops_wheels import refused, trainer, wheel

from infra.inventory import Inventory
from infra.runtime import pip as bare_pip
from ops import terminal
from ops.errors import UsageError
from ops.package import cpubuilds, package, runtimes, wheels
from ops.package.pip import _Progress
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
    monkeypatch.setattr(wheels, "CACHE", tmp_path / "cache")
    made = Web(index)
    monkeypatch.setenv("PIP_FIND_LINKS", made.url)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
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
    large(index, "near", 700_000)
    large(index, "xgboost", 3_000_000)
    says = refused(trainer(tmp_path, "near\nxgboost\n"))
    assert says.startswith(
        "mine and its dependencies have 4 MB, 1 MB at most; largest is xgboost-1.0-py3-none-any.whl with 3 MB: "
    )
    assert "xgboost-cpu is xgboost for processors; a Python of the job's own has no limit (--runtime requirements.txt)" in says
    assert "near-1.0-py3-none-any.whl" in web.fetched, "what is not too much is fetched"
    assert not list((tmp_path / "cache").glob("*"))


def test_a_dependency_is_shown_by_name_and_size(
    web: Web, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    large(index, "far", 2_000_000, "near")
    large(index, "near", 1_000_000)
    monkeypatch.setattr(wheels.terminal, "Step", functools.partial(terminal.Step, always=True))
    package.build(trainer(tmp_path, "far\n"), "mine.task")
    assert re.search(r"fetching dependencies 3\.0 MB \(", capsys.readouterr().err)


def test_the_line_that_is_shown(tmp_path: Path) -> None:
    (scratch := tmp_path / "pip-unpack-x").mkdir()
    seen: list[dict[str, int]] = []
    shown = _Progress(tmp_path, lambda sizes: seen.append(dict(sizes)), tmp_path / "site")
    assert (shown.line(), shown.total) == ("", "")
    shown.hear("  Downloading torch-2.9.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (30 kB)\n")
    shown.hear("  Downloading https://index/torch-2.9.0-cp311-cp311-manylinux_2_28_x86_64.whl (899.8 MB)\n")
    (scratch / "torch.whl").write_bytes(b"x" * 1_000_000)
    assert shown.line() == "torch, 1.0 MB of 899.8 MB"
    shown.hear("  Using cached nvidia_cudnn_cu12-9.1-py3-none-manylinux1_x86_64.whl (706.8 MB)\n")
    shown.hear("  Downloading torch-2.8.0-cp311-cp311-manylinux_2_28_x86_64.whl (1.0 GB)\n")
    assert shown.line() == "torch, 1.0 MB of 1.7 GB", "of versions that are tried one after the other the last counts"
    assert len(seen) == 3
    assert sum(seen[-1].values()) == 1_706_800_000
    shown.hear("Building wheel for six (pyproject.toml): started\n")
    assert shown.line().startswith("building six, ")
    shown.hear("Installing collected packages: six, numpy, torch\n")
    (tmp_path / "site/six-1.dist-info").mkdir(parents=True)
    assert shown.line() == "installing 1 of 3 packages"


def test_what_is_raised_by_a_line_ends_the_command() -> None:
    def stop(line: str) -> None:
        raise UsageError(line.strip())

    endless = [sys.executable, "-uc", "import time\nprint('enough')\ntime.sleep(600)"]
    with pytest.raises(UsageError, match="enough"):
        bare_pip.run(endless, heard=stop)


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
    assert cpubuilds.replaced([line]) == [instead]


def test_pytorch_with_cuda_is_seen() -> None:
    assert cpubuilds.asks_for_cuda(["numpy", "torch==2.9.0"])
    assert not cpubuilds.asks_for_cuda(["numpy"])
    assert not cpubuilds.asks_for_cuda([cpubuilds.TORCH_INDEX, "torch"])
    assert not cpubuilds.asks_for_cuda(["torch==2.9.0+cpu"])
    assert "download.pytorch.org/whl/cpu" in cpubuilds.remedy(["torch-2.9.0.whl", "nvidia_cublas_cu12-1.whl"])
    assert cpubuilds.remedy(["far-1.0.whl"]) == ""


@pytest.fixture
def local(inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    if sys.version_info[:2] != (3, 11):
        pytest.skip("a runtime is made by the hosts' version of Python, which this one stands in for")
    monkeypatch.setattr(runtimes, "_BASE", sys.executable)
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
    assert told["requirements"] == ["far==1.0"]
    heads, row = capsys.readouterr().out.splitlines()
    assert heads.endswith("ASKED FOR")
    assert row.endswith("far==1.0")


def test_a_runtime_of_files_beside_its_own(local: Inventory, tmp_path: Path, built: Callable[..., dict[str, str]]) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "more").mkdir()
    wheel(tmp_path / "wheels")
    wheel(tmp_path, "near")
    (tmp_path / "more/more.txt").write_text("far\n")
    asked = requirements(tmp_path, "--find-links ./wheels\n-r more/more.txt\n./near-1.0-py3-none-any.whl\n")
    assert built(asked, local) == {"far": "1.0", "near": "1.0"}
