"""Check the files of a folder (ops.package.tree): links, ignore files, and builds with a version of ops.package.git."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from opsdata import make_cluster, write_files
from test_ops_dependencies import make_project

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
    return write_files(root, dict.fromkeys(paths, ""))


def walk_paths(root: Path, *ignore_files: str) -> list[str]:
    return list(tree.walk(root, ignore_files).files)


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """Return a package with links to a folder and a file outside, to its own folders, in cycles, and to nothing."""
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


def test_links_are_followed_except_cycles(linked: Path, tmp_path: Path) -> None:
    walked = tree.walk(linked)
    assert [*walked.files] == ["__init__.py", "again/a.py", "far/deep/b.py", "lib/a.py", "one.py", "task.py"]
    outside, cycles, broken = walked.notes
    assert outside == f"links that leave the folder are followed: far -> ../elsewhere, one.py -> {tmp_path / 'one.py'}"
    assert cycles.startswith(
        "links to a folder that contains them are skipped: again/here -> ., again/up -> .., far/back -> ../mine"
    )
    assert broken == "broken links are skipped: gone -> ../nowhere, itself -> itself"


def test_packages_and_data_include_link_targets(linked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (linked / "task.py").write_text("from mine.far.deep import b\nimport one\n")
    built = package.build(linked, "mine.task")
    assert "mine/far/deep/b.py" in built.files
    assert "mine: links that leave the folder are followed: far -> ../elsewhere" in capsys.readouterr().err
    assert data(make_cluster(tmp_path), "put", str(linked), None, sure=True, as_json=False) == 0
    assert (tmp_path / "bucket/data/mine/far/deep/b.py").read_text() == ""
    assert "broken links are skipped: gone -> ../nowhere" in capsys.readouterr().err


def test_ignore_files_may_begin_with_a_mark_and_git_s_hold_any_bytes(tmp_path: Path) -> None:
    root = fill(tmp_path / "mine", "a.py", "b.log", "c.tmp")
    (root / ".gitignore").write_bytes(b"\xef\xbb\xbf*.log\ncaf\xe9\n")
    (root / ".scaletierignore").write_bytes(b"\xef\xbb\xbf*.tmp\n")
    (root / os.fsdecode(b"caf\xe9")).touch()
    assert walk_paths(root, *_BOTH) == [".gitignore", "a.py"]
    (root / ".scaletierignore").write_bytes(b"caf\xe9\n")
    with pytest.raises(UsageError, match=r"\.scaletierignore cannot be read: 'utf-8' codec"):
        tree.walk(root, _BOTH)


def test_virtual_environments_are_no_part_of_a_package(tmp_path: Path) -> None:
    root = fill(tmp_path / "mine", "a.py", "env/pyvenv.cfg", "env/lib/site.py")
    assert [*tree.walk(root, skipped={".git"}).files] == ["a.py"]
    assert [*tree.walk(root).files] == ["a.py", "env/lib/site.py", "env/pyvenv.cfg"]


@pytest.mark.parametrize("history", [".git/HEAD", ".git"])
def test_a_repository_s_history_is_never_sent(tmp_path: Path, history: str) -> None:
    root = fill(tmp_path / "mine", "a.py", history, "sub/b.py", f"sub/{history}", "sub/x.git", ".github/c.yml")
    assert walk_paths(root, *_BOTH) == [".github/c.yml", "a.py", "sub/b.py", "sub/x.git"]


def test_an_unreadable_folder_is_no_error_if_it_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = fill(tmp_path / "mine", "a.py", "volume/x")
    (root / tree.IGNORE_FILE).write_text("volume/\n")
    is_file = Path.is_file

    def refuse(path: Path) -> bool:
        if path.is_relative_to(root / "volume"):
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert [*tree.walk(root, _BOTH, {".git"}).files] == ["a.py"]
    (root / tree.IGNORE_FILE).write_text("")
    with pytest.raises(UsageError, match=rf"^{root}/volume/\S+ cannot be read: Permission denied$"):
        tree.walk(root, _BOTH, {".git"})


def test_empty_folders_and_special_files_are_named(tmp_path: Path) -> None:
    root = fill(tmp_path / "mine", "a.py", "full/b.py")
    (root / "full/logs").mkdir()
    os.mkfifo(root / "pipe")
    walked = tree.walk(root)
    assert [*walked.files] == ["a.py", "full/b.py"]
    assert walked.notes == ("empty folders are skipped: full/logs/", "pipes, sockets and devices are skipped: pipe")


def test_a_path_to_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "pipe"), (Path("/dev/null"), "device")):
        with pytest.raises(UsageError, match=f"^{path} is a {kind}: give the path of a file or a folder$"):
            tree.walk(path)


def test_keys_of_a_stack_are_never_sent(tmp_path: Path) -> None:
    root = fill(tmp_path / "mine", "a.py", "sub/.scaletier/dev/id_ed25519", ".pulumi-state/passphrase", ".pulumi/x")
    (root / "keys").symlink_to("sub/.scaletier/dev")
    (root / "key").symlink_to("sub/.scaletier/dev/id_ed25519")
    walked = tree.walk(root)
    assert [*walked.files] == ["a.py"]
    [note] = walked.notes
    assert note == (
        "keys of stacks are skipped: .pulumi/, .pulumi-state/, key -> sub/.scaletier/dev/id_ed25519, "
        "keys -> sub/.scaletier/dev, sub/.scaletier/"
    )


@pytest.mark.parametrize("path", ["sub/.scaletier", "sub/.scaletier/dev/id_ed25519", "key"])
def test_a_path_to_keys_of_a_stack_is_refused(tmp_path: Path, path: str) -> None:
    fill(tmp_path, "sub/.scaletier/dev/id_ed25519")
    (tmp_path / "key").symlink_to("sub/.scaletier/dev/id_ed25519")
    with pytest.raises(UsageError, match=r"is in \.scaletier, which holds keys of stacks and is never sent: give another path"):
        tree.walk(tmp_path / path)


def test_too_many_links_between_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_MOST_LINKED_FOLDERS", 100)
    names = [f"d{number}" for number in range(6)]
    for name in names:
        (tmp_path / name).mkdir()
        for other in names:
            (tmp_path / name / other).symlink_to(f"../{other}")
    with pytest.raises(UsageError, match="has links that make a folder of more than 100 others"):
        tree.walk(tmp_path)


def test_ignore_files_leave_files_out(tmp_path: Path) -> None:
    fill(tmp_path, ".git/HEAD", "repo/mine/x")
    (tmp_path / ".gitignore").write_text("*.h5\n/repo/mine/top.txt\n")
    root = fill(
        tmp_path / "repo/mine", "a.py", "b.h5", "c.log", "top.txt", "data/big", "sub/c.log", "sub/keep.log", "sub/top.txt"
    )
    (root / ".gitignore").write_text("data/\n*.log\n")
    (root / "sub/.gitignore").write_text("!keep.log\n")
    assert walk_paths(root, *_BOTH) == [".gitignore", "a.py", "sub/.gitignore", "sub/keep.log", "sub/top.txt", "x"]
    (root / tree.IGNORE_FILE).write_text("# mine\n!b.h5\nsub\n")
    walked = tree.walk(root, _BOTH)
    assert [*walked.files] == [".gitignore", "a.py", "b.h5", "x"]
    assert walked.ignored == {".scaletierignore": ["sub/"], ".gitignore": ["c.log", "data/", "top.txt"]}
    assert "data/big" in walk_paths(root, tree.IGNORE_FILE), ".gitignore does not apply to data"


def test_a_folder_that_its_repository_ignores_is_still_sent(tmp_path: Path) -> None:
    fill(tmp_path, ".git/HEAD")
    (tmp_path / ".gitignore").write_text("mine/\n*.bin\n")
    for name in ("mine", "deep/mine", "mine/deep"):
        assert walk_paths(fill(tmp_path / name, "a.py", "b.bin"), *_BOTH)[-2:] == ["a.py", "b.bin"]
    (tmp_path / ".gitignore").write_text("*\n!*/\n!*.py\n")
    assert walk_paths(fill(tmp_path / "src", "a.py", "b.bin"), *_BOTH) == ["a.py"]


def test_the_files_of_a_folder_have_sizes_and_endings(tmp_path: Path) -> None:
    root = fill(tmp_path / "mine", "a.pyc", "b.py", "pyc", "skipped/c.py", "sub/skipped", "sub/d.pyc/e.py", "none/x/y")
    (root / "b.py").write_text("123")
    walked = tree.walk(root, skipped={"skipped"}, suffixes=(".pyc",))
    assert walked == tree.Tree(
        {path: root / path for path in ("b.py", "none/x/y", "pyc", "sub/d.pyc/e.py", "sub/skipped")}, {}, ()
    )
    assert walked.sizes() == {"b.py": 3, "none/x/y": 0, "pyc": 0, "sub/d.pyc/e.py": 0, "sub/skipped": 0}
    assert [*tree.walk(root).files] == ["a.pyc", "b.py", "none/x/y", "pyc", "skipped/c.py", "sub/d.pyc/e.py", "sub/skipped"]
    file = tree.walk(root / "b.py")
    assert (file, file.ignored_paths) == (tree.Tree({"": root / "b.py"}), ())
    (tmp_path / "empty").mkdir()
    assert tree.walk(tmp_path / "empty", _BOTH) == tree.Tree({})
    assert tree.Tree({}, {".b": ["y", "a/"], ".a": ["x"]}).ignored_paths == ("a/", "x", "y")


def test_at_most_five_reasons_are_named(tmp_path: Path) -> None:
    root = fill(tmp_path / "mine", *"abcdefg")
    (root / tree.IGNORE_FILE).write_text("a\nb\n")
    (root / tree.GIT_IGNORE_FILE).write_text("*\n")
    with pytest.raises(UsageError) as error:
        tree.walk(root, _BOTH)
    reasons = ".gitignore (.gitignore, c, d, e, f) and .scaletierignore (a, b)"
    message = f"{root} has no file left, as its ignore files exclude all: remove lines from {reasons}"
    assert str(error.value) == message


def test_the_deepest_and_last_line_of_an_ignore_file_counts(tmp_path: Path) -> None:
    fill(tmp_path, ".git/HEAD")
    (tmp_path / ".gitignore").write_text("*.log\n/repo/x.txt\n")
    root = fill(tmp_path / "repo", "a.log", "sub/b.log", "sub/deep/b.log", "x.txt", "sub/x.txt", "subb/b.log")
    (root / ".gitignore").write_text("!a.log\n/sub/x.txt\n")
    (root / "sub/.gitignore").write_text("!b.log\nb.log\n!/deep/b.log\n")
    walked = tree.walk(root, [tree.GIT_IGNORE_FILE])
    assert [*walked.files] == [".gitignore", "a.log", "sub/.gitignore", "sub/deep/b.log"]
    assert walked.ignored_paths == ("sub/b.log", "sub/x.txt", "subb/b.log", "x.txt")


@pytest.mark.parametrize(
    ("lines", "paths"),
    [
        ("*\n!*/\n!*.py\n", ["a.py", "src/b.py", "src/deep/c.py"]),
        ("*\n!*/\n!*.py\nsrc/\n", ["a.py"]),
        ("*\n!*/\n!*.py\ndeep\n", ["a.py", "src/b.py"]),
        ("/*\n!src\n", ["src/b.py", "src/d.txt", "src/deep/c.py"]),
        ("/*\n!/src/\n/src/*\n!/src/deep/\n", ["src/deep/c.py"]),
        ("*\n!src/\n!*.py\n", ["a.py", "src/b.py"]),
        ("src/**\n!src/deep/\n", ["a.py"]),
        ("deep\n!src/\n", ["a.py", "src/b.py", "src/d.txt"]),
        ("src\\\n!\nd.txt  \n/a.py\\  \n", ["a.py", "src/b.py", "src/deep/c.py"]),  # two match nothing, and one `a.py `
    ],
)
def test_exceptions_to_ignored_folders_are_those_of_git(tmp_path: Path, lines: str, paths: list[str]) -> None:
    root = fill(tmp_path / "mine", "a.py", "src/b.py", "src/deep/c.py", "src/d.txt")
    (root / ".gitignore").write_text(f"{lines}.gitignore\n")
    assert walk_paths(root, ".gitignore") == paths


def test_data_whose_own_gitignore_leaves_out_all_but_itself_is_refused(tmp_path: Path) -> None:
    root = fill(tmp_path / "mine", "x.png", ".gitkeep")
    (root / ".gitignore").write_text("*\n!.git*\n")
    with pytest.raises(UsageError, match=r"has no file left, .*: remove lines from \.gitignore \(x\.png\)$"):
        tree.walk(root, _BOTH, outer_rules=False)


def test_a_repository_lists_what_it_tracks(tmp_path: Path) -> None:
    (root := fill(tmp_path / "repo", "a/b/c.py", "d.py", "e.py", "f é.py")).mkdir(exist_ok=True)
    assert git.tracked_paths(root) == frozenset()
    run_git(root, "init", "--quiet")
    assert git.find(root) is None, "it has no commit"
    run_git(root, "add", "a", "d.py", "f é.py")
    assert git.tracked_paths(root) == {"a/b/c.py", "a/b", "a", ".", "d.py", "f é.py"}
    assert git.tracked_paths(root / "a") == {"b/c.py", "b", "."}
    run_git(root, "commit", "--quiet", "-m", "first")
    first = git.find(root / "a")
    assert first is not None
    assert first.top == root.resolve()
    fill(root, "untracked")
    assert git.find(root) == first
    run_git(root, "tag", "v1")
    tagged = git.find(root)
    (root / "d.py").write_text("changed")
    changed = git.find(root)
    run_git(root, "commit", "--quiet", "--all", "-m", "second")
    states = [state.state for state in (first, tagged, changed, git.find(root)) if state]
    assert len({*states}) == 4


def test_tracked_files_are_included_despite_gitignore(tmp_path: Path) -> None:
    root = fill(tmp_path / "repo/mine", "lib/deep/util.py", "lib/new.py", "model.h5", "far/x")
    (root / ".gitignore").write_text("lib/\n*.h5\nfar/\n")
    run_git(root.parent, "init", "--quiet")
    run_git(root.parent, "add", "--force", "mine/lib/deep/util.py", "mine/model.h5")
    walked = tree.walk(root, _BOTH)
    assert [*walked.files] == [".gitignore", "lib/deep/util.py", "model.h5"]
    assert walked.ignored == {".gitignore": ["far/", "lib/new.py"]}
    (root / tree.IGNORE_FILE).write_text("lib/\n")
    assert walk_paths(root, *_BOTH) == [".gitignore", "model.h5"], ".scaletierignore wins"


def test_ignored_files_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = fill(tmp_path / "mine", "__init__.py", "task.py", "model.h5")
    (root / ".gitignore").write_text("*.h5\n")
    assert list(package.find(root).ignored) == ["model.h5"]
    message = "mine: .gitignore excludes model.h5; a line such as !model.h5 in .scaletierignore includes it\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("*\n", "has no file left, as its ignore files exclude all: remove lines from .scaletierignore (__init__.py)"),
        ("!\n", ".scaletierignore cannot be read: Invalid git pattern: '!'"),
        ("\udcff", "cannot be read: 'utf-8' codec can't decode"),
    ],
)
def test_an_invalid_ignore_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    root = fill(tmp_path / "mine", "__init__.py")
    (root / tree.IGNORE_FILE).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UsageError) as error:
        package.find(root)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all")
def test_an_unreadable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0)
    with pytest.raises(UsageError, match="shut cannot be read: Permission denied"):
        tree.walk(tmp_path)


def run_git(folder: Path, *args: str) -> None:
    settings = ("user.name=ann", "user.email=ann@example.org", "commit.gpgsign=false", "tag.gpgsign=false")
    config = [word for setting in settings for word in ("-c", setting)]
    subprocess.run(["git", *config, *args], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def versioned(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project in a folder of a repository, which takes its version from git."""
    monkeypatch.setattr(dependencies, "CACHE", tmp_path / "cache")
    (repository := tmp_path / "repository").mkdir()
    root = make_project(repository, before=_BEFORE)
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


