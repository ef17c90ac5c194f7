"""TensorBoard's data of a job, in `<job-dir>/summaries`: scalars and images by step, and the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from scaletier.runtime import import_tensorflow, one_line, say

tf = import_tensorflow()


class Summaries:
    """A writer of summaries. The first of them creates the file, to save time at the start.

    tf.summary's own scalar and image are TensorBoard's and import it, which takes seconds; their output does not need it.
    Source of the formats: TensorBoard's plugins scalars and images, each in its metadata.py. If they cannot be written, one
    line reports it, and training continues.
    """

    def __init__(self, job_dir: str) -> None:
        self._path = f"{job_dir}/summaries"
        self._opened: Any = None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write each value under its name."""
        tags = {name: tf.constant(value, tf.float32) for name, value in values.items()}
        self._write(step, "scalars", "DATA_CLASS_SCALAR", tags)

    def images(self, step: int, pictures: Mapping[str, Any]) -> None:
        """Write pictures, uint8 [N, height, width], under each name."""
        self._write(step, "images", "DATA_CLASS_BLOB_SEQUENCE", {name: _encoded(array) for name, array in pictures.items()})

    def graph(self, traced: Any) -> None:
        """Write a tf.Graph, or that of a concrete function, for the tab Graphs."""
        with self._writer() as writer, writer.as_default():
            tf.summary.graph(getattr(traced, "graph", traced))

    @contextlib.contextmanager
    def _writer(self) -> Iterator[Any]:
        try:
            if self._opened is None:
                self._opened = tf.summary.create_file_writer(self._path)
        except tf.errors.OpError as error:
            self._lose(error)
        try:
            yield self._opened
            self._opened.flush()
        except tf.errors.OpError as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        self._opened = tf.summary.create_noop_writer()
        say(f"There are no summaries from here on: {self._path} cannot be written to: {one_line(error)}")

    def _write(self, step: int, plugin: str, data_class: str, tags: dict[str, Any]) -> None:
        metadata = tf.compat.v1.SummaryMetadata(data_class=data_class)
        metadata.plugin_data.plugin_name = plugin
        with self._writer() as writer, writer.as_default(step=step):
            for tag, tensor in tags.items():
                tf.summary.write(tag, tensor, metadata=metadata)


def _encoded(images: Any) -> Any:
    """Return images, uint8 [N, height, width], in TensorBoard's form.

    It is width, height, then the PNGs, strings [2 + N].
    """
    _, height, width = images.shape
    pictures = [tf.io.encode_png(image[..., None]) for image in images]
    return tf.stack([tf.constant(str(width)), tf.constant(str(height)), *pictures])
