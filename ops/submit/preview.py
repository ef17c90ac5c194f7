"""`fab train --dry-run`: the files and the replicas' environment that a job would get; sends nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from infra.inventory import Inventory
from infra.templates import ROOT as CHECKOUT
from jobs import paths
from jobs.queue import place
from jobs.records import Plan
from ops import terminal
from ops.errors import DONE
from ops.package import host_stream
from ops.submit import job_plan
from ops.submit.manifest import dependencies
from ops.submit.submit import Submission

_RULES = (
    *("successPolicy", "optionalRoles", "restartPolicy", "restartCodes", "permanentCodes", "maxRestarts", "maxRetries"),
    *("gracePeriod", "stopSignal", "stopSeconds"),
)


def show(submission: Submission, as_json: bool) -> int:
    """Print the files, the plan if all hosts were free, and the environment of each replica."""
    inventory, built = submission.inventory, submission.package
    hosts = place(submission.candidates, ())
    plan = job_plan.plan(inventory, submission.job, built.sha256).with_hosts(hosts)
    transfer_sizes = _transfer_sizes(submission, plan, len(hosts))
    files = {path: len(content) for path, content in sorted(built.files.items())}
    wheels = dependencies(built)
    if as_json:
        result = {
            "files": [{"path": path, "bytes": size} for path, size in files.items()],
            "ignored": list(built.ignored),
            "dependencies": wheels,
            "sent": transfer_sizes,
            "hosts": hosts,
            "tfConfig": {replica: json.loads(task.tfConfig) for replica, task in plan.tasks.items()},
            "plan": plan.to_dict(),
        }
        terminal.print_json(result)
        return DONE
    terminal.table(("FILE", "SIZE"), [(path, terminal.size(size)) for path, size in files.items()])
    for what, names in (("ignored", built.ignored), ("dependencies", wheels)):
        if names:
            terminal.out(f"{what}: {', '.join(map(terminal.escape_breaks, names))}")
    _show_transfer(transfer_sizes, len(hosts))
    terminal.out()
    terminal.table(("REPLICA", "HOST"), list(hosts.items()))
    terminal.out(f"rules: {', '.join(_rules(plan))}")
    for replica in plan.replicas:
        _show_replica(inventory, plan, replica, hosts[replica])
    return DONE


def _rules(plan: Plan) -> Iterator[str]:
    """Yield the rules by which the job and its replicas end."""
    for name in _RULES:
        value = getattr(plan, name)
        yield f"{name} {' '.join(map(str, value)) or 'none' if isinstance(value, list) else value}"


def _transfer_sizes(submission: Submission, plan: Plan, hosts: int) -> dict[str, int]:
    """Return the bytes that would be sent.

    `eachHost` counts only what all hosts get, not a host's own files. Some data may be in the bucket already.
    """
    built = submission.package
    code, _ = host_stream.code(CHECKOUT)
    each = len(host_stream.shared_stream(code, built.host_files or None, plan.packageSha256, built.executables))
    data = sum(path.stat().st_size for path in submission.data.values())
    return {"eachHost": each, "hosts": each * hosts, "bucket": len(built.archive), "data": data}


def _show_transfer(sizes: dict[str, int], hosts: int) -> None:
    megabytes = {name: f"{size / 1e6:.1f} MB" for name, size in sizes.items()}
    data = f", and {megabytes['data']} of data, unless they are there" if sizes["data"] else ""
    count = terminal.plural(hosts, "host")
    terminal.out(
        f"to be sent: {megabytes['eachHost']} to each of {count} ({megabytes['hosts']}), "
        f"{megabytes['bucket']} into the bucket{data}; nothing was sent"
    )


def _show_replica(inventory: Inventory, plan: Plan, replica: str, host: str) -> None:
    task = plan.tasks[replica]
    runs = shlex.join(plan.program(plan.python or paths.PYTHON))
    terminal.out()
    terminal.out(terminal.paint(f"# {replica} on {host} ({inventory.host(host).address}): {runs}", "bold"))
    hidden = dict.fromkeys(plan.secrets, "(secret)")
    environment: dict[str, Any] = {"TF_CONFIG": json.dumps(json.loads(task.tfConfig)), **task.environment, **hidden}
    for name, value in environment.items():
        terminal.out(f"{name}={value}")
