"""Check the trainer package: reproducible bytes, and one clear line for each error that hosts would have."""

from __future__ import annotations

import io
import os
import re
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from opsdata import write_files
from test_ops_dependencies import build_error

from ops.errors import UsageError
from ops.package import host_stream, package
from ops.package.imports import check_module, check_script, describe_missing

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "trainers" / "tiny"


def make_package(tmp_path: Path, files: dict[str, str], name: str = "mine") -> Path:
    return write_files(tmp_path / name, {"__init__.py": "", **files})


def test_the_same_package_gives_the_same_bytes(tmp_path: Path) -> None:
    root = make_package(tmp_path, {"task.py": "import os\n", "sub/__init__.py": "", "data.json": "{}"})
    first = package.build(root, "mine.task")
    os.utime(root / "task.py", (0, 0))
    (root / "task.py").chmod(0o600)
    write_files(root, {"__pycache__/task.pyc": "x", ".git/HEAD": "x"})
    second = package.build(root, "mine.task")
    assert (first.archive, first.sha256) == (second.archive, second.sha256)
    assert first.archive[4:8] == bytes(4), "gzip's time"
    with tarfile.open(fileobj=io.BytesIO(first.archive)) as tar:
        assert tar.getnames() == ["mine/__init__.py", "mine/data.json", "mine/sub/__init__.py", "mine/task.py"]
        assert {(entry.mtime, entry.uid, entry.mode) for entry in tar} == {(0, 0, 0o644)}


def test_executables_stay_executable(tmp_path: Path) -> None:
    root = make_package(tmp_path, {"task.py": "", "run.sh": "#!/bin/sh\n", "tool": ""})
    (root / "run.sh").chmod(0o700)
    (root / "tool").chmod(0o4755)
    built = package.build(root, "mine.task")
    assert built.executables == {"mine/run.sh", "mine/tool"}
    with tarfile.open(fileobj=io.BytesIO(built.archive)) as tar:
        modes = {entry.name: entry.mode for entry in tar}
    assert modes == {"mine/__init__.py": 0o644, "mine/run.sh": 0o755, "mine/task.py": 0o644, "mine/tool": 0o755}
    assert package.unpack(built.archive, "mine", list(built.files), "mine.task") == built
    pushed = host_stream.shared_stream({}, built.host_files, "", built.executables) + host_stream.files_stream([])
    with tarfile.open(fileobj=io.BytesIO(pushed)) as tar:
        modes_on_host = {entry.name.partition("/package/")[2]: entry.mode for entry in tar if entry.isfile()}
    assert modes_on_host | modes == modes_on_host


def test_the_tiny_trainer_has_no_imports() -> None:
    assert package.build(TINY, "tiny.task").imports == {}


