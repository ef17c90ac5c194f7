"""The chief's part of manifest.json: what only its host can tell, asked of a process of its own."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from typing import Any

from replica.ledger import Ledger
from replica.record import Plan


class Manifest:
    """Completes manifest.json while the trainer starts; neither the trainer nor a heartbeat waits for it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._process: subprocess.Popen[bytes] | None = None
        self._facts: dict[str, Any] = {}
        self._started = plan.replica != plan.chief

    def start(self) -> None:
        """Begin, on the chief; elsewhere, and the second time, nothing happens."""
        if self._started:
            return
        self._started = True
        plan = self._plan
        argv = [plan.python, "-m", "replica.facts", *plan.data]
        with suppress(OSError):  # a Python that is not there keeps the trainer from starting, too, and that is said there
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def told(self, ledger: Ledger) -> dict[str, Any]:
        """The facts once they are in the manifest, and then no more; empty until then. OSError as of the ledger."""
        if self._process and self._process.poll() is not None:
            answer, _ = self._process.communicate()
            self._facts = json.loads(answer) if not self._process.returncode else self._failed(self._process.returncode)
            self._process = None
        if not self._facts or not ledger.complete_manifest(self._facts):
            return {}
        facts, self._facts = self._facts, {}
        return facts

    def close(self) -> None:
        """Wait no longer."""
        if self._process:
            self._process.kill()
            self._process.communicate()

    def _failed(self, code: int) -> dict[str, Any]:
        return {"data": {"paths": self._plan.data, "notHashed": f"hashing ended with {code}"}}
