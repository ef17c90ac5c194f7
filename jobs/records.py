"""The records of a job: `job.json`, `replicas/<name>.json`, `plan.json`, and the queue of a cluster.

Names are Cloud ML's (`projects.jobs`) if it has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from jobs import chunks, lease, paths
from jobs.firsterror import FirstError
from jobs.lease import Lease
from jobs.notification import Notification
from jobs.progress import JobProgress
from jobs.queue import HostAssignment
from jobs.serialization import Record, RecordError
from jobs.states import TRANSITIONS, JobState, ReplicaState, TransitionError
from jobs.study import Study
from jobs.times import now, seconds_between
from jobs.variables import JAX_COORDINATOR, MASTER_ADDR

EVENTS_KEPT = 50
STOP_FILE = "SCALETIER_STOP_FILE"
"""The variable with the path of a file that exists once a program is to end: it holds the remaining seconds."""
RESTART_CODE = 42
"""TensorFlow's own exit code for "start me again"."""
SERVERS = "ps"
"""The role whose replicas serve others and never end by themselves."""


@dataclass(frozen=True)
class Event:
    """A restart: `seconds` from the end of the start before until it was up again, None until it is."""

    time: str
    cause: str
    seconds: float | None = None


@dataclass(frozen=True)
class Usage:
    """Resource usage of a replica's unit; None for values that its host's kernel does not report.

    cpuSeconds is its processor time since the unit was started. `cpus` is the average number of busy processors since the
    previous reading, about one heartbeat ago. memoryBytes is its memory without the cache of files.
    """

    cpuSeconds: float | None = None
    cpus: float | None = None
    memoryBytes: int | None = None


@dataclass(frozen=True)
class UnsavedFiles(Record):
    """Files that a replica wrote outside JOB_DIR, searched when its job has ended. Kept if the job wrote nothing to JOB_DIR.

    `kept` names the files that are in JOB_DIR/left/<replica>/ now, `leftOut` those that were not kept, with their size or the
    reason; both may be truncated. `error` says in one line why the search is incomplete.
    """

    kind: ClassVar[str] = "the list of unsaved files"

    jobDirEmpty: bool = False
    kept: list[str] = field(default_factory=list)
    keptFiles: int = 0
    keptBytes: int = 0
    leftOut: list[str] = field(default_factory=list)
    leftOutFiles: int = 0
    error: str = ""


@dataclass(frozen=True)
class ReplicaRecord(Record):
    """`jobs/<id>/replicas/<name>.json`, written by that replica alone.

    `incarnation` and `heartbeatSeq` change with every heartbeat, which is how others tell that the host lives;
    heartbeatTime is for people. exitCode is the shell's: 0 to 255 as the trainer exited, 128 + n if signal n killed it,
    which `signal` then names. `killed` is True for a trainer that has ended, is to start again by the rules of
    `hosts.agent.replica_rules`, and not by its host alone. outOfMemory is that of the trainer that ended last, memoryLimit the
    bytes that it may have, and `terminationReason` what killed it. `preempted` says that its host was being taken back when
    its unit was stopped, until a trainer starts again. `starts` counts all starts of the job's trainer here, lastStartTime
    is that of the newest, startTime that of the first. `restarts` counts those of this attempt, `restartsUsed` those that
    count against the limit, `faults` those of them that the program caused itself, which time does not give back,
    `consecutiveFailures` the deaths in a row that were the same one at once, `crashLooping` says that there will be no
    further restart. `lines` counts what the trainer printed. `usage` is its share of the host, None before the first
    reading, and for an older version. `progress` is what its trainer reports. firstError is the first that its trainers
    printed. facts are the chief's alone: what its host found for the manifest. `connections` lists its host's sockets
    while it prints nothing. `unsaved` is None until the job has ended and its files were searched.
    """

    kind: ClassVar[str] = "the record of a replica"
    old_names: ClassVar[Mapping[str, str]] = {
        "incarnation": "life",
        "heartbeatSeq": "beat",
        "restartsUsed": "spent",
        "consecutiveFailures": "alike",
        "crashLooping": "hopeless",
        "terminationReason": "death",
    }

    name: str
    state: ReplicaState = ReplicaState.PREPARING
    exitCode: int | None = None
    signal: int | None = None
    killed: bool = False
    outOfMemory: bool = False
    memoryLimit: int | None = None
    terminationReason: str = ""
    preempted: bool = False
    starts: int = 0
    restarts: int = 0
    restartsUsed: int = 0
    faults: int = 0
    consecutiveFailures: int = 0
    crashLooping: bool = False
    attempt: int = 0
    lines: int = 0
    usage: Usage | None = None
    connections: list[str] = field(default_factory=list)
    progress: JobProgress | None = None
    startTime: str | None = None
    lastStartTime: str | None = None
    endTime: str | None = None
    heartbeatTime: str = field(default_factory=now)
    incarnation: str = ""
    heartbeatSeq: int = 0
    errorMessage: str = ""
    firstError: FirstError | None = None
    events: list[Event] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    unsaved: UnsavedFiles | None = None

    @property
    def done(self) -> bool:
        """True for a trainer that has done its work."""
        return self.state == ReplicaState.EXITED and self.exitCode == 0

    @property
    def status(self) -> int:
        """Its exit status as `subprocess` has it: negative if a signal ended it."""
        return -self.signal if self.signal else self.exitCode or 0


