"""Find or build a trainer package, check it without importing it, and pack it reproducibly."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import sys
import tarfile
import zipfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from infra.scale_tiers import PYTHON
from infra.templates import ROOT as CHECKOUT
from ops import terminal
from ops.errors import UsageError
from ops.package import trainer_config
from ops.package.imports import check_module, check_script, imports_package
from ops.package.tree import GIT_IGNORE_FILE, IGNORE_FILE, Tree, show_notes, walk

MEGABYTE = 1_000_000
LIMIT = 250 * MEGABYTE
_PROJECT = ("setup.py", "pyproject.toml")
_METADATA = (*_PROJECT, "setup.cfg")
# As `hostpython.REQUIREMENTS`: the modules that inspect dependencies take long to import.
_HOST_REQUIREMENTS = CHECKOUT / "trainer" / "requirements.txt"
_CACHES = (".cache", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints")
_SKIPPED_DIRS = frozenset({*_CACHES, ".hg", ".svn", ".venv"})
_SKIPPED_FILES = (".pyc", ".pyo", ".swp")
# The training library, which is added to a package that imports it.
_LIBRARY = CHECKOUT / trainer_config.LIBRARY
_EXECUTABLE = 0o100
# Files in a package that no program reads: sources of compiled modules, and documentation.
_SOURCES = (".c", ".cc", ".cpp", ".cu", ".h", ".pyx", ".md", ".rst")
# Dependencies in setup.py or setup.cfg.
_REQUIRES = re.compile(rb"^[^#\n]*install_requires\b(?!\s*=\s*\[\s*\])", re.MULTILINE)
# Leftovers of earlier builds in a project, which a new one would include.
_BUILT = re.compile(r"[^/]+/(build|dist)/|.*\.egg-info/")


@dataclass(frozen=True)
class PackageSource:
    """The files of a trainer package before they are checked and packed.

    Attributes:
        name: the package's name, or the project's if it has several packages.
        files: content by path, with the library beside the package if that imports it.
        requirements: a file of its dependencies in the format of pip.
        folder: the local parent directory of `files`.
        executables: the paths of executable files.
        ignored: the paths that ignore files exclude.
        alone: True for a single file; on hosts it is in a folder of its own name.
        sets_pythonpath: True if the job sets PYTHONPATH.
    """

    name: str
    files: dict[str, bytes]
    requirements: Path | None = None
    folder: str = ""
    executables: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()
    alone: bool = False
    sets_pythonpath: bool = False

    @property
    def names(self) -> list[str]:
        """The top-level packages and modules, without the library."""
        tops = {path.partition("/")[0].removesuffix(".py") for path in self.files if path.endswith(".py")}
        return sorted(tops - {trainer_config.LIBRARY} or tops)


@dataclass(frozen=True)
class Package:
    """A packed trainer package.

    Attributes:
        files: content by path, such as `trainer/task.py`.
        imports: the modules that the hosts must have, each with the `file:line` that imports it.
        dependency_files: the files of the dependencies that the hosts lack, to be placed beside the package.
        executables: the paths of executable files.
        installed: the packages of the job's own Python, name to version; empty for the hosts' Python.
        ignored: the paths that ignore files exclude.
    """

    name: str
    files: dict[str, bytes]
    imports: dict[str, str]
    archive: bytes
    dependency_files: Mapping[str, bytes] = field(default_factory=dict)
    executables: frozenset[str] = frozenset()
    installed: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.archive).hexdigest()

    @property
    def host_files(self) -> dict[str, bytes]:
        """All files that go to the hosts, by their paths there."""
        return {**self.dependency_files, **self.files}


def build(
    folder: str | Path | PackageSource,
    module: str,
    script: str | None = None,
    installed: Mapping[str, str] | None = None,
    python: str = PYTHON,
) -> Package:
    """Check the package in `folder` for faults that would end `module` on the hosts, and pack it.

    `installed` has the packages of the job's own Python, None for the hosts' Python; `python` is its version. Without a
    `module`, `folder` may hold any program; a Python `script` is checked like a module.
    """
    source = folder if isinstance(folder, PackageSource) else find(folder)
    name = module.partition(".")[0]
    if module and len(source.names) > 1 and name not in source.names:
        raise UsageError(f"project {source.name} has the packages {', '.join(source.names)}: name the one to run by --module")
    name = name if module and len(source.names) > 1 else source.name
    if not module and f"{name}/__init__.py" in source.files and name in {*sys.stdlib_module_names, *(installed or ())}:
        how = "rename the folder, or delete its __init__.py"
        terminal.note(
            f"{name} is also a module of the job's Python, which its program could not import beside this folder: {how}"
        )
    dependency_files = _dependencies(source, installed, python)
    imports = _imports(source, dependency_files, name, module, script, python)
    with terminal.ProgressLine(f"packing {source.name}"):
        files = {**dependency_files, **source.files}
        archive = pack(files, source.executables)
    if len(archive) > LIMIT:
        raise _size_error(source.name, len(archive), {path: len(content) for path, content in files.items()})
    return Package(name, source.files, imports, archive, dependency_files, source.executables, installed or {}, source.ignored)


def unpack(
    archive: bytes,
    name: str,
    own: Collection[str],
    module: str,
    script: str | None = None,
    installed: Mapping[str, str] | None = None,
    sets_pythonpath: bool = False,
) -> Package:
    """Read the package of an archive that `build` made; `own` are the package's paths; all others belong to dependencies."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        content = {entry.name: opened.read() for entry in tar if (opened := tar.extractfile(entry))}
        executables = frozenset(entry.name for entry in tar.getmembers() if entry.mode & _EXECUTABLE)
    files = {path: content[path] for path in content if path in own}
    dependency_files = {path: content[path] for path in content if path not in own}
    imports = _imports(PackageSource(name, files, sets_pythonpath=sets_pythonpath), dependency_files, name, module, script)
    return Package(name, files, imports, archive, dependency_files, executables, installed or {})


