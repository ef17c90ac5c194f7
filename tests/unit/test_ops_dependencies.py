"""Check ops.package.hostpython and ops.package.install: pushed files, a line for each error. uv runs for real, offline."""

from __future__ import annotations

import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from opsdata import write_files
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ops.errors import UsageError
from ops.package import dependencies, hostpython, install, package

# A project's own build backend, so that a build needs no network.
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
    """Use a fresh cache of wheels, and only the test's own index."""
    monkeypatch.setattr(dependencies, "CACHE", tmp_path / "cache")


def make_wheel(
    folder: Path, name: str = "far", tags: str = "py3-none-any", files: Mapping[str, str] | None = None, needs: str = ""
) -> Path:
    path = folder / f"{name}-1.0-{tags}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for path_in_wheel, content in (files or {f"{name}/__init__.py": ""}).items():
            archive.writestr(path_in_wheel, content)
        requires = "".join(f"Requires-Dist: {need}\n" for need in needs.split(",") if need)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}")
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tags}\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


def make_trainer(tmp_path: Path, requirements: str, task: str = "") -> Path:
    return write_files(tmp_path / "mine", {"__init__.py": "", "task.py": task, "requirements.txt": requirements})


def make_project(tmp_path: Path, packages: tuple[str, ...] = ("mine",), requires: str = "", before: str = "pass") -> Path:
    metadata = f"Metadata-Version: 2.1\nName: mine\nVersion: 2.0\n{requires}"
    files = {"pyproject.toml": _PROJECT, "backend.py": _BACKEND.format(before=before, metadata=metadata)}
    for name in packages:
        files |= {f"{name}/__init__.py": "", f"{name}/task.py": "import far, numpy\n"}
    return write_files(tmp_path / "some-project", files)


def build_error(root: Path, module: str = "mine.task") -> str:
    with pytest.raises(UsageError) as error:
        package.build(root, module)
    assert "\n" not in str(error.value)
    return str(error.value)


