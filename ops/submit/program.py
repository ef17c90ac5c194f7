"""The program of a package: a module, as in Cloud ML, or a script or command in the package's folder."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path

from infra.templates import ROOT as CHECKOUT
from jobs import paths, variables
from ops import commands, terminal
from ops.errors import UsageError
from ops.package import package
from ops.package.imports import reachable

SHIPPED = CHECKOUT / "trainer"
# The Python that is first on the hosts' PATH, and its names.
PYTHON = "python"
_PYTHONS = (PYTHON, "python3")
_LONGEST_LINE = 1000
# Options of an interpreter whose next word is code, and options of any program whose value is a file that it writes.
_CODE_OPTION = re.compile(r"-\w*c")
_OUTPUT_OPTION = re.compile(r"-[oO]|--out")
# The folders on hosts that may have the interpreter of a script (`#!`): Debian's, and those of Pythons, data and the package.
_INTERPRETERS = (
    *("/bin/", "/sbin/", "/lib", "/usr/bin/", "/usr/sbin/", "/usr/lib"),
    *(f"{paths.CODE_DIR}/", "/bucket/", "./", "../"),
)
# The machine in the header of an ELF file, in its 19th and 20th byte.
_X86_64 = b"\x3e\0"
_SETTING = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL | re.ASCII)


@dataclass(frozen=True)
class JobProgram:
    """A package, and the `command` that runs in its folder; empty if a module of the package runs."""

    source: package.PackageSource
    command: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """The folder of the package in which the command runs."""
        return self.source.name if self.command and self.source.files else ""

    @property
    def script(self) -> str | None:
        """The Python script that the command runs, by its path in the package; None for another program."""
        return script_of(self.folder, self.command, self.source.files)


def script_of(folder: str, command: Sequence[str], files: Container[str]) -> str | None:
    """Return the path in the package of the Python script that a command runs in a folder; None for another program."""
    if not folder or len(command) < 2 or command[0] not in _PYTHONS:
        return None
    path = posixpath.normpath(f"{folder}/{command[1]}")
    return path if path in files else None


def files_defining_flags(
    folder: str, command: Sequence[str], files: Mapping[str, bytes], module: str = ""
) -> Mapping[str, bytes] | None:
    """Return the files that show which flags the arguments may have.

    These are a script alone, or what a module may import, and no other entry point or test of its package. None if another
    program reads the arguments: its flags are unknown.
    """
    if command and command[0] not in _PYTHONS:
        return None
    script = script_of(folder, command, files)
    return {script: files[script]} if script else reachable(files, module) if module else files


def find(folder: str | None, module: str | None, script: str | None, command: str | None) -> JobProgram:
    """Find the named program, by default the shipped trainer; UsageError if it is missing or cannot run."""
    choices = {"--module": module, "--script": script, "--command": command}
    if len(flags := [flag for flag, value in choices.items() if value is not None]) > 1:
        raise UsageError(f"{flags[0]} and {flags[1]} both say what runs: use only one of them")
    if script is not None:
        return _script(folder, script)
    if command is not None:
        return _command(folder, command)
    local_trainer = Path("trainer")
    if folder is None and not local_trainer.is_dir():
        terminal.note("there is no package trainer in this folder: it is the shipped one that runs")
    return JobProgram(package.find(folder or (local_trainer if local_trainer.is_dir() else SHIPPED), module))


def _script(folder: str | None, script: str) -> JobProgram:
    if folder is None:
        source = package.find_file(_file(script, "--script"))
        _check_python(next(iter(source.files.values())), script)
        return JobProgram(source, (PYTHON, _no_option(Path(script).name)))
    source = package.find_folder(folder)
    inside = _in_folder(folder, source, script, "--script")
    _check_python(source.files[f"{source.name}/{inside}"], script)
    return JobProgram(source, (PYTHON, _no_option(inside)))


def _no_option(path: str) -> str:
    """Return a path that Python does not read as an option, even if it begins with a hyphen."""
    return f"./{path}" if path.startswith("-") else path


def _check_python(content: bytes, script: str) -> None:
    if script.endswith(".ipynb"):
        raise UsageError(f"--script {script} is a notebook: jupyter nbconvert --to script {script} makes a program of it")
    first = content.partition(b"\n")[0]
    if (first.startswith(b"#!") and b"python" not in first and not script.endswith(".py")) or script.endswith(".sh"):
        by = "first line" if first.startswith(b"#!") else "name"
        raise UsageError(f"--script {script} is no Python, by its {by}: --command ./{Path(script).name}")


def _command(folder: str | None, text: str) -> JobProgram:
    text = text.replace("\\\n", "").strip()
    try:
        words = commands.split_words(text)
    except ValueError as error:
        raise UsageError(f"--command cannot be split ({error}): quote it as for a shell") from None
    if not words or not words[0]:
        raise UsageError("--command is empty: name a program of the package, such as ./run.sh, or one that the hosts have")
    _check_shell(text, words)
    if literal := [*commands.find_shell_expansions(text, words, folder or ".")]:
        how = "--command \"sh -c '…'\" has it expanded, or put it in quotes if the program expands it"
        terminal.note(f"--command runs no shell, so the program gets {literal[0]} as it is: {how}")
    source = package.find_folder(folder) if folder is not None else None
    if folder is not None and (declared := package.find_entry_point(folder, words[0])):
        file, module, function = declared
        how = f"--module {module} builds and runs it, if {module} calls {function}() as __main__"
        raise UsageError(f"--command {words[0]} is a script of {file}, which only an installed project has: {how}")
    if "/" not in words[0] or words[0].startswith("/"):
        if Path(folder or "", words[0]).is_file() and "/" not in words[0] and not shutil.which(words[0]):
            raise UsageError(f"--command {words[0]} is no program that hosts have; did you mean ./{words[0]}?")
        _check_files(words, folder, source)
        if source and words[0] in variables.SHELLS:
            for script in (word for word in _scripts(words) if not word.endswith(".py")):  # Python reads any line ends
                content = source.files.get(posixpath.normpath(f"{source.name}/{script}"), b"")
                if content.partition(b"\n")[0].endswith(b"\r"):
                    how = f"as no shell reads them: dos2unix {Path(folder or '', script)}"
                    raise UsageError(f"--command runs {script}, which has Windows' line ends, {how}")
        source = source or package.PackageSource(Path(words[0]).name, {})
        return JobProgram(source, tuple(words))
    if folder is None or source is None:
        path = _file(words[0], "--command")
        source, name = package.find_file(path), path.name
    else:
        name = _in_folder(folder, source, words[0], "--command")
        path = Path(folder, name)
    if not os.access(path, os.X_OK):
        raise UsageError(f"--command {words[0]} is not executable: chmod +x {path}")
    _check_executable(path, words[0])
    return JobProgram(source, (f"./{name}", *words[1:]))


def _check_files(words: Sequence[str], folder: str | None, source: package.PackageSource | None) -> None:
    """Check that the package has the script or module that a command such as `python x.py` runs.

    UsageError if a script exists here and the package lacks it. A missing module is only noted: hosts may have it.
    """
    module = words[2] if len(words) > 2 and words[0].startswith(PYTHON) and words[1] == "-m" else ""
    paths = [f"{module.replace('.', '/')}{end}" for end in (".py", "/__main__.py")] if module else [*_scripts(words)][:1]
    if not (paths := [path for path in paths if _is_file(path)]):
        return
    path = paths[0]
    if source is None or folder is None:
        if module:
            how = f"--script {path}" if "/" not in path else f"--module {module} --package {module.partition('.')[0]}"
            terminal.note(f"--command runs the module {module}, which is not sent: unless the hosts have it, {how} instead")
            return
        raise UsageError(f"--command names the file {path}, and without --package no file is sent: add --package .")
    # Python finds a module in the folder of the package, and in the one that has the package.
    places = (f"{source.name}/{posixpath.normpath(path)}", *([path] if module else []))
    if any(place in source.files for place in places):
        return
    if module:
        terminal.note(f"--command runs the module {module}, which is not in {folder}: unless the hosts have it, it will fail")
        return
    top, file = package.absolute(folder), package.absolute(path)
    inside = file.relative_to(top).as_posix() if file.is_relative_to(top) else ""
    if inside and f"{source.name}/{inside}" not in source.files:
        raise UsageError(f"--command names the file {path}, which is left out of packages: take it out of the ignore files")
    how = f"write {inside}" if inside else "give --package the folder of it"
    raise UsageError(f"--command names the file {path}, and runs in {folder}, which lacks it: {how}")


def _scripts(words: Sequence[str]) -> Iterator[str]:
    """Yield the relative paths of scripts in a command line, without files that the program writes."""
    options = [*takewhile(lambda word: word.startswith("-"), words[1:])]
    interpreter = words[0].startswith(PYTHON) or words[0] in variables.SHELLS
    first = 1 + len(options) if interpreter and not any(map(_CODE_OPTION.match, options)) else 0
    for index, (before, word) in enumerate(pairwise(words), 1):
        script = (index == first and _is_file(word)) or (word.endswith((".py", ".sh")) and not _OUTPUT_OPTION.match(before))
        if script and not word.startswith(("/", "-")):
            yield word


def _is_file(word: str) -> bool:
    """Return True if a word is the path of a file; a program's text may be too long for one."""
    return os.access(word, os.F_OK) and Path(word).is_file()


