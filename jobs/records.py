"""Define the records of a job: `job.json`, `replicas/<name>.json`, `plan.json`, `cancel.json`, and a host's `host.json`.

Keys have the names of Cloud ML's `projects.jobs` if it has such a key.
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
STOP_FILE_VARIABLE = "SCALETIER_STOP_FILE"
"""Environment variable with the path of a file; once the file exists, the program must end within the seconds in it."""
RESTART_CODE = 42
"""TensorFlow's own exit code that requests a restart."""
LATE_HEARTBEATS = 2.5
"""A replica is late after this many heartbeat periods. A late peer may have caused the errors that others report."""
PARAMETER_SERVER_ROLE = "ps"
"""The role of parameter servers, which never end by themselves."""


@dataclass(frozen=True)
class Event:
    """An event of a job or replica; for a restart, `seconds` are those from the end until it ran again, else None."""

    time: str
    cause: str
    seconds: float | None = None


@dataclass(frozen=True)
class Usage:
    """Resource usage of a replica's unit; None for values that its host's kernel does not report.

    cpuSeconds is its processor time since the unit was started. `cpus` is the average number of busy processors since the
    previous reading, about one heartbeat ago. memoryBytes is its memory without the page cache.
    """

    cpuSeconds: float | None = None
    cpus: float | None = None
    memoryBytes: int | None = None


