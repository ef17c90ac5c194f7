"""The library for trainers: train any Keras 3 model and tf.data pipeline on the cluster of TF_CONFIG.

    import scaletier

    JOB = scaletier.Job(model=make_model, data=make_data, loss="mse", optimizer="adam")
    scaletier.run(JOB)

Importing it costs no TensorFlow: what a process needs of that is imported when it trains. docs/library.md is the manual.
"""

from __future__ import annotations

from scaletier.cluster import Cluster, ClusterError, cluster
from scaletier.fit import EvalSpec, TrainSpec, fit, train_and_evaluate
from scaletier.flags import parser
from scaletier.job import Inspector, Job, JobError
from scaletier.run import export, main, run

__all__ = [
    "Cluster",
    "ClusterError",
    "EvalSpec",
    "Inspector",
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
