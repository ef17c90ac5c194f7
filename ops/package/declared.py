"""A trainer package's declaration: `scaletier.yaml` beside its `__init__.py`; see docs/trainers.md.

Nothing else is known of a trainer. One that trains by the library has the library's own file below its own. If there is
neither, nothing is declared, and every value is the default here.
"""

from __future__ import annotations

import glob
import io
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.spec import JOB_ROLES, Role
from ops.checks import (
    EXIT_KEYS,
    LOSABLE,
    RESTART_POLICIES,
    Check,
    check_exit_codes,
    check_mapping,
    flag,
    flags,
    named,
    nested,
    notify,
    one_of,
    positive,
    read_yaml,
    some_of,
    text,
    truth,
)
from ops.errors import UsageError
from ops.package.tree import KEY_FOLDERS

FILE = "scaletier.yaml"
# The training library's folder beside a package's own files.
LIBRARY = "scaletier"
_DATA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_MINOR = re.compile(r"[0-9]+\.[0-9]+")
_TENSORFLOW = re.compile(r"tensorflow(?:[-_](?:cpu|gpu))?(?:\[[^]]*\])?[=~]=([0-9]+\.[0-9]+)")
# How replicas meet: each for itself with the parameter servers, or all together in an all-reduce.
EXCHANGES = ("servers", "all-reduce")


@dataclass(frozen=True)
class Strategy:
    """The meaning of a value of `--strategy` for the cluster.

    It cannot run if one of the roles that it `needs` has no host; `replicas` are the roles that it uses besides the master,
    None for all; of those that go `together` it has all or none; it survives the loss of an `expendable` role. With
    restart_policy `all` a kill restarts the whole job, with `replica` that replica alone. None as exchange: unknown. `exits`
    are the declared keys of `ops.checks.EXIT_KEYS`.
    """

    needs: tuple[str, ...] = ()
    expendable: tuple[str, ...] = (str(Role.EVALUATOR),)
    restart_policy: str = "replica"
    exchange: str | None = None
    replicas: tuple[str, ...] | None = None
    together: tuple[str, ...] = ()
    exits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Data:
    """A data set that a trainer expects in SCALETIER_DATA, unless one of `flags` names other data.

    It is `data/<name>` in the bucket. `fab train` uploads `files` there, a glob of files of the checkout; `command` makes these
    files. Nothing else of this machine can be named: a package may be another person's.
    """

    name: str
    flags: tuple[str, ...] = ()
    files: str = ""
    command: str = ""

    def local_files(self, checkout: Path) -> dict[str, Path]:
        """Return the files to upload, by name."""
        matches = map(Path, sorted(glob.glob(self.files, root_dir=checkout)))  # noqa: PTH207  Path's refuses patterns
        paths = [checkout / match for match in matches if not KEY_FOLDERS.intersection(match.parts)]
        return {path.name: path for path in paths if path.is_file()}

    def missing(self) -> UsageError:
        """Return the error if it is neither here nor in the bucket."""
        how = f"run {self.command}" if self.command else f"run fab data put PATH {self.name}"
        other = f", or name other data with {' or '.join(self.flags)}" if self.flags else ""
        return UsageError(f"there is no {self.name} to train on: {how}{other}")


@dataclass(frozen=True)
class PlanFlags:
    """The flags that `fab plan` uses: all steps, steps between two exchanges, steps between evaluations.

    Each is None if there is none; the first and the last count the steps of all replicas. `usual_steps` counts if the flag is
    not given, and `usual_period` if neither flag nor log has a period; a number has `wire_bits` on its way to the parameter
    servers. The defaults are TensorFlow's own way.
    """

    steps: str | None = None
    period: str | None = None
    usual_period: int = 1
    wire_bits: int = 32
    usual_steps: int | None = None
    evaluate: str | None = None


@dataclass(frozen=True)
class TrainerConfig:
    """A trainer's declaration: `strategies` by name, `default` its default one, `export` a module.

    `tensorflow` are the minor versions that it knows, none if any will do. `exits` hold for every strategy, which may declare
    its own. A job's end is reported to `notify`, a URL or a command, unless the job sets another. If `pass_job_dir` is False,
    the trainer uses JOB_DIR and is not passed a flag that its code seems to know.
    """

    data: Data | None = None
    strategies: Mapping[str, Strategy] = field(default_factory=dict)
    default: str | None = None
    plan: PlanFlags = field(default_factory=PlanFlags)
    export: str | None = None
    pass_job_dir: bool = True
    tensorflow: tuple[str, ...] = ()
    exits: Mapping[str, Any] = field(default_factory=dict)
    notify: str = ""

    def strategy(self, name: str | None) -> Strategy:
        """Return a strategy, by default the default one; the defaults if it is not declared."""
        return self.strategies.get(name or self.default or "", Strategy(exits=self.exits))

    def data_for(self, args: Sequence[str]) -> Data | None:
        """Return the data set that the bucket must have for these arguments."""
        if self.data is None or any(arg.partition("=")[0] in self.data.flags for arg in args):
            return None
        return self.data


_STRATEGY_KEYS: Mapping[str, Check] = {
    "needs": some_of((Role.WORKER, Role.PS)),
    "replicas": some_of(JOB_ROLES),
    "together": some_of(JOB_ROLES),
    "expendable": some_of(LOSABLE),
    "restartPolicy": one_of(RESTART_POLICIES),
    "exchange": one_of(EXCHANGES),
    **EXIT_KEYS,
}
_DATA_KEYS: Mapping[str, Check] = {"name": text, "files": text, "command": text, "flags": flags}
_PLAN_KEYS: Mapping[str, Check] = {
    "steps": flag,
    "usualSteps": positive,
    "period": flag,
    "usualPeriod": positive,
    "wireBits": positive,
    "evaluate": flag,
}


