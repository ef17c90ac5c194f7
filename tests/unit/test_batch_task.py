"""A batch from files to results, with a real SavedModel: on several replicas, killed, and damaged."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import limit

from hosts.batch import inputs, task
from hosts.batch.output import ERRORS, BatchError, PredictionOutput
from hosts.batch.shards import InputFile, InputPosition, RecordCount, ShardOutcome, cut
from hosts.serving.rest import RestError
from hosts.serving.saved import SavedModel, error_reason, tensorflow
from jobs.batch_request import Request
from jobs.model_signatures import Signature, Tensor
from scaletier.tensorflow_setup import import_tensorflow

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


def hash_files(model: Path) -> dict[str, str]:
    files = (path for path in model.rglob("*") if path.is_file())
    return {path.relative_to(model).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_model_server_takes_only_the_gpu_memory_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "")
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH")
    tensorflow.__wrapped__()
    assert os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"


MakeRequest = Callable[..., Request]


@pytest.fixture
def make_request(model: Path, tmp_path: Path) -> MakeRequest:
    def make(**contents: bytes) -> Request:
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content)
        return Request(tuple(str(tmp_path / name) for name in sorted(contents)), hash_files(model))

    return make


def lines(*values: Any) -> bytes:
    return "".join(json.dumps({"x": value}) + "\n" for value in values).encode()


def tfrecords(path: Path, values: range) -> bytes:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for value in values:
            feature = {"x": tf.train.Feature(float_list=tf.train.FloatList(value=[value]))}
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    return path.read_bytes()


def run(request: Request, model: Path, out: Path, rank: int = 0, replicas: int = 1, signature: str = DEFAULT) -> None:
    task.BatchTask(request, str(model), PredictionOutput(str(out)), signature, rank, replicas).run()


def results(folder: Path) -> list[Any]:
    files = sorted(folder.glob("prediction.results-*"))
    assert [file.name for file in files] == [f"prediction.results-{n:05d}-of-{len(files):05d}" for n in range(len(files))]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def errors(folder: Path) -> list[tuple[str, int]]:
    records = [json.loads(line) for line in (folder / ERRORS).read_text().splitlines()]
    return [(Path(error["file"]).name, error["line"]) for error in records]


def test_lines_and_records_plain_and_compressed(
    make_request: MakeRequest, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = tfrecords(tmp_path / "scratch", range(10, 20))
    request = make_request(a=lines(1, "odd", 2), b=gzip.compress(records), c=records, d=gzip.compress(lines(30, 31)), e=b"")
    out = tmp_path / "out"
    run(request, model, out)
    assert results(out) == [2.0 * x for x in (1, 2, *range(10, 20), *range(10, 20), 30, 31)]
    assert errors(out) == [("a", 2)]
    assert json.loads((out / "metrics.json").read_text()) == {"instances": 24, "errors": 1}
    assert not (out / ".parts").exists()
    printed = [re.sub(r"[\d.]+ sec", "… sec", line) for line in capsys.readouterr().out.splitlines()]
    *shards, total = printed
    assert shards[0] == f"Shard 1 of {len(shards)}: 2 instances, 1 errors (… sec)"
    assert shards[-1] == f"Shard {len(shards)} of {len(shards)}: 0 instances, 0 errors (… sec)"
    assert total == "Predicted 24 instances, 1 errors (… sec)"


def test_a_byte_order_mark_begins_a_file_only(make_request: MakeRequest, model: Path, tmp_path: Path) -> None:
    marked = BOM_UTF8 + lines(1, 2)
    request, out = make_request(a=marked, b=gzip.compress(marked), c=lines(3) + marked, d=BOM_UTF8 + b"\n"), tmp_path / "out"
    run(request, model, out)
    assert results(out) == [2.0 * x for x in (1, 2, 1, 2, 3, 2)]
    assert errors(out) == [("c", 2)]


def test_several_replicas_share_the_work(
    make_request: MakeRequest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "_POLL_SECONDS", 0.01)
    request, out = make_request(a=lines(*range(100))), tmp_path / "out"
    workers = [threading.Thread(target=run, args=(request, model, out, rank, 3), daemon=True) for rank in (1, 2)]
    for worker in workers:
        worker.start()  # they wait for the chief's plan, and the chief for their shards
    run(request, model, out, 0, 3)
    for worker in workers:
        worker.join(limit())
        assert not worker.is_alive()
    assert results(out) == [2.0 * x for x in range(100)]
    assert len(list(out.glob("prediction.results-*"))) == 12
    for rank in range(3):  # restarted after the end
        run(request, model, out, rank, 3)
    assert results(out) == [2.0 * x for x in range(100)]
    assert not (out / ".parts").exists()


def plan(request: Request, out: Path) -> None:
    PredictionOutput(str(out)).write_input_files([inputs.inspect_file(path) for path in request.inputs])


def test_a_file_is_read_once_by_all_replicas_together(
    make_request: MakeRequest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replica starts at its own shards; only compressed files are read from their start."""
    values = range(1000)
    request = make_request(a=lines(*values), b=tfrecords(tmp_path / "scratch", values), c=gzip.compress(lines(*values)))
    out = tmp_path / "out"
    plan(request, out)
    counts = dict.fromkeys(request.inputs, 0)

    def install_counter(name: str) -> None:
        original = getattr(inputs, name)

        def count_records(file: InputFile, start: int) -> Iterator[inputs.Record]:
            for record in original(file, start):
                counts[file.path] += 1
                yield record

        monkeypatch.setattr(inputs, name, count_records)

    install_counter("_lines")
    install_counter("_tfrecords")
    for rank in (3, 2, 1, 0):
        run(request, model, out, rank, 4)
    assert results(out) == [2.0 * x for x in (*values, *values, *values)]
    lines_read, records_read, packed_read = counts.values()
    assert 1000 < lines_read <= 1016, "at most one extra record per shard, which belongs to the next shard"
    assert 1000 < records_read <= 1016
    assert 2000 < packed_read <= 4004


