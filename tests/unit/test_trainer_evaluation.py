"""evaluation.json as the shipped trainer leaves it, and that `fab report` reads just that."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.util.tensor_util import make_ndarray

from ops.report.evaluation import parse
from scaletier.runtime import import_tensorflow
from scaletier.summaries import Summaries
from trainer import evaluation

tf = import_tensorflow()
DIGITS = [str(digit) for digit in range(10)]


def found(size: int = 10, classes: Sequence[str] = DIGITS) -> evaluation.ImageEvaluation:
    """Return the evaluation of `size` digits, 5 records each, of which the first was once predicted as the last."""
    labels = np.repeat(np.arange(size), 5)
    taken_for = labels.copy()
    taken_for[0] = size - 1
    pictures = np.zeros((len(labels), 784), np.float32)
    pictures[0] = np.arange(784, dtype=np.uint8) / np.float32(255)
    seen = evaluation.ImageEvaluation(classes)
    for batch in (slice(0, 7), slice(7, None)):
        seen.batch(pictures[batch], labels[batch], np.eye(10, dtype=np.float32)[taken_for[batch]])
    return seen


METRICS = {"loss": 0.1234567, "accuracy": 0.98}


def test_what_is_left_is_what_a_report_reads(tmp_path: Path) -> None:
    assert found().write(str(tmp_path), 40, METRICS) is None
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
    assert picture[:, :, 0].tolist() == found().pictures[0].tolist() == np.arange(784, dtype=np.uint8).reshape(28, 28).tolist()


def test_it_is_replaced_and_has_the_classes_that_there_are(tmp_path: Path) -> None:
    assert found().write(str(tmp_path), 40, METRICS) is None
    assert found(3, ["cat", "dog", "owl", *DIGITS[3:]]).write(str(tmp_path), 41, METRICS) is None
    read = parse((tmp_path / "evaluation.json").read_bytes())
    assert (read.step, read.classes, read.confusion) == (41, ["cat", "dog", "owl"], [[4, 0, 1], [0, 5, 0], [0, 0, 5]])


def test_nothing_but_one_class_is_a_matrix_all_the_same(tmp_path: Path) -> None:
    seen = evaluation.ImageEvaluation(DIGITS)
    seen.batch(np.zeros((7, 784), np.float32), np.zeros(7, np.int64), np.eye(10, dtype=np.float32)[[0] * 7])
    assert seen.content(1, {"loss": 0.0, "accuracy": 1.0}) == {
        "step": 1,
        "loss": 0.0,
        "accuracy": 1.0,
        "classes": ["0", "1"],
        "confusion": [[7, 0], [0, 0]],
        "mistakes": [],
    }


@pytest.mark.parametrize("wrong", [0, 3, 20])
def test_the_first_mistakes_are_kept_with_what_they_were_taken_for(wrong: int) -> None:
    numbers = np.arange(40)
    taken_for = (numbers + (numbers < wrong)) % 10  # the first digits are taken for the next one
    pictures = np.repeat(numbers[:, None], 784, 1).astype(np.float32) / np.float32(255)
    seen = evaluation.ImageEvaluation(DIGITS)
    for begin in range(0, 40, 15):
        batch = slice(begin, begin + 15)
        seen.batch(pictures[batch], numbers[batch] % 10, 100 * np.eye(10, dtype=np.float32)[taken_for[batch]])
    expected = [[0] * 10 for _ in range(10)]
    for number in range(40):
        expected[number % 10][taken_for[number]] += 1
    assert seen.confusion.tolist() == expected
    kept = min(wrong, 16)
    assert seen.pictures.shape == (kept, 28, 28)
    assert seen.pictures[:, 0, 0].tolist() == list(range(kept))
    assert seen.labels.tolist() == [number % 10 for number in range(kept)]
    assert seen.predicted.tolist() == [(number + 1) % 10 for number in range(kept)]


def shown(folder: Path) -> EventMultiplexer:
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    return multiplexer


def test_mistaken_digits_are_named_and_put_together(tmp_path: Path) -> None:
    seen = evaluation.ImageEvaluation(DIGITS)
    pictures = np.stack([np.full(784, shade, np.float32) for shade in (10, 20, 30)]) / np.float32(255)
    seen.batch(pictures, np.array([9, 4, 9]), np.eye(10, dtype=np.float32)[[4, 9, 4]])
    seen.done(7, METRICS, Summaries(str(tmp_path)), str(tmp_path), last=False)
    read_back = shown(tmp_path)
    names = ["mistakes/4 taken for 9", "mistakes/9 taken for 4"]
    assert sorted(read_back.PluginRunToTagToContent("images")["summaries"]) == names
    width, height, *pictures = make_ndarray(read_back.Tensors("summaries", names[1])[0].tensor_proto)
    assert (width, height) == (b"28", b"28")
    assert [int(tf.io.decode_png(png)[0, 0, 0]) for png in pictures] == [10, 30]
    assert not (tmp_path / "evaluation.json").exists(), "the model goes on"


def test_without_mistakes_there_is_no_picture_and_the_last_evaluation_leaves_the_file(tmp_path: Path) -> None:
    evaluation.ImageEvaluation(DIGITS).done(7, METRICS, Summaries(str(tmp_path)), str(tmp_path), last=True)
    assert shown(tmp_path).PluginRunToTagToContent("images") == {}
    assert json.loads((tmp_path / "evaluation.json").read_text())["mistakes"] == []


def test_a_folder_that_cannot_be_written_ends_no_job(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = found().write(f"{tmp_path}/file", 40, METRICS)
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
    assert evaluation.classes(str(tmp_path / "test-00000-of-00001.tfrecord")) == names
