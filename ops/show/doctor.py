"""`fab doctor`: list problems of the cluster with the command that fixes each; `--fix` runs safe ones.

This module checks the SSH key, and hosts over SSH; `infra.doctor` runs all other checks in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from infra.findings import Check, Finding, Severity, fail, ok, run_checks, warning
from infra.templates import ROOT as CHECKOUT
from jobs import paths
from ops import terminal
from ops.cluster.cluster import ClusterClient
from ops.cluster.inventory import ROOT, load
from ops.cluster.remote import COMMAND_SECONDS
from ops.errors import DONE, FAILED, OpsError, one_line

SECONDS = 180.0
"""The time limit of all checks: more than a busy machine needs to start Pulumi and to query each host."""
_ACCESS_OF_OTHERS = 0o077
_MAX_OFFSET_MS = 1000
_FULL_PERCENT, _NEARLY_FULL_PERCENT = 98, 90
# It prints a line with the host's clock, a line with the used percentage of its disk, then its failed units.
STATE_COMMAND = (
    "date +%s.%N; df --output=pcent / | tail -n 1; systemctl list-units --failed --plain --no-legend --no-pager | cut -d' ' -f1"
)
# The bucket's own limit, and disks that a bucket without a limit fills.
_FULL_BUCKET = re.compile(r"the bucket is \d+% full")
_FULL_DISK = re.compile(r".* are free on (storage pool .*|this machine)")
# A job with less does not fill a disk.
_LARGE_JOB = 100_000_000
_COLOURS = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.ERROR: "red"}


def doctor(fix: bool, as_json: bool, root: Path = ROOT) -> int:
    """Run all checks and print their findings; FAILED if there is an error."""
    fix_findings = _collect_findings(root, fix=True, what="applying safe fixes") if fix else []
    fixed = [finding for finding in fix_findings if finding.fixed]
    unfixed = {(each.check, each.what): each for each in fix_findings if each.fix_error}
    current = _collect_findings(root, fix=False, what="checking")
    findings = [*fixed, *(unfixed.get((finding.check, finding.what), finding) for finding in current)]
    errors = [finding for finding in findings if finding.severity is Severity.ERROR and not finding.fixed]
    if as_json:
        terminal.print_json({"errors": len(errors), "findings": [finding.to_dict() for finding in findings]})
    else:
        for finding in findings:
            terminal.out(line(finding))
        warnings = sum(finding.severity is Severity.WARNING and not finding.fixed for finding in findings)
        terminal.note(f"{terminal.plural(len(errors), 'error')}, {terminal.plural(warnings, 'warning')}")
    return FAILED if errors else DONE


def line(finding: Finding) -> str:
    """Format a finding as a line."""
    word = "fixed" if finding.fixed else str(finding.severity)
    colour = "green" if finding.fixed else _COLOURS[finding.severity]
    fix_error = f" (and cannot be fixed: {finding.fix_error})" if finding.fix_error else ""
    remedy = f": {finding.remedy}" if finding.remedy and not finding.fixed else ""
    return f"{terminal.paint(f'{word:<8}', colour)} {finding.check:<9} {finding.what}{fix_error}{remedy}"


def _collect_findings(root: Path, fix: bool, what: str) -> list[Finding]:
    findings: list[Finding] = []
    with terminal.ProgressLine(what) as step:
        for finding in run_checks(_checks(root, fix), SECONDS, fix):
            findings.append(finding)
            step.detail = f"({terminal.plural(len(findings), 'finding')})"
    # By severity, then by topic.
    order = list(Severity)
    return sorted(findings, key=lambda finding: (-order.index(finding.severity), finding.check))


def _checks(root: Path, fix: bool) -> Mapping[str, Check]:
    try:
        inventory = load(root)
    except (OpsError, OSError, ValueError) as error:
        return {"stack": partial(_no_stack, one_line(error)), "infra": partial(infra_findings, None, fix)}
    return {
        "keys": partial(keys, inventory.folder),
        "ssh": partial(hosts, ClusterClient(inventory)),
        "infra": partial(_infra, ClusterClient(inventory), fix),
    }


def _no_stack(why: str) -> Iterator[Finding]:
    yield warning(why)


def keys(folder: Path) -> Iterator[Finding]:
    """Check that the operator's SSH key and files for the hosts exist, and that only their owner can read the key."""
    usable = True
    for path in (folder, folder / "id_ed25519", folder / "known_hosts", folder / "ssh_config"):
        try:
            mode = path.stat().st_mode & 0o777
        except OSError as error:
            usable = False
            yield fail(f"{path} cannot be used ({error.strerror})", "fab connect")
            continue
        if mode & _ACCESS_OF_OTHERS and path.name not in ("known_hosts", "ssh_config"):
            usable = False
            private_mode = 0o700 if path.is_dir() else 0o600
            problem = f"{path} has mode {mode:04o}, and others may read it: ssh refuses such a key"
            yield fail(problem, f"chmod {private_mode:04o} {path}", partial(path.chmod, private_mode))
    if usable:
        yield ok("the stack's key is there, and private")


