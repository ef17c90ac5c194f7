"""Check config.yaml and the flags: the resulting job, the precedence, and the error for each invalid value."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opsdata import write_files

from infra.inventory import Inventory
from infra.scale_tiers import Role
from infra.validation import Section
from jobs import records
from jobs.study import Study
from ops.config_values import Count, Positive, StrictBool, read_yaml, validate
from ops.errors import UsageError
from ops.package.trainer_config import FILE, Strategy, read
from ops.submit import environment
from ops.submit.config import JobFlags, JobSpec, build_job, check_job_dir, policy, split_args, split_labels
from ops.submit.job_plan import plan
from ops.submit.schema import TrainingInput

DECLARES = {
    f"mine/{FILE}": b"""
strategy: alone
strategies:
  alone: {optionalRoles: [worker, evaluator]}
  together: {requiredRoles: [worker], optionalRoles: [ps], restartPolicy: all}
"""
}
SEED = """\
trainingInput:
  # Use a cluster with many workers and a few parameter servers.
  scaleTier: STANDARD_1
"""


def write_config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return str(path)


def config_error(inventory: Inventory, tmp_path: Path, text: str) -> str:
    with pytest.raises(UsageError) as error:
        build_job(JobFlags("job01", config=write_config(tmp_path, text)), inventory)
    message = str(error.value)
    assert "\n" not in message
    return message.removeprefix(f"{tmp_path}/")


def test_a_job_needs_no_config(inventory: Inventory) -> None:
    job = build_job(JobFlags("job01"), inventory)
    policy = {"restartPolicy": "replica", "optionalRoles": ["evaluator"], **DEFAULT_POLICY}
    job_dir = "/bucket/jobs/job01/output"
    types = dict.fromkeys(("masterType", "workerType", "evaluatorType"), "n1-highcpu-8")
    counts = {"workerCount": 2, "parameterServerCount": 1, "evaluatorCount": 1}
    assert job == JobSpec(
        "job01",
        "trainer.task",
        (),
        job_dir,
        policy,
        training_input={
            "scaleTier": "CUSTOM",
            **types,
            "parameterServerType": "n1-standard-4",
            **counts,
            "pythonModule": "trainer.task",
            "args": [],
            "jobDir": job_dir,
        },
        counts={Role.PS: 1, Role.MASTER: 1, Role.WORKER: 2, Role.EVALUATOR: 1},
    )
    assert (job.priority, job.use_chief, job.start_hosts) == (0, True, False)


def test_configs_own_values_are_used(inventory: Inventory, tmp_path: Path) -> None:
    text = "jobId: mine\ntrainingInput: {startHosts: true, args: [--x], pythonModule: other.task, jobDir: /bucket/there}"
    files = {f"other/{FILE}": b"gracePeriod: 7", f"mine/{FILE}": b"gracePeriod: 8", "mine/task.py": b"'--job_dir'"}
    flags = JobFlags(config=write_config(tmp_path, text))
    job = build_job(flags, inventory, "mine", files)
    assert (job.id, job.start_hosts, job.module, job.notes) == ("mine", True, "other.task", ())
    assert (job.args, job.job_dir, job.job_dir_flag) == (("--x", "--job_dir", "/bucket/there"), "/bucket/there", None)
    assert job.policy["gracePeriod"] == 7, "the module's package declares it"
    job = build_job(replace(flags, start_hosts=True, priority="-2"), inventory, "mine", {})
    assert (job.start_hosts, job.priority) == (True, -2)
    assert not build_job(JobFlags("j"), inventory).start_hosts
    assert build_job(JobFlags("j", start_hosts=True), inventory).start_hosts
    with pytest.raises(UsageError, match=r"^--priority 'x' is no whole number: 0 is the default, and the highest comes first$"):
        build_job(replace(flags, priority="x"), inventory)
    with pytest.raises(UsageError, match="an argument of the trainer holds a NUL character, which no program can receive"):
        build_job(JobFlags("j", more_args=["a\0b"]), inventory)
    with pytest.raises(UsageError, match=f"^{tmp_path} cannot be read: "):
        build_job(JobFlags("j", config=str(tmp_path)), inventory)


@pytest.mark.parametrize(
    ("job_dir", "bucket", "message"),
    [
        ("/bucket/a/b", "/bucket", None),
        ("/bucket/database", "/bucket", None),
        ("/bucket/jobs/data", "/bucket", "is where the bucket keeps other things"),
        ("/bucket/jobs/data/output/x", "/bucket", None),
        ("/bucket/jobs/1/output", "/bucket", "is where the bucket keeps other things"),
        ("/bucket/jobs/data/logs", "/bucket", "is where the bucket keeps other things"),
        ("gs://b/jobs", "gs://b", "is where the bucket keeps other things"),
        ("/bucket/./data/x", "/bucket", "is where the bucket keeps other things"),
        ("/bucket/", "/bucket", "is not in the bucket: take a path below /bucket/, such as /bucket/d"),
        ("gs://b/", "gs://b", "is not in the bucket"),
        ("/bucket/a:b", "/bucket", "has :, which no folder of a job may have: take a path such as /bucket/d"),
        ("gs://b/a:b", "gs://b", None),
        ("/bucket//data/x", "/bucket", "is where the bucket keeps other things: take a path such as /bucket/d"),
        ("/bucket/models", "/bucket", "is where the bucket keeps other things"),
        ("/bucket", "/bucket", "is not in the bucket: take a path below /bucket/, such as /bucket/d"),
        ("/buckets/x", "/bucket", "is not in the bucket"),
        ("/bucket/a/..", "/bucket", "is not in the bucket"),
        ("/bucket/a\nb", "/bucket", "is not in the bucket"),
        ("gs://other/x", "/bucket", "cannot be reached: local hosts have no way out; take a path below /bucket/"),
        ("gs://b/x", "gs://b", None),
        ("gs://other/x", "gs://b", None),
        ("gs://other/a\nb", "gs://b", "is not in the bucket"),
        ("/tmp/x", "gs://b", "is not in the bucket"),
        ("gs://b/cluster/x", "gs://b", "is where the bucket keeps other things"),
    ],
)
def test_a_job_dir_is_in_the_bucket_or_at_an_url(job_dir: str, bucket: str, message: str | None) -> None:
    if message is None:
        assert check_job_dir(job_dir, bucket, f"{bucket}/d") == job_dir
        return
    with pytest.raises(UsageError, match=re.escape(f"jobDir {job_dir!r} {message}")):
        check_job_dir(job_dir, bucket, f"{bucket}/d")


def test_a_job_dir_is_recorded_in_its_plain_form(inventory: Inventory) -> None:
    job = build_job(JobFlags("job01", job_dir="/bucket/./a//b/"), inventory)
    assert (job.job_dir, job.training_input["jobDir"]) == ("/bucket/a/b", "/bucket/a/b")
    assert check_job_dir("gs://b//a/", "gs://b", "gs://b/d") == "gs://b/a"


def test_the_id_of_the_job_is_part_of_a_job_dir(inventory: Inventory, tmp_path: Path) -> None:
    config = write_config(tmp_path, "trainingInput: {jobDir: '/bucket/runs/${JOB_ID}'}")
    job = build_job(JobFlags("job01", config=config), inventory)
    assert job.job_dir == job.training_input["jobDir"] == "/bucket/runs/job01"
    assert plan(inventory, job, "").tasks["master-0"].environment["JOB_DIR"] == "/bucket/runs/job01"
    for name in ("JOBID", "JOB_DIR"):
        with pytest.raises(
            UsageError, match=rf"--job-dir '/bucket/\$\{{{name}\}}' has \$\{{{name}\}}, which is not filled in: "
        ):
            build_job(JobFlags("job01", job_dir=f"/bucket/${{{name}}}"), inventory)


def test_the_original_tutorials_config(standard: Inventory, tmp_path: Path) -> None:
    job = build_job(JobFlags("mnist_distributed_ann", config=write_config(tmp_path, SEED)), standard)
    assert job.training_input["scaleTier"] == "STANDARD_1"


def test_flags_override_config(standard: Inventory, tmp_path: Path) -> None:
    text = """
