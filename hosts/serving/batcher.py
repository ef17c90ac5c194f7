"""Batch the requests that arrive during a computation. A batch waits for the previous batch only, not for more requests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from hosts.serving.rest import Arrays, RestError
from jobs.model_signatures import Signature

Run = Callable[[str, Arrays], Arrays]
OnBatch = Callable[[int], None]


@dataclass
class _Request:
    signature: str
    inputs: Arrays
    rows: int  # 0 if it cannot be batched
    future: Future[Arrays] = field(default_factory=Future)

    @property
    def batch_key(self) -> tuple[object, ...]:
        """The properties that two requests must share to be batched."""
        return (self.signature, *((name, a.dtype, a.shape[1:]) for name, a in sorted(self.inputs.items())))


class Batcher:
    """A thread that runs a model. Any thread may call `put`."""

    def __init__(
        self,
        run: Run,
        signatures: dict[str, Signature],
        max_rows: int = 128,
        max_waiting: int = 512,
        on_batch: OnBatch = lambda _: None,
    ) -> None:
        """Start the thread that computes; `on_batch` is called with the rows of every batch."""
        self._run, self._signatures, self._max_rows, self._on_batch = run, signatures, max_rows, on_batch
        self._waiting: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._max_waiting = max_waiting
        self._closed = False
        self._unbatchable: set[str] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._work, name="model", daemon=True).start()

    def put(self, signature: str, inputs: Arrays) -> Future[Arrays]:
        """Return a future of the outputs; RestError 503 if too many requests wait already."""
        batchable = (
            signature not in self._unbatchable
            and self._signatures[signature].batchable
            and len({len(a) for a in inputs.values()}) == 1
        )
        request = _Request(signature, inputs, len(next(iter(inputs.values()))) if batchable else 0)
        if self._waiting.qsize() >= self._max_waiting:
            raise RestError(503, "too many requests wait for this model", retry_after=1)
        with self._lock:
            if not self._closed:
                self._waiting.put(request)
                return request.future
        # A request that got this batcher just before `close` is still answered.
        threading.Thread(target=self._compute, args=([request],), daemon=True).start()
        return request.future

    def close(self) -> None:
        """Stop the thread after the waiting requests are answered."""
        with self._lock:
            self._closed = True
            self._waiting.put(None)

    def _work(self) -> None:
        next_request: _Request | None = None
        while True:
            first = next_request or self._waiting.get()
            if first is None:
                return
            batch, next_request, closed = self._gather(first)
            self._compute(batch)
            if closed:
                return

    def _gather(self, first: _Request) -> tuple[list[_Request], _Request | None, bool]:
        """Return a batch that begins with `first`, a request that does not fit it, and whether `close` was called."""
        batch, rows = [first], first.rows
        while first.rows and first.signature not in self._unbatchable and rows < self._max_rows:
            try:
                other = self._waiting.get_nowait()
            except queue.Empty:
                break
            if other is None:
                return batch, None, True
            if not other.rows or other.batch_key != first.batch_key or rows + other.rows > self._max_rows:
                return batch, other, False
            batch.append(other)
            rows += other.rows
        return batch, None, False

    def _compute(self, batch: Sequence[_Request]) -> None:
        batch = [request for request in batch if request.future.set_running_or_notify_cancel()]
        if not batch:
            return
        if len(batch) == 1:
            self._compute_one(batch[0])
            return
        first, rows = batch[0], sum(request.rows for request in batch)
        try:
            inputs = {name: np.concatenate([request.inputs[name] for request in batch]) for name in first.inputs}
            outputs = self._run(first.signature, inputs)
        except Exception:  # noqa: BLE001  one bad request must not fail the others of its batch
            for request in batch:
                self._compute_one(request)
            return
        if any(array.ndim == 0 or len(array) != rows for array in outputs.values()):
            # Despite its shapes, the signature does not give one row for each input row: no client may get the rows of another.
            self._unbatchable.add(first.signature)
            for request in batch:
                self._compute_one(request)
            return
        self._on_batch(rows)
        start = 0
        for request in batch:
            end = start + request.rows
            request.future.set_result({name: array[start:end] for name, array in outputs.items()})
            start = end

    def _compute_one(self, request: _Request) -> None:
        try:
            outputs = self._run(request.signature, request.inputs)
            self._on_batch(max(request.rows, 1))
        except Exception as error:  # noqa: BLE001  the client gets it as the answer
            request.future.set_exception(error)
        else:
            request.future.set_result(outputs)