@dataclass(frozen=True)
class JobRecord(HostAssignment, Record):
    """`jobs/<id>/job.json`: written only by the holder of its lease, one version after the other.

    `candidates` names the replicas, the chief first, each with its candidate hosts; `hosts` are the assigned ones, once the
    job is PREPARING (`jobs.queue`). hourlyCost is the price of these hosts in US dollars an hour when the job was made,
    None if they have no price; cost is their price from its start to its end, None until then. `attempt` counts the starts
    of the whole job from 0, `restartsUsed` those that count against the limit, `faults` those of them that its programs
    caused. `lostReplicas` are those whose hosts are unresponsive, `droppedReplicas` the optional ones that the job
    continues without. runSeconds is its time in RUNNING by its leaders' clocks. manifest is the short form of
    manifest.json: package, cluster, versions, and data once the chief's host has hashed it. `steps` is the global step at
    which its trainer is to end, None if neither its arguments nor its package say so. `progress` is that of its replicas
    when the record was written last. `notification` is the target of its final report, None if there is none, and the
    delivery.
    """

    kind: ClassVar[str] = "job.json"
    old_names: ClassVar[Mapping[str, str]] = {
        "candidates": "wants",
        "restartsUsed": "spent",
        "lostReplicas": "lost",
        "droppedReplicas": "without",
    }

    jobId: str
    state: JobState = JobState.QUEUED
    lease: Lease = field(default_factory=Lease)
    hosts: list[str] = field(default_factory=list)
    candidates: dict[str, list[str]] = field(default_factory=dict)
    priority: int = 0
    createTime: str = field(default_factory=now)
    startTime: str | None = None
    endTime: str | None = None
    runSeconds: float = 0.0
    hourlyCost: float | None = None
    cost: float | None = None
    errorMessage: str = ""
    attempt: int = 0
    restartsUsed: int = 0
    faults: int = 0
    lostReplicas: list[str] = field(default_factory=list)
    droppedReplicas: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    submittedBy: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    trainingInput: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    progress: JobProgress | None = None
    notification: Notification | None = None
    manifest: dict[str, Any] = field(default_factory=dict)
    replicas: list[dict[str, Any]] = field(default_factory=list)

    @property
    def final(self) -> bool:
        return self.state.final

    def to(self, state: JobState, **changes: Any) -> JobRecord:
        """Return this record in another state, with startTime, or endTime and cost, set.

        A job that never started costs from its creation.

        Raises:
            TransitionError: the move is not in the table.
        """
        if state not in TRANSITIONS[self.state]:
            raise TransitionError(f"job {self.jobId} cannot go from {self.state} to {state}")
        if state is JobState.RUNNING:
            changes.setdefault("startTime", now())
        if state.final:
            hours = seconds_between(self.startTime or self.createTime, changes.setdefault("endTime", now())) / 3600
            changes["cost"] = None if self.hourlyCost is None else round(self.hourlyCost * max(hours, 0), 4)
        return replace(self, state=state, **changes)

    def ended(self, why: str, cancelled: bool = False) -> JobRecord:
        """Return this record at its end: FAILED, or CANCELLED if that is requested or under way."""
        if self.state is JobState.CANCELLING:
            return self.to(JobState.CANCELLED, errorMessage=why or self.errorMessage)
        if not cancelled:
            return self.to(JobState.FAILED, errorMessage=why)
        return self.to(JobState.CANCELLING).to(JobState.CANCELLED, errorMessage=why)

    def with_holder(self, holder: str, submitter: bool = False) -> JobRecord:
        """Return this record with another holder of its lease."""
        return replace(self, lease=self.lease.with_holder(holder, submitter))


