"""The owner of an LXD project: a changed name makes no other cluster, and no stack adopts another's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from infra.lxd import identity, orphans, project
from infra.lxd.api import LxdError
from infra.lxd.layout import LxdNames
from infra.lxd.project import Owner, retained_project
from infra.state import StackState

HERE = Path("/home/me/scaletier")


def state(**resources: dict[str, str]) -> StackState:
    return StackState(
        {f"urn::{kind}": {"type": f"pulumi-python:dynamic/lxd:{kind}", "outputs": it} for kind, it in resources.items()}
    )


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> list[Owner]:
    """Return the projects on this machine, as a test sets them."""
    found: list[Owner] = []
    monkeypatch.setattr(project, "owners", lambda: found)
    monkeypatch.setattr(orphans, "owners", lambda: found)
    return found


def test_the_state_says_what_a_stack_is_called(owners: list[Owner]) -> None:
    owners.append(Owner("scaletier-prod-000000", "prod", str(HERE), kept=True))
    there = state(Identity={"project": "scaletier-local-abcdef"}, Project={"name": "scaletier-other-111111"})
    found = identity.names_of("prod", HERE, there)
    assert (found.project, found.bridge, found.table) == ("scaletier-local-abcdef", "stabcdef", "scaletier_abcdef")
    assert (
        identity.names_of("prod", HERE, state(Project={"name": "scaletier-other-111111"})).project == "scaletier-other-111111"
    )


def test_a_new_stack_is_called_as_no_other(owners: list[Owner]) -> None:
    owners.append(Owner("scaletier-my-stack-000000", "My.Stack", str(HERE), kept=False))
    first, second = (identity.names_of("My.Stack", HERE, StackState()) for _ in range(2))
    assert re.fullmatch(r"scaletier-my-stack-[0-9a-f]{6}", first.project)
    assert first != second != LxdNames("scaletier-my-stack-000000"), "that one is up, of a stack that was renamed since"


def test_a_retained_bucket_is_adopted_by_the_next_stack_of_its_name(owners: list[Owner], tmp_path: Path) -> None:
    owners += [
        Owner("scaletier-local-000000", "local", str(tmp_path), kept=True),
        Owner("scaletier-local-111111", "local", "/gone/scaletier", kept=True),
        Owner("scaletier-local-222222", "local", str(HERE), kept=True),
    ]
    assert identity.names_of("local", HERE, StackState()).project == "scaletier-local-222222"
    assert retained_project(owners[:2], "local", HERE) == "scaletier-local-111111", "its checkout was moved"
    assert retained_project(owners[:1], "local", HERE) is None, "another checkout's, which is there"
    assert retained_project(owners, "prod", HERE) is None


def test_a_checkout_where_one_may_not_look_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(Path, "exists", denied)
    assert (
        retained_project([Owner("scaletier-local-000000", "local", "/home/other/scaletier", kept=True)], "local", HERE) is None
    )


def test_leftovers_of_a_destroy_are_listed_without_others(owners: list[Owner], monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    here = str(orphans.ROOT)
    owners += [
        Owner("scaletier-local-aaaaaa", "local", "/elsewhere", False),
        Owner("scaletier-prod-bbbbbb", "prod", here, False),
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
    astray = ["network stdddddd", "nft table scaletier_cccccc", "process 1 (dnsmasq --interface=stcccccc  x)"]
    assert orphans.leftovers("local") == astray
    assert orphans.leftovers("prod") == ["project scaletier-prod-bbbbbb", "network stbbbbbb", *astray]
    owners[1:] = [Owner("scaletier-prod-bbbbbb", "prod", here, True)]
    assert orphans.leftovers("prod")[0].endswith("(its bucket, which was to be retained)")
    assert orphans.own("prod") == [LxdNames("scaletier-prod-bbbbbb")]
    owners.append(Owner("scaletier-prod-ffffff", "prod", here, False, "gs://team"))
    assert len(orphans.own("prod")) == 2
    monkeypatch.setenv("PULUMI_BACKEND_URL", "gs://team")
    assert orphans.own("prod") == [LxdNames("scaletier-prod-ffffff")], "that of the state in use"
    owners[-1] = Owner("scaletier-prod-ffffff", "prod", "/of/a/colleague", False, "gs://team")
    assert orphans.own("prod") == [LxdNames("scaletier-prod-ffffff")]
    monkeypatch.delenv("PULUMI_BACKEND_URL")
    assert orphans.own("prod") == [LxdNames("scaletier-prod-bbbbbb")]


def test_hosts_are_distinguished_from_retained_buckets(owners: list[Owner], monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(orphans.ROOT)
    owners += [
        Owner("scaletier-local-aaaaaa", "local", here, kept=False),
        Owner("scaletier-local-bbbbbb", "local", "/gone/scaletier", kept=True),
        Owner("scaletier-prod-cccccc", "prod", here, kept=True),
    ]
    monkeypatch.setattr(orphans, "pool_of", {"scaletier-local-bbbbbb": "fast"}.get)
    assert orphans.main([]) == "scaletier-local-aaaaaa; scaletier-local-bbbbbb; scaletier-prod-cccccc"
    assert orphans.main(["--up"]) == "scaletier-local-aaaaaa"
    local, prod = orphans.main(["--kept"]).splitlines()
    assert "bucket of stack local stays: the next stack of that name in /gone/scaletier uses it" in local
    remove = (
        "lxc storage volume delete fast bucket --project scaletier-local-bbbbbb && lxc project delete scaletier-local-bbbbbb"
    )
    assert f"`{remove}` removes it" in local
    assert "`lxc project delete scaletier-prod-cccccc` removes it" in prod
    with pytest.raises(LxdError, match="say a stack"):
        orphans.main(["--claimed"])


def test_what_a_new_stack_of_a_name_finds(owners: list[Owner], tmp_path: Path) -> None:
    here, bucket = str(orphans.ROOT), " (its bucket, which was to be retained)"
    owners += [
        Owner("scaletier-demo-aaaaaa", "demo", str(tmp_path), kept=True),
        Owner("scaletier-demo-bbbbbb", "demo", str(tmp_path), kept=False),
        Owner("scaletier-prod-cccccc", "prod", here, kept=False),
    ]
    assert orphans.main(["--claimed", "demo"]) == "", "another checkout's, which is there"
    owners.append(Owner("scaletier-demo-dddddd", "demo", "/gone/scaletier", kept=True))
    assert orphans.main(["--claimed", "demo"]) == f"project scaletier-demo-dddddd{bucket}"
    assert orphans.main(["--claimed", "prod"]) == "project scaletier-prod-cccccc"
