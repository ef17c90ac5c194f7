"""A job's own Python: its content, place and refusals. uv runs for real, without an index."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
from test_ops_dependencies import wheel

from infra.inventory import Inventory
from jobs.records import JobRecord
from ops.errors import OpsError, UsageError
from ops.package import package, runtimes
from ops.submit import manifest
from ops.submit.config import JobFlags, build_job
from ops.submit.render import plan

HOSTS_SEE = "/opt/scaletier/runtimes"


@pytest.fixture(autouse=True)
def own_index(index: Path) -> None:
    """Use no index but our own."""


@pytest.fixture
def local(inventory: Inventory, tmp_path: Path) -> Inventory:
    """Return a cluster whose hosts see the runtimes that are built here."""
    return replace(inventory, runtimes=HOSTS_SEE, operator_runtimes=str(tmp_path / "runtimes"))


@pytest.fixture
def unzipped(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpack the wheel `far` in the place of uv's work."""
    here = wheel(index)

    def install(made: Path, *_: object) -> None:
        with zipfile.ZipFile(here) as opened:
            opened.extractall(made / runtimes._SITE)

    monkeypatch.setattr(runtimes, "_install", install)


def requirements(folder: Path, text: str) -> str:
    (file := folder / "requirements.txt").write_text(text)
    return str(file)


