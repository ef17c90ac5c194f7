"""The Pulumi state in use, its content, and the error line if it cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from shlex import quote
from typing import Any

import pytest

from infra import backend, doctor
from infra.findings import Finding


def test_the_checkout_s_own_state_has_no_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (backend.url(tmp_path), backend.other_backend_note(tmp_path)) == (f"file://{tmp_path}/.pulumi-state", "")
    monkeypatch.chdir(tmp_path)
    for url in (f"file://{tmp_path}/.pulumi-state/", "file://./.pulumi-state", f"file://{tmp_path}/.pulumi-state?x=y"):
        monkeypatch.setenv("PULUMI_BACKEND_URL", url)
        assert backend.is_own(tmp_path), url
    for other in ("gs://team", "file:///elsewhere", "https://api.pulumi.com"):
        monkeypatch.setenv("PULUMI_BACKEND_URL", other)
        assert backend.other_backend_note(tmp_path) == (
            f"the state in use is {other} (PULUMI_BACKEND_URL), not this checkout's .pulumi-state"
        )


def test_a_local_state_is_searched_for_a_name(tmp_path: Path) -> None:
    stacks = tmp_path / ".pulumi" / "stacks" / "scaletier"
    assert backend.mentions(f"file://{tmp_path}", "scaletier-local-abcdef") is False, "a missing state mentions nothing"
    stacks.mkdir(parents=True)
    (stacks / "local.json.gz").write_bytes(gzip.compress(b'{"project": "scaletier-local-abcdef"}'))
    (stacks / "prod.json.bak").write_text("scaletier-prod-111111")
    assert backend.mentions(f"file://{tmp_path}", "scaletier-local-abcdef")
    assert backend.mentions(f"file://{tmp_path}", "scaletier-prod-111111") is False
    assert backend.mentions("gs://team", "scaletier-local-abcdef") is None
    assert [backend.has_stack(f"file://{tmp_path}", name) for name in ("local", "loc", "prod")] == [True, False, False]


STATE = b'{"version": 3, "checkpoint": {}}'
"""The state of an empty stack."""


@pytest.mark.parametrize("end", ["", ".gz"])
def test_files_that_a_killed_pulumi_left_cut_off_are_named(tmp_path: Path, end: str) -> None:
    (stacks := tmp_path / ".pulumi/stacks/scaletier").mkdir(parents=True)
    whole = gzip.compress(STATE) if end else STATE
    cut, attributes, bak = whole[:-9], f".json{end}.attrs", f".json{end}.bak"
    for name, content in {
        f"well.json{end}": whole, f"well{attributes}": b"{}", f"well{bak}": cut,
        f"lost{attributes}": b"", f"lost.json{end}": whole, f"it's{attributes}": b'{"md5',
        f"mine.json{end}": cut, f"mine{bak}": whole, f"last.json{end}": b"", f"last{bak}": cut, f"new.json{end}": cut,
    }.items():  # fmt: skip
        (stacks / name).write_bytes(content)
    begin, no_copy = f"Pulumi was killed as it wrote {stacks}", "there is no readable backup of it"
    assert sorted(backend.damaged_files(f"file://{tmp_path}")) == sorted([
        (f"{begin}/lost{attributes}, and cannot read stack lost", f"rm {quote(f'{stacks}/lost{attributes}')}"),
        (f"{begin}/it's{attributes}, and cannot read stack it's", f"""rm '{stacks}/it'"'"'s{attributes}'"""),
        (
            f"the state of stack mine is truncated ({stacks}/mine.json{end}); Pulumi's backup of it is readable",
            f"cp {quote(f'{stacks}/mine{bak}')} {quote(f'{stacks}/mine.json{end}')}",
        ),
        (f"the state of stack last is truncated ({stacks}/last.json{end}); {no_copy}", ""),
        (f"the state of stack new is truncated ({stacks}/new.json{end}); {no_copy}", ""),
    ])  # fmt: skip


def test_a_state_elsewhere_or_that_may_not_be_read_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / ".pulumi/stacks/scaletier/local.json").mkdir(parents=True)
    assert [[*backend.damaged_files(url)] for url in ("gs://team", f"file://{tmp_path}", f"file://{tmp_path}/none")] == [
        [],
        [],
        [],
    ]


def test_an_unreadable_state_may_mention_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def walk(_: Path, onerror: Any) -> list[Any]:
        onerror(PermissionError())
        return []

    monkeypatch.setattr("os.walk", walk)
    assert backend.mentions(f"file://{tmp_path}", "scaletier-local-abcdef") is None


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"PULUMI_CONFIG_PASSPHRASE": ""}, "PULUMI_CONFIG_PASSPHRASE is empty: set it to the passphrase of its stack"),
        ({"PULUMI_CONFIG_PASSPHRASE": "no"}, "PULUMI_CONFIG_PASSPHRASE is not the passphrase of its stack"),
        ({"PULUMI_CONFIG_PASSPHRASE_FILE": "/nowhere"}, "PULUMI_CONFIG_PASSPHRASE_FILE is invalid: /nowhere does not exist"),
        (
            {"PULUMI_CONFIG_PASSPHRASE_FILE": __file__},
            f"PULUMI_CONFIG_PASSPHRASE_FILE is invalid: {__file__} is not the passphrase of its stack",
        ),
        ({}, "its stack has a passphrase: set PULUMI_CONFIG_PASSPHRASE or PULUMI_CONFIG_PASSPHRASE_FILE"),
    ],
)
def test_a_wrong_passphrase_is_named(
    env: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = "failed to decrypt: incorrect passphrase, please set PULUMI_CONFIG_PASSPHRASE to the correct passphrase"
    for name, value in {"PULUMI_BACKEND_URL": "gs://team", **env}.items():
        monkeypatch.setenv(name, value)
    prefix = "the state in gs://team (PULUMI_BACKEND_URL) cannot be read: "
    assert backend.explain(tmp_path, error) == prefix + message
    assert backend.explain(tmp_path, "no such bucket") == f"{prefix}no such bucket"


def test_a_wrong_passphrase_file_of_the_checkout_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULUMI_CONFIG_PASSPHRASE_FILE", str(tmp_path / ".pulumi-state" / "passphrase"))
    prefix = "the state in .pulumi-state of this checkout cannot be read: "
    assert backend.explain(tmp_path, "incorrect passphrase").startswith(f"{prefix}PULUMI_CONFIG_PASSPHRASE_FILE is invalid: ")
    (tmp_path / ".pulumi-state").mkdir()
    (tmp_path / ".pulumi-state" / "passphrase").write_text("x")
    assert backend.explain(tmp_path, "incorrect passphrase") == (
        f"{prefix}.pulumi-state/passphrase is not the passphrase of its stack"
    )


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"PULUMI_CONFIG_PASSPHRASE": ""}, "PULUMI_CONFIG_PASSPHRASE"),
        ({"PULUMI_CONFIG_PASSPHRASE": "another"}, "PULUMI_CONFIG_PASSPHRASE"),
        ({"PULUMI_CONFIG_PASSPHRASE_FILE": "/nowhere"}, "PULUMI_CONFIG_PASSPHRASE_FILE"),
        ({"PULUMI_CONFIG_PASSPHRASE": "secret", "PULUMI_CONFIG_PASSPHRASE_FILE": "/nowhere"}, ""),
        ({"PULUMI_CONFIG_PASSPHRASE": "", "PULUMI_BACKEND_URL": "gs://team"}, ""),
        ({}, ""),
    ],
)
def test_an_unused_passphrase_variable_is_named(
    env: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    assert backend.unused_passphrase_warning(tmp_path) == "", "the checkout has no passphrase"
    (tmp_path / ".pulumi-state").mkdir()
    (passphrase_file := tmp_path / ".pulumi-state" / "passphrase").write_text("secret\n")
    line = f"{name} is not used: the stacks of this checkout have the passphrase in .pulumi-state/passphrase"
    assert backend.unused_passphrase_warning(tmp_path) == (line if name else "")
    monkeypatch.delenv("PULUMI_CONFIG_PASSPHRASE", raising=False)
    monkeypatch.setenv("PULUMI_CONFIG_PASSPHRASE_FILE", str(passphrase_file))
    assert backend.unused_passphrase_warning(tmp_path) == ""


def test_pulumi_s_reason_is_one_line() -> None:
    assert backend.reason("warning: x\n\nerror: it is full\nmore\n") == "it is full"
    assert (backend.reason("a\nb\n"), backend.reason("")) == ("b", "it failed")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkout with the inventory of stack local."""
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    (folder := tmp_path / ".scaletier" / "local").mkdir(parents=True)
    (folder / "inventory.json").write_text("of this cluster")
    return tmp_path


