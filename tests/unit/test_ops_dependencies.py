"""Dependencies: pushed files, one line for each error. uv runs for real, offline."""

from __future__ import annotations

import os
import re
import sys
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ops.errors import UsageError
from ops.package import dependencies, hostpython, install, package

# A build backend of a project's own, so that a build needs nothing from elsewhere.
_BACKEND = """
import pathlib, zipfile

def build_wheel(directory, config=None, metadata=None):
    {before}
    name = "mine-2.0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(directory, name), "w") as wheel:
        for path in sorted(pathlib.Path(".").rglob("*.py")):
            if path.name != "backend.py":
                wheel.write(path)
        wheel.writestr("mine-2.0.dist-info/METADATA", {metadata!r})
        wheel.writestr("mine-2.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("mine-2.0.dist-info/RECORD", "")
    pathlib.Path("left-behind").touch()
    return name
"""
_PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


@pytest.fixture(autouse=True)
def own_cache(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a fresh cache of wheels, and our own index alone."""
    monkeypatch.setattr(dependencies, "CACHE", tmp_path / "cache")


def wheel(
    folder: Path, name: str = "far", tags: str = "py3-none-any", files: Mapping[str, str] | None = None, needs: str = ""
) -> Path:
    path = folder / f"{name}-1.0-{tags}.whl"
    with zipfile.ZipFile(path, "w") as opened:
        for inside, content in (files or {f"{name}/__init__.py": ""}).items():
            opened.writestr(inside, content)
        requires = "".join(f"Requires-Dist: {need}\n" for need in needs.split(",") if need)
        opened.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}")
        opened.writestr(f"{name}-1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tags}\n")
        opened.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


def trainer(tmp_path: Path, requirements: str, task: str = "") -> Path:
    (root := tmp_path / "mine").mkdir(exist_ok=True)
    for name, content in {"__init__.py": "", "task.py": task, "requirements.txt": requirements}.items():
        (root / name).write_text(content)
    return root


def project(tmp_path: Path, packages: tuple[str, ...] = ("mine",), requires: str = "", before: str = "pass") -> Path:
    metadata = f"Metadata-Version: 2.1\nName: mine\nVersion: 2.0\n{requires}"
    (root := tmp_path / "some-project").mkdir()
    (root / "pyproject.toml").write_text(_PROJECT)
    (root / "backend.py").write_text(_BACKEND.format(before=before, metadata=metadata))
    for name in packages:
        (root / name).mkdir()
        (root / name / "__init__.py").touch()
        (root / name / "task.py").write_text("import far, numpy\n")
    return root


def refused(root: Path, module: str = "mine.task") -> str:
    with pytest.raises(UsageError) as error:
        package.build(root, module)
    assert "\n" not in str(error.value)
    return str(error.value)


def no_uv(*_: object, **__: object) -> None:
    raise AssertionError("uv is not needed")


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return the versions here of distributions and of all their dependencies."""
    found: dict[str, str] = {}
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        if (name := waiting.pop()) not in found:
            found[name] = metadata.version(name)
            needed = [Requirement(line) for line in metadata.requires(name) or []]
            waiting += [
                canonicalize_name(need.name) for need in needed if not need.marker or need.marker.evaluate({"extra": ""})
            ]
    return found


def test_what_the_hosts_have_is_what_follows_from_the_trainers_requirements() -> None:
    have = dict(hostpython.host_packages())
    assert have.pop("tensorflow") == have["tensorflow-cpu"]
    expected = installed(Requirement(line).name for line in hostpython.lines_of(hostpython.REQUIREMENTS))
    del expected["wheel"]  # which comes along, and which nobody imports
    assert have == expected


def test_a_marker_is_the_hosts_whatever_this_machine_is() -> None:
    for line in ("x; sys_platform == 'darwin'", "x; python_version >= '3.12'", "x; platform_machine == 'arm64'"):
        assert hostpython.is_met(line, {}), line
    for line in ("x; sys_platform == 'linux'", "x; python_version == '3.11'"):
        assert not hostpython.is_met(line, {}), line


def test_a_machine_with_another_python_fetches_for_the_hosts(index: Path, tmp_path: Path) -> None:
    assert install.wheels_alone("3.99") == ["--only-binary=:all:"]
    other = "3.12" if sys.version_info[:2] == (3, 11) else "3.11"
    for python in ("3.11", "3.12"):
        tag = f"cp{python.replace('.', '')}"
        wheel(index, tags=f"{tag}-{tag}-manylinux_2_36_x86_64", needs="numpy", files={"far.py": python})
    root = trainer(tmp_path, "far\n")
    assert package.build(root, "mine.task", python=other).wheels["far.py"] == other.encode()
    (root / "requirements.txt").write_text("./far-1.0-cp310-cp310-manylinux2014_x86_64.whl\n")
    wheel(root, tags="cp310-cp310-manylinux2014_x86_64")
    said = f"the hosts' Python {other} on Linux x86-64: Because far==1.0 has no wheels with a matching Python version tag"
    with pytest.raises(UsageError, match=re.escape(said)):
        package.build(root, "mine.task", python=other)


def test_what_the_hosts_have_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependencies, "install", no_uv)
    lines = "# what we use\nnumpy>=1.20  # any\ntensorflow[and-cuda]\n\nTensorFlow_CPU\nwinonly; sys_platform == 'win32'\n"
    assert package.build(trainer(tmp_path, lines), "mine.task").wheels == {}


