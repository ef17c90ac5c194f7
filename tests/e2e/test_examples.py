"""Trainers of every kind in examples/ on real hosts, and unsatisfiable dependencies."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from stacks import ROOT, Stack
from waiting import wait_for

from ops.package import hostpython

_TRAINERS = ("master-0", "worker-0", "worker-1")
_OTHERS = ("ps-0", "ps-1", "evaluator-0")
_VERSIONS = (
    "import importlib.metadata as m, json, re; "
    'print(json.dumps({re.sub("[-_.]+", "-", d.name).lower(): d.version for d in m.distributions()}))'
)


def run_example(cluster: Stack, job: str, example: str, *more: str) -> dict[str, list[str]]:
    """Run an example to its end; return each replica's lines."""
    cluster.must("train", "--job", job, "--package", f"examples/{example}", *more)
    return lines_of(cluster, job)


def change_example(folder: Path, example: str, file: str, old: str, new: str) -> Path:
    """Copy an example into a folder with one place of a file replaced; return the copy."""
    copy = folder / example
    shutil.copytree(ROOT / "examples" / example, copy, ignore=shutil.ignore_patterns("__pycache__"))
    program = (copy / file).read_text()
    assert program.count(old) == 1
    (copy / file).write_text(program.replace(old, new))
    return copy


def run_until(cluster: Stack, job: str, patterns: Mapping[str, str], *arguments: str) -> dict[str, list[str]]:
    """Run a changed example, which ends once JOB_DIR/enough exists, until each replica has logged a line of its pattern.

    Otherwise the faster replicas may end the job before a slow one has logged anything. Return each replica's lines.
    """
    cluster.must("train", "--job", job, "--no-follow", *arguments)

    def have_logged() -> bool:
        lines = cluster.messages(job)
        return all(any(re.match(pattern, line) for line in lines.get(name, [])) for name, pattern in patterns.items())

    wait_for(have_logged, f"lines of {job}: {patterns}", 300, poll=1)
    cluster.must_ssh("master-0", f"sudo touch /bucket/jobs/{job}/output/enough")
    cluster.wait(job, "SUCCEEDED", "FAILED")
    return lines_of(cluster, job)


def lines_of(cluster: Stack, job: str) -> dict[str, list[str]]:
    """Check that a job SUCCEEDED, and return each replica's lines."""
    record = cluster.describe(job)
    assert record["state"] == "SUCCEEDED"
    exit_codes = {replica["name"]: replica["exitCode"] for replica in record["replicas"]}
    failed = {name: code for name, code in exit_codes.items() if not (code in (0, None) or code >= 128)}
    assert not failed, cluster.fab("logs", "all", "--job", job, "--lines", "50").text
    return {name: [] for name in (*_TRAINERS, *_OTHERS)} | cluster.messages(job)


def find_lines(lines: list[str], start: str) -> list[str]:
    matches = [line for line in lines if line.startswith(start)]
    assert matches, f"no line begins with {start!r}: {lines[-20:]}"
    return matches


def accuracy(lines: list[str], steps: int) -> float:
    final = find_lines(lines, "Final metrics after ")[0]
    assert int(final.split()[3]) >= steps
    return float(final.partition("accuracy: ")[2].partition(",")[0])


def test_cloud_ml_code_from_2017_runs(cluster: Stack, tmp_path: Path) -> None:
    condition = "not session.should_stop()"
    longer = f'{condition} and not os.path.exists(args.job_dir + "/enough")'
    package = change_example(tmp_path, "cloudml", "task.py", condition, longer)
    flags = ("--package", str(package), "--config", "examples/cloudml/config.yaml")
    patterns = {name: rf"Started \[{name.replace('-', '/')}\]" for name in ("worker-0", "worker-1", "ps-0", "ps-1")}
    patterns |= {"master-0": r"Train \[master/0\], step \d{3}", "evaluator-0": "the evaluator has nothing to do"}
    lines = run_until(cluster, "ex_cloudml", patterns, *flags, "--args", "--model mlp --max-steps 10000000")
    find_lines(lines["master-0"], "Started [master/0]")
    assert accuracy(lines["master-0"], 60) > 0.8
    # Each parameter server wrote its part of the last checkpoint.
    output = cluster.get("ex_cloudml", tmp_path)
    newest = Path((output / "checkpoint").read_text().split('"')[1]).name
    assert len(list(output.glob(f"{newest}.data-0000?-of-00002"))) == 2


