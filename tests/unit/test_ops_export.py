"""Check `fab export` with a bucket that is a directory: the model, its target, and jobs without a model."""

from __future__ import annotations

import gzip
import io
import json
import shlex
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opsdata import put_job, refuse_packages_as_records, write_files

from infra.inventory import Inventory
from jobs.folder_bucket import FolderBucket
from jobs.model_signatures import Signature, Tensor, read_signatures
from jobs.records import JobRecord
from jobs.states import JobState
from jobs.study import Trial
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import existing_job
from ops.errors import OpsError, UsageError
from ops.models import export as module
from ops.package import host_stream, package

# A SavedModel in protocol buffers: one graph, the signature that initializes it, and one that serves.
_FLOAT = b"\x10\x01" + b"\x1a\x12" + b"\x12\x0b\x08" + b"\xff" * 9 + b"\x01" + b"\x12\x03\x08\x90\x06"
_TEXT = b"\x10\x07\x1a\x02\x18\x01"


def field(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def tensor(number: int, name: bytes, info: bytes) -> bytes:
    return field(number, field(1, name) + field(2, info))


def saved_model() -> bytes:
    serve = field(1, b"serve") + field(2, tensor(1, b"x", _FLOAT) + tensor(2, b"y", _TEXT) + field(3, b"predict"))
    start = field(1, b"__saved_model_init_op") + field(2, b"")
    return b"\x08\x01" + field(2, field(5, serve) + field(5, start))


MINE = {"package": {"name": "mine", "sha256": ""}}
DECLARES = {"mine/__init__.py": b"", "mine/saved.py": b"", "mine/scaletier.yaml": b"export: mine.saved"}
SIGNATURES = {"serve": {"inputs": {"x": "float32 [?, 784]"}, "outputs": {"y": "string of any shape"}}}


class FakeFleet:
    """Run commands given to `must`: each writes an exported model."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory, self.commands = inventory, []

    def any_connection(self) -> None:
        raise AssertionError("the bucket is a directory")

    def check_output(self, name: str, command: str, what: str, stdin: bytes) -> str:
        self.commands.append((name, command))
        put_output(self.inventory, "export/Servo/1800000000/saved_model.pb", saved_model())
        return ""


def put_output(inventory: Inventory, path: str, content: bytes) -> None:
    write_files(Path(inventory.operator_bucket) / "jobs/job01/output", {path: content})


@pytest.fixture
def cluster(inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterClient:
    """Return a cluster whose job01 has ended and has no output yet."""
    (tmp_path / "bucket").mkdir()
    changed = replace(inventory, operator_bucket=f"{tmp_path}/bucket")
    cluster = ClusterClient(changed, FakeFleet(changed))  # type: ignore[arg-type]
    job = JobRecord("job01", state=JobState.FAILED, trainingInput={"args": ["--model", "cnn"]}, manifest=MINE)
    put_job(cluster.ledger, job)
    monkeypatch.chdir(tmp_path)
    return cluster


def run_export(cluster: ClusterClient, capsys: pytest.CaptureFixture[str], dest: str | None = None) -> Any:
    assert module.export(cluster, "job01", dest, as_json=True) == 0
    return json.loads(capsys.readouterr().out)


def test_a_saved_model_is_read_without_tensorflow() -> None:
    assert read_signatures(saved_model()) == {
        "serve": Signature({"x": Tensor("float32", (None, 784))}, {"y": Tensor(None, None)})
    }
    number_for_a_name = field(2, field(5, field(1, b"serve") + field(2, tensor(1, b"x", b"\x08\x01"))))
    number_for_a_value = field(2, field(5, field(1, b"serve") + field(2, field(1, field(1, b"x") + b"\x10\x01"))))
    number_for_a_key = field(2, field(5, field(1, b"serve") + field(2, field(1, b"\x08\x01" + field(2, _TEXT)))))
    invalid_contents = (
        *(b"\xff", b"\x0f\x01", saved_model()[:-3], saved_model()[:-1]),
        *(number_for_a_name, number_for_a_value, number_for_a_key, b"\x09" + bytes(7), b"\x0d" + bytes(3), b"\x0b\x01"),
    )
    for invalid in invalid_contents:
        with pytest.raises(ValueError, match="not a SavedModel"):
            read_signatures(invalid)


def test_only_the_graph_tagged_serve_is_read() -> None:
    def graph(name: bytes, *tags: bytes) -> bytes:
        return field(2, field(1, b"".join(field(4, tag) for tag in tags)) + field(5, field(1, name) + field(2, b"")))

    other_graphs = graph(b"a", b"serve", b"tpu") + graph(b"b", b"train") + graph(b"c")
    assert list(read_signatures(other_graphs + graph(b"d", b"serve") + field(2, field(5, field(1, b"e"))))) == ["d", "e"]
    with pytest.raises(ValueError, match=r"^no graph of the model has the tag serve alone; there are none, serve\+tpu, train$"):
        read_signatures(other_graphs)


def test_unknown_fields_and_missing_ones_of_a_saved_model() -> None:
    """Fixed numbers are skipped; a type, a size, a name or a tensor of zeros is left out by protocol buffers."""
    sizes = field(3, field(2, b"") + field(2, b"\x08\x00") + field(2, b"\x08\x01"))
    unknown = b"\x39" + b"\x10" * 8 + b"\x3d" + b"\x10" * 4
    inputs = tensor(1, b"a", b"\x10\x03" + unknown + sizes) + tensor(1, b"b", b"\x10\x63" + field(1, b"b:0")) + field(1, b"")
    content = unknown + field(2, field(5, field(1, b"serve") + field(2, inputs)) + field(5, b""))
    signatures = read_signatures(content)
    nothing = Tensor("type 0", ())
    assert signatures == {
        "": Signature({}, {}),
        "serve": Signature({"": nothing, "a": Tensor("int32", (0, 0, 1)), "b": Tensor("type 99", ())}, {}),
    }
    assert list(signatures) == ["", "serve"]
    assert [tensor.name for tensor in signatures["serve"].inputs.values()] == ["", "", "b:0"]


def test_the_newest_complete_model_is_fetched(cluster: ClusterClient, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("999", b"old"), ("1700000000", saved_model()), ("temp-1900000000", b"half")):
        put_output(cluster.inventory, f"export/Servo/{name}/saved_model.pb", content)
    put_output(cluster.inventory, "export/Servo/1700000000/variables/variables.index", b"i")
    output = run_export(cluster, capsys)
    assert output == {
        "path": "export/job01/1700000000",
        "source": "/bucket/jobs/job01/output/export/Servo/1700000000",
        "signatures": SIGNATURES,
    }
    files = sorted(path.relative_to("export/job01").as_posix() for path in Path("export/job01").rglob("*") if path.is_file())
    assert files == ["1700000000/saved_model.pb", "1700000000/variables/variables.index"]
    with pytest.raises(UsageError, match=r"^export/job01/1700000000 is there already: remove it, or give another --dest$"):
        module.export(cluster, "job01", None, as_json=False)


def test_any_saved_model_is_exported_to_an_empty_directory(cluster: ClusterClient, capsys: pytest.CaptureFixture[str]) -> None:
    put_output(cluster.inventory, "my model/saved_model.pb", saved_model())
    Path("empty").mkdir()
    assert run_export(cluster, capsys, "empty")["source"] == "/bucket/jobs/job01/output/my model"
    assert Path("empty/saved_model.pb").read_bytes() == saved_model()
    Path("file").write_text("mine")
    with pytest.raises(UsageError, match=r"^file is there already"):
        module.export(cluster, "job01", "file", as_json=False)


def test_a_model_is_shown_as_tables(cluster: ClusterClient, capsys: pytest.CaptureFixture[str]) -> None:
    put_output(cluster.inventory, "saved_model.pb", saved_model())
    assert module.export(cluster, None, None, as_json=False) == 0
    assert capsys.readouterr().out.splitlines() == [
        "export/job01/model",
        "",
        "serve   TENSOR  SHAPE",
        "input   x       float32 [?, 784]",
        "output  y       string of any shape",
    ]


def test_an_interrupted_download_leaves_nothing(cluster: ClusterClient, monkeypatch: pytest.MonkeyPatch) -> None:
    put_output(cluster.inventory, "1/saved_model.pb", saved_model())
    put_output(cluster.inventory, "1/variables/variables.index", b"i")
    download = FolderBucket.download
    monkeypatch.setattr(
        FolderBucket, "download", lambda bucket, name, *args: name.endswith(".pb") and download(bucket, name, *args)
    )
    with pytest.raises(OpsError, match=r"/bucket/jobs/job01/output/1/variables/variables.index is gone"):
        module.export(cluster, "job01", None, as_json=False)
    assert list(Path("export/job01").iterdir()) == []


def test_the_best_trials_model_is_fetched(
    cluster: ClusterClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "best_trial", lambda *_: Trial(2, {"units": "32"}, "master-0"))
    put_output(cluster.inventory, "2/export/Servo/1/saved_model.pb", saved_model())
    assert module.export(cluster, "job01", "here", as_json=True) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["source"] == "/bucket/jobs/job01/output/2/export/Servo/1"
    assert output.err == "job01 tuned hyperparameters; trial 2 is the best: --units=32\n"


def test_the_newest_model_is_that_of_the_largest_number(cluster: ClusterClient) -> None:
    for files, newest in (
        (["1/saved_model.pb", "z/saved_model.pb", "2/other.pb"], "1"),
        (["b/9/saved_model.pb", "a/10/saved_model.pb"], "a/10"),
        (["epoch_9/saved_model.pb", "epoch_10/saved_model.pb", "epoch_/saved_model.pb"], "epoch_10"),
        (["step_20/model/saved_model.pb", "step_100/model/saved_model.pb"], "step_100/model"),
        (["a/temp-9/saved_model.pb"], None),
        ([], None),
    ):
        output = SimpleNamespace(files=dict.fromkeys(files, 1))
        assert module.newest_model(output) == newest  # type: ignore[arg-type]


def test_a_bucket_of_google_needs_the_lender_of_credentials(
    cluster: ClusterClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[tuple[str, str, bytes]] = []
    monkeypatch.setattr(
        cluster.fleet, "check_output", lambda name, command, _, stdin: streams.append((name, command, stdin)) or ""
    )
    monkeypatch.setattr("ops.cluster.output.open_bucket", lambda _: FolderBucket(tmp_path / "bucket/jobs/job01/output"))
    put_output(cluster.inventory, "model-7.index", b"")
    put_job(cluster.ledger, replace(existing_job(cluster.ledger, "job01"), trainingInput={"jobDir": "gs://other/out"}))
    cluster.bucket.upload("jobs/job01/package.tar.gz", package.pack(DECLARES))
    with pytest.raises(OpsError, match=r"^mine.saved of job job01 left no SavedModel in gs://other/out$"):
        module.export(cluster, "job01", None, as_json=False)
    (host, install, stream), (_, run, archive) = streams
    assert (host, install) == ("master-0", host_stream.install_command(host_stream.code(module.CHECKOUT)[1]))
    assert archive == package.pack(DECLARES)
    assert shlex.split(run)[-2:] == ["--job-dir", "gs://other/out"]
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(stream))) as tar:
        names = {Path(name).name for name in tar.getnames()}
    assert {"token_broker.py", "launcher_client.py"} <= names, "the agent's code"


def test_an_invalid_model_is_one_line(cluster: ClusterClient) -> None:
    put_output(cluster.inventory, "export/Servo/1/saved_model.pb", b"\xff")
    with pytest.raises(OpsError, match=r"^export/job01/1/saved_model.pb: not a SavedModel"):
        module.export(cluster, "job01", None, as_json=False)


def test_a_model_larger_than_any_is_not_read(cluster: ClusterClient, monkeypatch: pytest.MonkeyPatch) -> None:
    put_output(cluster.inventory, "export/Servo/1/saved_model.pb", saved_model())
    monkeypatch.setattr(module, "LARGEST_MODEL_FILE", 9)
    with pytest.raises(OpsError, match=rf"^export/job01/1/saved_model.pb has {len(saved_model())} B; 9 B is the most$"):
        module.export(cluster, "job01", None, as_json=False)


def test_checkpoints_are_exported_by_the_jobs_package(
    cluster: ClusterClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_packages_as_records(monkeypatch)
    put_output(cluster.inventory, "anywhere/model-7.index", b"")
    message = r"^job job01 \(FAILED\) exported no model, and its trainer declares no export in scaletier.yaml to make one"
    with pytest.raises(OpsError, match=message):
        module.export(cluster, "job01", None, as_json=False)
    cluster.bucket.upload("jobs/job01/package.tar.gz", package.pack({"mine/__init__.py": b""}))
    with pytest.raises(OpsError, match=message):
        module.export(cluster, "job01", None, as_json=False)
    cluster.bucket.upload("jobs/job01/package.tar.gz", package.pack(DECLARES))
    Path("taken").touch()
    with pytest.raises(UsageError, match=r"^taken is there already"):
        module.export(cluster, "job01", "taken", as_json=False)
    put_job(cluster.ledger, replace(existing_job(cluster.ledger, "job01"), manifest={}))
    with pytest.raises(OpsError, match=message):
        module.export(cluster, "job01", None, as_json=False)
    put_job(cluster.ledger, replace(existing_job(cluster.ledger, "job01"), manifest=MINE))
    assert run_export(cluster, capsys)["path"] == "export/job01/1800000000"
    ((host, command),) = cast(FakeFleet, cluster.fleet).commands
    assert host == "master-0"
    words = shlex.split(command)
    memory_limit = str(int(cluster.inventory.chief.memory_bytes * 0.4))
    assert words[: words.index("--")] == [
        *("sudo", "-n", "/usr/lib/scaletier/root-helper", "sandbox", "writing", memory_limit, "/bucket/jobs/job01/output")
    ]
    assert words[words.index("sh", words.index("-c")) :][:4] == ["sh", "/opt/scaletier/venv/bin/python", "-m", "mine.saved"]
    assert words[-4:] == ["--model", "cnn", "--job-dir", "/bucket/jobs/job01/output"]
    assert words[words.index("-c") + 1] == module._RUN


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("FAILED", r"^job job01 \(FAILED\) has neither an exported model nor a checkpoint in /bucket/jobs/job01/output$"),
        ("RUNNING", r"^job job01 is RUNNING and exports at its end: wait for it, or fab cancel job01$"),
    ],
)
def test_a_job_without_a_model_is_an_error(cluster: ClusterClient, state: str, message: str) -> None:
    put_job(cluster.ledger, JobRecord("job01", state=JobState(state)))
    with pytest.raises(OpsError, match=message):
        module.export(cluster, "job01", None, as_json=False)
