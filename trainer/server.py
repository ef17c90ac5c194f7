"""A parameter server or a worker: a TensorFlow server that does what the chief asks, until it is told to end."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import types
from typing import Any, NoReturn

from trainer.cluster import Cluster
from trainer.runtime import import_tensorflow, quiet_stderr, reuse_memory, thread_counts


def _server_library() -> tuple[Any, Any]:
    """TensorFlow's server and the protocol buffers of its settings, without the rest of its Python.

    A server needs TensorFlow's C++ and 4% of its Python. Importing only that takes 0.5 s instead of 2.2 s, which counts
    where many replicas start at once on few cpus; so the package is entered past its `__init__`. Should a version of
    TensorFlow not have it, the whole of it does the same.
    """
    # What goes wrong in a step is the chief's to tell; left are remarks about the processor.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2") == "2":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    spec = importlib.util.find_spec("tensorflow")
    if "tensorflow" not in sys.modules and spec is not None and spec.submodule_search_locations:
        package = types.ModuleType("tensorflow")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["tensorflow"] = package
        try:
            with quiet_stderr():
                return (
                    importlib.import_module("tensorflow.python.training.server_lib").Server,
                    importlib.import_module("tensorflow.core.protobuf.config_pb2").ConfigProto,
                )
        except ImportError:
            for name in [name for name in sys.modules if name.partition(".")[0] == "tensorflow"]:
                del sys.modules[name]
    tf = import_tensorflow()
    return tf.distribute.Server, tf.compat.v1.ConfigProto


def serve(cluster: Cluster) -> NoReturn:
    """Runs this task's server; SIGTERM ends the process at once, as there is nothing here to save."""
    reuse_memory()
    server_class, config_class = _server_library()
    intra_op, inter_op = thread_counts()
    server = server_class(
        {job: list(addresses) for job, addresses in cluster.jobs.items()},
        job_name=cluster.task_type,
        task_index=cluster.task_index,
        protocol="grpc",
        config=config_class(intra_op_parallelism_threads=intra_op, inter_op_parallelism_threads=inter_op),
    )
    role = f"{cluster.task_type}/{cluster.task_index}"
    work = "serves variables" if cluster.task_type == "ps" else "waits for the master's steps"
    print(f"Started [{role}] on {cluster.address}, {work}", flush=True)
    server.join()
    raise SystemExit(0)


def idle(cluster: Cluster, strategy: str) -> int:
    """A host that the strategy has no use for: it says so, and waits to be told to end; 0."""
    role = f"{cluster.task_type}/{cluster.task_index}"
    print(f"Idle [{role}]: strategy {strategy} needs no parameter servers; this one waits for the job's end", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    return 0