@pytest.mark.registry("tf-keras")
def test_tf_keras_with_its_dependency(cluster: Stack, tmp_path: Path) -> None:
    lines = run_example(cluster, "ex_mwms", "mwms", "--", "--model", "mlp", "--max-steps", "900")
    for name, label in (("master-0", "chief/0"), ("worker-0", "worker/0"), ("worker-1", "worker/1")):
        assert all(line.endswith(" examples/s") for line in find_lines(lines[name], f"Train [{label}], step "))
    for name in _OTHERS:
        find_lines(lines[name], f"{name.replace('-', '/')} has nothing to do")
    assert 0.8 < accuracy(lines["master-0"], 900) <= 1
    assert (cluster.get("ex_mwms", tmp_path) / "weights.npz").stat().st_size > 100_000


@pytest.mark.registry("tabulate, setuptools")
def test_a_project_with_a_dependency(cluster: Stack, tmp_path: Path) -> None:
    last_line = '    print(f"Final metrics'
    enough = 'os.path.exists(os.environ["JOB_DIR"] + "/enough")'
    waits = f'    while not {enough}:\n        __import__("time").sleep(0.1)\n{last_line}'
    package = change_example(tmp_path, "packaged", "src/packaged/task.py", last_line, waits)
    start = r"Started \[{}\], packaged-trainer 1\.0, tabulate "
    patterns = {name: start.format(name.replace("-", "/")) for name in (*_TRAINERS, *_OTHERS)}
    lines = run_until(cluster, "ex_packaged", patterns, "--package", str(package), "--", "--max-steps", "500")
    find_lines(lines["master-0"], "Final metrics after 500 steps")
    assert "slope" in (cluster.get("ex_packaged", tmp_path) / "table.txt").read_text()
    assert not list(package.rglob("*.egg-info")), "a build leaves no files behind"


def test_a_coordinator_trains_with_parameter_servers_and_an_evaluator(cluster: Stack, tmp_path: Path) -> None:
    """Train the example until its evaluator has evaluated; otherwise the faster of the two decides."""
    steps = "for _ in range(STEPS // STEPS_PER_CALL // CALLS_PER_CHECKPOINT):"
    longer = 'while model.step.numpy() < STEPS or not os.path.exists(os.environ["JOB_DIR"] + "/enough"):'
    package = change_example(tmp_path, "parameter_server", "train.py", steps, longer)
    lines = run_until(cluster, "ex_ps", {"evaluator-0": "evaluated ckpt-"}, "--package", str(package), "--script", "train.py")
    for name in ("ps-0", "ps-1", "worker-0", "worker-1"):
        find_lines(lines[name], f"{name.replace('-', ' ')} serves")
    assert accuracy(lines["master-0"], 400) > 0.9


def test_several_workers_of_a_larger_cluster_train(cluster: Stack, tmp_path: Path) -> None:
    lines = run_example(cluster, "ex_mw", "multi_worker", "--script", "train.py", "--replicas", "master,worker")
    for name, task in (("master-0", "chief 0"), ("worker-0", "worker 0"), ("worker-1", "worker 1")):
        find_lines(lines[name], f"{task} is one of 3")
    assert all(lines[name] == [] for name in _OTHERS)
    assert accuracy(lines["master-0"], 60) > 0.8
    assert (cluster.get("ex_mw", tmp_path) / "model.index").is_file()