def build_version(root: Path) -> str:
    return package.find(root).files["mine/version.py"].decode().strip("'")


def test_a_version_is_read_from_git(versioned: Path) -> None:
    (versioned / "left.txt").write_text("not sent")
    assert build_version(versioned) == "v1.2.3"
    run_git(versioned, "tag", "--force", "v2.0")
    run_git(versioned, "tag", "--delete", "v1.2.3")
    assert build_version(versioned) == "v2.0", "a new tag is a new build"
    (versioned / "mine/task.py").write_text("from mine import version  # changed\n")
    assert build_version(versioned) == "v2.0-dirty"
    run_git(versioned, "commit", "--quiet", "--all", "-m", "second")
    assert build_version(versioned).startswith("v2.0-1-g")
    assert not (versioned / "mine/version.py").exists()
    result = subprocess.run(["git", "status", "--porcelain"], cwd=versioned, capture_output=True, check=True)
    assert result.stdout == b"", "the user's repository is unchanged"


def test_a_version_is_read_from_a_worktree_and_a_shallow_clone(versioned: Path, tmp_path: Path) -> None:
    run_git(versioned, "worktree", "add", "--quiet", "--detach", str(tmp_path / "tree"))
    assert build_version(tmp_path / "tree/some-project") == "v1.2.3"
    subprocess.run(
        ["git", "clone", "--quiet", "--depth=1", f"file://{versioned.parent}", str(tmp_path / "shallow")], check=True
    )
    assert build_version(tmp_path / "shallow/some-project") == "v1.2.3"


