"""Every parser of untrusted text, with seeds and the errors that it may raise. Any other error is a defect."""

from __future__ import annotations

import base64
import gzip
import io
import json
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hosts.agent.lines import Messages, Splitter
from hosts.batch import instances
from hosts.serving.rest import RestError
from infra.findings import Finding
from infra.gcp.config import GcpConfig
from infra.lxd.config import LxdConfig
from infra.scale_tiers import SpecError, parse_replica
from jobs import chunks, notification
from jobs.model_records import Model
from jobs.model_signatures import Signature, read_signatures
from jobs.progress import ProgressFinder
from jobs.queue import Queue
from jobs.records import CancelRequest, HostConfig, JobRecord, Plan, ReplicaRecord
from jobs.serialization import Record, RecordError
from jobs.study import Trial
from ops import commands, terminal
from ops.cluster import inventory
from ops.config_values import read_yaml, validate
from ops.errors import UsageError
from ops.logs import heuristics, lines
from ops.logs.filters import parse_filter
from ops.package import hostpython, trainer_config
from ops.report import evaluation
from ops.submit.config import split_args, split_labels
from ops.submit.schema import JobConfig
from scaletier.tf_config import ClusterError
from scaletier.tf_config import parse as parse_cluster


@dataclass(frozen=True)
class Parser:
    """`of` parses untrusted bytes; the seeds are valid examples, from which cases are generated."""

    of: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]


def _text(data: bytes) -> str:
    """Decode like Python's command line and file names, including invalid UTF-8."""
    return data.decode("utf-8", "surrogateescape")


def _config(kind: type[LxdConfig | GcpConfig]) -> Callable[[bytes], object]:
    def of(data: bytes) -> object:
        values = dict(line.partition(" ")[::2] for line in _text(data).splitlines())
        return kind.parse(values).spec()

    return of


def _record(kind: type[Record]) -> Callable[[bytes], object]:
    def of(data: bytes) -> object:
        try:
            return kind.from_json(data).to_json()
        except RecordError as error:
            assert "\n" not in str(error), "an error message is one line"
            raise

    return of


def _job(data: bytes) -> object:
    return validate(JobConfig, read_yaml(data, "config.yaml"), "config.yaml").given()


def _package(data: bytes) -> object:
    return trainer_config.read({"mine/scaletier.yaml": data, "mine/task.py": b""}, "mine")


def _log(data: bytes) -> object:
    position, line = lines.parse_printed(data, "master-0")
    return position, line and line.to_json()


def _output(data: bytes) -> object:
    """Parse a program's output in pieces, as lines, and as shown on a terminal."""
    splitter, messages = Splitter(), Messages()
    half = len(data) // 2
    texts = [*splitter.feed(data[:half], 0.0), *splitter.take_partial(2.0), *splitter.feed(data[half:], 3.0), *splitter.end()]
    for number, text in enumerate(texts):
        line = messages.add(text, float(number))
        heuristics.parse_metrics(text)
        sanitized = terminal.sanitize(line.message, colours=True)
        assert "\n" not in sanitized
        assert "\x1b]" not in sanitized
    return texts


class _Chunks:
    """A log with untrusted names and bytes."""

    def __init__(self, data: bytes) -> None:
        parts = data.split(b"\0")
        self._files = {_text(name): content for name, content in zip(parts[::2], parts[1::2], strict=False)}

    def sizes(self) -> Mapping[str, int]:
        return {name: len(content) for name, content in self._files.items()}

    def read(self, name: str, start: int, end: int) -> bytes:
        return self._files.get(name, b"")[start:end]


def _stored(data: bytes) -> object:
    source = _Chunks(data)
    log_filter = chunks.LogFilter(5, "2026-01-01T00:00:00.000Z", "", "WARNING", "a")
    return [*lines.read_source(source, "master-0", log_filter)], chunks.last_entries(source, log_filter)


def _archive(data: bytes) -> object:
    """Read a tar.gz of a fuzzed tar: no mutation of the whole would keep its checksums."""
    return trainer_config.read_from_archive(gzip.compress(data, 0), "mine")


def _requirement(data: bytes) -> object:
    return hostpython.is_met(_text(data), {"numpy": "2.1.0", "tensorflow-cpu": "2.21.0"})


