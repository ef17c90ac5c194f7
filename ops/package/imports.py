"""The imports of a module, read from its source: the user's code is never run to find them."""

from __future__ import annotations

import ast
import posixpath
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter
from pathlib import Path

from ops import terminal
from ops.errors import UsageError

# A module with one of these may run others by name.
_BY_NAME = re.compile(rb"importlib|__import__|runpy|pkgutil|subprocess|\bexec\(|os\.(?:exec|spawn|system)")
# Exceptions that a program catches around an optional import.
_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError", "SyntaxError", "Exception", "BaseException"})


def check_module(
    files: Mapping[str, bytes], package: str, module: str, root: str = "", python: str | None = None
) -> dict[str, str]:
    """Return the modules outside the package and the standard library that `module` imports, each with a `file:line`.

    The names are top-level ones. Imports in the package's files that it imports are included. `python` is the version that the
    hosts run, by default this one.

    UsageError for a module that is not in the package or cannot run, a file that it imports and that does not compile, or an
    import of a module that is missing in the package, or above the package.
    """
    start = _path_of(module, files) if module.partition(".")[0] == package else None
    if start is None:
        have = sorted(name for path in files if (name := _name_of(path)) and not name.endswith("__init__"))
        raise UsageError(f"module {module!r} is not in the package {package}; there are {', '.join(have) or 'none'}")
    if start.endswith("/__init__.py") and (start := _path_of(f"{module}.__main__", files)) is None:
        raise UsageError(f"module {module!r} is a package without a __main__.py, the file that would run: name a module in it")
    external: dict[str, str] = {}

    def follow(path: str) -> Iterator[str]:
        tree = _parse(path, files[path], root, python)
        if statement := _import_above(tree, files[path], _package_of(path)):
            how = f"give --package the folder above, such as above/, and --module above.{module}"
            raise UsageError(f"{path}:{statement}, which is above the package {package}: {how}")
        for name, parts, line in _imports(_top_level(tree.body, path == start), _package_of(path)):
            where = f"{path}:{line}"
            if name.partition(".")[0] != package:
                _add_external(external, name, where)
            elif _path_of(name, files) is None and not _contains(files, name):
                how = "put it there, or take it out of the ignore files"
                raise UsageError(f"{where} imports {name}, which is not in the package {package}: {how}")
            else:
                yield from _paths_of_import(name, parts, files)
        yield from _files_run_by(_name_of(path) or package, files)

    visited, errors = _traverse(start, follow), []
    for path in sorted(path for path in files if path.endswith(".py") and path not in visited):
        try:
            _parse(path, files[path], root, python)
        except UsageError as error:
            errors.append(str(error))
    if errors:
        terminal.note(f"{terminal.list_some(errors, most=1)}; sent as it is, as {module} does not import it at its start")
    return external


def check_script(
    files: Mapping[str, bytes], script: str, root: str = "", alone: bool = False, python: str | None = None
) -> dict[str, str]:
    """Return what `check_module` does, for a script: Python runs it by its path, and it can import files beside it by name.

    If the script is sent `alone`, an import of a file beside it in `root` is a UsageError. A folder without `__init__.py` is
    permitted: Python prefers an installed package of that name.
    """
    folder, _, start = script.rpartition("/")
    shown = "" if alone else f"{folder}/"
    own = {path.removeprefix(f"{folder}/"): content for path, content in files.items() if path.startswith(f"{folder}/")}
    external: dict[str, str] = {}

    def follow(path: str) -> Iterator[str]:
        tree = _parse(f"{shown}{path}", own[path], root, python)
        if statement := _import_above(tree, own[path], _package_of(path)):
            how = f"leave out the dots, or run a package: --package FOLDER --module FOLDER.{start.removesuffix('.py')}"
            raise UsageError(f"{shown}{path}:{statement}, and a script has no package to start from: {how}")
        for name, parts, line in _imports(_top_level(tree.body, path == start), _package_of(path)):
            neighbours = _paths_of_import(name, parts, own)
            yield from neighbours
            top = name.partition(".")[0]
            if neighbours or _contains(own, top):
                continue
            is_core = BuiltinImporter.find_spec(top) or FrozenImporter.find_spec(top)  # no file hides it
            beside = not is_core and any(Path(root, f"{top}{end}").is_file() for end in (".py", "/__init__.py"))
            if alone and beside and not _contains(files, top):  # it may also hide a module of the standard library
                how = f"--package {root} --script {start} sends the folder"
                raise UsageError(f"{path}:{line} imports {top}, which is beside it here, and a script is sent alone: {how}")
            _add_external(external, name, f"{shown}{path}:{line}")

    _traverse(start, follow)
    return external