def test_imports_at_start_are_required_on_hosts(tmp_path: Path) -> None:
    files = {
        "task.py": (
            "from __future__ import annotations\nimport json\nimport tensorflow as tf\nfrom typing import TYPE_CHECKING\n"
            "from mine import model\nfrom . import helper\n"
            "try:\n    import optional\nexcept ImportError:\n    optional = None\n"
            "if TYPE_CHECKING:\n    import typed\n"
            "def main():\n    import late\n"
        ),
        "model.py": "if True:\n    import keras.layers\n",
        "helper.py": "class A:\n    import numpy\n",
        "unused.py": "import nowhere\n",
    }
    imports = package.build(make_package(tmp_path, files), "mine.task").imports
    assert imports == {"tensorflow": "mine/task.py:3", "keras": "mine/model.py:2"} | {"numpy": "mine/helper.py:2"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("try:\n    import a\nexcept:\n    import b\nelse:\n    import c\nfinally:\n    import d\n", ["d"]),
        ("try:\n    import a\nexcept (OSError, ModuleNotFoundError):\n    pass\n", []),
        (
            "try:\n    import a\nexcept (OSError, ValueError):\n    pass\nelse:\n    import b\nfinally:\n    import c\n",
            ["a", "b", "c"],
        ),
        ("try:\n    import a\nexcept OSError:\n    pass\nexcept Exception:\n    pass\n", []),
        ("try:\n    import a\nexcept errors.ImportError:\n    pass\n", ["a"]),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import b\n", ["b"]),
        ("if typing.TYPE_CHECKING:\n    import a\n", []),
        ("if not TYPE_CHECKING:\n    import a\nelse:\n    import b\n", ["a"]),
        ("if sys.version_info[0] == 2:\n    import a\nelse:\n    import b\n", []),
        ("if sys.platform == 'win32':\n    import a\nif os.name == 'nt':\n    import b\nif six.PY2:\n    import c\n", []),
        ("try:\n    import a\nexcept SyntaxError:\n    import b\n", []),
        ("with contextlib.suppress(OSError, ImportError):\n    import a\nwith suppress(OSError):\n    import b\n", ["b"]),
        ("if other:\n    import a\nelif f():\n    import b\nelse:\n    import c\n", []),
        ("if 1:\n    import a\nelse:\n    import b\nif 0:\n    import c\nelse:\n    import d\n", ["a", "d"]),
        ("if __name__ == '__main__':\n    import a\nelse:\n    import b\nif __name__ != '__main__':\n    import c\n", ["a"]),
        ("import __main__, helper\n", ["helper"]),
        ("for x in y:\n    import a\nwhile x:\n    import b\nwith x:\n    import c\n", ["a", "b", "c"]),
        ("class A:\n    import a\n    def f(self):\n        import b\n    async def g(self):\n        import c\n", ["a"]),
        ("import a.b, c as d\nfrom e.f import g\nimport a\n", ["a", "c", "e"]),
        ("import os.path\nfrom json import loads\n", []),
    ],
)
def test_only_imports_that_must_succeed_at_the_start_count(text: str, names: list[str]) -> None:
    outside = check_module({"mine/__init__.py": b"", "mine/task.py": text.encode()}, "mine", "mine.task")
    assert [*outside] == names


def test_imports_within_a_package_are_followed() -> None:
    files = {
        "mine/__init__.py": b"import of_init",
        "mine/task.py": b"from .sub import deep\nfrom mine.sub.space.x import y\nimport mine.data",
        "mine/sub/__init__.py": b"import of_sub",
        "mine/sub/deep.py": b"from . import other\nfrom .. import top\nfrom ..helper import f\n\nimport of_deep",
        "mine/sub/other.py": b"import of_other",
        "mine/sub/space/x.py": b"import of_x",
        "mine/top.py": b"import of_top\nif __name__ == '__main__':\n    import of_test, mine.gone",
        "mine/helper.py": b"import of_helper",
        "mine/data/x.json": b"",
        "mine/unused.py": b"import nowhere",
    }
    assert check_module(files, "mine", "mine.task") == {
        "of_init": "mine/__init__.py:1",
        "of_sub": "mine/sub/__init__.py:1",
        "of_deep": "mine/sub/deep.py:5",
        "of_other": "mine/sub/other.py:1",
        "of_x": "mine/sub/space/x.py:1",
        "of_top": "mine/top.py:1",
        "of_helper": "mine/helper.py:1",
    }
    with pytest.raises(
        UsageError, match=r"^mine/task\.py:1 imports mine\.gone, which is not in the package mine: put it there, or "
    ):
        check_module({"mine/task.py": b"from .gone import f"}, "mine", "mine.task")


def test_compiled_modules_are_of_the_package() -> None:
    compiled = {f"mine/{name}.cpython-311-x86_64-linux-gnu.so": b"\x7fELF" for name in ("fast", "sub/deep")}
    files = {"mine/__init__.py": b"", "mine/task.py": b"from .fast import f\nimport mine.sub.deep\nfrom mine import fast"}
    assert check_module({**files, **compiled}, "mine", "mine.task") == {}
    assert check_script({"mine/run.py": b"import fast, sub.deep, far", **compiled}, "mine/run.py").keys() == {"far"}
    with pytest.raises(
        UsageError, match=r"^mine/task\.py:1 imports mine\.fast, which is not in the package mine: put it there"
    ):
        check_module({**files, "mine/fast.c": b"", "mine/faster.so": b""}, "mine", "mine.task")


