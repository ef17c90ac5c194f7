"""The input pipelines: every record, in shards that share none, in an order by seed; and what is wrong with the data."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trainer import records
from trainer.corrupt import segments
from trainer.data import DataError, check, damaged, eval_pipeline, train_pipeline
from trainer.mnist import Split

FILES, EACH = 6, 5
COUNT = FILES * EACH


def write(directory: Path, suffixes: list[str]) -> list[str]:
    """Files of records whose first pixel is their number."""
    split = Split(b"".join(bytes([number]) + bytes(783) for number in range(COUNT)), bytes(n % 10 for n in range(COUNT)))
    files = []
    for index in range(FILES):
        path = directory / f"train-{index}.tfrecord{suffixes[index % len(suffixes)]}"
        records.write_shard(path, split, index, FILES)
        files.append(str(path))
    return files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write(tmp_path_factory.mktemp("plain"), [""])


def numbers(images: Any) -> list[int]:
    return [round(float(pixel) * 255) for pixel in images[:, 0]]


def drawn(pipeline: Any, batches: int = 1) -> list[int]:
    """The records' numbers, a few batches of them."""
    return [number for images, _ in pipeline.take(batches) for number in numbers(images)]


@pytest.mark.parametrize("suffixes", [[""], [".gz"], ["", ".gz"]])
def test_every_record_is_read(tmp_path: Path, suffixes: list[str]) -> None:
    files = write(tmp_path, suffixes)
    check(files, COUNT)
    ((images, labels),) = list(eval_pipeline(files))
    assert sorted(numbers(images)) == list(range(COUNT))
    assert labels.numpy().tolist() == [number % 10 for number in numbers(images)]
    assert sorted(drawn(train_pipeline(files, COUNT, 0))) == list(range(COUNT))


def test_the_order_is_that_of_the_seed(files: list[str]) -> None:
    first = drawn(train_pipeline(files, 10, 1), 6)
    assert first == drawn(train_pipeline(files, 10, 1), 6)
    assert first != drawn(train_pipeline(files, 10, 2), 6)
    assert first[:COUNT] != first[COUNT:]
    assert Counter(first) == Counter([*range(COUNT)] * 2)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_shards_of_files(files: list[str], count: int) -> None:
    for index in range(count):
        mine = {number for number in range(COUNT) if number % FILES % count == index}
        assert set(drawn(train_pipeline(files, COUNT // count, 0, (index, count)))) == mine


@pytest.mark.parametrize("count", [4, 5, 7])
def test_shards_of_records_are_of_one_size(files: list[str], count: int) -> None:
    shards = [set(drawn(train_pipeline(files, 1, 0, (index, count)), 3 * COUNT)) for index in range(count)]
    assert sorted(number for shard in shards for number in shard) == list(range(COUNT))
    assert {len(shard) for shard in shards} <= {COUNT // count, -(-COUNT // count)}


def test_a_batch_larger_than_the_data(files: list[str]) -> None:
    with pytest.raises(DataError, match=rf"^batch size 31 is larger than the data: {files[0]} … hold 30 records$"):
        check(files, 31)


def test_corrupt_records_are_refused_or_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write(tmp_path, ["", ".gz"])
    path = Path(files[2])
    content = bytearray(path.read_bytes())
    size = len(content) // EACH
    content[3 * size + 100] ^= 1
    path.write_bytes(content)
    line = f"{path} has no sound TFRecord at byte {3 * size} (record 3): make the file again, or pass --skip-corrupt-records"
    assert damaged(files) == line
    with pytest.raises(DataError) as error:
        check(files, COUNT)
    assert str(error.value) == line
    left = segments(files, skip=True)
    check(left, COUNT - 1)
    expected = sorted({*range(COUNT)} - {3 * FILES + 2})
    assert sorted(number for images, _ in eval_pipeline(left) for number in numbers(images)) == expected
    assert sorted(drawn(train_pipeline(left, COUNT - 1, 0))) == expected
    # Two segments of one file stay with one shard.
    assert sorted(drawn(train_pipeline(left, EACH * 2 - 1, 0, (2, 3)))) == [n for n in expected if n % FILES in (2, 5)]
    with pytest.raises(DataError, match="batch size 30 is larger than the data"):
        check(left, COUNT)


def test_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "train.tfrecord"
    path.write_bytes(b"no record of any kind")
    with pytest.raises(DataError, match=r"^batch size 1 is larger than the data: no record of it can be read$"):
        check(segments([str(path)], skip=True), 1)