@pytest.mark.parametrize("kind", ["worktree", "submodule"])
def test_a_version_is_read_from_a_project_whose_git_is_a_file(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(dependencies, "CACHE", tmp_path / "cache")
    (root := make_project(tmp_path, before=_BEFORE)).joinpath("mine/task.py").write_text("from mine import version\n")
    for words in ("init --quiet", "add --all", "commit --quiet -m first", "tag v1.2.3"):
        run_git(root, *words.split())
    (outer := tmp_path / "outer").mkdir()
    run_git(outer, "init", "--quiet")
    if kind == "worktree":
        run_git(root, "worktree", "add", "--quiet", "--detach", str(outer / "tree"))
    else:
        run_git(outer, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(root), "tree")
    assert (outer / "tree/.git").is_file()
    assert build_version(outer / "tree") == "v1.2.3"


def test_a_version_is_read_from_the_project_s_repository_in_a_hook_of_another(
    versioned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (other := fill(tmp_path / "hooked", "a.py")).joinpath("b.py").touch()
    run_git(other, "init", "--quiet")
    run_git(other, "add", "a.py")
    before = {path: path.read_bytes() for path in (other / ".git/config", other / ".git/index")}
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git/index"))
    assert build_version(versioned) == "v1.2.3"
    assert {path: path.read_bytes() for path in before} == before


def test_a_version_without_a_tag_is_refused_with_gits_reason(versioned: Path) -> None:
    run_git(versioned, "tag", "--delete", "v1.2.3")
    with pytest.raises(UsageError) as error:
        package.find(versioned)
    assert "returned non-zero exit status" in str(error.value)


def test_without_git_there_is_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git.find(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git.find(tmp_path) is None


def test_an_ignored_requirements_file_is_noted(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dependencies, "CACHE", tmp_path / "cache")
    root = make_project(tmp_path)
    (root / "requirements.txt").write_text("far\n")
    package.find(root)
    message = "requirements.txt is ignored, as the dependencies are those of pyproject.toml"
    assert message in capsys.readouterr().err
    (root / "pyproject.toml").write_text((root / "pyproject.toml").read_text() + "# dependencies of requirements.txt\n")
    package.find(root)
    assert message not in capsys.readouterr().err
