"""The files of a folder: links, ignore files, and builds that read their version from git."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from opsdata import inventory_json
from test_ops_dependencies import project

from jobs.folder import open_bucket
from ops.cluster.cluster import ClusterClient
from ops.cluster.inventory import parse
from ops.errors import UsageError
from ops.package import dependencies, git, package, tree
from ops.submit.data import data

_BOTH = (tree.IGNORE_FILE, tree.GIT_IGNORE_FILE)
# A backend whose version is what git describes.
_BEFORE = (
    "import subprocess; (pathlib.Path('mine') / 'version.py').write_text(repr(subprocess.run("
    "['git', 'describe', '--tags', '--dirty'], capture_output=True, text=True, check=True).stdout.strip()))"
)


def fill(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("")
    return root


def paths(root: Path, *ignore_files: str) -> list[str]:
    return list(tree.walk(root, ignore_files).files)


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """Return a package with links to a folder and a file elsewhere, to its own, in a circle, to nothing."""
    fill(tmp_path, "elsewhere/deep/b.py", "one.py")
    root = fill(tmp_path / "mine", "__init__.py", "task.py", "lib/a.py")
    for name, target in {
        "far": "../elsewhere",
        "one.py": str(tmp_path / "one.py"),
        "again": "lib",
        "lib/up": "..",
        "lib/here": ".",
        "top": "/",
        "gone": "../nowhere",
        "itself": "itself",
    }.items():
        (root / name).symlink_to(target)
    (tmp_path / "elsewhere/back").symlink_to("../mine")
    return root


def test_links_are_followed_but_around_in_a_circle(linked: Path, tmp_path: Path) -> None:
    found = tree.walk(linked)
    assert [*found.files] == ["__init__.py", "again/a.py", "far/deep/b.py", "lib/a.py", "one.py", "task.py"]
    outside, cycles, dangling = found.notes
    assert outside == f"links that leave the folder are followed: far -> ../elsewhere, one.py -> {tmp_path / 'one.py'}"
    assert cycles.startswith(
        "links to a folder that they are in are left out: again/here -> ., again/up -> .., far/back -> ../mine"
    )
    assert dangling == "links that lead nowhere are left out: gone -> ../nowhere, itself -> itself"


def test_a_package_and_data_have_what_links_lead_to(linked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (linked / "task.py").write_text("from mine.far.deep import b\nimport one\n")
    built = package.build(linked, "mine.task")
    assert "mine/far/deep/b.py" in built.files
    assert "mine: links that leave the folder are followed: far -> ../elsewhere" in capsys.readouterr().err
    (bucket := tmp_path / "bucket").mkdir()
    inventory = parse(inventory_json(bucket=str(bucket), operatorBucket=str(bucket)), tmp_path)
    cluster = ClusterClient(inventory, object(), open_bucket(str(bucket)), object())  # type: ignore[arg-type]
    assert data(cluster, "put", str(linked), None, sure=True, as_json=False) == 0
    assert (bucket / "data/mine/far/deep/b.py").read_text() == ""
    assert "links that lead nowhere are left out: gone -> ../nowhere" in capsys.readouterr().err


def test_keys_of_a_stack_are_never_sent(tmp_path: Path) -> None:
    root = fill(tmp_path / "mine", "a.py", "sub/.scaletier/dev/id_ed25519", ".pulumi-state/passphrase", ".pulumi/x")
    (root / "keys").symlink_to("sub/.scaletier/dev")
    (root / "key").symlink_to("sub/.scaletier/dev/id_ed25519")
    found = tree.walk(root)
    assert [*found.files] == ["a.py"]
    [note] = found.notes
    assert note == (
        "keys of stacks are left out: .pulumi/, .pulumi-state/, key -> sub/.scaletier/dev/id_ed25519, "
        "keys -> sub/.scaletier/dev, sub/.scaletier/"
    )


@pytest.mark.parametrize("path", ["sub/.scaletier", "sub/.scaletier/dev/id_ed25519", "key"])
def test_keys_of_a_stack_are_refused_by_their_own_path(tmp_path: Path, path: str) -> None:
    fill(tmp_path, "sub/.scaletier/dev/id_ed25519")
    (tmp_path / "key").symlink_to("sub/.scaletier/dev/id_ed25519")
    with pytest.raises(UsageError, match=r"is in \.scaletier, which holds keys of stacks and is never sent: give another path"):
        tree.walk(tmp_path / path)


def test_folders_that_link_to_one_another_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_MOST_LINKED_FOLDERS", 100)
    names = [f"d{number}" for number in range(6)]
    for name in names:
        (tmp_path / name).mkdir()
        for other in names:
            (tmp_path / name / other).symlink_to(f"../{other}")
    with pytest.raises(UsageError, match="has links that make a folder of more than 100 others"):
        tree.walk(tmp_path)


def test_ignore_files(tmp_path: Path) -> None:
    fill(tmp_path, ".git/HEAD", "repo/mine/x")
    (tmp_path / ".gitignore").write_text("*.h5\n/repo/mine/top.txt\n")
    root = fill(
        tmp_path / "repo/mine", "a.py", "b.h5", "c.log", "top.txt", "data/big", "sub/c.log", "sub/keep.log", "sub/top.txt"
    )
    (root / ".gitignore").write_text("data/\n*.log\n")
    (root / "sub/.gitignore").write_text("!keep.log\n")
    assert paths(root, *_BOTH) == [".gitignore", "a.py", "sub/.gitignore", "sub/keep.log", "sub/top.txt", "x"]
    (root / tree.IGNORE_FILE).write_text("# mine\n!b.h5\nsub\n")
    found = tree.walk(root, _BOTH)
    assert [*found.files] == [".gitignore", "a.py", "b.h5", "x"]
    assert found.ignored == {".scaletierignore": ["sub/"], ".gitignore": ["c.log", "data/", "top.txt"]}
    assert "data/big" in paths(root, tree.IGNORE_FILE), "of data .gitignore says nothing"


def test_a_folder_that_its_repository_ignores_is_still_sent(tmp_path: Path) -> None:
    fill(tmp_path, ".git/HEAD")
    (tmp_path / ".gitignore").write_text("mine/\n*.bin\n")
    assert paths(fill(tmp_path / "mine", "a.py", "b.bin"), *_BOTH) == ["a.py", "b.bin"]


def test_files_that_git_has_go_along_though_a_gitignore_names_them(tmp_path: Path) -> None:
    root = fill(tmp_path / "repo/mine", "lib/deep/util.py", "lib/new.py", "model.h5", "far/x")
    (root / ".gitignore").write_text("lib/\n*.h5\nfar/\n")
    run_git(root.parent, "init", "--quiet")
    run_git(root.parent, "add", "--force", "mine/lib/deep/util.py", "mine/model.h5")
    found = tree.walk(root, _BOTH)
    assert [*found.files] == [".gitignore", "lib/deep/util.py", "model.h5"]
    assert found.ignored == {".gitignore": ["far/", "lib/new.py"]}
    (root / tree.IGNORE_FILE).write_text("lib/\n")
    assert paths(root, *_BOTH) == [".gitignore", "model.h5"], "an ignore file of ours wins"


def test_what_a_gitignore_leaves_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = fill(tmp_path / "mine", "__init__.py", "task.py", "model.h5")
    (root / ".gitignore").write_text("*.h5\n")
    assert list(package.find(root).left_out) == ["model.h5"]
    said = "mine: .gitignore leaves out model.h5; a line such as !model.h5 in .scaletierignore brings it along\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            "*\n",
            "has no file left, as its ignore files leave out all of them: take lines out of .scaletierignore (__init__.py)",
        ),
        ("!\n", ".scaletierignore cannot be read: Invalid git pattern: '!'"),
        ("\udcff", "cannot be read: 'utf-8' codec can't decode"),
    ],
)
def test_an_ignore_file_that_is_wrong(tmp_path: Path, content: str, says: str) -> None:
    root = fill(tmp_path / "mine", "__init__.py")
    (root / tree.IGNORE_FILE).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UsageError) as error:
        package.find(root)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all")
def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0)
    with pytest.raises(UsageError, match="shut cannot be read: Permission denied"):
        tree.walk(tmp_path)


def run_git(folder: Path, *words: str) -> None:
    own = ["-c", "user.name=ann", "-c", "user.email=ann@example.org", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def versioned(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project in a folder of a repository, which takes its version from there."""
    monkeypatch.setattr(dependencies, "CACHE", tmp_path / "cache")
    (repository := tmp_path / "repository").mkdir()
    root = project(repository, before=_BEFORE)
    fill(repository, "other/large.bin", "some-project/.gitignore", "some-project/run.sh")
    (root / ".gitignore").write_text("left.txt\n")
    (root / "run.sh").chmod(0o755)
    (root / "link.sh").symlink_to("run.sh")
    (root / "mine/task.py").write_text("from mine import version\n")
    run_git(repository, "init", "--quiet")
    run_git(repository, "add", "--all")
    run_git(repository, "commit", "--quiet", "-m", "first")
    run_git(repository, "tag", "v1.2.3")
    return root


