"""The owner of an LXD project: a renamed stack keeps its cluster, and no stack adopts another's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from infra.lxd import identity, orphans, project
from infra.lxd.api import LxdError
from infra.lxd.layout import LxdNames
from infra.lxd.project import StackProject, retained_project
from infra.state import StackState

CHECKOUT = Path("/home/me/scaletier")


def state(**resources: dict[str, str]) -> StackState:
    return StackState(
        {
            f"urn::{kind}": {"type": f"pulumi-python:dynamic/lxd:{kind}", "outputs": properties}
            for kind, properties in resources.items()
        }
    )


@pytest.fixture
def stack_projects(monkeypatch: pytest.MonkeyPatch) -> list[StackProject]:
    """Return the list of this machine's projects, for tests to fill."""
    known: list[StackProject] = []
    monkeypatch.setattr(project, "stack_projects", lambda: known)
    monkeypatch.setattr(orphans, "stack_projects", lambda: known)
    return known


def test_a_stack_s_names_come_from_its_state(stack_projects: list[StackProject]) -> None:
    stack_projects.append(StackProject("scaletier-prod-000000", "prod", str(CHECKOUT), retained=True))
    stack_state = state(Identity={"project": "scaletier-local-abcdef"}, Project={"name": "scaletier-other-111111"})
    names = identity.names_of("prod", CHECKOUT, stack_state)
    assert (names.project, names.bridge, names.table) == ("scaletier-local-abcdef", "stabcdef", "scaletier_abcdef")
    assert (
        identity.names_of("prod", CHECKOUT, state(Project={"name": "scaletier-other-111111"})).project
        == "scaletier-other-111111"
    )


def test_a_new_stack_gets_a_unique_name_which_its_update_keeps(
    stack_projects: list[StackProject], monkeypatch: pytest.MonkeyPatch
) -> None:
    def new_names(stack: str = "My.Stack", root: Path = CHECKOUT) -> LxdNames:
        return identity.names_of(stack, root, StackState())

    interfaces = dict[str, object]()
    monkeypatch.setattr(identity.psutil, "net_if_addrs", lambda: interfaces)
    first = new_names()
    assert re.fullmatch(r"scaletier-my-stack-[0-9a-f]{6}", first.project)
    assert new_names() == first, "`pulumi up --plan` refuses other names than the preview's"
    assert first.stack_id not in {new_names("my-stack").stack_id, new_names(root=Path("/elsewhere")).stack_id}
    stack_projects.append(StackProject(first.project, "renamed", str(CHECKOUT), retained=False))
    second = new_names()
    assert second.stack_id != first.stack_id
    interfaces[second.bridge] = []
    assert new_names().stack_id not in {first.stack_id, second.stack_id}, "another LXD on this machine has that bridge"
    interfaces.clear()
    monkeypatch.setenv("PULUMI_BACKEND_URL", "gs://team")
    assert new_names().stack_id not in {first.stack_id, second.stack_id}


def test_a_retained_bucket_is_adopted_by_the_next_stack_of_its_name(stack_projects: list[StackProject], tmp_path: Path) -> None:
    stack_projects += [
        StackProject("scaletier-local-000000", "local", str(tmp_path), retained=True),
        StackProject("scaletier-local-111111", "local", "/gone/scaletier", retained=True),
        StackProject("scaletier-local-222222", "local", str(CHECKOUT), retained=True),
    ]
    assert identity.names_of("local", CHECKOUT, StackState()).project == "scaletier-local-222222"
    assert retained_project(stack_projects[:2], "local", CHECKOUT) == "scaletier-local-111111", "the checkout was moved"
    assert retained_project(stack_projects[:1], "local", CHECKOUT) is None, "it belongs to another existing checkout"
    assert retained_project(stack_projects, "prod", CHECKOUT) is None


def test_a_checkout_without_read_permission_counts_as_existing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(Path, "exists", refuse)
    assert (
        retained_project(
            [StackProject("scaletier-local-000000", "local", "/home/other/scaletier", retained=True)], "local", CHECKOUT
        )
        is None
    )