labels: {owner: ann}
trainingInput:
  scaleTier: standard-1
  pythonModule: trainer.other
  args: [--max-steps, 100, "a b"]
  labels: {run: "1", owner: bob}
  region: us-central1
  runtimeVersion: 1.2
  useChiefInTfConfig: false
  scheduling: {maxRestarts: 2, lostAfterSeconds: 9.5, heartbeatSeconds: 3}
"""
    flags = JobFlags(
        "j", "m.n", write_config(tmp_path, text), "--model 'c n'", ["--", "x y"], ["run=2,empty="], "/bucket/elsewhere"
    )
    job = build_job(flags, standard)
    assert job.module == "m.n"
    assert job.args == ("--model", "c n", "--", "x y", "--job-dir", "/bucket/elsewhere")
    from_config = build_job(replace(flags, args=None, more_args=()), standard)
    assert from_config.notes == job.notes[:2]
    assert from_config.args == ("--max-steps", "100", "a b", "--job-dir", "/bucket/elsewhere")
    with_strategy = build_job(replace(flags, args=None, more_args=(), strategy="sync"), standard)
    assert with_strategy.args == ("--max-steps", "100", "a b", "--strategy", "sync", "--job-dir", "/bucket/elsewhere")
    assert job.labels == {"owner": "ann", "run": "2", "empty": ""}
    assert not job.use_chief
    assert (job.policy["maxRestarts"], job.policy["lostAfterSeconds"]) == (2, 9.5)
    assert job.notes == (
        f"region in {tmp_path}/config.yaml: ignored, the stack defines region and Python",
        f"runtimeVersion in {tmp_path}/config.yaml: ignored, no current Python has TensorFlow 1; TensorFlow 2 has tf.compat.v1",
        f"args in {tmp_path}/config.yaml: ignored, the command line has others",
    )


def test_a_custom_tier_that_matches_the_stack_is_accepted(inventory: Inventory, tmp_path: Path) -> None:
    text = """
trainingInput: {scaleTier: CUSTOM, masterType: n1-highcpu-8, workerType: n1-highcpu-8, workerCount: "2",
  parameterServerType: n1-standard-4, parameterServerCount: 1}