@dataclass(frozen=True)
class Task:
    """The environment of one replica's trainer: TF_CONFIG's content, and further variables."""

    tfConfig: str
    environment: dict[str, str] = field(default_factory=dict)

    def with_addresses(self, addresses: Mapping[str, str]) -> Task:
        """Return the task with replicas' addresses instead of names.

        It replaces them in TF_CONFIG, MASTER_ADDR and JAX's coordinator.
        """
        if not addresses:
            return self
        config = json.loads(self.tfConfig)
        for role, peers in config.get("cluster", {}).items():
            hosts_and_ports = (peer.rpartition(":") for peer in peers)
            config["cluster"][role] = [f"{addresses.get(name, name)}:{port}" for name, _, port in hosts_and_ports]
        environment = dict(self.environment)
        for variable in environment.keys() & {MASTER_ADDR, JAX_COORDINATOR}:
            name, *port = environment[variable].split(":")
            environment[variable] = ":".join([addresses.get(name, name), *port])
        return Task(json.dumps(config), environment)


@dataclass(frozen=True)
class Plan(Record):
    """`jobs/<id>/plan.json`: all that the replicas of a job need to know, written by its submitter, once.

    `replicas` names every replica of the job, the chief first: the order in which they would lead. `tasks` has their names in
    place of addresses, as the hosts are assigned later, and `addresses` are those of all candidate hosts; `with_hosts` merges
    the two. `hosts` maps each replica to its host; it is empty in the bucket. A `command` runs in that `folder` of the
    package, in place of the module. `python` is that of the job's own runtime, empty for the hosts' Python. `data` are the
    paths, directories or globs of the training data, which the chief's host hashes. `packageSha256` is that of the package's
    archive. `secrets` are names of variables whose values `fab train` brought to the hosts, and nowhere else. With a `study`
    each replica runs the program again and again, as trials. `optionalRoles` are the roles whose loss or repeated kill does
    not end the job. With a restartPolicy `all` a kill starts the whole job again, with `replica` that replica alone.

    restartCodes are exit codes that count as a kill, permanentCodes those that never do (`hosts.agent.replica_rules`). By
    successPolicy `chief` the job SUCCEEDED once the chief has, by `all` once every replica has that `decides`. Replicas that
    still run then have gracePeriod seconds. By stopSignal `main` SIGTERM goes to a trainer's first process alone, by `all` to
    each of its processes.

    A host is lost after lostAfterSeconds without a heartbeat; the job waits for it for maxWaitTime seconds, may be PREPARING
    for preparingSeconds and RUNNING for maxRunningTime seconds. A job that prints nothing for stallTimeout seconds
    counts as killed. Of each replica's log logLimit bytes are kept. The leader reports the job's end to `notify`, a URL or a
    command (`jobs.notification`); it is empty for no report. A leader keeps its lease for leaseSeconds without a heartbeat.
    """

    kind: ClassVar[str] = "plan.json"
    old_names: ClassVar[Mapping[str, str]] = {"optionalRoles": "expendable"}

    jobId: str
    replicas: list[str]
    module: str
    args: list[str]
    tasks: dict[str, Task]
    packageSha256: str = ""
    data: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    study: Study | None = None
    restartPolicy: str = "replica"
    optionalRoles: list[str] = field(default_factory=list)
    restartCodes: list[int] = field(default_factory=lambda: [RESTART_CODE])
    permanentCodes: list[int] = field(default_factory=list)
    successPolicy: str = "chief"
    gracePeriod: float = 0.0
    stopSignal: str = "main"
    maxRestarts: int = 5
    maxRetries: int = 3
    heartbeatSeconds: float = 5.0
    leaseSeconds: float = lease.SECONDS
    lostAfterSeconds: float = 60.0
    maxWaitTime: float = 3600.0
    maxRunningTime: float = 604800.0
    stallTimeout: float | None = None
    preparingSeconds: float = 300.0
    logLimit: int = chunks.LIMIT
    stopSeconds: float = 10.0
    notify: str = ""
    command: list[str] = field(default_factory=list)
    folder: str = ""
    python: str = ""
    addresses: dict[str, str] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)

    @property
    def chief(self) -> str:
        return self.replicas[0]

    def is_optional(self, replica: str) -> bool:
        """Return True if the job continues without this replica."""
        return replica != self.chief and replica.rpartition("-")[0] in self.optionalRoles

    def decides(self, replica: str) -> bool:
        """Return True for a replica that must finish its work for the job to be SUCCEEDED."""
        everyone = self.successPolicy == "all" and not self.is_server(replica) and not self.is_optional(replica)
        return replica == self.chief or everyone

    def is_server(self, replica: str) -> bool:
        """Return True for a replica that serves others, and does not end by itself."""
        return replica.rpartition("-")[0] == SERVERS

    def stays_done(self, replica: str) -> bool:
        """Return True for a replica that, once done, does not start again with the whole job."""
        return not self.whole if self.successPolicy == "all" else replica == self.chief

    def with_hosts(self, hosts: Mapping[str, str]) -> Plan:
        """Return this plan for a job with these hosts: each replica's address instead of its name.

        Raises:
            RecordError: a task's TF_CONFIG is invalid.
        """
        addresses = {replica: self.addresses[host] for replica, host in hosts.items() if host in self.addresses}
        try:
            tasks = {name: task.with_addresses(addresses) for name, task in self.tasks.items()}
        except (ValueError, AttributeError, TypeError) as error:
            raise RecordError(f"plan.json has a TF_CONFIG that is none: {error}") from None
        return replace(self, hosts=dict(hosts), tasks=tasks)

    def peers(self, replica: str) -> dict[str, str]:
        """Return the names and addresses of the hosts that the job's other replicas have."""
        others = ((host, self.address(other)) for other, host in self.hosts.items() if other != replica)
        return {host: address for host, address in others if address}

    def address(self, replica: str) -> str:
        """Return the address of a replica's host, or empty if none is known."""
        return self.addresses.get(self.hosts.get(replica, ""), "")

    def program(self, python: str) -> list[str]:
        """Return the command and its arguments.

        A command finds this `python` first on the trainer's PATH.
        """
        return [*(self.command or [python, "-m", self.module]), *self.args]

    @property
    def whole(self) -> bool:
        """True if a kill of one replica restarts all of them."""
        return self.restartPolicy == "all"


@dataclass(frozen=True)
class CancelRequest(Record):
    """`jobs/<id>/cancel.json`: a job ends if it exists; it has the requester and the optional reason."""

    kind: ClassVar[str] = "cancel.json"

    requestedBy: str
    createTime: str
    reason: str = ""


@dataclass(frozen=True)
class Power:
    """Requests that start stopped hosts: a POST to a URL of `starts`, by host.

    Its token is the answer to a GET of `token`. A GET of `preempted` answers TRUE on a host that is being preempted. Both are
    sent with `headers`.
    """

    starts: dict[str, str]
    token: str
    preempted: str = ""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HostFile(Record):
    """`/etc/scaletier/host.json`: which host this is and how it reaches the bucket, written with the unit.

    `power` is None if no host can start another.
    """

    kind: ClassVar[str] = "host.json"

    name: str
    bucket: str
    pollSeconds: float = 1.0
    python: str = paths.PYTHON
    power: Power | None = None


def with_events(events: list[Event], *new: Event) -> list[Event]:
    """Return the list with more events; only the newest ones stay."""
    return [*events, *new][-EVENTS_KEPT:]