def absolute(path: str | Path) -> Path:
    """Return the path without `..`, its links unresolved: a folder has the name of the link by which it is given."""
    return Path(os.path.abspath(path))  # noqa: PTH100  `resolve` would follow links


def find(folder: str | Path, module: str | None = None) -> PackageSource:
    """Find the package in a directory, or the one that its setup.py or pyproject.toml builds.

    Without any of these files it is a namespace package if it has the `module`.
    """
    root = _check_directory(folder, "the directory of a Python package")
    if (root / "__init__.py").is_file():
        if not root.name.isidentifier():
            raise UsageError(f"package {folder} has no name that Python can import: rename it to letters, digits and _")
        return _from_folder(root)
    if any((root / name).is_file() for name in _PROJECT):
        return _from_project(root)
    path = f"{(module or '').replace('.', '/')}.py"
    if path.startswith(f"{root.name}/") and (root.parent / path).is_file():
        return _from_folder(root)
    how = "make an empty __init__.py there, name a program by --script or --command, or give --package another directory"
    if "/" in path and (root / path).is_file():
        how = f"give --package {Path(folder, path.partition('/')[0])}"
    raise UsageError(f"package {folder} has no __init__.py, setup.py or pyproject.toml: {how}")


def find_folder(path: str | Path) -> PackageSource:
    """Return the files of any directory, for a script or a command."""
    root = _check_directory(path, "a directory")
    return _from_folder(root, f"{root.name}/")


def _check_directory(path: str | Path, wanted: str) -> Path:
    root = absolute(path)
    if not root.is_dir():
        what = "is not a directory" if root.exists() else "does not exist"
        raise UsageError(f"package {path} {what}: give --package {wanted}")
    return root


