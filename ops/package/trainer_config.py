"""A trainer package's declaration: `scaletier.yaml` beside its `__init__.py`; see docs/trainers.md.

For a trainer that uses the library, the library's scaletier.yaml has the defaults, and the trainer's own file overrides them.
A value that neither file has is the default here.
"""

from __future__ import annotations

import glob
import io
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PlainValidator

from infra.validation import Section
from ops.config_values import Flag, Notify, Positive, RunPolicy, StrictBool, read_yaml, validate
from ops.errors import UsageError
from ops.package.tree import KEY_FOLDERS

FILE = "scaletier.yaml"
# The training library's folder beside a package's own files.
LIBRARY = "scaletier"
_DATA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_MINOR = re.compile(r"[0-9]+\.[0-9]+")
_KERAS = re.compile(r"keras[=~]=([0-9]+\.[0-9]+)")
_TENSORFLOW = re.compile(r"tensorflow(?:[-_](?:cpu|gpu))?(?:\[[^]]*\])?[=~]=([0-9]+\.[0-9]+)")
ExchangeKind = Literal["servers", "all-reduce"]
_JobRole = Literal["ps", "master", "worker", "evaluator"]


def _data_name(name: str) -> str:
    if not _DATA_NAME.fullmatch(name):
        raise ValueError("it is no folder's name. Valid: a letter or digit, then letters, digits, _, . and -")
    return name


def _data_files(files: str) -> str:
    if files.startswith(("/", "~")) or KEY_FOLDERS.union({".."}).intersection(Path(files).parts):
        raise ValueError(
            "it is outside the checkout, or may hold secrets of stacks. Valid: a glob of other files "
            "in the checkout, such as .cache/images/*. Run: fab data put, for files elsewhere"
        )
    return files


def _minor_versions(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) and _MINOR.fullmatch(item) for item in value):
        raise ValueError('must be a list of minor versions in quotes, such as ["2.20", "2.21"]')
    return tuple(value)


class Strategy(RunPolicy):
    """The meaning of a value of `--strategy` for the cluster.

    Attributes:
        requiredRoles: the roles of which it needs at least one host.
        usedRoles: the roles that it uses besides the master; None for all.
        allOrNone: the roles of which it uses all hosts or none.
        exchange: how replicas share what they learn: each with the parameter servers (`servers`), or all together
            (`all-reduce`); None if unknown.
    """

    old_names: ClassVar[Mapping[str, str]] = {
        "requiredRoles": "needs",
        "usedRoles": "replicas",
        "allOrNone": "together",
        "optionalRoles": "expendable",
    }

    requiredRoles: tuple[Literal["worker", "ps"], ...] = ()
    usedRoles: tuple[_JobRole, ...] | None = None
    allOrNone: tuple[_JobRole, ...] = ()
    exchange: ExchangeKind | None = None


class Data(Section):
    """A data set that a trainer expects in SCALETIER_DATA, unless one of `flags` names other data.

    It is `data/<name>` in the bucket. `fab train` uploads `files` there, a glob of files in the checkout; `command` makes them.
    No other file of this machine is permitted, as the package may be another person's.
    """

    name: Annotated[str, AfterValidator(_data_name)] = Field(
        description="it is the folder below data/ in the bucket, such as images"
    )
    files: Annotated[str, Field(strict=True), AfterValidator(_data_files)] = ""
    command: Annotated[str, Field(strict=True)] = ""
    flags: tuple[Flag, ...] = ()

    def local_files(self, checkout: Path) -> dict[str, Path]:
        """Return the files to upload, by name."""
        matches = map(Path, sorted(glob.glob(self.files, root_dir=checkout)))  # noqa: PTH207  Path's refuses patterns
        paths = [checkout / match for match in matches if not KEY_FOLDERS.intersection(match.parts)]
        return {path.name: path for path in paths if path.is_file()}

    def missing_error(self) -> UsageError:
        """Return the error for a data set that is neither in the checkout nor in the bucket."""
        how = f"run {self.command}" if self.command else f"run fab data put PATH {self.name}"
        other = f", or name other data with {' or '.join(self.flags)}" if self.flags else ""
        return UsageError(f"there is no {self.name} to train on: {how}{other}")


class DeclaredFlags(Section):
    """The trainer's flags in the section `plan`, None for a missing one; the defaults describe plain TensorFlow.

    `fab plan` reads all of them, and `fab train` those of the steps.

    Attributes:
        steps: the flag for the number of steps of all replicas.
        defaultSteps: the steps without that flag.
        syncPeriod: the flag for the steps between two exchanges.
        defaultSyncPeriod: the period if neither the flag nor the log has it.
        parameterBits: the size of one parameter on its way to the parameter servers.
        evaluate: the flag for the steps of all replicas between two evaluations.
    """

    old_names: ClassVar[Mapping[str, str]] = {
        "defaultSteps": "usualSteps",
        "syncPeriod": "period",
        "defaultSyncPeriod": "usualPeriod",
        "parameterBits": "wireBits",
    }

    steps: Flag | None = None
    defaultSteps: Positive | None = None
    syncPeriod: Flag | None = None
    defaultSyncPeriod: Positive = 1
    parameterBits: Positive = 32
    evaluate: Flag | None = None


