"""Check scaletier.yaml: a package's declaration, the errors of a wrong one, and the shipped trainer's own."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from opsdata import write_files

from infra.inventory import Inventory
from ops.cluster.cluster import ClusterClient
from ops.errors import UsageError
from ops.package import package, runtimes, trainer_config
from ops.package.trainer_config import FILE, LIBRARY, Data, DeclaredFlags, Strategy, TrainerConfig
from ops.submit import job_plan, runner, train
from ops.submit.arguments import last_step
from ops.submit.config import JobFlags
from ops.submit.submit import Submission
from scaletier import flags as library_flags
from scaletier import private
from trainer import flags as trainer_flags

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = package.find(ROOT / "trainer")
ALL = """
data: {name: mnist, flags: [--data]}
strategy: apart
strategies:
  apart: {requiredRoles: [ps, worker], optionalRoles: [worker], restartPolicy: all, exchange: servers, usedRoles: [worker]}
  1:
plan: {steps: --steps, syncPeriod: --every, defaultSyncPeriod: 3, parameterBits: 16, evaluate: --look-every}
export: mine.sub.saved
"""


def read(text: str | bytes) -> TrainerConfig:
    content = text.encode() if isinstance(text, str) else text
    return trainer_config.read({f"mine/{FILE}": content, "mine/sub/saved.py": b""}, "mine")


def read_declaration(built: package.Package) -> TrainerConfig:
    return trainer_config.read(built.files, built.name)


def test_all_keys_of_a_declaration() -> None:
    apart = Strategy(
        requiredRoles=("ps", "worker"), optionalRoles=["worker"], restartPolicy="all", exchange="servers", usedRoles=("worker",)
    )
    assert read(ALL) == TrainerConfig(
        data=Data(name="mnist", flags=("--data",)),
        strategies={"apart": apart, "1": Strategy()},
        strategy="apart",
        plan=DeclaredFlags(
            steps="--steps", syncPeriod="--every", defaultSyncPeriod=3, parameterBits=16, evaluate="--look-every"
        ),
        export="mine.sub.saved",
    )
    assert (read(ALL).strategy_for(None), read(ALL).strategy_for("1")) == (apart, Strategy()), "the default, if none is given"


def test_the_defaults_of_a_declaration() -> None:
    defaults = TrainerConfig()
    assert trainer_config.read({"mine/__init__.py": b"", f"other/{FILE}": ALL.encode()}, "mine") == defaults
    assert read("") == read("plan:  # none\n") == defaults
    assert defaults.strategy_for("any") == defaults.strategy_for(None) == Strategy()
    assert Strategy().model_dump(exclude_none=True) == {"requiredRoles": (), "allOrNone": ()}
    assert defaults.plan.model_dump(exclude_none=True) == {"defaultSyncPeriod": 1, "parameterBits": 32}
    assert defaults.data_for([]) is None
    assert read("plan: {defaultSteps: 1, defaultSyncPeriod: 1, parameterBits: 1}").plan == DeclaredFlags(
        defaultSteps=1, defaultSyncPeriod=1, parameterBits=1
    )


@pytest.mark.parametrize(
    ("lines", "complete", "message"),
    [
        (["tensorflow-cpu==2.20.0", "numpy==2.0"], True, None),
        (["numpy", "tensorflow==2.21.*"], False, None),
        (["tensorflow[and-cuda]~=2.20.0"], False, None),
        (["jax", "tensorflow-text==2.15.0"], False, None),
        (["tensorflow==2.15.0"], False, "the job's own Python has 2.15: take --runtime-version 2.21, or another of these"),
        (["tensorflow-cpu==2.2.0"], True, "has 2.2: "),
        (["jax==0.6.0", "tensorflow-text==2.20.0"], True, "has none: "),
    ],
)
def test_a_runtime_has_a_tensorflow_that_the_trainer_supports(lines: list[str], complete: bool, message: str | None) -> None:
    config = read("tensorflow: ['2.20', '2.21']")
    trainer_config.check_frameworks(TrainerConfig(), "mine", lines, complete)
    if message is None:
        trainer_config.check_frameworks(config, "mine", lines, complete)
        return
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        trainer_config.check_frameworks(config, "mine", lines, complete)
    assert str(error.value).startswith("package mine supports TensorFlow 2.20, 2.21, and ")


def test_the_library_declares_its_tested_versions() -> None:
    files = {f"scaletier/{FILE}": (ROOT / "scaletier" / FILE).read_bytes()}
    declared = trainer_config.read(files, "mine")
    assert declared.tensorflow == tuple(private.VERSIONS)
    assert set(private.VERSIONS.values()) == {declared.keras}


@pytest.mark.parametrize(("line", "valid"), [("keras==3.13.2", True), ("keras~=3.14", True), ("keras==3.4.1", False)])
def test_a_keras_that_the_package_does_not_know_is_refused(line: str, valid: bool) -> None:
    config = TrainerConfig(keras=("3.13", "3.14"))
    lines = ["numpy==2.0", line]
    if valid:
        trainer_config.check_frameworks(config, "mine", lines, False)
        return
    expected = "package mine supports Keras 3.13, 3.14, and the job's own Python has 3.4: require keras==3.14.*, or another"
    with pytest.raises(UsageError, match=re.escape(expected)):
        trainer_config.check_frameworks(config, "mine", lines, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dat: mnist", "dat is unknown; did you mean data?; valid are data, strategy, strategies, plan, export"),
        ("restartCodes: [300]", "restartCodes[0] 300 is invalid: it is no exit code. Valid: whole numbers from 1 to 255"),
        ("strategies: {a: b}", "strategies.a is not a mapping of keys to values; valid keys are requiredRoles, "),
        ("strategies: [a, b]", "strategies must be a mapping of names, not ['a', 'b']"),
        ("{strategy: b, strategies: {a: }}", "strategy 'b' is not one of its strategies; valid are a"),
        ("strategy: b", "strategy 'b' is not one of its strategies; valid are none"),
        ("strategy: [b]", "strategy must be a string, not ['b']"),
        ("data: mnist", "data is not a mapping of keys to values; valid keys are name, files, command, flags"),
        (
            "data: {name: ../x}",
            "data.name '../x' is invalid: it is no folder's name. Valid: a letter or digit, then letters, digits, _, . and -",
        ),
        (
            "data: {name: x, files: /etc}",
            "data.files '/etc' is invalid: it is outside the checkout, or may hold secrets of stacks.",
        ),
        ("data: {name: x, files: ~/.ssh/*}", "data.files '~/.ssh/*' is invalid: it is outside the checkout"),
        ("data: {name: x, files: a/../../b}", "data.files 'a/../../b' is invalid: it is outside the checkout"),
        ("data: {name: x, files: .scaletier/*/id*}", "data.files '.scaletier/*/id*' is invalid: it is outside the checkout"),
        ("data: {name: x, files: 3}", "data.files must be a string, not 3: quote it"),
        ("data: {name: x, command: 3}", "data.command must be a string, not 3: quote it"),
        ("data: {flags: [--data]}", "data.name is missing: it is the folder below data/ in the bucket"),
        ("data: {name: mnist, flags: --data}", "data.flags must be a list such as [--data], not '--data'"),
        ("data: {name: mnist, flags: [data]}", "data.flags[0] must be a flag such as --data, not 'data'"),
        ("plan: {steps: 5}", "plan.steps must be a flag such as --data, not 5"),
        ("plan: {syncPeriod: --every=3}", "plan.syncPeriod must be a flag such as --data, not '--every=3'"),
        ("plan: {defaultSyncPeriod: 0}", "plan.defaultSyncPeriod must be at least 1, not 0"),
        ("plan: {evaluate: 5}", "plan.evaluate must be a flag such as --data, not 5"),
        ("plan: {parameterBits: true}", "plan.parameterBits must be a number, not True"),
        ("export: mine.gone", "export 'mine.gone' is not a module of the package"),
        ("export: 5", "export '5' is not a module of the package"),
        ("tensorflow: 2.20", 'tensorflow must be a list of minor versions in quotes, such as ["2.20", "2.21"], not 2.2'),
        ("tensorflow: [2.20]", 'tensorflow must be a list of minor versions in quotes, such as ["2.20", "2.21"], not [2.2]'),
        ("tensorflow: ['2.20.1']", "tensorflow must be a list of minor versions in quotes"),
    ],
)
def test_an_error_names_the_full_path_of_the_key(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read(text)
    assert str(error.value).startswith(f"mine/{FILE}: {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "need: [ps]",
            ".need is unknown; valid are requiredRoles, usedRoles, allOrNone, exchange, restartPolicy, optionalRoles, ",
        ),
        ("requiredRoles: [master]", ".requiredRoles[0] 'master' is unknown; valid are worker, ps"),
        ("requiredRoles: worker", ".requiredRoles must be a list such as [worker], not 'worker'"),
        ("optionalRoles: [chief]", ".optionalRoles[0] 'chief' is unknown; valid are worker, ps, evaluator"),
        ("restartCodes: [1], permanentCodes: [1]", " is invalid: 1 is in restartCodes and in permanentCodes. Valid: one of"),
        ("restartPolicy: 1", ".restartPolicy 1 is unknown; valid are replica, all"),
        ("exchange: [x]", ".exchange ['x'] is unknown; valid are servers, all-reduce"),
    ],
)
def test_an_error_of_a_strategy_names_its_key(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^mine/{FILE}: strategies.a{re.escape(message)}"):
        read(f"strategies: {{a: {{{text}}}}}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", f"mine/{FILE} is not a mapping of keys to values; valid keys are data"),
        ("a:\n  [", f"mine/{FILE}:2 is not YAML: "),
        (b"\xff", f"mine/{FILE} cannot be read: 'utf-8' codec"),
    ],
)
def test_a_file_without_a_mapping_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read(text)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_declared_data_is_used_unless_a_flag_names_other_data() -> None:
    config = read(ALL)
    assert config.data_for(["--datas", "x"]) == Data(name="mnist", flags=("--data",))
    assert config.data_for(["--data", "x"]) is config.data_for(["--data=x"]) is None


def test_the_declaration_is_read_from_the_package(tmp_path: Path) -> None:
    empty = ("__init__.py", "task.py", "sub/__init__.py", "sub/saved.py")
    built = package.build(write_files(tmp_path / "mine", {**dict.fromkeys(empty, ""), FILE: ALL}), "mine.task")
    assert read_declaration(built) == trainer_config.read_from_archive(built.archive, "mine") == read(ALL)
    assert read_declaration(package.unpack(built.archive, "mine", list(built.files), "mine.task")) == read(ALL)
    assert trainer_config.read_from_archive(built.archive, "other") == TrainerConfig()


def test_the_shipped_declaration_matches_the_trainer() -> None:
    shipped = trainer_config.read(SHIPPED.files, SHIPPED.name)
    parser = trainer_flags.parser({})
    flags = {name for action in parser._actions for name in action.option_strings}
    assert tuple(shipped.strategies) == library_flags.STRATEGIES
    assert shipped.strategy == parser.get_default("strategy")
    assert shipped.data is not None
    assert {*shipped.data.flags, shipped.plan.steps, shipped.plan.syncPeriod, shipped.plan.evaluate} <= flags
    assert shipped.plan.defaultSteps == parser.get_default("max_steps")
    (data,) = (action.option_strings for action in parser._actions if action.dest == "train_data")
    assert list(shipped.data.flags) == data
    together = {"sync", "model-parallel"}
    assert {name for name, strategy in shipped.strategies.items() if strategy.requiredRoles} == together
    assert {name for name, strategy in shipped.strategies.items() if strategy.restartPolicy == "all"} == together
    assert "worker" in shipped.strategies["async"].optionalRoles
    assert "ps" not in shipped.strategies["async"].optionalRoles
    assert shipped.export == "trainer.export"


@pytest.mark.parametrize(
    ("args", "declared_flags", "last"),
    [
        ("--stop-at 7", DeclaredFlags(steps="--stop-at", defaultSteps=9), 7),
        ("--stop-at=7 --stop-at 8", DeclaredFlags(steps="--stop-at", defaultSteps=9), 8),
        ("--max-steps 7", DeclaredFlags(steps="--stop-at", defaultSteps=9), 9),
        ("--stop-at x", DeclaredFlags(steps="--stop-at", defaultSteps=9), None),
        ("--num_train_steps 7", DeclaredFlags(), 7),
        ("--total-steps=7", DeclaredFlags(), 7),
        ("--steps \u0667", DeclaredFlags(), None),
        ("--steps-between-saves 7 --warmup-steps 3", DeclaredFlags(), None),
        ("", DeclaredFlags(), None),
    ],
)
def test_the_last_step_is_read_from_arguments(args: str, declared_flags: DeclaredFlags, last: int | None) -> None:
    assert last_step(args.split(), declared_flags) == last


def test_the_docs_show_the_shipped_declaration() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "trainers.md").read_text(), re.MULTILINE | re.DOTALL)
    declarations = [block for block in blocks if yaml.safe_load(block).keys() & {"strategies", "export"}]
    files = {**SHIPPED.files, f"{LIBRARY}/{FILE}": b"", f"trainer/{FILE}": "".join(declarations).encode()}
    assert trainer_config.read(files, "trainer") == trainer_config.read(SHIPPED.files, "trainer")


LIBRARY_CONFIG = TrainerConfig(
    strategies={
        "async": Strategy(
            optionalRoles=["worker", "evaluator"], exchange="servers", allOrNone=("ps", "worker"), successPolicy="chief"
        ),
        "sync": Strategy(
            requiredRoles=("worker",),
            optionalRoles=["ps", "evaluator"],
            restartPolicy="all",
            exchange="all-reduce",
            usedRoles=("worker", "evaluator"),
        ),
        "model-parallel": Strategy(
            requiredRoles=("worker",),
            optionalRoles=["ps", "evaluator"],
            restartPolicy="all",
            usedRoles=("worker", "evaluator"),
            successPolicy="chief",
        ),
    },
    strategy="async",
    plan=DeclaredFlags(
        steps="--max-steps",
        syncPeriod="--sync-period",
        defaultSyncPeriod=4,
        parameterBits=16,
        defaultSteps=2000,
        evaluate="--eval-steps",
    ),
    tensorflow=("2.19", "2.20", "2.21"),
    keras=("3.13", "3.14", "3.15"),
    gracePeriod=0,
)


def build_with_library(tmp_path: Path, text: str | None = None) -> package.Package:
    """Return a package that imports the library, with this declaration of its own."""
    own = {FILE: text} if text is not None else {}
    return package.build(
        write_files(tmp_path / "mine", {"__init__.py": "", "task.py": "import scaletier\n", **own}), "mine.task"
    )


def test_a_package_with_the_library_has_its_declaration(tmp_path: Path) -> None:
    built = build_with_library(tmp_path)
    assert read_declaration(built) == LIBRARY_CONFIG
    asynchronous = {"optionalRoles": ["worker", "evaluator"], "successPolicy": "chief", "gracePeriod": 0}
    assert read_declaration(built).strategy_for("async").policy_keys == asynchronous
    synchronous = {"restartPolicy": "all", "optionalRoles": ["ps", "evaluator"], "gracePeriod": 0}
    assert read_declaration(built).strategy_for("sync").policy_keys == synchronous
    assert trainer_config.read_from_archive(built.archive, "mine") == LIBRARY_CONFIG
    assert read_declaration(package.unpack(built.archive, "mine", list(built.files), "mine.task")) == LIBRARY_CONFIG


def test_a_packages_own_keys_override_the_librarys(tmp_path: Path) -> None:
    built = build_with_library(tmp_path, "strategy: sync\nplan: {steps: --steps}\ndata: {name: mnist}\n")
    own = {"data": Data(name="mnist"), "strategy": "sync", "plan": DeclaredFlags(steps="--steps")}
    assert read_declaration(built) == LIBRARY_CONFIG.model_copy(update=own)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("strategy: ring", "strategy 'ring' is not one of its strategies; valid are async, sync, model-parallel"),
        ("strategies: {ring: }", "strategy 'async' is not one of its strategies; valid are ring"),
        ("export: mine.gone", "export 'mine.gone' is not a module of the package"),
    ],
)
def test_a_conflict_with_the_librarys_declaration_is_the_packages_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read_declaration(build_with_library(tmp_path, text))
    assert str(error.value) == f"mine/{FILE}: {message}"


def test_a_script_with_the_library_has_its_strategies(
    inventory: Inventory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "digits.py").write_text("import scaletier\n")
    flags = JobFlags("job01", script=str(tmp_path / "digits.py"), strategy="sync")
    assert runner.dry_run(ClusterClient(inventory), flags, None, True) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["restartPolicy"], plan["optionalRoles"]) == ("all", ["ps", "evaluator"])
    assert plan["args"][:2] == ["--strategy", "sync"]


def test_the_examples_declare_the_data_they_read() -> None:
    for folder in sorted(path for path in (ROOT / "examples").iterdir() if (path / "task.py").is_file()):
        config = trainer_config.read(package.find(folder).files, folder.name)
        assert (config.data is not None) == ("SCALETIER_DATA" in (folder / "task.py").read_text()), folder


DATA = "data: {name: digits, files: mine/*.tfrecord, command: make digits, flags: [--data]}"


def prepare_package(inventory: Inventory, tmp_path: Path, *args: str, text: str = DATA) -> Submission:
    files = {"__init__.py": "", "task.py": "import os\nos.environ['SCALETIER_DATA']\n", FILE: text}
    return train.prepare(inventory, JobFlags("job01", more_args=args), str(write_files(tmp_path / "mine", files)))


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the one local file of the data set, with another beside it."""
    monkeypatch.setattr(train, "ROOT", tmp_path / "checkout")
    names = ("notes.txt", "train-00000-of-00001.tfrecord")
    return write_files(tmp_path / "checkout" / "mine", dict.fromkeys(names, "1")) / names[1]