def version(root: Path) -> str:
    return package.find(root).files["mine/version.py"].decode().strip("'")


def test_a_version_from_git(versioned: Path) -> None:
    (versioned / "left.txt").write_text("not sent")
    assert version(versioned) == "v1.2.3"
    run_git(versioned, "tag", "--force", "v2.0")
    run_git(versioned, "tag", "--delete", "v1.2.3")
    assert version(versioned) == "v2.0", "a new tag is a new build"
    (versioned / "mine/task.py").write_text("from mine import version  # changed\n")
    assert version(versioned) == "v2.0-dirty"
    run_git(versioned, "commit", "--quiet", "--all", "-m", "second")
    assert version(versioned).startswith("v2.0-1-g")
    assert not (versioned / "mine/version.py").exists()
    done = subprocess.run(["git", "status", "--porcelain"], cwd=versioned, capture_output=True, check=True)
    assert done.stdout == b"", "the user's repository is as it was"


def test_a_version_from_git_of_a_worktree_and_a_shallow_clone(versioned: Path, tmp_path: Path) -> None:
    run_git(versioned, "worktree", "add", "--quiet", "--detach", str(tmp_path / "tree"))
    assert version(tmp_path / "tree/some-project") == "v1.2.3"
    subprocess.run(
        ["git", "clone", "--quiet", "--depth=1", f"file://{versioned.parent}", str(tmp_path / "shallow")], check=True
    )
    assert version(tmp_path / "shallow/some-project") == "v1.2.3"


def test_a_version_from_git_without_a_tag_is_refused_with_gits_reason(versioned: Path) -> None:
    run_git(versioned, "tag", "--delete", "v1.2.3")
    with pytest.raises(UsageError) as error:
        package.find(versioned)
    assert "returned non-zero exit status" in str(error.value)


def test_no_git_is_no_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git.find(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git.find(tmp_path) is None


def test_a_requirements_file_that_is_passed_over_is_said(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dependencies, "CACHE", tmp_path / "cache")
    root = project(tmp_path)
    (root / "requirements.txt").write_text("far\n")
    package.find(root)
    said = "requirements.txt is passed over, as what pyproject.toml names as dependencies goes along"
    assert said in capsys.readouterr().err
    (root / "pyproject.toml").write_text((root / "pyproject.toml").read_text() + "# dependencies of requirements.txt\n")
    package.find(root)
    assert said not in capsys.readouterr().err