def test_a_module_may_make_up_modules_below_it() -> None:
    files = {"mine/task.py": b"from .six.moves import range\nimport mine.sub.six.moves.urllib", "mine/six.py": b""}
    assert check_module({**files, "mine/sub/six.py": b""}, "mine", "mine.task") == {}
    with pytest.raises(
        UsageError, match=r"^mine/task\.py:2 imports mine\.sub\.six\.moves\.urllib, which is not in the package"
    ):
        check_module(files, "mine", "mine.task")


def test_a_script_imports_its_neighbours_by_name() -> None:
    files = {
        "mine/train.py": b"import model, space.x, far\nimport json",
        "mine/model/__init__.py": b"from model import part",
        "mine/model/part.py": b"import of_part\nif __name__ == '__main__':\n    import of_test",
        "mine/space/x.txt": b"",
        "model.py": b"import wrong",
    }
    assert check_script(files, "mine/train.py") == {"far": "mine/train.py:1", "of_part": "mine/model/part.py:1"}
    for root, where in (("", "mine/bad.py:2"), ("/home/ann", "/home/ann/mine/bad.py:2")):
        with pytest.raises(UsageError, match=f"^{where} does not compile: "):
            check_script({"mine/bad.py": b"x\ny = ("}, "mine/bad.py", root)
    with pytest.raises(UsageError, match=r"^/home/ann/mine/bad\.py does not compile: source code .* null bytes$"):
        check_module({"mine/bad.py": b"\0"}, "mine", "mine.bad", "/home/ann")


@pytest.mark.parametrize(
    ("files", "module", "message"),
    [
        ({}, "mine.task", "module 'mine.task' is not in the package mine; there are none"),
        ({"main.py": ""}, "mine.task", "there are mine.main"),
        ({"task.py": ""}, "trainer.task", "module 'trainer.task' is not in the package mine; there are mine.task"),
        ({"task.py": "x = (\n"}, "mine.task", "mine/task.py:1 does not compile: '(' was never closed"),
        ({"task.py": "import mine.other", "other.py": "def f(:\n"}, "mine.task", "mine/other.py:1 does not compile"),
        ({"task.py": "import mine.nope\n"}, "mine.task", "mine/task.py:1 imports mine.nope, which is not in the package mine"),
        (
            {"task.py": "from . import model\n", "model.py": "import mine.gone"},
            "mine.task",
            "mine/model.py:1 imports mine.gone",
        ),
        ({"task.py": "from .nope import x\n"}, "mine.task", "mine/task.py:1 imports mine.nope"),
    ],
)
def test_errors_are_found_before_the_push(tmp_path: Path, files: dict[str, str], module: str, message: str) -> None:
    assert message in build_error(make_package(tmp_path, files), module)