@pytest.mark.parametrize(("args", "text", "files"), [((), None, 1), (("--data=/d",), None, 0), ((), "", 0)])
def test_declared_data_is_uploaded(
    inventory: Inventory, tmp_path: Path, digits: Path, args: tuple[str, ...], text: str | None, files: int
) -> None:
    submission = prepare_package(inventory, tmp_path, *args, **({} if text is None else {"text": text}))
    assert submission.data == ({digits.name: digits} if files else {})
    declared_data = submission.job.declared.data
    folder = "/bucket/data/digits" if declared_data else "/bucket/data"
    assert job_plan.data_folder(inventory, submission.job) == folder


@pytest.mark.parametrize(
    ("asked", "installed", "dry", "error"),
    [
        ("tensorflow==2.15.0", {"tensorflow": "2.20.0"}, False, "has 2.15: "),
        ("jax==0.6", {"jax": "0.6"}, False, "has none: "),
        ("jax==0.6", {"jax": "0.6"}, True, "has none: "),
        ("jax==0.6", {}, False, "has none: "),
        ("jax==0.6", {}, True, None),
        ("tensorflow==2.20.0", {"tensorflow": "2.20.0"}, False, None),
    ],
)
def test_a_runtime_is_compared_with_the_declaration(
    inventory: Inventory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: str,
    installed: dict[str, str],
    dry: bool,
    error: str | None,
) -> None:
    built: list[bool] = []
    monkeypatch.setattr(runtimes, "build", lambda *_: built.append(True) or installed)
    monkeypatch.setattr(runtimes, "read_existing", lambda *_: built.append(False) or installed)
    write_files(tmp_path / "mine", {"__init__.py": "", "task.py": "", FILE: "tensorflow: ['2.20']"})
    (tmp_path / "asked.txt").write_text(f"{asked}\n")
    local = replace(inventory, runtimes="/opt/scaletier/runtimes", operator_runtimes=str(tmp_path))
    flags = JobFlags("job01", runtime=str(tmp_path / "asked.txt"))
    with pytest.raises(UsageError, match=error) if error else nullcontext():
        assert train.prepare(local, flags, str(tmp_path / "mine"), **({"dry": True} if dry else {})).job.runtime
    assert built == ([] if error == "has 2.15: " else [not dry])
    note = "the runtime asked would be built first; what the package needs besides it is not shown\n"
    assert capsys.readouterr().err == ("" if error or installed else note)


