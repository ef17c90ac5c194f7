"""Check a job's own Python (ops.package.runtimes): its content, folder and refusals. uv runs for real, without an index."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
from opsdata import write_files
from test_ops_dependencies import make_trainer, make_wheel

from infra.inventory import Inventory
from infra.runtime import uv
from jobs.records import JobRecord
from jobs.serialization import RecordError
from jobs.states import JobState
from ops import terminal
from ops.errors import OpsError, UsageError
from ops.package import package, runtimes
from ops.submit import manifest
from ops.submit.config import JobFlags, build_job
from ops.submit.job_plan import plan

HOSTS_SEE = "/opt/scaletier/runtimes"


pytestmark = pytest.mark.usefixtures("index")


@pytest.fixture
def local_inventory(inventory: Inventory, tmp_path: Path) -> Inventory:
    """Return a cluster whose hosts can read the runtimes that are built on this machine."""
    return replace(inventory, runtimes=HOSTS_SEE, operator_runtimes=str(tmp_path / "runtimes"))


@pytest.fixture
def unzipped(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpack the wheel `far` instead of running uv."""
    wheel_file = make_wheel(index)

    def install(site_folder: Path, *_: object) -> None:
        with zipfile.ZipFile(wheel_file) as archive:
            archive.extractall(site_folder / runtimes._SITE)

    monkeypatch.setattr(runtimes, "_install", install)


def write_requirements(folder: Path, text: str) -> str:
    return str(write_files(folder, {"requirements.txt": text}) / "requirements.txt")


