"""The environment of a trainer on real hosts: output, peers, user's variables, secrets, and deletion."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from pathlib import Path

import pytest
from stacks import Stack
from waiting import wait_for

_SECRET = "s3cr3t-of-ann"
_PROGRAM = "#!/bin/sh\necho run by itself\n"
_TRAINER = """
import argparse, hashlib, json, os, pathlib, subprocess, time
parser = argparse.ArgumentParser()
parser.add_argument("--job_dir")
folder = pathlib.Path(parser.parse_args().job_dir)
here = pathlib.Path(__file__).parent
seen = {name: os.environ.get(name) for name in ("JOB_DIR", "RANK", "WORLD_SIZE", "MASTER_ADDR", "GREETING", "OMP_NUM_THREADS")}
seen["there"] = folder.is_dir()
(here / "beside").write_text("x")  # as programs often do
if os.environ["TYPE"] == "master":
    (folder / "own").mkdir(exist_ok=True)
    (folder / "own" / "file").write_text("x")
    (folder / "own").chmod(0o755)  # as TensorFlow makes its folders
seen["secret"] = hashlib.sha256(os.environ["TOKEN"].encode()).hexdigest()
seen["program"] = subprocess.run([here / "run.sh"], capture_output=True, text=True).stdout
(folder / f"{os.environ['TYPE']}-{os.environ['INDEX']}.json").write_text(json.dumps(seen))
while os.environ["TYPE"] == "master" and len(list(folder.glob("*.json"))) < 6:
    time.sleep(0.1)
"""

_FOLDERS = """
import ctypes, os, pathlib, resource, shutil, socket, subprocess, tempfile
root = pathlib.Path(os.environ["JOB_DIR"])
places = [root, pathlib.Path.cwd(), pathlib.Path.home(), pathlib.Path("/tmp"), pathlib.Path("/var/tmp")]
data = pathlib.Path(os.environ["SCALETIER_DATA"], "mnist", "of-before")
git = "git -c init.defaultBranch=main -c user.name=a -c user.email=b"
ways = (
    "cp -r tree by-cp-r",
    "cp -a tree by-cp-a",
    "rsync -a tree/ by-rsync",
    "tar cf tree.tar tree && mkdir by-tar && tar xf tree.tar -C by-tar",
    'chown "$(id -un)" tree.tar && chgrp -R "$(id -gn)" tree',
    "python3 -m zipfile -c tree.zip tree/ && unzip -q tree.zip -d by-unzip",
    f"mkdir repo && cp -r tree repo && cd repo && {git} init -q && git add . && {git} commit -qm x && git clone -q . ../by-git",
    f"cp -r {data} data-r && cp -a {data} data-a && rsync -a {data}/ data-s",
)
for place in places:
    (place / "tree/deep").mkdir(parents=True)
    (place / "tree/deep/file").write_text("x")
    for way in ways:
        subprocess.run(["sh", "-ec", way], cwd=place, check=True)
    shutil.copytree(data, place / "data-p")
    for other in places:
        shutil.copytree(place / "tree", other / "copied")
        shutil.rmtree(other / "copied")
        if other != place:
            shutil.move(place / "by-cp-a", other / "moved")
            shutil.move(other / "moved", place / "by-cp-a")
    print(place.name, len(list(place.rglob("file"))))
if (root / "of-before").exists():
    shutil.copytree(root / "of-before", "/tmp/of-before")
for library in ("libgomp.so.1", "libGL.so.1", "libglib-2.0.so.0", "libsndfile.so.1", "libgfortran.so.5"):
    ctypes.CDLL(library)
files = [tempfile.TemporaryFile(dir="/var/tmp") for _ in range(3_000)]
print("files", len(files), *resource.getrlimit(resource.RLIMIT_NOFILE))
subprocess.run(["sh", "-ec", "echo to stdout >/dev/stdout; echo to stderr >/dev/stderr"], check=True)
print("name", socket.getaddrinfo(socket.getfqdn(), None)[0][4][0])
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "looker"
    root.mkdir()
    (root / "__init__.py").touch()
    (root / "task.py").write_text(_TRAINER)
    (root / "run.sh").write_text(_PROGRAM)
    (root / "run.sh").chmod(0o755)
    return root


