"""manifest.json: a job's inputs, with which it can be rerun from the bucket alone, and compared."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from infra.inventory import Inventory
from infra.runtime.atomic_dir import digest_of
from ops import terminal
from ops.submit.resources import ROLE_KEYS

if TYPE_CHECKING:  # readers of a manifest need none of these
    from ops.package.package import Package
    from ops.package.runtimes import RuntimeRequest
    from ops.submit.config import JobSpec

_DIST = ".dist-info/"
# The part that the record of a job holds.
_RECORD_KEYS = ("cluster", "versions", "data", "reproduces")
_OWN_KEYS = ("pythonModule", "command", "args", "jobDir", "scaleTier", "environment", "runtime", *ROLE_KEYS)


def manifest(inventory: Inventory, job: JobSpec, package: Package) -> dict[str, Any]:
    """Return a job's inputs before it starts; the chief's host adds `data` and `versions` (`hosts.agent.facts`)."""
    return {
        "job": job.id,
        "package": {
            "name": package.name,
            "sha256": package.sha256,
            "files": {path: hashlib.sha256(content).hexdigest() for path, content in package.files.items()},
            "dependencies": dependencies(package),
        },
        "module": job.module,
        "command": list(job.command),
        "folder": job.folder,
        "args": list(job.args),
        "jobDir": job.job_dir,
        "labels": dict(job.labels),
        "environment": dict(job.environment),
        "secrets": sorted(job.secrets),
        "config": {key: value for key, value in job.training_input.items() if key not in _OWN_KEYS},
        "cluster": cluster(inventory),
        "versions": {"scaletier": version("scaletier")},
        **({"runtime": _runtime(job.runtime, package)} if job.runtime else {}),
        **({"reproduces": job.reproduces} if job.reproduces else {}),
    }


def dependencies(package: Package) -> list[str]:
    """Return the names of the packages sent along, such as `tabulate-0.9.0`."""
    return sorted({path.partition(_DIST)[0] for path in package.dependency_files if _DIST in path})


def _runtime(runtime: RuntimeRequest, package: Package) -> dict[str, Any]:
    """Return the request for a runtime, its key, and a hash of its content."""
    from ops.package.runtimes import format_requirements

    lines = format_requirements(package.installed)
    return {
        "name": runtime.name,
        "key": runtime.folder_name,
        "sha256": digest_of(map(str.encode, lines)),
        "requirements": lines,
    }


def cluster(inventory: Inventory) -> dict[str, Any]:
    """Return the scale tier, and the count and machine type of each role."""
    types = {str(host.role): host.machine_type for host in inventory.hosts}
    counts = Counter(str(host.role) for host in inventory.hosts)
    return {"scaleTier": inventory.scale_tier, "replicas": dict(counts), "machineTypes": types}


def summarize(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the manifest that the job's record holds."""
    package = {key: content["package"][key] for key in ("name", "sha256")}
    runtime = (
        {"runtime": {part: content["runtime"][part] for part in ("name", "key", "sha256")}} if "runtime" in content else {}
    )
    return {"package": package, **runtime, **{key: content[key] for key in _RECORD_KEYS if key in content}}


def to_json(content: Mapping[str, Any]) -> bytes:
    """Return the file in ASCII, so that an argument that is not UTF-8 survives."""
    return (json.dumps(content, indent=1) + "\n").encode()


def format_lines(record: Mapping[str, Any]) -> dict[str, str]:
    """Format the manifest's part in a job's record for people, by topic."""
    texts = {"package": package_line(record), "cluster": cluster_line(record)}
    return {**texts, "versions": versions_line(record), "data": data_line(record)}


def package_line(record: Mapping[str, Any]) -> str:
    package = record.get("package", {})
    return f"{package['name']} sha256:{package['sha256'][:16]}" if package else ""


def runtime_line(record: Mapping[str, Any]) -> str:
    """Format the runtime, `tensorflow-2.20 sha256:…`; empty for a job with the hosts' own."""
    runtime = record.get("runtime", {})
    return f"{runtime['name']} sha256:{runtime['sha256'][:16]}" if runtime else ""


def cluster_line(record: Mapping[str, Any]) -> str:
    """Format the cluster: `CUSTOM: 2 ps (n1-standard-4), 1 master (n1-highcpu-8)`."""
    cluster_input = record.get("cluster", {})
    roles = (
        f"{count} {role} ({cluster_input['machineTypes'][role]})" for role, count in cluster_input.get("replicas", {}).items()
    )
    return f"{cluster_input['scaleTier']}: {', '.join(roles)}" if cluster_input else ""


def versions_line(record: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in record.get("versions", {}).items() if number)


def data_line(record: Mapping[str, Any]) -> str:
    """Format the data, `sha256:… (2 files, 58.9 MB)`, or why there is no hash."""
    data = record.get("data", {})
    if "sha256" in data:
        return f"sha256:{data['sha256'][:16]} ({terminal.plural(data['files'], 'file')}, {data['bytes'] / 1e6:.1f} MB)"
    return f"not hashed: {data['notHashed']}" if data else ""
