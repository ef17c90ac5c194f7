"""evaluation.json as the shipped trainer leaves it, and that `fab report` reads just that."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from trainer.evaluation import Metrics, Mistakes
from trainer.runtime import import_tensorflow

from ops.report.evaluation import parse
from trainer import findings

tf = import_tensorflow()
DIGITS = [str(digit) for digit in range(10)]


def metrics(size: int = 10) -> Metrics:
    """Of `size` digits 5 records each, of which the first was once taken for the last."""
    confusion = np.zeros((10, 10), np.int64)
    confusion[range(size), range(size)] = 5
    confusion[0, 0], confusion[0, size - 1] = 4, 1
    images = np.arange(784, dtype=np.uint8).reshape(1, 28, 28)
    return Metrics(0.1234567, 0.98, Mistakes(images, np.array([size - 1]), np.array([0])), confusion)


def test_what_is_left_is_what_a_report_reads(tmp_path: Path) -> None:
    assert findings.write(str(tmp_path), 40, metrics(), DIGITS) is None
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation.json"]
    content = (tmp_path / "evaluation.json").read_bytes()
    told = json.loads(content)
    assert (told["step"], told["loss"], told["accuracy"], told["classes"]) == (40, 0.123457, 0.98, DIGITS)
    read = parse(content)
    assert (read.step, read.classes) == (40, DIGITS)
    assert read.confusion[0] == [4, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert read.confusion[9] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 5]
    (mistake,) = read.mistakes
    assert (mistake.label, mistake.predicted) == (0, 9)
    picture = tf.io.decode_png(base64.b64decode(mistake.image)).numpy()
    assert picture[:, :, 0].tolist() == metrics().mistakes.images[0].tolist()


def test_it_is_replaced_and_has_the_classes_that_there_are(tmp_path: Path) -> None:
    assert findings.write(str(tmp_path), 40, metrics(), DIGITS) is None
    assert findings.write(str(tmp_path), 41, metrics(3), ["cat", "dog", "owl", *DIGITS[3:]]) is None
    read = parse((tmp_path / "evaluation.json").read_bytes())
    assert (read.step, read.classes, read.confusion) == (41, ["cat", "dog", "owl"], [[4, 0, 1], [0, 5, 0], [0, 0, 5]])


def test_nothing_but_one_class_is_a_matrix_all_the_same(tmp_path: Path) -> None:
    confusion = np.zeros((10, 10), np.int64)
    confusion[0, 0] = 7
    none = Mistakes(np.zeros((0, 28, 28), np.uint8), np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert findings.content(1, Metrics(0.0, 1.0, none, confusion), DIGITS) == {
        "step": 1,
        "loss": 0.0,
        "accuracy": 1.0,
        "classes": ["0", "1"],
        "confusion": [[7, 0], [0, 0]],
        "mistakes": [],
    }


def test_a_folder_that_cannot_be_written_ends_no_job(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = findings.write(f"{tmp_path}/file", 40, metrics(), DIGITS)
    assert said is not None
    assert said.startswith(f"{tmp_path}/file/evaluation.json was not written: ")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("manifest", "names"),
    [
        ('{"classes": ["cat", "dog"]}', ["cat", "dog", *DIGITS[2:]]),
        ('{"classes": [1]}', DIGITS),
        ('{"classes": "abc"}', DIGITS),
        ("[]", DIGITS),
        ("{", DIGITS),
        (None, DIGITS),
    ],
)
def test_classes_are_named_by_the_manifest_beside_the_records(tmp_path: Path, manifest: str | None, names: list[str]) -> None:
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    assert findings.classes(str(tmp_path / "test-00000-of-00001.tfrecord")) == names