def test_syntax_that_the_hosts_python_lacks_is_found_before_the_push(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = "try: pass\nexcept* OSError: pass\n"
    folder = make_package(tmp_path, {"task.py": new, "other.py": ""})
    why = "does not compile: Exception groups are only supported in Python 3.11 and greater, and the hosts run Python 3.10"
    for module, script in (("mine.task", None), ("", "mine/task.py")):
        with pytest.raises(UsageError, match=rf"/mine/task\.py:2 {re.escape(why)}$"):
            package.build(folder, module, script, python="3.10")
    package.build(folder, "mine.other", python="3.10")
    assert f"/mine/task.py:2 {why}; sent as it is, as mine.other does not import it" in capsys.readouterr().err
    assert package.build(folder, "mine.task", python="3.11").files
    assert "hosts run" not in capsys.readouterr().err


def test_a_file_that_is_not_imported_need_not_compile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    templates = dict.fromkeys((f"templates/{name}.py" for name in "abc"), "class {{ name }}:\n")
    built = package.build(make_package(tmp_path, {"task.py": "", **templates}), "mine.task")
    assert "mine/templates/a.py" in built.files
    note = r"^\S+/mine/templates/a\.py:1 does not compile: .* and 2 more; sent as it is, as mine\.task does not import it at "
    assert re.match(note, capsys.readouterr().err)


@pytest.mark.parametrize("text", [f"x = {'+'.join('1' * 9999)}", f"x = {'-' * 20000}1"])
def test_an_expression_that_is_too_long_to_inspect_is_sent_as_it_is(text: str) -> None:
    files = {"mine/__init__.py": b"", "mine/task.py": text.encode()}
    assert check_module(files, "mine", "mine.task") == {}
    assert package.add_library({"mine/task.py": f"import scaletier\n{text}".encode()}).keys() == {"mine/task.py"}


def test_the_library_is_added_only_to_a_package_that_imports_it(tmp_path: Path) -> None:
    library = {path for path in package.find(ROOT / "scaletier").files if not path.startswith("scaletier/__pycache__")}
    assert {"scaletier/__init__.py", "scaletier/scaletier.yaml"} < library
    built = package.build(
        make_package(tmp_path, {"task.py": "", "sub/deep.py": "def f():\n    import scaletier\n"}), "mine.task"
    )
    assert {*built.files} == library | {"mine/__init__.py", "mine/task.py", "mine/sub/deep.py"}
    assert built.name == "mine"
    assert built.imports == {}, "it is not required on hosts"
    assert package.unpack(built.archive, "mine", list(built.files), "mine.task") == built
    assert {path for path in package.build(TINY, "tiny.task").files if path.startswith("scaletier/")} == set()


IMPORTS = [
    *("import scaletier", "import scaletier as st", "import scaletier.data", "import os, scaletier", "import \\\n  scaletier"),
    *("import tensorflow as tf, scaletier", "from scaletier import Job", "from scaletier.job import Job"),
    *("def f():\n\tfrom\tscaletier import Job", "x = 1\r\nimport scaletier\r\n", "import os; import scaletier"),
    *("if True: import scaletier", "try:\n    import scaletier\nexcept ImportError:\n    scaletier = None"),
]
NO_IMPORTS = [
    *("import scaletiers", "import scaletier_own", "import mine.scaletier", "import numpy as scaletier_np"),
    *("from . import scaletier", "from .scaletier import Job", "from mine import scaletier", "# import scaletier"),
    *("text = 'import scaletier'", '"""\nimport scaletier\n"""', "import scaletier\nprint 'Python 2'"),
]


@pytest.mark.parametrize("text", IMPORTS + NO_IMPORTS)
def test_an_import_of_the_library_is_detected(text: str) -> None:
    files = package.add_library({"mine/task.py": text.encode(), "mine/notes.txt": b"import scaletier"})
    assert ("scaletier/__init__.py" in files) == (text in IMPORTS)


def test_a_packages_own_scaletier_is_kept(tmp_path: Path) -> None:
    own = {"mine/task.py": b"import scaletier", "scaletier/__init__.py": b"mine = 1"}
    assert package.add_library(own) == own
    module = {"mine/task.py": b"import scaletier", "scaletier.py": b"mine = 1"}
    assert package.add_library(module) == module
    root = make_package(tmp_path, {"task.py": "import scaletier\n", "scaletier/__init__.py": ""})
    assert "scaletier/__init__.py" not in package.find_folder(root).files, "a script imports from its own folder"
    assert "scaletier/__init__.py" in package.find(root).files, "a module imports it as mine.scaletier"


def test_the_library_itself_can_be_the_package() -> None:
    source = package.find(ROOT / "scaletier")
    assert (source.name, source.names) == ("scaletier", ["scaletier"])
    assert all(path.startswith("scaletier/") for path in source.files)


def test_a_scripts_library_is_beside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import scaletier\n")
    for source in (
        package.find_file(tmp_path / "train.py"),
        package.find_folder(make_package(tmp_path, {"train.py": "import scaletier"})),
    ):
        assert {path.partition("/")[0] for path in source.files} == {source.name, "scaletier"}
        assert source.names == [source.name]
        assert package.build(source, "", f"{source.name}/train.py").imports == {}
    for name, there in (("scaletier", True), ("datasets", False)):  # a folder without __init__.py may be no module
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / f"{name}/{'__init__' if there else 'prepare'}.py").touch()
        (tmp_path / "train.py").write_text(f"import {name}")
        needed = set() if there else {name}
        assert package.build(package.find_file(tmp_path / "train.py"), "", "train/train.py").imports.keys() == needed
    (tmp_path / "train.py").write_text("print(1)\n")
    assert [*package.find_file(tmp_path / "train.py").files] == ["train/train.py"]


