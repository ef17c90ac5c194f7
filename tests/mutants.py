"""Measure what the tests catch: `python tests/mutants.py` changes one line at a time and runs the tests of that line.

The changes are drawn by a seed from the code of the packages below, in copies of the working tree. A mutant is caught if a test
that runs its line, or that names its module, fails, or mypy does, or a test that runs its package as a process: all are part of
`make test`. The others are listed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import Queue

from run import cores
from waiting import limit

ROOT = Path(__file__).resolve().parents[1]
BIN = ROOT / ".venv" / "bin"
CACHE = ROOT / ".cache" / "mutants"
PACKAGES = ("infra", "jobs", "ops", "hosts", "scaletier")
PATHS = ("tests/unit", "tests/stack", "tests/contract", "tests/simulation", "tests/processes")
# Tests start these as processes of their own, of which no coverage is recorded.
SPAWNED = ("scaletier/", "hosts/agent/", "jobs/cgroup.py", "jobs/token_access.py")
# Negated, not shifted by one: at a moment in time, `<` and `<=` are the same.
_NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
# A change of these lines changes only a delay, or permits an operation that no code uses.
_NO_MATTER = ("monotonic()", "sleep(", ".flush()", "flush=", "@dataclass(")
_TIMEOUT_SECONDS = 900
_USAGE_ERROR = 4
"""Pytest's exit code for a test that it does not find, or a conftest.py that it cannot import."""


@dataclass(frozen=True)
class Mutant:
    """Describe one change of one line."""

    path: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before.strip()}  ->  {self.after.strip()}"


def mutate(node: ast.AST) -> ast.AST | None:
    """Return a changed copy of a node, or None if this kind of node is left alone."""
    changed = copy.copy(node)
    match changed:
        case ast.Compare(ops=[only]) if type(only) in _NEGATED:
            changed.ops = [_NEGATED[type(only)]()]
        case ast.BoolOp(op=ast.And()):
            changed.op = ast.Or()
        case ast.BoolOp(op=ast.Or()):
            changed.op = ast.And()
        case ast.UnaryOp(op=ast.Not()):
            return changed.operand
        case ast.BinOp(op=ast.Add()):
            changed.op = ast.Sub()
        case ast.BinOp(op=ast.Sub()):
            changed.op = ast.Add()
        case ast.Constant(value=bool()):
            changed.value = not changed.value
        case ast.Constant(value=0 | 1):
            changed.value += 1
        case ast.Return(value=ast.expr()) if not isinstance(changed.value, ast.Constant):
            changed.value = ast.Constant(None)
        case ast.Expr(value=ast.Call()):
            return ast.Pass()
        case _:
            return None
    return changed


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a module."""
    text = path.read_text()
    lines = text.splitlines()
    tree = ast.parse(text)
    skipped = {id(inner) for node in ast.walk(tree) for part in _unrun(node) for inner in ast.walk(part)}
    for node in ast.walk(tree):
        single = getattr(node, "lineno", 0) and node.lineno == node.end_lineno  # type: ignore[attr-defined]
        if not single or id(node) in skipped or (changed := mutate(node)) is None:
            continue
        line = lines[node.lineno - 1]  # type: ignore[attr-defined]
        if any(word in line for word in _NO_MATTER):
            continue
        raw = line.encode()
        start, end = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
        new = (raw[:start] + f"({ast.unparse(changed)})".encode() + raw[end:]).decode()
        if isinstance(node, ast.stmt):
            new = (raw[:start] + ast.unparse(changed).encode() + raw[end:]).decode()
        try:
            ast.parse("\n".join([*lines[: node.lineno - 1], new, *lines[node.lineno :]]))  # type: ignore[attr-defined]
        except SyntaxError:
            continue
        yield Mutant(path.relative_to(ROOT).as_posix(), node.lineno, line, new)  # type: ignore[attr-defined]


def _unrun(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node that are for type checkers and readers alone."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from (
            argument.annotation for argument in ast.walk(node.args) if isinstance(argument, ast.arg) and argument.annotation
        )
        yield from filter(None, [node.returns])
    if isinstance(node, ast.AnnAssign):
        yield node.annotation
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
        yield node


def draw(count: int, seed: int) -> list[Mutant]:
    """Draw mutants, from each package in proportion to its own, at most one per line."""
    files = sorted(ROOT / name for name in list_files() if re.match(rf"({'|'.join(PACKAGES)})/.*(?<!__main__)\.py$", name))
    every = [mutant for file in files for mutant in mutants_of(file)]
    random.Random(seed).shuffle(every)
    return list({(mutant.path, mutant.line): mutant for mutant in every[: 2 * count]}.values())[:count]


def list_files() -> list[str]:
    """Return the files of the working tree, without those that git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in {*listed.split("\0")} if (ROOT / name).is_file())