def hosts(cluster: ClusterClient) -> Iterator[Finding]:
    """Check each host over SSH: whether it answers, its clock against that of this machine, its disk, its units."""
    names = cluster.inventory.names

    def ask(name: str) -> tuple[float, float, str]:
        cluster.fleet.connection(name)
        sent = time.time()
        output = cluster.fleet.run(name, STATE_COMMAND).output
        seconds = time.time() - sent
        return sent + seconds / 2, seconds, output

    outcome = cluster.fleet.each(names, ask, COMMAND_SECONDS)
    for name, error in outcome.failures.items():
        yield fail(one_line(error) if name in str(error) else f"{name}: {one_line(error)}", "pulumi up")
    offsets = {}
    for name, (moment, seconds, output) in outcome.results.items():
        try:
            offset, host_findings = clock_offset_ms(output, moment), list(_check_state(name, output))
        except (ValueError, IndexError):
            yield fail(f"{name} returned unexpected output", f"fab shell {name}")
            continue
        offsets[name] = offset
        if abs(offset) > _MAX_OFFSET_MS + seconds * 500:
            yield warning(f"the clock of {name} is {offset:+.0f} ms off this one's", f"fab shell {name} -- timedatectl")
        yield from host_findings
    if offsets and not outcome.failures:
        worst = max(offsets, key=lambda name: abs(offsets[name]))
        count = f"{len(offsets)} of {terminal.plural(len(names), 'host')}"
        yield ok(f"{count} reachable; the largest clock difference is that of {worst}, {offsets[worst]:+.0f} ms")


def clock_offset_ms(output: str, moment: float) -> float:
    """Return the milliseconds by which the host's clock in its output is ahead of a Unix time here; ValueError without one."""
    return (float(output.splitlines()[0]) - moment) * 1000


def _check_state(name: str, output: str) -> Iterator[Finding]:
    """Yield the problems of a host's disk and units; ValueError for incomplete output."""
    _, used, *failed = output.splitlines()
    percent = int(used.strip().removesuffix("%"))
    if percent >= _NEARLY_FULL_PERCENT:
        make_finding = fail if percent >= _FULL_PERCENT else warning
        yield make_finding(f"the disk of {name} is {percent} % full", f"fab shell {name} -- sudo du -xh --max-depth 3 /var")
    for unit in filter(None, map(str.strip, failed)):
        yield fail(f"{unit} failed on {name}", f"fab shell {name} -- sudo systemctl restart {unit}")


def _infra(cluster: ClusterClient, fix: bool) -> Iterator[Finding]:
    large_jobs: list[Finding] = []
    for finding in infra_findings(cluster.inventory.stack, fix):
        yield finding
        full_bucket, full_disk = _FULL_BUCKET.fullmatch(finding.what), _FULL_DISK.fullmatch(finding.what)
        if not large_jobs and finding.severity is not Severity.OK and (full_bucket or full_disk):
            with suppress(OpsError, ValueError):  # a host that does not answer is another finding
                large_jobs = list(largest_jobs(cluster, 0 if full_bucket else _LARGE_JOB))
                yield from large_jobs


def largest_jobs(cluster: ClusterClient, least: int = 0) -> Iterator[Finding]:
    """Name the jobs that use most of a bucket on hosts, and at least this many bytes; none for a bucket at Google."""
    command = f"du -s --block-size=1 {cluster.inventory.bucket}/{paths.JOBS}/* 2>/dev/null | sort -rn | head -n 3"
    lines = cluster.fleet.run(cluster.inventory.chief.name, command).output.splitlines()
    sizes = {path.rpartition("/")[2]: int(size) for size, _, path in (line.partition("\t") for line in lines)}
    used = {job_id: terminal.size(size) for job_id, size in sizes.items() if size >= least}
    if used:
        listed = ", ".join(f"{job_id} ({size})" for job_id, size in used.items())
        yield warning(f"most of the bucket is used by {listed}", f"fab delete {next(iter(used))}, once it has ended")


def infra_findings(stack: str | None, fix: bool) -> Iterator[Finding]:
    """Yield the findings of `infra.doctor` about the stack's target and this machine."""
    argv = [sys.executable, "-m", "infra.doctor", *([stack] if stack else []), *(["--fix"] if fix else [])]
    env = {**os.environ, **({"PULUMI_STACK": stack} if stack else {})}
    env["PATH"] = f"{Path(sys.prefix, 'bin')}{os.pathsep}{env.get('PATH', os.defpath)}"
    with subprocess.Popen(
        argv, cwd=CHECKOUT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stderr
        for text in process.stdout:
            try:
                yield Finding.from_dict(json.loads(text))
            except (ValueError, KeyError, TypeError):
                continue  # a line of some library
        if process.wait() != 0:
            last = process.stderr.read().strip().splitlines()[-1:]
            yield fail(f"the infrastructure checks failed ({' '.join(last) or process.returncode})", "make venv")