def test_a_trainer_gets_its_environment_and_its_secrets_are_deleted(cluster: Stack, package: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"TOKEN={_SECRET}\n")
    flags = ("--package", str(package), "--env", "GREETING=good day", "--secret-file", str(tmp_path / "token"))
    cluster.must("train", "looks", *flags)
    environments = {path.stem: json.loads(path.read_text()) for path in cluster.get("looks", tmp_path).glob("*.json")}
    assert sorted(environments) == sorted(cluster.hosts())
    master, worker, ps = environments["master-0"], environments["worker-1"], environments["ps-0"]
    assert (master["RANK"], worker["RANK"], ps["RANK"], master["WORLD_SIZE"]) == ("0", "2", None, "3")
    assert master["MASTER_ADDR"] == worker["MASTER_ADDR"] is not None
    for each in environments.values():
        assert int(each["OMP_NUM_THREADS"]) > 0
        assert (each["there"], each["GREETING"], each["program"]) == (True, "good day", "run by itself\n")
        assert each["JOB_DIR"] == "/bucket/jobs/looks/output"
        assert each["secret"] == hashlib.sha256(_SECRET.encode()).hexdigest()
    assert cluster.describe("looks")["trainingInput"]["environment"] == {"GREETING": "good day"}
    search = "sudo ls -A /var/lib/scaletier/secrets; sudo grep -rlF s3cr3t-of-ann /var/lib/scaletier /etc /bucket/jobs || true"
    for host in ("master-0", "worker-1"):
        # A host deletes them after its job, when it polls for the next one.
        wait_for(lambda host=host: cluster.ssh(host, search).out == "", f"{host} has deleted the secrets")


_BESIDE = """
import argparse, os, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--model_dir", type=pathlib.Path)
folder = parser.parse_args().model_dir
folder.mkdir(parents=True, exist_ok=True)
(folder / "model.txt").write_text("weights")
pathlib.Path.home().joinpath("notes").write_text("n")
pathlib.Path("/var/tmp/scratch").write_text("s")
pathlib.Path("/tmp/out").write_text("out")
pathlib.Path("passwd").symlink_to("/etc/passwd")
os.truncate(os.open("big.bin", os.O_CREAT | os.O_WRONLY), 150_000_000)
"""


