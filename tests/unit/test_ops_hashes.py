"""A requirements.txt with hashes, by uv or pip-compile: hosts' packages, pushed and refused ones."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from test_ops_dependencies import no_uv, refused, trainer, wheel

from ops.package import dependencies, hostpython, install, package

_WRONG = "0" * 64


@pytest.fixture(autouse=True)
def own_cache(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a fresh cache of wheels, and our own index alone."""
    monkeypatch.setattr(dependencies, "CACHE", tmp_path / "cache")


def pinned(name: str, version: str, digest: str) -> str:
    """Return lines like pip-compile's."""
    return f"{name}=={version} \\\n    --hash=sha256:{digest} \\\n    --hash=sha256:{_WRONG}\n    # via mine\n"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def brought(root: Path) -> set[str]:
    return {path.partition("/")[0] for path in package.build(root, "mine.task").wheels if ".dist-info" not in path}


def test_what_the_hosts_have_in_that_version_needs_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependencies, "install", no_uv)
    six = hostpython.host_packages()["six"]
    assert brought(trainer(tmp_path, pinned("six", six, _WRONG), "import six\n")) == set()


def test_others_travel_with_their_hash_checked(tmp_path: Path, index: Path) -> None:
    far, near = wheel(index, needs="near,numpy"), wheel(index, "near")
    numpy = pinned("numpy", hostpython.host_packages()["numpy"], _WRONG)
    root = trainer(tmp_path, pinned("far", "1.0", digest(far)) + pinned("near", "1.0", digest(near)) + numpy)
    assert brought(root) == {"far", "near"}
    (root / "requirements.txt").write_text(pinned("far", "1.0", "1" * 64) + pinned("near", "1.0", digest(near)))
    says = refused(root)
    assert says.startswith(f"far==1.0 does not match its hash in requirements.txt, what was fetched has sha256 {digest(far)}: ")
    assert "tampered" not in says


def test_a_file_with_hashes_that_lacks_one(tmp_path: Path, index: Path) -> None:
    far = wheel(index, needs="near")
    wheel(index, "near")
    says = refused(trainer(tmp_path, pinned("far", "1.0", digest(far))))
    assert says.startswith("near has no version and hash in requirements.txt, as all that a file with hashes wants must")
    assert "near==1.0 has no version" in refused(trainer(tmp_path, pinned("far", "1.0", digest(far)) + "near==1.0\n"))


def test_one_hash_of_what_the_hosts_have_asks_for_no_others(tmp_path: Path, index: Path) -> None:
    wheel(index, needs="six")
    assert brought(trainer(tmp_path, pinned("six", hostpython.host_packages()["six"], _WRONG) + "far\n")) == {"far"}


def test_files_that_a_file_names_have_hashes_too(tmp_path: Path, index: Path) -> None:
    far = wheel(index)
    root = trainer(tmp_path, "-r more/locked.txt\n")
    (root / "more").mkdir()
    six = pinned("six", hostpython.host_packages()["six"], _WRONG)
    (root / "more/locked.txt").write_text(pinned("far", "1.0", digest(far)) + six)
    assert brought(root) == {"far"}
    wheel(index, files={"far/__init__.py": "changed"})
    (root / "more/locked.txt").write_text(six)
    assert brought(root) == set()


def test_another_version_travels_if_it_is_pure_python(tmp_path: Path, index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    six = wheel(index, "six")
    assert brought(trainer(tmp_path, pinned("six", "1.0", digest(six)))) == {"six"}
    have = hostpython.host_packages()["six"]
    assert f"six 1.0 goes along, in the place of the {have} that the Python of the job has" in capsys.readouterr().err
    assert brought(trainer(tmp_path, "six<1.1\n")) == {"six"}
    compiled = wheel(index, "wrapt", tags="cp311-cp311-manylinux2014_x86_64")
    for lines in (pinned("wrapt", "1.0", digest(compiled)), "wrapt==1.0\n"):
        assert refused(trainer(tmp_path, lines)).startswith("wrapt==1.0 is asked for, but the Python of the job has wrapt ")
    for name in ("numpy", "keras", "tensorflow"):
        says = refused(trainer(tmp_path, pinned(name, "1.0", _WRONG)))
        assert says.startswith(f"{name}==1.0 is asked for, but the Python of the job has {name} ")
        assert "--runtime" in says


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (
            "  LookupError: no version in x\n\n  Make sure that you have tags:\n  see https://x\n",
            "LookupError: no version in x",
        ),
        (
            "Traceback (most recent call last):\n  File x\n    y\nx.NotVCS: not a repository\nhelp\n",
            "x.NotVCS: not a repository",
        ),
        (
            "x.c:1:10: fatal error: a.h: No such file\n #include <a.h>\ncompilation terminated.\n"
            "error: command '/usr/bin/gcc' failed with exit code 1\n",
            "x.c:1:10: fatal error: a.h: No such file",
        ),
        (
            "fatal: No names found\nTraceback (most recent call last):\n  x\nsubprocess.CalledProcessError: Command "
            "'['git']' returned non-zero exit status 128.\n",
            "fatal: No names found",
        ),
        (
            "error: command 'gcc' failed: No such file or directory\nbye\n",
            "error: command 'gcc' failed: No such file or directory",
        ),
        ("all is well\nbye\n", "bye"),
        ("", "it printed nothing"),
    ],
)
def test_the_line_of_a_failed_build_that_states_the_reason(output: str, says: str) -> None:
    indented = "".join(f"      {line}\n" for line in output.splitlines())
    assert install.reason(indented) == says
    if not output:
        return
    whole = f"error: The build backend returned an error\n  cause: Call failed (exit status: 1)\n\n    [stderr]\n{indented}"
    assert install.explain(whole, "3.11") == f"a build by setup.py or pyproject.toml failed: {says}"
