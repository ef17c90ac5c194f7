"""`fab reproduce`: run a past job again from the bucket alone, and report the differences."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import sys
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infra.inventory import Inventory
from jobs import paths
from jobs.bucket import Bucket
from jobs.ledger import Ledger
from jobs.records import JobRecord
from jobs.study import Study
from ops import terminal
from ops.cluster.bucket import read_whole
from ops.cluster.cluster import ClusterClient
from ops.cluster.ledger import existing_job, find_job
from ops.config_values import validate
from ops.errors import DETACHED, OpsError, UsageError
from ops.package import runtimes, trainer_config
from ops.package.package import Package, unpack
from ops.package.runtimes import RuntimeRequest
from ops.submit import compare, manifest, resources, runner, tuning
from ops.submit.arguments import redirect_output
from ops.submit.claim import DuplicateIdError
from ops.submit.config import JobSpec, chosen_strategy, detect_job_dir_flag, policy
from ops.submit.metrics import final_metrics
from ops.submit.program import files_defining_flags, script_of
from ops.submit.schema import Scheduling, check_job_id
from ops.submit.submit import Submission


def reproduce(cluster: ClusterClient, job_id: str | None, new_id: str | None, follow: bool, as_json: bool) -> int:
    """Run the job again, follow it and compare; the exit code is 0 if it SUCCEEDED, or without `follow`.

    If the job `new_id` is already its rerun, that is followed and compared: the command can be repeated after a Ctrl-C.
    """
    ledger = cluster.ledger
    original = existing_job(ledger, job_id)
    job_id = original.jobId
    is_given = new_id is not None
    new_id = _next_free(ledger, job_id) if new_id is None else new_id
    check_job_id(new_id)
    existing = find_job(ledger, new_id) if is_given else None
    if existing and existing.manifest.get("reproduces") != job_id:
        raise DuplicateIdError(new_id)
    try:
        # stdout is for the result, which a program reads.
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            code = runner.watch(cluster, existing) if existing else _rerun(cluster, original, new_id, follow)
    except DuplicateIdError:
        if is_given:
            raise
        return reproduce(cluster, job_id, None, follow, as_json)  # another fab reproduce was quicker
    if code == DETACHED or (not existing and not follow):
        later = "continues with it, and compares" if code == DETACHED else "compares the two once it has ended"
        terminal.note(f"fab reproduce {job_id} --job {new_id} {later}")
        if as_json:
            _show(job_id, new_id, [], False, as_json)
        return code
    rerun = existing_job(ledger, new_id)
    metrics = (final_metrics(cluster, original), final_metrics(cluster, rerun))
    _show(job_id, new_id, compare.rows(original, rerun, metrics), all(metrics), as_json)
    return code


def _next_free(ledger: Ledger, job_id: str) -> str:
    queue = ledger.queue()  # a new job enters it before its record is written
    names = (f"{job_id}_{number}" for number in itertools.count(2))
    return next(name for name in names if not queue.entry(name) and not ledger.job(name))


def _rerun(cluster: ClusterClient, original: JobRecord, new_id: str, follow: bool) -> int:
    if original.final and original.startTime is None:
        raise UsageError(f"job {original.jobId} is {original.state} and never started: there is nothing to run again")
    inventory, original_manifest = cluster.inventory, read_manifest(cluster.bucket, original.jobId)
    if not original.final:
        terminal.note(f"{original.jobId} is {original.state}: it has no results yet to compare with")
    runtime = _runtime(inventory, original_manifest)
    built = read_package(
        cluster.bucket, original.jobId, original_manifest, runtimes.build(inventory, runtime) if runtime else None
    )
    plan = cluster.ledger.plan(original.jobId)
    job = build_job(inventory, original_manifest, new_id, built, runtime, plan.study if plan else None)
    if (before := original_manifest["cluster"]) != (now := manifest.cluster(job.subset(inventory))):
        lines = (manifest.cluster_line({"cluster": cluster_input}) for cluster_input in (before, now))
        terminal.note(f"{original.jobId} ran on another cluster: {' - now it is '.join(lines)}")
    return runner.run(cluster, Submission(inventory, job, built, {}), True, follow)


def read_manifest(bucket: Bucket, job_id: str) -> dict[str, Any]:
    """Return a job's manifest; UsageError if there is none, or an incomplete one, OpsError if it is no JSON."""
    item = bucket.read(paths.manifest(job_id))
    try:
        content: dict[str, Any] = json.loads(item.content if item else "{}")
    except ValueError as error:
        raise OpsError(f"the manifest of {job_id} is no JSON ({error}): start the job with fab train") from None
    if not _is_complete(content):
        what = "no manifest" if item is None else "a manifest of an older version"
        raise UsageError(f"job {job_id} has {what}, so it cannot be run from the bucket alone: start it with fab train")
    return content


def _is_complete(content: Any) -> bool:
    """Return True if a manifest has all parts of a job: other programs can write to the bucket, too."""
    if not isinstance(content, dict) or not isinstance(content.get("args"), list) or "module" not in content:
        return False
    package, cluster_input = content.get("package"), content.get("cluster")
    counts = cluster_input.get("replicas", {}) if isinstance(cluster_input, dict) else None
    return (
        isinstance(package, dict)
        and {"name", "sha256", "files"} <= package.keys()
        and isinstance(counts, dict)
        and all(isinstance(count, int) for count in counts.values())
        and all(isinstance(arg, str) for arg in content["args"])
    )


