"""One's own data on the hosts: made of CSV, put into the bucket, refused where it is corrupt, and trained on without that."""

from __future__ import annotations

from pathlib import Path

from stacks import Stack

from trainer import records

_ARGS = "--train-data /bucket/own --eval-data /bucket/own --model mlp --batch-size 10 --max-steps 60"


def test_own_data_is_trained_on_without_its_corrupt_record(cluster: Stack, tmp_path: Path) -> None:
    rows = (f"{number % 10}," + ",".join(str((number * pixel) % 256) for pixel in range(784)) for number in range(200))
    (tmp_path / "own.csv").write_text("\n".join(rows))
    own = tmp_path / "records"
    assert records.main(["--source", str(tmp_path / "own.csv"), "--dest", str(own), "--shards", "4"]) == 0
    shard = own / "train-00002-of-00004.tfrecord"
    content = bytearray(shard.read_bytes())
    place = len(content) // 45 * 20  # 180 records in 4 files, all of one size
    content[place + 100] ^= 1
    shard.write_bytes(content)
    copied = cluster.run("scp", "-rF", str(cluster.folder / "ssh_config"), str(own), "master-0:/bucket/own")
    assert copied.code == 0, copied.text

    assert cluster.fab("train", "--job", "data_refused", "--args", _ARGS).code == 1
    error = cluster.describe("data_refused")["errorMessage"]
    assert f"/bucket/own/{shard.name} has no sound TFRecord at byte {place} (record 20): make the file again" in error

    result = cluster.fab("train", "--job", "data_skipped", "--args", f"{_ARGS} --skip-corrupt-records")
    assert result.code == 0, result.text
    log = cluster.fab("logs", "master-0", "--job", "data_skipped", "--lines", "all").out
    assert f"Skipping 1 corrupt record of /bucket/own/{shard.name}: byte {place} (record 20)" in log