def state(monkeypatch: pytest.MonkeyPatch, answer: str | backend.BackendError, *pending: str) -> list[Finding]:
    def ask(_: Path, *words: str) -> str:
        assert words == ("stack", "export", "--show-secrets", "--stack", "local")
        if isinstance(answer, backend.BackendError):
            raise answer
        outputs = {"inventory": {"plaintext": json.dumps(answer)}}
        operations = [{"type": "creating", "resource": {"urn": f"urn:pulumi:local::x::y::{name}"}} for name in pending]
        resources = [{"type": "pulumi:pulumi:Stack", "outputs": outputs}]
        return json.dumps({"deployment": {"resources": resources, "pending_operations": operations}})

    monkeypatch.setattr(backend, "run_pulumi", ask)
    return list(doctor.state("local"))


def test_the_doctor_names_the_state_and_compares_its_hosts(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = state(monkeypatch, "of this cluster")
    assert (finding.severity, finding.what) == ("ok", "the state in use is this checkout's, .pulumi-state")
    first, _ = state(monkeypatch, "of this cluster", "worker-1", "worker-2")
    assert first.what == "an update did not end, and the state has worker-1, worker-2 as pending"
    assert first.remedy == "pulumi up, then pulumi refresh --clear-pending-creates"
    (finding,) = state(monkeypatch, "of another")
    assert (finding.severity, finding.remedy) == ("warning", "fab connect")
    (finding,) = state(monkeypatch, backend.BackendError("the state in x cannot be read: incorrect passphrase"))
    assert (finding.severity, finding.what) == ("error", "the state in x cannot be read: incorrect passphrase")


def test_the_doctor_names_a_file_that_a_killed_pulumi_left_cut_off(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (stacks := checkout / ".pulumi-state/.pulumi/stacks/scaletier").mkdir(parents=True)
    (file := stacks / "local.json.attrs").touch()
    cut_off = Finding(
        "error",  # type: ignore[arg-type]
        f"Pulumi was killed as it wrote {file}, and cannot read stack local",
        f"rm {quote(str(file))}",
    )
    assert state(monkeypatch, backend.BackendError("the state in x cannot be read: failed to load checkpoint: EOF")) == [
        cut_off
    ]
    assert next(iter(doctor.state(None))) == cut_off, "before the first hosts"
    file.rename(file.with_name("local2.json.attrs"))
    assert len(state(monkeypatch, backend.BackendError("the passphrase is wrong"))) == 2, "it is of another stack"
    file.with_name("local2.json.attrs").unlink()
    assert [finding.severity for finding in state(monkeypatch, "of this cluster")] == ["ok"]


def test_another_state_without_the_stack_is_a_warning_with_a_remedy(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULUMI_BACKEND_URL", "gs://team")
    error = backend.BackendError("the state in gs://team cannot be read: no stack named 'local' found")
    (finding,) = state(monkeypatch, error)
    assert (finding.severity, finding.remedy) == ("warning", "set PULUMI_BACKEND_URL to the state that has it")
    assert finding.what.startswith("the state in use is gs://team (PULUMI_BACKEND_URL)")
    assert "it has no stack local, whose hosts are in the local inventory" in finding.what
    (stacks := checkout / ".pulumi-state/.pulumi/stacks/scaletier").mkdir(parents=True)
    (stacks / "local.json").touch()
    (finding,) = state(monkeypatch, error)
    assert finding.remedy == "unset PULUMI_BACKEND_URL"
    (checkout / ".scaletier/local/inventory.json").unlink()
    assert state(monkeypatch, error) == []


def test_an_error_common_to_several_checks_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> list[Finding]:
        raise backend.BackendError("the state cannot be read")

    monkeypatch.setattr(doctor, "checks", lambda _: {"state": fails, "orphans": fails})
    doctor.main([])
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_pulumi_runs_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (program := tmp_path / "bin" / "pulumi").write_text(
        '#!/bin/sh\necho "$@"; pwd; [ "$1" = stack ] || { echo "error: no" >&2; exit 1; }'
    )
    program.chmod(0o755)
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    (project := tmp_path / "project").mkdir()
    monkeypatch.chdir(project)
    assert backend.run_pulumi(tmp_path, "stack", "ls") == f"stack ls --non-interactive\n{project}\n"
    with pytest.raises(backend.BackendError, match=r"^the state in \.pulumi-state of this checkout cannot be read: no$"):
        backend.run_pulumi(tmp_path, "config")
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(backend.BackendError, match=r"pulumi does not run .*: make pulumi"):
        backend.run_pulumi(tmp_path, "config")