def test_a_requirements_file_becomes_a_runtime(local_inventory: Inventory, index: Path, tmp_path: Path) -> None:
    script = "#!/nowhere/python\nprint('hello')\n"
    make_wheel(index, files={"far/__init__.py": "VALUE = 7\n", "far-1.0.data/scripts/far-tool": script})
    requirements_file = write_requirements(tmp_path, "far==1.0\n# a remark\n")
    job = build_job(JobFlags("j", runtime=requirements_file), local_inventory, "mine")
    assert job.runtime
    assert runtimes.build(local_inventory, job.runtime) == {"far": "1.0"}
    folder = tmp_path / "runtimes" / job.runtime.folder_name
    if not Path("/usr/bin/python3.11").exists():
        pytest.skip("the hosts' Python is not here to run it")
    code = "import far, sys; print(far.VALUE, sys.prefix)"
    result = subprocess.run([folder / "bin/python", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["7", str(folder)]
    assert plan(local_inventory, job, "").python == f"{HOSTS_SEE}/{job.runtime.folder_name}/bin/python"
    assert sorted(path.name for path in (tmp_path / "runtimes").iterdir()) == [job.runtime.folder_name]


def test_a_runtime_is_readable_under_any_umask(local_inventory: Inventory, index: Path, tmp_path: Path) -> None:
    make_wheel(index)
    umask = os.umask(0o077)
    try:
        requested = runtimes.from_file(write_requirements(tmp_path, "far\n"), "--runtime")
        runtimes.build(local_inventory, requested)
    finally:
        os.umask(umask)
    files = [path for path in (tmp_path / "runtimes" / requested.folder_name).rglob("*") if not path.is_symlink()]
    assert files
    assert all(path.stat().st_mode & 0o004 for path in files), [path for path in files if not path.stat().st_mode & 0o004]


@pytest.mark.usefixtures("unzipped")
def test_the_same_lines_are_built_once(local_inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = runtimes.from_file(write_requirements(tmp_path, "far\n"), "--runtime")
    runtimes.build(local_inventory, first)
    monkeypatch.setattr(runtimes, "_install", None)  # not called again
    assert runtimes.build(
        local_inventory, runtimes.from_file(write_requirements(tmp_path, "far  # the same\n"), "--runtime")
    ) == {"far": "1.0"}
    assert runtimes.from_file(write_requirements(tmp_path, "far==1.0\n"), "--runtime").folder_name != first.folder_name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nowhere==9", r"cannot be resolved for the hosts' Python 3\.11 .*: Because nowhere was not"),
        ("./far-1.0-cp312-cp312-manylinux_2_17_x86_64.whl", r"is not a wheel for the hosts' Python 3\.11"),
    ],
)
def test_a_failed_build_leaves_nothing(local_inventory: Inventory, tmp_path: Path, line: str, message: str) -> None:
    make_wheel(tmp_path, tags="cp312-cp312-manylinux_2_17_x86_64")
    with pytest.raises(UsageError, match=message):
        runtimes.build(local_inventory, runtimes.from_file(write_requirements(tmp_path, line), "--runtime"))
    assert list((tmp_path / "runtimes").iterdir()) == []


def test_a_file_with_gpus_is_left_as_it_is(tmp_path: Path) -> None:
    path = write_requirements(tmp_path, "tensorflow[and-cuda]==2.19.1\nnumpy\ntorch\n")
    lines = ("tensorflow[and-cuda]==2.19.1", "numpy", "torch")
    with_gpus, without = runtimes.from_file(path, "--runtime", gpus=True), runtimes.from_file(path, "--runtime")
    assert (with_gpus.lines, with_gpus.original, with_gpus.cpu_torch) == (lines, (), False)
    assert (without.lines, without.original, without.cpu_torch) == (("tensorflow-cpu==2.19.1", "numpy", "torch"), lines, True)
    assert with_gpus.file == without.file == Path(path)
    assert with_gpus.folder_name != without.folder_name
    plain = runtimes.from_file(write_requirements(tmp_path, "numpy\n"), "--runtime")
    assert plain == runtimes.RuntimeRequest("requirements", ("numpy",), plain.folder_name, Path(path))


@pytest.mark.parametrize(
    ("name", "start"), [("requirements", "requirements-"), ("-.a b_c--", "a-b-c-"), ("x" * 60, f"{'x' * 40}-")]
)
def test_a_key_begins_with_the_file_s_name(tmp_path: Path, name: str, start: str) -> None:
    (file := tmp_path / f"{name}.txt").write_text("numpy\n")
    key = runtimes.from_file(str(file), "--runtime").folder_name
    assert (key[:-12], len(key)) == (start, len(start) + 12)


def test_the_packages_of_a_runtime_are_read(local_inventory: Inventory, tmp_path: Path) -> None:
    runtime = runtimes.RuntimeRequest("mine", (), "mine-1")
    assert runtimes.read_existing(local_inventory, runtime) == {}
    folder = tmp_path / "runtimes" / "mine-1"
    site = folder / runtimes._SITE
    for name in ("Some_Far", "near"):
        (info := site / f"{name}-1.0.dist-info").mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    assert runtimes.read_existing(local_inventory, runtime) == {"some-far": "1.0", "near": "1.0"}
    assert runtimes.format_requirements({"b": "2", "a": "1"}) == ["a==1", "b==2"]
    (info / "REQUESTED").write_text("")
    assert runtimes.requested_packages(folder) == ["near==1.0"], "as pip marks it"
    (folder / "requested.txt").write_text("near>0\nmore\n")
    assert runtimes.requested_packages(folder) == ["near>0", "more"]
    assert runtimes.python(local_inventory, runtime) == f"{HOSTS_SEE}/mine-1/bin/python"


@pytest.mark.parametrize("key", [None, 7, "../up", ".hidden", ""])
def test_an_invalid_key_of_a_runtime_has_no_python(local_inventory: Inventory, inventory: Inventory, key: object) -> None:
    assert runtimes.python_of(local_inventory, {"runtime": {"key": key}}) is None
    assert runtimes.python_of(inventory, {"runtime": {"key": "mine-1"}}) is None
    assert runtimes.python_of(local_inventory, {"runtime": {"key": "mine-1"}}) == f"{HOSTS_SEE}/mine-1/bin/python"


def test_a_version_without_a_cpu_build_is_built_from_scratch(
    local_inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = list[tuple[object, ...]]()

    def install(site: Path, python: str, lines: tuple[str, ...], start: Path, *_: object) -> None:
        (site / f"call{len(calls)}.py").write_text("")
        calls.append((python, lines, start))
        if lines[0] == "tensorflow-cpu==1.0":
            raise UsageError("there is none")

    def make_venv(folder: Path, python: str) -> Path:
        (site := folder / runtimes._SITE).mkdir(parents=True)
        (folder / "bin").mkdir()
        return site

    monkeypatch.setattr(runtimes, "install", install)
    monkeypatch.setattr(runtimes, "make_venv", make_venv)
    request = runtimes.from_file(write_requirements(tmp_path, "tensorflow==1.0\nnumpy\n"), "--runtime")
    assert runtimes.build(local_inventory, request) == {}
    assert calls == [("3.11", ("tensorflow-cpu==1.0", "numpy"), tmp_path), ("3.11", ("tensorflow==1.0", "numpy"), tmp_path)]
    folder = tmp_path / "runtimes" / request.folder_name
    assert sorted(path.name for path in (folder / runtimes._SITE).iterdir()) == ["call1.py"]
    assert runtimes.requested_packages(folder) == ["tensorflow==1.0", "numpy"]
    note = "no host has a GPU, so CPU builds are installed: tensorflow-cpu==1.0"
    assert capsys.readouterr().err.splitlines()[0] == note


@pytest.mark.parametrize(
    ("text", "errors", "calls"),
    [
        ("torch", [], [(("torch",), True)]),
        ("torch", ["https://x/torch/ does not answer"], [(("torch",), True), (("torch",), False)]),
        (
            "torch\ntensorflow==1.0",
            ["no tensorflow-cpu==1.0"],
            [(("torch", "tensorflow-cpu==1.0"), True), (("torch", "tensorflow==1.0"), True)],
        ),
    ],
)
def test_torch_is_built_for_processors_if_there_is_such_a_build(
    local_inventory: Inventory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    errors: list[str],
    calls: list[object],
) -> None:
    seen = []

    def install(site: Path, python: str, lines: tuple[str, ...], start: Path, step: object, options: list[str]) -> None:
        seen.append((lines, "--torch-backend=cpu" in options))
        if len(seen) <= len(errors):
            raise UsageError(errors[len(seen) - 1])

    monkeypatch.setattr(runtimes, "install", install)
    request = runtimes.from_file(write_requirements(tmp_path, text), "--runtime")
    runtimes.build(local_inventory, request)
    assert seen == calls
    assert ("PyTorch comes with CUDA, some 5 GB" in capsys.readouterr().err) == (calls[-1] == (("torch",), False))
    assert request.folder_name != runtimes.from_file(write_requirements(tmp_path, text), "--runtime", gpus=True).folder_name


def test_a_manifest_s_torch_for_processors_comes_from_their_index(local_inventory: Inventory) -> None:
    made = [
        runtimes.from_manifest(local_inventory, {"name": "mine", "key": "mine-1", "requirements": [line]})
        for line in ("torch==2.9.0", "torch==2.9.0+cpu")
    ]
    assert [each.cpu_torch for each in made] == [False, True]


def test_ctrl_c_during_a_build_leaves_no_runtime_and_says_what_is_kept(
    local_inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(uv, "install", stop)
    with pytest.raises(KeyboardInterrupt):
        runtimes.build(local_inventory, runtimes.from_file(write_requirements(tmp_path, "far\n"), "--runtime"))
    kept = "packages that were fetched completely are kept, and the next call goes on with them"
    assert capsys.readouterr().err == f"no job was submitted; {kept}\n"
    assert not [*(tmp_path / "runtimes").iterdir()]


@pytest.mark.usefixtures("unzipped")
def test_leftovers_of_a_killed_build_are_deleted(local_inventory: Inventory, tmp_path: Path) -> None:
    dead, alive = tmp_path / "runtimes" / ".making-x-99999999", tmp_path / "runtimes" / ".making-x-1"
    for leftover in (dead, alive):
        (leftover / "lib").mkdir(parents=True)
    runtimes.build(local_inventory, runtimes.from_file(write_requirements(tmp_path, "far\n"), "--runtime"))
    assert (dead.exists(), alive.exists()) == (False, True)


@pytest.mark.parametrize(
    ("text", "line"),
    [("2.19", "tensorflow-cpu==2.19.*"), ("2.19.1", "tensorflow-cpu==2.19.1"), ("2.2", "tensorflow-cpu==2.2.*")],
)
def test_a_tensorflow_version_becomes_requirements(inventory: Inventory, text: str, line: str) -> None:
    requested = runtimes.from_version(text, "--runtime-version", inventory)
    assert requested
    assert (requested.name, sorted(requested.lines)) == (f"tensorflow-{text}", ["fsspec", "numpy", "tensorboard", line])


@pytest.mark.parametrize("text", ["2.21", "2.21.0"])
def test_the_hosts_own_version_needs_no_runtime(inventory: Inventory, text: str) -> None:
    assert runtimes.from_version(text, "--runtime-version", inventory) is None
    assert runtimes.from_version(text, "--runtime-version", replace(inventory, tensorflow="2.20.0"))
    assert runtimes.from_version("2.20", "--runtime-version", replace(inventory, tensorflow="2.20.0")) is None


@pytest.mark.parametrize("text", ["3", "3.0", "2", "1.15", "2.x", "2.19.1.0", "", "2.19; rm"])
def test_an_invalid_version_is_refused(inventory: Inventory, text: str) -> None:
    with pytest.raises(UsageError, match=r"is no version of TensorFlow 2: write 2.20 or 2.20.0, or leave it out for 2.21.0"):
        runtimes.from_version(text, "--runtime-version", inventory)


def write_config(folder: Path, text: str) -> str:
    return str(write_files(folder, {"config.yaml": f"trainingInput: {{{text}}}\n"}) / "config.yaml")


def test_config_may_set_the_runtime_and_a_flag_overrides_it(local_inventory: Inventory, tmp_path: Path) -> None:
    write_requirements(tmp_path, "far\n")
    from_file = write_config(tmp_path, "runtime: requirements.txt")  # relative to config.yaml, in any working directory
    job = build_job(JobFlags("j", config=from_file), local_inventory)
    assert (job.runtime and job.runtime.name, job.training_input["runtime"]) == ("requirements", "requirements")
    job = build_job(JobFlags("j", config=from_file, runtime_version="2.20"), local_inventory)
    assert (job.runtime and job.runtime.name, job.training_input["runtime"]) == ("tensorflow-2.20", "tensorflow-2.20")
    job = build_job(JobFlags("j", config=write_config(tmp_path, "runtimeVersion: 2.19")), local_inventory)
    assert job.runtime and job.runtime.name == "tensorflow-2.19"
    assert not job.notes


def test_a_tensorflow_1_version_in_config_is_ignored(local_inventory: Inventory, inventory: Inventory, tmp_path: Path) -> None:
    old = build_job(JobFlags("j", config=write_config(tmp_path, "runtimeVersion: 1.15")), local_inventory)
    elsewhere = build_job(JobFlags("j", config=write_config(tmp_path, "runtimeVersion: 2.19")), inventory)
    path = tmp_path / "config.yaml"
    reason = "no current Python has TensorFlow 1; TensorFlow 2 has tf.compat.v1"
    assert (old.runtime, old.notes) == (None, (f"runtimeVersion in {path}: ignored, {reason}",))
    reason = "the stack defines the hosts' Python"
    assert (elsewhere.runtime, elsewhere.notes) == (None, (f"runtimeVersion in {path}: ignored, {reason}",))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"runtime": "nowhere.txt"}, "--runtime nowhere.txt is no file"),
        ({"runtime": "a", "runtime_version": "2.20"}, "--runtime and --runtime-version both say which Python"),
        ({"runtime_version": "9"}, "is no version of TensorFlow 2"),
    ],
)
def test_invalid_runtime_flags_are_refused(local_inventory: Inventory, flags: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_job(JobFlags("j", **flags), local_inventory)  # type: ignore[arg-type]


def test_conflicting_or_empty_requirements_are_refused(local_inventory: Inventory, tmp_path: Path) -> None:
    write_requirements(tmp_path, "# nothing\n")
    path = write_config(tmp_path, "runtime: requirements.txt, runtimeVersion: '2.20'")
    keys = f"{path}: trainingInput.runtime and {path}: trainingInput.runtimeVersion"
    with pytest.raises(UsageError, match=f"^{keys} both say which Python: use only one of them$"):
        build_job(JobFlags("j", config=path), local_inventory)
    with pytest.raises(UsageError, match="has no requirement"):
        build_job(JobFlags("j", runtime=str(tmp_path / "requirements.txt")), local_inventory)


def test_a_target_without_runtimes_is_an_error(inventory: Inventory) -> None:
    google = replace(inventory, operator_bucket="gs://mine", tensorflow="2.20.0")
    with pytest.raises(UsageError, match=r"have the Python of their image only, with TensorFlow 2\.20\.0"):
        build_job(JobFlags("j", runtime_version="2.21"), google)
    with pytest.raises(UsageError, match="are too old for runtimes: run pulumi up"):
        build_job(JobFlags("j", runtime_version="2.20"), replace(inventory, operator_bucket="sftp:///bucket"))


def test_a_package_brings_what_its_runtime_lacks(index: Path, tmp_path: Path) -> None:
    make_wheel(index)
    root = make_trainer(tmp_path, "far\nnumpy\n", "import far\n")
    built = package.build(root, "mine.task", installed={"numpy": "1.0"})
    assert set(built.dependency_files) == {
        "far/__init__.py",
        *(f"far-1.0.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD")),
    }
    assert package.build(root, "mine.task", installed={"far": "1.0", "numpy": "1.0"}).dependency_files == {}


