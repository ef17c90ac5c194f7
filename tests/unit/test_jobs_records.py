"""Records as JSON, validated when they are read; the table of states; the cost of a job."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.firsterror import FirstError
from jobs.lease import Lease
from jobs.notification import Notification
from jobs.progress import JobProgress
from jobs.queue import Queue, QueueEntry
from jobs.records import (
    EVENTS_KEPT,
    CancelRequest,
    Event,
    HostConfig,
    JobRecord,
    Plan,
    Power,
    ReplicaRecord,
    Task,
    UnsavedFiles,
    Usage,
    with_events,
)
from jobs.serialization import SCHEMA, Record, RecordError
from jobs.states import TRANSITIONS, JobState, ReplicaState, TransitionError
from jobs.study import Measurement, Parameter, ParameterType, Study, Trial
from jobs.times import now, seconds_between

PLAN: dict[str, Any] = {
    "jobId": "job01",
    "replicas": ["master-0"],
    "module": "m",
    "args": [],
    "tasks": {"master-0": {"tfConfig": ""}},
}


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (JobRecord, [], "job.json must be a JSON object, not []"),
        (JobRecord, {}, "job.json lacks jobId"),
        (Plan, {"jobId": "1", "args": []}, "plan.json lacks replicas, module, tasks"),
        (JobRecord, {"jobId": 1}, "job.json.jobId must be a text, not 1"),
        (JobRecord, {"jobId": "a", "attempt": "1"}, "job.json.attempt must be a whole number, not '1'"),
        (JobRecord, {"jobId": "a", "attempt": True}, "job.json.attempt must be a whole number, not True"),
        (JobRecord, {"jobId": "a", "attempt": 1.0}, "job.json.attempt must be a whole number, not 1.0"),
        (JobRecord, {"jobId": "a", "runSeconds": False}, "job.json.runSeconds must be a number, not False"),
        (JobRecord, {"jobId": "a", "runSeconds": float("inf")}, "job.json.runSeconds must be a number, not inf"),
        (JobRecord, {"jobId": "a", "state": "LOST"}, "job.json.state is 'LOST'; valid are QUEUED, PREPARING, "),
        (JobRecord, {"jobId": "a", "state": []}, "job.json.state is []; valid are "),
        (JobRecord, {"jobId": "a", "lease": {"epoch": None}}, "job.json.lease.epoch must be a whole number, not None"),
        (JobRecord, {"jobId": "a", "lease": {"submitter": 1}}, "job.json.lease.submitter must be true or false, not 1"),
        (JobRecord, {"jobId": "a", "hosts": "ps-0"}, "job.json.hosts must be a list, not 'ps-0'"),
        (JobRecord, {"jobId": "a", "hosts": ["ps-0", 1]}, "job.json.hosts[1] must be a text, not 1"),
        (JobRecord, {"jobId": "a", "labels": {"x": 1}}, "job.json.labels.x must be a text, not 1"),
        (JobRecord, {"jobId": "a", "labels": []}, "job.json.labels must be a JSON object, not []"),
        (JobRecord, {"jobId": "a", "cost": "1"}, "job.json.cost must be a number, not '1'"),
        (JobRecord, {"jobId": "a", "events": [{"time": ""}]}, "job.json.events[0] lacks cause"),
        (Plan, PLAN | {"tasks": {"master-0": {"tfConfig": 1}}}, "plan.json.tasks.master-0.tfConfig must be a text, not 1"),
        (ReplicaRecord, {"name": "a", "lines": "x" * 99}, "the record of a replica.lines must be a whole number, not 'xx"),
        (HostConfig, {"name": "ps-0"}, "host.json lacks bucket"),
        (Queue, {"entries": [{"jobId": "a", "hosts": None}]}, "the queue.entries[0].hosts must be a list, not None"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_named_by_its_path(kind: type[Record], data: Any, message: str) -> None:
    with pytest.raises(RecordError) as caught:
        kind.from_dict(data)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", "nul"])
def test_invalid_json_is_one_error_line(content: bytes | str) -> None:
    with pytest.raises(RecordError, match=r"^job\.json is no JSON: [^\n]+$"):
        JobRecord.from_json(content)


def test_a_newer_schema_is_refused_and_an_older_one_is_not() -> None:
    newer = json.dumps({"schema": SCHEMA + 1, "jobId": 1, "new": {}})
    message = (
        rf"^job\.json was written by a newer scaletier \(schema {SCHEMA + 1}, this one reads {SCHEMA}\): bring this one [^\n]+$"
    )
    with pytest.raises(RecordError, match=message):
        JobRecord.from_json(newer)
    for older in ({}, {"schema": 1}, {"schema": SCHEMA}):
        assert JobRecord.from_dict({"jobId": "a", "createTime": "", **older}) == JobRecord("a", createTime="")


TIME = "2026-01-31T12:00:00.250Z"
STUDY = {
    "params": [
        {"parameterName": "x", "type": "DOUBLE", "minValue": None, "maxValue": None, "categoricalValues": [],
         "discreteValues": [], "scaleType": "NONE"},
    ],
    "goal": "MAXIMIZE", "hyperparameterMetricTag": "training/hptuning/metric", "maxTrials": 1, "maxParallelTrials": 1,
    "maxFailedTrials": 3, "algorithm": "ALGORITHM_UNSPECIFIED", "enableTrialEarlyStopping": False, "resumePreviousJobId": "",
    "jobDir": "", "jobDirFlag": "", "seed": 0, "earlier": [],
}  # fmt: skip
PROGRESS = {"step": 3, "totalSteps": None, "stepsPerSecond": None, "etaSeconds": None, "loss": None, "metrics": {}, "time": ""}
UNSAVED = {
    "jobDirEmpty": False, "kept": [], "keptFiles": 0, "keptBytes": 0, "leftOut": [], "leftOutFiles": 0, "error": "",
}  # fmt: skip
DEFAULTS: list[tuple[Record, dict[str, Any]]] = [
    (
        JobRecord(
            "job01", createTime=TIME, progress=JobProgress(3), notification=Notification("mail"), events=[Event(TIME, "x")]
        ),
        {
            "jobId": "job01", "state": "QUEUED", "hosts": [], "candidates": {}, "priority": 0, "createTime": TIME,
            "lease": {"holder": "", "epoch": 0, "heartbeatSeq": 0, "submitter": False},
            "prepareTime": None, "startTime": None, "endTime": None, "runSeconds": 0.0, "attemptSeconds": 0.0,
            "hourlyCost": None, "cost": None, "errorMessage": "",
            "attempt": 0, "restartsUsed": 0, "faults": 0, "lostReplicas": [], "droppedReplicas": [],
            "events": [{"time": TIME, "cause": "x", "seconds": None}], "submittedBy": "", "labels": {}, "trainingInput": {},
            "steps": None, "progress": PROGRESS,
            "notification": {"target": "mail", "time": None, "attempts": 0, "error": ""}, "manifest": {}, "replicas": [],
        },
    ),
    (
        ReplicaRecord("ps-0", heartbeatTime=TIME, usage=Usage(), firstError=FirstError(TIME, "x"), unsaved=UnsavedFiles()),
        {
            "name": "ps-0", "state": "PREPARING", "exitCode": None, "signal": None, "killed": False, "outOfMemory": False,
            "memoryLimit": None, "terminationReason": "", "preempted": False, "starts": 0, "restarts": 0, "restartsUsed": 0,
            "faults": 0, "consecutiveFailures": 0, "crashLooping": False, "attempt": 0, "runSeconds": 0.0, "lines": 0,
            "usage": {"cpuSeconds": None, "cpus": None, "memoryBytes": None}, "connections": [], "progress": None,
            "startTime": None, "lastStartTime": None, "endTime": None, "heartbeatTime": TIME, "jobCreateTime": "",
            "incarnation": "", "heartbeatSeq": 0, "errorMessage": "", "firstError": {"time": TIME, "message": "x"},
            "events": [], "hostBusy": False, "facts": {}, "unsaved": UNSAVED,
        },
    ),
    (
        Plan("job01", ["master-0"], "m", [], {"master-0": Task("{}")}, study=Study([Parameter("x", ParameterType.DOUBLE)])),
        {
            "jobId": "job01", "replicas": ["master-0"], "module": "m", "args": [],
            "tasks": {"master-0": {"tfConfig": "{}", "environment": {}}}, "packageSha256": "", "data": [], "secrets": [],
            "study": STUDY, "restartPolicy": "replica", "optionalRoles": [], "restartCodes": [42], "permanentCodes": [],
            "successPolicy": "chief", "gracePeriod": 0.0, "stopSignal": "main", "maxRestarts": 5, "maxRetries": 3,
            "heartbeatSeconds": 5.0, "leaseSeconds": 15.0, "lostAfterSeconds": 60.0, "maxWaitTime": 3600.0,
            "maxRunningTime": 604800.0, "stallTimeout": None, "preparingSeconds": 300.0, "logLimit": 1000000000,
            "stopSeconds": 10.0, "notify": "", "command": [], "folder": "", "python": "", "addresses": {}, "hosts": {},
        },
    ),
    (
        Queue([QueueEntry("job01", ["m"])]),
        {
            "entries": [
                {"jobId": "job01", "hosts": ["m"], "held": False, "priority": 0, "token": "", "submittedBy": "",
                 "createTime": "", "maxWaitTime": None, "candidates": {}},
            ]
        },
    ),
    (
        Trial(1, {"x": "2"}, "ps-0", startTime=TIME, finalMetric=Measurement(3, 0.5)),
        {
            "trialId": 1, "hyperparameters": {"x": "2"}, "replica": "ps-0", "host": "", "state": "RUNNING", "restarts": 0,
            "startTime": TIME, "endTime": None, "allMetrics": [], "finalMetric": {"trainingStep": 3, "objectiveValue": 0.5},
            "isTrialStoppedEarly": False, "errorMessage": "",
        },
    ),
    (
        HostConfig("ps-0", "/b", power=Power({}, "http://x")),
        {
            "name": "ps-0", "bucket": "/b", "pollSeconds": 1.0, "python": "/opt/scaletier/venv/bin/python",
            "power": {"starts": {}, "token": "http://x", "preempted": "", "headers": {}},
        },
    ),
    (CancelRequest("ann", TIME), {"requestedBy": "ann", "createTime": TIME, "reason": ""}),
    (UnsavedFiles(), UNSAVED),
]  # fmt: skip


@pytest.mark.parametrize(("record", "values"), DEFAULTS, ids=lambda value: type(value).__name__)
def test_the_keys_of_a_record_and_their_defaults(record: Record, values: dict[str, Any]) -> None:
    assert record.to_dict() == {"schema": SCHEMA, **values}
    assert type(record).from_dict(values) == record


def test_a_record_is_compact_json_in_utf8() -> None:
    assert CancelRequest("é", TIME).to_json() == (
        b'{"schema":4,"requestedBy":"\xc3\xa9","createTime":"2026-01-31T12:00:00.250Z","reason":""}\n'
    )


@dataclass(frozen=True)
class Sample(Record):
    """A record with the kinds of fields that jobs have not."""

    kind: ClassVar[str] = "sample"
    json_key: ClassVar = staticmethod(str.upper)

    whatever: Any
    numbers: tuple[int, ...] = ()
    local: int = field(default=7, metadata={"stored": False})


def test_fields_of_other_kinds_and_spellings() -> None:
    assert Sample.from_dict({"WHATEVER": [None, {"x": 1}], "NUMBERS": [1, 2], "LOCAL": 3}) == Sample([None, {"x": 1}], (1, 2))
    assert Sample.from_dict({"WHATEVER": None}) == Sample(None, (), 7)
    for data, message in (
        ({"whatever": 1}, "sample lacks WHATEVER"),
        ({"WHATEVER": 1, "NUMBERS": 1}, "sample.NUMBERS must be a list, not 1"),
        ({"WHATEVER": 1, "NUMBERS": [1, "x"]}, "sample.NUMBERS[1] must be a whole number, not 'x'"),
        ({"WHATEVER": 1, "NUMBERS": "x" * 58}, f"sample.NUMBERS must be a list, not '{'x' * 58}'"),
        ({"WHATEVER": 1, "NUMBERS": "x" * 59}, f"sample.NUMBERS must be a list, not '{'x' * 56}..."),
    ):
        with pytest.raises(RecordError) as error:
            Sample.from_dict(data)
        assert str(error.value) == message


def test_unknown_keys_are_dropped() -> None:
    read = ReplicaRecord.from_json(
        '{"name": "ps-0", "heartbeatTime": "", "colour": "red", "events": [{"time":"", "cause":"", "x":1}]}'
    )
    assert read == ReplicaRecord("ps-0", heartbeatTime="", events=[Event("", "")])


def test_optional_keys_may_be_null() -> None:
    read = JobRecord.from_dict({"jobId": "a", "cost": None, "startTime": None, "hourlyCost": 1})
    assert (read.cost, read.startTime, read.hourlyCost) == (None, None, 1)


def test_bytes_that_are_not_utf8_survive_as_surrogates() -> None:
    argument = b"--path=\xff\xfe".decode("utf-8", "surrogateescape")
    plan = Plan("job01", ["master-0"], "trainer.task", [argument], {})
    assert Plan.from_json(plan.to_json()).args[0].encode("utf-8", "surrogateescape") == b"--path=\xff\xfe"


_text = st.text(max_size=5)
_number = st.integers(-(2**40), 2**40)
_float = st.floats(allow_nan=False, allow_infinity=False)
_events = st.lists(st.builds(Event, _text, _text, st.none() | _float), max_size=2)
_plain = st.recursive(st.none() | st.booleans() | _number | _text, lambda inner: st.lists(inner, max_size=2), max_leaves=3)
_any = st.dictionaries(_text, _plain, max_size=2)
_texts = st.lists(_text, max_size=3)
_maybe = st.none() | _text
_records = st.one_of(
    st.builds(
        JobRecord, jobId=_text, state=st.sampled_from(JobState), priority=_number, startTime=_maybe, runSeconds=_float,
        lease=st.builds(Lease, _text, _number, _number, st.booleans()), hosts=_texts, cost=st.none() | _float,
        droppedReplicas=_texts,
        events=_events, labels=st.dictionaries(_text, _text, max_size=2), manifest=_any, replicas=st.lists(_any, max_size=2),
    ),
    st.builds(
        ReplicaRecord, name=_text, state=st.sampled_from(ReplicaState), exitCode=st.none() | _number,
        crashLooping=st.booleans(),
        startTime=_maybe, errorMessage=_text, heartbeatSeq=_number, events=_events, facts=_any,
    ),
    st.builds(
        Plan, _text, _texts, _text, _texts,
        st.dictionaries(_text, st.builds(Task, _text, st.dictionaries(_text, _text, max_size=2)), max_size=2),
        optionalRoles=_texts, stallTimeout=st.none() | _float, maxRestarts=_number, leaseSeconds=_float,
    ),
    st.builds(Queue, st.lists(st.builds(QueueEntry, _text, _texts, st.booleans(), maxWaitTime=st.none() | _float), max_size=3)),
    st.builds(HostConfig, _text, _text, _float, _text),
)  # fmt: skip


@given(_records)
def test_a_record_survives_serialization(record: Record) -> None:
    parsed = type(record).from_json(record.to_json())
    assert parsed == record
    assert parsed.to_json() == record.to_json()
    assert type(record).from_dict(record.to_dict()) == record


Q, P, R, S, F, C, X = JobState
VALID_TRANSITIONS = {(Q, P), (Q, C), (Q, F), (P, R), (P, C), (P, S), (P, F), (R, C), (R, S), (R, F), (C, X)}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(JobState, JobState)))
def test_only_valid_transitions_are_allowed(before: JobState, after: JobState) -> None:
    job = JobRecord("job01", state=before)
    if (before, after) in VALID_TRANSITIONS:
        moved = job.to(after)
        assert moved.state == after
        assert (moved.endTime is not None) == after.final
        assert (moved.startTime is not None) == (after is JobState.RUNNING)
    else:
        with pytest.raises(TransitionError, match=f"from {before} to {after}"):
            job.to(after)


def test_the_states_by_name() -> None:
    assert [str(s) for s in JobState] == ["QUEUED", "PREPARING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLING", "CANCELLED"]
    assert set(TRANSITIONS) == set(JobState)
    assert {state for state in JobState if state.final} == {S, F, X}
    assert [str(s) for s in ReplicaState] == ["PREPARING", "RUNNING", "EXITED", "LOST"]


@pytest.mark.parametrize(
    ("state", "cancelled", "end"), [(Q, False, F), (R, False, F), (C, False, X), (Q, True, X), (P, True, X), (C, True, X)]
)
def test_ended_is_failed_or_cancelled(state: JobState, cancelled: bool, end: JobState) -> None:
    ended = JobRecord("job01", state=state, errorMessage="").ended("why", cancelled)
    assert (ended.state, ended.errorMessage) == (end, "why")
    assert JobRecord("job01", state=C, errorMessage="too long").ended("").errorMessage == "too long"


def test_a_job_changes_its_holder() -> None:
    job = JobRecord("job01", createTime=TIME)
    submitted = job.with_holder("fab 1", submitter=True)
    assert submitted == replace(job, lease=Lease("fab 1", 1, 0, True))
    assert submitted.with_holder("ps-0/1") == replace(job, lease=Lease("ps-0/1", 2, 0, False))


@pytest.mark.parametrize(
    ("start", "price", "cost"),
    [
        ("2026-01-31T12:10:00Z", 2.18, 1.09),
        (None, 2.18, 1.4533),
        ("2026-01-31T12:50:00Z", 2.18, 0.0),  # by a clock that runs ahead
        ("2026-01-31T12:10:00Z", 0.0, 0.0),
        ("2026-01-31T12:10:00Z", None, None),
    ],
)
def test_a_job_costs_from_its_start_to_its_end(start: str | None, price: float | None, cost: float | None) -> None:
    job = JobRecord("job01", state=JobState.RUNNING, createTime="2026-01-31T12:00:00Z", startTime=start, hourlyCost=price)
    job = replace(job, hosts=["master-0"])
    assert job.to(JobState.FAILED, endTime="2026-01-31T12:40:00Z").cost == cost
    assert job.to(JobState.CANCELLING).cost is None


def test_a_job_that_never_started_costs_nothing_for_its_time_in_the_queue() -> None:
    queued = JobRecord("job01", createTime="2026-01-31T00:00:00Z", hourlyCost=20.0)
    assert queued.ended("", cancelled=True).cost == 0.0
    preparing = queued.to(JobState.PREPARING, hosts=["master-0"], prepareTime="2026-01-31T12:00:00Z")
    assert preparing.cost_until("2026-01-31T12:03:00Z") == 1.0
    assert preparing.to(JobState.FAILED, endTime="2026-01-31T12:06:00Z").cost == 2.0
    assert queued.to(JobState.PREPARING).prepareTime is not None


@pytest.mark.parametrize(
    ("state", "code", "signal", "done", "status"),
    [
        ("EXITED", 0, None, True, 0),
        ("EXITED", 137, None, False, 137),
        ("EXITED", 137, 9, False, -9),
        ("EXITED", None, None, False, 0),
        ("RUNNING", 0, None, False, 0),
    ],
)
def test_done_and_status_of_a_replica(state: str, code: int | None, signal: int | None, done: bool, status: int) -> None:
    record = ReplicaRecord("ps-0", state=ReplicaState(state), exitCode=code, signal=signal)
    assert (record.succeeded, record.status) == (done, status)


def test_the_chief_is_never_optional() -> None:
    plan = Plan("job01", ["worker-0", "worker-1", "ps-0", "my-role-3"], "m", [], {}, optionalRoles=["worker", "my-role"])
    assert [plan.is_optional(name) for name in plan.replicas] == [False, True, False, True]


def test_the_replicas_that_count_for_success_and_those_that_stay_done() -> None:
    names = ["master-0", "worker-0", "ps-0", "evaluator-0", "my-role-3"]
    plan = Plan("job01", names, "m", ["--x"], {}, optionalRoles=["evaluator"])
    everyone = replace(plan, successPolicy="all")
    assert [plan.is_parameter_server(name) for name in names] == [False, False, True, False, False]
    assert [plan.counts_for_success(name) for name in names] == [True, False, False, False, False]
    assert [everyone.counts_for_success(name) for name in names] == [True, True, False, False, True]
    assert replace(everyone, replicas=["ps-0", "worker-0"]).counts_for_success("ps-0"), "the chief counts in any role"
    assert [plan.stays_done(name) for name in names] == [True, False, False, False, False]
    assert [everyone.stays_done(name) for name in names] == [True] * 5
    assert [replace(everyone, restartPolicy="all").stays_done(name) for name in names] == [False] * 5
    assert (plan.restarts_all, replace(plan, restartPolicy="all").restarts_all) == (False, True)


def test_a_program_is_a_module_or_a_command() -> None:
    plan = Plan("job01", ["master-0"], "trainer.task", ["--x"], {})
    assert plan.program("/python") == ["/python", "-m", "trainer.task", "--x"]
    assert replace(plan, command=["sh", "run.sh"]).program("/python") == ["sh", "run.sh", "--x"]


def test_the_newest_events_are_kept() -> None:
    events: list[Event] = []
    for number in range(EVENTS_KEPT + 7):
        events = with_events(events, Event(str(number), ""))
    assert [event.time for event in events] == [str(number) for number in range(7, EVENTS_KEPT + 7)]


def test_now_and_seconds_between() -> None:
    time = now()
    assert len(time) == len("2026-01-31T12:00:00.250Z")
    assert time.endswith("Z")
    assert seconds_between("2026-01-31T12:00:00.250Z", "2026-01-31T12:01:00.750Z") == 60.5
    assert seconds_between("2026-01-31T12:01:00.750Z", "2026-01-31T12:00:00.250Z") == -60.5
    assert seconds_between("9999-01-31T12:00:00Z") < 0 < seconds_between("2020-01-31T12:00:00Z")
    assert [seconds_between(*times) for times in (("", time), ("x", time), (time, "x"))] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"jobId": "a", "runSeconds": 1' + b"0" * 400 + b"}"])
def test_excessive_nesting_or_digits_are_record_errors(content: bytes) -> None:
    with pytest.raises(RecordError):
        JobRecord.from_json(content)


@pytest.mark.parametrize("time", ["yesterday", "", "2026-01-31T12:00:00"])
def test_a_job_with_an_invalid_time_can_be_ended(time: str) -> None:
    ended = JobRecord("job01", createTime=time, hourlyCost=3.0).ended("why")
    assert (ended.state, ended.cost) == (JobState.FAILED, 0.0)


def test_an_older_record_has_hosts_without_candidates() -> None:
    old = JobRecord.from_json('{"jobId": "job01", "hosts": ["master-0", "ps-0"]}')
    assert old.candidate_hosts == {"master-0": ["master-0"], "ps-0": ["ps-0"]}
    assert old.placement == {"master-0": "master-0", "ps-0": "ps-0"}
    assert JobRecord("job02", candidates={"master-0": ["w"]}).placement == {}


def test_a_task_has_the_addresses_of_the_job_s_hosts() -> None:
    config = {"cluster": {"chief": ["master-0:2222"], "worker": ["worker-0:2222"]}, "task": {"type": "chief", "index": 0}}
    environment = {"MASTER_ADDR": "master-0", "RANK": "0", "MINE": "master-0", "JAX_COORDINATOR_ADDRESS": "master-0:2223"}
    tasks = {"master-0": Task(json.dumps(config), environment), "worker-0": Task(json.dumps(config))}
    plan = Plan("job01", ["master-0", "worker-0"], "m", [], tasks, addresses={"w0": "10.0.0.1", "w1": "10.0.0.2"})
    placed = plan.with_hosts({"master-0": "w1", "worker-0": "w0"})
    assert json.loads(placed.tasks["worker-0"].tfConfig) == {
        "cluster": {"chief": ["10.0.0.2:2222"], "worker": ["10.0.0.1:2222"]},
        "task": {"type": "chief", "index": 0},
    }
    addresses = {"MASTER_ADDR": "10.0.0.2", "JAX_COORDINATOR_ADDRESS": "10.0.0.2:2223"}
    assert placed.tasks["master-0"].environment == {"RANK": "0", "MINE": "master-0"} | addresses
    assert placed.address("master-0") == "10.0.0.2"
    assert placed.tasks["worker-0"].environment == {}
    assert placed.hosts == {"master-0": "w1", "worker-0": "w0"}
    assert plan.peers("master-0") == {}
    assert (placed.peers("master-0"), placed.peers("worker-0")) == ({"w0": "10.0.0.1"}, {"w1": "10.0.0.2"})
    damaged = replace(plan, tasks={"master-0": Task("no JSON")})
    for text in ("{", "null", "[]", '{"cluster": {"chief": [1]}}', '{"cluster": []}'):
        with pytest.raises(RecordError, match=r"plan\.json has an invalid TF_CONFIG"):
            replace(damaged, tasks={"master-0": Task(text)}).with_hosts({"master-0": "w1"})
    older = Plan("job01", ["master-0"], "m", [], {"master-0": Task("no JSON", environment)})
    assert older.with_hosts({"master-0": "master-0"}).tasks == older.tasks


OLD_RECORDS = {
    JobRecord: (
        {"jobId": "job01", "hosts": ["worker-0"], "wants": {"master-0": ["worker-0"]}, "spent": 2, "lost": ["a-0"],
         "without": ["b-0"],
         "lease": {"holder": "ps-0/1", "epoch": 3, "beat": 7}},
        JobRecord("job01", hosts=["worker-0"], candidates={"master-0": ["worker-0"]}, restartsUsed=2, lostReplicas=["a-0"],
                  droppedReplicas=["b-0"], lease=Lease("ps-0/1", 3, 7), createTime="2026-01-31T12:00:00Z"),
    ),
    ReplicaRecord: (
        {"name": "ps-0", "life": "a", "beat": 9, "spent": 1, "alike": 2, "hopeless": True, "death": "signal 9"},
        ReplicaRecord("ps-0", incarnation="a", heartbeatSeq=9, restartsUsed=1, consecutiveFailures=2, crashLooping=True,
                      terminationReason="signal 9", heartbeatTime="2026-01-31T12:00:00Z"),
    ),
    Queue: (
        {"entries": [{"jobId": "job01", "hosts": [], "wants": {"master-0": ["worker-0"]}}]},
        Queue([QueueEntry("job01", [], candidates={"master-0": ["worker-0"]})]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OLD_RECORDS, ids=lambda kind: kind.__name__)
def test_old_keys_of_a_schema_3_record_are_read(kind: type[Record]) -> None:
    keys, record = OLD_RECORDS[kind]
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    times = {key: "2026-01-31T12:00:00Z" for key in ("createTime", "heartbeatTime") if key in names}
    assert kind.from_dict({"schema": 3, **keys, **times}) == record
    assert not {*keys} & {"wants", "life", "beat", "spent", "lost", "death"} & record.to_dict().keys(), (
        "the new keys are written"
    )


def test_old_keys_of_the_previous_schema_are_read() -> None:
    old = json.loads(Plan("job01", ["master-0"], "m", [], {}, optionalRoles=["worker"]).to_json())
    old["expendable"] = old.pop("optionalRoles")
    assert Plan.from_dict(old).optionalRoles == ["worker"]
    assert Plan.from_dict({**old, "optionalRoles": ["ps"]}).optionalRoles == ["ps"], "the new key has priority"