@pytest.mark.parametrize(
    ("declared", "on_hosts", "has"),
    [
        ("tensorflow: ['1.15']", None, "supports TensorFlow 1.15, and the hosts' Python has 2."),
        ("tensorflow: ['2.20']", "2.19.1", "supports TensorFlow 2.20, and the hosts' Python has 2.19: take --runtime-version"),
        ("keras: ['2.15']", None, "supports Keras 2.15, and the hosts' Python has 3."),
        (
            "keras: ['2.15']",
            None,
            f"supports Keras 2.15, and the hosts' Python has {private.VERSIONS['2.21'][-1]}: give the job a Python of its own,",
        ),
        ("tensorflow: ['2.20']", "2.20.0", None),
        ("", None, None),
    ],
)
def test_the_hosts_python_is_compared_with_the_declaration(
    inventory: Inventory, tmp_path: Path, declared: str, on_hosts: str | None, has: str | None
) -> None:
    write_files(tmp_path / "mine", {"__init__.py": "", "task.py": "", FILE: declared})
    with pytest.raises(UsageError, match=f"^package mine {re.escape(has)}") if has else nullcontext():
        assert train.prepare(replace(inventory, tensorflow=on_hosts), JobFlags("job01"), str(tmp_path / "mine")).job


def test_a_data_pattern_never_matches_keys(tmp_path: Path) -> None:
    write_files(tmp_path, {".scaletier/local/key": "", ".other/local/key": ""})
    files = trainer_config.Data(name="x", files=".[so]*/local/key").local_files(tmp_path)
    assert files == {"key": tmp_path / ".other/local/key"}