def test_a_requirements_file_becomes_a_python_of_its_own(local: Inventory, index: Path, tmp_path: Path) -> None:
    script = "#!/nowhere/python\nprint('hello')\n"
    wheel(index, files={"far/__init__.py": "VALUE = 7\n", "far-1.0.data/scripts/far-tool": script})
    asked = requirements(tmp_path, "far==1.0\n# a remark\n")
    job = build_job(JobFlags("j", runtime=asked), local, "mine")
    assert job.runtime
    assert runtimes.build(local, job.runtime) == {"far": "1.0"}
    folder = tmp_path / "runtimes" / job.runtime.key
    if not Path("/usr/bin/python3.11").exists():
        pytest.skip("the hosts' Python is not here to run it")
    code = "import far, sys; print(far.VALUE, sys.prefix)"
    done = subprocess.run([folder / "bin/python", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["7", str(folder)]
    assert plan(local, job, "").python == f"{HOSTS_SEE}/{job.runtime.key}/bin/python"
    assert sorted(path.name for path in (tmp_path / "runtimes").iterdir()) == [job.runtime.key]


def test_it_can_be_read_by_all_whatever_the_umask(local: Inventory, index: Path, tmp_path: Path) -> None:
    wheel(index)
    before = os.umask(0o077)
    try:
        asked = runtimes.from_file(requirements(tmp_path, "far\n"), "--runtime")
        runtimes.build(local, asked)
    finally:
        os.umask(before)
    there = [path for path in (tmp_path / "runtimes" / asked.key).rglob("*") if not path.is_symlink()]
    assert there
    assert all(path.stat().st_mode & 0o004 for path in there), [path for path in there if not path.stat().st_mode & 0o004]


@pytest.mark.usefixtures("unzipped")
def test_the_same_lines_are_built_once(local: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = runtimes.from_file(requirements(tmp_path, "far\n"), "--runtime")
    runtimes.build(local, first)
    monkeypatch.setattr(runtimes, "_install", None)  # not called again
    assert runtimes.build(local, runtimes.from_file(requirements(tmp_path, "far  # the same\n"), "--runtime")) == {"far": "1.0"}
    assert runtimes.from_file(requirements(tmp_path, "far==1.0\n"), "--runtime").key != first.key


def test_what_breaks_off_leaves_nothing(local: Inventory, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be resolved for the hosts' Python 3\.11 .*: Because nowhere was not"):
        runtimes.build(local, runtimes.from_file(requirements(tmp_path, "nowhere==9\n"), "--runtime"))
    assert list((tmp_path / "runtimes").iterdir()) == []


@pytest.mark.usefixtures("unzipped")
def test_what_one_who_was_killed_left_goes(local: Inventory, tmp_path: Path) -> None:
    dead, alive = tmp_path / "runtimes" / ".making-x-99999999", tmp_path / "runtimes" / ".making-x-1"
    for left in (dead, alive):
        (left / "lib").mkdir(parents=True)
    runtimes.build(local, runtimes.from_file(requirements(tmp_path, "far\n"), "--runtime"))
    assert (dead.exists(), alive.exists()) == (False, True)


def test_a_wheel_for_another_python_is_refused(local: Inventory, tmp_path: Path) -> None:
    wheel(tmp_path, tags="cp312-cp312-manylinux_2_17_x86_64")
    asked = runtimes.from_file(requirements(tmp_path, "./far-1.0-cp312-cp312-manylinux_2_17_x86_64.whl\n"), "--runtime")
    with pytest.raises(UsageError, match=r"is not a wheel for the hosts' Python 3\.11"):
        runtimes.build(local, asked)


@pytest.mark.parametrize(
    ("text", "line"),
    [("2.19", "tensorflow-cpu==2.19.*"), ("2.19.1", "tensorflow-cpu==2.19.1"), ("2.2", "tensorflow-cpu==2.2.*")],
)
def test_a_version_of_tensorflow(inventory: Inventory, text: str, line: str) -> None:
    found = runtimes.from_version(text, "--runtime-version", inventory)
    assert found
    assert (found.name, sorted(found.lines)) == (f"tensorflow-{text}", ["fsspec", "numpy", "tensorboard", line])


@pytest.mark.parametrize("text", ["2.21", "2.21.0"])
def test_the_version_that_the_hosts_have_needs_nothing(inventory: Inventory, text: str) -> None:
    assert runtimes.from_version(text, "--runtime-version", inventory) is None
    assert runtimes.from_version(text, "--runtime-version", replace(inventory, tensorflow="2.20.0"))
    assert runtimes.from_version("2.20", "--runtime-version", replace(inventory, tensorflow="2.20.0")) is None


@pytest.mark.parametrize("text", ["3", "3.0", "2", "1.15", "2.x", "2.19.1.0", "", "2.19; rm"])
def test_what_is_no_version(inventory: Inventory, text: str) -> None:
    with pytest.raises(UsageError, match=r"is no version of TensorFlow 2: write 2.20 or 2.20.0, or leave it out for 2.21.0"):
        runtimes.from_version(text, "--runtime-version", inventory)


def config(folder: Path, text: str) -> str:
    (file := folder / "config.yaml").write_text(f"trainingInput: {{{text}}}\n")
    return str(file)


def test_config_yaml_says_it_too_and_a_flag_wins(local: Inventory, tmp_path: Path) -> None:
    requirements(tmp_path, "far\n")
    from_file = config(tmp_path, "runtime: requirements.txt")  # beside config.yaml, wherever fab is called
    job = build_job(JobFlags("j", config=from_file), local)
    assert (job.runtime and job.runtime.name, job.training_input["runtime"]) == ("requirements", "requirements")
    job = build_job(JobFlags("j", config=from_file, runtime_version="2.20"), local)
    assert (job.runtime and job.runtime.name, job.training_input["runtime"]) == ("tensorflow-2.20", "tensorflow-2.20")
    job = build_job(JobFlags("j", config=config(tmp_path, "runtimeVersion: 2.19")), local)
    assert job.runtime and job.runtime.name == "tensorflow-2.19"
    assert not job.notes


def test_a_version_of_cloud_mls_days_is_passed_over(local: Inventory, inventory: Inventory, tmp_path: Path) -> None:
    old = build_job(JobFlags("j", config=config(tmp_path, "runtimeVersion: 1.15")), local)
    elsewhere = build_job(JobFlags("j", config=config(tmp_path, "runtimeVersion: 2.19")), inventory)
    where = tmp_path / "config.yaml"
    said = "no Python of today has TensorFlow 1, of which tf.compat.v1 is left"
    assert (old.runtime, old.notes) == (None, (f"runtimeVersion in {where}: ignored, {said}",))
    said = "the stack defines the hosts' Python"
    assert (elsewhere.runtime, elsewhere.notes) == (None, (f"runtimeVersion in {where}: ignored, {said}",))


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"runtime": "nowhere.txt"}, "--runtime nowhere.txt is no file"),
        ({"runtime": "a", "runtime_version": "2.20"}, "--runtime and --runtime-version both say which Python"),
        ({"runtime_version": "9"}, "is no version of TensorFlow 2"),
    ],
)
def test_what_is_refused(local: Inventory, flags: dict[str, str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        build_job(JobFlags("j", **flags), local)  # type: ignore[arg-type]


def test_both_in_config_yaml_or_nothing_asked_for(local: Inventory, tmp_path: Path) -> None:
    requirements(tmp_path, "# nothing\n")
    with pytest.raises(UsageError, match="both say which Python"):
        build_job(JobFlags("j", config=config(tmp_path, "runtime: requirements.txt, runtimeVersion: '2.20'")), local)
    with pytest.raises(UsageError, match="asks for nothing"):
        build_job(JobFlags("j", runtime=str(tmp_path / "requirements.txt")), local)


def test_a_target_without_runtimes_says_so(inventory: Inventory) -> None:
    google = replace(inventory, operator_bucket="gs://mine", tensorflow="2.20.0")
    with pytest.raises(UsageError, match=r"have the Python of their image only, with TensorFlow 2\.20\.0"):
        build_job(JobFlags("j", runtime_version="2.21"), google)
    with pytest.raises(UsageError, match="were made before they could have any: run pulumi up"):
        build_job(JobFlags("j", runtime_version="2.20"), replace(inventory, operator_bucket="sftp:///bucket"))


def test_a_package_is_given_what_its_runtime_lacks(index: Path, tmp_path: Path) -> None:
    wheel(index)
    (root := tmp_path / "mine").mkdir()
    for name, text in (("__init__.py", ""), ("task.py", "import far\n"), ("requirements.txt", "far\nnumpy\n")):
        (root / name).write_text(text)
    lacking = package.build(root, "mine.task", installed={"numpy": "1.0"})
    assert set(lacking.wheels) == {
        "far/__init__.py",
        *(f"far-1.0.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD")),
    }
    assert package.build(root, "mine.task", installed={"far": "1.0", "numpy": "1.0"}).wheels == {}


@pytest.mark.usefixtures("unzipped")
def test_the_manifest_has_its_versions_and_a_rerun_the_same(local: Inventory, tmp_path: Path) -> None:
    job = build_job(JobFlags("j", runtime=requirements(tmp_path, "far\n")), local, "mine")
    assert job.runtime
    have = runtimes.build(local, job.runtime)
    (root := tmp_path / "mine").mkdir()
    for name in ("__init__.py", "task.py"):
        (root / name).write_text("")
    whole = manifest.manifest(local, job, package.build(root, "mine.task", installed=have))
    told = json.loads(manifest.to_json(whole))["runtime"]
    assert told == {"name": "requirements", "key": job.runtime.key, "sha256": ANY, "requirements": ["far==1.0"]}
    assert manifest.summarize(whole)["runtime"] == {key: told[key] for key in ("name", "key", "sha256")}
    assert manifest.runtime_line(whole) == f"requirements sha256:{told['sha256'][:16]}"
    assert "runtime" not in whole["config"]
    again = runtimes.from_manifest(local, told)
    assert again.key == job.runtime.key
    # Of other versions to this day, or gone: then of those that the job had.
    assert runtimes.from_manifest(local, told | {"requirements": ["far==0.9"]}).lines == ("far==0.9",)
    assert runtimes.from_manifest(local, told | {"key": "gone"}).key not in ("gone", job.runtime.key)
    assert runtimes.python_of(local, whole) == f"{HOSTS_SEE}/{job.runtime.key}/bin/python"
    assert runtimes.python_of(local, {}) is None


@pytest.mark.parametrize(
    "told",
    [
        {"requirements": ["--index-url http://127.0.0.1:1"]},
        {"requirements": ["far @ http://127.0.0.1:1/far.tar.gz"]},
        {"requirements": "far==1.0"},
        {"requirements": [1]},
        {"key": "../../etc"},
        {"name": None},
    ],
)
def test_a_manifest_that_a_job_wrote_runs_no_uv_of_its_choice(local: Inventory, told: dict[str, object]) -> None:
    with pytest.raises(OpsError, match="a runtime that fab train would not have made"):
        runtimes.from_manifest(local, {"name": "x", "key": "y", "requirements": ["far==1.0"]} | told)


def test_files_that_name_others_are_built_and_are_part_of_the_key(local: Inventory, index: Path, tmp_path: Path) -> None:
    wheel(index)
    asked = requirements(tmp_path, "-r more.txt\n")
    (tmp_path / "more.txt").write_text("-r most.txt\n")
    (tmp_path / "most.txt").write_text("far\n")
    first = runtimes.from_file(asked, "--runtime")
    assert runtimes.build(local, first) == {"far": "1.0"}
    (tmp_path / "most.txt").write_text("far>=1\n")
    assert runtimes.from_file(asked, "--runtime").key != first.key


def test_a_folder_that_is_called_like_a_distribution_is_none(tmp_path: Path) -> None:
    asked = requirements(tmp_path, "far\n")
    before = runtimes.from_file(asked, "--runtime").key
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "data").write_text("x")
    assert runtimes.from_file(asked, "--runtime").key == before


