"""Try what a trainer may not do in its bucket, by TensorFlow and by fsspec, and print the outcome of each attempt."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Callable

import fsspec
import tensorflow as tf

# Else gcsfs asks for the kind of the bucket by gRPC, which the fake does not speak, for a minute each time.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
BUCKET = sys.argv[1]
OUTPUT = os.environ["JOB_DIR"]
OTHER = f"{BUCKET}/jobs/mlp1/output"
RECORD = f"{BUCKET}/jobs/{os.environ['JOB_ID']}/replicas/master-0.json"


def write(path: str) -> None:
    with tf.io.gfile.GFile(path, "w") as file:
        file.write("mine")


def token(host: str) -> None:
    """Fetch the host's own token, which has all permissions of the host."""
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    urllib.request.urlopen(urllib.request.Request(url, headers={"Metadata-Flavor": "Google"}), timeout=20).read()


def main() -> None:
    if json.loads(os.environ["TF_CONFIG"])["task"]["type"] not in ("chief", "master"):
        return
    tried: dict[str, Callable[[], object]] = {
        "tf-write-output": lambda: (tf.io.gfile.makedirs(f"{OUTPUT}/deep/er"), write(f"{OUTPUT}/deep/er/x")),
        "tf-list-output": lambda: tf.io.gfile.listdir(OUTPUT),
        "fsspec-write-output": lambda: fsspec.open(f"{OUTPUT}/y", "w").open().close(),
        "tf-list-jobs": lambda: tf.io.gfile.listdir(f"{BUCKET}/jobs"),
        "tf-read-other": lambda: tf.io.gfile.GFile(f"{OTHER}/evaluation.json").read(),
        "tf-write-record": lambda: write(RECORD),
        "tf-delete-other": lambda: tf.io.gfile.remove(f"{OTHER}/evaluation.json"),
        "fsspec-read-queue": lambda: fsspec.open(f"{BUCKET}/cluster/queue.json").open().read(),
        "fsspec-write-record": lambda: fsspec.filesystem("gs").pipe(RECORD, b"{}"),
        "ask-address": lambda: token("169.254.169.254"),
        "ask-name": lambda: token("metadata.google.internal"),
    }
    for name, attempt in tried.items():
        try:
            attempt()
            print(f"nosy {name} done")
        except tf.errors.NotFoundError:
            print(f"nosy {name} unseen")
        except Exception as error:  # noqa: BLE001  whatever it is, the test is to see it
            denied = (PermissionError, tf.errors.PermissionDeniedError)
            refused = isinstance(getattr(error, "reason", error), denied) or str(error).startswith("Forbidden")
            print(f"nosy {name} refused" if refused else f"nosy {name} {type(error).__name__}: {error}")


main()
