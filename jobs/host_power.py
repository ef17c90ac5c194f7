"""Start hosts that are off, by the URLs in host.json (`jobs.records.Power`), and detect that this host is being preempted."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from jobs.lease import Clock
from jobs.records import Power

if TYPE_CHECKING:
    from urllib.error import HTTPError

Start = Callable[[str], str]
"""Requests the start of a host; returns an empty text if that was accepted, else the reason in one line."""
# A host that was just preempted cannot be started yet, and a spot host may become available in a minute.
PAUSES = (10.0, 20.0, 30.0, 60.0)
_SECONDS = 5.0
# The answer to a request to start a host may take longer.
_START_SECONDS = 20.0


class PowerError(Exception):
    """One line: the refusal, or why there is no answer."""


class NoAnswerError(PowerError):
    """There is no answer; the request may have taken effect."""


class StartClient:
    """Client that requests the start of hosts, by the URLs in `power` and within a time limit.

    `token` returns the access token for these requests; by default it is read from the URL `power.token`.
    """

    def __init__(self, power: Power, token: Callable[[], str] | None = None) -> None:
        self._power, self._token = power, token or self._own_token

    @property
    def hosts(self) -> frozenset[str]:
        """The hosts that can be started."""
        return frozenset(self._power.starts)

    def start(self, host: str) -> str:
        """Request the start of a host, as a `Start`; a host that runs stays as it is."""
        try:
            self.request_start(host)
        except PowerError as error:
            return str(error)
        return ""

    def request_start(self, host: str) -> None:
        """Request the start of a host; PowerError if that is refused, NoAnswerError if there is no answer."""
        bearer = {"Authorization": f"Bearer {self._token()}"}
        if error := _error_in(_fetch(self._power.starts[host], bearer, b"", _START_SECONDS)):
            raise PowerError(error)

    def preempted(self) -> bool:
        """Return True if the URL `power.preempted` answers TRUE; False if there is no such URL or no answer in time."""
        if not self._power.preempted:
            return False
        try:
            return _fetch(self._power.preempted, self._power.headers).strip() == b"TRUE"
        except PowerError:
            return False

    def _own_token(self) -> str:
        try:
            answer = json.loads(_fetch(self._power.token, self._power.headers))
            return str(answer["access_token"])
        except (ValueError, KeyError, TypeError):
            raise PowerError(f"{self._power.token} gives no token") from None


def start_thread(work: Callable[[], None]) -> None:
    """Run a function in a thread of its own."""
    threading.Thread(target=work, name="starter", daemon=True).start()


@dataclass
class _HostRequest:
    """The request for one host: when it is due again, and the last two answers."""

    due: float
    times: int = 0
    pending: bool = False
    answers: tuple[str | None, str | None] = (None, None)
    reported: str | None = None


class HostStarter:
    """Starter of hosts that are needed and off: it repeats each request, and does not wait for the answers."""

    def __init__(
        self,
        start: Start,
        hosts: Iterable[str],
        clock: Clock,
        run_in_background: Callable[[Callable[[], None]], None] = start_thread,
    ) -> None:
        """Prepare to start these `hosts`, the only ones that can be started."""
        self.hosts = frozenset(hosts)
        self._start, self._clock, self._run_in_background = start, clock, run_in_background
        self._requests: dict[str, _HostRequest] = {}

    def request_starts(self, hosts: Iterable[str]) -> list[str]:
        """Request the start of each of these hosts whose request is due; return new lines about the answers, for a log."""
        targets, now = self.hosts & set(hosts), self._clock()
        unneeded = {host: request for host, request in self._requests.items() if host not in targets}
        waiting = {host: request for host, request in unneeded.items() if request.pending}
        needed = {host: self._requests.get(host) or _HostRequest(now) for host in sorted(targets)}
        self._requests = needed | waiting
        for host, request in needed.items():
            if not request.pending and now >= request.due:
                request.pending, request.due = True, now + PAUSES[min(request.times, len(PAUSES) - 1)]
                request.times += 1
                self._run_in_background(lambda host=host, request=request: self._send_request(host, request))  # type: ignore[misc]
        # The answer for a host that needs no start any more is still reported.
        return [line for host, request in (unneeded | needed).items() if (line := _new_line(host, request))]

    def _send_request(self, host: str, request: _HostRequest) -> None:
        try:
            request.answers = request.answers[1], self._start(host)
        finally:
            request.pending = False


def _new_line(host: str, request: _HostRequest) -> str:
    """Return a line about a new answer, else ''. A refusal counts when it comes twice: the host may not be off yet."""
    previous_answer, answer = request.answers
    if answer is None or answer == request.reported or (answer and answer != previous_answer):
        return ""
    request.reported = answer
    return f"{host} is not started: {answer}; it is asked for again" if answer else f"{host} is being started"


def _fetch(url: str, headers: Mapping[str, str], content: bytes | None = None, seconds: float = _SECONDS) -> bytes:
    """Return the body of an answer to a GET, or to a POST of the content; PowerError for any status but success."""
    import urllib.request  # imported here: local hosts need neither urllib.request nor ssl
    from http.client import HTTPException
    from urllib.error import HTTPError

    try:
        request = urllib.request.Request(url, content, dict(headers))  # noqa: S310  the addresses are the stack's own
        with urllib.request.urlopen(request, timeout=seconds) as answer:  # noqa: S310
            body: bytes = answer.read()
            return body
    except HTTPError as error:
        with error:
            raise PowerError(_refusal(error)) from None
    except (OSError, ValueError, HTTPException) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split())
        raise NoAnswerError(f"{urlsplit(url).netloc} does not answer ({reason})") from None


def _refusal(error: HTTPError) -> str:
    from http.client import HTTPException

    try:
        reason = str(json.loads(error.read())["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError, HTTPException):
        reason = str(error.reason)
    return f"HTTP {error.code}, {' '.join(reason.split())}"


def _error_in(answer: bytes) -> str:
    """Return the reason why an accepted request failed at once; empty if it did not."""
    try:
        errors = json.loads(answer)["error"]["errors"]
        return "; ".join(f"{each['code']}: {' '.join(str(each.get('message', '')).split())}" for each in errors)
    except (ValueError, KeyError, TypeError):
        return ""