@pytest.mark.registry("scikit-learn")
def test_a_script_with_requirements_and_a_command_with_peers_run(cluster: Stack, tmp_path: Path) -> None:
    one_host = ("--scale-tier", "BASIC")
    lines = run_example(cluster, "ex_scikit", "scikit", *one_host, "--script", "train.py", "--", "--neighbours", "5")
    assert accuracy(lines["master-0"], 1) > 0.9
    cluster.must("get", "ex_scikit", "model.pickle", str(tmp_path / "model.pickle"))
    lines = run_example(cluster, "ex_shell", "shell", *one_host, "--command", "./run.sh", "--", "three", "words here")
    find_lines(lines["master-0"], "master 0 counted 3 words")
    met = cluster.must("train", "ex_peers", "--replicas", "worker", "--script", "tests/trainers/peers/meet.py")
    assert all(f"rank {rank} of 3: the sum is 3" in met.out for rank in range(3)), met.out


@pytest.mark.registry("jax")
def test_jax_trains_on_several_hosts_by_gloo(cluster: Stack, tmp_path: Path) -> None:
    """Follow its README; JAX can be fetched from any registry, unlike other frameworks with gloo."""
    program = ("--script", "examples/jax_gloo/train.py", "--runtime", "examples/jax_gloo/requirements.txt")
    result = cluster.must("train", "ex_jax", "--replicas", "worker=1", *program)
    check_losses(result.out, "of 2 peers: loss")
    with np.load(cluster.get("ex_jax", tmp_path) / "model.npz") as model:
        assert {name: model[name].shape for name in model} == {"w1": (2, 32), "b1": (32,), "w2": (32, 1), "b2": (1,)}


def check_losses(out: str, label: str) -> None:
    """Check that the four losses that a job printed fall."""
    losses = [float(line.rpartition(" ")[2]) for line in out.splitlines() if label in line]
    assert len(losses) == 4
    assert losses[-1] < losses[0], out


def commands(readme: str) -> list[list[str]]:
    """Return the arguments of the commands of fab that a README shows."""
    lines = (ROOT / readme).read_text().splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("fab ")]


def skip_if_torch_has_cuda(folder: Path) -> None:
    """Skip the test if the registries have only the PyTorch of 5 GB with CUDA; nothing is fetched."""
    report = folder / "report.json"
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", f"--report={report}"]
    arguments = [
        "--retries=0",
        "--timeout=10",
        f"--target={folder / 'none'}",
        "-r",
        str(ROOT / "examples/torch/requirements.txt"),
    ]
    subprocess.run([*pip, *arguments], capture_output=True, check=True)
    packages = {each["metadata"]["name"]: each["metadata"] for each in json.loads(report.read_text())["install"]}
    cuda = [need for need in packages["torch"].get("requires_dist", []) if need.startswith(("nvidia-", "cuda-"))]
    if cuda:
        pytest.skip(f"no registry in reach has PyTorch's CPU build, and {packages['torch']['version']} has 5 GB of CUDA")


@pytest.mark.registry("torch, CPU build")
def test_pytorch_trains_on_three_hosts_by_its_readme_commands(cluster: Stack, tmp_path: Path) -> None:
    skip_if_torch_has_cuda(tmp_path)
    train, get = (command for command in commands("README.md") if "ddp01" in command)
    result = cluster.must(*train)
    check_losses(result.out, "of 3 peers: loss")
    lines_of(cluster, train[train.index("--job") + 1])
    cluster.must(*get, str(tmp_path / "out"))
    with zipfile.ZipFile(tmp_path / "out" / "model.pt") as model:
        assert len([name for name in model.namelist() if "/data/" in name]) == 4, "two layers of weights and biases"


