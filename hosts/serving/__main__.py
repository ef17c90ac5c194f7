"""`python -m hosts.serving`: the model server of a host, the main process of its unit scaletier-serving.service."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from hosts.serving.app import ServerMetrics, app
from hosts.serving.manager import ModelManager
from hosts.serving.saved import SavedModel, tensorflow
from jobs.bucket import BucketError, TimeLimited
from jobs.folder_bucket import open_bucket
from jobs.model_catalog import Catalog

_BUCKET_SECONDS = 20.0
_BACKLOG = 1024
_IDLE_TIMEOUT = 30.0
# A process without a model has probably just been started for a deployment: it polls often.
_IDLE_POLL_SECONDS = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the models of a bucket until SIGTERM; return 2 if the bucket's address is invalid, 1 if it cannot listen."""
    parser = argparse.ArgumentParser(prog="python -m hosts.serving", description="Serve the models of a bucket.")
    parser.add_argument("--bucket", required=True, help="directory, or gs://name")
    parser.add_argument("--cache", required=True, type=Path, help="directory that no other server uses")
    parser.add_argument("--host", nargs="+", default=["127.0.0.1"], help="addresses to listen on")
    parser.add_argument("--port", type=int, default=8501)
    parser.add_argument("--poll-seconds", type=float, default=1.0)
    options = parser.parse_args(arguments)
    try:
        bucket = open_bucket(options.bucket)
    except BucketError as error:
        sys.stderr.write(f"<3>serving: {error}\n")
        return 2
    try:
        sockets = [socket.create_server((host, options.port)) for host in options.host]
    except OSError as error:
        sys.stderr.write(f"<3>serving: cannot listen: {error.strerror}\n")
        return 1
    metrics = ServerMetrics()
    manager = ModelManager(
        Catalog(TimeLimited(bucket, _BUCKET_SECONDS)),
        bucket,
        options.cache,
        _load,
        lambda model, rows: metrics.rows.labels(model).observe(rows),
    )
    config = uvicorn.Config(
        app(manager, metrics),
        http="httptools",
        log_level="warning",
        access_log=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    # Uvicorn handles signals only while it runs, and raises them again at its end: this handler lets `manager.close` run.
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    threading.Thread(target=_reconcile_forever, args=(manager, options.poll_seconds), name="manager", daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets)
    manager.close()
    return 0


def _load(folder: Path) -> SavedModel:
    saved = SavedModel(folder)
    saved.warm_up()
    return saved


def _reconcile_forever(manager: ModelManager, seconds: float) -> None:
    tensorflow()  # import it first, which takes longest: until it is imported, requests get 503
    last_used_at = time.monotonic()
    while True:
        try:
            manager.reconcile()
        except Exception:  # noqa: BLE001  loaded models keep answering, and the next poll may succeed
            traceback.print_exc()
        if not manager.idle:
            last_used_at = time.monotonic()
        elif time.monotonic() - last_used_at > _IDLE_TIMEOUT:
            os.kill(os.getpid(), signal.SIGTERM)  # frees the memory for jobs; fab deploy starts the server again
            return
        time.sleep(min(seconds, _IDLE_POLL_SECONDS) if manager.idle else seconds)


if __name__ == "__main__":
    sys.exit(main())