class Bucket:
    """A bucket with these files of the data set."""

    def __init__(self, *names: str) -> None:
        self.files_in_folder = dict.fromkeys(names, 1)

    def sizes(self, folder: str) -> dict[str, int]:
        assert folder == "data/digits"
        return self.files_in_folder


def test_missing_data_is_refused_before_the_start(inventory: Inventory, tmp_path: Path, digits: Path) -> None:
    digits.unlink()
    submission = prepare_package(inventory, tmp_path)
    with pytest.raises(UsageError, match=r"^there is no digits to train on: run make digits, or name other data with --data$"):
        train._check_data(ClusterClient(inventory, bucket=Bucket()), submission)  # type: ignore[arg-type]
    train._check_data(ClusterClient(inventory, bucket=Bucket("train.tfrecord")), submission)  # type: ignore[arg-type]


OLD_KEYS = """strategies:
  a: {needs: [ps], replicas: [ps, worker], together: [ps, worker], expendable: [worker]}
  b: {needs: [ps]}
plan: {usualSteps: 7, period: --every, usualPeriod: 2, wireBits: 16, steps: --steps, evaluate: --evaluate}
"""
PRESENT_KEYS = {
    "needs": "requiredRoles",
    "replicas": "usedRoles",
    "together": "allOrNone",
    "expendable": "optionalRoles",
    "usualSteps": "defaultSteps",
    "period": "syncPeriod",
    "usualPeriod": "defaultSyncPeriod",
    "wireBits": "parameterBits",
}


