"""Corrupt records: found, named, and left out; all others arrive exactly once."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletier.tensorflow_setup import import_tensorflow
from trainer import corrupt_records
from trainer.corrupt_records import Damage, RecordRange, locate, read, record_ranges, tensors

tf = import_tensorflow()


def write(path: Path, payloads: list[bytes]) -> list[int]:
    """Write a TFRecord file; return where each record begins, and where the file ends."""
    offsets = [0]
    with tf.io.TFRecordWriter(str(path), "GZIP" if path.suffix == ".gz" else "") as writer:
        for payload in payloads:
            writer.write(payload)
            offsets.append(offsets[-1] + 16 + len(payload))
    return offsets


def flip(path: Path, *places: int) -> None:
    content = bytearray(path.read_bytes())
    for position in places:
        content[position] ^= 0xFF
    path.write_bytes(content)


def read_all(parts: list[RecordRange]) -> list[bytes]:
    return list(tf.data.Dataset.from_tensor_slices(tensors(parts)).flat_map(read).as_numpy_iterator())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corrupt")


@settings(max_examples=12)
@given(st.data())
def test_sound_records_are_read_once(directory: Path, data: st.DataObject) -> None:
    payloads = data.draw(st.lists(st.binary(max_size=40), min_size=1, max_size=8))
    path = directory / "records.tfrecord"
    offsets = write(path, payloads)
    # From byte 12 of a record on are its data and their checksum: the record can be skipped.
    corrupt = data.draw(st.sets(st.integers(0, len(payloads) - 1)))
    flip(path, *(data.draw(st.integers(offsets[number] + 12, offsets[number + 1] - 1)) for number in corrupt))
    cut = data.draw(st.none() | st.integers(0, len(payloads) - 1))
    if cut is not None:  # its length or the length's checksum: no later record can be found
        flip(path, offsets[cut] + data.draw(st.integers(0, 11)))
    intact_ranges = record_ranges([str(path)], skip=True)
    assert read_all(intact_ranges) == [
        payload for number, payload in enumerate(payloads) if number not in corrupt and (cut is None or number < cut)
    ]
    first = min([*corrupt, *([] if cut is None else [cut])], default=None)
    assert locate([str(path)]) == (None if first is None else Damage(str(path), first, offsets[first], first == cut))


def test_skipped_records_are_reported(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, many, cut, sound = (str(directory / f"{name}.tfrecord") for name in ("one", "many", "cut", "sound"))
    for file in (one, many, cut, sound):
        write(Path(file), [b"12345678"] * 10)  # 24 bytes each
    flip(Path(one), 24 * 2 + 12)
    flip(Path(many), *(24 * number + 12 for number in range(7)))
    flip(Path(cut), 24 + 12, 24 * 3)
    assert len(read_all(record_ranges([one, many, cut, sound], skip=True))) == 9 + 3 + 2 + 10
    assert [line for line in capsys.readouterr().out.splitlines() if not line.startswith("looking for")] == [
        f"Skipping 1 corrupt record of {one}: byte 48 (record 2)",
        f"Skipping 7 corrupt records of {many}: byte 0 (record 0), byte 24 (record 1), byte 48 (record 2), byte 72 (record 3), "
        "byte 96 (record 4) and 2 more",
        f"Skipping 2 corrupt records of {cut}: byte 24 (record 1), byte 72 (record 3), and all that follows the last",
    ]


def test_a_file_cut_within_a_record(directory: Path) -> None:
    path = directory / "short.tfrecord"
    offsets = write(path, [b"a" * 20, b"b" * 20])
    path.write_bytes(path.read_bytes()[: offsets[1] + 15])
    assert locate([str(path)]) == Damage(str(path), 1, offsets[1], False)
    assert read_all(record_ranges([str(path)], skip=True)) == [b"a" * 20]


@pytest.mark.parametrize("remaining", [0, 1, 8, 11])
def test_a_file_cut_within_a_header(directory: Path, remaining: int) -> None:
    """TensorFlow accepts it as complete; check it again if it was cut after a first reading."""
    path = directory / f"header-{remaining}.tfrecord"
    offsets = write(path, [b"a" * 20, b"b" * 20])
    path.write_bytes(path.read_bytes()[: offsets[1] + remaining])
    assert corrupt_records._next_record(str(path), offsets[1]) == offsets[1] + remaining
    assert locate([str(path)]) is None
    assert read_all(record_ranges([str(path)], skip=True)) == [b"a" * 20]


@pytest.mark.parametrize("how", ["record", "archive"])
def test_a_compressed_file_is_read_up_to_its_corrupt_record(directory: Path, how: str) -> None:
    path = directory / "packed.tfrecord.gz"
    payloads = [struct.pack("<Q", number * 0x9E3779B97F4A7C15 % 2**64) for number in range(1000)]
    offsets = write(path, payloads)
    if how == "record":
        plain = directory / "plain.tfrecord"
        plain.write_bytes(gzip.decompress(path.read_bytes()))
        flip(plain, offsets[400] + 12)
        path.write_bytes(gzip.compress(plain.read_bytes()))
    else:
        path.write_bytes(path.read_bytes()[:5000])
    damage: Any = locate([str(path)])
    assert damage.rest
    assert damage.offset == offsets[damage.number]
    assert how == "archive" or damage.number == 400
    assert read_all(record_ranges([str(path)], skip=True)) == payloads[: damage.number]


def test_without_skipping_files_are_not_read_in_advance() -> None:
    assert record_ranges(["/nowhere/a.tfrecord"], skip=False) == [RecordRange("/nowhere/a.tfrecord")]