def _runtime(inventory: Inventory, content: Mapping[str, Any]) -> RuntimeRequest | None:
    """Return the request for the job's Python environment, with the same versions; None if it used the hosts' Python."""
    if not isinstance(request := content.get("runtime"), dict):
        return None
    return runtimes.from_manifest(inventory, request)


def read_package(
    bucket: Bucket, job_id: str, content: Mapping[str, Any], installed: Mapping[str, str] | None = None
) -> Package:
    """Return a job's package as it ran, byte for byte; OpsError if the bucket has none, or a damaged one."""
    name, expected = content["package"]["name"], content["package"]["sha256"]
    archive = read_whole(bucket, paths.package(job_id))
    if archive is None:
        raise OpsError(f"the package of {job_id} is no longer in the bucket: start the job with fab train")
    if (digest := hashlib.sha256(archive).hexdigest()) != expected:
        what = f"its package.tar.gz has sha256 {digest[:16]}…, its manifest says {expected[:16]}…"
        raise OpsError(f"the package of {job_id} is damaged, {what}: start the job with fab train")
    script = script_of(content.get("folder", ""), content.get("command", ()), content["package"]["files"])
    sets_pythonpath = "PYTHONPATH" in content.get("environment", {})
    try:
        return unpack(archive, name, content["package"]["files"], content["module"], script, installed, sets_pythonpath)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise OpsError(f"the package of {job_id} cannot be unpacked ({error}): start the job with fab train") from None


def build_job(
    inventory: Inventory,
    content: Mapping[str, Any],
    new_id: str,
    package: Package,
    runtime: RuntimeRequest | None = None,
    original_study: Study | None = None,
) -> JobSpec:
    """Build the job of a manifest under another id, with an output folder of its own; UsageError if a secret is not set.

    `original_study` is the study in the original job's plan: its seed and earlier trials make the new job's trials the same.
    """
    declared = trainer_config.read(package.files, package.name)
    folder = f"{inventory.bucket}/{paths.output(new_id)}"
    config, args = content["config"], redirect_output(content["args"], folder)
    scheduling = validate(Scheduling, config.get("scheduling"), f"the manifest of {content['job']}: config.scheduling").given()
    environment = content.get("environment", {})
    counts = _counts(content["cluster"], inventory)
    command = tuple(content.get("command", ()))
    runs = {"command": [*command]} if command else {"pythonModule": content["module"]}
    own = {"runtime": runtime.name} if runtime else {}
    sources = files_defining_flags(content.get("folder", ""), command, package.files, content["module"])
    flag = detect_job_dir_flag(args, declared, sources)
    tuned = config.get(tuning.HYPERPARAMETERS)
    study = tuning.build_study(tuned, args, folder, flag) if tuned else None
    if study and original_study:
        study = replace(study, seed=original_study.seed, earlier=original_study.earlier)
    input_record = {**runs, "args": args, "jobDir": folder, **own, **({"environment": environment} if environment else {})}
    return JobSpec(
        id=new_id,
        module=content["module"],
        args=tuple(args),
        job_dir=folder,
        labels=content["labels"],
        job_dir_flag=None if study else flag,
        use_chief=config.get("useChiefInTfConfig", True),
        policy=policy(scheduling, declared.strategy_for(chosen_strategy(args)), study),
        priority=scheduling.get("priority", 0),
        declared=declared,
        environment=environment,
        secrets=_secrets(content),
        training_input={**config, **resources.describe_counts(counts, inventory), **input_record},
        reproduces=content["job"],
        counts=counts,
        command=command,
        folder=content.get("folder", ""),
        runtime=runtime,
        study=study,
    )


def _counts(original_cluster: Mapping[str, Any], inventory: Inventory) -> resources.Counts:
    """Return as many of each role as the job had, as far as today's cluster has them."""
    available, original = resources.counts(inventory), original_cluster.get("replicas", {})
    return {role: min(original[role], count) for role, count in available.items() if original.get(role)}


def _secrets(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the secrets that a manifest names, from the operator's environment."""
    names: list[str] = content.get("secrets", [])
    if missing := [name for name in names if name not in os.environ]:
        raise UsageError(
            f"job {content['job']} had the secret {missing[0]}, which nothing has kept: export {missing[0]}=… first"
        )
    return {name: os.environ[name] for name in names}


def _show(job_id: str, new_id: str, rows: list[compare.ComparedValue], has_metrics: bool, as_json: bool) -> None:
    """Print the comparison and its result; without metrics of both there is no verdict."""
    differs = [row.what for row in rows if not row.same and row.what != compare.SECONDS]  # no two runs take the same time
    if as_json:
        listed = [{"what": row.what, "original": row.values[0], "again": row.values[1], "same": row.same} for row in rows]
        terminal.print_json({"original": job_id, "job": new_id, "differs": differs, "compared": listed})
        return
    terminal.out()
    terminal.table(("", job_id, new_id, ""), [(row.what, *row.values, row.change) for row in rows])
    terminal.out()
    if differs:
        terminal.out(f"{new_id} differs from {job_id} in {', '.join(differs)}")
    elif has_metrics:
        terminal.out(f"{new_id} has the inputs and the results of {job_id}")
    else:
        terminal.out(f"{new_id} has the inputs of {job_id}; the results were not compared, as they report no final metrics")
