"""`fab render`: every file and every environment that `fab train` would make, and nothing touched."""

from __future__ import annotations

from dataclasses import asdict

from jobs.placement import place
from ops import terminal
from ops.cluster.inventory import Inventory
from ops.errors import DONE
from ops.train import program
from ops.train.config import Flags, build_job
from ops.train.part import would_do
from ops.train.render import plan, render


def print_render(inventory: Inventory, flags: Flags, folder: str | None, as_json: bool) -> int:
    """What would be written where, on a cluster whose hosts are all free; touches nothing."""
    found = program.find(folder, flags.module, flags.script, flags.command)
    job = build_job(flags, inventory, found.source.name, found.source.files, found.command, found.folder)
    hosts = place(would_do(job.counts, inventory), ())
    made = plan(inventory, job, "").placed(hosts)
    rendered = {host: files for host, files in render(inventory).items() if host in hosts.values()}
    replicas = {host: replica for replica, host in hosts.items()}
    if as_json:
        files = {
            name: [{**asdict(file), "link": None, "directory": False} for file in files] for name, files in rendered.items()
        }
        terminal.as_json({"hosts": files, "plan": made.to_dict()})
        return DONE
    for name, of_host in rendered.items():
        for file in of_host:
            terminal.out(terminal.paint(f"# {name}:{file.path} {file.mode:04o} {file.user}:{file.group}", "bold"))
            terminal.out(file.content)
        terminal.out(terminal.paint(f"# {name}: the environment of {made.module or program.words(made.command)}", "bold"))
        task = made.tasks[replicas[name]]
        hidden = dict.fromkeys(made.secrets, "(secret)")
        for key, value in {"TF_CONFIG": task.tfConfig, **task.environment, **hidden}.items():
            terminal.out(f"{key}={value}")
        terminal.out()
    return DONE