def rename_lines(path: str, *old: str) -> list[str]:
    advice = "rename it, as the next release reads that alone"
    return [f"{path}: the key {key} is called {PRESENT_KEYS[key]} now: {advice}" for key in old]


def test_an_old_key_means_the_same_as_the_present_one() -> None:
    present = OLD_KEYS
    for old, new in PRESENT_KEYS.items():
        present = present.replace(f"{old}:", f"{new}:")
    assert read(OLD_KEYS) == read(present) != read("")


def test_train_prints_one_line_for_each_old_key_and_file(
    inventory: Inventory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (config := tmp_path / "config.yaml").write_text("trainingInput: {scheduling: {expendable: [worker]}}")
    folder = build_with_library(tmp_path, OLD_KEYS + "strategy: a").name
    flags = JobFlags("job01", config=str(config))
    assert runner.dry_run(ClusterClient(inventory), flags, str(tmp_path / folder), True) == 0
    printed = [line for line in capsys.readouterr().err.splitlines() if "is called" in line]
    assert printed == rename_lines(str(config), "expendable") + rename_lines(f"mine/{FILE}", *PRESENT_KEYS)


def test_an_old_key_in_a_stored_package_is_read_silently(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built = build_with_library(tmp_path, OLD_KEYS + "strategy: a")
    capsys.readouterr()
    assert trainer_config.read_from_archive(built.archive, "mine").plan.defaultSteps == 7
    assert not capsys.readouterr().err


def test_a_key_by_both_names_is_one_line() -> None:
    with pytest.raises(
        UsageError, match=r"strategies\.a\.needs is the old name of requiredRoles, which is there too: remove it"
    ):
        read("strategies: {a: {needs: [ps], requiredRoles: [ps]}}")
