"""evaluation.json of the shipped trainer, and its parsing by `fab report`."""

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
from scaletier.summaries import Summaries
from scaletier.tensorflow_setup import import_tensorflow
from trainer import evaluation

tf = import_tensorflow()
DIGITS = [str(digit) for digit in range(10)]


def make_evaluation(size: int = 10, classes: Sequence[str] = DIGITS) -> evaluation.ImageEvaluation:
    """Return the evaluation of `size` digits, 5 records each, the first of which was once predicted as the last."""
    labels = np.repeat(np.arange(size), 5)
    predictions = labels.copy()
    predictions[0] = size - 1
    pictures = np.zeros((len(labels), 784), np.float32)
    pictures[0] = np.arange(784, dtype=np.uint8) / np.float32(255)
    evaluation_ = evaluation.ImageEvaluation(classes)
    for batch in (slice(0, 7), slice(7, None)):
        evaluation_.on_batch(pictures[batch], labels[batch], np.eye(10, dtype=np.float32)[predictions[batch]])
    return evaluation_


METRICS = {"loss": 0.1234567, "accuracy": 0.98}


def test_a_report_reads_the_written_evaluation(tmp_path: Path) -> None:
    assert make_evaluation().write(str(tmp_path), 40, METRICS) is None
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation.json"]
    content = (tmp_path / "evaluation.json").read_bytes()
    report = json.loads(content)
    assert (report["step"], report["loss"], report["accuracy"], report["classes"]) == (40, 0.123457, 0.98, DIGITS)
    read = parse(content)
    assert (read.step, read.classes) == (40, DIGITS)
    assert read.confusion[0] == [4, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert read.confusion[9] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 5]
    (mistake,) = read.mistakes
    assert (mistake.label, mistake.predicted) == (0, 9)
    picture = tf.io.decode_png(base64.b64decode(mistake.image)).numpy()
    assert (
        picture[:, :, 0].tolist()
        == make_evaluation().pictures[0].tolist()
        == np.arange(784, dtype=np.uint8).reshape(28, 28).tolist()
    )


def test_an_evaluation_replaces_the_previous_one_with_its_classes(tmp_path: Path) -> None:
    assert make_evaluation().write(str(tmp_path), 40, METRICS) is None
    assert make_evaluation(3, ["cat", "dog", "owl", *DIGITS[3:]]).write(str(tmp_path), 41, METRICS) is None
    read = parse((tmp_path / "evaluation.json").read_bytes())
    assert (read.step, read.classes, read.confusion) == (41, ["cat", "dog", "owl"], [[4, 0, 1], [0, 5, 0], [0, 0, 5]])


def test_a_single_class_gives_a_matrix() -> None:
    evaluation_ = evaluation.ImageEvaluation(DIGITS)
    evaluation_.on_batch(np.zeros((7, 784), np.float32), np.zeros(7, np.int64), np.eye(10, dtype=np.float32)[[0] * 7])
    assert evaluation_.content(1, {"loss": 0.0, "accuracy": 1.0}) == {
        "step": 1,
        "loss": 0.0,
        "accuracy": 1.0,
        "classes": ["0", "1"],
        "confusion": [[7, 0], [0, 0]],
        "mistakes": [],
    }


@pytest.mark.parametrize("wrong", [0, 3, 20])
def test_the_first_mistakes_are_kept_with_their_predictions(wrong: int) -> None:
    numbers = np.arange(40)
    predictions = (numbers + (numbers < wrong)) % 10  # the first digits are predicted as the next one
    pictures = np.repeat(numbers[:, None], 784, 1).astype(np.float32) / np.float32(255)
    evaluation_ = evaluation.ImageEvaluation(DIGITS)
    for begin in range(0, 40, 15):
        batch = slice(begin, begin + 15)
        evaluation_.on_batch(pictures[batch], numbers[batch] % 10, 100 * np.eye(10, dtype=np.float32)[predictions[batch]])
    expected = [[0] * 10 for _ in range(10)]
    for number in range(40):
        expected[number % 10][predictions[number]] += 1
    assert evaluation_.confusion.tolist() == expected
    count = min(wrong, 16)
    assert evaluation_.pictures.shape == (count, 28, 28)
    assert evaluation_.pictures[:, 0, 0].tolist() == list(range(count))
    assert evaluation_.labels.tolist() == [number % 10 for number in range(count)]
    assert evaluation_.predicted.tolist() == [(number + 1) % 10 for number in range(count)]


def read_summaries(folder: Path) -> EventMultiplexer:
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    return multiplexer


def test_mistaken_digits_are_named_and_joined(tmp_path: Path) -> None:
    evaluation_ = evaluation.ImageEvaluation(DIGITS)
    pictures = np.stack([np.full(784, shade, np.float32) for shade in (10, 20, 30)]) / np.float32(255)
    evaluation_.on_batch(pictures, np.array([9, 4, 9]), np.eye(10, dtype=np.float32)[[4, 9, 4]])
    evaluation_.on_end(7, METRICS, Summaries(str(tmp_path)), str(tmp_path), last=False)
    read_back = read_summaries(tmp_path)
    names = ["mistakes/4 predicted as 9", "mistakes/9 predicted as 4"]
    assert sorted(read_back.PluginRunToTagToContent("images")["summaries"]) == names
    width, height, *pictures = make_ndarray(read_back.Tensors("summaries", names[1])[0].tensor_proto)
    assert (width, height) == (b"28", b"28")
    assert [int(tf.io.decode_png(png)[0, 0, 0]) for png in pictures] == [10, 30]
    assert not (tmp_path / "evaluation.json").exists(), "the model keeps training"


def test_without_mistakes_only_the_last_evaluation_writes_the_file(tmp_path: Path) -> None:
    evaluation.ImageEvaluation(DIGITS).on_end(7, METRICS, Summaries(str(tmp_path)), str(tmp_path), last=True)
    assert read_summaries(tmp_path).PluginRunToTagToContent("images") == {}
    assert json.loads((tmp_path / "evaluation.json").read_text())["mistakes"] == []


def test_an_unwritable_folder_ends_no_job(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = make_evaluation().write(f"{tmp_path}/file", 40, METRICS)
    assert message is not None
    assert message.startswith(f"{tmp_path}/file/evaluation.json was not written: ")
    assert "\n" not in message


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
def test_the_manifest_names_the_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manifest: str | None, names: list[str]
) -> None:
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    assert evaluation.classes(str(tmp_path / "test-00000-of-00001.tfrecord")) == names
    monkeypatch.chdir(tmp_path)
    assert evaluation.classes("test-00000-of-00001.tfrecord") == names
