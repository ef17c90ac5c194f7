"""What a trainer on Google's hosts may touch of buckets."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from jobs.records import Plan, Task
from replica.broker import MOST_BUCKETS, Access, access, boundary

PLAN = Plan("job02", ["master-0"], "trainer.task", [], {})
TASK = Task(tfConfig="{}", environment={"JOB_DIR": "gs://mine/jobs/job02/output", "SCALETIER_DATA": "gs://mine/data"})


def of(*args: str, **environment: str) -> Access:
    task = replace(TASK, environment=TASK.environment | environment)
    return access(replace(PLAN, args=list(args)), task, "mine")


def test_a_job_writes_its_output_and_reads_the_stacks_data() -> None:
    assert of() == Access("mine", ("jobs/job02/output",), ("data/", "data"))


def test_what_it_goes_on_from_it_reads_and_what_is_others_it_may_use_as_its_host_may() -> None:
    found = of("--resume=gs://mine/jobs/job01/output", "gs://theirs/set/a.csv,gs://more", OUT="gs://results/x")
    assert found.writes == ("jobs/job02/output",)
    assert "jobs/job01/output" in found.reads
    assert found.others == ("theirs", "more", "results")
    assert of("gs://mine").reads == ("data/", "data"), "the whole bucket is nobody's to read"


def test_a_job_that_goes_on_in_the_output_of_another_writes_there() -> None:
    assert of(JOB_DIR="gs://mine/jobs/job01/output").writes == ("jobs/job01/output",)
    elsewhere = of(JOB_DIR="gs://results/x")
    assert (elsewhere.writes, elsewhere.others) == (("jobs/job02/output",), ("results",))


def test_the_boundary_as_google_has_it() -> None:
    resource = "//storage.googleapis.com/projects/_/buckets/"
    assert boundary(Access("mine", ("jobs/j/output",), ("data/", "jobs/i/output"), ("theirs",))) == [
        {
            "availableResource": f"{resource}mine",
            "availablePermissions": ["inRole:roles/storage.objectUser"],
            "availabilityCondition": {
                "expression": "resource.name.startsWith('projects/_/buckets/mine/objects/jobs/j/output') || "
                "api.getAttribute('storage.googleapis.com/objectListPrefix', '').startsWith('jobs/j/output')"
            },
        },
        {
            "availableResource": f"{resource}mine",
            "availablePermissions": ["inRole:roles/storage.objectViewer"],
            "availabilityCondition": {
                "expression": "resource.name.startsWith('projects/_/buckets/mine/objects/data/') || "
                "api.getAttribute('storage.googleapis.com/objectListPrefix', '').startsWith('data/') || "
                "resource.name.startsWith('projects/_/buckets/mine/objects/jobs/i/output') || "
                "api.getAttribute('storage.googleapis.com/objectListPrefix', '').startsWith('jobs/i/output')"
            },
        },
        {"availableResource": f"{resource}mine", "availablePermissions": ["inRole:roles/storage.bucketViewer"]},
        {"availableResource": f"{resource}theirs", "availablePermissions": ["inRole:roles/storage.objectUser"]},
    ]


@given(
    st.lists(
        st.text(alphabet="gs:/mineothr01-_.'\" |)(", max_size=40) | st.from_regex(r"gs://[a-z]{3,8}/[a-z']{0,9}"), max_size=30
    )
)
def test_no_argument_widens_a_rule(args: list[str]) -> None:
    found = of(*args)
    rules = boundary(found)
    assert found.writes == ("jobs/job02/output",)
    assert len(rules) <= 10
    assert len(found.others) <= MOST_BUCKETS
    assert "" not in found.reads
    for rule in rules[:2]:
        expression = rule["availabilityCondition"]["expression"]
        prefixes = found.writes if rule is rules[0] else found.reads
        assert expression.count("'") == 2 * len(prefixes) + 6 * len(prefixes), "each text ends where it should"
        assert expression.count("||") <= 12