@pytest.mark.usefixtures("unzipped")
def test_a_reproduction_has_the_runtimes_versions(local_inventory: Inventory, tmp_path: Path) -> None:
    job = build_job(JobFlags("j", runtime=write_requirements(tmp_path, "far\n")), local_inventory, "mine")
    assert job.runtime
    versions = runtimes.build(local_inventory, job.runtime)
    root = make_trainer(tmp_path, "")
    full_manifest = manifest.manifest(local_inventory, job, package.build(root, "mine.task", installed=versions))
    stored = json.loads(manifest.to_json(full_manifest))["runtime"]
    assert stored == {"name": "requirements", "key": job.runtime.folder_name, "sha256": ANY, "requirements": ["far==1.0"]}
    assert manifest.summarize(full_manifest)["runtime"] == {key: stored[key] for key in ("name", "key", "sha256")}
    assert manifest.runtime_line(full_manifest) == f"requirements sha256:{stored['sha256'][:16]}"
    assert "runtime" not in full_manifest["config"]
    rebuilt = runtimes.from_manifest(local_inventory, stored)
    assert rebuilt.folder_name == job.runtime.folder_name
    # If the folder is gone or has other versions, the manifest's versions are built.
    assert runtimes.from_manifest(local_inventory, stored | {"requirements": ["far==0.9"]}).lines == ("far==0.9",)
    assert runtimes.from_manifest(local_inventory, stored | {"key": "gone"}).folder_name not in (
        "gone",
        job.runtime.folder_name,
    )
    assert runtimes.python_of(local_inventory, full_manifest) == f"{HOSTS_SEE}/{job.runtime.folder_name}/bin/python"
    assert runtimes.python_of(local_inventory, {}) is None