def test_keras_with_the_flags_of_cloud_ml(cluster: Stack, tmp_path: Path) -> None:
    (folder := tmp_path / "census").mkdir()
    for name, people, seed in (("train", "2000", "1"), ("eval", "500", "2")):
        result = subprocess.run(
            [sys.executable, ROOT / "examples/census/people.py", people, seed], capture_output=True, check=True
        )
        (folder / f"{name}.csv").write_bytes(result.stdout)
    cluster.must("data", "put", str(folder))
    files = ("--train-files", "/bucket/data/census/train.csv", "--eval-files", "/bucket/data/census/eval.csv")
    lines = run_example(cluster, "ex_census", "census", "--scale-tier", "BASIC", "--", *files, "--num-epochs", "10")
    assert accuracy(lines["master-0"], 300) > 0.85
    data = cluster.describe("ex_census")["manifest"]["data"]
    assert (data["paths"], data["files"]) == ([files[1], files[3]], 2), "its own data, not MNIST"
    exported = cluster.json("export", "ex_census", str(tmp_path / "model"))
    assert "serving_default" in exported["signatures"]
    cluster.must("data", "rm", "census", "--yes")


SERVER = {"anyio", "click", "h11", "httptools", "orjson", "prometheus-client", "starlette", "uvicorn"}
BUCKET = {
    "aiohappyeyeballs", "aiohttp", "aiosignal", "attrs", "cffi", "cryptography", "decorator", "frozenlist", "gcsfs",
    "google-api-core", "google-auth", "google-auth-oauthlib", "google-cloud-core", "google-cloud-storage",
    "google-cloud-storage-control", "google-crc32c", "google-resumable-media", "googleapis-common-protos",
    "grpc-google-iam-v1", "grpcio-status", "multidict", "oauthlib", "opentelemetry-api", "propcache", "proto-plus",
    "pyasn1", "pyasn1-modules", "pycparser", "requests-oauthlib", "yarl",
}  # fmt: skip
TUNER = {"alembic", "colorlog", "mako", "optuna", "pyyaml", "sqlalchemy", "tqdm"}


@pytest.mark.parametrize("name", ["master-0", "ps-0"])
def test_hosts_have_the_constrained_package_versions(cluster: Stack, name: str) -> None:
    installed = json.loads(cluster.ssh(name, f"/opt/scaletier/venv/bin/python -c '{_VERSIONS}'").out)
    constraints = dict(hostpython.host_packages())
    assert constraints.pop("tensorflow") == constraints["tensorflow-cpu"]
    for tool in ("pip", "wheel"):
        installed.pop(tool, None)
    # The packages of another target's bucket, the server and the tuner do not constrain jobs, which can install other versions.
    scaletier_only = BUCKET | SERVER | TUNER
    assert installed.keys() - constraints.keys() == scaletier_only
    assert {package: version for package, version in installed.items() if package not in scaletier_only} == constraints


@pytest.mark.registry("one that is not there")
def test_unsatisfiable_dependencies_change_nothing(cluster: Stack, tmp_path: Path) -> None:
    (package := tmp_path / "mine").mkdir()
    for name in ("__init__.py", "task.py"):
        (package / name).touch()
    with zipfile.ZipFile(package / "old-1.0-cp39-cp39-manylinux2014_x86_64.whl", "w") as wheel:
        wheel.writestr("old-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: old\nVersion: 1.0\n")
        wheel.writestr("old-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: cp39-cp39-manylinux2014_x86_64\n")
        wheel.writestr("old-1.0.dist-info/RECORD", "")
    before = cluster.fab("jobs", "--json").out
    for requirement, says in [
        ("scaletier-has-no-such-dependency", "Because scaletier-has-no-such-dependency was not found"),
        ("./old-1.0-cp39-cp39-manylinux2014_x86_64.whl", "old==1.0 has no wheels with a matching Python version tag"),
        ("tensorflow==1.15", "the job's Python has tensorflow 2."),
    ]:
        (package / "requirements.txt").write_text(requirement)
        result = cluster.fab("train", "--job", "ex_bad", "--package", str(package))
        assert result.code == 2, result.text
        assert says in result.err
        assert len(result.errors) == 1, result.err
    assert cluster.fab("jobs", "--json").out == before
    assert cluster.ssh("ps-0", "ls /var/lib/scaletier/jobs/ex_bad").code != 0