def test_another_version_of_what_the_hosts_have(tmp_path: Path) -> None:
    says = refused(trainer(tmp_path, "tensorflow==1.15.0\n"))
    assert says.startswith("tensorflow==1.15.0 is asked for, but the Python of the job has tensorflow 2.")
    says = refused(trainer(tmp_path, f"{wheel(tmp_path / 'index', needs='numpy<1.0')}\n"))
    assert "far==1.0 depends on numpy<1.0" in says


def test_a_dependency_goes_along(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(index, needs="near,numpy,tensorflow>=2.16")
    wheel(index, "near", files={"near.py": "", "near-1.0.data/purelib/deep/x.txt": "x", "near-1.0.data/scripts/near": "#!"})
    root = trainer(tmp_path, "far\n", "import far, near, numpy\nfrom mine import other\n")
    (root / "other.py").write_text("import somewhere\n")
    built = package.build(root, "mine.task")
    brought = {path for path in built.wheels if ".dist-info/" not in path}
    assert brought == {"far/__init__.py", "near.py", "deep/x.txt"}
    assert built.imports == {"numpy": "mine/task.py:1", "somewhere": "mine/other.py:1"}
    assert built.pushed.keys() == built.wheels.keys() | built.files.keys()
    assert package.unpack(built.archive, "mine", built.files, "mine.task") == built
    monkeypatch.setattr(dependencies, "install", no_uv)
    assert package.build(root, "mine.task") == built


def test_a_change_of_a_file_that_is_a_dependency_is_seen(tmp_path: Path) -> None:
    (root := trainer(tmp_path, "./far-1.0-py3-none-any.whl\n-r more.txt\n")).joinpath("more.txt").write_text("")
    wheel(root, files={"far.py": "one"})
    assert package.build(root, "mine.task").wheels["far.py"] == b"one"
    wheel(root, files={"far.py": "two"})
    assert package.build(root, "mine.task").wheels["far.py"] == b"two"


def test_a_wheel_that_uv_cannot_use(tmp_path: Path) -> None:
    root = trainer(tmp_path, "./far-1.0-cp39-cp39-manylinux2014_x86_64.whl\n")
    wheel(root, tags="cp39-cp39-manylinux2014_x86_64")
    says = refused(root)
    assert "the hosts' Python 3.11 on Linux x86-64: Because far==1.0 has no wheels with a matching Python" in says
    assert not list((tmp_path / "cache").iterdir()), "what failed is not kept"


def test_a_wheel_that_uv_can_use_and_the_hosts_cannot(tmp_path: Path) -> None:
    root = trainer(tmp_path, "./far-1.0-cp311-cp311-linux_x86_64.whl\n")
    wheel(root, tags="cp311-cp311-linux_x86_64")
    says = refused(root)
    assert "was compiled here, and may not run on the hosts: ask for a version that has a manylinux" in says
    assert not list((tmp_path / "cache").iterdir()), "what failed is not kept"


def test_a_dependency_that_is_nowhere(tmp_path: Path, index: Path) -> None:
    says = refused(trainer(tmp_path, "no-such-thing>=2\n"))
    assert says.startswith("dependencies cannot be resolved for the hosts' Python 3.11 on Linux x86-64: Because no-such-thing")
    assert says.endswith("Check names and versions")
    wheel(index)
    assert "there is no version of far==3" in refused(trainer(tmp_path, "far==3\n"))


def test_a_project(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(index)
    root = project(tmp_path, requires="Requires-Dist: far\nRequires-Dist: tensorflow\nRequires-Dist: no-such; extra == 'dev'\n")
    for left in ("build/lib/mine", "mine.egg-info"):
        (root / left).mkdir(parents=True)
        (root / left / "gone.py").write_text("")
    before = sorted(root.rglob("*"))
    source = package.find(root)
    assert source.name == "mine"
    built = package.build(source, "mine.task")
    assert {"mine/task.py", "mine-2.0.dist-info/METADATA"} <= built.files.keys()
    assert not [path for path in built.files if path.endswith("gone.py")], "what an earlier build left is not taken in"
    assert "far/__init__.py" in built.wheels
    assert built.imports == {"numpy": "mine/task.py:1"}
    assert sorted(root.rglob("*")) == before, "a build leaves nothing in the user's folder"
    monkeypatch.setattr(dependencies, "install", no_uv)
    assert package.build(root, "mine.task") == built


def test_a_project_of_several_packages(tmp_path: Path, index: Path) -> None:
    wheel(index)
    root = project(tmp_path, ("mine", "yours"), "Requires-Dist: far\n")
    source = package.find(root)
    says = refused(root, f"{source.name}.task")
    assert says == "project some-project has the packages mine, yours: say which module to run by --module"
    assert package.build(source, "yours.task").name == "yours"


def test_a_project_that_does_not_build(tmp_path: Path) -> None:
    says = refused(project(tmp_path, before="raise ValueError('no compiler')"))
    assert says == "a build by setup.py or pyproject.toml failed: ValueError: no compiler"


def test_a_project_without_a_package(tmp_path: Path) -> None:
    assert "builds a wheel without a Python package" in refused(project(tmp_path, ()))


def test_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "LIMIT", package.MEGABYTE)
    large = wheel(tmp_path / "index", files={"far.bin": "x" * 8_000_000})
    says = refused(trainer(tmp_path, f"{large}\n"))
    assert says.startswith("mine and its dependencies have 2 MB, 1 MB at most; largest is far.bin with 2 MB")
    monkeypatch.setattr(dependencies, "_COMPRESSION", 100)
    with zipfile.ZipFile(large, "a") as opened:
        opened.writestr("far.random", os.urandom(2_000_000))
    assert "2 MB, 1 MB at most; largest is far.bin with 8 MB" in refused(tmp_path / "mine")


def test_a_wheel_that_would_leave_the_package(tmp_path: Path, index: Path) -> None:
    root = trainer(tmp_path, "far\n")
    for name in ("../../evil", "/evil", "far-1.0.data/purelib/../../evil"):
        wheel(index, files={name: ""})
        with suppress(UsageError):
            assert not [path for path in package.build(root, "mine.task").wheels if "evil" in path]
        assert not [*tmp_path.rglob("evil")]
        assert not Path("/evil").exists()


GIT = """error: Failed to download and build `x @ git+https://h/x.git`
  cause: Git operation failed
  cause: process didn't exit successfully: `/usr/bin/git fetch` (exit status: 128)
         --- stderr
         fatal: unable to access 'https://h/x.git/': Failed to connect
"""
SILENT = """error: Request failed after 3 retries in 9.8s
  cause: Failed to fetch: https://h/simple/huge/
  cause: error sending request for url (https://h/simple/huge/)
"""


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (
            SILENT,
            "dependencies cannot be fetched, https://h/simple/huge/ does not answer: check the network, or pip config",
        ),
        (
            "error: Failed to determine installation plan\n"
            "  cause: A path (a/far-1.0-cp311-cp311-manylinux_2_17_aarch64.whl) dependency is incompatible with the current\n",
            "is not a wheel for the hosts' Python 3.11 on Linux x86-64: take one for cp311",
        ),
        (GIT, "a dependency cannot be fetched by git: fatal: unable to access 'https://h/x.git/': Failed to connect"),
        ("Using CPython\nerror: bad\n  cause: this\n  cause: that\n\nhint: try\n", "uv failed: bad this that try"),
        ("boom\n", "uv failed: boom"),
        ("", "uv failed: it printed nothing"),
    ],
)
def test_what_uv_says(output: str, says: str) -> None:
    assert says in install.explain(output, "3.11")
