"""What TensorBoard shows of a job: scalars over the global step, in `<job-dir>/summaries`."""

from __future__ import annotations

from typing import Any

from trainer.runtime import import_tensorflow

tf = import_tensorflow()


class Summaries:
    """A writer of scalars. The file comes to be with the first of them, so that it costs no time at the start."""

    def __init__(self, job_dir: str) -> None:
        self._path = f"{job_dir}/summaries"
        self._writer: Any = None
        # tf.summary.scalar is TensorBoard's own and comes with it; what it writes does not need it.
        self._metadata = tf.compat.v1.SummaryMetadata(data_class="DATA_CLASS_SCALAR")
        self._metadata.plugin_data.plugin_name = "scalars"

    def scalars(self, step: int, **values: float) -> None:
        """Writes each value under its name, `__` in a name standing for `/`."""
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self._path)
        with self._writer.as_default(step=step):
            for name, value in values.items():
                tf.summary.write(name.replace("__", "/"), tf.constant(value, tf.float32), metadata=self._metadata)
        self._writer.flush()