def test_a_file_that_changes_during_the_batch_is_reported(make_request: MakeRequest, model: Path, tmp_path: Path) -> None:
    request, out = make_request(a=lines(*range(40)), b=lines(77)), tmp_path / "out"
    plan(request, out)
    run(request, model, out, 1, 2)
    Path(request.inputs[0]).write_bytes(lines(100, *range(1, 40)))
    run(request, model, out, 0, 2)
    assert results(out) == [200.0, *(2.0 * x for x in range(1, 6)), 154.0]
    assert errors(out) == [("a", 7)]
    assert (
        "it is damaged, it changed after the scan, or a record contains TFRecords (then gzip the file)"
        in (out / ERRORS).read_text()
    )


def test_records_inside_a_record_are_no_records_of_the_file(make_request: MakeRequest, model: Path, tmp_path: Path) -> None:
    with tf.io.TFRecordWriter(str(tmp_path / "scratch")) as writer:
        writer.write(tfrecords(tmp_path / "inner", range(20)))
    outer = (tmp_path / "scratch").read_bytes()
    for name, content, expected in (("a", outer, [("a", 1), ("a", 2)]), ("b", gzip.compress(outer), [("b", 1)])):
        with pytest.raises(BatchError, match=r"^no instance has a prediction: "):
            run(make_request(**{name: content}), model, tmp_path / f"out-{name}")
        assert results(tmp_path / f"out-{name}") == []
        assert errors(tmp_path / f"out-{name}") == expected


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_record_s_key_is_its_number_in_the_input(
    make_request: MakeRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    module = tf.Module()
    types = [tf.TensorSpec([None], tf.float32, "x"), tf.TensorSpec([None], tf.int64, "key")]
    module.twice = tf.function(lambda x, key: {"y": 2 * x, "key": key}, input_signature=types)
    tf.saved_model.save(module, str(tmp_path / "keyed"), signatures=module.twice)
    records = tfrecords(tmp_path / "scratch", range(50))
    broken = bytearray(records)
    broken[len(records) // 50 * 20 + 14] ^= 1
    request = make_request(a=records, b=gzip.compress(records), c=bytes(broken), d=b'\n{"x": 1, "key": 7}\n', e=records)
    keyed, out = Request(request.inputs, hash_files(tmp_path / "keyed")), tmp_path / "out"
    plan(keyed, out)
    counted: list[int] = []
    write_counts = PredictionOutput.write_counts

    def record_counts(output: PredictionOutput, rank: int, counts: Any) -> None:
        counted.append(rank)
        write_counts(output, rank, counts)

    monkeypatch.setattr(PredictionOutput, "write_counts", record_counts)
    monkeypatch.setattr(task, "_POLL_SECONDS", 0.01)
    workers = [threading.Thread(target=run, args=(keyed, tmp_path / "keyed", out, rank, replicas)) for rank in range(replicas)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(limit())
    rows = [(row["y"], row["key"]) for row in results(out)]
    first = [(2.0 * x, x) for x in range(50)]
    damaged = [(2.0 * x, 100 + x) for x in range(20)]
    assert rows == [*first, *((y, 50 + x) for y, x in first), *damaged, (2.0, 7), *((y, 122 + x) for y, x in first)]
    assert errors(out) == [("c", 21)]
    assert sorted(counted) == (list(range(replicas)) if replicas > 1 else []), "one replica counts as it predicts"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.integers(0, 300), max_size=12), st.integers(1, 5), st.booleans(), st.booleans(), st.data())
def test_the_shards_have_every_record_once(
    tmp_path: Path, sizes: list[int], replicas: int, is_records: bool, packed: bool, data: st.DataObject
) -> None:
    path = tmp_path / "file"
    end = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    contents = [bytes(size) if is_records else b"x" * size for size in sizes]
    if is_records:
        with tf.io.TFRecordWriter(str(path)) as writer:
            for content in contents:
                writer.write(content)
        file_content = path.read_bytes()
    else:
        file_content = end.join(contents) + data.draw(st.sampled_from([b"", end]))
        contents = file_content.split(end)[: -1 if file_content.endswith(end) or not file_content else None]
    path.write_bytes(gzip.compress(file_content) if packed else file_content)
    file = inputs.inspect_file(str(path))
    if file_content:
        assert (file.size, file.records, file.packed) == (len(file_content), is_records, packed)
    shards = cut([file], replicas)
    records = list[bytes]()
    position = InputPosition()
    reader = inputs.InputReader()
    for shard in shards:
        records += reader.read(file, shard)
        assert position.advance(shard, reader.count) == (True, "")
    assert records == contents
    assert position.line == len(contents)
    separately = list[bytes]()
    for shard in reversed(shards):
        separately = [*inputs.InputReader().read(file, shard), *separately]
    assert separately == contents


@pytest.mark.parametrize("byte", [b"\0", b"x", b"\xff"])
def test_a_record_of_eight_bytes_is_not_mistaken_for_a_header(tmp_path: Path, byte: bytes) -> None:
    path = tmp_path / "file"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for _ in range(9):
            writer.write(8 * byte)
    file = inputs.inspect_file(str(path))
    assert [record for shard in cut([file], 5) for record in inputs.InputReader().read(file, shard)] == [8 * byte] * 9


class FakeReader:
    """A reader of records that finds damage at every place."""

    def __init__(self) -> None:
        self.places: list[int] = []

    def read(self, place: int) -> tuple[bytes, int]:
        self.places.append(place)
        raise tf.errors.DataLossError(None, None, "corrupted record")


@pytest.mark.parametrize("block", [1, 5, 13, 1000])
def test_the_first_record_behind_a_byte_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """A file is searched in blocks, and a head may be in two of them."""
    monkeypatch.setattr(inputs, "_BLOCK", block)
    path, record = tmp_path / "file", tfrecords(tmp_path / "scratch", range(1))
    for before in range(2, 30):
        path.write_bytes(b"\xff" * before + record)
        file, reader = InputFile(str(path), before + len(record), records=True), FakeReader()
        random_reader = tensorflow().record_io.RandomRecordReader(str(path))
        assert inputs._find_first_record(file, random_reader, 2) == before
        assert inputs._find_first_record(file, reader, 2) == file.size, "no whole record"
        assert set(reader.places) == {before}
        reader.places.clear()
        assert inputs._find_first_record(file, reader, before + 1) == file.size
        assert reader.places == []


def test_a_head_whose_record_would_end_behind_the_file_is_not_read(tmp_path: Path) -> None:
    """Reading it could take all memory: a length has eight bytes."""
    path, record = tmp_path / "file", tfrecords(tmp_path / "scratch", range(1))
    for size, places in ((len(record) + 2, [2]), (len(record) + 1, [])):
        path.write_bytes((b"\xff\xff" + record)[:size])
        reader = FakeReader()
        assert inputs._find_first_record(InputFile(str(path), size, records=True), reader, 1) == size
        assert reader.places == places


_BROKEN = "cannot be read from here on: its gzip data is damaged: Error -3 while decompressing data: unknown compression method"


@pytest.mark.parametrize(
    ("content", "size", "records", "packed", "damage"),
    [
        (b"", 0, False, False, ""),
        (b"1\n", 2, False, False, ""),
        (bytes(9), 9, True, False, ""),
        (b"\x1f\x8b", 2, False, True, ""),
        (gzip.compress(b"1\n", mtime=0), 2, False, True, ""),
        (gzip.compress(bytes(9), mtime=0), 9, True, True, ""),
        (gzip.compress(b"1\n" * 99, mtime=0)[:-4] + b"\xff" * 4, 25 * 1032, False, True, ""),
        (b"\x1f\x8b\xff\xff", 0, False, False, _BROKEN),
    ],
    ids=["empty", "line", "record", "two bytes", "gzip", "gzip of a record", "wrong size", "damaged"],
)
def test_a_file_is_inspected(tmp_path: Path, content: bytes, size: int, records: bool, packed: bool, damage: str) -> None:
    (path := tmp_path / "file").write_bytes(content)
    assert inputs.inspect_file(str(path)) == InputFile(str(path), size, records, packed, damage)


class KilledError(BaseException):
    """A simulated kill."""


@pytest.mark.parametrize("at", range(11))
def test_a_batch_that_is_killed_anywhere_continues(
    make_request: MakeRequest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Kill it before each write: the plan, two for each of four shards, the errors and the counts."""
    request, out = make_request(a=lines(*range(6), -1, "odd")), tmp_path / "out"
    written: list[str] = []
    write = PredictionOutput._write

    def write_or_die(output: PredictionOutput, name: str, pieces: Any) -> None:
        if len(written) == at:
            list(pieces)
            written.append("killed")
            raise KilledError
        write(output, name, pieces)
        written.append(name)

    monkeypatch.setattr(PredictionOutput, "_write", write_or_die)
    with pytest.raises(KilledError):
        run(request, model, out)
    run(request, model, out)
    assert results(out) == [*(2.0 * x for x in range(6)), -2.0]
    assert errors(out) == [("a", 8)]
    done = [name for name in written if name.startswith(".parts/0")]
    assert len(done) == len(set(done)) == 4, "no shard is predicted twice"


def test_existing_results_are_not_computed_again(make_request: MakeRequest, model: Path, tmp_path: Path) -> None:
    request, out = make_request(a=lines(1, 2, 3, 4)), tmp_path / "out"
    output = PredictionOutput(str(out))
    plan(request, out)
    second = cut([inputs.inspect_file(request.inputs[0])], 1)[1]
    output.write_results(second, [b"77.0\n"])
    output.write_outcome(second, ShardOutcome(RecordCount(1, second.start, second.end), 1))
    run(request, model, out)
    assert results(out) == [2.0, 77.0, 6.0, 8.0]
    assert output.not_done([second]) == [], "no shard is open once the results are merged"


def test_instances_appended_after_the_plan_are_ignored(make_request: MakeRequest, model: Path, tmp_path: Path) -> None:
    request, out = make_request(a=lines(1, 2)), tmp_path / "out"
    plan(request, out)
    Path(request.inputs[0]).write_bytes(lines(1, 2, 3))
    run(request, model, out)
    assert results(out) == [2.0, 4.0]


def test_a_damaged_file_yields_the_records_before_the_damage(make_request: MakeRequest, model: Path, tmp_path: Path) -> None:
    records = tfrecords(tmp_path / "scratch", range(10))
    broken = bytearray(records)
    broken[len(records) // 10 * 7 + 14] ^= 1
    request, out = make_request(a=bytes(broken), b=b"\x1f\x8b\xff\xff", c=lines(5)), tmp_path / "out"
    run(request, model, out)
    assert results(out) == [*(2.0 * x for x in range(7)), 10.0]
    assert errors(out) == [("a", 8), ("b", 1)]


def test_a_batch_without_readable_input_names_the_first_error(make_request: MakeRequest, model: Path, tmp_path: Path) -> None:
    request, out = make_request(a=b"", b=b"\x1f\x8b\xff\xff", c=b"\x1f\x8b\xff\xff"), tmp_path / "out"
    with pytest.raises(BatchError) as caught:
        run(request, model, out)
    assert str(caught.value) == f"nothing could be read: {request.inputs[1]} {_BROKEN}"
    assert errors(out) == [("b", 1), ("c", 1)]


Fail = Callable[[Exception, int, int], list[float]]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Return a function that makes input files raise `error` `times` times after `good` reads, and returns the pauses."""

    opened: Any = tensorflow().file_io.FileIO

    def fail(error: Exception, good: int, times: int) -> list[float]:
        pauses: list[float] = []
        remaining, reads = times, 0

        def pass_or_raise(passes: bool) -> None:
            nonlocal remaining
            if not passes and remaining:
                remaining -= 1
                raise error

        class Failing(opened):
            def read(self, size: int = -1) -> Any:
                nonlocal reads
                pass_or_raise(size == -1 or (size == inputs._HEAD and good > 0) or reads < good)
                reads += size == inputs._BLOCK
                return super().read(size)

        monkeypatch.setattr(inputs, "_BLOCK", 10)
        monkeypatch.setattr(tensorflow().file_io, "FileIO", Failing)
        monkeypatch.setattr(time, "sleep", pauses.append)
        return pauses

    return fail


def test_a_bucket_that_fails_briefly_costs_no_result(
    make_request: MakeRequest, model: Path, tmp_path: Path, failing: Fail
) -> None:
    request, out = make_request(a=lines(*range(20))), tmp_path / "out"
    pauses = failing(tf.errors.UnavailableError(None, None, "HTTP response code 503"), 0, 2)
    plan(request, out)
    assert pauses == [1, 2]
    pauses = failing(tf.errors.DeadlineExceededError(None, None, "timed out"), 7, 4)
    run(request, model, out)
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
@pytest.mark.parametrize("good", [0, 1])
def test_an_unreadable_file_does_not_count_as_damaged(
    make_request: MakeRequest,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: Fail,
    capsys: pytest.CaptureFixture[str],
    error: Any,
    code: int,
    good: int,
) -> None:
    request = make_request(a=lines(*range(9)), b=lines(3))
    monkeypatch.setattr(Request, "from_package", lambda: request)
    pauses = failing(error(None, None, "not now\nand more"), good, 99)
    assert task.main(["--data", "a", "--model", str(model), "--job-dir", str(tmp_path / "out")]) == code
    assert capsys.readouterr().err == f"error: {request.inputs[0]} cannot be read: not now\n"
    assert sum(pauses) == 30
    assert not (tmp_path / "out" / "metrics.json").exists()


def test_an_unresponsive_output_exits_with_143(
    make_request: MakeRequest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raise_unavailable(*_: object) -> None:
        raise tf.errors.UnavailableError(None, None, "HTTP response code 503")

    monkeypatch.setattr(Request, "from_package", lambda: make_request(a=lines(1)))
    monkeypatch.setattr(PredictionOutput, "_write", raise_unavailable)
    assert task.main(["--data", "a", "--model", str(model), "--job-dir", str(tmp_path / "out")]) == 143
    assert capsys.readouterr().err == "error: the bucket does not answer: HTTP response code 503\n"


@pytest.mark.parametrize("name", ["ResourceExhaustedError", "InternalError"])
def test_a_failure_of_tensorflow_is_one_line(
    make_request: MakeRequest,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """A full disk is such a failure, too."""

    def fail(*_: object) -> None:
        raise getattr(tf.errors, name)(None, None, "out/part; No space left on device\n\nmore")

    monkeypatch.setattr(Request, "from_package", lambda: make_request(a=lines(1)))
    monkeypatch.setattr(PredictionOutput, "_write", fail)
    assert task.main(["--data", "a", "--model", str(model), "--job-dir", str(tmp_path / "out")]) == 1
    message = f"error: TensorFlow cannot continue: out/part; No space left on device ({name})\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_gzip_file_cut_between_two_records_is_reported(tmp_path: Path, replicas: int) -> None:
    """Cut off the end and the checksum. Stored blocks have a byte of the file for each byte of a record."""
    records, path = tfrecords(tmp_path / "records", range(9)), tmp_path / "cut"
    compressor = zlib.compressobj(0, wbits=31)
    content = compressor.compress(records[: len(records) // 9 * 5]) + compressor.flush(zlib.Z_SYNC_FLUSH)
    path.write_bytes(content)
    file, reader, position = inputs.inspect_file(str(path)), inputs.InputReader(), InputPosition()
    complete, damages = list[bytes](), list[str]()
    for shard in cut([file], replicas):
        complete += reader.read(file, shard)
        if position.advance(shard, reader.count)[0]:
            damages.append(reader.count.damage)
    assert len(complete) == 5
    assert [damage for damage in damages if damage] == [
        "cannot be read from here on: it is truncated: "
        f"it has {len(records) // 9 * 5} bytes after unpacking and had {file.size}"
    ]


def test_a_file_that_got_shorter_is_reported(make_request: MakeRequest, model: Path, tmp_path: Path) -> None:
    """Cut bytes off in the second of four shards; the fourth is after the damage."""
    compressed = gzip.compress(lines(*range(40)))
    request, out = make_request(a=lines(*range(40)), b=compressed), tmp_path / "out"
    plan(request, out)
    Path(request.inputs[0]).write_bytes(lines(*range(25)))
    Path(request.inputs[1]).write_bytes(compressed[:20])
    run(request, model, out)
    assert results(out) == [2.0 * x for x in range(25)]
    assert errors(out) == [("a", 26), ("b", 1)]
    errors_text = (out / ERRORS).read_text()
    assert "cannot be read from here on: it has changed: it has 240 bytes and had 390" in errors_text
    assert "cannot be read from here on: Compressed file ended before" in errors_text
    assert json.loads((out / "metrics.json").read_text()) == {"instances": 25, "errors": 2}


def test_a_batch_without_readable_input_fails(make_request: MakeRequest, model: Path, tmp_path: Path) -> None:
    request, out = make_request(a=b"", b=b"\x1f\x8b\xff\xff"), tmp_path / "out"
    plan(request, out)
    run(request, model, out, 1, 2)  # only the chief fails the job
    with pytest.raises(
        BatchError, match=r"nothing could be read: .*/b cannot be read from here on: its gzip data is damaged"
    ) as caught:
        run(request, model, out, 0, 2)
    assert caught.value.code == 1
    assert not (out / "metrics.json").exists()


def test_a_batch_without_a_prediction_fails(make_request: MakeRequest, model: Path, tmp_path: Path) -> None:
    request, out = make_request(a=b"\nsome text\n" + lines("odd")), tmp_path / "out"
    with pytest.raises(BatchError, match=r"^no instance has a prediction: .*/a is no JSON: [^\n]*$") as caught:
        run(request, model, out)
    assert caught.value.code == 1
    assert errors(out) == [("a", 2), ("a", 3)]
    assert not (out / "metrics.json").exists()


def test_a_model_that_differs_from_the_deployed_one_is_refused(make_request: MakeRequest, model: Path, tmp_path: Path) -> None:
    request, out = make_request(a=lines(1)), tmp_path / "out"
    other = Request(request.inputs, {**request.model_digests, "saved_model.pb": "0" * 64})
    with pytest.raises(BatchError, match=r"cannot be loaded: saved_model.pb is damaged: it is not what was deployed"):
        run(other, model, out)
    with pytest.raises(BatchError, match="gone is not in the bucket"):
        run(Request(request.inputs, {"gone": "0"}), model, out)
    with pytest.raises(BatchError, match="there is no signature 'other'"):
        run(request, model, out, signature="other")


def test_the_command_line(
    make_request: MakeRequest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Request, "from_package", lambda: make_request(a=lines(1)))
    monkeypatch.setenv("JOB_DIR", str(tmp_path / "out"))
    assert task.main(["--data", "a", "--model", str(model)]) == 0
    monkeypatch.setattr(Request, "from_package", lambda: make_request(a=b""))
    assert task.main(["--data", "a", "--model", str(model), "--job-dir", str(tmp_path / "other")]) == 1
    assert capsys.readouterr().err == "error: nothing could be read: all input files are empty\n"
    arguments = ["--data", "a", "--model", str(model), "--job-dir", str(tmp_path / "third"), "--signature", "other"]
    monkeypatch.setattr(Request, "from_package", lambda: make_request(a=lines(1)))
    assert task.main(arguments) == 2
    assert capsys.readouterr().err == "error: there is no signature 'other'; there are serving_default\n"


def test_a_wrong_command_line_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("JOB_DIR", raising=False)
    for arguments, message in (
        ([], "the following arguments are required: --data, --model"),
        (["--data", "a", "--model", "m"], "--job-dir is missing"),
    ):
        with pytest.raises(SystemExit) as caught:
            task.main(arguments)
        assert caught.value.code == 2
        assert capsys.readouterr().err.endswith(f"python -m hosts.batch.task: error: {message}\n")


def test_a_request_is_a_readable_file() -> None:
    content = b'{\n "inputs": [\n  "gs://b/a"\n ],\n "files": {\n  "saved_model.pb": "00"\n }\n}'
    request = Request(("gs://b/a",), {"saved_model.pb": "00"})
    assert (request.to_json(), Request.from_json(content)) == (content, request)


def test_a_batch_imports_only_a_part_of_tensorflow(make_request: MakeRequest, model: Path, tmp_path: Path) -> None:
    """Run it in a new process, where no test has imported all of TensorFlow."""
    request, out = make_request(a=gzip.compress(lines(1, 2)), b=tfrecords(tmp_path / "scratch", range(3))), tmp_path / "out"
    script = f"""
import sys
from hosts.batch import inputs, task
output = task.PredictionOutput({str(out)!r})
task.BatchTask(task.Request.from_json(sys.stdin.buffer.read()), {str(model)!r}, output, {DEFAULT!r}, 0, 1).run()
print(sum(name.startswith("tensorflow.") for name in sys.modules), "tensorflow.python.keras" in sys.modules)
"""
    process = subprocess.run([sys.executable, "-c", script], input=request.to_json(), capture_output=True, check=True)
    assert results(out) == [2.0, 4.0, 0.0, 2.0, 4.0]
    modules, keras = process.stdout.decode().splitlines()[-1].split()
    assert (int(modules) < 500, keras) == (True, "False")
    assert b"deprecated" not in process.stderr


def test_text_inputs_and_outputs_of_a_model(tmp_path: Path) -> None:
    module = tf.Module()
    module.shout = tf.function(
        lambda word: {"said": tf.strings.upper(word), "bytes": tf.strings.length(word)},
        input_signature=[tf.TensorSpec([None], tf.string, "word")],
    )
    tf.saved_model.save(module, str(tmp_path), signatures={"shout": module.shout})
    saved = SavedModel(tmp_path)
    assert set(saved.signatures) == {"shout"}, "without TensorFlow's internal signatures"
    assert saved.signatures["shout"] == Signature(
        {"word": Tensor(None, (None,))}, {"said": Tensor(None, (None,)), "bytes": Tensor("int32", (None,))}
    )
    saved.warm_up()  # text inputs have no zeros to warm up with
    (huge,) = saved.examples("shout", [{"n": [2**63, -(2**63)]}])["word"]
    assert tf.train.Example.FromString(huge).features.feature["n"].float_list.value == [2.0**63, -(2.0**63)]
    (limits,) = saved.examples("shout", [{"n": [2**63 - 1, -(2**63)]}])["word"]
    assert tf.train.Example.FromString(limits).features.feature["n"].int64_list.value == [2**63 - 1, -(2**63)]
    (serialized,) = saved.examples("shout", [{"word": "a", "n": [1, 2], "x": 0.5}])["word"]
    features = tf.train.Example.FromString(serialized).features.feature
    assert features["word"].bytes_list.value == [b"a"]
    assert (features["n"].int64_list.value, features["x"].float_list.value) == ([1, 2], [0.5])
    (binary,) = saved.examples("shout", [{"image": {"b64": "/w=="}, "parts": ["a", {"b64": "AAE="}]}])["word"]
    features = tf.train.Example.FromString(binary).features.feature
    assert (features["image"].bytes_list.value, features["parts"].bytes_list.value) == ([b"\xff"], [b"a", b"\x00\x01"])
    with pytest.raises(RestError, match="b64 is no base64"):
        saved.examples("shout", [{"image": {"b64": "?"}}])
    with pytest.raises(RestError, match="feature n must be a number, a text, or a list of either"):
        saved.examples("shout", [{"n": None}])
    outputs = saved.run("shout", {"word": np.array([b"a", b"\xc3\xa9"], object)})
    assert {name: array.tolist() for name, array in outputs.items()} == {"said": [b"A", b"\xc3\xa9"], "bytes": [1, 2]}
    with pytest.raises(RestError, match="the model refuses the input"):
        saved.run("shout", {"word": np.zeros((2, 2), np.float32)})


def test_a_model_is_warmed_up_with_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tf.Module()
    types = [tf.TensorSpec([None, 2], tf.float32, "x"), tf.TensorSpec([None], tf.int64, "key")]
    module.serve = tf.function(lambda x, key: {"y": 2 * x, "key": key}, input_signature=types)
    module.any = tf.function(lambda x: {"y": 2 * x}, input_signature=[tf.TensorSpec(None, tf.float32, "x")])
    tf.saved_model.save(module, str(tmp_path), signatures={"any": module.any, "serve": module.serve})
    saved, calls = SavedModel(tmp_path), list[tuple[str, Any]]()
    monkeypatch.setattr(saved, "run", lambda name, arrays: calls.append((name, arrays)))
    saved.warm_up()
    ((name, arrays),) = calls
    assert name == "serve"
    assert {key: (array.tolist(), array.dtype) for key, array in arrays.items()} == {
        "x": ([[0.0, 0.0]], np.float32),
        "key": ([0], np.int64),
    }


def test_the_examples_of_a_model_of_numbers_are_instances(model: Path) -> None:
    saved = SavedModel(model)
    assert saved.examples(DEFAULT, [{"x": 0.5}, {"x": 1}])["x"].tolist() == [0.5, 1.0]


def test_a_refused_input_has_the_model_s_reason(tmp_path: Path) -> None:
    def root(x: Any) -> Any:
        tf.debugging.assert_non_negative(x, "x is negative")
        return {"y": tf.sqrt(x)}

    module = tf.Module()
    module.root = tf.function(root, input_signature=[tf.TensorSpec([None], tf.float32, "x")])
    tf.saved_model.save(module, str(tmp_path), signatures=module.root)
    with pytest.raises(RestError, match=r"^the model refuses the input: assertion failed: \[x is negative"):
        SavedModel(tmp_path).run(DEFAULT, {"x": np.array([-1.0], np.float32)})


@pytest.fixture
def unpacking(tmp_path: Path) -> Path:
    """Write a SavedModel whose operation reports damaged data as DataLossError."""
    module, folder = tf.Module(), tmp_path / "unpacking"
    types = [tf.TensorSpec([None], tf.string, "packed")]
    module.unpack = tf.function(lambda packed: {"y": tf.io.decode_compressed(packed, "ZLIB")}, input_signature=types)
    tf.saved_model.save(module, str(folder), signatures=module.unpack)
    return folder


def test_an_instance_that_the_model_refuses_costs_no_other_one_its_result(unpacking: Path, tmp_path: Path) -> None:
    good = json.dumps({"b64": base64.b64encode(zlib.compress(b"a")).decode()})
    (tmp_path / "a").write_text(f'{good}\n{{"b64": "AAAA"}}\n["b", "c"]\n{good}\n')
    run(Request((str(tmp_path / "a"),), hash_files(unpacking)), unpacking, tmp_path / "out")
    assert results(tmp_path / "out") == ["a", "a"]
    assert errors(tmp_path / "out") == [("a", 2), ("a", 3)]
    assert "the model refuses the input: inflate() failed with error -3" in (tmp_path / "out" / ERRORS).read_text()


@pytest.mark.parametrize(
    "before",
    [
        "",
        "Graph execution error:\n\n",
        "2 root error(s) found.\n  (0) INVALID_ARGUMENT: ",
        "{{function_node __inference_f_7}} {{node cast}} ",
        "2 root error(s) found.\n  (0) INVALID_ARGUMENT: {{function_node __inference_f_7}} ",
    ],
)
def test_the_reason_of_an_error_is_its_first_sentence(before: str) -> None:
    error = tf.errors.InvalidArgumentError(None, None, f"{before}no number: {{{{x}}}}\n\t [[{{{{node cast}}}}]]")
    assert error_reason(error) == "no number: {{x}}"


@pytest.mark.parametrize("name", ["Unavailable", "DeadlineExceeded", "Aborted", "Cancelled", "ResourceExhausted", "Internal"])
def test_a_failure_that_no_input_causes_is_not_the_input_s(model: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    saved, error = SavedModel(model), getattr(tf.errors, f"{name}Error")

    def fail(*_: Any) -> None:
        raise error(None, None, "not now")

    monkeypatch.setitem(saved._calls, DEFAULT, fail)
    with pytest.raises(error, match="not now"):
        saved.run(DEFAULT, {"x": np.zeros(1, np.float32)})


def test_a_model_without_a_signature(tmp_path: Path) -> None:
    tf.saved_model.save(tf.Module(), str(tmp_path))
    with pytest.raises(ValueError, match="the model has no signature"):
        SavedModel(tmp_path)