def _check_executable(path: Path, name: str) -> None:
    """Check that hosts can start a file: it is a program, or its first line names one."""
    with path.open("rb") as file:
        first = file.readline(_LONGEST_LINE)
    if first.startswith(b"#!") and first.endswith(b"\r\n"):
        raise UsageError(
            f"--command {name} has the line ends of Windows, with which no host finds its program: dos2unix {path}"
        )
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    if words and not words[0].startswith(_INTERPRETERS):
        how = f"#!/usr/bin/env {posixpath.basename(words[0])}"
        raise UsageError(f"--command {name} begins with #!{words[0]}, which hosts do not have: write {how}")
    if first.startswith(b"\x7fELF") and first[18:20] not in (b"", _X86_64):
        raise UsageError(f"--command {name} is built for another processor, and hosts have x86-64: build it for that")
    if not first.startswith((b"#!", b"\x7fELF")):
        how = f'a first line such as #!/bin/sh, or --package {path.parent} --command "sh {path.name}"'
        raise UsageError(f"--command {name} is no program that Linux starts: give it {how}")


def _check_shell(text: str, words: Sequence[str]) -> None:
    """Raise UsageError if a command needs a shell; the text after `sh -c` is not checked, as that shell reads it."""
    shell_word = words[0] if words[0] in commands.SHELL_WORDS or words[0].startswith("(") else None
    if symbol := commands.shell_operator(text, words) or shell_word:
        how = "--command \"sh -c '…'\", or in single quotes if your program is to read it"
        if not symbol.strip():
            symbol, how = "a line break", f"{how}; or end a line that goes on with \\"
        raise UsageError(f"--command runs no shell, and {symbol} is a shell's: {how}")
    if settings := [*takewhile(_SETTING.fullmatch, words)]:
        flags = " ".join(f"--env {shlex.quote(setting)}" for setting in settings)
        rest = shlex.quote(shlex.join(words[len(settings) :]))
        raise UsageError(f"--command begins with {settings[0]}, which only a shell reads: {flags} --command {rest}")


def _file(name: str, flag: str) -> Path:
    if not Path(name).is_file():
        raise UsageError(f"there is no file {name}: give {flag} the path of one")
    return Path(name)


def _in_folder(folder: str, source: package.PackageSource, name: str, flag: str) -> str:
    """Return the path of a package's file below its folder; `name` may also begin at this directory, or at /."""
    paths = [path for path in (Path(folder, name), Path(name)) if path.is_file()]
    if not paths:
        raise UsageError(f"there is no file {name} in {folder}: give {flag} the path of one")
    for path in paths:
        for top, file in (
            (Path(folder).resolve(), path.parent.resolve() / path.name),
            (package.absolute(folder), package.absolute(path)),
        ):
            if file.is_relative_to(top) and f"{source.name}/{(inside := file.relative_to(top).as_posix())}" in source.files:
                return inside
    raise UsageError(f"{flag} {name} is not in {folder}, or is left out of packages: give --package the folder that has it")
