"""The chief's part of manifest.json: facts that only its host knows, collected by a separate process."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from hosts.agent.job_rules import with_facts
from jobs import paths
from jobs.bucket import BucketError, Conflict
from jobs.ledger import Ledger
from jobs.records import Plan

_END_SECONDS = 1.0
_FACTS = Path(__file__).with_name("facts.py")  # it is run, not imported: its own imports take time


class ManifestCompletion:
    """Completes manifest.json while the trainer starts; neither the trainer nor a heartbeat waits for it."""

    def __init__(self, plan: Plan, python: str, ledger: Ledger) -> None:
        """Begin to collect the facts with the hosts' Python: no code of a job's own Python may run as this user."""
        self._plan, self._ledger = plan, ledger
        self._process: subprocess.Popen[bytes] | None = None
        self._facts: dict[str, Any] = {}
        argv = [python, "-I", "-S", "-B", str(_FACTS), plan.python or python, *plan.data]
        with suppress(OSError):
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def write_facts(self) -> dict[str, Any] | None:
        """Write the facts into the manifest once they are known; return them when that has succeeded, else None."""
        if self._process and self._process.poll() is not None:
            answer, _ = self._process.communicate()
            self._facts = self._read(answer, self._process.returncode)
            self._process = None
        if not self._facts or not self._complete():
            return None
        facts, self._facts = self._facts, {}
        return facts

    def close(self) -> None:
        """Stop collecting the facts."""
        if self._process:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # it may wait for a disk, and no heartbeat may wait for that
                self._process.communicate(timeout=_END_SECONDS)
            self._process = None

    def _complete(self) -> bool:
        """Complete the manifest; return False until `fab train` has written its part. A garbled one stays as it is."""
        name = paths.manifest(self._plan.jobId)
        with suppress(BucketError, Conflict):
            if (item := self._ledger.store.read(name)) is None:
                return False
            try:
                complete = with_facts(json.loads(item.content), self._facts)
            except (ValueError, AttributeError, TypeError):
                return True
            self._ledger.store.replace(name, (json.dumps(complete, indent=1) + "\n").encode(), item.version)
            return True
        return False

    def _read(self, answer: bytes, code: int) -> dict[str, Any]:
        """Return the answer's last line; a library that reads the data may have printed others before."""
        with suppress(ValueError, IndexError):
            collected = json.loads(answer.splitlines()[-1])
            if not code and isinstance(collected, dict):
                return collected
        return {"data": {"paths": self._plan.data, "notHashed": f"hashing ended with {code}"}}
