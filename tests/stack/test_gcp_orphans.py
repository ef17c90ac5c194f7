"""Find orphans at Google: resources with a stack's names in no state, over all pages and in order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import google.auth.exceptions
import pytest
import requests
from fakegoogle import FakeGoogle
from shared_fakes import Clock

from infra import backend
from infra.gcp import orphans
from infra.gcp.api import GcpError, session
from infra.gcp.names import names
from infra.gcp.orphans import Orphan
from infra.scale_tiers import SpecError

NAMES = names("my-project-1", "dev")
PREFIX = NAMES.prefix
ALL = "/compute/v1/projects/my-project-1"


@pytest.fixture(autouse=True)
def empty_project(fake: FakeGoogle) -> None:
    """Return an empty project, to which a test adds resources."""
    for kind in (
        *(f"aggregated/{kinds}" for kinds in ("instances", "addresses", "routers", "subnetworks")),
        "global/firewalls",
        "global/networks",
    ):
        fake.answers[f"{ALL}/{kind}"] = (200, {})
    fake.answers["/v1/projects/my-project-1/serviceAccounts"] = (200, {})
    fake.answers["/v1/projects/my-project-1/roles"] = (200, {})


def config(fake: FakeGoogle, key: str) -> str | None:
    return f"http://127.0.0.1:{fake.port}/v1/" if key == "gcp:iamCustomEndpoint" else fake.config(key)


def item(id_: str) -> dict[str, Any]:
    return {"name": id_.rpartition("/")[2], "selfLink": f"https://www.googleapis.com/compute/v1/{id_}"}


@pytest.mark.parametrize("state", ["PROVISIONING", "STAGING", "RUNNING", "REPAIRING"])
def test_orphans_are_found_by_the_stacks_own_names_only(fake: FakeGoogle, state: str) -> None:
    recorded, orphan, on_next_page = (
        f"projects/my-project-1/zones/z/instances/{PREFIX}-{name}" for name in ("ps-0", "ps-1", "worker-0")
    )
    of_another_stack = f"projects/my-project-1/zones/z/instances/{PREFIX}x-ps-0"
    network = f"projects/my-project-1/global/networks/{PREFIX}"
    account = f"projects/my-project-1/serviceAccounts/{PREFIX}-ps@my-project-1.iam.gserviceaccount.com"
    running, stopped = item(orphan) | {"status": state}, item(on_next_page) | {"status": "TERMINATED"}
    page = {"zones/z": {"instances": [item(recorded), running, item(of_another_stack)]}, "zones/y": {"warning": {}}}
    fake.answers[f"{ALL}/aggregated/instances"] = (200, {"items": page, "nextPageToken": "2"})
    fake.answers[f"{ALL}/aggregated/instances?pageToken=2"] = (200, {"items": {"zones/z": {"instances": [stopped]}}})
    fake.answers[f"{ALL}/global/networks"] = (
        200,
        {"items": [item(network), item("projects/my-project-1/global/networks/default")]},
    )
    fake.answers["/v1/projects/my-project-1/serviceAccounts"] = (200, {"accounts": [{"name": account}]})
    leftovers = orphans.find_orphans("my-project-1", NAMES, [recorded], lambda key: config(fake, key))
    base = f"http://127.0.0.1:{fake.port}"
    assert leftovers == [
        Orphan("instance", orphan, f"{base}/compute/v1/{orphan}", runs=True),
        Orphan("instance", on_next_page, f"{base}/compute/v1/{on_next_page}"),
        Orphan("network", network, f"{base}/compute/v1/{network}"),
        Orphan("service account", account, f"{base}/v1/{account}"),
    ]


def test_firewall_rules_in_the_project_of_a_shared_subnet_are_found(fake: FakeGoogle) -> None:
    rule = f"projects/the-host/global/firewalls/{PREFIX}-deny"
    fake.answers["/compute/v1/projects/the-host/global/firewalls"] = (200, {"items": [item(rule)]})

    def leftovers(**keys: str) -> list[str]:
        keys = {f"scaletier:{key}": value for key, value in keys.items()}
        listed = orphans.find_orphans("my-project-1", NAMES, [], lambda key: keys.get(key) or config(fake, key))
        return [leftover.id for leftover in listed]

    shared = "projects/the-host/regions/us-central1/subnetworks/shared"
    assert leftovers(subnetwork=shared) == [rule]
    assert leftovers(subnetwork=shared, firewall="false") == leftovers(subnetwork="mine") == leftovers() == []
    assert leftovers(subnetwork=shared.replace("the-host", "my-project-1")) == []
    with pytest.raises(SpecError, match="write NAME, or projects/PROJECT/regions/REGION/subnetworks/NAME"):
        leftovers(subnetwork="projects/the-host")


def test_a_custom_role_is_found_by_its_title(fake: FakeGoogle) -> None:
    recorded, orphan, other = (f"projects/my-project-1/roles/start{digits}" for digits in ("0000001", "0000002", "0000003"))
    roles = [{"name": name, "title": f"{PREFIX}-start"} for name in (recorded, orphan)]
    fake.answers["/v1/projects/my-project-1/roles"] = (
        200,
        {"roles": [*roles, {"name": other, "title": f"{PREFIX}x-start"}, {"name": other}]},
    )
    leftovers = orphans.find_orphans("my-project-1", NAMES, [recorded], lambda key: config(fake, key))
    assert leftovers == [Orphan("role", orphan, f"http://127.0.0.1:{fake.port}/v1/{orphan}")]


def test_a_role_that_is_marked_as_deleted_is_gone(fake: FakeGoogle) -> None:
    fake.answers["/role"] = [(200, {"name": "r"}), (200, {"name": "r", "deleted": True})]
    role = Orphan("role", "r", f"http://127.0.0.1:{fake.port}/role")
    client = session(fake.config)
    assert [orphans._exists(client, role) for _ in range(2)] == [True, False]


def test_a_resource_that_is_only_a_pending_operation_is_an_orphan(fake: FakeGoogle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the state of an update that was killed while it created worker-3."""
    recorded, pending = (f"projects/my-project-1/zones/z/instances/{PREFIX}-{name}" for name in ("master-0", "worker-3"))
    page = {"zones/z": {"instances": [item(recorded), item(pending)]}}
    fake.answers[f"{ALL}/aggregated/instances"] = (200, {"items": page})
    kind = "gcp:compute/instance:Instance"
    deployment = {
        "resources": [{"id": recorded, "type": kind}],
        "pending_operations": [{"type": "creating", "resource": {"urn": "urn::worker-3", "type": kind}}],
    }
    monkeypatch.setattr(orphans, "_pulumi", lambda *args: "dev" if "--show-name" in args else {"deployment": deployment})
    leftovers, state_known = orphans.of_stack(lambda key: "my-project-1" if key == "gcp:project" else config(fake, key))
    assert [leftover.id for leftover in leftovers] == [pending]
    assert state_known


