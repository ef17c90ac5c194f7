"""Variables such as `${JOB_DIR}` in arguments and environment: substituted, kept, or refused."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_ops_submit import FakeFleet, make_cluster
from test_tuner_run import TuningWorld

from hosts.agent.job_files import JobFiles
from infra.inventory import Inventory
from jobs import variables
from jobs.chunks import LogFilter
from jobs.folder_bucket import FolderBucket, open_bucket
from jobs.ledger import Ledger
from jobs.records import HostConfig, Task
from ops.commands import shell_operator, unknown_placeholder
from ops.errors import OpsError, UsageError
from ops.logs.read import read_logs
from ops.package import host_stream, package
from ops.submit import job_plan, program
from ops.submit.config import JobFlags, build_job
from ops.submit.submit import Submission, submit

VALUES = {"JOB_DIR": "/bucket/out", "JOB_ID": "j", "SCALETIER_DATA": "/bucket/data", "TYPE": "worker", "INDEX": "3"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${JOB_DIR}/model", "/bucket/out/model"),
        ("$JOB_DIR/model", "/bucket/out/model"),
        ("--out=$JOB_DIR,$TYPE-${INDEX}", "--out=/bucket/out,worker-3"),
        ("$JOB_DIRS $JOB_DIR_2 $JOBDIR", "$JOB_DIRS $JOB_DIR_2 $JOBDIR"),
        ("$HOME ${HOME} $1 $$ $ ${} 5$", "$HOME ${HOME} $1 $$ $ ${} 5$"),
        ("$$JOB_DIR $${JOB_DIR} $${x}", "$JOB_DIR ${JOB_DIR} ${x}"),
        (r"\$JOB_DIR \${x} \$HOME", r"$JOB_DIR ${x} \$HOME"),
        ("$SCALETIER_DATA$JOB_ID", "/bucket/dataj"),
        ("é$JOB_DIR", "é/bucket/out"),
        ("--node_rank=$RANK ${WORLD_SIZE}", "--node_rank=$RANK ${WORLD_SIZE}"),  # a role without a rank
    ],
)
def test_known_variables_are_substituted(text: str, expected: str) -> None:
    assert variables.expand(text, VALUES) == expected


def test_a_substituted_value_is_not_expanded_again() -> None:
    assert variables.expand("$JOB_DIR", {"JOB_DIR": "$JOB_ID", "JOB_ID": "x"}) == "$JOB_ID"


@pytest.mark.parametrize(
    ("argv", "index"),
    [
        (["sh", "-c", "@"], 2),
        (["/bin/bash", "-lc", "@", "$JOB_ID"], 2),
        (["timeout", "9", "bash", "-o", "pipefail", "-ec", "@"], 6),
        (["bash", "-euo", "pipefail", "-c", "@"], 4),
        (["bash", "-c", "-e", "@"], 3),
    ],
)
def test_the_script_of_a_shell_is_not_expanded(argv: list[str], index: int) -> None:
    script = 'echo "$HOME ${X:-y} $$ $JOB_DIR ${TYPO}"'
    argv = [script if word == "@" else word for word in argv]
    assert unknown_placeholder(argv) is None
    expanded = variables.expand_command(argv, VALUES)
    assert expanded[index] == script
    assert "$JOB_ID" not in expanded, "the shell's other arguments are expanded"


@pytest.mark.parametrize(
    ("command", "places"),
    [
        ("sh -c x", [2]),
        ("sh -ec x y", [2]),
        ("/bin/zsh -l -c x", [3]),
        ("bash -o pipefail -ec x", [4]),
        ("bash +o posix -O extglob -c x", [6]),
        ("timeout 9 dash -c x ksh -c y", [4, 7]),
        ("bash --rcfile /x --init-file y -c z", [6]),
        ("sh", []),
        ("sh run.sh -c x", []),
        ("sh -e x", []),
        ("sh -c", []),
        ("bash -c -o", []),
        ("bash -c -o x", []),
        ("fish -c x", []),
        ("sh --c x", []),
    ],
)
def test_the_places_of_a_shell_s_scripts(command: str, places: list[int]) -> None:
    assert list(variables.scripts(command.split())) == places


@pytest.mark.parametrize(
    ("command", "operator"),
    [
        ("echo hi", None),
        ("a | b > c", "|"),
        ("a >> b", ">>"),
        ("a&& b", "&&"),
        ("a; b", ";"),
        ("a `b`", "`"),
        ("a $(b)", "$("),
        ("a '|' \"|\" x", None),
        ("a '|' > x", ">"),
        ('a "$(b)"', "$("),
        ('a "x \\$(y `b`"', "`"),
        (r"a \| \$\(b\)", None),
        (r'a "\$(b) \`c\` \" |"', None),
        ('a "x" > b', ">"),
        ("sh -c 'a | b'", None),
        ('sh -c "a $(b)"', None),
        ('sh -c "a $(b)" | c', "|"),
    ],
)
def test_the_operators_that_only_a_shell_reads(command: str, operator: str | None) -> None:
    assert shell_operator(command, shlex.split(command)) == operator


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["$JOB_DIR", "${INDEX}", "$HOME", "$${x}", r"\${x}"], None),
        (["a", "x${A}${B}", "${C}"], "${A}"),
        (["${JOB_DIR} ${}"], "${}"),
        (["sh", "-c", "${A}", "${B}"], "${B}"),
    ],
)
def test_the_first_unknown_variable_is_found(words: list[str], expected: str | None) -> None:
    assert unknown_placeholder(words) == expected


def test_the_variables_of_an_environment_are_substituted() -> None:
    environment = {"LOGS": "$JOB_DIR/logs", "JOB_DIR": "$JOB_ID", "RANK": "$INDEX", "X": "$RANK"}
    assert variables.expand_environment(environment, VALUES) == {**environment, "LOGS": "/bucket/out/logs"}


@pytest.mark.parametrize("argv", [["sh", "run.sh", "$JOB_ID"], ["sh"], ["bash", "-c"], ["mysh", "-c", "$JOB_ID"]])
def test_a_shell_that_runs_a_file_is_no_exception(argv: list[str]) -> None:
    assert "$JOB_ID" not in variables.expand_command(argv, VALUES)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            JobFlags("j", args="--out '${JOBDIR}/x'"),
            "an argument has ${JOBDIR}, which no host fills in; did you mean JOB_DIR?: ",
        ),
        (JobFlags("j", more_args=["${JOB_DIR:-x}"]), "an argument has ${JOB_DIR:-x}, which no host fills in"),
        (JobFlags("j", more_args=["${}"]), "an argument has ${}, which no host fills in"),
        (JobFlags("j", env=["OUT=${HOME}"]), "the environment's OUT has ${HOME}, which no host fills in"),
    ],
)
def test_an_unknown_name_is_refused(inventory: Inventory, flags: JobFlags, message: str) -> None:
    with pytest.raises(UsageError) as error:
        build_job(flags, inventory)
    assert str(error.value).startswith(message)
    assert "valid are ${JOB_DIR}, ${JOB_ID}, ${SCALETIER_DATA}, ${TYPE}, ${INDEX}, ${MASTER_ADDR}, " in str(error.value)
    assert "a shell fills it in: sh -c '…'" in str(error.value)
    assert "\n" not in str(error.value)


def test_other_dollar_signs_are_kept(inventory: Inventory) -> None:
    words = ["$HOME", "$${x}", r"\${x}", "cost 5$", "${JOB_DIR}", "{JOB_DIR}"]
    assert build_job(JobFlags("j", more_args=words), inventory).args == tuple(words)
    command = ("sh", "-c", "echo ${X:-1} $HOME")
    assert build_job(JobFlags("j"), inventory, command=command).command == command


def test_training_replicas_have_every_variable(inventory: Inventory) -> None:
    """Every variable may be used in an argument, as for torchrun, and is substituted."""
    words = [f"--x=${name}" for name in variables.NAMES]
    plan = job_plan.plan(inventory, build_job(JobFlags("job01", more_args=words), inventory), "").with_hosts({})
    for name in ("master-0", "worker-0"):
        assert not [word for word in variables.expand_command(words, plan.tasks[name].environment) if "$" in word]
    worker = plan.tasks["worker-0"].environment
    assert variables.expand("$RANK of ${WORLD_SIZE}", worker) == "1 of 3"
    assert variables.expand("$TYPE $RANK", plan.tasks["ps-0"].environment) == "ps $RANK"


def test_a_trial_has_its_own_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGS", "$JOB_DIR/logs")
    monkeypatch.setenv("OTHER", "$JOB_DIR")
    world = TuningWorld(tmp_path)
    task = Task("{}", {"LOGS": "$JOB_DIR/logs"})
    world.plan = replace(world.plan, args=["--out", "${JOB_DIR}/model"], tasks={"master-0": task})
    world.tuner("master-0").run()
    _, argv, environment = world.spawned[1]
    assert argv[3:5] == ["--out", f"{tmp_path}/output/2/model"]
    assert (environment["LOGS"], environment["OTHER"]) == (f"{tmp_path}/output/2/logs", "$JOB_DIR")


def test_more_folders_than_a_token_of_google_has_room_for_are_refused(inventory: Inventory) -> None:
    job = build_job(JobFlags("job01", more_args=[f"gs://mine/in{n}/*.csv" for n in range(24)]), inventory)
    assert job_plan.plan(inventory, job, "").args, "local hosts have no such limit"
    with pytest.raises(
        UsageError, match=r"it could not use gs://mine/in23\. Valid: any number of files below gs://mine/data "
    ) as error:
        job_plan.plan(replace(inventory, bucket="gs://mine"), job, "")
    assert "\n" not in str(error.value)


def test_data_paths_with_a_variable_are_in_the_plan(inventory: Inventory) -> None:
    job = build_job(JobFlags("job01", more_args=["--data-dir", "${SCALETIER_DATA}/x"]), inventory)
    assert job_plan.plan(inventory, job, "").data == ["/bucket/data/x"]


@pytest.fixture
def submission(inventory: Inventory, tmp_path: Path) -> Submission:
    """Return a submission of a command on the hosts, without a package."""
    inventory = replace(inventory, operator_bucket=str(tmp_path / "bucket"))
    (tmp_path / "bucket").mkdir()
    command = program.find(None, None, None, "echo hi")
    job = build_job(JobFlags("job01"), inventory, command.source.name, command.source.files, command.command, command.folder)
    return Submission(inventory, job, package.build(command.source, job.module, command.script), {})


def test_a_command_without_a_package_runs_from_an_empty_package(submission: Submission, tmp_path: Path) -> None:
    bucket = Path(submission.inventory.operator_bucket)
    ledger, fleet = Ledger(FolderBucket(bucket)), FakeFleet(submission.inventory)
    submit(make_cluster(fleet, ledger), submission, may_wait=True)
    commands = {command for name, command in fleet.commands}
    assert not [command for command in commands if command.endswith(" job01")], (
        "a host refuses a push for a job without its package"
    )
    plan = ledger.plan("job01")
    assert plan
    site = JobFiles(
        HostConfig("master-0", str(bucket)), tmp_path / "state", Ledger(FolderBucket(bucket)), FolderBucket(bucket), {}
    )
    plan = replace(plan, tasks={"master-0": Task("{}")}, data=["/none"])
    assignment = site.prepare(plan, "master-0")
    assert assignment.directory.is_dir()
    assert assignment.argv == ["echo", "hi"]
    assert host_stream.install_command("v") in {command.replace(command.split()[-1], "v") for command in commands}


def test_logs_of_a_job_that_never_started_give_the_reason(submission: Submission) -> None:
    bucket = submission.inventory.operator_bucket
    cluster: Any = make_cluster(FakeFleet(submission.inventory), Ledger(FolderBucket(Path(bucket))))
    cluster.bucket = open_bucket(bucket)
    record = submission.record().ended("master-0 could not start its replica.\nmore")
    with pytest.raises(OpsError) as error:
        read_logs(cluster, record, ["master-0"], LogFilter())
    message = (
        "job job01 is FAILED (master-0 could not start its replica), and left no log of master-0: fab describe job01 shows more"
    )
    assert str(error.value) == message