def reachable(files: Mapping[str, bytes], module: str) -> Mapping[str, bytes]:
    """Return the files that a module or one of them imports or runs, also in functions; all if one may start others by name."""

    def follow(path: str) -> Iterator[str]:
        for name, parts, _ in _imports(ast.walk(_parse(path, files[path], "")), _package_of(path)):
            yield from _paths_of_import(name, parts, files)
        yield from _files_run_by(_name_of(path) or "", files)

    starts = [path for path in (_path_of(module, files), _path_of(f"{module}.__main__", files)) if path]
    try:
        paths = set().union(*(_traverse(start, follow) for start in starts))
    except UsageError:  # another check reports a file that does not compile
        return files
    return files if not paths or any(_BY_NAME.search(files[path]) for path in paths) else {path: files[path] for path in paths}


def _traverse(start: str, follow: Callable[[str], Iterable[str]]) -> set[str]:
    """Visit a file and, recursively, those that `follow` returns, each once; return their paths."""
    waiting, visited = [start], set[str]()
    while waiting:
        if (path := waiting.pop()) not in visited:
            visited.add(path)
            waiting += follow(path)
    return visited


def imports_package(content: bytes, package: str) -> bool:
    """Return whether a file imports this package; False if it does not compile: another check reports it."""
    if package.encode() not in content:
        return False
    try:
        nodes = [*ast.walk(_parse("", content, ""))]
    except UsageError:
        return False
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return any(name.partition(".")[0] == package for name in names)


def describe_missing(
    missing: Sequence[str], imports: Mapping[str, str], package: str, files: Mapping[str, bytes], folder: str = ""
) -> str:
    """Describe the modules that the hosts lack; `imports` has the `file:line` of each, `folder` is the working directory."""
    name, others = missing[0], [f"{name} ({imports[name]})" for name in missing[1:]]
    where, more = imports[name], f"; they also lack {', '.join(others)}" if others else ""
    beside, _, script = where.rpartition(":")[0].rpartition("/")
    if f"{beside}/{name}.py" in files:  # Python 2 searched the folder of the importing file
        instead = f"write from {beside.replace('/', '.')} import {name}, or run {script} as it is by --script"
        return f"{where} imports {name}, which is only in the package: {instead}"
    if path := next((path for path in files if path.endswith((f"/{name}.py", f"/{name}/__init__.py"))), ""):
        above = posixpath.relpath(path.removesuffix("/__init__.py").rpartition("/")[0], folder or ".")
        return f"{where} imports {name}, and Python does not look where {path} is: --env PYTHONPATH={above}"
    what = f"{where} imports {name}, which neither the package {package} nor the hosts have{more}"
    return (
        f"{what}: put {'them' if others else 'it'} into the package, or into its requirements.txt, which --package brings along"
    )


def _add_external(external: dict[str, str], name: str, where: str) -> None:
    top = name.partition(".")[0]
    if top not in sys.stdlib_module_names and top != "__main__":
        external.setdefault(top, where)


def _parse(path: str, content: bytes, root: str, python: str | None = None) -> ast.Module:
    version = (3, int(python.removeprefix("3."))) if python else None
    try:
        return ast.parse(content, filename=path, feature_version=version)
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        why += f", and the hosts run Python {python}" if "only supported in Python" in why else ""
        raise UsageError(f"{root}/{path}{line} does not compile: {why}".lstrip("/" if not root else "")) from None
    except (RecursionError, MemoryError):  # an expression of thousands of terms, which Python itself may still compile
        return ast.Module([], [])


