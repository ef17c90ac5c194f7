"""Starts of stopped hosts: the requests, their frequency, and the reports of answers."""

from __future__ import annotations

import io
import threading
import urllib.error
from collections.abc import Callable
from email.message import Message
from http.client import BadStatusLine, IncompleteRead
from queue import SimpleQueue
from typing import Any

import pytest
from shared_fakes import Clock
from waiting import limit

from jobs import host_power
from jobs.host_power import HostStarter, NoAnswerError, PowerError, StartClient
from jobs.records import Power

START, TOKEN, PREEMPTED = "https://compute/worker-0/start", "http://metadata/token", "http://metadata/preempted"
POWER = Power({"worker-0": START, "worker-1": START.replace("-0", "-1")}, TOKEN, PREEMPTED, {"Flavor": "G"})


class TruncatedBody(io.BytesIO):
    """A body that ends before its end."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def read(self, size: int | None = -1) -> bytes:
        raise self.error


class FakeWeb:
    """Answers by URL: bytes, or an HTTP status with a body; records its requests."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {TOKEN: b'{"access_token": "t1"}', START: b"{}", PREEMPTED: b"TRUE", **answers}
        self.requests: list[tuple[str, str, dict[str, str]]] = []

    def __call__(self, request: Any, timeout: float) -> Any:
        assert timeout == (20.0 if request.get_method() == "POST" else 5.0)
        self.requests.append((request.get_method(), request.full_url, dict(request.headers)))
        answer = self.answers[request.full_url]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, tuple):
            body = TruncatedBody(answer[1]) if isinstance(answer[1], Exception) else io.BytesIO(answer[1])
            raise urllib.error.HTTPError(request.full_url, answer[0], "Refused", Message(), body)
        return io.BytesIO(answer)


InstallWeb = Callable[[FakeWeb], FakeWeb]


@pytest.fixture
def install_web(monkeypatch: pytest.MonkeyPatch) -> InstallWeb:
    def install_web(web: FakeWeb) -> FakeWeb:
        monkeypatch.setattr("urllib.request.urlopen", web)
        return web

    return install_web


def test_a_host_is_started_by_a_post_with_the_host_s_own_token(install_web: InstallWeb) -> None:
    web = install_web(FakeWeb())
    assert StartClient(POWER).start("worker-0") == ""
    assert web.requests == [("GET", TOKEN, {"Flavor": "G"}), ("POST", START, {"Authorization": "Bearer t1"})]
    assert StartClient(POWER, lambda: "mine").start("worker-0") == ""
    assert web.requests[-1] == ("POST", START, {"Authorization": "Bearer mine"})
    assert StartClient(POWER).hosts == {"worker-0", "worker-1"}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((403, b'{"error": {"message": "Required\\n right"}}'), "HTTP 403, Required right"),
        ((502, b"<html>"), "HTTP 502, Refused"),
        (urllib.error.URLError(OSError("no route")), "compute does not answer (no route)"),
        (TimeoutError("timed out"), "compute does not answer (timed out)"),
        (b'{"error": {"errors": [{"code": "EXHAUSTED", "message": "none  left"}]}}', "EXHAUSTED: none left"),
        (b'{"error": {"errors": [{"code": "A"}, {"code": "B", "message": "b"}]}}', "A: ; B: b"),
        (b"no JSON", ""),
        (BadStatusLine("HTTP/9\r\n"), "compute does not answer (HTTP/9)"),
        (IncompleteRead(b"{", 9), "compute does not answer (IncompleteRead(1 bytes read, 9 more expected))"),
        ((503, IncompleteRead(b"{", 9)), "HTTP 503, Refused"),
    ],
)
def test_the_reason_of_a_failed_start_is_one_line(install_web: InstallWeb, answer: Any, reason: str) -> None:
    install_web(FakeWeb(**{START: answer}))
    assert StartClient(POWER).start("worker-0") == reason


@pytest.mark.parametrize("answer", [TimeoutError("timed out"), BadStatusLine("HTTP/9")])
def test_no_answer_differs_from_a_refusal(install_web: InstallWeb, answer: Exception) -> None:
    install_web(FakeWeb(**{START: answer}))
    with pytest.raises(NoAnswerError):
        StartClient(POWER).request_start("worker-0")
    install_web(FakeWeb(**{START: (503, b"{}")}))
    with pytest.raises(PowerError) as refused:
        StartClient(POWER).request_start("worker-0")
    assert not isinstance(refused.value, NoAnswerError)