def test_orphans_of_a_renamed_stack_have_its_first_names(fake: FakeGoogle, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, orphan = (f"projects/my-project-1/zones/z/instances/{PREFIX}-{name}" for name in ("master-0", "worker-3"))
    page = {"zones/z": {"instances": [item(recorded), item(orphan)]}}
    fake.answers[f"{ALL}/aggregated/instances"] = (200, {"items": page})
    outputs = {"name": f"{PREFIX}-master-0", "project": "my-project-1", "labels": {"scaletier-stack": "dev"}}
    urn = "urn:pulumi:prod::scaletier::gcp:compute/instance:Instance::master-0"
    resources = [{"urn": urn, "id": recorded, "type": "gcp:compute/instance:Instance", "outputs": outputs}]
    answer = {"deployment": {"resources": resources}}
    monkeypatch.setattr(orphans, "_pulumi", lambda *args: "prod" if "--show-name" in args else answer)
    leftovers, _ = orphans.of_stack(lambda key: "my-project-1" if key == "gcp:project" else config(fake, key))
    assert [leftover.id for leftover in leftovers] == [orphan]


@pytest.mark.parametrize(
    ("resources", "flags", "deleted"),
    [
        ([], ["--delete"], False),
        ([{"id": "x", "type": "pulumi:pulumi:Stack"}], ["--delete"], False),
        ([], ["--delete", "--state-is-lost"], True),
        ([{"id": "x", "type": "gcp:compute/instance:Instance"}], ["--delete"], True),
    ],
)
def test_resources_that_may_be_another_states_are_not_deleted(
    monkeypatch: pytest.MonkeyPatch, resources: list[dict[str, str]], flags: list[str], deleted: bool
) -> None:
    answers = {"config": {"gcp:project": {"value": "my-project-1"}}, "stack": {"deployment": {"resources": resources}}}
    monkeypatch.setattr(orphans, "_pulumi", lambda *args: "dev" if "--show-name" in args else answers[args[0]])
    monkeypatch.setattr(orphans, "find_orphans", lambda *_: [])
    deletions: list[object] = []
    monkeypatch.setattr(orphans, "delete", lambda leftovers, _: deletions.append(leftovers))
    if deleted:
        orphans.main(flags)
    else:
        with pytest.raises(SystemExit, match="another state may have resources of its name"):
            orphans.main(flags)
    assert bool(deletions) is deleted


class Client:
    """A session of Google's APIs: the status of each deletion and the answers to later requests, by URL."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.deletions: dict[str, int | Exception] = {}
        self.answers: dict[str, list[int]] = {}
        self.clock = Clock()
        time = SimpleNamespace(monotonic=self.clock, sleep=self.sleep)
        monkeypatch.setattr(orphans, "time", time)
        monkeypatch.setattr(orphans, "session", lambda _: self)

    def sleep(self, seconds: float) -> None:
        self.calls.append(f"sleep {seconds:g}")
        self.clock.sleep(seconds)

    def delete(self, url: str, timeout: float) -> SimpleNamespace:
        self.calls.append(f"delete {url}")
        status = self.deletions.get(url, 200)
        if isinstance(status, Exception):
            raise status
        return SimpleNamespace(ok=status == 200, status_code=status, text=f" no: {'x' * 400} ")

    def get(self, url: str, params: object, timeout: float) -> requests.Response:
        self.calls.append(f"get {url}")
        statuses = self.answers.get(url, [404])
        answer = requests.Response()
        answer.status_code = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        answer._content = b'{"error": {"message": "denied"}}'
        return answer


FIRST, SECOND, NETWORK = (
    Orphan("instance", "x/st-a", "http://a"),
    Orphan("instance", "x/st-b", "http://b"),
    Orphan("network", "x/st-n", "http://n"),
)


def no_configuration(_: str) -> str | None:
    return None


def test_orphans_are_deleted_kind_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(monkeypatch)
    client.answers = {"http://b": [200, 404]}
    client.deletions = {"http://n": 404}
    orphans.delete([FIRST, SECOND, NETWORK], no_configuration)
    assert client.calls == [
        "delete http://a",
        "delete http://b",
        "get http://a",
        "get http://b",
        "sleep 2",
        "get http://a",
        "get http://b",
        "delete http://n",
        "get http://n",
    ]


@pytest.mark.parametrize(
    ("deletion", "answers", "error"),
    [
        (403, [404], f"instance st-a cannot be deleted: HTTP 403 no: {'x' * 296}"),
        (requests.ConnectionError("x"), [404], "instance st-a cannot be deleted (ConnectionError): try again"),
        (google.auth.exceptions.TransportError("x"), [404], "instance st-a cannot be deleted (TransportError): try again"),
        (200, [403], "denied"),
        (200, [200], "instance st-a, st-b: not gone after 300 s"),
    ],
)
def test_a_refused_or_endless_deletion_is_an_error(
    monkeypatch: pytest.MonkeyPatch, deletion: int | Exception, answers: list[int], error: str
) -> None:
    client = Client(monkeypatch)
    client.deletions, client.answers = {"http://a": deletion}, {"http://a": answers}
    began = client.clock()
    with pytest.raises(GcpError) as caught:
        orphans.delete([FIRST, SECOND, NETWORK], no_configuration)
    assert str(caught.value) == error
    assert client.clock() - began == (302 if answers == [200] else 0)


def test_the_selected_stack_is_asked_of_pulumi(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    answers = {"config": '{"gcp:project": {"value": "p"}, "gcp:secret": null}', "stack": "dev\n"}

    def ask(root: Path, *words: str) -> str:
        assert root == orphans.ROOT
        asked.append(words)
        return answers[words[0]]

    monkeypatch.setattr(backend, "run_pulumi", ask)
    get = orphans.configuration()
    assert [get(key) for key in ("gcp:project", "gcp:secret", "gcp:zone")] == ["p", None, None]
    assert orphans._pulumi("stack", "--show-name") == "dev"
    assert asked == [("config", "--json", "--show-secrets"), ("stack", "--show-name")]


@pytest.mark.parametrize(("arguments", "verb"), [([], "left"), (["--delete"], "deleted")])
def test_each_orphan_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], verb: str
) -> None:
    deleted: list[Orphan] = []
    monkeypatch.setattr(orphans, "configuration", lambda: no_configuration)
    monkeypatch.setattr(orphans, "of_stack", lambda _: ([FIRST, NETWORK], True))
    monkeypatch.setattr(orphans, "delete", lambda resources, _: deleted.extend(resources))
    orphans.main(arguments)
    assert capsys.readouterr().out == f"{verb}: instance st-a\n{verb}: network st-n\n"
    assert deleted == ([FIRST, NETWORK] if arguments else [])