def test_a_projects_packages_exclude_the_library() -> None:
    source = package.PackageSource("two", package.add_library({"a/__init__.py": b"import scaletier", "b/__init__.py": b""}))
    assert source.names == ["a", "b"]
    with pytest.raises(UsageError, match="name the one to run"):
        package.build(source, "c.task")
    built = package.build(package.PackageSource("two", {**source.files, "a/task.py": b"from scaletier import Job"}), "a.task")
    assert (built.name, built.imports) == ("a", {})


def test_an_invalid_package_folder_is_refused(tmp_path: Path) -> None:
    assert "does not exist: give --package" in build_error(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "is not a directory" in build_error(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "has no __init__.py" in build_error(tmp_path / "empty")
    assert "has no name that Python can import" in build_error(make_package(tmp_path, {}, "my-trainer"))


def test_a_module_of_a_folder_without_an_init_is_of_a_namespace_package(tmp_path: Path) -> None:
    root = write_files(tmp_path / "corp", {"mine/task.py": "from corp.mine import net\n", "mine/net.py": "", "data.txt": ""})
    source = package.find(root, "corp.mine.task")
    assert package.build(source, "corp.mine.task").files.keys() == {
        f"corp/{p}" for p in ("mine/task.py", "mine/net.py", "data.txt")
    }
    with pytest.raises(UsageError, match=rf"^package {root} has no __init__.py, .*: give --package {root}/mine$"):
        package.find(root, "mine.task")
    with pytest.raises(UsageError, match=r"make an empty __init__\.py there"):
        package.find(root, "corp.nowhere")


@pytest.mark.parametrize("name", ["code", "far"])
def test_a_script_s_folder_that_hides_a_module_of_python_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Its parent is on PYTHONPATH, before the standard library: pdb, which PyTorch imports, would get this `code`."""
    root = write_files(tmp_path / name, {"train.py": ""})
    package.build(package.find_folder(root), "", f"{name}/train.py", {"far": "1.0"})
    assert capsys.readouterr().err == ""
    (root / "__init__.py").touch()
    package.build(package.find_folder(root), "", f"{name}/train.py", {"far": "1.0"})
    assert capsys.readouterr().err.startswith(
        f"{name} is also a module of the job's Python, which its program could not import "
    )


def test_files_of_a_project_s_packages_that_its_wheel_lacks_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    files = ("setup.py", "README.md", "src/mine/__init__.py", "src/mine/fast.pyx", "src/mine/words.txt", "src/mine/net/a.py")
    own, installed = {f"proj/{path}" for path in files}, {"mine/__init__.py", "mine/net.py", "mine-1.dist-info/METADATA"}
    package._note_left_out("proj", own, installed)
    assert capsys.readouterr().err.startswith(
        "proj: its wheel, and so each host, lacks proj/src/mine/net/a.py, proj/src/mine/words.txt; package data includes "
    )
    package._note_left_out("proj", own, {*installed, "mine/words.txt", "mine/net/a.py"})
    assert capsys.readouterr().err == ""


def test_a_too_large_package_is_refused(tmp_path: Path) -> None:
    root = make_package(tmp_path, {"task.py": "", "data/small.bin": "x"})
    with (root / "data" / "train.bin").open("wb") as file:
        file.truncate(300_000_000)
    message = build_error(root)
    assert "has 300 MB, 250 MB at most; largest is data/train.bin with 300 MB: keep data in the bucket" in message


def test_a_missing_import_is_explained() -> None:
    files = {"trainer/task.py": b"import mnist", "trainer/mnist.py": b""}
    message = describe_missing(["mnist"], {"mnist": "trainer/task.py:1"}, "trainer", files)
    remedy = "write from trainer import mnist, or run task.py as it is by --script"
    assert message == f"trainer/task.py:1 imports mnist, which is only in the package: {remedy}"
    for path, above in (("p/nets.py", "."), ("p/src/nets/__init__.py", "src")):
        message = describe_missing(["nets"], {"nets": "p/bin/run.py:1"}, "p", {path: b"", "p/bin/run.py": b""}, "p")
        assert message == f"p/bin/run.py:1 imports nets, and Python does not look where {path} is: --env PYTHONPATH={above}"
    imports = {"pandas": "trainer/task.py:1", "scipy": "trainer/model.py:2"}
    assert describe_missing(["pandas"], imports, "trainer", files).endswith(
        "have: put it into the package, or into its requirements.txt, which --package brings along"
    )
    message = (
        "nor the hosts have; they also lack scipy (trainer/model.py:2): put them into the package, or into its requirements.txt"
    )
    assert message in describe_missing(["pandas", "scipy"], imports, "trainer", files)


def test_a_package_runs_by_its_main(tmp_path: Path) -> None:
    root = make_package(tmp_path, {"task.py": ""})
    assert (
        build_error(root, "mine")
        == "module 'mine' is a package without a __main__.py, the file that would run: name a module in it"
    )
    (root / "__main__.py").write_text("import far\n")
    assert package.build(root, "mine").imports == {"far": "mine/__main__.py:1"}


def test_the_limits_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_package(tmp_path, {"task.py": "1234", "data": "123456"})
    monkeypatch.setattr(package, "LIMIT", 10)
    assert package.find(root).files == {"mine/__init__.py": b"", "mine/data": b"123456", "mine/task.py": b"1234"}
    source = package.PackageSource("mine", {"mine/a": b"x", "mine/task.py": b"1"})
    size = len(package.pack(source.files))
    monkeypatch.setattr(package, "LIMIT", size)
    assert len(package.build(source, "mine.task").archive) == size
    monkeypatch.setattr(package, "LIMIT", size - 1)
    with pytest.raises(UsageError, match=r"^mine and its dependencies have 0 MB, 0 MB at most; largest is mine/a with 0 MB: "):
        package.build(source, "mine.task")


def test_large_packages_are_compressed_quickly() -> None:
    assert [package.compression_level(size) for size in (0, 19_999_999, 20_000_000)] == [6, 6, 1]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("[project]\ndependencies = ['far']\n",
         "the dependencies in pyproject.toml are ignored, as the folder is sent as it is: name them in requirements.txt"),
        ("[project\n", "pyproject.toml is ignored, as it cannot be read: Expected ']'"),
        ("[project]\ndependencies = []\n[tool.ruff]\n", ""),
        ("project = 1\n", ""),
    ],
)  # fmt: skip
def test_dependencies_in_a_folder_s_pyproject_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, note: str
) -> None:
    root = write_files(tmp_path / "mine", {"__init__.py": "", "pyproject.toml": text})
    for find in (package.find, package.find_folder):
        find(root)
        printed = capsys.readouterr().err
        assert printed.startswith(f"mine: {note}") if note else printed == ""
        assert printed.count("\n") == bool(note)
    (root / "requirements.txt").touch()
    package.find(root)
    assert capsys.readouterr().err == ""


def test_dependencies_in_a_folder_s_setup_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_files(tmp_path / "mine", {"__init__.py": "", "setup.py": "setup(install_requires=['far'])"})
    package.find(root)
    assert capsys.readouterr().err.startswith(
        "mine: the dependencies in setup.py are ignored, as the folder is sent as it is: "
    )
    for nothing in ("setup()", "setup(install_requires = [ ])", "setup()  # without install_requires"):
        (root / "setup.py").write_text(nothing)
        package.find(root)
        assert capsys.readouterr().err == ""


def test_a_folder_or_a_file_without_a_package(tmp_path: Path) -> None:
    write_files(tmp_path / "mine", {"run.sh": "#!/bin/sh\n", "requirements.txt": "far\n"})
    (tmp_path / "mine" / "run.sh").chmod(0o755)
    folder = package.find_folder(tmp_path / "mine")
    assert (folder.requirements, folder.executables) == (tmp_path / "mine/requirements.txt", {"mine/run.sh"})
    files, programs = {"run/run.sh": b"#!/bin/sh\n"}, frozenset({"run/run.sh"})
    expected = package.PackageSource("run", files, None, f"{tmp_path}/mine", programs, alone=True)
    assert package.find_file(tmp_path / "mine" / "run.sh") == expected
    (tmp_path / "mine" / "run.sh").chmod(0o644)
    assert package.find_file(tmp_path / "mine" / "run.sh").executables == frozenset()
    with pytest.raises(UsageError, match=r"gone does not exist: give --package a directory$"):
        package.find_folder(tmp_path / "gone")
    with pytest.raises(UsageError, match=r"run.sh is not a directory: give --package a directory$"):
        package.find_folder(tmp_path / "mine/run.sh")
    (tmp_path / "mine" / "run.sh").chmod(0)
    if os.geteuid():
        with pytest.raises(UsageError, match=r"run.sh cannot be read: Permission denied$"):
            package.find_file(tmp_path / "mine/run.sh")


def test_the_wheels_are_part_of_what_is_pushed() -> None:
    files = {"mine/a.py": b"import far, near, os", "mine/b.txt": b""}
    archive = package.pack({"far.py": b"", **files}, {"mine/b.txt"})
    built = package.unpack(archive, "mine", files, "mine.a", installed={"x": "1"})
    assert built == package.Package(
        "mine", files, {"near": "mine/a.py:1"}, archive, {"far.py": b""}, frozenset({"mine/b.txt"}), {"x": "1"}
    )
    assert built.host_files == {"far.py": b"", **files}
    script = package.unpack(archive, "mine", files, "", "mine/a.py")
    assert (script.imports, script.installed) == ({"near": "mine/a.py:1"}, {})
    assert package.unpack(archive, "mine", files, "").imports == {}, "a program that is no Python"


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("from . import helper", "`from . import helper`"),
        ("import os\nfrom .helper import a, b", "`from .helper import a`"),
        ("from ..up import x", "`from ..up import x`"),
        ("try:\n    from . import helper\nexcept ImportError:\n    import helper", ""),
        ("if __name__ != '__main__':\n    from . import helper", ""),
        ("def f():\n    from . import helper", ""),
        ("__package__ = 'mine'\nfrom . import helper", ""),
        ("from parts import two", ""),
    ],
)
def test_a_script_has_no_package_to_import_from(text: str, refused: str) -> None:
    files = {"mine/run.py": text, "mine/helper.py": "", "mine/parts/one.py": "", "mine/parts/two.py": "from . import one"}
    content = {path: each.encode() for path, each in files.items()}
    if not refused:
        assert check_script(content, "mine/run.py") == {}
        return
    line = text.count("\n") + 1
    with pytest.raises(UsageError) as error:
        check_script(content, "mine/run.py")
    how = "leave out the dots, or run a package: --package FOLDER --module FOLDER.run"
    assert str(error.value) == f"mine/run.py:{line} has {refused}, and a script has no package to start from: {how}"


def test_a_module_imports_nothing_above_its_package() -> None:
    files = {"mine/__init__.py": b"", "mine/task.py": b"from . import a", "mine/a.py": b"\nfrom ..models import net\n"}
    how = "give --package the folder above, such as above/, and --module above.mine.task"
    message = f"mine/a.py:2 has `from ..models import net`, which is above the package mine: {how}"
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        check_module(files, "mine", "mine.task")
    deeper = {f"up/{path}": content for path, content in files.items()} | {"up/__init__.py": b"", "up/models/net.py": b""}
    assert check_module(deeper, "up", "up.mine.task") == {}


@pytest.mark.parametrize(
    ("text", "sets_pythonpath", "needed"),
    [
        ("import net, far", False, {"net", "far"}),
        ("import net, far", True, {"far"}),
        ("import sys\nsys.path.append('src')\nimport net, layers.dense, far", False, {"far"}),
        ("from mine.src import net", False, set()),  # the folder of the package is on PYTHONPATH
    ],
)
def test_a_script_may_have_further_folders_to_import_from(
    tmp_path: Path, text: str, sets_pythonpath: bool, needed: set[str]
) -> None:
    root = make_package(tmp_path, {"run.py": text, "src/net.py": "", "src/layers/dense.py": ""})
    built = package.build(replace(package.find_folder(root), sets_pythonpath=sets_pythonpath), "", "mine/run.py")
    assert built.imports.keys() == needed
    again = package.unpack(built.archive, "mine", built.files, "", "mine/run.py", sets_pythonpath=sets_pythonpath)
    assert again.imports == built.imports
