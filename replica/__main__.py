"""`python -m replica`: the main process of a host's unit scaletier.service.

Exit code 0: the job has ended, or the unit was stopped. 2: there is no job to run, or its files are wrong.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys

from replica import config
from replica.agent import Agent
from replica.bucket import open_bucket
from replica.log import Log
from replica.notify import notify


def main() -> int:
    """Run this host's replica until its job ends."""
    try:
        settings = config.load(os.environ)
        plan = settings.plan
        log = Log(settings.logs, plan.jobId, plan.replica)
    except (config.ConfigError, OSError) as error:
        sys.stderr.write(f"<3>replica: {error}\n")
        return 2
    notify("READY=1")
    agent = Agent(plan, settings.trainer_env(os.environ), open_bucket(plan.bucket, plan.replica), log)
    run(agent)
    return 0


def run(agent: Agent) -> None:
    """Step the agent when it asks for it, and at once when the trainer ends or the unit is to stop."""
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.terminate())
    status = ""
    while (seconds := agent.step()) is not None:
        if status != (status := agent.status):
            notify(f"STATUS={status}")
        if select.select([woken], [], [], seconds)[0]:
            woken.recv(4096)


sys.exit(main())