def _minor_versions(value: Any, path: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and _MINOR.fullmatch(item) for item in value):
        raise UsageError(f'{path} must be a list of minor versions in quotes, such as ["2.20", "2.21"], not {value!r}')
    return tuple(value)


_KEYS: Mapping[str, Check] = {
    "data": nested(_DATA_KEYS),
    "strategy": text,
    "strategies": named(nested(_STRATEGY_KEYS)),
    "plan": nested(_PLAN_KEYS),
    "export": text,
    "passJobDir": truth,
    "tensorflow": _minor_versions,
    **EXIT_KEYS,
    "notify": notify,
}


def read(files: Mapping[str, bytes], package: str) -> TrainerConfig:
    """Parse a package's declaration; `files` maps a path such as `trainer/task.py` to its content.

    Raises:
        UsageError: if it is invalid.
    """
    path, declaration = f"{package}/{FILE}", dict[str, Any]()
    for place in (f"{LIBRARY}/{FILE}", path):
        if place in files:
            content = read_yaml(files[place], place)
            declaration |= check_mapping(content if content is not None else {}, _KEYS, place)
    exits = _exits(declaration, path)
    strategies = {
        name: _strategy(keys, merged(exits, _exits(keys, f"{path}: strategies.{name}")))
        for name, keys in declaration.get("strategies", {}).items()
    }
    default, export = declaration.get("strategy"), declaration.get("export")
    if default is not None and default not in strategies:
        raise UsageError(
            f"{path}: strategy {default!r} is not one of its strategies; valid are {', '.join(strategies) or 'none'}"
        )
    if export is not None and f"{export.replace('.', '/')}.py" not in files:
        raise UsageError(f"{path}: export {export!r} is not a module of the package")
    pace, pass_job_dir = _pace(declaration.get("plan", {})), declaration.get("passJobDir", True)
    versions = declaration.get("tensorflow", ())
    data, notified = _data(declaration.get("data"), path), declaration.get("notify", "")
    return TrainerConfig(data, strategies, default, pace, export, pass_job_dir, versions, exits, notified)


def _exits(given: Mapping[str, Any], path: str) -> dict[str, Any]:
    check_exit_codes(given, path)
    return {key: given[key] for key in EXIT_KEYS if key in given}


def merged(exits: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge keys of `EXIT_KEYS` with those that take precedence, which take a code out of the other list."""
    codes = {"restartCodes": "permanentCodes", "permanentCodes": "restartCodes"}
    remaining = {key: [code for code in exits[key] if code not in above.get(codes[key], ())] for key in codes if key in exits}
    return {**exits, **remaining, **above}


def check_tensorflow(told: TrainerConfig, package: str, lines: Iterable[str], whole: bool) -> None:
    """Check that a job's own Python, by lines such as `tensorflow-cpu==2.20.0`, has a known TensorFlow.

    Raises:
        UsageError: if the package does not know that version, or if there is none and the lines are the `whole` of it.
    """
    if not told.tensorflow:
        return
    version = next((match[1] for line in lines if (match := _TENSORFLOW.match(line))), None)
    if version in told.tensorflow or (version is None and not whole):
        return
    has = f"has {version}" if version else "has none"
    raise UsageError(
        f"package {package} trains by TensorFlow {', '.join(told.tensorflow)}, and the job's own Python {has}: "
        f"take --runtime-version {told.tensorflow[-1]}, or another of these"
    )


def read_archive(archive: bytes, package: str) -> TrainerConfig:
    """Parse the declaration in a package.tar.gz."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        # For all other files the name is enough.
        names = (f"{package}/{FILE}", f"{LIBRARY}/{FILE}")
        members = {entry.name: tar.extractfile(entry) if entry.name in names else None for entry in tar}
        return read({name: opened.read() if opened else b"" for name, opened in members.items()}, package)


def _strategy(given: Mapping[str, Any], exits: Mapping[str, Any]) -> Strategy:
    plain = Strategy()
    return Strategy(
        tuple(given.get("needs", plain.needs)),
        tuple(given.get("expendable", plain.expendable)),
        given.get("restartPolicy", plain.restart_policy),
        given.get("exchange"),
        tuple(given["replicas"]) if "replicas" in given else None,
        tuple(given.get("together", plain.together)),
        exits,
    )


def _data(given: Mapping[str, Any] | None, path: str) -> Data | None:
    if given is None:
        return None
    if "name" not in given:
        raise UsageError(f"{path}: data.name is missing: it is the folder below data/ in the bucket, such as images")
    if not _DATA_NAME.fullmatch(given["name"]):
        raise UsageError(f"{path}: data.name {given['name']!r} is no name of a folder; valid are letters, digits, _, . and -")
    files = given.get("files", "")
    if files.startswith(("/", "~")) or KEY_FOLDERS.union({".."}).intersection(Path(files).parts):
        raise UsageError(
            f"{path}: data.files {files!r} is outside the checkout, or may hold keys of stacks. Valid: a glob of other files "
            "in the checkout, such as .cache/images/*. Run: fab data put, for files elsewhere"
        )
    return Data(given["name"], given.get("flags", ()), files, given.get("command", ""))


def _pace(given: Mapping[str, Any]) -> PlanFlags:
    plain = PlanFlags()
    return PlanFlags(
        given.get("steps"),
        given.get("period"),
        given.get("usualPeriod", plain.usual_period),
        given.get("wireBits", plain.wire_bits),
        given.get("usualSteps"),
        given.get("evaluate"),
    )