def _log_filter(data: bytes) -> object:
    # No pattern: a user's own pattern may take Python minutes to compile.
    since, until, count, severity = (_text(data).split("\n") + [""] * 4)[:4]
    return parse_filter(count or None, since, until or None, None, severity or None)


def _inventory(data: bytes) -> object:
    return inventory.parse(data, Path("there"))


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


_LINE = _json({"time": "2026-01-31T00:00:00.000Z", "severity": "INFO", "replica": "master-0", "message": "a\u001b[31mb"})
_PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
_TASK = {"cluster": {"master": ["a:2222"], "worker": ["b:2222"], "ps": ["c:2222"]}, "task": {"type": "ps", "index": 0}}
_DECLARED = (
    b"strategy: async\nstrategies:\n  async: {requiredRoles: [ps], restartPolicy: replica}\n"
    b"data: {name: mnist, flags: [--data]}\n"
)
_RECORDS: Mapping[type[Record], Mapping[str, Any]] = {
    JobRecord: {
        "jobId": "job01",
        "state": "RUNNING",
        "trainingInput": {"args": ["a"]},
        "events": [{"time": "x", "cause": "y"}],
    },
    ReplicaRecord: {"name": "master-0", "state": "RUNNING", "restarts": 1, "exitCode": 137, "events": []},
    Plan: {"jobId": "a", "replicas": ["master-0"], "module": "m", "args": [], "tasks": {"master-0": {"tfConfig": "{}"}}},
    CancelRequest: {"requestedBy": "me", "createTime": "x"},
    Queue: {"jobs": [{"jobId": "a", "priority": 1}]},
    Trial: {
        "trialId": 1,
        "hyperparameters": {"a": "0.1"},
        "replica": "worker-0",
        "state": "SUCCEEDED",
        "finalMetric": {"objectiveValue": 0.5, "trainingStep": 1},
    },
    HostConfig: {"name": "master-0", "bucket": "/bucket", "pollSeconds": 1.5},
    Model: {"name": "ocr", "versions": [{"name": "v1", "createTime": "x"}], "defaultVersion": "v1"},
}
_HOST = {
    "name": "master-0",
    "role": "master",
    "index": 0,
    "address": "10.0.0.2",
    "machineType": "n1-standard-4",
    "cpus": 4,
    "memoryBytes": 1 << 30,
}
_INVENTORY = {
    "schema": inventory.SCHEMA, "stack": "a", "target": "lxd", "scaleTier": "BASIC", "bucket": "/bucket", "operatorBucket": "sftp://m/b",
    "hosts": [_HOST], "labels": {"a": "b"}, "operatorRuntimes": "/r", "runtimes": "/r",
}  # fmt: skip