def _path_of(module: str, files: Mapping[str, bytes]) -> str | None:
    base = module.replace(".", "/")
    return next((path for path in (f"{base}.py", f"{base}/__init__.py") if path in files), None)


def _contains(files: Iterable[str], module: str) -> bool:
    """Return True if files have a folder of that name, or a compiled module, such as `fast.cpython-311-x86_64-linux-gnu.so`.

    Return True also if they have its parent module, which may create it at run time, as six does with six.moves.
    """
    base = module.replace(".", "/")
    return any(
        path.startswith(f"{base}/")
        or (path.startswith(f"{base}.") and path.endswith(".so"))
        or (path.endswith(".py") and base.startswith(f"{path.removesuffix('.py')}/"))
        for path in files
    )


def _name_of(path: str) -> str | None:
    return path.removesuffix(".py").replace("/", ".") if path.endswith(".py") else None


def _package_of(path: str) -> str:
    """Return the package from which relative imports of this file start."""
    return path.rpartition("/")[0].replace("/", ".")


def _files_run_by(name: str, files: Mapping[str, bytes]) -> list[str]:
    """Return the files that run when `name` is imported: each package's `__init__.py`, and the module."""
    parts = name.split(".")
    paths = (_path_of(".".join(parts[: end + 1]), files) for end in range(len(parts)))
    return [path for path in paths if path]


def _paths_of_import(name: str, parts: Sequence[str], files: Mapping[str, bytes]) -> list[str]:
    return [path for module in (name, *(f"{name}.{part}" for part in parts)) for path in _files_run_by(module, files)]


def _imports(nodes: Iterable[ast.AST], package: str) -> Iterator[tuple[str, list[str], int]]:
    """Yield the absolute name, the imported names and the line of each import among these nodes.

    An imported name may be a module or any object, as in `from trainer import model`.
    """
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, [], node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                ancestors = parents[: len(parents) - node.level + 1]
                base = ".".join([*ancestors, *([base] if base else [])])
            if base:
                yield base, [alias.name for alias in node.names], node.lineno


def _import_above(tree: ast.Module, content: bytes, package: str) -> str:
    """Return the line and the text of a relative import that starts above the top package, and surely runs; empty if none.

    A file that names `__package__` may set it.
    """
    depth = len(package.split(".")) if package else 0
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level > depth and b"__package__" not in content:
            return f"{node.lineno} has `from {'.' * node.level}{node.module or ''} import {node.names[0].name}`"
    return ""


def _top_level(body: list[ast.stmt], main: bool) -> Iterator[ast.stmt]:
    """Yield the statements that surely run: none in a function, a branch that depends on the host, or an optional import."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _suppresses_import_error(node):
            continue
        if isinstance(node, ast.If):
            yield from _top_level(_branch(node, main), main)
            continue
        if isinstance(node, ast.Try) and any(_catches_import_error(handler.type) for handler in node.handlers):
            yield from _top_level(node.finalbody, main)
            continue
        yield node
        for part in ("body", "orelse", "finalbody"):
            yield from _top_level(getattr(node, part, []), main)


def _branch(node: ast.If, main: bool) -> list[ast.stmt]:
    """Return the branch that surely runs: empty if it depends on the host, such as its version of Python."""
    test = node.test
    if "TYPE_CHECKING" in (names := _names(test)):
        return node.body if isinstance(test, ast.UnaryOp) else node.orelse
    if isinstance(test, ast.Constant):
        return node.body if test.value else node.orelse
    return (
        node.body if main and "__name__" in names and isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq) else []
    )


def _suppresses_import_error(node: ast.stmt) -> bool:
    calls = [item.context_expr for item in node.items] if isinstance(node, ast.With) else []
    return any(
        isinstance(call, ast.Call) and "suppress" in _names(call.func) and any(map(_catches_import_error, call.args))
        for call in calls
    )


def _catches_import_error(caught: ast.expr | None) -> bool:
    return caught is None or any(isinstance(node, ast.Name) and node.id in _IMPORT_ERRORS for node in ast.walk(caught))


def _names(expression: ast.expr) -> set[str]:
    """Return all names in an expression, with those of attributes."""
    return {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(expression)}