class TrainerConfig(RunPolicy):
    """A trainer's declaration: `strategies` by name, `strategy` its default one, `export` a module.

    `tensorflow` and `keras` are the minor versions that it supports, any if empty. The keys of `RunPolicy` hold for
    every strategy that does not override them. A job's end is reported to `notify`, a URL or a command, unless the job sets
    another. If `passJobDir` is False, the trainer reads JOB_DIR itself, and gets no flag with it even if its code has one.
    """

    data: Data | None = None
    strategy: str | None = None
    strategies: dict[str, Strategy] = Field(default_factory=dict)
    plan: DeclaredFlags = DeclaredFlags()
    export: str | None = None
    passJobDir: StrictBool = True
    tensorflow: Annotated[tuple[str, ...], PlainValidator(_minor_versions)] = ()
    keras: Annotated[tuple[str, ...], PlainValidator(_minor_versions)] = ()
    notify: Notify = ""

    def strategy_for(self, name: str | None) -> Strategy:
        """Return a strategy, the default one if `name` is None, with the keys of `RunPolicy` that hold for all."""
        strategy = self.strategies.get(name or self.strategy or "", Strategy())
        return strategy.model_copy(update=merge_policy_keys(self.policy_keys, strategy.policy_keys))

    def data_for(self, args: Sequence[str]) -> Data | None:
        """Return the data set that the bucket must have for these arguments."""
        if self.data is None or any(arg.partition("=")[0] in self.data.flags for arg in args):
            return None
        return self.data


def read(files: Mapping[str, bytes], package: str, report_old_keys: bool = False) -> TrainerConfig:
    """Parse a package's declaration from its files, each by a path such as `trainer/task.py`."""
    path, keys = f"{package}/{FILE}", dict[str, Any]()
    for place in (f"{LIBRARY}/{FILE}", path):
        if place in files:
            declaration = validate(TrainerConfig, read_yaml(files[place], place), place, report_old_keys)
            keys |= {key: getattr(declaration, key) for key in declaration.model_fields_set}
    declared = validate(TrainerConfig, keys, path)
    if declared.strategy is not None and declared.strategy not in declared.strategies:
        valid = ", ".join(declared.strategies) or "none"
        raise UsageError(f"{path}: strategy {declared.strategy!r} is not one of its strategies; valid are {valid}")
    if declared.export is not None and f"{declared.export.replace('.', '/')}.py" not in files:
        raise UsageError(f"{path}: export {declared.export!r} is not a module of the package")
    return declared


def merge_policy_keys(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge keys of `RunPolicy`; an exit code in one list of `overrides` is removed from the other list of `base`."""
    codes = {"restartCodes": "permanentCodes", "permanentCodes": "restartCodes"}
    remaining = {key: [code for code in base[key] if code not in overrides.get(codes[key], ())] for key in codes if key in base}
    return {**base, **remaining, **overrides}


def check_frameworks(
    declared: TrainerConfig, package: str, lines: Iterable[str], complete: bool, on_hosts: bool = False
) -> None:
    """Check the TensorFlow and Keras of a Python by lines such as `tensorflow-cpu==2.20.0`.

    `on_hosts` is True for the hosts' own Python, False for the job's. `complete` is True if these are all its
    packages, so that a missing TensorFlow is an error.
    """
    lines = list(lines)
    owner = "the hosts' Python" if on_hosts else "the job's own Python"
    keras = next((match[1] for line in lines if (match := _KERAS.match(line))), None)
    if declared.keras and keras and keras not in declared.keras:
        how = f"require keras=={declared.keras[-1]}.*, or another of these"
        if on_hosts:
            how = f"give the job a Python of its own, --runtime FILE, and in that file {how}"
        raise UsageError(f"package {package} supports Keras {', '.join(declared.keras)}, and {owner} has {keras}: {how}")
    if not declared.tensorflow:
        return
    version = next((match[1] for line in lines if (match := _TENSORFLOW.match(line))), None)
    if version in declared.tensorflow or (version is None and not complete):
        return
    has = f"has {version}" if version else "has none"
    raise UsageError(
        f"package {package} supports TensorFlow {', '.join(declared.tensorflow)}, and {owner} {has}: "
        f"take --runtime-version {declared.tensorflow[-1]}, or another of these"
    )


def read_from_archive(archive: bytes, package: str) -> TrainerConfig:
    """Parse the declaration in a package.tar.gz."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        # Of other files only the names matter.
        names = (f"{package}/{FILE}", f"{LIBRARY}/{FILE}")
        members = {entry.name: tar.extractfile(entry) if entry.name in names else None for entry in tar}
        return read({name: opened.read() if opened else b"" for name, opened in members.items()}, package)
