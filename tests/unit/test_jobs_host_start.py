"""Starts of stopped hosts: the requests, their frequency, and the reports of answers."""

from __future__ import annotations

import io
import urllib.error
from collections.abc import Callable
from email.message import Message
from http.client import BadStatusLine, IncompleteRead
from typing import Any

import pytest
from replicahosts import Clock

from jobs import host_start
from jobs.host_start import HostStarter, NoAnswerError, PowerError, StartClient
from jobs.records import Power

START, TOKEN, PREEMPTED = "https://compute/worker-0/start", "http://metadata/token", "http://metadata/preempted"
POWER = Power({"worker-0": START, "worker-1": START.replace("-0", "-1")}, TOKEN, PREEMPTED, {"Flavor": "G"})


class Broken(io.BytesIO):
    """A body that ends before its end."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def read(self, size: int | None = -1) -> bytes:
        raise self.error


class Web:
    """Answers by URL: bytes, or an HTTP status with a body; remembers what it was asked."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {TOKEN: b'{"access_token": "t1"}', START: b"{}", PREEMPTED: b"TRUE", **answers}
        self.asked: list[tuple[str, str, dict[str, str]]] = []

    def __call__(self, request: Any, timeout: float) -> Any:
        assert timeout == (20.0 if request.get_method() == "POST" else 5.0)
        self.asked.append((request.get_method(), request.full_url, dict(request.headers)))
        answer = self.answers[request.full_url]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, tuple):
            body = Broken(answer[1]) if isinstance(answer[1], Exception) else io.BytesIO(answer[1])
            raise urllib.error.HTTPError(request.full_url, answer[0], "Refused", Message(), body)
        return io.BytesIO(answer)


Put = Callable[[Web], Web]


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Put:
    def put(web: Web) -> Web:
        monkeypatch.setattr(host_start.urllib.request, "urlopen", web)
        return web

    return put


def test_a_host_is_started_by_a_post_with_the_host_s_own_token(put: Put) -> None:
    web = put(Web())
    assert StartClient(POWER).start("worker-0") == ""
    assert web.asked == [("GET", TOKEN, {"Flavor": "G"}), ("POST", START, {"Authorization": "Bearer t1"})]
    assert StartClient(POWER, lambda: "mine").start("worker-0") == ""
    assert web.asked[-1] == ("POST", START, {"Authorization": "Bearer mine"})
    assert StartClient(POWER).hosts == {"worker-0", "worker-1"}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((403, b'{"error": {"message": "Required\\n right"}}'), "HTTP 403, Required right"),
        ((502, b"<html>"), "HTTP 502, Refused"),
        (urllib.error.URLError(OSError("no route")), "compute does not answer (no route)"),
        (TimeoutError("timed out"), "compute does not answer (timed out)"),
        (b'{"error": {"errors": [{"code": "EXHAUSTED", "message": "none  left"}]}}', "EXHAUSTED: none left"),
        (b"no JSON", ""),
        (BadStatusLine("HTTP/9\r\n"), "compute does not answer (HTTP/9)"),
        (IncompleteRead(b"{", 9), "compute does not answer (IncompleteRead(1 bytes read, 9 more expected))"),
        ((503, IncompleteRead(b"{", 9)), "HTTP 503, Refused"),
    ],
)
def test_why_a_host_is_not_started_is_one_line(put: Put, answer: Any, said: str) -> None:
    put(Web(**{START: answer}))
    assert StartClient(POWER).start("worker-0") == said


@pytest.mark.parametrize("answer", [TimeoutError("timed out"), BadStatusLine("HTTP/9")])
def test_no_answer_differs_from_a_refusal(put: Put, answer: Exception) -> None:
    put(Web(**{START: answer}))
    with pytest.raises(NoAnswerError):
        StartClient(POWER).request_start("worker-0")
    put(Web(**{START: (503, b"{}")}))
    with pytest.raises(PowerError) as refused:
        StartClient(POWER).request_start("worker-0")
    assert not isinstance(refused.value, NoAnswerError)


@pytest.mark.parametrize("answer", [b"{}", b"[]", b"no JSON"])
def test_without_a_token_nobody_is_asked(put: Put, answer: bytes) -> None:
    web = put(Web(**{TOKEN: answer}))
    assert StartClient(POWER).start("worker-0") == f"{TOKEN} gives no token"
    assert [url for _, url, _ in web.asked] == [TOKEN]


@pytest.mark.parametrize(
    ("answer", "yes"),
    [(b"TRUE", True), (b"FALSE", False), ((404, b""), False), (OSError("x"), False), (BadStatusLine("x"), False)],
)
def test_a_host_asks_whether_it_is_taken_back(put: Put, answer: Any, yes: bool) -> None:
    put(Web(**{PREEMPTED: answer}))
    assert StartClient(POWER).preempted() is yes
    assert not StartClient(Power({}, TOKEN)).preempted()


class Site:
    """A starter whose API answers as it is told, at once or when `work` is called."""

    def __init__(self) -> None:
        self.clock, self.answer = Clock(), ""
        self.asked: list[str] = []
        self.work: list[Callable[[], None]] = []
        self.starter = HostStarter(self.start, ["worker-0", "worker-1"], self.clock, self.work.append)

    def start(self, host: str) -> str:
        self.asked.append(host)
        return self.answer

    def request_hosts(self, *hosts: str, seconds: int = 1) -> list[str]:
        """Return the reports while these are wanted, one poll a second."""
        said = []
        for _ in range(seconds):
            said += self.starter.request_hosts(hosts)
            while self.work:
                self.work.pop(0)()
            self.clock.pass_(1.0)
        return said


def test_a_start_request_is_repeated_with_backoff_and_logged_once() -> None:
    site = Site()
    assert site.request_hosts("worker-0", "ps-0", seconds=180) == ["worker-0 is being started"]
    assert site.asked == ["worker-0"] * 5, "at 0, 10, 30, 60 and 120 s"
    assert site.request_hosts(seconds=5) == []
    assert site.request_hosts("worker-0", seconds=2) == ["worker-0 is being started"], "it is off once more"


def test_a_host_that_is_back_before_anybody_looks_again_was_started_all_the_same() -> None:
    site = Site()
    assert site.request_hosts("worker-0") == []
    assert site.request_hosts() == ["worker-0 is being started"]
    assert site.request_hosts(seconds=3) == []


def test_a_refusal_is_logged_at_its_second_time_and_when_it_changes() -> None:
    site = Site()
    site.answer = "not off yet"
    assert site.request_hosts("worker-0", seconds=5) == []
    site.answer = "HTTP 403"
    said = "worker-0 is not started: HTTP 403; it is asked for again"
    assert site.request_hosts("worker-0", seconds=60) == [said]
    site.answer = ""
    assert site.request_hosts("worker-0", seconds=70) == ["worker-0 is being started"]


def test_an_unexpected_answer_does_not_end_the_requests() -> None:
    site = Site()
    work = site.start

    def start(host: str) -> str:
        work(host)
        raise RuntimeError("odd")

    site.starter = HostStarter(start, ["worker-0"], site.clock, site.work.append)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            site.request_hosts("worker-0")
        site.clock.pass_(60.0)
    assert site.asked == ["worker-0"] * 3


def test_requests_run_in_the_background_one_at_a_time_for_each_host() -> None:
    site = Site()
    for _ in range(100):
        assert site.starter.request_hosts(["worker-0", "worker-1"]) == []
        site.clock.pass_(1.0)
    assert len(site.work) == 2
    assert site.asked == []
