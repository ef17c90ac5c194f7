"""The input pipelines: every record, in a seeded order per replica; and the errors of bad data."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaletier.tensorflow_setup import import_tensorflow
from trainer import records, task
from trainer.corrupt_records import record_ranges
from trainer.data import DataError, augment, check, damaged, eval_pipeline, train_pipeline
from trainer.flags import parse
from trainer.mnist import Split

tf = import_tensorflow()

FILES, EACH = 6, 5
COUNT = FILES * EACH


def write_files(directory: Path, suffixes: list[str]) -> list[str]:
    """Write files of records whose first pixel is their number."""
    split = Split(b"".join(bytes([number]) + bytes(783) for number in range(COUNT)), bytes(n % 10 for n in range(COUNT)))
    files = []
    for index in range(FILES):
        path = directory / f"train-{index}.tfrecord{suffixes[index % len(suffixes)]}"
        records.write_shard(path, split, index, FILES)
        files.append(str(path))
    return files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_files(tmp_path_factory.mktemp("plain"), [""])


def numbers(images: Any) -> list[int]:
    return [round(float(pixel) * 255) for pixel in images[:, 0]]


def batch_numbers(pipeline: Any, batches: int = 1) -> list[int]:
    """Return the records' numbers of a few batches."""
    return [number for images, _ in pipeline.take(batches) for number in numbers(images)]


@pytest.mark.parametrize("suffixes", [[""], [".gz"], ["", ".gz"]])
def test_every_record_is_read(tmp_path: Path, suffixes: list[str]) -> None:
    files = write_files(tmp_path, suffixes)
    check(files, COUNT)
    ((images, labels),) = list(eval_pipeline(files))
    assert sorted(numbers(images)) == list(range(COUNT))
    assert labels.numpy().tolist() == [number % 10 for number in numbers(images)]
    assert sorted(batch_numbers(train_pipeline(files, COUNT, 0))) == list(range(COUNT))


def test_the_seed_determines_the_order(files: list[str]) -> None:
    first = batch_numbers(train_pipeline(files, 10, 1), 6)
    assert first == batch_numbers(train_pipeline(files, 10, 1), 6)
    assert first != batch_numbers(train_pipeline(files, 10, 2), 6)
    assert first[:COUNT] != first[COUNT:]
    assert Counter(first) == Counter([*range(COUNT)] * 2)


def test_each_replica_reads_all_data_in_its_own_order(files: list[str], tmp_path: Path) -> None:
    def order(replica: int, seed: int = 0) -> list[int]:
        flags = [
            f"--train-data={','.join(files)}",
            "--eval-data=x",
            f"--job-dir={tmp_path}",
            "--batch-size=10",
            f"--seed={seed}",
        ]
        context = tf.distribute.InputContext(3, replica, 3)
        return batch_numbers(task.job(parse(flags)).data(context), 3)

    orders = [order(replica) for replica in range(3)]
    assert all(sorted(each) == [*range(COUNT)] for each in orders)
    assert len({*map(tuple, orders)}) == 3
    assert order(1) == orders[1]
    assert order(1, seed=1) not in orders


def test_a_batch_may_be_larger_than_the_data(files: list[str]) -> None:
    with pytest.raises(DataError, match=rf"^batch size 31 is larger than the data: {files[0]} … hold 30 records$"):
        check(files, 31)


def test_corrupt_records_are_refused_or_skipped(tmp_path: Path) -> None:
    files = write_files(tmp_path, ["", ".gz"])
    path = Path(files[2])
    content = bytearray(path.read_bytes())
    size = len(content) // EACH
    content[3 * size + 100] ^= 1
    path.write_bytes(content)
    line = f"{path} has no intact TFRecord at byte {3 * size} (record 3): make the file again, or pass --skip-corrupt-records"
    assert damaged(files) == line
    with pytest.raises(DataError) as error:
        check(files, COUNT)
    assert str(error.value) == line
    remaining = record_ranges(files, skip=True)
    check(remaining, COUNT - 1)
    expected = sorted({*range(COUNT)} - {3 * FILES + 2})
    assert sorted(number for images, _ in eval_pipeline(remaining) for number in numbers(images)) == expected
    assert sorted(batch_numbers(train_pipeline(remaining, COUNT - 1, 0))) == expected
    with pytest.raises(DataError, match="batch size 30 is larger than the data"):
        check(remaining, COUNT)


def test_a_file_without_valid_records_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.tfrecord"
    path.write_bytes(b"no record of any kind")
    with pytest.raises(DataError, match=r"^batch size 1 is larger than the data: no record of it can be read$"):
        check(record_ranges([str(path)], skip=True), 1)


def pictures(count: int) -> tuple[Any, Any]:
    """Return images with a bar of 3×15 pixels in the middle, float32 [N, 784], and their labels."""
    image = np.zeros((28, 28), np.float32)
    image[13:16, 7:22] = 1.0
    return np.tile(image.reshape(1, -1), (count, 1)), np.arange(count)


def augmented(shift: int, rotation: float, batches: int = 2, skip: int = 0) -> list[Any]:
    """Return batches of 100 images as `augment` gives them, float32 [100, 28, 28]."""
    data = tf.data.Dataset.from_tensors(pictures(100)).repeat()
    moved = list(augment(data, 5, shift, rotation).skip(skip).take(batches))
    assert all(labels.numpy().tolist() == list(range(100)) for _, labels in moved)
    assert {images.shape for images, _ in moved} == {(100, 784)}
    return [images.numpy().reshape(-1, 28, 28) for images, _ in moved]


def test_shifts_move_whole_pixels_in_all_directions() -> None:
    bar = pictures(1)[0].reshape(28, 28)
    moved = [image for batch in augmented(2, 0.0) for image in batch]
    valid = [(down, right, np.roll(bar, (down, right), (0, 1))) for down in range(-2, 3) for right in range(-2, 3)]
    shifts = [next((down, right) for down, right, image in valid if np.allclose(image, each, atol=1e-5)) for each in moved]
    assert len(set(shifts)) == 25


def test_rotations_are_about_the_center_by_up_to_an_angle() -> None:
    rows, columns = (grid - 13.5 for grid in np.mgrid[:28, :28])
    angles = []
    for image in augmented(0, 15.0)[0]:
        mass = image.sum()
        down, right = (rows * image).sum() / mass, (columns * image).sum() / mass
        assert np.hypot(down - 0.5, right - 0.5) < 0.3
        spread = ((rows - down) * (columns - right) * image).sum() / ((columns - right) ** 2 * image).sum()
        angles.append(np.degrees(np.arctan(spread)))
    assert max(np.abs(angles)) < 16
    assert min(angles) < -10 < 10 < max(angles)


def test_a_resumed_job_draws_the_same_changes() -> None:
    first = augmented(2, 12.0, batches=3)
    assert not np.array_equal(first[0], first[2])
    np.testing.assert_array_equal(augmented(2, 12.0, batches=1, skip=2)[0], first[2])


def test_the_flags_change_the_training_images_alone(files: list[str], tmp_path: Path) -> None:
    flags = [f"--train-data={','.join(files)}", f"--eval-data={','.join(files)}", f"--job-dir={tmp_path}", "--batch-size=10"]
    plain, turned = (task.job(parse([*flags, *more])) for more in ([], ["--rotation=90"]))
    context = tf.distribute.InputContext()

    def images(data: Any) -> Any:
        return next(iter(data))[0].numpy()

    assert not np.array_equal(images(plain.data(context)), images(turned.data(context)))
    np.testing.assert_array_equal(images(plain.eval_data()), images(turned.eval_data()))