def test_leftovers_of_a_destroy_are_listed_without_others(
    stack_projects: list[StackProject], monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    checkout = str(orphans.ROOT)
    stack_projects += [
        StackProject("scaletier-local-aaaaaa", "local", "/elsewhere", False),
        StackProject("scaletier-prod-bbbbbb", "prod", checkout, False),
    ]
    lines = [
        ["lxc monitor", "scaletier-local-aaaaaa_master-0"],
        ["dnsmasq", "--interface=stcccccc ", "x"],
        None,
        ["sleep", "1"],
    ]
    processes = [SimpleNamespace(pid=number, info={"cmdline": line}) for number, line in enumerate(lines)]
    networks = SimpleNamespace(all=lambda: [SimpleNamespace(name=name) for name in ("stbbbbbb", "stdddddd", "docker0")])
    monkeypatch.setattr(orphans, "client", lambda: SimpleNamespace(networks=networks))
    monkeypatch.setattr(orphans, "tables", lambda: ["scaletier_aaaaaa", "scaletier_cccccc", "filter"])
    monkeypatch.setattr(orphans.psutil, "net_if_addrs", lambda: {"stdddddd": [], "staaaaaam0": [], "start": []})
    monkeypatch.setattr(orphans.psutil, "process_iter", lambda _: processes)
    leftovers = ["network stdddddd", "nft table scaletier_cccccc", "process 1 (dnsmasq --interface=stcccccc  x)"]
    assert orphans.stack_objects("local") == leftovers
    assert orphans.stack_objects("prod") == ["project scaletier-prod-bbbbbb", "network stbbbbbb", *leftovers]
    stack_projects[1:] = [StackProject("scaletier-prod-bbbbbb", "prod", checkout, True)]
    assert orphans.stack_objects("prod")[0].endswith("(its retained bucket)")
    assert orphans.existing_names("prod") == [LxdNames("scaletier-prod-bbbbbb")]
    stack_projects.append(StackProject("scaletier-prod-ffffff", "prod", checkout, False, "gs://team"))
    assert len(orphans.existing_names("prod")) == 2
    monkeypatch.setenv("PULUMI_BACKEND_URL", "gs://team")
    assert orphans.existing_names("prod") == [LxdNames("scaletier-prod-ffffff")], "the project of the state in use"
    stack_projects[-1] = StackProject("scaletier-prod-ffffff", "prod", "/of/a/colleague", False, "gs://team")
    assert orphans.existing_names("prod") == [LxdNames("scaletier-prod-ffffff")]
    monkeypatch.delenv("PULUMI_BACKEND_URL")
    assert orphans.existing_names("prod") == [LxdNames("scaletier-prod-bbbbbb")]


def test_hosts_are_distinguished_from_retained_buckets(
    stack_projects: list[StackProject], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = str(orphans.ROOT)
    stack_projects += [
        StackProject("scaletier-local-aaaaaa", "local", checkout, retained=False),
        StackProject("scaletier-local-bbbbbb", "local", "/gone/scaletier", retained=True),
        StackProject("scaletier-prod-cccccc", "prod", checkout, retained=True),
    ]
    monkeypatch.setattr(orphans, "pool_of", {"scaletier-local-bbbbbb": "fast"}.get)
    assert orphans.main([]) == "scaletier-local-aaaaaa; scaletier-local-bbbbbb; scaletier-prod-cccccc"
    assert orphans.main(["--up"]) == "scaletier-local-aaaaaa"
    local, prod = orphans.main(["--kept"]).splitlines()
    assert "bucket of stack local is retained: the next stack of that name in /gone/scaletier reuses it" in local
    remove = (
        "lxc storage volume delete fast bucket --project scaletier-local-bbbbbb && lxc project delete scaletier-local-bbbbbb"
    )
    assert f"`{remove}` deletes it" in local
    assert "`lxc project delete scaletier-prod-cccccc` deletes it" in prod
    with pytest.raises(LxdError, match="the arguments are invalid"):
        orphans.main(["--claimed"])


def test_leftovers_under_the_name_of_a_new_stack(stack_projects: list[StackProject], tmp_path: Path) -> None:
    checkout, bucket = str(orphans.ROOT), " (its retained bucket)"
    stack_projects += [
        StackProject("scaletier-demo-aaaaaa", "demo", str(tmp_path), retained=True),
        StackProject("scaletier-demo-bbbbbb", "demo", str(tmp_path), retained=False),
        StackProject("scaletier-prod-cccccc", "prod", checkout, retained=False),
    ]
    assert orphans.main(["--claimed", "demo"]) == "", "it belongs to another existing checkout"
    stack_projects.append(StackProject("scaletier-demo-dddddd", "demo", "/gone/scaletier", retained=True))
    assert orphans.main(["--claimed", "demo"]) == f"project scaletier-demo-dddddd{bucket}"
    assert orphans.main(["--claimed", "prod"]) == "project scaletier-prod-cccccc"


def test_an_identity_keeps_its_project_and_deletes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    deleted: list[object] = []
    monkeypatch.setattr(project, "delete", lambda name, props: deleted.append((name, props)))
    props = {"project": "scaletier-local-abcdef"}
    assert identity.create(props) == ("scaletier-local-abcdef", props)
    assert identity.update("scaletier-local-abcdef", props, {"project": "scaletier-other-111111"}) == props
    identity.delete("scaletier-local-abcdef", props)
    assert deleted == [("scaletier-local-abcdef", props)]
