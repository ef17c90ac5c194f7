"""The client of LXD's API, and its errors as one line each; pylxd is a fake here."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pylxd
import pytest
import requests
from pylxd.exceptions import ClientConnectionFailed, LXDAPIException, NotFound

from infra.lxd import api
from infra.lxd.api import LxdError


def _refusal(status: int, text: str) -> Any:
    return SimpleNamespace(status_code=status, text=text, json=lambda: {"error": text})


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return the endpoint and project of each client that is made; no thread has any yet."""
    opened: list[tuple[str, str]] = []

    def make(endpoint: str, project: str) -> SimpleNamespace:
        opened.append((endpoint, project))
        instances = [SimpleNamespace(name=f"{name}?project={project}") for name in ("ps-0", "mine")]
        exists = {"scaletier-local-abcdef": True}.get
        return SimpleNamespace(
            projects=SimpleNamespace(exists=lambda name: exists(name, False)), instances=SimpleNamespace(all=lambda: instances)
        )

    monkeypatch.setattr(pylxd, "Client", make)
    monkeypatch.setattr(api, "socket_path", lambda: "/run/incus/unix.socket")
    monkeypatch.setattr(api, "_local", threading.local())
    return opened


def test_a_thread_has_one_client_of_each_project(opened: list[tuple[str, str]]) -> None:
    endpoint = "http+unix://%2Frun%2Fincus%2Funix.socket"
    assert api.client() is api.client("default")
    assert api.client("p") is api.client("p")
    assert opened == [(endpoint, "default"), (endpoint, "p")]
    thread = threading.Thread(target=api.client)
    thread.start()
    thread.join()
    assert opened[2:] == [(endpoint, "default")]


@pytest.mark.usefixtures("opened")
def test_hosts_have_their_names_without_the_project() -> None:
    assert api.hosts_of("scaletier-local-abcdef") == ["ps-0", "mine"]
    assert api.hosts_of("scaletier-gone-111111") == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ClientConnectionFailed("no"), "LXD does not answer: start it with `make lxd`"),
        (LXDAPIException(_refusal(400, "Device\n is busy")), "host ps-0: Device is busy"),
        (
            LXDAPIException(_refusal(500, "write: No space left on device")),
            "host ps-0: the disk is full: free some, or destroy another stack (write: No space left on device)",
        ),
        (
            requests.exceptions.ConnectionError("reset"),
            "host ps-0: LXD stopped answering: start it with `make lxd`, then try again",
        ),
    ],
)
def test_an_error_of_lxd_is_one_line_with_the_failed_action(error: Exception, message: str) -> None:
    with pytest.raises(LxdError) as caught, api.errors("host ps-0"):
        raise error
    assert str(caught.value) == message


def test_only_an_answer_that_says_so_means_that_an_object_is_missing() -> None:
    assert api.is_not_found(NotFound(_refusal(404, "")))
    assert api.is_not_found(LXDAPIException(_refusal(400, "Storage volume Not Found")))
    assert not api.is_not_found(LXDAPIException(_refusal(400, "Device is busy")))
