"""What the trainer leaves for TensorBoard, and what an evaluation finds: read as TensorBoard reads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.util.tensor_util import make_ndarray
from trainer.evaluation import Mistakes, make_evaluate
from trainer.runtime import import_tensorflow
from trainer.summaries import Summaries

from trainer import records
from trainer.mnist import Split

tf = import_tensorflow()
ROOT = Path(__file__).resolve().parents[2]


def read(folder: Path) -> EventMultiplexer:
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    return multiplexer


def strings(event: Any) -> list[bytes]:
    return list(make_ndarray(event.tensor_proto))


def test_each_kind_is_found_by_its_plugin(tmp_path: Path) -> None:
    summaries = Summaries(str(tmp_path))
    assert not list(tmp_path.iterdir()), "nothing is written before there is something"
    summaries.scalars(5, loss=0.5, replicas__rate=2)
    summaries.graph(tf.function(lambda x: x + 1, input_signature=[tf.TensorSpec([], tf.int32)]).get_concrete_function())
    read_back = read(tmp_path)
    assert list(read_back.PluginRunToTagToContent("scalars")["summaries"]) == ["loss", "replicas/rate"]
    (loss,) = read_back.Tensors("summaries", "loss")
    assert (loss.step, float(make_ndarray(loss.tensor_proto))) == (5, 0.5)
    assert {node.op for node in read_back.Graph("summaries").node} >= {"Placeholder", "AddV2"}
    assert read_back.SummaryMetadata("summaries", "loss").data_class == 1


def test_mistaken_digits_are_named_and_put_together(tmp_path: Path) -> None:
    images = np.stack([np.full((28, 28), shade, np.uint8) for shade in (10, 20, 30)])
    Summaries(str(tmp_path)).mistakes(7, Mistakes(images, np.array([4, 9, 4]), np.array([9, 4, 9])))
    read_back = read(tmp_path)
    assert list(read_back.PluginRunToTagToContent("images")["summaries"]) == [
        "mistakes/4 taken for 9",
        "mistakes/9 taken for 4",
    ]
    width, height, *pictures = strings(read_back.Tensors("summaries", "mistakes/9 taken for 4")[0])
    assert (width, height) == (b"28", b"28")
    assert [int(tf.io.decode_png(png)[0, 0, 0]) for png in pictures] == [10, 30]


def test_no_mistake_is_no_picture(tmp_path: Path) -> None:
    Summaries(str(tmp_path)).mistakes(7, Mistakes(np.zeros((0, 28, 28), np.uint8), np.zeros(0, int), np.zeros(0, int)))
    assert read(tmp_path).PluginRunToTagToContent("images") == {}


def test_writing_them_does_not_import_tensorboard() -> None:
    code = (
        "import sys, tempfile, numpy\nfrom trainer.summaries import Summaries\nfrom trainer.evaluation import Mistakes\n"
        "s = Summaries(tempfile.mkdtemp())\ns.scalars(1, a=1)\n"
        "s.mistakes(1, Mistakes(numpy.zeros((1, 28, 28), 'uint8'), numpy.array([1]), numpy.array([2])))\n"
        "print([name for name in sys.modules if name.startswith('tensorboard')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize("wrong", [0, 3, 20])
def test_an_evaluation_keeps_the_first_mistakes(tmp_path: Path, wrong: int) -> None:
    labels = bytes(number % 10 for number in range(40))
    images = b"".join(bytes([number] * 784) for number in range(40))
    records.write_shard(tmp_path / "test.tfrecord", Split(images, labels), 0, 1)

    def logits(pixels: Any) -> Any:
        number = tf.cast(tf.round(pixels[:, 0] * 255), tf.int32)
        shift = tf.cast(number < wrong, tf.int32)  # the first digits are taken for the next one
        return 100.0 * tf.one_hot((number + shift) % 10, 10)

    metrics = make_evaluate(logits, [str(tmp_path / "test.tfrecord")])()
    assert metrics.accuracy == pytest.approx(1 - wrong / 40)
    assert metrics.loss == pytest.approx(100 * wrong / 40)
    expected = [[0] * 10 for _ in range(10)]
    for number in range(40):
        expected[number % 10][(number + (number < wrong)) % 10] += 1
    assert metrics.confusion.tolist() == expected
    kept = min(wrong, 16)
    assert metrics.mistakes.images.shape == (kept, 28, 28)
    assert metrics.mistakes.images[:, 0, 0].tolist() == list(range(kept))
    assert metrics.mistakes.labels.tolist() == [number % 10 for number in range(kept)]
    assert metrics.mistakes.predicted.tolist() == [(number + 1) % 10 for number in range(kept)]