@pytest.mark.parametrize(
    "stored",
    [
        {"requirements": ["--index-url http://127.0.0.1:1"]},
        {"requirements": ["far @ http://127.0.0.1:1/far.tar.gz"]},
        {"requirements": "far==1.0"},
        {"requirements": [1]},
        {"key": "../../etc"},
        {"name": None},
    ],
)
def test_a_forged_manifest_cannot_control_uv(local_inventory: Inventory, stored: dict[str, object]) -> None:
    with pytest.raises(OpsError, match="a runtime that fab train would not have made"):
        runtimes.from_manifest(local_inventory, {"name": "x", "key": "y", "requirements": ["far==1.0"]} | stored)


def test_included_requirements_are_built_and_part_of_the_key(local_inventory: Inventory, index: Path, tmp_path: Path) -> None:
    make_wheel(index)
    requirements_file = write_requirements(tmp_path, "-r more.txt\n")
    write_files(tmp_path, {"more.txt": "-r most.txt\n", "most.txt": "far\n"})
    first = runtimes.from_file(requirements_file, "--runtime")
    assert runtimes.build(local_inventory, first) == {"far": "1.0"}
    (tmp_path / "most.txt").write_text("far>=1\n")
    assert runtimes.from_file(requirements_file, "--runtime").folder_name != first.folder_name
    (tmp_path / "most.txt").write_text("torch\nxgboost\n")
    request = runtimes.from_file(requirements_file, "--runtime")
    assert (request.lines, request.cpu_torch) == (("torch", "xgboost-cpu"), True), "CPU builds, as no host has a GPU"
    (tmp_path / "most.txt").write_text("-e .\n")
    with pytest.raises(UsageError, match="which stays in a folder of this machine: name a wheel of it"):
        runtimes.from_file(requirements_file, "--runtime")