@pytest.mark.parametrize("line", ["-e .", "--editable ./lib", ".", "./"])
def test_what_would_stay_a_folder_of_this_machine_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError, match="stays a folder of this machine: name a wheel of it"):
        runtimes.from_file(requirements(tmp_path, f"{line}\n"), "--runtime")


def test_the_user_s_environment_is_not_taken_for_it(
    local: Inventory, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = wheel(index)
    with zipfile.ZipFile(here) as opened:
        opened.extractall(tmp_path / "mine")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    assert runtimes.build(local, runtimes.from_file(requirements(tmp_path, "far\n"), "--runtime")) == {"far": "1.0"}


def test_programs_name_the_python_that_hosts_see(inventory: Inventory, index: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    local = replace(inventory, runtimes=HOSTS_SEE, operator_runtimes=str(tmp_path / "link"))
    script = "#!python\nprint('hello')\n"
    wheel(index, files={"far/__init__.py": "", "far-1.0.data/scripts/far-tool": script})
    made = runtimes.from_file(requirements(tmp_path, "far\n"), "--runtime")
    runtimes.build(local, made)
    first = (tmp_path / "link" / made.key / "bin" / "far-tool").read_text().splitlines()[0]
    assert first == f"#!{HOSTS_SEE}/{made.key}/bin/python"


class _Ledger:
    def __init__(self, *records: JobRecord) -> None:
        self._records, self.unreadable = list(records), list[str]()

    def jobs(self) -> tuple[list[JobRecord], list[str]]:
        return self._records, self.unreadable


class _Cluster:
    def __init__(self, inventory: Inventory, *records: JobRecord) -> None:
        self.inventory, self.ledger = inventory, _Ledger(*records)


@pytest.mark.usefixtures("unzipped")
def test_runtimes_are_listed_and_removed(local: Inventory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ops.submit.runtimes import runtimes as run

    key = runtimes.from_file(asked := requirements(tmp_path, "far\n"), "--runtime").key
    runtimes.build(local, runtimes.from_file(asked, "--runtime"))
    cluster = _Cluster(local, JobRecord("j", manifest={"runtime": {"key": key}}))
    assert run(cluster, None, None, False, True) == 0  # type: ignore[arg-type]
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["name"], told["versions"], told["bytes"] > 1000) == (key, {"far": "1.0"}, True)
    with pytest.raises(UsageError, match=f"job j, which is QUEUED, runs in {key}"):
        run(cluster, "rm", key, True, False)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"there is no runtime far; there are {key}"):
        run(cluster, "rm", "far", True, False)  # type: ignore[arg-type]
    for wrong in (("rm", None), ("ls", key), ("list", None)):
        with pytest.raises(UsageError, match="fab runtimes"):
            run(cluster, *wrong, True, False)  # type: ignore[arg-type]
    damaged = _Cluster(local)
    damaged.ledger.unreadable = ["job.json of j is no JSON"]
    with pytest.raises(UsageError, match=r"records are unreadable: job\.json of j is no JSON"):
        run(damaged, "rm", key, True, False)  # type: ignore[arg-type]
    assert run(_Cluster(local), "rm", key, True, True) == 0  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out) == {"removed": key}
    assert list((tmp_path / "runtimes").iterdir()) == []