@dataclass(frozen=True)
class UnsavedFiles(Record):
    """Files that a replica wrote outside JOB_DIR. The search runs when the job has ended.

    If the job wrote nothing to JOB_DIR, the files are copied to JOB_DIR/left/<replica>/: `kept` names the copied ones,
    `leftOut` the others, with their size or the reason. Both lists may be truncated. `error` is one line: why the
    search is incomplete.
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

    Attributes:
        exitCode: the shell's: 0 to 255 if the trainer exited, 128 + n if signal n ended it; `signal` is then n.
        awaits_restart: True if the trainer has ended and must start again (`hosts.agent.replica_rules`), but its host cannot
            decide that alone: the leader decides, or the agent must start again. Its JSON key is `killed`.
        outOfMemory: the trainer that ended last exceeded its memory; memoryLimit is its limit in bytes, if known.
        terminationReason: the cause of its last kill.
        preempted: its host was being preempted when its agent was stopped; reset by the next start.
        hostBusy: it waits to start, as an earlier program on its host has not ended.
        starts: all starts of the job's trainer on this host; startTime is that of the first, lastStartTime of the last.
        restarts: the restarts in this attempt.
        restartsUsed: those of them that count against the limit; a long run resets it to `faults`.
        faults: those of them that the program itself caused (`is_fault`); a long run does not reset it.
        consecutiveFailures: how many times in a row it ended in the same way soon after its start.
        crashLooping: it ended too often in this way; its host does not restart it.
        runSeconds: how long its trainer had run at the last heartbeat, by its host's clock; 0 while none runs.
        lines: how many lines the trainer printed.
        usage: the resource usage of its unit; None before the first reading, and in a record of an older version.
        connections: lines about its host's sockets, while the trainer prints nothing.
        progress: what the trainer reported last.
        jobCreateTime: the job's createTime; a record with another one is that of an earlier job of the same id. Empty in a
            record of an older version.
        incarnation: the run of the agent that wrote the record. Other hosts see that this host is alive, as `incarnation` or
            `heartbeatSeq` changes with every heartbeat. heartbeatTime is for people.
        firstError: the first error that its trainers printed.
        facts: what the chief's host found for the manifest: versions, and the hash of the data (`hosts.agent.facts`). Empty in
            the record of another replica.
        unsaved: the files that it wrote outside JOB_DIR; None until the job has ended and the search for them is over.
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
    json_key: ClassVar = staticmethod(lambda name: "killed" if name == "awaits_restart" else name)

    name: str
    state: ReplicaState = ReplicaState.PREPARING
    exitCode: int | None = None
    signal: int | None = None
    awaits_restart: bool = False
    outOfMemory: bool = False
    memoryLimit: int | None = None
    terminationReason: str = ""
    preempted: bool = False
    hostBusy: bool = False
    starts: int = 0
    restarts: int = 0
    restartsUsed: int = 0
    faults: int = 0
    consecutiveFailures: int = 0
    crashLooping: bool = False
    attempt: int = 0
    runSeconds: float = 0.0
    lines: int = 0
    usage: Usage | None = None
    connections: list[str] = field(default_factory=list)
    progress: JobProgress | None = None
    startTime: str | None = None
    lastStartTime: str | None = None
    endTime: str | None = None
    heartbeatTime: str = field(default_factory=now)
    jobCreateTime: str = ""
    incarnation: str = ""
    heartbeatSeq: int = 0
    errorMessage: str = ""
    firstError: FirstError | None = None
    events: list[Event] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    unsaved: UnsavedFiles | None = None

    @property
    def succeeded(self) -> bool:
        """True if the trainer has finished its work: it exited with 0."""
        return self.state == ReplicaState.EXITED and self.exitCode == 0

    @property
    def status(self) -> int:
        """The exit status in the form of `subprocess`: -n if signal n ended it."""
        return -self.signal if self.signal else self.exitCode or 0


@dataclass(frozen=True)
class JobRecord(HostAssignment, Record):
    """`jobs/<id>/job.json`, written only by the holder of its lease.

    Attributes:
        hosts: the assigned hosts, once the job is PREPARING (`jobs.queue`).
        candidates: maps each replica, the chief first, to the hosts that it may be assigned.
        runSeconds: the time in RUNNING, on its leaders' clocks; attemptSeconds is the part of it in the current attempt.
        hourlyCost: the price of these hosts in US dollars an hour when the job was created; None if they have no price.
        cost: their price from the job's start to its end; None before its end.
        prepareTime: when it became PREPARING; None if it never got hosts.
        attempt: the number of the current start of the whole job, from 0.
        restartsUsed: the restarts of the whole job that count against the limit.
        faults: those of them that its programs caused.
        lostReplicas: the replicas that are lost now (`lost` in `hosts.agent.job_rules`).
        droppedReplicas: the optional replicas that the job continues without, until its next attempt.
        replicas: how each replica ended: name, state, exit code, starts, restarts, times; empty before the job's end.
        steps: the global step at which its trainer ends; None if neither its arguments nor its package say so.
        progress: the progress of its replicas when the record was written last.
        notification: the target of the final report, and whether it was delivered; None if there is no target.
        manifest: the summary of manifest.json: package, cluster, versions, and data once the chief's host has hashed it.
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
    prepareTime: str | None = None
    startTime: str | None = None
    endTime: str | None = None
    runSeconds: float = 0.0
    attemptSeconds: float = 0.0
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

    def is_of_same_job(self, replica: ReplicaRecord) -> bool:
        """Return False for the record of a replica of an earlier job of this id."""
        return replica.jobCreateTime in ("", self.createTime)

    def to(self, state: JobState, **changes: Any) -> JobRecord:
        """Return this record in a new state, with its time, and at the end its cost; TransitionError if that is not allowed."""
        if state not in TRANSITIONS[self.state]:
            raise TransitionError(f"job {self.jobId} cannot go from {self.state} to {state}")
        if state is JobState.PREPARING:
            changes.setdefault("prepareTime", now())
        if state is JobState.RUNNING:
            changes.setdefault("startTime", now())
        if state.final:
            changes["cost"] = self.cost_until(changes.setdefault("endTime", now()))
        return replace(self, state=state, **changes)

    def cost_until(self, moment: str) -> float | None:
        """Return the recorded cost, else the cost until a moment, from the start or, without one, since it got hosts."""
        if self.cost is not None or self.hourlyCost is None:
            return self.cost
        # Records of older versions have no prepareTime.
        begin = self.startTime or ((self.prepareTime or self.createTime) if self.hosts else moment)
        return round(self.hourlyCost * max(seconds_between(begin, moment), 0) / 3600, 4)

    def ended(self, why: str, cancelled: bool = False) -> JobRecord:
        """Return this record in its final state: FAILED, or CANCELLED if `cancelled` is set or the job is CANCELLING."""
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
        """Return the task with addresses instead of replicas' names, in TF_CONFIG, MASTER_ADDR and JAX's coordinator."""
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

    Attributes:
        replicas: every replica of the job, the chief first; they lead in this order.
        tasks: each replica's environment, with replicas' names instead of addresses, as hosts are assigned later.
        packageSha256: the hash of the package's archive.
        data: paths, directories or globs of the training data; the chief's host hashes it.
        secrets: names of variables whose values `fab train` copied to the hosts; they are stored nowhere else.
        study: in a tuning job, what to tune: each replica runs the program many times, as trials.
        restartPolicy: `replica`: a killed replica restarts alone; `all`: a kill restarts the whole job.
        optionalRoles: roles whose loss or repeated kill does not end the job: it continues without such a replica.
        restartCodes: exit codes that count as a kill; permanentCodes never do (`hosts.agent.replica_rules`).
        successPolicy: the job SUCCEEDED once the replicas that count for success are done: with `chief` the chief, with
            `all` every other replica, too, that is neither a parameter server nor optional.
        gracePeriod: seconds for replicas that still run when those that count for success are done.
        stopSignal: `main`: SIGTERM goes only to a trainer's first process; `all`: to each of its processes.
        leaseSeconds: a leader loses its lease after this time without a renewal.
        lostAfterSeconds: a host is lost after this time without a heartbeat.
        maxWaitTime: seconds for which the job waits for a lost host.
        maxRunningTime: seconds for which the job may be RUNNING.
        stallTimeout: a job that prints nothing for these seconds restarts, as if it were killed.
        preparingSeconds: seconds for which the job may be PREPARING.
        logLimit: the bytes that are kept of each replica's log.
        notify: the URL or command to which the leader reports the job's end (`jobs.notification`); empty for no report.
        command: the command line that runs instead of `module`.
        folder: the folder of the package in which `command` runs; empty for a module.
        python: the Python of the job's own runtime; empty for the hosts' Python.
        addresses: the addresses of all candidate hosts; `with_hosts` puts those of the assigned hosts into `tasks`.
        hosts: maps each replica to its host; empty in the bucket.
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
        """Return True if the job can continue without this replica: its role is optional, and it is not the chief."""
        return replica != self.chief and replica.rpartition("-")[0] in self.optionalRoles

    def counts_for_success(self, replica: str) -> bool:
        """Return True if the job is SUCCEEDED only once this replica is done, by its successPolicy."""
        everyone = self.successPolicy == "all" and not self.is_parameter_server(replica) and not self.is_optional(replica)
        return replica == self.chief or everyone

    def is_parameter_server(self, replica: str) -> bool:
        """Return True if this replica is a parameter server, which never ends by itself."""
        return replica.rpartition("-")[0] == PARAMETER_SERVER_ROLE

    def stays_done(self, replica: str) -> bool:
        """Return True if this replica, once done, does not start again when the whole job restarts."""
        return not self.restarts_all if self.successPolicy == "all" else replica == self.chief

    def with_hosts(self, hosts: Mapping[str, str]) -> Plan:
        """Return this plan with hosts, and addresses for replicas' names in tasks; RecordError if a TF_CONFIG is invalid."""
        addresses = {replica: self.addresses[host] for replica, host in hosts.items() if host in self.addresses}
        try:
            tasks = {name: task.with_addresses(addresses) for name, task in self.tasks.items()}
        except (ValueError, AttributeError, TypeError) as error:
            raise RecordError(f"plan.json has an invalid TF_CONFIG: {error}") from None
        return replace(self, hosts=dict(hosts), tasks=tasks)

    def peers(self, replica: str) -> dict[str, str]:
        """Return the addresses of the hosts of the job's other replicas, by host name."""
        others = ((host, self.address(other)) for other, host in self.hosts.items() if other != replica)
        return {host: address for host, address in others if address}

    def address(self, replica: str) -> str:
        """Return the address of a replica's host, or empty if none is known."""
        return self.addresses.get(self.hosts.get(replica, ""), "")

    def program(self, python: str) -> list[str]:
        """Return the program's command line: a `command`, which finds this Python first on its PATH, or a module."""
        return [*(self.command or [python, "-m", self.module]), *self.args]

    @property
    def restarts_all(self) -> bool:
        """True if a kill of one replica restarts the whole job (restartPolicy `all`)."""
        return self.restartPolicy == "all"


@dataclass(frozen=True)
class CancelRequest(Record):
    """`jobs/<id>/cancel.json`: if it exists, the leader cancels the job; it has the requester and an optional reason."""

    kind: ClassVar[str] = "cancel.json"

    requestedBy: str
    createTime: str
    reason: str = ""


@dataclass(frozen=True)
class Power:
    """URLs with which a host starts other, stopped hosts.

    `starts` maps each host to a URL; a POST to it starts the host. A GET of `token` returns the token for that. A GET of
    `preempted` returns TRUE if this host is being preempted. Both GETs are sent with `headers`.
    """

    starts: dict[str, str]
    token: str
    preempted: str = ""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HostConfig(Record):
    """`/etc/scaletier/host.json`: this host's name and its access to the bucket, written together with the systemd unit.

    `power` is None if hosts cannot start each other.
    """

    kind: ClassVar[str] = "host.json"

    name: str
    bucket: str
    pollSeconds: float = 1.0
    python: str = paths.PYTHON
    power: Power | None = None


def with_events(events: list[Event], *new: Event) -> list[Event]:
    """Append events to the list; return its newest EVENTS_KEPT."""
    return [*events, *new][-EVENTS_KEPT:]
