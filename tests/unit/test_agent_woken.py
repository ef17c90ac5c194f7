"""A wake-up reaches an ending replica, or ends it at once: a new job must not wait for the timer."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from waiting import limit

_PROGRAM = """
import os, signal, sys
from types import SimpleNamespace
from hosts.agent.__main__ import Loop

def round():
    if "tidying" in sys.argv:
        os.kill(os.getpid(), signal.SIGHUP)
        assert loop._due.wait(10)
        agent.over = True
    return 60.0

def step():
    if "tidying" in sys.argv:
        return 60.0
    if "during" in sys.argv:
        os.kill(os.getpid(), signal.SIGHUP)
    agent.over = True
    return 0.0

agent = SimpleNamespace(over=False, status="", round=round)
agent.supervisor = SimpleNamespace(step=step, record=SimpleNamespace(state=None))
loop = Loop(agent)
loop.run()
if "after" in sys.argv:
    os.kill(os.getpid(), signal.SIGHUP)
sys.exit(75 if loop.woken_late else 0)
"""


@pytest.mark.parametrize(("when", "code"), [("never", 0), ("during", 75), ("tidying", 75), ("after", -signal.SIGHUP)])
def test_who_is_woken_when_it_has_seen_that_there_is_nothing_is_started_again(when: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, when], capture_output=True, text=True, timeout=limit(), check=False)
    assert done.returncode == code, done.stderr
