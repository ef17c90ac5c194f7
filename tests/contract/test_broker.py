"""The broker of tokens as Google's own clients ask it, on loopback."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from waiting import limit

from hosts.agent.token_broker import Access, Boundary, Broker, boundary

MAY = Access("mine", ("jobs/job02/output",), ("data/",))


@contextmanager
def broker(
    answers: list[tuple[str, float] | OSError], now: list[float], said: list[str] | None = None
) -> Iterator[tuple[Broker, list[Boundary]]]:
    asked: list[Boundary] = []

    def mint(rules: Any) -> tuple[str, float]:
        asked.append(rules)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    made = Broker(MAY, mint, [].append if said is None else said.append, lambda: now[0])
    try:
        yield made, asked
    finally:
        made.close()


def ask(made: Broker, path: str, flavor: str = "Google") -> tuple[int, str, str | None]:
    connection = http.client.HTTPConnection(made.environment["GCE_METADATA_HOST"], timeout=limit())
    connection.request("GET", path, headers={"Metadata-Flavor": flavor})
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, content, answer.getheader("Metadata-Flavor")


TOKEN = "/computeMetadata/v1/instance/service-accounts/default/token"


def test_a_token_is_kept_while_it_is_good() -> None:
    now = [0.0]
    with broker([("first", 3600.0), ("second", 3600.0)], now) as (made, asked):
        assert json.loads(ask(made, TOKEN)[1]) == {"access_token": "first", "expires_in": 3600, "token_type": "Bearer"}
        now[0] = 3299.0
        assert json.loads(ask(made, TOKEN)[1]) == {"access_token": "first", "expires_in": 301, "token_type": "Bearer"}
        now[0] = 3301.0
        assert json.loads(ask(made, TOKEN)[1])["access_token"] == "second"
    assert asked == [boundary(MAY)] * 2


def test_it_says_nothing_else_of_the_host() -> None:
    with broker([("first", 3600.0)], [0.0]) as (made, asked):
        assert ask(made, TOKEN, flavor="other")[0] == 403
        for path in ("instance/attributes/startup-script", "instance/service-accounts/other@x/token", "project/project-id"):
            assert ask(made, f"/computeMetadata/v1/{path}")[0] == 404
        assert ask(made, "/", flavor="")[::2] == (200, "Google")
    assert asked == []


def test_no_token_is_an_answer_that_is_said_once_and_the_next_is_asked_for() -> None:
    said: list[str] = []
    refused = OSError("HTTP 400, invalid_grant")
    with broker([refused, refused, ("first", 3600.0)], [0.0], said) as (made, _):
        assert ask(made, TOKEN)[:2] == (503, "HTTP 400, invalid_grant")
        assert ask(made, TOKEN)[0] == 503
        assert ask(made, TOKEN)[0] == 200
    assert said == ["no token for the bucket: HTTP 400, invalid_grant"]


def test_googles_own_library_takes_it_for_the_metadata_server() -> None:
    program = (
        "import google.auth\n"
        "from google.auth.transport.requests import Request\n"
        "found, _ = google.auth.default(scopes=['https://www.googleapis.com/auth/cloud-platform'])\n"
        "found.refresh(Request())\n"
        "print(found.token)\n"
    )
    with broker([("narrow", 3600.0)], [0.0]) as (made, _):
        own = {key: value for key, value in os.environ.items() if not key.startswith(("GOOGLE_", "CLOUDSDK_"))}
        env = own | made.environment | {"HOME": "/nonexistent", "GCE_METADATA_MTLS_MODE": "none", "no_proxy": "127.0.0.1"}
        env["GCE_METADATA_TIMEOUT"] = f"{limit():.0f}"  # seconds, 3 by default
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "narrow\n", done.stderr
