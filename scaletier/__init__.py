"""Train a compiled Keras 3 model on one process, or on the cluster of TF_CONFIG.

    import scaletier

    history = scaletier.fit(make_model, make_batches, steps=2000)

Importing it does not import TensorFlow: a process imports what it needs when it trains. docs/library.md is the manual.
"""

from __future__ import annotations

from scaletier.fit import EvalSpec, TrainSpec, fit, train_and_evaluate
from scaletier.flags import parser
from scaletier.job import EvalCallback, Job, JobError
from scaletier.run import export, main, run
from scaletier.tf_config import Cluster, ClusterError, cluster

__all__ = [
    "Cluster",
    "ClusterError",
    "EvalCallback",
    "EvalSpec",
    "Job",
    "JobError",
    "TrainSpec",
    "cluster",
    "export",
    "fit",
    "main",
    "parser",
    "run",
    "train_and_evaluate",
]
