"""Write data for TensorBoard to a folder `summaries`: scalars and images by step, and the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from scaletier.tensorflow_setup import import_tensorflow, one_line, say

if TYPE_CHECKING:
    from scaletier.loop import Metric

tf = import_tensorflow()


class Summaries:
    """A writer of summaries. The first summary creates the file, to save time at the start.

    tf.summary.scalar and image import TensorBoard, which takes seconds; this class writes the same format without it.
    Source of the formats: TensorBoard's plugins scalars and images, each in its metadata.py. If writing fails, one log line
    reports it, and training continues.
    """

    def __init__(self, folder: str) -> None:
        """Write below `folder`, the job's directory or an evaluator's folder in it."""
        self._path = f"{folder}/summaries"
        self._writer: Any = None

    def scalars(self, step: int, values: Mapping[str, Metric]) -> None:
        """Write numbers, or means of arrays, by name at a step."""
        tags = {name: tf.reduce_mean(tf.constant(value, tf.float32)) for name, value in values.items()}
        self._write_tags(step, "scalars", "DATA_CLASS_SCALAR", tags)

    def images(self, step: int, images: Mapping[str, Any]) -> None:
        """Write images, uint8 [N, height, width], by name at a step."""
        tags = {name: _encode_images(array) for name, array in images.items()}
        self._write_tags(step, "images", "DATA_CLASS_BLOB_SEQUENCE", tags)

    def graph(self, traced: Any) -> None:
        """Write the graph of a concrete function, for the tab Graphs."""
        self._write(lambda: tf.summary.graph(traced.graph))

    def _write_tags(self, step: int, plugin: str, data_class: str, tags: dict[str, Any]) -> None:
        metadata = tf.compat.v1.SummaryMetadata(data_class=data_class)
        metadata.plugin_data.plugin_name = plugin
        self._write(lambda: [tf.summary.write(tag, tensor, metadata=metadata) for tag, tensor in tags.items()], step)

    def _write(self, write: Callable[[], object], step: int | None = None) -> None:
        try:
            if self._writer is None:
                self._writer = tf.summary.create_file_writer(self._path)
            with self._writer.as_default(step=step):
                write()
            self._writer.flush()
        except tf.errors.OpError as error:
            self._writer = tf.summary.create_noop_writer()
            say(f"There are no summaries from here on: {self._path} cannot be written to: {one_line(error)}")


def _encode_images(images: Any) -> Any:
    """Return images, uint8 [N, height, width], in TensorBoard's form: width, height, then the PNGs, strings [2 + N]."""
    _, height, width = images.shape
    pngs = [tf.io.encode_png(image[..., None]) for image in images]
    return tf.stack([tf.constant(str(width)), tf.constant(str(height)), *pngs])
