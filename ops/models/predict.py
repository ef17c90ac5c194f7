"""`fab predict`: send instances to the cluster's model server, like `gcloud ml-engine predict`."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from jobs.model_records import VersionState
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.errors import DONE, OpsError, UsageError
from ops.models.client import NO_SERVER, ServingClient
from ops.models.lookup import catalog_of, existing_version, served_model

# The time for a server to start, and to load the model.
_READY_SECONDS = 180.0
_POLL_SECONDS = 0.5
_STDIN = "-"
# The server accepts at most 16 MiB in a request.
_MAX_REQUEST_BYTES = 16_000_000


def predict(
    cluster: ClusterClient, model: str | None, version: str | None, instances: str | None, signature: str | None, as_json: bool
) -> int:
    """Print the model's prediction for each instance of a file, a JSON value on each line."""
    inputs, file_signature = read_instances(instances)
    if signature is None:
        signature = file_signature
    elif file_signature not in (None, signature):
        raise UsageError(
            f"--signature {signature} differs from signature_name {file_signature!r} in {instances}: give only one"
        )
    record = served_model(catalog_of(cluster), model)
    name = record.name
    if version is not None and existing_version(record, version).state is VersionState.UNDEPLOYED:
        how = f"fab deploy --model {name} --version {version} restores it"
        raise UsageError(f"version {version} of model {name} is UNDEPLOYED: {how}")
    requests = [*request_bodies(inputs, {} if signature is None else {"signature_name": signature})]
    if len(requests) > 1:
        version = version or record.default or None  # one version answers all, even if the default changes
    path = f"/v1/models/{name}" + (f"/versions/{version}" if version else "")
    rows = [row for answer in _send_all(cluster, f"{path}:predict", requests) for row in answer["predictions"]]
    if as_json:
        terminal.print_json({"predictions": rows})
        return DONE
    show(rows)
    return DONE


def request_bodies(instances: Sequence[Any], fields: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield requests for all instances, in order, each with these fields, and within the size limit or of one instance."""
    rows = [json.dumps(instance).encode() for instance in instances]
    tail, limit = json.dumps(fields)[1:-1].encode(), _MAX_REQUEST_BYTES - len(json.dumps(fields))
    while rows:
        sizes = accumulate(len(row) + 1 for row in rows)
        count = max(1, sum(1 for _ in takewhile(lambda size: size <= limit, sizes)))
        yield b'{"instances": [' + b",".join(rows[:count]) + b"]" + (b", " + tail if tail else b"") + b"}"
        rows = rows[count:]


def read_instances(path: str | None) -> tuple[list[Any], Any]:
    """Return the instances in a file, `-` for stdin, and its signature_name, or None.

    The file has a JSON value on each line, or is one REST request or list of objects. UsageError names the first invalid line.
    """
    if path is None:
        raise UsageError("--json-instances is missing: a file with a JSON value on each line")
    try:
        content = sys.stdin.buffer.read() if path == _STDIN else Path(path).read_bytes()
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{path} cannot be read ({why}): give a file with a JSON value on each line") from None
    name = "stdin" if path == _STDIN else path
    values, signature = _parse_document(text) or (list(_lines(text, name)), None)
    if not values:
        raise UsageError(f"{name} has no instance: give a JSON value on each line")
    return values, signature


def _parse_document(text: str) -> tuple[list[Any], Any] | None:
    """Parse a file that is one JSON list of objects or one REST request: instances and signature; None for any other file."""
    try:
        value = json.loads(text, parse_constant=_reject_constant)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and isinstance(value.get("instances"), list):
        return value["instances"], value.get("signature_name")
    return (value, None) if isinstance(value, list) and value and all(isinstance(item, dict) for item in value) else None


def _lines(text: str, name: str) -> Iterator[Any]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                value = json.loads(line, parse_constant=_reject_constant)
                json.dumps(value, allow_nan=False)
            except (ValueError, RecursionError) as error:
                why = str(error).removesuffix(": line 1 column 1 (char 0)")
                problem = "has a number that is too large" if "Out of range" in why else f"is no JSON: {why}"
                if isinstance(error, RecursionError):
                    problem = "is nested too deeply"
                raise UsageError(f"{name}, line {number} {problem}; each line is a JSON value of its own") from None
            yield value


def _reject_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def _send_all(cluster: ClusterClient, path: str, requests: Sequence[bytes]) -> list[dict[str, Any]]:
    """Send the requests in order, and return the answers; hosts without a server get one meanwhile."""
    servers = ServingClient(cluster)
    with terminal.ProgressLine("asking the model server") as step:
        servers.start()
        advance = terminal.counter(step, len(requests)) if len(requests) > 1 else lambda _: None
        answers = []
        for body in requests:
            answers.append(_send(servers, path, body))
            advance(body)
        servers.finish_start()
        return answers


def _send(servers: ServingClient, path: str, body: bytes) -> dict[str, Any]:
    """Send a request, and return the answer; retry while servers start or load the model."""
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        status, content = servers.request("POST", path, body)
        if status == 200:
            answer: dict[str, Any] = content
            return answer
        why = content.get("error", "") if isinstance(content, dict) else ""
        if status not in (503, NO_SERVER) or time.monotonic() > deadline:
            raise (UsageError if 400 <= status < 500 else OpsError)(f"{why or f'the model server answers {status}'}")
        time.sleep(_POLL_SECONDS)


def show(predictions: list[Any]) -> None:
    """Print a table with a column for each output, like gcloud; the column `key` comes first."""
    if not all(isinstance(row, dict) for row in predictions):
        terminal.table(("PREDICTIONS",), [(_cell(row),) for row in predictions])
        return
    names = sorted({name for row in predictions for name in row}, key=lambda name: (name != "key", name))
    # A signature may return its probabilities also as scores, for classify requests: the table shows them once.
    repeated = all("scores" in row and row["scores"] == row.get("probabilities") for row in predictions)
    columns = [name for name in names if name != "scores" or not repeated]
    terminal.table(
        [re.sub(r"[^A-Z0-9]", "_", name.upper()) for name in columns],
        [[_cell(row.get(n)) for n in columns] for row in predictions],
    )


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