def fail_on_uv(*_: object, **__: object) -> None:
    raise AssertionError("uv is not needed")


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the installed versions of distributions and of all their dependencies."""
    versions: dict[str, str] = {}
    pending = [canonicalize_name(name) for name in names]
    while pending:
        if (name := pending.pop()) not in versions:
            versions[name] = metadata.version(name)
            needs = [Requirement(line) for line in metadata.requires(name) or []]
            applying = [need for need in needs if not need.marker or need.marker.evaluate({"extra": ""})]
            pending += [canonicalize_name(need.name) for need in applying]
    return versions


def test_host_packages_are_those_of_the_requirements() -> None:
    host_versions = dict(hostpython.host_packages())
    assert host_versions.pop("tensorflow") == host_versions["tensorflow-cpu"]
    expected = installed_versions(Requirement(line).name for line in hostpython.lines_of(hostpython.REQUIREMENTS))
    del expected["wheel"]  # a build dependency that is not imported
    assert host_versions == expected


MET = [
    *("far", "Far>=1", "far>=0.9rc1 --hash=sha256:00", "near; sys_platform == 'darwin'", "near; python_version >= '3.12'"),
    *("near; platform_machine == 'arm64'", "near; extra == 'dev'", "near; python_full_version >= '3.11.3'"),
    "near; platform_python_implementation == 'PyPy'",
]
UNMET = [
    *("far>=2", "far<1.0", "near", "near; sys_platform == 'linux'", "near; python_version == '3.11'", "./far", "-r more.txt"),
    *("near; implementation_version == '3.11.2'", "near; os_name == 'posix' and implementation_name == 'cpython'"),
    *("near; unknown_name == 'x'", "far @ https://h/far.whl"),
]


@pytest.mark.parametrize("line", MET + UNMET)
def test_a_requirement_is_met_by_a_package_or_its_marker(line: str) -> None:
    assert hostpython.is_met(line, {"far": "1.0"}) is (line in MET)


def test_a_prerelease_of_a_host_meets_a_requirement() -> None:
    assert hostpython.is_met("far>=1", {"far": "2.0rc1"})
    assert hostpython.find_conflicts(["far>=1", "./near", "near>2", "x>2; sys_platform == 'win32'"], {"far": "2.0rc1"}) == {}
    packages = {"far": "1.0", "near": "1.0", "x": "1.0"}
    assert hostpython.find_conflicts(["far>=1", "./near", "Near>2", "x>2; sys_platform == 'win32'"], packages) == {
        "near": "Near>2"
    }


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_requirements_are_read_in_the_encodings_that_pip_reads(tmp_path: Path, encoding: str) -> None:
    (file := tmp_path / "requirements.txt").write_bytes("far==1.0 \\\r\n  --hash=sha256:00\r\n# é\r\nnear\r\n".encode(encoding))
    assert hostpython.lines_of(file) == ["far==1.0    --hash=sha256:00", "near"]


def test_lines_of_a_requirements_file_are_made_flat(tmp_path: Path) -> None:
    first, second = tmp_path / "requirements.txt", tmp_path / "sub" / "more.txt"
    first.write_text(
        "# note\n\nfar==1 \\\n  --hash=sha256:00  # why\n-r sub/more.txt\n-r https://h/r.txt\n-c sub/more.txt\nx#y\n  \n"
    )
    more = "--find-links=wheels\n-f https://h/wheels\n--requirement=last.txt\n"
    write_files(tmp_path / "sub", {"more.txt": more, "last.txt": "last\n", "wheels/x": ""})
    far = "far==1    --hash=sha256:00"
    assert hostpython.lines_of(first) == [far, "-r sub/more.txt", "-r https://h/r.txt", "-c sub/more.txt", "x#y"]
    assert hostpython.flat_lines(first) == [
        far,
        f"--find-links {tmp_path}/sub/wheels",
        "-f https://h/wheels",
        "last",
        "-r https://h/r.txt",
        f"-c {second}",
        "x#y",
    ]
    first.write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"requirements\.txt cannot be read: 'utf-8' codec.*; save it as UTF-8$"):
        hostpython.lines_of(first)
    with pytest.raises(UsageError, match=r"none\.txt cannot be read: \[Errno 2\]"):
        hostpython.lines_of(tmp_path / "none.txt")


@pytest.mark.parametrize("option", ["-r ", "--requirement=", "-c "])
def test_an_included_file_that_is_not_there_is_one_line(tmp_path: Path, option: str) -> None:
    write_files(tmp_path, {"requirements.txt": "-r sub/a.txt\n", "sub/a.txt": f"far \\\n  --hash=x\n{option}no.txt\n"})
    with pytest.raises(UsageError, match=rf"^{tmp_path}/sub/a\.txt:3: no\.txt is missing in {tmp_path}/sub$"):
        dependencies.fetch(tmp_path / "requirements.txt")


@pytest.mark.parametrize("line", ["-r 'my base.txt'", '-r "my base.txt"\t# why', "--requirement='my base.txt' # why"])
def test_an_included_file_may_be_quoted(tmp_path: Path, line: str) -> None:
    write_files(tmp_path, {"requirements.txt": f"{line}\n", "my base.txt": "far\n"})
    assert hostpython.flat_lines(tmp_path / "requirements.txt") == ["far"]
    assert hostpython.absolute("-c 'my base.txt'", tmp_path) == f"-c {tmp_path}/my base.txt"


def test_an_included_url_is_left_to_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependencies, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(dependencies, "install", lambda _, __, lines, *___: installed.append(lines[0]))
    installed: list[str] = []
    (file := tmp_path / "requirements.txt").write_text("-r https://h/r.txt\nnumpy\n")
    dependencies.fetch(file)
    assert installed == ["-r https://h/r.txt"]


@pytest.mark.parametrize("option", ["-r", "-c"])
def test_files_may_include_one_another(tmp_path: Path, option: str) -> None:
    write_files(tmp_path, {"a.txt": f"far\n{option} b.txt\n", "b.txt": f"near\n{option} a.txt\n"})
    flat = hostpython.flat_lines(tmp_path / "a.txt")
    assert flat == ["far", *(["near"] if option == "-r" else [f"-c {tmp_path}/b.txt"])]
    lines = hostpython.lines_of(tmp_path / "a.txt")
    contents = list(hostpython.contents_of_files(tmp_path, lines))
    assert contents == [(tmp_path / name).read_bytes() for name in ("b.txt", "a.txt", "b.txt")]


def test_the_files_that_lines_name(tmp_path: Path) -> None:
    names = ("a.whl", "b.tar.gz", "lib/c.py", "lib/sub/d.py", "far/e.py", "last.txt")
    write_files(tmp_path, {**{name: name for name in names}, "more.txt": "./lib\n"})
    lines = ["a.whl --hash=sha256:00", "./b.tar.gz[extra]", "far", "gone.zip", ".", "-c last.txt", "-r more.txt", "--pre"]
    contents = list(hostpython.contents_of_files(tmp_path, lines))
    assert contents == [b"a.whl", b"b.tar.gz", b"last.txt", b"./lib\n", b"lib/c.py", b"lib/sub/d.py"]


@pytest.mark.parametrize(
    ("line", "installed"),
    [
        *(("-e .", "."), ("--editable=./lib[a]", "./lib[a]"), ("-e lib", "./lib"), ("-e /far", "/far")),
        *(('-e ".[train]"', ".[train]"), ("-e ${LIB}/a", "${LIB}/a")),
        *(("-e git+https://h/x#egg=x", "git+https://h/x#egg=x"), ("editable", "editable"), ("-enough", "-enough")),
    ],
)
def test_what_is_editable_here_is_installed_for_hosts(tmp_path: Path, line: str, installed: str) -> None:
    (file := tmp_path / "requirements.txt").write_text(line)
    assert hostpython.flat_lines(file) == [installed]


def test_a_package_that_installs_its_own_folder_is_built_again_if_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install_lines(target: Path, _: str, lines: list[str], *__: object) -> None:
        installed.append(lines[0])
        write_files(target, {"lib.py": "x"})

    installed: list[str] = []
    monkeypatch.setattr(dependencies, "install", install_lines)
    for line, builds in (("-e .[train]", 2), ("./lib", 1)):
        installed.clear()
        (root := make_trainer(tmp_path, f"{line}\n")).joinpath("lib").mkdir(exist_ok=True)
        for content in ("a = 1", "a = 1", "a = 2"):
            (root / os.fsdecode(b"\xff.txt")).write_text(content)
            assert "lib.py" in package.build(root, "mine.task").dependency_files
        assert installed == [line.removeprefix("-e ")] * builds


def test_constraints_count_for_packages_that_a_line_requires(tmp_path: Path) -> None:
    files = write_files(tmp_path, {"c.txt": "near==1.0\nother==1.0\nfar==2.0\n", "requirements.txt": "-c c.txt\nnear\nfar\n"})
    lines, packages = hostpython.flat_lines(files / "requirements.txt"), {"near": "1.5", "other": "1.5", "far": "2.0"}
    assert hostpython.find_conflicts(lines, packages) == {"near": "near==1.0"}
    narrowed = hostpython.without_constraints(lines[0], {"other", "far"}, tmp_path)
    assert hostpython.lines_of(Path(narrowed.removeprefix("-c "))) == ["near==1.0"]
    assert hostpython.without_constraints("near", {"near"}, tmp_path) == "near"
    with pytest.raises(UsageError, match=r"^numpy==1\.0 is required, but the job's Python has numpy 2\.0: "):
        hostpython.find_conflicts(
            ["-c https://x/c.txt", f"-c {write_files(tmp_path, {'d.txt': 'numpy==1.0'})}/d.txt", "numpy"], {"numpy": "2.0"}
        )


def test_a_folder_with_the_name_of_a_dependency_is_refused(tmp_path: Path, index: Path) -> None:
    """Both would be one folder, from which the script would import the modules of the dependency by their bare names."""
    make_wheel(index, files={"far/__init__.py": "", "far/json.py": ""})
    root = write_files(tmp_path / "far", {"train.py": "import far\n", "requirements.txt": "far\n"})
    with pytest.raises(
        UsageError, match=r"^folder far has the name of a package that its requirements\.txt installs beside it: "
    ):
        package.build(package.find_folder(root), "", "far/train.py")
    (tmp_path / "mine").symlink_to(root)
    built = package.build(package.find_folder(tmp_path / "mine"), "", "mine/train.py")
    assert {"far/json.py", "mine/train.py"} <= built.host_files.keys()


def test_what_an_extra_of_a_host_package_requires_is_fetched(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(index, "near", needs="far; extra == 'more'\nProvides-Extra: more")
    make_wheel(index)
    monkeypatch.setattr(hostpython, "host_packages", lambda: {"near": "1.0"})
    built = package.build(make_trainer(tmp_path, "near[more]>=1\n"), "mine.task")
    assert {"far/__init__.py", "near/__init__.py"} <= built.dependency_files.keys()
    lines = ["near[x]", "tensorflow[and-cuda]", "far", "six[x]; sys_platform == 'win32'"]
    assert hostpython.with_extras(lines, {"near": "1", "tensorflow": "2", "far": "1", "six": "1"}) == {"near"}


def test_a_stub_is_a_wheel_without_content(tmp_path: Path) -> None:
    wheels = hostpython.make_stubs(tmp_path, {"some-far": "1.0"})
    assert wheels == {"some-far": tmp_path / "some_far-1.0-py3-none-any.whl"}
    with zipfile.ZipFile(wheels["some-far"]) as wheel:
        assert {name: wheel.read(name).decode() for name in wheel.namelist()} == {
            "some_far-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: some-far\nVersion: 1.0\n",
            "some_far-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "some_far-1.0.dist-info/RECORD": "",
        }


@pytest.mark.parametrize(
    ("tags", "tag"),
    [
        ((), "py3-none-any"),
        (("cp311-cp311-linux_x86_64",), "cp311-cp311-linux_x86_64"),
        (("cp311-cp311-linux_x86_64", "cp311-cp311-manylinux_2_17_x86_64"), "cp311-cp311-manylinux_2_17_x86_64"),
        (("cp311-cp311-manylinux_2_17_x86_64", "cp311-cp311-linux_x86_64"), "cp311-cp311-manylinux_2_17_x86_64"),
        (("py2-none-any", "cp311-none-linux_x86_64"), "py2-none-any"),
    ],
)
def test_the_widest_tag_of_a_wheel_counts(tmp_path: Path, tags: tuple[str, ...], tag: str) -> None:
    (tmp_path / "WHEEL").write_text("Wheel-Version: 1.0\n" + "".join(f"Tag: {each}\n" for each in tags))
    assert dependencies._tag(metadata.Distribution.at(tmp_path)) == tag
    (tmp_path / "WHEEL").unlink()
    assert dependencies._tag(metadata.Distribution.at(tmp_path)) == "py3-none-any"


def test_files_of_uv_and_scripts_are_not_sent(tmp_path: Path) -> None:
    contents = {
        "bin/far": "#!",
        "far/INSTALLER": "mine",
        "far/a,b": "z",
        "far/bin/x": "y",
        "far-1.0.dist-info/INSTALLER": "uv",
        "far-1.0.dist-info/REQUESTED": "",
        "far-1.0.dist-info/METADATA": "Name: far",
        "far-1.0.dist-info/RECORD": 'far/INSTALLER,a,1\nbin/far,,\nfar-1.0.dist-info/INSTALLER,,\n\n"far/a,b",,\nfar/bin/x,,\n',
    }
    write_files(tmp_path / "site", contents)
    assert dependencies.read(tmp_path) == {
        "far/INSTALLER": b"mine",
        "far/a,b": b"z",
        "far/bin/x": b"y",
        "far-1.0.dist-info/METADATA": b"Name: far",
        "far-1.0.dist-info/RECORD": b'far/INSTALLER,a,1\n"far/a,b",,\nfar/bin/x,,\n',
    }


def test_wheels_are_fetched_for_the_hosts_python(index: Path, tmp_path: Path) -> None:
    assert install.wheels_only_options("3.99") == ["--only-binary=:all:"]
    other = "3.12" if sys.version_info[:2] == (3, 11) else "3.11"
    for python in ("3.11", "3.12"):
        tag = f"cp{python.replace('.', '')}"
        make_wheel(index, tags=f"{tag}-{tag}-manylinux_2_36_x86_64", needs="numpy", files={"far.py": python})
    root = make_trainer(tmp_path, "far\n")
    assert package.build(root, "mine.task", python=other).dependency_files["far.py"] == other.encode()
    (root / "requirements.txt").write_text("./far-1.0-cp310-cp310-manylinux2014_x86_64.whl\n")
    make_wheel(root, tags="cp310-cp310-manylinux2014_x86_64")
    message = f"the hosts' Python {other} on Linux x86-64: Because far==1.0 has no wheels with a matching Python version tag"
    with pytest.raises(UsageError, match=re.escape(message)):
        package.build(root, "mine.task", python=other)


def test_packages_that_hosts_have_and_options_alone_need_no_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependencies, "install", fail_on_uv)
    hosts = "# what we use\nnumpy>=1.20  # any\ntensorflow[and-cuda]\n\nTensorFlow_CPU\nwinonly; sys_platform == 'win32'\n"
    for lines in (hosts, "--pre\n-f https://h/wheels\nnumpy\n", f"# mine\n{hostpython.REQUIREMENTS.read_text()}"):
        assert package.build(make_trainer(tmp_path, lines), "mine.task").dependency_files == {}
    for line in ("-e ./lib", "--editable ./lib"):
        with pytest.raises(AssertionError, match="uv is not needed"):
            package.build(make_trainer(tmp_path, f"{line}\nnumpy\n"), "mine.task")


def test_dependencies_and_the_package_share_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "requirements.txt").write_text("far\n")
    source = package.PackageSource("mine", {"mine/a": b"x" * 1_000_000, "mine/b": b"x" * 500_000}, path)
    checks: list[Callable[[Mapping[str, int]], None]] = []

    def fetch(*arguments: Any) -> dict[str, bytes]:
        checks.append(arguments[3])
        return {}

    monkeypatch.setattr(dependencies, "fetch", fetch)
    monkeypatch.setattr(package, "LIMIT", 4_000_000)
    package.build(source, "")
    checks[0]({"far": 1_500_000, "near": 1_000_000})
    message = (
        "mine and its dependencies have 4 MB, 4 MB at most; largest is far with 2 MB: a Python of the job's own has no limit"
    )
    with pytest.raises(UsageError, match=f"^{message}"):
        checks[0]({"far": 1_500_001, "near": 1_000_000})


@pytest.mark.parametrize(
    ("here", "python", "options"),
    [
        (("3.11.7", "linux", "x86_64"), "3.11", []),
        (("3.12.1", "linux", "x86_64"), "3.11", ["--only-binary=:all:"]),
        (("3.11.7", "darwin", "x86_64"), "3.11", ["--only-binary=:all:"]),
        (("3.11.7", "linux", "aarch64"), "3.11", ["--only-binary=:all:"]),
    ],
)
def test_builds_need_a_machine_like_a_host(
    monkeypatch: pytest.MonkeyPatch, here: tuple[str, str, str], python: str, options: list[str]
) -> None:
    version, system, machine = here
    monkeypatch.setattr(install.platform, "python_version_tuple", lambda: tuple(version.split(".")))
    monkeypatch.setattr(install.platform, "machine", lambda: machine)
    monkeypatch.setattr(install.sys, "platform", system)
    assert install.wheels_only_options(python) == options


COMPILED = "was compiled here, and may not run on the hosts: ask for a version that has a manylinux wheel"
OTHER = "is not a wheel for the hosts' Python 3.11 on Linux x86-64: take one for cp311, abi3 or py3, and for any platform or"


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        *((f"{tag}-linux_x86_64", COMPILED) for tag in ("cp311-cp311", "cp39-abi3", "py3-none")),
        *((tags, f"{OTHER} manylinux") for tags in ("cp312-cp312-linux_x86_64", "cp311-cp311-win_amd64")),
    ],
)
def test_a_wheel_that_does_not_fit_is_explained(tags: str, message: str) -> None:
    wheel = f"far-1.0-{tags}.whl"
    assert install.describe_unfit_wheel(wheel, "3.11") == f"{wheel} {message}"


def test_another_version_of_a_host_package_is_refused(tmp_path: Path) -> None:
    error = build_error(make_trainer(tmp_path, "tensorflow==1.15.0\n"))
    assert error.startswith("tensorflow==1.15.0 is required, but the job's Python has tensorflow 2.")
    error = build_error(make_trainer(tmp_path, f"{make_wheel(tmp_path / 'index', needs='numpy<1.0')}\n"))
    assert "far==1.0 depends on numpy<1.0" in error


def test_dependencies_are_pushed_with_the_package(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(index, needs="near,numpy,tensorflow>=2.16")
    make_wheel(
        index, "near", files={"near.py": "", "near-1.0.data/purelib/deep/x.txt": "x", "near-1.0.data/scripts/near": "#!"}
    )
    root = make_trainer(tmp_path, "far\n", "import far, near, numpy\nfrom mine import other\n")
    (root / "other.py").write_text("import somewhere\n")
    built = package.build(root, "mine.task")
    wheel_files = {path for path in built.dependency_files if ".dist-info/" not in path}
    assert wheel_files == {"far/__init__.py", "near.py", "deep/x.txt"}
    assert built.imports == {"numpy": "mine/task.py:1", "somewhere": "mine/other.py:1"}
    assert built.host_files.keys() == built.dependency_files.keys() | built.files.keys()
    assert package.unpack(built.archive, "mine", built.files, "mine.task") == built
    monkeypatch.setattr(dependencies, "install", fail_on_uv)
    assert package.build(root, "mine.task") == built


def test_a_changed_wheel_file_is_used(tmp_path: Path) -> None:
    (root := make_trainer(tmp_path, "./far-1.0-py3-none-any.whl\n-r more.txt\n")).joinpath("more.txt").write_text("")
    make_wheel(root, files={"far.py": "one"})
    assert package.build(root, "mine.task").dependency_files["far.py"] == b"one"
    make_wheel(root, files={"far.py": "two"})
    assert package.build(root, "mine.task").dependency_files["far.py"] == b"two"


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (
            "cp39-cp39-manylinux2014_x86_64",
            "the hosts' Python 3.11 on Linux x86-64: Because far==1.0 has no wheels with a matching Python",
        ),
        ("cp311-cp311-linux_x86_64", "was compiled here, and may not run on the hosts: ask for a version that has a manylinux"),
    ],
)
def test_a_wheel_that_hosts_cannot_use_is_refused(tmp_path: Path, tags: str, message: str) -> None:
    root = make_trainer(tmp_path, f"./far-1.0-{tags}.whl\n")
    make_wheel(root, tags=tags)
    assert message in build_error(root)
    assert not list((tmp_path / "cache").iterdir()), "a failed build is not cached"


def test_a_missing_dependency_is_one_line(tmp_path: Path, index: Path) -> None:
    error = build_error(make_trainer(tmp_path, "no-such-thing>=2\n"))
    assert error.startswith("dependencies cannot be resolved for the hosts' Python 3.11 on Linux x86-64: Because no-such-thing")
    assert error.endswith("Check names and versions")
    make_wheel(index)
    assert "there is no version of far==3" in build_error(make_trainer(tmp_path, "far==3\n"))


def test_a_project_is_built_and_pushed(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(index)
    root = make_project(
        tmp_path, requires="Requires-Dist: far\nRequires-Dist: tensorflow\nRequires-Dist: no-such; extra == 'dev'\n"
    )
    write_files(root, {"build/lib/mine/gone.py": "", "mine.egg-info/gone.py": ""})
    before = sorted(root.rglob("*"))
    source = package.find(root)
    assert source.name == "mine"
    built = package.build(source, "mine.task")
    assert {"mine/task.py", "mine-2.0.dist-info/METADATA"} <= built.files.keys()
    assert not [path for path in built.files if path.endswith("gone.py")], "files of an earlier build are not included"
    assert "far/__init__.py" in built.dependency_files
    assert built.imports == {"numpy": "mine/task.py:1"}
    assert sorted(root.rglob("*")) == before, "a build leaves nothing in the user's folder"
    monkeypatch.setattr(dependencies, "install", fail_on_uv)
    assert package.build(root, "mine.task") == built


def test_a_project_is_built_again_for_another_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependencies, "CACHE", tmp_path / "cache")
    built = list[str]()
    monkeypatch.setattr(dependencies, "install", lambda _, python, *__: built.append(python))
    for python in ("3.11", "3.12", "3.12"):
        monkeypatch.setattr(dependencies, "PYTHON", python)
        dependencies.build_project(tmp_path / "mine", {"mine/setup.py": b""})
    assert built == ["3.11", "3.12"]


def test_a_project_in_a_repository_is_built_through_a_link_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = write_files(tmp_path / "top", {"work/setup.py": ""})
    (tmp_path / "link").symlink_to(top / "work")
    built = list[tuple[list[str], str]]()
    monkeypatch.setattr(dependencies, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(dependencies.git, "find", lambda _: dependencies.git.Repository(top, "state"))
    monkeypatch.setattr(dependencies.git, "copy", lambda _, into, files: dependencies.git.write(into, files))
    monkeypatch.setattr(dependencies, "install", lambda _, __, what, folder, *___: built.append((what, folder.name)))
    dependencies.build_project(tmp_path / "link", {"link/setup.py": b""})
    assert built == [(["./work"], "top")]


def test_a_project_of_several_packages_needs_a_module(tmp_path: Path, index: Path) -> None:
    make_wheel(index)
    root = make_project(tmp_path, ("mine", "yours"), "Requires-Dist: far\n")
    source = package.find(root)
    error = build_error(root, f"{source.name}.task")
    assert error == "project some-project has the packages mine, yours: name the one to run by --module"
    assert package.build(source, "yours.task").name == "yours"


def test_a_failed_project_build_is_one_line(tmp_path: Path) -> None:
    error = build_error(make_project(tmp_path, before="raise ValueError('no compiler')"))
    assert error == "a build by setup.py or pyproject.toml failed: ValueError: no compiler"


def test_a_project_without_a_package_is_refused(tmp_path: Path) -> None:
    assert "builds a wheel without a Python package" in build_error(make_project(tmp_path, ()))


def test_too_many_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "LIMIT", package.MEGABYTE)
    large = make_wheel(tmp_path / "index", files={"far.bin": "x" * 8_000_000})
    error = build_error(make_trainer(tmp_path, f"{large}\n"))
    assert error.startswith("mine and its dependencies have 2 MB, 1 MB at most; largest is far.bin with 2 MB")
    monkeypatch.setattr(dependencies, "_COMPRESSION", 100)
    with zipfile.ZipFile(large, "a") as archive:
        archive.writestr("far.random", os.urandom(2_000_000))
    assert "2 MB, 1 MB at most; largest is far.bin with 8 MB" in build_error(tmp_path / "mine")


def test_a_wheel_cannot_write_outside_the_package(tmp_path: Path, index: Path) -> None:
    root = make_trainer(tmp_path, "far\n")
    for name in ("../../evil", "/evil", "far-1.0.data/purelib/../../evil"):
        make_wheel(index, files={name: ""})
        with suppress(UsageError):
            assert not [path for path in package.build(root, "mine.task").dependency_files if "evil" in path]
        assert not [*tmp_path.rglob("evil")]
        assert not Path("/evil").exists()


GIT = """error: Failed to download and build `x @ git+https://h/x.git`
  cause: Git operation failed
  cause: process didn't exit successfully: `/usr/bin/git fetch` (exit status: 128)
         --- stderr
         fatal: unable to access 'https://h/x.git/': Failed to connect
