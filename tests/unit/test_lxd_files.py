"""Files on hosts through LXD, of which only the answers are imitated."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from pylxd.exceptions import LXDAPIException, NotFound

from infra.lxd import files
from infra.lxd.api import LxdError

GONE = NotFound(SimpleNamespace(status_code=404, json=lambda: {"error": "not found"}))
ENDED = "read unix @->/var/lib/lxd/devices/p_ps-0/forkfile.sock: read: connection reset by peer"


def refusal(error: str) -> LXDAPIException:
    return LXDAPIException(SimpleNamespace(status_code=400, json=lambda: {"error": error}))


def test_a_folder_is_listed_on_either_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    def folder(names: object, daemon: str = "LXD", kind: str = "directory") -> Any:
        return SimpleNamespace(headers={f"X-{daemon}-type": kind}, content=json.dumps({"metadata": names}).encode())

    def get(params: dict[str, str]) -> Any:
        answer = answers[params["path"]]
        if isinstance(answer, Exception):
            answers[params["path"]] = folder(["d"])  # if it is asked again
            raise answer
        return answer

    host = SimpleNamespace(api=SimpleNamespace(files=SimpleNamespace(get=get)))
    answers: dict[str, Any] = {
        "/lxd": folder(["a", "b"]),
        "/incus": folder(["c"], "Incus"),
        "/empty": folder(None),
        "/file": folder(None, kind="file"),
        "/gone": GONE,
        "/refused": refusal("no"),
        "/ended": refusal(ENDED),
    }
    monkeypatch.setattr(files, "_PAUSE", 0.0)
    listed = [files.list_folder(host, path) for path in ("/lxd", "/incus", "/empty", "/file", "/gone", "/ended")]
    assert listed == [["a", "b"], ["c"], [], ["/file"], [], ["d"]]
    with pytest.raises(LXDAPIException):
        files.list_folder(host, "/refused")


@pytest.mark.parametrize(
    ("answers", "asked", "content"),
    [
        ([b"a"], 1, b"a"),
        ([GONE], 1, None),
        ([refusal(ENDED), b"a"], 2, b"a"),
        ([refusal(ENDED), GONE], 2, None),
        ([refusal(ENDED), refusal(ENDED), b"a"], 3, b"a"),
    ],
)
def test_a_file_is_asked_for_again_if_the_process_that_reads_it_ended(
    answers: list[Any], asked: int, content: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []

    def get(path: str) -> bytes:
        paths.append(path)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, bytes)
        return answer

    monkeypatch.setattr(files, "_PAUSE", 0.0)
    assert files.read_file(SimpleNamespace(files=SimpleNamespace(get=get)), "/bucket/a") == content
    assert paths == ["/bucket/a"] * asked


@pytest.mark.parametrize(
    ("answer", "asked", "error"),
    [
        (refusal(ENDED), 3, r"^LXD does not read a host's files, .*: try again$"),
        (NotFound(SimpleNamespace(status_code=404, json=lambda: {"error": f"not found: {ENDED}"})), 3, "^LXD does not read "),
        (refusal("the host is not running"), 1, "^the host is not running$"),
    ],
)
def test_a_file_that_lxd_refuses_is_an_error(
    answer: Exception, asked: int, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = []

    def get(*path: str, **params: object) -> bytes:
        requests.append((path, params))
        raise answer

    host = SimpleNamespace(files=SimpleNamespace(get=get), api=SimpleNamespace(files=SimpleNamespace(get=get)))
    monkeypatch.setattr(files, "_PAUSE", 0.0)
    for read in (files.read_file, files.list_folder):
        requests.clear()
        with pytest.raises((LXDAPIException, LxdError), match=error):
            read(host, "/bucket/a")
        assert len(requests) == asked