def find_file(path: Path) -> PackageSource:
    """Return a package of one file, in a folder of the file's name."""
    name = f"{path.stem}/{path.name}"
    executables = frozenset([name] if path.stat().st_mode & _EXECUTABLE else ())
    try:
        files = add_library({name: path.read_bytes()})
        return PackageSource(path.stem, files, None, str(path.absolute().parent), executables, alone=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _from_folder(root: Path, beside: str = "") -> PackageSource:
    _note_dependencies(root)
    requirements = root / "requirements.txt"
    tree = _walk(root)
    files = _read(tree, root.name)
    executables = frozenset(f"{root.name}/{path}" for path, file in tree.files.items() if file.stat().st_mode & _EXECUTABLE)
    requirements_file = requirements if requirements.is_file() else None
    return PackageSource(
        root.name, add_library(files, beside), requirements_file, str(root.parent), executables, tree.ignored_paths
    )


def _from_project(root: Path) -> PackageSource:
    from ops.package import dependencies

    _note_requirements(root)
    tree = _walk(root)
    files = {path: content for path, content in _read(tree, root.name).items() if not _BUILT.match(path)}
    built = dependencies.build_project(root, files)
    installed = dependencies.read(built)
    _note_left_out(root.name, files, installed)
    source = PackageSource(root.name, add_library(installed), built / "requirements.txt", ignored=tree.ignored_paths)
    if not source.names:
        raise UsageError(
            f"project {root} builds a wheel without a Python package: name its packages in setup.py or pyproject.toml"
        )
    return replace(source, name=source.names[0]) if len(source.names) == 1 else source


def _note_left_out(name: str, files: Collection[str], installed: Collection[str]) -> None:
    """Print the files in a project's packages that its wheel lacks: a program that runs here finds them beside its modules."""
    left_out: list[str] = []
    for start in (path for path in installed if re.fullmatch(r"[^/]+/__init__\.py", path)):
        own = min((path for path in files if path.endswith(f"/{start}")), key=len, default="")
        above, top = own.removesuffix(start), own.removesuffix("__init__.py")
        paths = (path for path in files if own and path.startswith(top) and not path.endswith(_SOURCES))
        left_out += [path for path in paths if path.removeprefix(above) not in installed]
    if left_out:
        how = "package data includes files, and find_packages the folders with an __init__.py"
        terminal.note(f"{name}: its wheel, and so each host, lacks {terminal.list_some(sorted(left_out))}; {how}")


def find_entry_point(path: str | Path, script: str) -> tuple[str, str, str] | None:
    """Find a console script that a project declares; it exists only where the project is installed.

    Returns: the file that declares it, its module and its function; None if no file does.
    """
    declares = re.compile(rf"""(?:^|["'\s]){re.escape(script)}["']?\s*=\s*["']?([\w.]+):([\w.]+)""", re.MULTILINE)
    for name in _METADATA:
        file = Path(path, name)
        if file.is_file() and (entry := declares.search(file.read_text(errors="replace"))):
            return name, entry[1], entry[2]
    return None


def _note_requirements(root: Path) -> None:
    """Print that a requirements.txt is ignored, unless the project's build refers to it."""
    builds = [root / name for name in _METADATA if (root / name).is_file()]
    if (root / "requirements.txt").is_file() and not any(b"requirements.txt" in file.read_bytes() for file in builds):
        how = f"the dependencies are those of {builds[0].name}"
        terminal.note(f"{root.name}: requirements.txt is ignored, as {how}; --runtime {root}/requirements.txt uses it")


def _note_dependencies(root: Path) -> None:
    """Print that a project's dependencies are ignored, unless a requirements.txt exists, too."""
    import tomllib

    if (root / "requirements.txt").is_file():
        return
    how = "the folder is sent as it is: name them in requirements.txt"
    for name in ("setup.py", "setup.cfg"):
        if (root / name).is_file() and _REQUIRES.search((root / name).read_bytes()):
            terminal.note(f"{root.name}: the dependencies in {name} are ignored, as {how}")
    file = root / "pyproject.toml"
    if not file.is_file():
        return
    try:
        project = tomllib.loads(file.read_text("utf-8")).get("project")
    except (OSError, ValueError, RecursionError) as error:
        terminal.note(f"{root.name}: pyproject.toml is ignored, as it cannot be read: {error}")
        return
    if isinstance(project, dict) and project.get("dependencies"):
        terminal.note(f"{root.name}: the dependencies in pyproject.toml are ignored, as {how}")


def add_library(files: dict[str, bytes], beside: str = "") -> dict[str, bytes]:
    """Return the files, with the training library if one of them imports it and they lack it.

    `beside` is another path prefix, ending in `/`, to search for the trainer's own copy of the library.
    """
    own = tuple(f"{folder}{trainer_config.LIBRARY}{end}" for folder in ("", beside) for end in ("/", ".py"))
    if any(path.startswith(own) for path in files):
        return files
    if not any(imports_package(content, trainer_config.LIBRARY) for path, content in files.items() if path.endswith(".py")):
        return files
    return {**files, **_read(walk(_LIBRARY, (), _SKIPPED_DIRS, _SKIPPED_FILES), trainer_config.LIBRARY)}


def _dependencies(source: PackageSource, installed: Mapping[str, str] | None, python: str) -> dict[str, bytes]:
    """Return the files of the package's dependencies that the hosts, or the job's own Python, lack."""
    if source.requirements is None or source.requirements.read_bytes() == _HOST_REQUIREMENTS.read_bytes():
        return {}
    from ops.package import dependencies

    own = sum(map(len, source.files.values()))

    def check(sizes: Mapping[str, int]) -> None:
        if (total := sum(sizes.values()) + own) > LIMIT:
            raise _size_error(source.name, total, sizes)

    return dependencies.fetch(source.requirements, installed, python, check, source.files)


def _size_error(name: str, total: int, sizes: Mapping[str, int]) -> UsageError:
    from ops.package import runtimes

    largest, instead = max(sizes, key=lambda name: sizes[name]), runtimes.cpu_remedy(sizes)
    return UsageError(
        f"{name} and its dependencies have {total / MEGABYTE:.0f} MB, {LIMIT // MEGABYTE} MB at most; largest is "
        f"{largest} with {sizes[largest] / MEGABYTE:.0f} MB: {instead}a Python of the job's own has no limit "
        "(--runtime requirements.txt), or leave out what it can do without"
    )


def _imports(
    source: PackageSource,
    dependency_files: Mapping[str, bytes],
    name: str,
    module: str,
    script: str | None,
    python: str | None = None,
) -> dict[str, str]:
    """Return the modules that the hosts must have besides these files; empty for a program other than Python."""
    files, imports = source.files, dict[str, str]()
    if module:
        imports = check_module(files, name, module, source.folder, python)
    elif script and not zipfile.is_zipfile(io.BytesIO(files[script])):  # `python app.pyz` runs an archive
        imports = check_script(files, script, source.folder, source.alone, python)
    # On hosts, these are in one folder, which is on PYTHONPATH.
    tops = {path.partition("/")[0].partition(".")[0] for path in (*dependency_files, *files)}
    if source.sets_pythonpath or any(b"sys.path" in content for path, content in files.items() if path.endswith(".py")):
        tops |= {part.partition(".")[0] for path in files for part in path.split("/")}
    return {top: where for top, where in imports.items() if top not in tops}


def _walk(root: Path) -> Tree:
    """Return the files of a package; UsageError if they are too large."""
    tree = walk(root, (IGNORE_FILE, GIT_IGNORE_FILE), _SKIPPED_DIRS, _SKIPPED_FILES)
    show_notes(tree, root.name)
    sizes = tree.sizes()
    if (total := sum(sizes.values())) > LIMIT:
        largest = max(sizes, key=lambda path: sizes[path])
        raise UsageError(
            f"package {root} has {total / MEGABYTE:.0f} MB, {LIMIT // MEGABYTE} MB at most; largest is {largest} with "
            f"{sizes[largest] / MEGABYTE:.0f} MB: keep data in the bucket, or name it in {IGNORE_FILE}"
        )
    return tree


def _read(tree: Tree, name: str) -> dict[str, bytes]:
    """Read every file of a tree, keyed by `NAME/relative path`."""
    try:
        return {f"{name}/{path}": file.read_bytes() for path, file in tree.files.items()}
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from None


def mode(path: str, executables: Collection[str]) -> int:
    """Return a packed file's permissions, which do not depend on the umask of its owner."""
    return 0o755 if path in executables else 0o644


def compression_level(size: int) -> int:
    """Return gzip's level for a size in bytes: a fast one for large archives, which become a tenth larger."""
    return 6 if size < 20 * MEGABYTE else 1


def pack(files: Mapping[str, bytes], executables: Collection[str] = ()) -> bytes:
    """Pack a package.tar.gz; the same files give the same bytes."""
    level = compression_level(sum(map(len, files.values())))
    return tar_gz(((path, files[path], mode(path, executables)) for path in sorted(files)), level)


def tar_gz(entries: Iterable[tuple[str, bytes, int]], level: int, end_mark: bool = True, time: int = 0) -> bytes:
    """Pack files, each a path, content and permissions; the same ones give the same bytes.

    Without `end_mark` another archive may follow. `time` is when the files were modified, in seconds.
    """
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, compresslevel=level, filename="") as zipped:
        tar = tarfile.TarFile(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT)
        for path, content, permissions in entries:
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode, entry.mtime = len(content), permissions, time
            tar.addfile(entry, io.BytesIO(content))
        if end_mark:
            tar.close()
    return packed.getvalue()
