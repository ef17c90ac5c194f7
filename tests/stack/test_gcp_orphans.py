"""Find orphans at Google: resources with a stack's names in no state, over all pages and in order."""

from __future__ import annotations

from typing import Any

import pytest
from fakegoogle import FakeGoogle

from infra.gcp import orphans
from infra.gcp.names import names
from infra.gcp.orphans import Leftover

PREFIX = names("my-project-1", "dev").prefix
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


def config(fake: FakeGoogle, key: str) -> str | None:
    return f"http://127.0.0.1:{fake.port}/v1/" if key == "gcp:iamCustomEndpoint" else fake.config(key)


def item(id_: str) -> dict[str, Any]:
    return {"name": id_.rpartition("/")[2], "selfLink": f"https://www.googleapis.com/compute/v1/{id_}"}


def test_orphans_are_found_by_the_stacks_own_names_only(fake: FakeGoogle) -> None:
    recorded, orphan, on_next_page = (
        f"projects/my-project-1/zones/z/instances/{PREFIX}-{name}" for name in ("ps-0", "ps-1", "worker-0")
    )
    of_another_stack = f"projects/my-project-1/zones/z/instances/{PREFIX}x-ps-0"
    network = f"projects/my-project-1/global/networks/{PREFIX}"
    account = f"projects/my-project-1/serviceAccounts/{PREFIX}-ps@my-project-1.iam.gserviceaccount.com"
    page = {"zones/z": {"instances": [item(recorded), item(orphan), item(of_another_stack)]}, "zones/y": {"warning": {}}}
    fake.answers[f"{ALL}/aggregated/instances"] = (200, {"items": page, "nextPageToken": "2"})
    fake.answers[f"{ALL}/aggregated/instances?pageToken=2"] = (200, {"items": {"zones/z": {"instances": [item(on_next_page)]}}})
    fake.answers[f"{ALL}/global/networks"] = (
        200,
        {"items": [item(network), item("projects/my-project-1/global/networks/default")]},
    )
    fake.answers["/v1/projects/my-project-1/serviceAccounts"] = (200, {"accounts": [{"name": account}]})
    leftovers = orphans.leftovers("my-project-1", "dev", [recorded], lambda key: config(fake, key))
    base = f"http://127.0.0.1:{fake.port}"
    assert leftovers == [
        Leftover("instance", orphan, f"{base}/compute/v1/{orphan}"),
        Leftover("instance", on_next_page, f"{base}/compute/v1/{on_next_page}"),
        Leftover("network", network, f"{base}/compute/v1/{network}"),
        Leftover("service account", account, f"{base}/v1/{account}"),
    ]


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
    monkeypatch.setattr(orphans, "leftovers", lambda *_: [])
    deletions: list[object] = []
    monkeypatch.setattr(orphans, "delete", lambda leftovers, _: deletions.append(leftovers))
    if deleted:
        orphans.main(flags)
    else:
        with pytest.raises(SystemExit, match="another state may have what bears its name"):
            orphans.main(flags)
    assert bool(deletions) is deleted