"""
BACKEND = "error: The build backend returned an error"
SILENT = """error: Request failed after 3 retries in 9.8s
  cause: Failed to fetch: https://h/simple/huge/
  cause: error sending request for url (https://h/simple/huge/)
"""


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (SILENT, "dependencies cannot be fetched, https://h/simple/huge/ does not answer: check the network, or pip config"),
        (
            "error: Failed to determine installation plan\n"
            "  cause: A path (a/far-1.0-cp311-cp311-manylinux_2_17_aarch64.whl) dependency is incompatible with the current\n",
            "is not a wheel for the hosts' Python 3.11 on Linux x86-64: take one for cp311",
        ),
        (
            "error: x\n  cause: Hash mismatch for `far==1.0`\n\nExpected:\n  sha256:11\n\nComputed:\n  sha256:22\n",
            "far==1.0 does not match its hash in requirements.txt, what was fetched has sha256 22: export the file again, or "
            "ask who changed it",
        ),
        (
            "error: In `--require-hashes` mode, all requirements must have a hash, but none were provided for: near==1.0\n",
            "near==1.0 has no version and hash in requirements.txt; where one line has a hash, all need one: uv export and "
            "pip-compile --generate-hashes write them",
        ),
        (
            "error: No solution found when resolving dependencies:\n  cause: Because far was not found, no way.\n",
            "dependencies cannot be resolved for the hosts' Python 3.11 on Linux x86-64: ",
        ),
        (f"{BACKEND}\n\n    [stderr]\n    ValueError: no\n", "a build by setup.py or pyproject.toml failed: ValueError: no"),
        (f"{BACKEND}\n", f"a build by setup.py or pyproject.toml failed: {BACKEND}"),
        (GIT, "a dependency cannot be fetched by git: fatal: unable to access 'https://h/x.git/': Failed to connect"),
        ("Using CPython\nerror: bad\n  cause: this\n  cause: that\n\nhint: try\n", "uv failed: bad this that try"),
        ("boom\n", "uv failed: boom"),
        ("", "uv failed: it printed nothing"),
    ],
)
def test_uvs_output_is_explained_in_one_line(output: str, message: str) -> None:
    assert message in install.explain(output, "3.11")


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("--extra-index-url https://user:secret@h/other", "--extra-index-url in the requirements file"),
        ("-i=https://h/simple", "-i in the requirements file"),
        ("--index-url https://elsewhere/simple", "pip config list"),
    ],
)
def test_an_index_of_the_requirements_that_does_not_answer_is_named(line: str, where: str) -> None:
    assert install.explain(SILENT, "3.11", ["far==1", line]).endswith(f" does not answer: check the network, or {where}")