@pytest.mark.parametrize("answer", [b"{}", b"[]", b"no JSON"])
def test_without_a_token_no_start_is_requested(install_web: InstallWeb, answer: bytes) -> None:
    web = install_web(FakeWeb(**{TOKEN: answer}))
    assert StartClient(POWER).start("worker-0") == f"{TOKEN} gives no token"
    assert [url for _, url, _ in web.requests] == [TOKEN]


@pytest.mark.parametrize(
    ("answer", "preempted"),
    [(b"TRUE", True), (b"FALSE", False), ((404, b""), False), (OSError("x"), False), (BadStatusLine("x"), False)],
)
def test_a_host_queries_whether_it_is_preempted(install_web: InstallWeb, answer: Any, preempted: bool) -> None:
    install_web(FakeWeb(**{PREEMPTED: answer}))
    assert StartClient(POWER).preempted() is preempted
    assert not StartClient(Power({}, TOKEN)).preempted()


def test_a_request_runs_on_a_thread_that_keeps_no_process_from_its_end() -> None:
    threads = SimpleQueue[threading.Thread]()
    host_power.start_thread(lambda: threads.put(threading.current_thread()))
    thread = threads.get(timeout=limit())
    assert (thread.name, thread.daemon) == ("starter", True)
    assert thread is not threading.current_thread()


class Site:
    """A starter whose fake API gives the answer that the test sets, once `work` is run."""

    def __init__(self) -> None:
        self.clock, self.answer = Clock(), ""
        self.requests: list[str] = []
        self.times: list[float] = []
        self.work: list[Callable[[], None]] = []
        self.starter = HostStarter(self.start, ["worker-0", "worker-1"], self.clock, self.work.append)

    def start(self, host: str) -> str:
        self.requests.append(host)
        self.times.append(self.clock() - 1000.0)
        return self.answer

    def request_starts(self, *hosts: str, seconds: int = 1) -> list[str]:
        """Return the reports while these hosts are requested, one poll per second."""
        reports = []
        for _ in range(seconds):
            reports += self.starter.request_starts(hosts)
            while self.work:
                self.work.pop(0)()
            self.clock.sleep(1.0)
        return reports


def test_a_start_request_is_repeated_with_backoff_and_logged_once() -> None:
    site = Site()
    assert site.request_starts("worker-0", "ps-0", seconds=180) == ["worker-0 is being started"]
    assert site.requests == ["worker-0"] * 5
    assert site.times == [0.0, 10.0, 30.0, 60.0, 120.0]
    assert site.request_starts(seconds=5) == []
    assert site.request_starts("worker-0", seconds=2) == ["worker-0 is being started"], "it has stopped again"


def test_a_start_is_reported_though_the_host_is_back_before_the_next_poll() -> None:
    site = Site()
    assert site.request_starts("worker-0") == []
    assert site.request_starts() == ["worker-0 is being started"]
    assert site.request_starts(seconds=3) == []


def test_a_start_is_reported_though_its_answer_comes_long_after_the_host() -> None:
    site = Site()
    assert site.starter.request_starts(["worker-0"]) == []
    for _ in range(3):
        assert site.starter.request_starts([]) == [], "the request is not answered"
    assert site.request_starts() == []
    assert site.request_starts(seconds=3) == ["worker-0 is being started"]
    assert site.requests == ["worker-0"]


def test_a_refusal_is_logged_the_second_time_and_when_it_changes() -> None:
    site = Site()
    site.answer = "not off yet"
    assert site.request_starts("worker-0", seconds=5) == []
    site.answer = "HTTP 403"
    report = "worker-0 is not started: HTTP 403; it is asked for again"
    assert site.request_starts("worker-0", seconds=26) == []
    assert site.times == [0.0, 10.0, 30.0]
    assert site.request_starts("worker-0", seconds=34) == [report]
    assert site.times == [0.0, 10.0, 30.0, 60.0]
    site.answer = ""
    assert site.request_starts("worker-0", seconds=70) == ["worker-0 is being started"]


def test_an_unexpected_answer_does_not_end_the_requests() -> None:
    site = Site()
    work = site.start

    def start(host: str) -> str:
        work(host)
        raise RuntimeError("odd")

    site.starter = HostStarter(start, ["worker-0"], site.clock, site.work.append)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            site.request_starts("worker-0")
        site.clock.sleep(60.0)
    assert site.requests == ["worker-0"] * 3


def test_requests_run_in_the_background_one_at_a_time_for_each_host() -> None:
    site = Site()
    for _ in range(100):
        assert site.starter.request_starts(["worker-0", "worker-1"]) == []
        site.clock.sleep(1.0)
    assert len(site.work) == 2
    assert site.requests == []
