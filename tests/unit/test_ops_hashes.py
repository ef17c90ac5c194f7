"""Check a requirements.txt with hashes, by uv or pip-compile: host packages, pushed and refused ones."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from test_ops_dependencies import build_error, fail_on_uv, make_trainer, make_wheel, own_cache

from ops.package import dependencies, hostpython, install, package

__all__ = ["own_cache"]
_WRONG = "0" * 64
TRACEBACK = "Traceback (most recent call last):\n"


def pinned_requirement(name: str, version: str, sha256: str) -> str:
    """Return lines like pip-compile's."""
    return f"{name}=={version} \\\n    --hash=sha256:{sha256} \\\n    --hash=sha256:{_WRONG}\n    # via mine\n"


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pushed_packages(root: Path) -> set[str]:
    return {path.partition("/")[0] for path in package.build(root, "mine.task").dependency_files if ".dist-info" not in path}


def test_a_pinned_host_package_needs_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependencies, "install", fail_on_uv)
    six = hostpython.host_packages()["six"]
    assert pushed_packages(make_trainer(tmp_path, pinned_requirement("six", six, _WRONG), "import six\n")) == set()


def test_pushed_packages_have_their_hash_checked(tmp_path: Path, index: Path) -> None:
    far, near = make_wheel(index, needs="near,numpy"), make_wheel(index, "near")
    numpy = pinned_requirement("numpy", hostpython.host_packages()["numpy"], _WRONG)
    root = make_trainer(
        tmp_path, pinned_requirement("far", "1.0", sha256_of(far)) + pinned_requirement("near", "1.0", sha256_of(near)) + numpy
    )
    assert pushed_packages(root) == {"far", "near"}
    (root / "requirements.txt").write_text(
        pinned_requirement("far", "1.0", "1" * 64) + pinned_requirement("near", "1.0", sha256_of(near))
    )
    error = build_error(root)
    assert error.startswith(
        f"far==1.0 does not match its hash in requirements.txt, what was fetched has sha256 {sha256_of(far)}: "
    )
    assert "tampered" not in error


def test_a_missing_hash_is_refused(tmp_path: Path, index: Path) -> None:
    far = make_wheel(index, needs="near")
    make_wheel(index, "near")
    error = build_error(make_trainer(tmp_path, pinned_requirement("far", "1.0", sha256_of(far))))
    assert error.startswith("near has no version and hash in requirements.txt; where one line has a hash, all need one")
    assert "near==1.0 has no version" in build_error(
        make_trainer(tmp_path, pinned_requirement("far", "1.0", sha256_of(far)) + "near==1.0\n")
    )


def test_a_hash_of_a_host_package_requires_no_other_hashes(tmp_path: Path, index: Path) -> None:
    make_wheel(index, needs="six")
    assert pushed_packages(
        make_trainer(tmp_path, pinned_requirement("six", hostpython.host_packages()["six"], _WRONG) + "far\n")
    ) == {"far"}


def test_a_local_path_needs_no_hash(tmp_path: Path, index: Path) -> None:
    far, near = make_wheel(index), make_wheel(index, "near")
    root = make_trainer(tmp_path, f"./{near.name}\n{pinned_requirement('far', '1.0', sha256_of(far))}")
    near.rename(root / near.name)
    assert pushed_packages(root) == {"far", "near"}
    (root / "requirements.txt").write_text(f"./{near.name}\n{pinned_requirement('far', '1.0', '1' * 64)}")
    assert build_error(root).startswith("far==1.0 does not match its hash in requirements.txt")


def test_included_files_may_have_hashes(tmp_path: Path, index: Path) -> None:
    far = make_wheel(index)
    root = make_trainer(tmp_path, "-r more/locked.txt\n")
    (root / "more").mkdir()
    six = pinned_requirement("six", hostpython.host_packages()["six"], _WRONG)
    (root / "more/locked.txt").write_text(pinned_requirement("far", "1.0", sha256_of(far)) + six)
    assert pushed_packages(root) == {"far"}
    make_wheel(index, files={"far/__init__.py": "changed"})
    (root / "more/locked.txt").write_text(six)
    assert pushed_packages(root) == set()


def test_another_version_of_a_host_package_is_pushed_if_pure_python(
    tmp_path: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    six = make_wheel(index, "six")
    assert pushed_packages(make_trainer(tmp_path, pinned_requirement("six", "1.0", sha256_of(six)))) == {"six"}
    host_version = hostpython.host_packages()["six"]
    assert f"six 1.0 is sent, instead of the {host_version} of the job's Python" in capsys.readouterr().err
    assert pushed_packages(make_trainer(tmp_path, "six<1.1\n")) == {"six"}
    compiled = make_wheel(index, "wrapt", tags="cp311-cp311-manylinux2014_x86_64")
    for lines in (pinned_requirement("wrapt", "1.0", sha256_of(compiled)), "wrapt==1.0\n"):
        assert build_error(make_trainer(tmp_path, lines)).startswith("wrapt==1.0 is required, but the job's Python has wrapt ")
    for name in ("numpy", "keras", "tensorflow"):
        error = build_error(make_trainer(tmp_path, pinned_requirement(name, "1.0", _WRONG)))
        assert error.startswith(f"{name}==1.0 is required, but the job's Python has {name} ")
        assert "--runtime" in error


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("  LookupError: no version\n\n  Make sure that you have tags:\n  see https://x\n", "LookupError: no version"),
        (f"{TRACEBACK}  File x\n    y\nx.NotVCS: not a repository\nhelp\n", "x.NotVCS: not a repository"),
        (
            "x.c:1:10: fatal error: a.h: No such file\n #include <a.h>\ncompilation terminated.\n"
            "error: command '/usr/bin/gcc' failed with exit code 1\n",
            "x.c:1:10: fatal error: a.h: No such file",
        ),
        (
            f"fatal: No names found\n{TRACEBACK}  x\nsubprocess.CalledProcessError: Command '['git']' failed.\n",
            "fatal: No names found",
        ),
        ("error: command 'gcc' failed: No such file\nbye\n", "error: command 'gcc' failed: No such file"),
        ("all is well\nbye\n", "bye"),
        ("", "it printed nothing"),
    ],
)
def test_the_reason_of_a_failed_build_is_one_line(output: str, message: str) -> None:
    indented = "".join(f"      {line}\n" for line in output.splitlines())
    assert install.reason(indented) == message
    if not output:
        return
    failed = "error: The build backend returned an error\n  cause: Call failed (exit status: 1)\n\n    [stderr]\n"
    assert install.explain(failed + indented, "3.11") == f"a build by setup.py or pyproject.toml failed: {message}"