def coverage() -> Path:
    """Run mypy and all of these tests once, and return the file that says which tests run which line.

    Raises:
        SystemExit: they fail without a mutant, so that every mutant would count as caught.
    """
    data = CACHE / "coverage"
    digest = hashlib.sha256()
    for name in list_files():
        digest.update(f"{name}\0".encode() + hashlib.sha256((ROOT / name).read_bytes()).digest())
    tree, mark = digest.hexdigest(), CACHE / "tree"
    if data.exists() and mark.exists() and mark.read_text() == tree:
        return data
    if (types := _run([str(BIN / "mypy")], ROOT)).returncode:
        sys.exit(f"mypy fails without a mutant:\n{types.stdout}{types.stderr}")
    CACHE.mkdir(parents=True, exist_ok=True)
    mark.unlink(missing_ok=True)
    data.unlink(missing_ok=True)
    # Of two threads that start at once one may fail to install its tracer, which is no fault of a test.
    ignored = "ignore::pytest.PytestUnraisableExceptionWarning"
    command = [BIN / "pytest", "-q", "-n", str(cores()), "-m", "not full", "-W", ignored]
    result = subprocess.run(
        [*command, "--cov-context=test", "--cov-report=", *(f"--cov={package}" for package in PACKAGES), *PATHS],
        cwd=ROOT,
        env=os.environ | {"COVERAGE_FILE": str(data)},
        check=False,
    )
    if result.returncode:
        sys.exit("the tests fail without a mutant")
    mark.write_text(tree)
    return data


def tests_of(mutant: Mutant, data: Path) -> list[str]:
    """Return the tests that run a line, and the files of tests that name its module."""
    from coverage.numbits import numbits_to_nums

    with sqlite3.connect(data) as database:
        rows = database.execute(
            "select context.context, line_bits.numbits from line_bits join file on file.id = line_bits.file_id "
            "join context on context.id = line_bits.context_id where file.path = ?",
            (str(ROOT / mutant.path),),
        )
        tests = {context.rpartition("|")[0] for context, bits in rows if context and mutant.line in numbits_to_nums(bits)}
    module = mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    files = [
        file.relative_to(ROOT).as_posix()
        for part in PATHS
        for file in sorted((ROOT / part).glob("test_*.py"))
        if module in file.read_text() or module in _imported(file)
    ]
    return [*sorted(tests), *files]


@cache
def _imported(file: Path) -> frozenset[str]:
    """Return what a file of tests imports, by full names."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    return frozenset(f"{node.module}.{alias.name}" for node in nodes for alias in node.names)


def judge(tree: Path, mutant: Mutant, commands: Sequence[Sequence[str]]) -> str:
    """Put a mutant into a copy of the tree and run the commands; the copy is as before afterwards.

    Returns:
        `caught` if a command fails, `timeout` if one takes too long, as of a loop without end, else `SURVIVED`.

    Raises:
        SystemExit: pytest rejects a command even without the mutant, so that no test would run.
    """
    file = tree / mutant.path
    text = file.read_text()
    lines = text.splitlines(keepends=True)
    lines[mutant.line - 1] = mutant.after + "\n"
    file.write_text("".join(lines))
    try:
        for command in commands:
            try:
                result = _run(command, tree)
                if result.returncode == _USAGE_ERROR:
                    file.write_text(text)
                    collected = _run([*command, "--collect-only", "-q"], tree)
                    if collected.returncode == _USAGE_ERROR:
                        sys.exit(f"pytest rejects the tests of {mutant.path}:{mutant.line}: {collected.stderr.strip()}")
            except subprocess.TimeoutExpired:
                return "timeout"
            if result.returncode not in (0, 5):
                return "caught"
        return "SURVIVED"
    finally:
        file.write_text(text)


def _run(command: Sequence[str], tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "MYPYPATH": str(tree)},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit(_TIMEOUT_SECONDS),
        check=False,
    )


def copy_tree(number: int) -> Path:
    """Make a copy of the working tree's files, with the same environment."""
    tree = CACHE / f"tree{number}"
    shutil.rmtree(tree, ignore_errors=True)
    for name in list_files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    (tree / ".cache").mkdir()
    for shared_folder in ("mnist", "pulumi", "hosts", "image", "lxd"):
        if (ROOT / ".cache" / shared_folder).exists():
            (tree / ".cache" / shared_folder).symlink_to(ROOT / ".cache" / shared_folder)
    (tree / ".venv").symlink_to(ROOT / ".venv")
    return tree


def main() -> int:
    """Print each mutant that survives, and how many were caught; the exit code is 1 if that is less than 95 %."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    mutants, data = draw(options.count, options.seed), coverage()
    trees: Queue[Path] = Queue()
    for number in range(cores()):
        trees.put(copy_tree(number))

    def outcome_of(mutant: Mutant, tests: Sequence[str]) -> str:
        tree = trees.get()
        try:
            pytest = [str(BIN / "pytest"), "-qx", "-p", "no:cacheprovider", "-m", "not full"]
            commands = [[*pytest, *tests]] if tests else []  # quick commands first
            commands.append([str(BIN / "mypy")])
            if mutant.path.startswith(SPAWNED):
                commands.append([*pytest, "tests/processes"])
            outcome = judge(tree, mutant, commands)
        finally:
            trees.put(tree)
        print(f"{outcome:<8} {len(tests):>4} tests  {mutant}", flush=True)
        return outcome

    with ThreadPoolExecutor(cores()) as pool:
        outcomes = Counter(pool.map(outcome_of, mutants, [tests_of(mutant, data) for mutant in mutants]))
    caught = len(mutants) - outcomes["SURVIVED"]
    print(f"{caught} of {len(mutants)} mutants caught, {outcomes['timeout']} of them by the limit of time, seed {options.seed}")
    return 0 if caught >= 0.95 * len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
