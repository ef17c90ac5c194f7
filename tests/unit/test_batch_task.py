"""A batch from files to results, with a real SavedModel: on several replicas, killed, and damaged."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hosts.batch import inputs, task
from hosts.batch.library import tensorflow
from hosts.batch.output import ERRORS, PredictionOutput
from hosts.batch.request import Request
from hosts.batch.saved import PredictorModel
from hosts.batch.shards import Done, Shard
from hosts.serving.rest import RestError, Signature, Tensor
from scaletier.runtime import import_tensorflow

tf = import_tensorflow()
DEFAULT = "serving_default"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a SavedModel that doubles x."""
    module = tf.Module()
    module.double = tf.function(lambda x: {"y": 2 * x}, input_signature=[tf.TensorSpec([None], tf.float32, "x")])
    folder = tmp_path_factory.mktemp("model")
    tf.saved_model.save(module, str(folder), signatures=module.double)
    return folder


Asked = Callable[..., Request]


@pytest.fixture
def asked(model: Path, tmp_path: Path) -> Asked:
    def make(**contents: bytes) -> Request:
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content)
        files = {
            path.relative_to(model).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in model.rglob("*")
            if path.is_file()
        }
        return Request(tuple(str(tmp_path / name) for name in sorted(contents)), files)

    return make


def lines(*values: Any) -> bytes:
    return "".join(json.dumps({"x": value}) + "\n" for value in values).encode()


def tfrecords(path: Path, values: range) -> bytes:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for value in values:
            feature = {"x": tf.train.Feature(float_list=tf.train.FloatList(value=[value]))}
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    return path.read_bytes()


def results(folder: Path) -> list[float]:
    files = sorted(folder.glob("prediction.results-*"))
    assert [file.name for file in files] == [f"prediction.results-{n:05d}-of-{len(files):05d}" for n in range(len(files))]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def errors(folder: Path) -> list[tuple[str, int]]:
    told = [json.loads(line) for line in (folder / ERRORS).read_text().splitlines()]
    return [(Path(error["file"]).name, error["line"]) for error in told]


