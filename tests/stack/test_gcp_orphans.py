"""Orphans at Google's: resources with a stack's names in no state, over all pages and in order."""

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
def nothing(fake: FakeGoogle) -> None:
    """Let the project have nothing, unless a test adds it."""
    for kind in (
        *(f"aggregated/{things}" for things in ("instances", "addresses", "routers", "subnetworks")),
        "global/firewalls",
        "global/networks",
    ):
        fake.answers[f"{ALL}/{kind}"] = (200, {})
    fake.answers["/v1/projects/my-project-1/serviceAccounts"] = (200, {})


def config(fake: FakeGoogle, key: str) -> str | None:
    return f"http://127.0.0.1:{fake.port}/v1/" if key == "gcp:iamCustomEndpoint" else fake.config(key)


def item(id_: str) -> dict[str, Any]:
    return {"name": id_.rpartition("/")[2], "selfLink": f"https://www.googleapis.com/compute/v1/{id_}"}


def test_they_are_found_by_the_stacks_own_names_and_by_no_others(fake: FakeGoogle) -> None:
    known, left, next_one = (
        f"projects/my-project-1/zones/z/instances/{PREFIX}-{name}" for name in ("ps-0", "ps-1", "worker-0")
    )
    others = f"projects/my-project-1/zones/z/instances/{PREFIX}x-ps-0"
    network = f"projects/my-project-1/global/networks/{PREFIX}"
    account = f"projects/my-project-1/serviceAccounts/{PREFIX}-ps@my-project-1.iam.gserviceaccount.com"
    page = {"zones/z": {"instances": [item(known), item(left), item(others)]}, "zones/y": {"warning": {}}}
    fake.answers[f"{ALL}/aggregated/instances"] = (200, {"items": page, "nextPageToken": "2"})
    fake.answers[f"{ALL}/aggregated/instances?pageToken=2"] = (200, {"items": {"zones/z": {"instances": [item(next_one)]}}})
    fake.answers[f"{ALL}/global/networks"] = (
        200,
        {"items": [item(network), item("projects/my-project-1/global/networks/default")]},
    )
    fake.answers["/v1/projects/my-project-1/serviceAccounts"] = (200, {"accounts": [{"name": account}]})
    found = orphans.leftovers("my-project-1", "dev", [known], lambda key: config(fake, key))
    base = f"http://127.0.0.1:{fake.port}"
    assert found == [
        Leftover("instance", left, f"{base}/compute/v1/{left}"),
        Leftover("instance", next_one, f"{base}/compute/v1/{next_one}"),
        Leftover("network", network, f"{base}/compute/v1/{network}"),
        Leftover("service account", account, f"{base}/v1/{account}"),
    ]


def test_what_is_in_the_state_as_a_pending_operation_alone_is_left(fake: FakeGoogle, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that was killed as it made worker-3, whatever the configuration became since."""
    made, pending = (f"projects/my-project-1/zones/z/instances/{PREFIX}-{name}" for name in ("master-0", "worker-3"))
    page = {"zones/z": {"instances": [item(made), item(pending)]}}
    fake.answers[f"{ALL}/aggregated/instances"] = (200, {"items": page})
    kind = "gcp:compute/instance:Instance"
    deployment = {
        "resources": [{"id": made, "type": kind}],
        "pending_operations": [{"type": "creating", "resource": {"urn": "urn::worker-3", "type": kind}}],
    }
    monkeypatch.setattr(orphans, "_pulumi", lambda *words: "dev" if "--show-name" in words else {"deployment": deployment})
    found, known = orphans.of_stack(lambda key: "my-project-1" if key == "gcp:project" else config(fake, key))
    assert [left.id for left in found] == [pending]
    assert known


@pytest.mark.parametrize(
    ("resources", "flags", "deleted"),
    [
        ([], ["--delete"], False),
        ([{"id": "x", "type": "pulumi:pulumi:Stack"}], ["--delete"], False),
        ([], ["--delete", "--state-is-lost"], True),
        ([{"id": "x", "type": "gcp:compute/instance:Instance"}], ["--delete"], True),
    ],
)
def test_nothing_is_deleted_that_may_be_another_person_s(
    monkeypatch: pytest.MonkeyPatch, resources: list[dict[str, str]], flags: list[str], deleted: bool
) -> None:
    answers = {"config": {"gcp:project": {"value": "my-project-1"}}, "stack": {"deployment": {"resources": resources}}}
    monkeypatch.setattr(orphans, "_pulumi", lambda *words: "dev" if "--show-name" in words else answers[words[0]])
    monkeypatch.setattr(orphans, "leftovers", lambda *_: [])
    gone: list[object] = []
    monkeypatch.setattr(orphans, "delete", lambda found, _: gone.append(found))
    if deleted:
        orphans.main(flags)
    else:
        with pytest.raises(SystemExit, match="another state may have what bears its name"):
            orphans.main(flags)
    assert bool(gone) is deleted