def test_files_that_a_runtime_names_have_the_same_key_in_another_folder(tmp_path: Path) -> None:
    def request(folder: str) -> runtimes.RuntimeRequest:
        write_files(tmp_path, {f"{folder}/limits.txt": "far<2\n", f"{folder}/requirements.txt": "-c limits.txt\nfar\n"})
        return runtimes.from_file(f"{tmp_path}/{folder}/requirements.txt", "--runtime")

    assert request("one").folder_name == request("other").folder_name
    assert request("one").lines[0] == f"-c {tmp_path}/one/limits.txt"


def test_a_folder_named_like_a_distribution_is_ignored(tmp_path: Path) -> None:
    requirements_file = write_requirements(tmp_path, "far\n")
    key = runtimes.from_file(requirements_file, "--runtime").folder_name
    write_files(tmp_path, {"far/data": "x"})
    assert runtimes.from_file(requirements_file, "--runtime").folder_name == key


@pytest.mark.parametrize("line", ["-e .", "--editable ./lib", ".", "./"])
def test_an_editable_requirement_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError, match="which stays in a folder of this machine: name a wheel of it"):
        runtimes.from_file(write_requirements(tmp_path, f"{line}\n"), "--runtime")


def test_the_users_environment_is_not_used(
    local_inventory: Inventory, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel_file = make_wheel(index)
    with zipfile.ZipFile(wheel_file) as archive:
        archive.extractall(tmp_path / "mine")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    assert runtimes.build(local_inventory, runtimes.from_file(write_requirements(tmp_path, "far\n"), "--runtime")) == {
        "far": "1.0"
    }


def test_scripts_start_with_the_path_on_hosts(inventory: Inventory, index: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    local_inventory = replace(inventory, runtimes=HOSTS_SEE, operator_runtimes=str(tmp_path / "link"))
    script = "#!python\nprint('hello')\n"
    make_wheel(index, files={"far/__init__.py": "", "far-1.0.data/scripts/far-tool": script})
    requested = runtimes.from_file(write_requirements(tmp_path, "far\n"), "--runtime")
    runtimes.build(local_inventory, requested)
    first = (tmp_path / "link" / requested.folder_name / "bin" / "far-tool").read_text().splitlines()[0]
    assert first == f"#!{HOSTS_SEE}/{requested.folder_name}/bin/python"
    assert not (tmp_path / "link" / requested.folder_name / runtimes._SITE / "bin").exists()


class _Ledger:
    def __init__(self, *records: JobRecord) -> None:
        self._records, self.unreadable = list(records), dict[str, RecordError]()

    def jobs(self) -> tuple[list[JobRecord], dict[str, RecordError]]:
        return self._records, self.unreadable


class _Cluster:
    def __init__(self, inventory: Inventory, *records: JobRecord) -> None:
        self.inventory, self.ledger = inventory, _Ledger(*records)


@pytest.mark.usefixtures("unzipped")
def test_runtimes_are_listed_and_removed(
    local_inventory: Inventory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ops.submit.runtimes import runtimes as run

    key = runtimes.from_file(requirements_file := write_requirements(tmp_path, "far\n"), "--runtime").folder_name
    runtimes.build(local_inventory, runtimes.from_file(requirements_file, "--runtime"))
    cluster = _Cluster(local_inventory, JobRecord("j", manifest={"runtime": {"key": key}}))
    folder = tmp_path / "runtimes" / key
    (folder / runtimes._REQUESTED).write_text("far\n")
    size = sum(path.lstat().st_size for path in folder.rglob("*"))
    stored = {"name": key, "requirements": ["far"], "versions": {"far": "1.0"}, "bytes": size}
    (folder.parent / ".making-x-1").mkdir()
    (folder.parent / "a.lock").touch()
    capsys.readouterr()
    assert run(cluster, None, None, False, True) == 0  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == ([stored], "")
    assert run(cluster, "ls", None, False, False) == 0  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    shown_size = terminal.size(size).split()
    assert ([line.split() for line in out.splitlines()], err) == (
        [["NAME", "TENSORFLOW", "PACKAGES", "SIZE", "ASKED", "FOR"], [key, "-", "1", *shown_size, "far"]],
        "",
    )
    with pytest.raises(UsageError, match=f"job j, which is QUEUED, runs in {key}"):
        run(cluster, "rm", key, True, False)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"there is no runtime far; there are {key}"):
        run(cluster, "rm", "far", True, False)  # type: ignore[arg-type]
    for invalid, message in (
        (("rm", None), "fab runtimes rm needs the NAME of one"),
        (("ls", key), "fab runtimes ls takes no NAME"),
        (("list", None), "fab runtimes list is unknown; did you mean ls?; valid are ls, rm"),
    ):
        with pytest.raises(UsageError) as error:
            run(cluster, *invalid, sure=True, as_json=False)  # type: ignore[arg-type]
        assert str(error.value) == message
    damaged = _Cluster(local_inventory)
    damaged.ledger.unreadable = {"j": RecordError("job.json is no JSON")}
    with pytest.raises(UsageError, match=r"records are unreadable: j: job\.json is no JSON; fab delete JOB"):
        run(damaged, "rm", key, True, False)  # type: ignore[arg-type]
    others = (JobRecord("a", manifest={"runtime": {"key": "other"}}), JobRecord("b").ended(""), JobRecord("c"))
    idle = _Cluster(local_inventory, *others, replace(cluster.ledger.jobs()[0][0], state=JobState.FAILED))
    with pytest.raises(
        UsageError, match=f"^this would remove the runtime {key}, which no job of stack test runs in: say --yes"
    ):
        run(idle, "rm", key, False, False)  # type: ignore[arg-type]
    assert folder.is_dir()
    capsys.readouterr()
    assert run(idle, "rm", key, True, True) == 0  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == ({"removed": key}, f"{key} is removed\n")
    assert not folder.exists()
    with pytest.raises(UsageError, match=r"^there is no runtime far; there are none$"):
        run(idle, "rm", "far", True, False)  # type: ignore[arg-type]
    assert run(idle, None, None, True, False) == 0  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "there are none: fab train --runtime-version or --runtime builds one\n")