PARSERS: Mapping[str, Parser] = {
    "config of a local stack": Parser(
        _config(LxdConfig),
        (SpecError,),
        (
            b'scaleTier CUSTOM\nmasterType e2-micro\nworkerCount 3\nworkerType e2-small\ncpus {"ps": 2}\nnetwork 10.1.0.0/24',
            b'memory {"worker": "2GiB"}\ndisk {"ps": "4GiB"}\nlabels {"a": "b"}\nbucketSize 10GiB',
        ),
    ),
    "config of a stack at Google": Parser(
        _config(GcpConfig),
        (SpecError,),
        (
            b'target gcp\nscaleTier STANDARD_1\nzones ["us-central1-a"]\noperatorCidr 1.2.3.4/32\nimage a/b',
            b'acceleratorType {"worker": "nvidia-tesla-t4"}\nacceleratorCount {"worker": 2}\nidleTimeout 20m\nsubnetwork mine',
        ),
    ),
    "config.yaml of a job": Parser(
        _job,
        (UsageError,),
        (
            b"trainingInput:\n  scaleTier: CUSTOM\n  args: [--a, '1']\n  scheduling: {maxRunningTime: 3600s}\nlabels: {a: b}\n",
            b"trainingInput:\n  hyperparameters:\n    goal: MAXIMIZE\n    maxTrials: 4\n    params:\n"
            b"    - {parameterName: a, type: DOUBLE, minValue: 0.1, maxValue: 1, scaleType: UNIT_LOG_SCALE}\n",
        ),
    ),
    "scaletier.yaml of a package": Parser(_package, (UsageError,), (_DECLARED,)),
    **{f"a {kind.kind}": Parser(_record(kind), (RecordError,), (_json(seed),)) for kind, seed in _RECORDS.items()},
    "inventory.json": Parser(_inventory, (UsageError,), (_json(_INVENTORY),)),
    "findings of the doctor": Parser(
        lambda data: Finding.from_dict(json.loads(data)),
        (ValueError, KeyError, TypeError, RecursionError),
        (_json({"severity": "ok", "what": "a", "remedy": None, "fixed": False, "check": "b", "fixError": None}),),
    ),
    "a log line of a host": Parser(_log, (ValueError,), (b"1 2 " + _LINE, b"0 100 x")),
    "a log's chunks": Parser(
        _stored, (), (b"0000000001-000000000000000-000000000000.jsonl\0" + _LINE + b"\n" + _LINE + b"\n\0", b"a\0b\0c\0d")
    ),
    "what a program prints": Parser(
        _output,
        (),
        (
            b"Train [master/0], step 5: loss: 0.1\r10%\r20%\n\x1b[31mred\x1b[0m\x1b]0;title\x07\n",
            "Fehler: \u202e\n".encode(),
            b"2026-01-31 12:00:00,123 - trainer - ERROR - x\n",
            b'Traceback (most recent call last):\n  File "a", line 1\nValueError: x\n\xff\xfe\x00',
        ),
    ),
    "a report of progress": Parser(
        lambda data: ProgressFinder().add_line(_text(data), 0.0, ""),
        (),
        (
            b'{"scaletier.progress": {"step": 3, "totalSteps": 9, "etaSeconds": 1.5, "loss": 0.1, "metrics": {"a": 1}}}',
            b"Train [master/0], step 5: loss: 0.1, accuracy: nan (1.0 sec) 2.0 global steps/s, 1.0 local steps/s",
            b"Final metrics after 5 steps, loss: 0.1",
        ),
    ),
    "where an end is reported": Parser(
        lambda data: (commands.check_target(_text(data)), notification.redact_target(_text(data))),
        (ValueError,),
        (b"https://example.com:8080/a?b=c", b"http://[::ffff:10.0.0.1]/", b"http://0x7f.1/", b"./done.sh --now 'a b'"),
    ),
    "TF_CONFIG": Parser(lambda data: parse_cluster(_text(data)), (ClusterError,), (_json(_TASK),)),
    "a name of a replica": Parser(
        lambda data: parse_replica(_text(data), ["master-0", "worker-0"]), (SpecError,), (b"worker-0",)
    ),
    "a package": Parser(
        _archive,
        (UsageError, tarfile.TarError, zlib.error, EOFError, OSError, ValueError),
        (_tar({"mine/task.py": b"", "mine/scaletier.yaml": _DECLARED}),),
    ),
    "a line of requirements.txt": Parser(
        _requirement, (UsageError,), (b"numpy==2.1.0; python_version < '3.12'", b"tensorflow>=2", b"a[b] @ https://h/x.whl")
    ),
    "--args": Parser(lambda data: split_args(_text(data)), (UsageError,), (b"--a 'b c' \"d\"",)),
    "--labels": Parser(lambda data: split_labels([_text(data)]), (UsageError,), (b"a=b,c=d",)),
    "--since, --until, --lines, --severity": Parser(
        _log_filter, (UsageError,), (b"2026-01-31T00:00:00Z\n10m\n100\nWARNING", b"12:30\n\nall\nerror")
    ),
    "a saved model": Parser(
        read_signatures, (ValueError,), (bytes.fromhex("08011212 2a10 0a0161 120b 0a090a0178 1204 10011a00"),)
    ),
    "an evaluation": Parser(
        evaluation.parse,
        (ValueError,),
        (
            _json(
                {
                    "classes": ["a", "b"],
                    "confusion": [[1, 2], [3, 4]],
                    "mistakes": [{"image": _PNG, "label": 0, "predicted": 1}],
                }
            ),
        ),
    ),
    "an instance to predict": Parser(
        lambda data: instances.parse_line(data, Signature({}, {})), (RestError,), (b'{"key": 1, "image": [0.1, 2]}',)
    ),
}