def test_files_written_beside_job_dir_are_saved_and_reported(cluster: Stack, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(_BESIDE)
    flags = ("--scale-tier", "BASIC", "--script", str(tmp_path / "beside.py"))
    lost = cluster.fab("train", "beside", *flags, "--", "--model_dir", "model")
    assert (lost.code, "it wrote nothing to JOB_DIR; fab get beside fetches its 4 files" in lost.err) == (0, True), lost.text
    saved_names = "home/notes, var/tmp/scratch, tmp/out, beside/model/model.txt; not kept: beside/big.bin (150.0 MB)"
    assert f"master-0 wrote outside JOB_DIR, kept in JOB_DIR/left/master-0: {saved_names}" in lost.err.splitlines()
    output = cluster.get("beside", tmp_path)
    files = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    assert files == {f"left/master-0/{name}" for name in ("home/notes", "var/tmp/scratch", "tmp/out", "beside/model/model.txt")}
    saved = cluster.fab("train", "saved", *flags, "--", "--model_dir", "$JOB_DIR/model")
    assert (saved.code, "fab get saved fetches its 1 file, 7 B" in saved.err) == (0, True), saved.text
    lost_names = "beside/big.bin (150.0 MB), tmp/out (3 B), home/notes (1 B), var/tmp/scratch (1 B)"
    assert f"master-0 wrote outside JOB_DIR, not kept: {lost_names}" in saved.err.splitlines()
    alone = cluster.fab("train", "alone", "--scale-tier", "BASIC", "--command", "echo hi")
    assert (alone.code, "it wrote nothing to JOB_DIR, there is nothing to fetch" in alone.err) == (0, True), alone.text
    assert "hi" in cluster.fab("logs", "alone").out


_INTO_JOB_DIR = """
import os, pathlib, shutil, subprocess, tempfile
root, tree = os.environ["JOB_DIR"], pathlib.Path("tree/deep")
tree.mkdir(parents=True)
(tree / "file").write_text("x")
os.environ["HOME"] = os.getcwd()
subprocess.run(["git", "config", "--global", "init.defaultBranch", "main"], check=True)
for way in (
    "cp -a tree/. {0}",
    "rsync -a tree/ {0}/",
    "tar cf - -C tree . | tar xf - -C {0}",
    "chmod 755 {0}",
    "git init -q {0} && git -C {0} status",
):
    subprocess.run(["sh", "-ec", way.format(root)], check=True)
shutil.copytree("tree", root, dirs_exist_ok=True)
os.umask(0o077)
with tempfile.NamedTemporaryFile(dir=root, delete=False) as file:
    file.write(b"weights")
os.replace(file.name, pathlib.Path(root, "model"))
pathlib.Path(tempfile.mkdtemp(dir=root), "part").write_text("p")
"""


def test_job_dir_is_a_copy_target_and_its_private_files_are_fetched(cluster: Stack, tmp_path: Path) -> None:
    (tmp_path / "into.py").write_text(_INTO_JOB_DIR)
    cluster.must("train", "into", "--scale-tier", "BASIC", "--script", str(tmp_path / "into.py"))
    output = cluster.get("into", tmp_path)
    assert (output / "model").read_text() == "weights"
    assert [path.read_text() for path in output.glob("tmp*/part")] == ["p"]


_NAMES = """
import json, os, pathlib, socket
known = {name: socket.gethostbyname(name) for name in os.environ["HOSTS"].split()}
pathlib.Path(os.environ["JOB_DIR"], f"{socket.getfqdn()}.json").write_text(json.dumps(known))
"""


def test_hosts_of_a_job_resolve_each_others_names(cluster: Stack, tmp_path: Path) -> None:
    """Resolve host names, as PyTorch's c10d rendezvous passes the name of rank 0's host to all replicas."""
    (tmp_path / "names.py").write_text(_NAMES)
    flags = ("--script", str(tmp_path / "names.py"), "--env", f"HOSTS={' '.join(cluster.hosts())}")
    cluster.must("train", "names", *flags)
    addresses = {path.stem: json.loads(path.read_text()) for path in cluster.get("names", tmp_path).glob("*.json")}
    assert sorted(addresses) == sorted(cluster.hosts())
    first = addresses["master-0"]
    assert len(set(first.values())) == len(first)
    assert all(each == first for each in addresses.values())


def test_jobs_and_data_are_deleted(cluster: Stack, package: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("TOKEN=x\n")
    flags = ("--package", str(package), "--secret-file", str(tmp_path / "token"))
    cluster.must("train", "goes", *flags)
    cluster.must("train", "resumed", "--resume", "goes", *flags)
    refused = cluster.fab("delete", "goes")
    assert (refused.code, "job resumed has its output in that of goes" in refused.err) == (2, True)

    def is_deleted() -> bool:
        result = cluster.fab("delete", "resumed", "--yes")
        assert result.code == 0 or "its replicas have not all stopped: try again" in result.err, result.text
        return result.code == 0

    wait_for(is_deleted, "resumed is deleted")
    refused = cluster.fab("delete", "goes")
    assert (refused.code, "say --yes, as there is no terminal to ask on" in refused.err) == (2, True)
    cluster.must("delete", "goes", "--yes")
    assert not {"goes", "resumed"} & set(cluster.ssh("master-0", "ls /bucket/jobs").out.split())
    assert cluster.fab("data", "put", str(package), "mine").out.endswith("/bucket/data/mine\n")
    assert cluster.ssh("ps-0", "sudo -u trainer cat /bucket/data/mine/run.sh").out == _PROGRAM
    listing = cluster.json("data", "ls", "mine")
    assert [file["name"] for file in listing["files"]] == ["__init__.py", "run.sh", "task.py"]
    program = str(package / "run.sh")
    assert cluster.fab("data", "put", program, "one").out == "1 file: /bucket/data/one\n"
    assert cluster.fab("data", "put", program, "one").out == "1 file, 1 unchanged: /bucket/data/one\n"
    assert cluster.json("data", "ls", "one")["files"] == [{"name": "one", "bytes": len(_PROGRAM)}]
    for name in ("mine", "one"):
        cluster.must("data", "rm", name, "--yes")
    assert not {"mine", "one"} & set(cluster.ssh("ps-0", "ls /bucket/data").out.split())


def test_a_job_uses_its_own_python(cluster: Stack, tmp_path: Path) -> None:
    wheel = tmp_path / "far-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr("far.py", "VALUE = 7\n")
        opened.writestr("far-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: far\nVersion: 1.0\n")
        opened.writestr("far-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        opened.writestr("far-1.0.dist-info/RECORD", "")
    (tmp_path / "requirements.txt").write_text(f"./{wheel.name}\n")
    (tmp_path / "looks.py").write_text(
        "import importlib.util, shutil, sys, far\n"
        "print('found', far.VALUE, importlib.util.find_spec('tensorflow'), sys.prefix, shutil.which('python'))\n"
    )
    program = ("--scale-tier", "BASIC", "--script", str(tmp_path / "looks.py"))
    cluster.must("train", "own_python", *program, "--runtime", str(tmp_path / "requirements.txt"))
    key = cluster.describe("own_python")["manifest"]["runtime"]["key"]
    try:
        folder = f"/opt/scaletier/runtimes/{key}"
        log = cluster.fab("logs", "all", "own_python").out
        assert f"found 7 None {folder} {folder}/bin/python" in log
        assert cluster.ssh("master-0", f"sudo touch {folder}/mine").code != 0, "no host writes there"
        runtimes = {each["name"]: each["versions"] for each in cluster.json("runtimes")}
        assert runtimes[key] == {"far": "1.0"}
        compared = {row["what"]: row["same"] for row in cluster.must_json("reproduce", "own_python")["compared"]}
        assert (compared["runtime"], compared["package"]) == (True, True)
    finally:
        cluster.must("runtimes", "rm", key, "--yes")


def test_a_host_behaves_like_minimal_debian(cluster: Stack, tmp_path: Path) -> None:
    """Use folders of earlier versions, which have the set-group-ID bit that no program may copy."""
    script, old_folders = tmp_path / "folders.py", "data own/unpacks"
    script.write_text(_FOLDERS)
    command = (
        "cd /bucket && for top in data/mnist own/unpacks; do mkdir -p $top/of-before/deep; touch $top/of-before/deep/file; done"
    )
    cluster.must_ssh("master-0", f"{command} && find {old_folders} -type d -exec chmod g+s {{}} +", user="scaletier")
    flags = ("--script", str(script), "--job-dir", "/bucket/own/unpacks", "--scale-tier", "BASIC")
    try:
        result = cluster.must("train", "unpacks", *flags)
    finally:  # other tests share the data
        cluster.must_ssh("master-0", "rm -r /bucket/data/mnist/of-before", user="scaletier")
    limits = re.search(r"files 3000 (\d+) (\d+)", result.text)
    assert limits
    assert limits[1] == limits[2], "LXD's own limit of open files, at most 1048576"
    address = cluster.ssh("master-0", "ip -4 -o address show scope global").out.split()[3].partition("/")[0]
    assert all(line in result.text for line in (f"name {address}", "to stdout", "to stderr"))
    assert cluster.ssh("master-0", f"cd /bucket && find {old_folders} -perm /6000", user="scaletier").out == ""
