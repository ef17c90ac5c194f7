"""The test images of MNIST, and a few invalid lines, through a model on all hosts while one is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest
from stacks import ROOT, Stack
from waiting import limit, wait_for

from trainer.request import images

MNIST = ROOT / ".cache" / "mnist"
_OUTPUT = "/bucket/predictions/test"
# Three replicas have four shards each, and each of the images' files is one. The second worker is the third replica: these are
# the first two of its shards, and the file of the second, which is replaced by a pipe without a writer.
_FILES = 12
_FIRST = f"{_OUTPUT}/.parts/00002.json"
_SECOND = "/bucket/data/batch/test-05.tfrecord"
_HOLD = f"""
import os, time
while not os.path.exists("{_OUTPUT}/.parts/counts-2.json"):
    time.sleep(0.01)
os.rename("{_SECOND}", "{_SECOND}.kept")
os.mkfifo("{_SECOND}", 0o644)
"""


def raw_records(content: bytes) -> list[bytes]:
    """Split a TFRecord file into raw records, each with its length and checksums."""
    records, at = [], 0
    while at < len(content):
        end = at + 16 + int.from_bytes(content[at : at + 8], "little")
        records.append(content[at:end])
        at = end
    return records


@pytest.fixture(scope="module")
def model(cluster: Stack, served: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Deploy `batched`, and put images below data/batch: records in files of one shard, and lines of five."""
    folder = tmp_path_factory.mktemp("batch") / "batch"
    folder.mkdir()
    records = raw_records((MNIST / "test-00000-of-00001.tfrecord").read_bytes())
    for number in range(_FILES):
        part = records[len(records) * number // _FILES : len(records) * (number + 1) // _FILES]
        (folder / f"test-{number:02}.tfrecord").write_bytes(b"".join(part))
    pixels = [round(byte / 255, 4) for byte in next(images(MNIST))[0]]
    valid = [json.dumps({"key": 20000 + key, "image": pixels}) for key in range(2)]
    lines = [valid[0], "no JSON", '{"key": 1, "image": [1]}', "", '{"image": 7}', valid[1]]
    (folder / "z.json").write_text("\n".join(lines) + "\n")
    cluster.must("data", "put", str(folder))
    try:
        cluster.must("deploy", "--job", served, "--model", "batched", "--version", "v1")
        yield cluster
    finally:
        cluster.fab("delete-version", "batched", "v1", "--yes")
        cluster.fab("data", "rm", "batch", "--yes")


def test_every_instance_has_one_result_after_a_worker_is_killed(model: Stack, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        # Poll before the job begins: a replica has counted its records, but has not predicted its first shard.
        hold = pool.submit(model.ssh, "ps-0", f"sudo python3 -c '{_HOLD}'", 600)
        wait_for(lambda: model.ssh("ps-0", "pgrep -f [c]ounts-2.json").code == 0, "the counts are read")
        flags = ("--input", "/bucket/data/batch/*", "--output", _OUTPUT, "--job", "batch", "--replicas", "3")
        batch = model.start("fab", "predict", "batched", "--batch", *flags)
        assert hold.result().code == 0, hold.result().text
    model.wait_on("worker-1", f"[ -e {_FIRST} ]", f"sudo mv {_SECOND}.kept {_SECOND}", timeout=600)
    model.must_ssh("worker-1", "sudo pkill -KILL -f [h]osts.batch.task")
    printed, _ = batch.communicate(timeout=limit(600))
    assert batch.returncode == 0, printed
    assert "Predicted 10002 instances, 3 errors (" in printed
    (worker,) = (replica for replica in model.describe("batch")["replicas"] if replica["name"] == "worker-1")
    assert worker["restarts"] >= 1, "it was killed during a shard"
    log = model.fab("logs", "worker-1", "--job", "batch", "--lines", "all").out
    shards = [line.partition("Shard ")[2].split()[0] for line in log.splitlines() if "Shard " in line]
    assert len(shards) == len(set(shards)), "finished shards are not repeated"

    output = model.get("batch", tmp_path)
    files = sorted(output.glob("prediction.results-*"))
    assert len(list(output.iterdir())) == len(files) + 2, "errors and metrics, and nothing else"
    results = [json.loads(line) for line in chain.from_iterable(file.read_text().splitlines() for file in files)]
    assert [result["key"] for result in results] == [*range(10_000), 20_000, 20_001]
    labels = [label for _, label in images(MNIST)]
    right = sum(result["classes"] == label for result, label in zip(results, labels, strict=False))
    assert right >= 9_000
    assert [result["classes"] for result in results[-2:]] == [results[0]["classes"]] * 2
    (file,) = output.glob("prediction.errors_stats-*")
    errors = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(error["file"], error["line"]) for error in errors] == [("/bucket/data/batch/z.json", line) for line in (2, 3, 5)]
    assert json.loads((output / "metrics.json").read_text()) == {"instances": 10_002, "errors": 3}

    refused = model.fab("predict", "batched", "--batch", "--input", "/bucket/data/batch/*", "--output", _OUTPUT)
    assert (refused.code, f"--output {_OUTPUT} is not empty" in refused.text) == (2, True)
