"""A request of test images, read from TFRecord files without TensorFlow."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from scaletier.tensorflow_setup import import_tensorflow
from trainer import request, tfrecord

tf = import_tensorflow()
IMAGE = bytes(range(256)) * 3 + bytes(16)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_examples_are_read_as_tensorflow_writes_them(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"test-00000-of-00001.tfrecord{suffix}"
    features = {"image_raw": {"bytes_list": {"value": [IMAGE]}}, "label": {"int64_list": {"value": [300]}}}
    example = tf.train.Example(features=tf.train.Features(feature={k: tf.train.Feature(**v) for k, v in features.items()}))
    with tf.io.TFRecordWriter(str(path), tf.io.TFRecordOptions("GZIP" if suffix else "")) as writer:
        for _ in range(2):
            writer.write(example.SerializeToString())
    assert [*tfrecord.read(path)] == [(IMAGE, 300)] * 2


PACKED = gzip.compress(bytes(range(256)))


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        *(("", bad) for bad in (b"no record of any", b"\x03\0\0\0\0\0\0\0CRC4\x0a\x7fxCRC4", b"\0" * 16, b"\xff" * 12)),
        *((".gz", bad) for bad in (b"no gzip", PACKED[:2], PACKED[:12], PACKED[:10] + b"\xff" * 20)),
    ],
)
def test_a_file_without_records_is_refused(tmp_path: Path, suffix: str, content: bytes) -> None:
    (path := tmp_path / f"x.tfrecord{suffix}").write_bytes(content)
    with pytest.raises(ValueError, match=rf"x\.tfrecord{suffix} is no TFRecord file of images and labels$"):
        [*tfrecord.read(path)]


def test_a_request_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tfrecord.write(tmp_path / "test-00000-of-00001.tfrecord", [tfrecord.example(b"\x00\xff\x33", 7)] * 3)
    output = tmp_path / "request.json"
    assert request.main(["--data", str(tmp_path), "--output", str(output), "--count", "2"]) == 0
    assert capsys.readouterr().out == f"{output} has 2 images: fab predict --json-instances {output}\n"
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert lines == [{"image": [0.0, 1.0, 0.2], "key": 0}, {"image": [0.0, 1.0, 0.2], "key": 1}]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "the following arguments are required: --output"),
        ("--output request.json", "request.json exists, and is left as it is: give another --output"),
        ("--output new --count none", "argument --count: 'none' is not a whole number"),
        ("--output new --count 0", "argument --count: 0 is too low; it must be at least 1"),
        ("--output new --data nothing", "no test image is in nothing: run make data, or pass --data"),
        ("--output /nowhere/new", "No such file or directory"),
    ],
)
def test_a_wrong_call_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "request.json").touch()
    (tmp_path / ".cache/mnist").mkdir(parents=True)
    tfrecord.write(tmp_path / ".cache/mnist/test.tfrecord", [tfrecord.example(b"\x00", 7)])
    with pytest.raises(SystemExit) as error:
        request.main(flags.split())
    stderr = capsys.readouterr().err
    assert (error.value.code, stderr.startswith("error: "), stderr.count("\n"), message in stderr) == (2, True, 1, True), stderr
