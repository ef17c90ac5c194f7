"""Find the backend of the stacks' state, damaged files in it, and an unused passphrase.

The backend is in this checkout or where PULUMI_BACKEND_URL points. `setup/state.sh` does the same for shell scripts.
"""

from __future__ import annotations

import gzip
import json
import os
import shlex
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

FOLDER = ".pulumi-state"
URL = "PULUMI_BACKEND_URL"
_PASSPHRASE, _PASSPHRASE_FILE = "PULUMI_CONFIG_PASSPHRASE", "PULUMI_CONFIG_PASSPHRASE_FILE"
_SECONDS = 120.0
_GZIP = b"\x1f\x8b"


class BackendError(RuntimeError):
    """A state cannot be read; the message is one line with the state and the reason."""


def own_url(root: Path) -> str:
    """Return the URL of the checkout's own state."""
    return f"file://{root / FOLDER}"


def url(root: Path) -> str:
    """Return the URL of the state in use, a local one as an absolute path."""
    backend = os.environ.get(URL) or own_url(root)
    folder = local_folder(backend)
    return f"file://{folder}" if folder else backend.rstrip("/")


def local_folder(backend_url: str) -> Path | None:
    """Return the folder of a `file://` URL, None for any other."""
    if not backend_url.startswith("file://"):
        return None
    return Path(backend_url.removeprefix("file://").partition("?")[0]).expanduser().resolve()


def is_own(root: Path) -> bool:
    """Return whether the state in use is the checkout's own."""
    return local_folder(url(root)) == (root / FOLDER).resolve()


def other_backend_note(root: Path) -> str:
    """Return a line about the state in use if it is not the checkout's own, else nothing."""
    return "" if is_own(root) else f"the state in use is {url(root)} ({URL}), not this checkout's {FOLDER}"


def unused_passphrase_warning(root: Path) -> str:
    """Return a warning if a passphrase in the environment is unused, as the checkout has its own one, else nothing."""
    own = root / FOLDER / "passphrase"
    try:
        passphrase = own.read_text().strip() if is_own(root) else ""
    except OSError:
        passphrase = ""
    if not passphrase:
        return ""
    value, file = os.environ.get(_PASSPHRASE), os.environ.get(_PASSPHRASE_FILE)
    name = ""
    if value is not None:
        name = _PASSPHRASE if value != passphrase else ""
    elif file and not (Path(file).is_file() and Path(file).read_bytes().strip() == passphrase.encode()):
        name = _PASSPHRASE_FILE
    return f"{name} is not used: the stacks of this checkout have the passphrase in {FOLDER}/passphrase" if name else ""


def mentions(backend_url: str, word: str) -> bool | None:
    """Return whether a stack in a local state mentions a name; None if the state is not local or cannot be read."""
    folder = local_folder(backend_url)
    if folder is None:
        return None
    try:
        return any(word.encode() in text for text in _stack_files(folder))
    except OSError:
        return None


def has_stack(backend_url: str, stack: str) -> bool:
    """Return whether a local state has a stack of that name."""
    folder = local_folder(backend_url)
    suffixes = (".json", ".json.gz")
    return folder is not None and any((folder / f".pulumi/stacks/scaletier/{stack}{end}").exists() for end in suffixes)


def damaged_files(backend_url: str) -> Iterator[tuple[str, str]]:
    """Yield a description of each truncated file of a local state, and the command that fixes it.

    A killed Pulumi leaves .attrs files truncated, which it writes in place and works without. It replaces a state file
    atomically, but a crash of the machine may truncate one; the command is empty if there is no readable backup of it.
    """
    folder = local_folder(backend_url)
    if folder is None:
        return
    for file in sorted((folder / ".pulumi/stacks/scaletier").glob("*.json*")):
        stack, _, ending = file.name.rpartition(".json")
        if ending in (".attrs", ".gz.attrs") and not _is_json(file):
            yield f"Pulumi was killed as it wrote {file}, and cannot read stack {stack}", f"rm {shlex.quote(str(file))}"
        elif ending in ("", ".gz") and not _is_json(file, "checkpoint"):
            backup = file.with_name(f"{file.name}.bak")
            usable = backup.exists() and _is_json(backup, "checkpoint")
            copy = f"cp {shlex.quote(str(backup))} {shlex.quote(str(file))}" if usable else ""
            remark = "Pulumi's backup of it is readable" if usable else "there is no readable backup of it"
            yield f"the state of stack {stack} is truncated ({file}); {remark}", copy


def _is_json(file: Path, key: str = "") -> bool:
    """Return False if a file is no JSON object, or lacks this key; True if the file cannot be read."""
    try:
        content = file.read_bytes()
        record = json.loads(gzip.decompress(content) if content[:2] == _GZIP else content)
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error):
        return False
    except OSError:
        return True
    return isinstance(record, dict) and (not key or key in record)


def _stack_files(folder: Path) -> Iterator[bytes]:
    """Yield the content of each stack's file in a local state; OSError if one cannot be read."""
    for parent, _, names in os.walk(folder / ".pulumi" / "stacks", onerror=_raise_unless_missing):
        for name in names:
            if name.endswith((".json", ".json.gz")):
                content = Path(parent, name).read_bytes()
                yield gzip.decompress(content) if name.endswith(".gz") else content


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def run_pulumi(root: Path, *arguments: str) -> str:
    """Run `pulumi` for the project in the current folder, with the state in use; return what it prints.

    Raises:
        BackendError: the state, its passphrase or the program cannot be used.
    """
    program = Path(sys.prefix, "bin", "pulumi")
    argv = [str(program) if program.exists() else "pulumi", *arguments, "--non-interactive"]
    try:
        result = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"pulumi does not run ({error}): make pulumi") from None
    if result.returncode:
        raise BackendError(explain(root, reason(result.stderr)))
    return result.stdout


def reason(stderr: str) -> str:
    """Return Pulumi's line with the reason of a failure."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    why = next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "it failed")
    return why.removeprefix("error: ")


def explain(root: Path, why: str) -> str:
    """Return a message that names the unreadable state and the variable at fault."""
    where = f"{FOLDER} of this checkout" if is_own(root) else f"{url(root)} ({URL})"
    return f"the state in {where} cannot be read: {_passphrase_problem(root) if 'PASSPHRASE' in why.upper() else why}"


def _passphrase_problem(root: Path) -> str:
    """Return why the passphrase does not decrypt the stack."""
    passphrase, file = os.environ.get(_PASSPHRASE), os.environ.get(_PASSPHRASE_FILE)
    own = root / FOLDER / "passphrase"
    if is_own(root) and own.exists():
        return f"{FOLDER}/passphrase is not the passphrase of its stack"
    if passphrase:
        return f"{_PASSPHRASE} is not the passphrase of its stack"
    if passphrase is not None:
        return f"{_PASSPHRASE} is empty: set it to the passphrase of its stack"
    if file:
        wrong = "is not the passphrase of its stack" if Path(file).exists() else "does not exist"
        return f"{_PASSPHRASE_FILE} is invalid: {file} {wrong}"
    if is_own(root):
        return f"{FOLDER}/passphrase does not exist: put it back"
    return f"its stack has a passphrase: set {_PASSPHRASE} or {_PASSPHRASE_FILE}"


if __name__ == "__main__":
    sys.stdout.write(explain(Path(__file__).resolve().parents[1], reason(sys.argv[1])) + "\n")
