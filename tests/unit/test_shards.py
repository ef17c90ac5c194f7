"""The shards of `make test-all`: each test on hosts is in one, and its cheaper test exists and runs."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import run
from shards import CHEAPER, SHARDS, STACKS

ROOT = Path(__file__).resolve().parents[2]
ON_HOSTS = ("tests/e2e", "tests/gcp_emulation")
NEEDS = {"hosts", "browser", "go", "registry", "root"}


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    """Return the test functions of a file by name, without importing it."""
    tree = ast.parse(path.read_text())
    return {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")}


def node_ids(folder: str) -> Iterator[str]:
    """Yield the node ids of a folder's test functions."""
    for path in sorted((ROOT / folder).glob("test_*.py")):
        yield from (f"{folder}/{path.name}::{name}" for name in functions(path))


def is_below(node: str, path: str) -> bool:
    """Return whether a node id is the path itself or below that folder, file or test."""
    return node == path or node.startswith((f"{path}/", f"{path}::", f"{path}["))


def uses_hosts(path: Path) -> bool:
    """Return whether a file's tests use a fixture with hosts, or create their own stack."""
    fixtures = {
        argument.arg
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for argument in function.args.args
    }
    return bool(fixtures & {"cluster", "cloud"}) or "with Stack(" in path.read_text()


def is_only_full(function: ast.FunctionDef) -> bool:
    """Return whether a whole test is marked as run only by `make test-all`."""
    return any(ast.unparse(each).startswith("pytest.mark.full") for each in function.decorator_list)


@pytest.mark.parametrize("folder", ON_HOSTS)
def test_each_test_on_hosts_is_in_one_shard(folder: str) -> None:
    paths = [path for shard in SHARDS.values() for path in shard.paths]
    counts = {node: sum(is_below(node, path) for path in paths) for node in node_ids(folder)}
    assert counts
    assert {node: count for node, count in counts.items() if count != 1} == {}


def test_shards_name_existing_paths_and_their_needs() -> None:
    for name, shard in SHARDS.items():
        assert shard.paths, name
        assert set(shard.needs) <= NEEDS, name
        for path in shard.paths:
            file, _, test = path.partition("::")
            assert (ROOT / file).exists(), f"{name}: {file}"
            assert not test or test.partition("[")[0] in functions(ROOT / file), f"{name}: {path}"
            on_hosts = path == "tests/story" or (path.startswith(ON_HOSTS) and uses_hosts(ROOT / file))
            assert on_hosts == ("hosts" in shard.needs), f"{name}: {path}"


def test_no_two_shards_run_the_same_path_equally() -> None:
    calls = Counter((path, *sorted(shard.environment.items())) for shard in SHARDS.values() for path in shard.paths)
    assert [call for call, count in calls.items() if count > 1] == []


def test_a_shard_on_hosts_runs_one_test_after_the_other() -> None:
    assert [name for name, shard in SHARDS.items() if shard.parallel and "hosts" in shard.needs] == []


def test_shards_of_one_cluster_have_equal_options() -> None:
    for cluster in {shard.cluster for shard in SHARDS.values()} - {""}:
        calls = {(shard.options, shard.parallel, *shard.environment) for shard in SHARDS.values() if shard.cluster == cluster}
        assert len(calls) == 1, cluster


def test_each_stack_of_tests_is_listed() -> None:
    sources = [path.read_text() for folder in ("e2e", "story") for path in (ROOT / "tests" / folder).glob("*.py")]
    created = {name for source in sources for name in re.findall(r"""(?:\bStack|\.rename)\("([\w-]+)\"""", source)}
    suffixes = {name for source in sources for name in re.findall(r"""\bStack\(f"{NAME}([\w-]+)\"""", source)}
    on_hosts = {shard.cluster for shard in SHARDS.values()} - {"", "google", "google-records"}
    assert created | {f"{cluster}{suffix}" for cluster in on_hosts - {"story"} for suffix in suffixes} | on_hosts == {
        name for names in STACKS.values() for name in names
    }


@pytest.mark.parametrize("on_hosts", CHEAPER)
def test_each_cheaper_test_exists_and_make_test_runs_it(on_hosts: str) -> None:
    for node in (on_hosts, CHEAPER[on_hosts]):
        file, _, test = node.partition("::")
        assert test in functions(ROOT / file), node
    file, _, test = CHEAPER[on_hosts].partition("::")
    assert not is_only_full(functions(ROOT / file)[test])
    assert any(is_below(CHEAPER[on_hosts], path) for path in (*run.QUICK.paths, *run.STORY.paths))
    assert on_hosts.startswith(ON_HOSTS)


def test_docs_name_existing_shards() -> None:
    pages = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    names_in_docs = [each for page in pages for each in re.findall(r'SHARD=("[^"]+"|\w[\w-]*)', page.read_text())]
    assert len(names_in_docs) > 5
    for name in " ".join(names_in_docs).replace('"', "").split():
        assert run.named(name)


def test_a_prefix_selects_its_shards(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.named("jobs") == ["jobs"]
    assert run.named("gcp") == [name for name in SHARDS if name.startswith("gcp-")] != []
    with pytest.raises(SystemExit):
        run.named("job")
    assert capsys.readouterr().err.startswith("error: --shard 'job' is no shard. Valid: here, processes, ")