def test_lines_and_records_packed_or_not(asked: Asked, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = tfrecords(tmp_path / "scratch", range(10, 20))
    request = asked(a=lines(1, "odd", 2), b=gzip.compress(records), c=records, d=gzip.compress(lines(30, 31)), e=b"")
    out = tmp_path / "out"
    task._run(request, str(model), PredictionOutput(str(out)), DEFAULT, 0, 1)
    assert results(out) == [2.0 * x for x in (1, 2, *range(10, 20), *range(10, 20), 30, 31)]
    assert errors(out) == [("a", 2)]
    assert json.loads((out / "metrics.json").read_text()) == {"instances": 24, "errors": 1}
    assert not (out / ".parts").exists()
    assert capsys.readouterr().out.splitlines()[-1].startswith("Predicted 24 instances, 1 errors (")


def test_several_replicas_share_the_work(asked: Asked, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "_POLL_SECONDS", 0.01)
    request, out = asked(a=lines(*range(100))), tmp_path / "out"
    workers = [
        threading.Thread(
            target=task._run, args=(request, str(model), PredictionOutput(str(out)), DEFAULT, rank, 3), daemon=True
        )
        for rank in (1, 2)
    ]
    for worker in workers:
        worker.start()  # they wait for the chief's plan, and it for their shards
    task._run(request, str(model), PredictionOutput(str(out)), DEFAULT, 0, 3)
    for worker in workers:
        worker.join(30)
        assert not worker.is_alive()
    assert results(out) == [2.0 * x for x in range(100)]
    assert len(list(out.glob("prediction.results-*"))) == 12
    for rank in range(3):  # started again when all is done
        task._run(request, str(model), PredictionOutput(str(out)), DEFAULT, rank, 3)
    assert results(out) == [2.0 * x for x in range(100)]
    assert not (out / ".parts").exists()


def test_a_large_file_is_read_once_by_all_replicas_together(
    asked: Asked, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replica begins at its own shards, in lines and in records; one that is packed has to be read from its start."""
    monkeypatch.setattr(inputs, "_LARGE", 0)
    monkeypatch.setattr(inputs, "_MOST_MARKS", 64)
    monkeypatch.setattr(inputs, "_BLOCK", 50)
    values = range(1000)
    request = asked(a=lines(*values), b=tfrecords(tmp_path / "scratch", values), c=gzip.compress(lines(*values)))
    out = tmp_path / "out"
    output = PredictionOutput(str(out))
    output.keep_plan([task.looked_at(path) for path in request.inputs])
    got = dict.fromkeys(request.inputs, 0)
    whole = inputs._raw

    def counting(path: str, *rest: Any) -> Iterator[bytes]:
        for record in whole(path, *rest):
            got[path] += 1
            yield record

    monkeypatch.setattr(inputs, "_raw", counting)
    for rank in (3, 2, 1, 0):
        task._run(request, str(model), output, DEFAULT, rank, 4)
    assert results(out) == [2.0 * x for x in (*values, *values, *values)]
    lines_read, records_read, packed_read = got.values()
    assert 1000 <= lines_read < 1500
    assert 1000 <= records_read < 1500
    assert packed_read > 2000


def test_a_file_that_was_changed_is_read_from_its_start(
    asked: Asked, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_LARGE", 0)
    request, out = asked(a=lines(*range(40))), tmp_path / "out"
    output = PredictionOutput(str(out))
    output.keep_plan([task.looked_at(path) for path in request.inputs])
    Path(request.inputs[0]).write_bytes(lines(*range(10, 50), 7))
    for rank in (1, 0):
        task._run(request, str(model), output, DEFAULT, rank, 2)
    assert results(out) == [2.0 * x for x in range(10, 50)]


@pytest.mark.parametrize("block", [1, 3, 7, 1000])
@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "\n\na", "ab\n\ncdefg\nh\n", "abcdefghij\nk"])
def test_lines_are_counted_by_their_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, block: int) -> None:
    monkeypatch.setattr(inputs, "_LARGE", 0)
    monkeypatch.setattr(inputs, "_BLOCK", block)
    (tmp_path / "a").write_text(text)
    found = inputs.looked_at(str(tmp_path / "a"))
    lines = text.split("\n")
    assert found.count == len(text.splitlines())
    assert all(
        text[:byte].count("\n") == record and (byte == len(text) or text[byte:].startswith(lines[record]))
        for record, byte in found.marks
    )


class KilledError(BaseException):
    """A kill, as a test raises it."""


@pytest.mark.parametrize("at", range(11))
def test_killed_anywhere_it_goes_on_where_it_was(
    asked: Asked, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The writes are the plan, two for each of four shards, the errors and the counts; it is killed in front of one."""
    request, out = asked(a=lines(*range(6), -1, "odd")), tmp_path / "out"
    written: list[str] = []
    write = PredictionOutput._write

    def dying(output: PredictionOutput, name: str, pieces: Any) -> None:
        if len(written) == at:
            list(pieces)
            written.append("killed")
            raise KilledError
        write(output, name, pieces)
        written.append(name)

    monkeypatch.setattr(PredictionOutput, "_write", dying)
    with pytest.raises(KilledError):
        task._run(request, str(model), PredictionOutput(str(out)), DEFAULT, 0, 1)
    task._run(request, str(model), PredictionOutput(str(out)), DEFAULT, 0, 1)
    assert results(out) == [*(2.0 * x for x in range(6)), -2.0]
    assert errors(out) == [("a", 8)]
    done = [name for name in written if name.startswith(".parts/0")]
    assert len(done) == len(set(done)) == 4, "what is done is not done again"


def test_what_is_there_is_not_computed_again(asked: Asked, model: Path, tmp_path: Path) -> None:
    request, out = asked(a=lines(1, 2, 3, 4)), tmp_path / "out"
    output = PredictionOutput(str(out))
    output.keep_plan([task.looked_at(request.inputs[0])])
    output.keep_results(Shard(1, 0, 1, 1, 1), 4, [b"77.0\n"])
    output.keep_done(Shard(1, 0, 1, 1, 1), Done(1))
    task._run(request, str(model), output, DEFAULT, 0, 1)
    assert results(out) == [2.0, 77.0, 6.0, 8.0]


def test_what_comes_into_the_input_later_is_no_part_of_it(asked: Asked, model: Path, tmp_path: Path) -> None:
    request, out = asked(a=lines(1, 2)), tmp_path / "out"
    output = PredictionOutput(str(out))
    output.keep_plan([task.looked_at(request.inputs[0])])
    Path(request.inputs[0]).write_bytes(lines(1, 2, 3))
    task._run(request, str(model), output, DEFAULT, 0, 1)
    assert results(out) == [2.0, 4.0]
    shard = Shard(0, 0, 0, 2, 0)
    assert output.not_done([shard]) == [], "who looks when all is put together has nothing to do"


def test_a_damaged_file_gives_what_it_has(asked: Asked, model: Path, tmp_path: Path) -> None:
    whole = tfrecords(tmp_path / "scratch", range(10))
    broken = bytearray(whole)
    broken[len(whole) // 10 * 7 + 14] ^= 1
    request, out = asked(a=bytes(broken), b=b"\x1f\x8b\xff\xff", c=lines(5)), tmp_path / "out"
    task._run(request, str(model), PredictionOutput(str(out)), DEFAULT, 0, 1)
    assert results(out) == [*(2.0 * x for x in range(7)), 10.0]
    assert errors(out) == [("a", 8), ("b", 1)]


Fail = Callable[[Exception, int, int], list[float]]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Make input files fail: `error` on the first `times` lines behind `good` others; pauses are recorded."""

    opened: Any = tensorflow().file_io.FileIO

    def fail(error: Exception, good: int, times: int) -> list[float]:
        pauses: list[float] = []
        failed: list[Exception] = []

        class Failing(opened):
            given = 0

            def read(self, size: int = -1) -> Any:
                if size == inputs._BLOCK and len(failed) < times:
                    failed.append(error)
                    raise error
                return super().read(size)

            def __next__(self) -> Any:
                if self.given == good and len(failed) < times:
                    failed.append(error)
                    raise error
                self.given += 1
                return super().__next__()

        monkeypatch.setattr(tensorflow().file_io, "FileIO", Failing)
        monkeypatch.setattr(time, "sleep", pauses.append)
        return pauses

    return fail


def test_a_bucket_that_fails_for_a_moment_costs_nothing(asked: Asked, model: Path, tmp_path: Path, failing: Fail) -> None:
    request, out = asked(a=lines(*range(20))), tmp_path / "out"
    output = PredictionOutput(str(out))
    pauses = failing(tf.errors.UnavailableError(None, None, "HTTP response code 503"), 7, 2)
    output.keep_plan([task.looked_at(request.inputs[0])])
    assert pauses == [1, 2]
    pauses = failing(tf.errors.DeadlineExceededError(None, None, "timed out"), 7, 4)
    task._run(request, str(model), output, DEFAULT, 0, 1)
    assert pauses == [1, 2, 4, 8]
    assert results(out) == [2.0 * x for x in range(20)]
    assert errors(out) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (tf.errors.UnavailableError, 143),
        (tf.errors.DeadlineExceededError, 143),
        (tf.errors.UnknownError, 143),
        (tf.errors.NotFoundError, 1),
        (tf.errors.PermissionDeniedError, 1),
    ],
)
@pytest.mark.parametrize("counted", [False, True])
def test_what_cannot_be_read_is_not_taken_for_damaged(
    asked: Asked,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: Fail,
    capsys: pytest.CaptureFixture[str],
    error: Any,
    code: int,
    counted: bool,
) -> None:
    request = asked(a=lines(1, 2), b=lines(3))
    monkeypatch.setattr(Request, "of_package", lambda: request)
    if counted:
        PredictionOutput(str(tmp_path / "out")).keep_plan([task.looked_at(path) for path in request.inputs])
    pauses = failing(error(None, None, "not now\nand more"), 1, 99)
    assert task.main(["--data", "a", "--model", str(model), "--job-dir", str(tmp_path / "out")]) == code
    assert capsys.readouterr().err == f"error: {request.inputs[0]} cannot be read: not now\n"
    assert sum(pauses) == 30
    assert not (tmp_path / "out" / "metrics.json").exists()


def test_an_output_that_does_not_answer(
    asked: Asked, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unavailable(*_: object) -> None:
        raise tf.errors.UnavailableError(None, None, "HTTP response code 503")

    monkeypatch.setattr(Request, "of_package", lambda: asked(a=lines(1)))
    monkeypatch.setattr(PredictionOutput, "_write", unavailable)
    assert task.main(["--data", "a", "--model", str(model), "--job-dir", str(tmp_path / "out")]) == 143
    assert capsys.readouterr().err == "error: the bucket does not answer: HTTP response code 503\n"


def test_a_file_that_got_shorter_says_so(asked: Asked, model: Path, tmp_path: Path) -> None:
    """Of four shards the second lacks some, and the third and the fourth are behind what is damaged now."""
    packed = gzip.compress(lines(*range(40)))
    request, out = asked(a=lines(*range(40)), b=packed), tmp_path / "out"
    output = PredictionOutput(str(out))
    output.keep_plan([task.looked_at(path) for path in request.inputs])
    Path(request.inputs[0]).write_bytes(lines(*range(25)))
    Path(request.inputs[1]).write_bytes(packed[:20])
    task._run(request, str(model), output, DEFAULT, 0, 1)
    assert results(out) == [2.0 * x for x in range(25)]
    assert errors(out) == [("a", 26), ("b", 1), ("b", 21)]
    told = (out / ERRORS).read_text()
    assert "cannot be read from here on: it was changed, and has 25 where 40 were counted" in told
    assert "cannot be read from here on: Compressed file ended before" in told
    assert json.loads((out / "metrics.json").read_text()) == {"instances": 25, "errors": 3}


def test_nothing_that_could_be_read(asked: Asked, model: Path, tmp_path: Path) -> None:
    with pytest.raises(task.BatchError, match=r"nothing could be read: .*/b cannot be read from here on: is broken") as caught:
        task._run(asked(a=b"", b=b"\x1f\x8b\xff\xff"), str(model), PredictionOutput(str(tmp_path / "out")), DEFAULT, 0, 2)
    assert caught.value.code == 1
    task._run(
        asked(a=b""), str(model), PredictionOutput(str(tmp_path / "out")), DEFAULT, 1, 2
    )  # a worker leaves the verdict to the chief


def test_a_model_that_is_not_what_was_deployed(asked: Asked, model: Path, tmp_path: Path) -> None:
    request = asked(a=lines(1))
    other = Request(request.inputs, {**request.files, "saved_model.pb": "0" * 64})
    with pytest.raises(task.BatchError, match=r"cannot be loaded: saved_model.pb is damaged: it is not what was deployed"):
        task._run(other, str(model), PredictionOutput(str(tmp_path / "out")), DEFAULT, 0, 1)
    gone = Request(request.inputs, {"gone": "0"})
    with pytest.raises(task.BatchError, match="gone is not in the bucket"):
        task._run(gone, str(model), PredictionOutput(str(tmp_path / "out")), DEFAULT, 0, 1)
    with pytest.raises(task.BatchError, match="there is no signature 'other'"):
        task._run(request, str(model), PredictionOutput(str(tmp_path / "out")), "other", 0, 1)


def test_the_command(
    asked: Asked, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Request, "of_package", lambda: asked(a=lines(1)))
    monkeypatch.setenv("JOB_DIR", str(tmp_path / "out"))
    assert task.main(["--data", "a", "--model", str(model)]) == 0
    monkeypatch.setattr(Request, "of_package", lambda: asked(a=b""))
    assert task.main(["--data", "a", "--model", str(model), "--job-dir", str(tmp_path / "other")]) == 1
    assert capsys.readouterr().err == "error: nothing could be read: all is empty\n"


def test_a_part_of_tensorflow_is_enough(asked: Asked, model: Path, tmp_path: Path) -> None:
    """In a process of its own, where nothing else has imported all of it."""
    request, out = asked(a=gzip.compress(lines(1, 2)), b=tfrecords(tmp_path / "scratch", range(3))), tmp_path / "out"
    script = f"""
import sys
from hosts.batch import inputs, task
from hosts.batch.library import tensorflow
output = task.PredictionOutput({str(out)!r})
task._run(task.Request.from_json(sys.stdin.buffer.read()), {str(model)!r}, output, {DEFAULT!r}, 0, 1)
print(sum(name.startswith("tensorflow.") for name in sys.modules), "tensorflow.python.keras" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", script], input=request.to_json(), capture_output=True, check=True)
    assert results(out) == [2.0, 4.0, 0.0, 2.0, 4.0]
    modules, keras = ran.stdout.decode().splitlines()[-1].split()
    assert (int(modules) < 500, keras) == (True, "False")
    assert b"deprecated" not in ran.stderr


def test_texts_in_and_out_of_a_model(tmp_path: Path) -> None:
    module = tf.Module()
    module.shout = tf.function(
        lambda word: {"said": tf.strings.upper(word), "bytes": tf.strings.length(word)},
        input_signature=[tf.TensorSpec([None], tf.string, "word")],
    )
    tf.saved_model.save(module, str(tmp_path), signatures={"shout": module.shout})
    saved = PredictorModel(tmp_path)
    assert set(saved.signatures) == {"shout"}, "and none of TensorFlow's own"
    assert saved.signatures["shout"] == Signature(
        {"word": Tensor(None, (None,))}, {"said": Tensor(None, (None,)), "bytes": Tensor("int32", (None,))}
    )
    found = saved.run("shout", {"word": np.array([b"a", b"\xc3\xa9"], object)})
    assert {name: array.tolist() for name, array in found.items()} == {"said": [b"A", b"\xc3\xa9"], "bytes": [1, 2]}
    with pytest.raises(RestError, match="the model refuses the input"):
        saved.run("shout", {"word": np.zeros((2, 2), np.float32)})


def test_a_model_without_a_signature(tmp_path: Path) -> None:
    tf.saved_model.save(tf.Module(), str(tmp_path))
    with pytest.raises(ValueError, match="the model has no signature"):
        PredictorModel(tmp_path)