"""
    assert build_job(JobFlags("j", config=write_config(tmp_path, text)), inventory).training_input["workerCount"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainingInput: {scaleTier: PREMIUM_1}", "trainingInput.scaleTier PREMIUM_1 needs 11 ps, and stack test (STANDARD_1) "
         "has 1: run pulumi config set scaleTier PREMIUM_1 && pulumi up, or take no more than it has"),
        ("trainingInput: {scaleTier: HUGE}", "trainingInput.scaleTier 'HUGE' is unknown; valid are BASIC, STANDARD_1"),
        ("trainingInput: {scaleTier: STANDARD_1, workerCount: 4}", "trainingInput.workerCount goes with scaleTier CUSTOM only"),
        ("trainingInput: {workerCount: 4}", "trainingInput.workerCount needs 4 workers, and stack test (STANDARD_1) has 2: "
         "take no more than it has"),
        ("trainingInput: {arg: []}",
         "config.yaml: trainingInput.arg is unknown; did you mean args?; valid are scaleTier, masterType"),
        ("training_input: {}",
         "config.yaml: training_input is unknown; did you mean trainingInput?; valid are jobId, labels, notify, trainingInput"),
        ("trainingInput: {scheduling: {maxRetry: 1}}",
         "trainingInput.scheduling.maxRetry is unknown; did you mean maxRetries?; valid are maxRestarts"),
        ("trainingInput: {scheduling: {maxRetries: -1}}", "maxRetries must be at least 0, not -1"),
        ("trainingInput: {scheduling: {stopSeconds: .inf}}",
         "must be a number of seconds above 0, such as 3600 or 3600s, not inf"),
        ("trainingInput: {scheduling: {maxRunningTime: 2h}}",
         "scheduling.maxRunningTime must be a number of seconds above 0, such as 3600 or 3600s, not '2h'"),
        ("trainingInput: {scheduling: {maxWaitTime: 0s}}", "scheduling.maxWaitTime must be a number of seconds above 0"),
        ("trainingInput: {scheduling: {logLimit: 10kB}}",
         "scheduling.logLimit must be a size of 1 MB at least, such as 500MB, 2GB or 2000000000 for bytes, not '10kB'"),
        ("trainingInput: {scheduling: {logLimit: true}}", "scheduling.logLimit must be a size of 1 MB at least"),
        ("trainingInput: {scheduling: {logLimit: 999999}}", "scheduling.logLimit must be a size of 1 MB at least"),
        ("trainingInput: {scheduling: {logLimit: 0.9 MB}}", "scheduling.logLimit must be a size of 1 MB at least"),
        ("trainingInput: {scheduling: {logLimit: 1e9}}", "scheduling.logLimit must be a size of 1 MB at least"),
        ("trainingInput: {scheduling: {stallTimeout: true}}", "scheduling.stallTimeout must be a number of seconds above 0"),
        ("trainingInput: {scheduling: {lostForGoodSeconds: 9}}", "scheduling.lostForGoodSeconds is unknown; valid are"),
        ("trainingInput: {scheduling: {priority: 1.5}}", "scheduling.priority must be a whole number, not 1.5"),
        ("trainingInput: {scheduling: {restartPolicy: never}}",
         "scheduling.restartPolicy 'never' is unknown; valid are replica, all"),
        ("trainingInput: {scheduling: {optionalRoles: worker}}",
         "scheduling.optionalRoles must be a list such as [worker], not 'worker'"),
        ("trainingInput: {scheduling: {optionalRoles: [ps, master]}}",
         "scheduling.optionalRoles[1] 'master' is unknown; valid are worker, ps, evaluator"),
        ("trainingInput: {args: --steps 1}", "trainingInput.args must be a list such as [--steps, 1], not '--steps 1'"),
        ("trainingInput: {args: --x 'a b'}", "trainingInput.args must be a list such as [--x, 'a b'], not"),
        ("trainingInput: {args: [true]}", "trainingInput.args[0] must be a string, not True: quote it"),
        ("trainingInput: {useChiefInTfConfig: 1}", "must be true or false, not 1"),
        ("trainingInput: {labels: {A: b}}", "label A=b breaks the rule"),
        ("trainingInput: {labels: x}", "must be a mapping"),
        ("trainingInput: {packageUris: [x]}", "packageUris is not supported: fab train builds the package itself"),
        ("trainingInput: {masterConfig: {imageUri: x}}", "masterConfig is not supported: pulumi config set acceleratorType"),
        ("trainingInput: {workerConfig: {}}", "gives hosts GPUs, and runtime a job its packages, instead of an image"),
        ("trainingInput: {parameterServerConfig: {}}", "trainingInput.parameterServerConfig is not supported: pulumi"),
        ("trainingInput: {evaluatorConfig: {}}", "trainingInput.evaluatorConfig is not supported: pulumi config set"),
        ("trainingInput: {network: n}", "network is not supported: hosts have a network of their own, or that"),
        ("trainingInput: {serviceAccount: a}", "serviceAccount is not supported: each role has an account, or that"),
        ("trainingInput: {encryptionConfig: {}}", "encryptionConfig is not supported: Google encrypts disks and bucket"),
        ("trainingInput: {enableWebAccess: true}", "enableWebAccess is not supported: fab shell HOST opens a shell"),
        ("trainingInput: {jobDir: /tmp/x}", "jobDir '/tmp/x' is not in the bucket: take a path below /bucket/"),
        ("trainingInput: {jobDir: 5}", "config.yaml: trainingInput.jobDir '5' is not in the bucket: take a path below"),
        ("trainingInput: {jobDir: /bucket/../etc}", "is not in the bucket"),
        ("trainingInput: {jobDir: /bucket/data/mnist}", "is where the bucket keeps other things: take a path such as"),
        ("trainingInput: []", "trainingInput is not a mapping"),
        ("- a", "config.yaml is not a mapping"),
        ("a: [", "config.yaml:1 is not YAML"),
        ("a: 2021-13-45", "config.yaml cannot be read: month must be in 1..12"),
        ("trainingInput: {region: [x], workerCount: -1}", "trainingInput.workerCount must be at least 0, not -1; "),
        ("trainingInput: {region: [x], workerCount: -1}", "config.yaml: trainingInput.region must be a string, not ['x']"),
        ("jobId: other", "is for job 'other', the command line says 'job01'"),
    ],
)  # fmt: skip
def test_an_error_names_the_full_path_of_the_key(standard: Inventory, tmp_path: Path, text: str, message: str) -> None:
    assert message in config_error(standard, tmp_path, text)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("jobId: job01\ntrainingInput:\n  scheduling: {}\n  scheduling: {}\n", "4: trainingInput.scheduling"),
        ("jobId: job01\n'jobId': job01\n", "2: jobId"),
        ("trainingInput:\n  hyperparameters:\n    params:\n    - {type: DOUBLE, type: INTEGER}\n",
         "4: trainingInput.hyperparameters.params[0].type"),
        ('labels: {"a\\nb": x, "a\\nb": x}', "1: labels.'a\\nb'"),
    ],
)  # fmt: skip
def test_a_key_given_twice_is_refused(standard: Inventory, tmp_path: Path, text: str, place: str) -> None:
    assert config_error(standard, tmp_path, text).endswith(f"config.yaml:{place} is invalid: it is given twice. Valid: once")


def test_aliases_and_merged_keys_are_no_keys_given_twice() -> None:
    text = b"a: &a {x: 1, y: 2}\nb: {<<: *a, <<: *a, x: 3}\nc: [*a, *a, &c [*c]]\n1: 2\n'1': 3\n"
    value = read_yaml(text, "x.yaml")
    assert (value["b"], value["c"][:2], value[1], value["1"]) == ({"x": 3, "y": 2}, [value["a"]] * 2, 2, 3)
    assert read_yaml(b"# nothing\n", "x.yaml") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainingInput: {scaleTier: CUSTOM}", "masterType is missing: scaleTier CUSTOM needs it, stack test has n1-highcpu-8"),
        ("trainingInput: {scaleTier: CUSTOM, masterType: n1-highcpu-8, workerCount: 3}",
         "workerCount needs 3 workers, and stack test (CUSTOM) has 2: run pulumi config set workerCount 3 && pulumi up,"),
        ("trainingInput: {workerType: n1-highmem-8}", "workerType is n1-highmem-8, but stack test has n1-highcpu-8"),
        ("trainingInput: {scaleTier: STANDARD_1}", "run pulumi config set scaleTier STANDARD_1 && pulumi up"),
    ],
)  # fmt: skip
def test_a_custom_tier_that_differs_from_the_stack_is_refused(
    inventory: Inventory, tmp_path: Path, text: str, message: str
) -> None:
    assert message in config_error(inventory, tmp_path, text)


@pytest.mark.parametrize(
    ("code", "args", "passed"),
    [
        (b"p.add_argument('--job-dir')", [], ["--job-dir", "/bucket/jobs/j/output"]),
        (b'p.add_argument("--job_dir")', [], ["--job_dir", "/bucket/jobs/j/output"]),
        (b"flags.DEFINE_string(\n    'job_dir', '', '')", [], ["--job_dir", "/bucket/jobs/j/output"]),
        (b"p.add_argument('--job-dir', '--job_dir')", [], ["--job-dir", "/bucket/jobs/j/output"]),
        (b"p.add_argument('--job-directory')", [], []),
        (b"os.environ['JOB_DIR']", [], []),
        (b"p.add_argument('--job-dir')", ["--job-dir=/x"], []),
        (b"p.add_argument('--job-dir')", ["--output-dir", "/x"], []),
    ],
)
def test_job_dir_is_passed_to_a_trainer_with_that_flag(
    inventory: Inventory, code: bytes, args: list[str], passed: list[str]
) -> None:
    files = {"mine/__init__.py": b"", "mine/task.py": code, "mine/notes.txt": b"'--job-dir'"}
    job = build_job(JobFlags("j", more_args=args), inventory, "mine", files)
    assert (job.args, plan(inventory, job, "").args) == (tuple(args), [*args, *passed])
    without = build_job(JobFlags("j", more_args=args), inventory, "mine", files | {f"mine/{FILE}": b"passJobDir: false"})
    assert plan(inventory, without, "").args == args


def test_a_given_job_dir_is_always_passed(inventory: Inventory) -> None:
    files = {"mine/task.py": b"p.add_argument('--job_dir')"}
    flags = JobFlags("j", job_dir="/bucket/there")
    for files_of_package, flag in ((files, "--job_dir"), ({}, "--job-dir")):
        job = build_job(flags, inventory, "mine", files_of_package)
        assert list(job.args) == plan(inventory, job, "").args == [flag, "/bucket/there"]


def test_the_environment_merges_config_file_and_flags(inventory: Inventory, tmp_path: Path) -> None:
    path = write_config(tmp_path, "trainingInput: {environment: {A: one, B: 2, C: x}}")
    (tmp_path / "vars").write_text("B=from the file\n  # no\n\nC=c=c\n")
    job = build_job(JobFlags("j", config=path, env_file=str(tmp_path / "vars"), env=["C=", "_d=1"]), inventory)
    assert job.environment == {"A": "one", "B": "from the file", "C": "", "_d": "1"}
    assert job.training_input["environment"] == job.environment


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": ["A"]}, "--env 'A' is not of the form NAME=VALUE"),
        ({"env": ["1A=x"]}, "--env: '1A' is no name of a variable"),
        ({"env": ["=x"]}, "--env: '' is no name of a variable"),
        ({"env": ["TF_CONFIG={}"]}, "--env: TF_CONFIG is set by the cluster, and cannot be changed"),
        ({"env": ["CLOUD_ML_JOB={}"]}, "--env: CLOUD_ML_JOB is set by the cluster, and cannot be changed"),
        ({"env": ["CLOUD_ML_JOB_ID=x"]}, "--env: CLOUD_ML_JOB_ID is set by the cluster, and cannot be changed"),
        ({"env": ["A=\0"]}, "the environment's A holds a NUL character"),
        ({"env": [f"A={'é' * 65_536}"]}, "the environment's A is invalid: it has 131,074 bytes. Valid: 131,071 at most; put "),
        ({"more_args": ["x" * 131_072]}, "an argument of the trainer is invalid: it has 131,072 bytes. Valid: 131,071 "),
        ({"env_file": "nowhere"}, "--env-file nowhere cannot be read: No such file"),
        ({"secret": ["SURELY_NOT_SET"]}, "--secret SURELY_NOT_SET is not set in this shell: export SURELY_NOT_SET=…"),
        ({"secret": ["TOKEN=hunter2"]}, "--secret takes the NAME of a variable of this shell, and no value: --secret TOKEN"),
        ({"secret": ["RANK"]}, "--secret: RANK is set by the cluster"),
        ({"secret_file": "nowhere"}, "--secret-file nowhere cannot be read"),
        ({"secret": ["HOME"], "env": ["HOME=/x"]}, "HOME is both a secret and a recorded variable"),
    ],
)
def test_an_invalid_environment_is_refused(inventory: Inventory, changes: dict[str, list[str]], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        build_job(JobFlags("j", **changes), inventory)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[A]", "trainingInput.environment must be a mapping of names, not ['A']"),
        ("{A: [1]}", "trainingInput.environment.A must be a string, not [1]"),
        ("{A: true}", "trainingInput.environment.A must be a string, not True: quote it"),
        ("{a b: x}", "trainingInput.environment: 'a b' is no name of a variable"),
    ],
)
def test_an_invalid_environment_in_config_is_refused(inventory: Inventory, tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        build_job(JobFlags("j", config=write_config(tmp_path, f"trainingInput: {{environment: {text}}}")), inventory)


@pytest.mark.parametrize("line", ["hunter2", "hunter2=", "TOKEN=", "TOKEN=a\0b", "hun/ter=2"])
def test_an_error_about_secrets_never_shows_a_value(inventory: Inventory, tmp_path: Path, line: str) -> None:
    (tmp_path / "secrets").write_text(f"{line}\n")
    with pytest.raises(UsageError) as error:
        build_job(JobFlags("j", secret_file=str(tmp_path / "secrets")), inventory)
    assert line.partition("=")[0] not in str(error.value)
    with pytest.raises(UsageError) as error:
        build_job(JobFlags("j", secret=["TOKEN=hunter2"]), inventory)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("disabled", [False, True])
def test_a_resumed_job_gets_its_job_dir_like_any_other(inventory: Inventory, disabled: bool) -> None:
    files = {"mine/task.py": b"p.add_argument('--job_dir')", f"mine/{FILE}": b"passJobDir: false" if disabled else b""}
    for files_of_package, passed in ((files, [] if disabled else ["--job_dir", "/bucket/there"]), ({"mine/task.py": b""}, [])):
        job = build_job(JobFlags("j", job_dir="/bucket/there", resume="old"), inventory, "mine", files_of_package)
        assert (job.job_dir, plan(inventory, job, "").args) == ("/bucket/there", passed)


def test_only_line_ends_separate_the_lines_of_an_env_file(inventory: Inventory, tmp_path: Path) -> None:
    (tmp_path / "vars").write_bytes("A=x\fB=z\v\x85\u2028C=1\r\nD=2\n".encode())
    variables = build_job(JobFlags("j", env_file=str(tmp_path / "vars")), inventory).training_input["environment"]
    assert variables == {"A": "x\fB=z\v\x85\u2028C=1", "D": "2"}


def test_quotes_of_an_env_file_are_noted(inventory: Inventory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "vars").write_text("A=\"a b\"\nB=it's\nC='c'\nD=\"\n")
    job = build_job(JobFlags("j", env_file=str(tmp_path / "vars")), inventory)
    assert job.environment == {"A": '"a b"', "B": "it's", "C": "'c'", "D": '"'}
    assert "vars: the quotes in line 1, 3 are part of the value, as with docker run" in capsys.readouterr().err


def test_an_env_files_error_names_the_line(inventory: Inventory, tmp_path: Path) -> None:
    (tmp_path / "vars").write_text("A=1\nexport B=2\n")
    with pytest.raises(UsageError, match=r"--env-file .*vars:2: 'export B' is no name of a variable"):
        build_job(JobFlags("j", env_file=str(tmp_path / "vars")), inventory)


def test_the_strategy_flag_is_after_configs_args_and_before_typed_ones(inventory: Inventory, tmp_path: Path) -> None:
    flags = JobFlags("j", None, write_config(tmp_path, "trainingInput: {args: [--strategy, async]}"), strategy="any")
    job = build_job(flags, inventory)
    assert job.args == ("--strategy", "async", "--strategy", "any")
    assert job.training_input["args"] == list(job.args)
    assert build_job(replace(flags, args="--max-steps 9"), inventory).args == ("--strategy", "any", "--max-steps", "9")


DEFAULT_POLICY = {"restartCodes": [42], "gracePeriod": 30.0}


@pytest.mark.parametrize(
    ("strategy", "args", "policy", "optional"),
    [
        (None, [], "replica", ("worker", "evaluator")),
        ("together", [], "all", ("ps",)),
        (None, ["--strategy=together"], "all", ("ps",)),
        ("together", ["--strategy", "alone"], "replica", ("worker", "evaluator")),
    ],
)
def test_the_strategy_sets_the_restart_policy_and_optional_roles(
    inventory: Inventory, strategy: str | None, args: list[str], policy: str, optional: tuple[str, ...]
) -> None:
    job = build_job(JobFlags("j", more_args=args, strategy=strategy), inventory, "mine", DECLARES)
    assert (job.policy["restartPolicy"], tuple(job.policy["optionalRoles"])) == (policy, tuple(optional))
    assert job.policy == {"restartPolicy": policy, "optionalRoles": list(optional), **DEFAULT_POLICY}
    assert job.declared == read(DECLARES, "mine")


def test_config_overrides_the_packages_declaration(inventory: Inventory, tmp_path: Path) -> None:
    text = """
