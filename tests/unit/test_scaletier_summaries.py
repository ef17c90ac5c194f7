"""A job's summaries, read like TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.util.tensor_util import make_ndarray

from scaletier.summaries import Summaries
from scaletier.tensorflow_setup import import_tensorflow

tf = import_tensorflow()


def read(folder: Path) -> EventMultiplexer:
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    return multiplexer


def strings(event: Any) -> list[bytes]:
    return list(make_ndarray(event.tensor_proto))


def test_each_kind_is_found_by_its_plugin(tmp_path: Path) -> None:
    summaries = Summaries(str(tmp_path))
    assert not list(tmp_path.iterdir()), "no file is written before the first summary"
    summaries.scalars(5, {"loss": 0.5, "replicas/rate": 2, "f1": np.array([0.5, 1.0])})
    summaries.graph(tf.function(lambda x: x + 1, input_signature=[tf.TensorSpec([], tf.int32)]).get_concrete_function())
    read_back = read(tmp_path)
    assert list(read_back.PluginRunToTagToContent("scalars")["summaries"]) == ["loss", "replicas/rate", "f1"]
    (f1,) = read_back.Tensors("summaries", "f1")
    assert float(make_ndarray(f1.tensor_proto)) == 0.75
    (loss,) = read_back.Tensors("summaries", "loss")
    assert (loss.step, float(make_ndarray(loss.tensor_proto))) == (5, 0.5)
    assert {node.op for node in read_back.Graph("summaries").node} >= {"Placeholder", "AddV2"}
    assert read_back.SummaryMetadata("summaries", "loss").data_class == 1


def test_pictures_are_stored_side_by_side_under_their_name(tmp_path: Path) -> None:
    pictures = np.stack([np.full((4, 6), shade, np.uint8) for shade in (10, 30)])
    Summaries(str(tmp_path)).images(7, {"some/name": pictures})
    read_back = read(tmp_path)
    assert list(read_back.PluginRunToTagToContent("images")["summaries"]) == ["some/name"]
    width, height, *encoded = strings(read_back.Tensors("summaries", "some/name")[0])
    assert (width, height) == (b"6", b"4")
    assert [tf.io.decode_png(png)[..., 0].numpy().tolist() for png in encoded] == pictures.tolist()
