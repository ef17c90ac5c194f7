"""A job on a parameter server whose evaluations end only after the worker has trained further."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linear import data, model, optimizer

import scaletier


def worker_lines() -> int:
    log = Path(os.environ["JOB_DIR"]).parent / "worker-0.log"
    return len(re.findall(r"^Train \[worker/0\], step \d+:", log.read_text(), re.MULTILINE))


class HoldsEvaluation:
    """Delay an evaluation until the worker has logged two rounds, one of which may have been in progress."""

    def on_batch(self, inputs: Any, targets: Any, outputs: Any) -> None:
        lines_before = worker_lines()
        while worker_lines() < lines_before + 2:
            time.sleep(0.02)

    def on_end(self, step: int, metrics: Mapping[str, float], summaries: Any, job_dir: str, last: bool) -> None:
        pass


def eval_data() -> Any:
    import tensorflow as tf

    return data(tf.distribute.InputContext()).take(1)


if __name__ == "__main__":
    scaletier.run(scaletier.Job(model, data, "mse", optimizer=optimizer, eval_data=eval_data, eval_callback=HoldsEvaluation))