trainingInput: {scheduling: {restartPolicy: replica, optionalRoles: [worker], maxWaitTime: 3600s, maxRunningTime: 86400.5s,
  stallTimeout: 90, maxRestarts: 2, logLimit: 1.5 GB, priority: -3}}
"""
    job = build_job(JobFlags("j", config=write_config(tmp_path, text), strategy="together"), inventory, "mine", DECLARES)
    limits = {"maxWaitTime": 3600, "maxRunningTime": 86400.5, "stallTimeout": 90, "maxRestarts": 2, "logLimit": 1_500_000_000}
    assert job.policy == {"restartPolicy": "replica", "optionalRoles": ["worker"], **limits, **DEFAULT_POLICY}
    assert job.priority == -3
    assert job.policy.keys() <= {item.name for item in fields(records.Plan)}


def test_by_default_only_the_evaluator_is_optional(inventory: Inventory) -> None:
    job = build_job(JobFlags("j"), inventory)
    assert (job.policy, job.priority) == ({"restartPolicy": "replica", "optionalRoles": ["evaluator"], **DEFAULT_POLICY}, 0)


def declaring_files(exits: str) -> dict[str, bytes]:
    return {"mine/scaletier.yaml": exits.encode(), "mine/task.py": b""}


def test_exit_rules_come_from_config_then_strategy_then_package(inventory: Inventory, tmp_path: Path) -> None:
    files = declaring_files(
        "{gracePeriod: 5, restartCodes: [7, 8], restartPolicy: all, optionalRoles: [ps], strategies: {one: {gracePeriod: 60s}}}"
    )
    plain = build_job(JobFlags("j"), inventory, "mine", files).policy
    assert plain == {"gracePeriod": 5, "restartCodes": [7, 8], "restartPolicy": "all", "optionalRoles": ["ps"]}
    one = build_job(JobFlags("j", strategy="one"), inventory, "mine", files).policy
    assert one == {**plain, "gracePeriod": 60}
    text = "trainingInput: {scheduling: {permanentCodes: [8, 42], gracePeriod: 0, successPolicy: all}}"
    merged = build_job(JobFlags("j", strategy="one", config=write_config(tmp_path, text)), inventory, "mine", files).policy
    assert (merged["gracePeriod"], merged["restartCodes"], merged["permanentCodes"]) == (0, [7], [8, 42])
    assert merged["successPolicy"] == "all"
    assert merged.keys() <= {item.name for item in fields(records.Plan)}
    assert build_job(JobFlags("j", config=write_config(tmp_path, text)), inventory).policy["restartCodes"] == []


@pytest.mark.parametrize(
    ("scheduling", "exits", "message"),
    [
        (
            "restartCodes: [256]",
            "",
            "restartCodes[0] 256 is invalid: it is no exit code. Valid: whole numbers from 1 to 255, as a shell gives them",
        ),
        ("restartCodes: [7, -1]", "", "restartCodes[1] -1 is invalid: it is no exit code. Valid: whole numbers from 1 to 255"),
        ("permanentCodes: [0]", "", "permanentCodes[0] 0 is invalid: 0 is success. Valid: whole numbers from 1 to 255"),
        ("permanentCodes: [true]", "", "permanentCodes[0] True is invalid: it is no exit code. Valid: "),
        ("permanentCodes: [false]", "", "permanentCodes[0] False is invalid: it is no exit code. Valid: "),
        ("restartCodes: ['42']", "", "restartCodes[0] '42' is invalid: it is no exit code. Valid: "),
        ("restartCodes: 42", "", "restartCodes must be a list such as [42], not 42"),
        ("{restartCodes: [7, 42], permanentCodes: [42]}", "", ": 42 is in restartCodes and in permanentCodes. Valid: one of"),
        ("gracePeriod: -1", "", "gracePeriod -1 is invalid: it is no number of seconds. Valid: 0 and above, such as 30 or 30s"),
        ("gracePeriod: 5m", "", "gracePeriod '5m' is invalid: it is no number of seconds. Valid: 0 and above"),
        ("gracePeriod: true", "", "gracePeriod True is invalid: it is no number of seconds. Valid: 0 and above"),
        ("successPolicy: most", "", "successPolicy 'most' is unknown; valid are chief, all"),
        ("stopSignal: TERM", "", "stopSignal 'TERM' is unknown; valid are main, all"),
        (
            "{successPolicy: all, optionalRoles: [worker]}",
            "",
            "successPolicy 'all' is invalid: optionalRoles has worker. Valid: chief, or optionalRoles without worker and ",
        ),
        (
            "{successPolicy: all, optionalRoles: [ps, evaluator, worker]}",
            "",
            "successPolicy 'all' is invalid: optionalRoles has worker and evaluator. Valid: chief, or optionalRoles without",
        ),
        (
            "successPolicy: all",
            "{strategy: a, strategies: {a: {optionalRoles: [ps, evaluator]}}}",
            "successPolicy 'all' is invalid: optionalRoles has evaluator. Valid: chief, or optionalRoles without",
        ),
        (
            "successPolicy: all",
            "successPolicy: chief",
            "successPolicy 'all' is invalid: this trainer's other replicas have no end of their own. Valid: chief",
        ),
    ],
)
def test_an_invalid_exit_rule_is_one_line(
    inventory: Inventory, tmp_path: Path, scheduling: str, exits: str, message: str
) -> None:
    text = f"trainingInput: {{scheduling: {scheduling if scheduling[0] == '{' else f'{{{scheduling}}}'}}}"
    path = write_config(tmp_path, text)
    with pytest.raises(UsageError) as error:
        build_job(JobFlags("j", config=path), inventory, "mine", declaring_files(exits))
    error_text = str(error.value)
    assert error_text.startswith(f"{path}: trainingInput.scheduling")
    assert message in error_text
    assert "\n" not in error_text


@pytest.mark.parametrize(
    ("scheduling", "poll_seconds", "message"),
    [
        ("{lostAfterSeconds: 12.5}", 1, ""),
        ("{lostAfterSeconds: 12.4}", 1, "lostAfterSeconds 12.4 is invalid: heartbeatSeconds is 5. Valid: 12.5 and above"),
        ("{lostAfterSeconds: 20}", 4, "lostAfterSeconds 20 is invalid: heartbeatSeconds is 10. Valid: 25 and above"),
        ("{lostAfterSeconds: 10, heartbeatSeconds: 2}", 4, ""),
        ("{heartbeatSeconds: 24}", 1, ""),
        ("{heartbeatSeconds: 100}", 1, "heartbeatSeconds 100 is invalid: lostAfterSeconds is 60. Valid: 24 and below"),
        ("{heartbeatSeconds: 100s, lostAfterSeconds: 60s}", 1,
         "lostAfterSeconds 60 is invalid: heartbeatSeconds is 100. Valid: 250 and above"),
    ],
)  # fmt: skip
def test_a_host_is_not_lost_before_it_is_late(
    inventory: Inventory, tmp_path: Path, scheduling: str, poll_seconds: float, message: str
) -> None:
    inventory = replace(inventory, poll_seconds=poll_seconds)
    text = f"trainingInput: {{scheduling: {scheduling}}}"
    if message:
        assert config_error(inventory, tmp_path, text) == f"config.yaml: trainingInput.scheduling.{message}"
    else:
        assert build_job(JobFlags("j", config=write_config(tmp_path, text)), inventory).policy


def test_a_package_with_an_invalid_success_policy_is_named(inventory: Inventory) -> None:
    files = declaring_files("{successPolicy: all, optionalRoles: [evaluator]}")
    with pytest.raises(
        UsageError, match=r"^mine/scaletier.yaml: successPolicy 'all' is invalid: optionalRoles has evaluator\. "
    ):
        build_job(JobFlags("j"), inventory, "mine", files)


@pytest.mark.parametrize(("chosen", "optional"), [("", []), (", optionalRoles: [ps]", ["ps"]), (", optionalRoles: []", [])])
def test_success_policy_all_waits_for_every_role_that_ends(
    inventory: Inventory, tmp_path: Path, chosen: str, optional: list[str]
) -> None:
    text = f"trainingInput: {{scheduling: {{successPolicy: all{chosen}}}}}"
    policy = build_job(JobFlags("j", config=write_config(tmp_path, text)), inventory).policy
    assert (policy["successPolicy"], policy["optionalRoles"]) == ("all", optional)


@pytest.mark.parametrize(
    "flags",
    [
        JobFlags("j", strategy="asink"),
        JobFlags("j", more_args=["--strategy=asink"]),
        JobFlags("j", more_args=["--strategy=alone"], strategy="asink"),
    ],
)
def test_an_undeclared_strategy_is_refused(inventory: Inventory, flags: JobFlags) -> None:
    with pytest.raises(UsageError, match=r"^--strategy 'asink' is unknown; valid are alone, together$"):
        build_job(flags, inventory, "mine", DECLARES)
    assert build_job(flags, inventory, "mine", {"mine/__init__.py": b""}).args


def test_a_strategy_needs_its_required_roles(inventory: Inventory) -> None:
    alone = replace(inventory, hosts=tuple(host for host in inventory.hosts if host.name == "master-0"))
    error_pattern = r"^--strategy together needs a worker, and stack test \(CUSTOM\) has none: "
    with pytest.raises(
        UsageError, match=error_pattern + "take --strategy alone, or run pulumi config set scaleTier STANDARD_1"
    ):
        build_job(JobFlags("j", strategy="together"), alone, "mine", DECLARES)
    only = {f"mine/{FILE}": b"{strategy: together, strategies: {together: {requiredRoles: [worker]}}}"}
    with pytest.raises(UsageError, match=error_pattern + "run pulumi config set scaleTier STANDARD_1"):
        build_job(JobFlags("j"), alone, "mine", only)
    other = {f"mine/{FILE}": b"{strategy: together, strategies: {together: {requiredRoles: [worker]}, alone: }}"}
    assert build_job(JobFlags("j", more_args=["--strategy=alone"]), alone, "mine", other).args
    assert build_job(JobFlags("j", strategy="alone"), alone, "mine", DECLARES).args == ("--strategy", "alone")


class Kinds(Section):
    """One key of each kind."""

    old_names: ClassVar[Mapping[str, str]] = {"many": "lots"}

    many: Count | None = None
    some: Positive | None = None
    sure: StrictBool | None = None


def test_kinds_of_values(capsys: pytest.CaptureFixture[str]) -> None:
    least = validate(Kinds, {"many": "0", "some": 1, "sure": False}, "x.yaml")
    assert least.given() == {"many": 0, "some": 1, "sure": False}
    for key, value, message in (
        ("many", -1, "must be at least 0, not -1"),
        ("some", 0, "must be at least 1, not 0"),
        ("some", True, "must be a number, not True"),
        ("sure", 1, "must be true or false, not 1"),
    ):
        with pytest.raises(UsageError, match=f"^x.yaml: {key} {message}"):
            validate(Kinds, {key: value}, "x.yaml")
        with pytest.raises(UsageError, match=f"^x.yaml: a.{key} {message}"):
            validate(Kinds, {key: value}, "x.yaml: a")
    assert validate(Kinds, {"lots": 2}, "x.yaml").many == 2
    assert capsys.readouterr().err == ""
    assert validate(Kinds, {"lots": 2}, "x.yaml", report_old_keys=True).many == 2
    note = "x.yaml: the key lots is called many now: rename it, as the next release reads that alone\n"
    assert capsys.readouterr().err == note


def test_the_valid_keys_of_a_job() -> None:
    assert TrainingInput.valid_keys() == list(TrainingInput.model_fields)
    assert not {*TrainingInput.unsupported} & {*TrainingInput.model_fields}


def test_reserved_names_and_spaces_in_files_of_variables(tmp_path: Path) -> None:
    (file := tmp_path / "vars").write_text(" A = b \nRANK=1\n")
    message = "RANK is set by the cluster, and cannot be changed; nor can TF_CONFIG, "
    with pytest.raises(UsageError, match=f"^--env-file {file}:2: {message}"):
        environment.merge_environment({}, str(file), [], "config.yaml")
    with pytest.raises(UsageError, match=f"^--secret-file {file}:2: {message}"):
        environment.read_secrets([], str(file), {})
    file.write_text("\ufeff A = b \n")
    assert environment.merge_environment({"A": "c"}, str(file), [], "config.yaml") == {"A": " b "}
    file.write_bytes(b"A=\xff")
    with pytest.raises(UsageError, match=f"^--env-file {file} cannot be read: it is no text$"):
        environment.merge_environment({}, str(file), [], "config.yaml")
    file.write_text("A=1\nexport B=2\n")
    with pytest.raises(
        UsageError, match=f"^--env-file {file}:2: 'export B' is no name of a variable: letters, digits and _, and"
    ):
        environment.merge_environment({}, str(file), [], "config.yaml")
    for value, problem in (("", "is empty, and NAME=VALUE is the form"), ("a\0b", "holds a NUL character")):
        with pytest.raises(UsageError, match=f"^a secret {problem}$"):
            environment.read_secrets(["TOKEN"], None, {"TOKEN": value})
    with pytest.raises(UsageError, match=r"^the environment's A holds a NUL character, which no program can receive$"):
        environment.merge_environment({"A": "\0"}, None, [], "config.yaml")


def test_the_variables_of_a_gpu_host(inventory: Inventory) -> None:
    host = replace(inventory.host("worker-1"), accelerator={"type": "nvidia-tesla-t4", "count": 2})
    hosts = tuple(host if each.name == host.name else each for each in inventory.hosts)
    variables = environment.task_variables(replace(inventory, hosts=hosts), host, "j", "/out", "/data")
    assert variables == {
        "TYPE": "worker",
        "INDEX": "1",
        "JOB_ID": "j",
        "CLOUD_ML_JOB_ID": "j",
        "JOB_DIR": "/out",
        "SCALETIER_DATA": "/data",
        "SCALETIER_ACCELERATOR": "2 nvidia-tesla-t4",
        "MASTER_ADDR": "10.0.0.2",
        "MASTER_PORT": "2222",
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "2",
        "JAX_COORDINATOR_ADDRESS": "10.0.0.2:2223",
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": "2",
    }


def test_a_study_keeps_the_trainers_exit_codes_alone() -> None:
    strategy = Strategy(optionalRoles=["ps"], restartPolicy="all", restartCodes=[7], stopSignal="all", gracePeriod=1)
    own = {"restartPolicy": "replica", "optionalRoles": ["worker"], "successPolicy": "chief", "gracePeriod": 30.0}
    assert policy({"priority": 1, "maxRestarts": 2}, strategy, Study([])) == {
        **own,
        "restartCodes": [7],
        "stopSignal": "all",
        "maxRestarts": 2,
    }
    assert policy({}, Strategy(), Study([])) == {**own, "restartCodes": [42]}
    with pytest.raises(
        UsageError, match=r"^scheduling.successPolicy 'all' is invalid: a trial's host may be lost\. Valid: chief$"
    ):
        policy({"successPolicy": "all"}, strategy, Study([]))


def test_a_missing_config_file_is_refused(inventory: Inventory) -> None:
    with pytest.raises(UsageError, match="there is no file nowhere"):
        build_job(JobFlags("j", config="nowhere.yaml"), inventory)


@pytest.mark.parametrize(("package", "prefix"), [("trainer", "trainer_"), ("9my-pkg", "my_pkg_"), ("_x", "x_"), ("é", "job_")])
def test_a_job_without_an_id_gets_one(inventory: Inventory, package: str, prefix: str) -> None:
    job = build_job(JobFlags(), inventory, package)
    assert re.fullmatch(rf"{prefix}20\d{{6}}_\d{{6}}_[0-9a-f]{{6}}", job.id)
    assert job.job_dir == f"/bucket/jobs/{job.id}/output"
    assert build_job(JobFlags(), inventory, package).id != job.id, "jobs may be started at the same time"


@pytest.mark.parametrize("job_id", ["", "1job", "job-1", "job 1", "job1\n", "jöb", "x" * 129, "../x"])
def test_an_invalid_job_id_is_refused(inventory: Inventory, job_id: str) -> None:
    with pytest.raises(UsageError, match="breaks the rule: a letter, then letters, digits and underscores"):
        build_job(JobFlags(job_id), inventory)


@pytest.mark.parametrize("text", ["owner", "=x", "Owner=x", "owner=X", "a=b,c"])
def test_invalid_labels_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--labels"):
        split_labels([text])


def test_args_with_an_open_quote_are_refused() -> None:
    with pytest.raises(UsageError, match="--args cannot be split"):
        split_args("--name 'x")


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_quoted_args_are_split_like_a_shell(args: list[str]) -> None:
    assert split_args(shlex.join(args)) == args


@pytest.mark.parametrize(("text", "message"), [("2.2", "2.2 or 2.20? YAML makes one number of both"), ("2.20", "2.2 or 2.20")])
def test_an_unquoted_runtime_version_is_refused(inventory: Inventory, tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        build_job(JobFlags("j", config=write_config(tmp_path, f"trainingInput: {{runtimeVersion: {text}}}")), inventory)


def test_every_flag_of_the_train_task_is_used() -> None:
    import inspect

    import fabfile

    own = {"_", "job", "package", "queue", "follow", "plain", "dry_run", "json"}
    parameters = set(inspect.signature(inspect.unwrap(fabfile.train.body)).parameters) - own
    assert parameters <= {item.name for item in fields(JobFlags)}
    assert JobFlags.of({"job": "j", "_": None, "env": None, "module": "m", "json": True}, ["x"]) == JobFlags(
        "j", "m", more_args=["x"]
    )


def test_notify_comes_from_flag_config_or_package(inventory: Inventory, tmp_path: Path) -> None:
    files = {f"mine/{FILE}": b"notify: ./declared.sh"}
    inner = write_config(tmp_path, "trainingInput: {notify: ./inner.sh}")
    assert build_job(JobFlags("job01"), inventory).notify == ""
    assert build_job(JobFlags("job01"), inventory, "mine", files).notify == "./declared.sh"
    assert build_job(JobFlags("job01", config=inner), inventory, "mine", files).notify == "./inner.sh"
    outer = write_config(tmp_path, "notify: http://example.com/secret\ntrainingInput: {notify: ./inner.sh}")
    job = build_job(JobFlags("job01", config=outer), inventory, "mine", files)
    assert job.notify == plan(inventory, job, "").notify == "http://example.com/secret"
    assert "secret" not in str(job.training_input)
    flags = JobFlags("job01", config=outer, notify="./flag.sh ${JOB_ID}")
    assert build_job(flags, inventory, "mine", files).notify == "./flag.sh ${JOB_ID}"


def test_a_notify_url_that_local_hosts_cannot_reach_is_noted(inventory: Inventory) -> None:
    def notes(target: str, bucket: str = inventory.bucket) -> tuple[str, ...]:
        return build_job(JobFlags("job01", notify=target), replace(inventory, bucket=bucket)).notes

    assert notes("https://example.com/hook/secret") == (
        "notify POST https://example.com/… will not arrive, as local hosts have no way out of the cluster: "
        "fab wait job01 --json | curl --json @- URL on this machine sends the same record",
    )
    inside = ("./done.sh", "http://localhost:8080/", "http://master-0:8080/", f"http://{inventory.hosts[0].address}/")
    assert [notes(target) for target in inside] == [()] * 4
    assert notes("https://example.com/hook", "gs://bucket") == ()


@pytest.mark.parametrize(
    ("args", "folder", "absent"),
    [
        (["--config", "here.yaml"], "mine", "here.yaml"),
        (["--config=mine/in.yaml", "--n=3", "-v"], "mine", "mine/in.yaml"),
        (["--config=in.yaml"], "mine", None),
        (["mine/in.yaml", "in.yaml"], "", None),
        (["--data-dir", "."], "", None),
        (["--data-dir", "set", "--model", "set", "here.yaml"], "", "set, here.yaml"),
        (["--data-dir=gone", "--out", "here.yaml", "-o", "here.yaml", "--save-to=here.yaml", "/etc/hostname"], "", None),
    ],
)
def test_arguments_that_name_files_of_this_machine_alone_are_noted(
    inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], folder: str, absent: str | None
) -> None:
    write_files(tmp_path, {"here.yaml": "", "set/a.csv": "", "mine/in.yaml": "", "mine/task.py": ""})
    monkeypatch.chdir(tmp_path)
    files, command = {"mine/task.py": b"", "mine/in.yaml": b""}, ("python", "task.py") if folder else ()
    notes = build_job(JobFlags("job01", more_args=args), inventory, "mine", files, command, folder).notes
    shown = [note.partition(", which exists on this machine alone: put files into the package, ")[0] for note in notes]
    assert shown == ([f"the arguments name {absent}"] if absent else [])


@pytest.mark.parametrize(
    ("notify", "folder", "missing"),
    [
        ("./done.sh ${JOB_ID}", "mine", None),
        ("./done.sh", "", "./done.sh"),
        ("./mine/done.sh", "", None),
        ("./gone.sh", "mine", "./gone.sh"),
        ("sh done.sh x.py", "mine", None),
        ("python tell.py", "mine", "tell.py"),
        ("sh -c 'curl x'", "mine", None),
        ("sh -c 'python hooks/end.py'", "mine", None),
        ("/usr/bin/env", "mine", None),
        ("$JOB_DIR/done.sh", "mine", None),
        ("http://master-0/x.py", "mine", None),
    ],
)
def test_a_notification_s_file_that_is_not_sent_is_noted(
    inventory: Inventory, notify: str, folder: str, missing: str | None
) -> None:
    command = ("python", "train.py") if folder else ()
    files = {"mine/done.sh": b"", "mine/train.py": b"", "mine/task.py": b""}
    job = build_job(JobFlags("job01", notify=notify), inventory, "mine", files, command, folder)
    where = "the folder mine" if folder else "the folder that has the package"
    note = f"notify will fail, as it runs in {where}, and no {missing} is sent there"
    assert job.notes == ((note,) if missing else ())


@pytest.mark.parametrize(
    ("notify", "note"),
    [
        ("./done.sh ${JOB_ID}", None),
        ("sh plain.sh", None),
        ("./plain.sh", "./plain.sh is not executable: chmod +x"),
        ("./windows.sh", "./windows.sh has the line ends of Windows, with which no host finds its program: dos2unix"),
        ("done.sh", "done.sh is no program that hosts have; did you mean ./done.sh?"),
        ("A=1 ./done.sh", "it begins with A=…, which only a shell reads: sh -c '…'"),
    ],
)
def test_a_notification_s_command_that_cannot_start_is_noted(inventory: Inventory, notify: str, note: str | None) -> None:
    files = {"mine/done.sh": b"#!/bin/sh\n", "mine/plain.sh": b"#!/bin/sh\n", "mine/windows.sh": b"#!/bin/sh\r\n"}
    executables = {"mine/done.sh", "mine/windows.sh"}
    job = build_job(JobFlags("job01", notify=notify), inventory, "mine", files, ("echo",), "mine", executables)
    assert job.notes == ((f"notify will fail, as {note}",) if note else ())


def test_a_variable_that_refers_to_itself_is_refused(inventory: Inventory) -> None:
    with pytest.raises(
        UsageError, match=r"^the environment's PATH has \$PATH, which no host fills in: write all of it, or set "
    ):
        build_job(JobFlags("job01", env=["PATH=$PATH:/x"]), inventory)
    values = {"A": "$AB", "B": "$$B", "C": "${JOB_DIR}/$JOB_ID"}
    assert build_job(JobFlags("job01", env=[f"{k}={v}" for k, v in values.items()]), inventory).environment == values


def test_a_program_of_ranks_on_other_hosts_is_noted(inventory: Inventory) -> None:
    def notes(source: bytes, replicas: str | None = None, command: tuple[str, ...] = ("python", "train.py")) -> tuple[str, ...]:
        return build_job(
            JobFlags("job01", replicas=replicas), inventory, "t", {"t/train.py": source, "t/b.py": b"x"}, command, "t"
        ).notes

    ddp, jax = b"import torch\ndist.init_process_group('gloo')\n", b"jax.distributed.initialize()"
    note = "{} needs a rank, which ps-0{} would run without: --replicas {} leaves them out"
    assert notes(ddp) == (note.format("init_process_group in t/train.py", ", evaluator-0", "worker=2"),)
    assert notes(jax, "ps", ("./run.sh",)) == (note.format("jax.distributed.initialize in t/train.py", "", "master"),)
    assert notes(b"import lightning as L\nL.Trainer()")[0].startswith("Trainer in t/train.py needs a rank")
    assert notes(b"x = 1  # not init_process_group()\nclass Accelerator(Base):\n    def init_process_group(self): ...") == ()
    assert notes(b"Trainer(Accelerators())") == ()
    reference = JobFlags("job01", more_args=["--rank=$RANK", "$TYPE"])
    assert build_job(reference, inventory, command=("torchrun",)).notes == (
        note.format("$RANK of the arguments", ", evaluator-0", "worker=2"),
    )
    assert notes(ddp, "worker") == notes(b"print('init_process_group')") == ()


@pytest.mark.parametrize(
    ("source", "command", "noted"),
    [
        ("model.save(os.environ['JOB_DIR'] + '/model.keras')", "", True),
        ("flags.add_argument('--job-dir')", "python train.py", True),
        ("x", "sh -c 'cat x >$JOB_DIR/y'", True),
        ("x", "sh -c 'cat x >$JOB_DIR/$INDEX'", False),
        ("x", "nvidia-smi", False),
        ("from t import aware\nsave('JOB_DIR')", "", False),
        ("import scaletier\nsave('JOB_DIR')", "", False),
        ("with tf.distribute.MirroredStrategy(): save('JOB_DIR')", "", False),
        ("save('JOB_DIR', os.environ['RANK'])", "python train.py", False),
        ("import pytorch_lightning as pl\nsave('JOB_DIR')", "python train.py", False),
        ("import sentence_transformers\nsave('JOB_DIR')", "python train.py", False),
        ("model = DistributedDataParallel(model)\nsave('JOB_DIR')", "python train.py", False),
        ("TFConfigClusterResolver()\nsave('JOB_DIR')", "python train.py", False),
        ("save('JOB_DIR')", "torchrun --nnodes=3 train.py", False),
        ("save('JOB_DIR')", "python -m train", True),
        ("x", "tune run --output $JOB_DIR", False),
    ],
)
def test_replicas_that_overwrite_one_anothers_output_are_noted(
    inventory: Inventory, source: str, command: str, noted: bool
) -> None:
    files = {"t/train.py": source.encode(), "t/README.md": b"TF_CONFIG"}
    files |= {"t/aware.py": b"os.environ['TF_CONFIG']"} if not command else {}

    def notes(replicas: str) -> tuple[str, ...]:
        flags = JobFlags("job01", replicas=replicas, module=None if command else "t.train")
        return build_job(flags, inventory, "t", files, shlex.split(command), "t").notes

    note = (
        "3 replicas run the same program, which reads none of TF_CONFIG, RANK and INDEX: each works alone, and of a file that "
    )
    note += "all write to JOB_DIR the last one stays: --replicas master takes one replica"
    assert notes("worker=2") == ((note,) if noted else ())
    assert notes("master") == ()


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("torchrun train.py", "torchrun"),
        ("python -m torch.distributed.run train.py", "torch.distributed.run"),
        ("accelerate launch --num-processes 3 train.py", "accelerate"),
        ("torchrun --nnodes=3 train.py", None),
        ("accelerate launch --num_machines 3 train.py", None),
        ("accelerate launch --config_file three.yaml train.py", None),
        ("python torchrun.py", None),
        ("python train.py --launcher torchrun", None),
    ],
)
def test_a_launcher_that_gives_each_host_a_training_is_noted(inventory: Inventory, command: str, launcher: str | None) -> None:
    def notes(replicas: str, *env: str) -> tuple[str, ...]:
        return build_job(JobFlags("job01", replicas=replicas, env=env), inventory, "t", {}, command.split(), "t").notes

    how = "a program that reads RANK needs none, as RANK and WORLD_SIZE are set"
    note = f"{launcher} on each of 3 hosts starts its own training, as it is given no number of hosts: {how}"
    assert notes("worker=2") == ((note,) if launcher else ())
    assert notes("master") == notes("worker=2", "PET_NNODES=3") == ()


@pytest.mark.parametrize(
    ("source", "noted"),
    [
        ("import lightning as L\nL.Trainer()", True),
        ("from pytorch_lightning import Trainer\nt = Trainer(devices=1)", True),
        ("from lightning.pytorch import Trainer\nt = Trainer(\n  devices=1, num_nodes=3)", False),
        ("import lightning\nclass Trainer(Base): pass\n# Trainer()", False),
        ("from transformers import Trainer\nTrainer()", False),
        ("import mylightning\nTrainer()", False),
    ],
)
def test_a_program_of_lightning_that_trains_alone_is_noted(inventory: Inventory, source: str, noted: bool) -> None:
    def notes(replicas: str, *args: str, config: bytes = b"") -> tuple[str, ...]:
        flags, files = JobFlags("job01", replicas=replicas, more_args=args), {"t/train.py": source.encode(), "t/a.yaml": config}
        return build_job(flags, inventory, "t", files, ("python", "train.py"), "t").notes

    how = 'Trainer(num_nodes=int(os.environ["WORLD_SIZE"])) makes them one training, --replicas master takes one'
    note = f"Trainer in t/train.py has no num_nodes, so each of 3 hosts trains alone: {how}"
    assert notes("worker=2") == ((note,) if noted else ())
    assert notes("master") == notes("worker=2", "--trainer.num_nodes=3") == notes("worker=2", config=b"num_nodes: 3") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("notify: 5", "config.yaml: notify 5 is invalid: it is not a string. Valid: an http or https URL, such as "),
        ("notify: {url: x}", "config.yaml: notify {'url… is invalid: it is not a string. Valid: "),
        (
            "notify: mail ann < x",
            "config.yaml: notify 'mail…' is invalid: it runs without a shell, and has a shell's <. ",
        ),
        ("notify: ''", "config.yaml: notify '' is invalid: it is empty. Valid: an http or https URL"),
        (
            "trainingInput: {notify: 'http://169.254.169.254/'}",
            "config.yaml: trainingInput.notify 'http://169.254.169.254/' is invalid: 169.254.169.254 is a link-local",
        ),
        *((f"notify: {each}${{JOBID}}", "notify has ${JOBID}, which no host fills in; did") for each in ("./a ", "http://a/")),
    ],
)
def test_an_invalid_notify_in_config_is_refused(inventory: Inventory, tmp_path: Path, text: str, message: str) -> None:
    assert config_error(inventory, tmp_path, text).startswith(message)


def test_an_invalid_notify_of_a_package_or_flag_is_refused(inventory: Inventory) -> None:
    with pytest.raises(UsageError, match=r"^mine/scaletier.yaml: notify 'ftp://x' is invalid: its scheme is ftp. Valid: "):
        build_job(JobFlags("job01"), inventory, "mine", {f"mine/{FILE}": b"notify: ftp://x"})
    with pytest.raises(UsageError, match=r"^--notify '' is invalid: it is empty. Valid: "):
        build_job(JobFlags("job01", notify=""), inventory)


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ("ftp://ann:hunter2@example.com/x", "'ftp:…'"),
        ("https://ann:hunter2@example.com/x", "'https:…'"),
        ("https://ann:hunter2/5@example.com", "'https:…'"),
        ("https://ann:[hunter2]@example.com", "'https:…'"),
        ("https://ann:hunter2@example.com:99999", "'https:…'"),
        ("https://ann:hunter2@exa℀mple.com", "'https:…'"),
        ("https://ann:a hunter2@example.com", "'https:…'"),
        (" https://ann:hunter2@example.com", "' https:…'"),
        ("https://example.com:hunter2", "'https://example.com…'"),
        ("http://169.254.169.254/hunter2", "'http://169.254.169.254/…'"),
        ("ann:hunter2@example.com", "'ann:…'"),
        ("curl -u ann:hunter2 example.com | jq", "'curl…'"),
        ("TOKEN=hunter2 ./done.sh | jq", "'TOKEN…'"),
        ("'curl hunter2", '"\'curl…"'),
        (["https://ann:hunter2@example.com"], "['https:…"),
    ],
)
def test_a_refused_notify_is_quoted_without_secrets(inventory: Inventory, tmp_path: Path, target: object, shown: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"notify": target}))
    sources = {"--notify": JobFlags("job01", notify=target)} if isinstance(target, str) else {}
    for where, flags in {**sources, "config.yaml: notify": JobFlags("job01", config=str(config))}.items():
        with pytest.raises(UsageError) as error:
            build_job(flags, inventory)
        message = str(error.value).removeprefix(f"{tmp_path}/")
        assert message.startswith(f"{where} {shown} is invalid: ")
        assert "hunter2" not in message


def test_numbers_where_strings_are_valid_are_as_they_are_written(tmp_path: Path, inventory: Inventory) -> None:
    """YAML makes 83 of 0123, and 750 of 12:30."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "trainingInput: {args: [--since, 12:30, 0123, 1.50, 1_000, -2, .inf, -.INF, .nan], environment: {ID: 007, RATE: 0.10}}"
    )
    job = build_job(JobFlags("job01", config=str(file)), inventory)
    assert job.args == ("--since", "12:30", "0123", "1.50", "1_000", "-2", "inf", "-inf", "nan")
    assert job.environment == {"ID": "007", "RATE": "0.10"}


def test_escapes_of_json_are_characters_of_arguments(tmp_path: Path, inventory: Inventory) -> None:
    """JSON is YAML, but has two escapes for one character beyond 16 bits."""
    file = tmp_path / "config.yaml"
    file.write_text(r'{"trainingInput": {"args": ["--name", "\ud83d\ude00"], "environment": {"A": "\ud83d\ude00"}}}')
    job = build_job(JobFlags("job01", config=str(file)), inventory, files={"trainer/task.py": b""})
    assert (job.args, job.environment) == (("--name", "😀"), {"A": "😀"})
