"""The token broker on loopback, queried like by Google's clients."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waiting import limit

from hosts.agent.token_broker import Broker
from jobs.token_access import Access, Boundary, boundary

MAY = Access("mine", ("jobs/job02/output",), ("data/",))


@contextmanager
def start_broker(
    answers: list[tuple[str, float] | OSError], now: list[float], messages: list[str] | None = None
) -> Iterator[tuple[Broker, list[Boundary]]]:
    requested_rules: list[Boundary] = []

    def mint(rules: Any) -> tuple[str, float]:
        requested_rules.append(rules)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    token_broker = Broker(MAY, mint, [].append if messages is None else messages.append, lambda: now[0])
    try:
        yield token_broker, requested_rules
    finally:
        token_broker.close()


def ask(token_broker: Broker, path: str, flavor: str = "Google") -> tuple[int, str, str | None]:
    connection = http.client.HTTPConnection(token_broker.environment["GCE_METADATA_HOST"], timeout=limit())
    connection.request("GET", path, headers={"Metadata-Flavor": flavor})
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, content, answer.getheader("Metadata-Flavor")


TOKEN = "/computeMetadata/v1/instance/service-accounts/default/token"


def test_a_token_is_cached_while_it_is_valid() -> None:
    now = [0.0]
    with start_broker([("first", 3600.0), ("second", 3600.0)], now) as (token_broker, requested_rules):
        assert json.loads(ask(token_broker, TOKEN)[1]) == {"access_token": "first", "expires_in": 3600, "token_type": "Bearer"}
        now[0] = 3299.0
        assert json.loads(ask(token_broker, TOKEN)[1]) == {"access_token": "first", "expires_in": 301, "token_type": "Bearer"}
        now[0] = 3301.0
        assert json.loads(ask(token_broker, TOKEN)[1])["access_token"] == "second"
    assert requested_rules == [boundary(MAY)] * 2


def test_other_metadata_is_not_served() -> None:
    with start_broker([("first", 3600.0)], [0.0]) as (token_broker, requested_rules):
        assert ask(token_broker, TOKEN, flavor="other")[0] == 403
        for path in ("instance/attributes/startup-script", "instance/service-accounts/other@x/token", "project/project-id"):
            assert ask(token_broker, f"/computeMetadata/v1/{path}")[0] == 404
        assert ask(token_broker, "/", flavor="")[::2] == (200, "Google")
    assert requested_rules == []


def test_a_refused_token_is_logged_once_and_requested_again() -> None:
    messages: list[str] = []
    refused = OSError("HTTP 400, invalid_grant")
    with start_broker([refused, refused, ("first", 3600.0)], [0.0], messages) as (token_broker, _):
        assert ask(token_broker, TOKEN)[:2] == (503, "HTTP 400, invalid_grant")
        assert ask(token_broker, TOKEN)[0] == 503
        assert ask(token_broker, TOKEN)[0] == 200
    assert messages == ["no token for the bucket: HTTP 400, invalid_grant"]


def test_google_s_library_accepts_it_as_the_metadata_server(tmp_path: Path) -> None:
    program = (
        "import google.auth\n"
        "from google.auth.transport.requests import Request\n"
        "credentials, _ = google.auth.default(scopes=['https://www.googleapis.com/auth/cloud-platform'])\n"
        "credentials.refresh(Request())\n"
        "print(credentials.token)\n"
    )
    with start_broker([("narrow", 3600.0)], [0.0]) as (token_broker, _):
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("GOOGLE_", "CLOUDSDK_"))}
        env = (
            environment
            | token_broker.environment
            | {"HOME": str(tmp_path), "GCE_METADATA_MTLS_MODE": "none", "no_proxy": "127.0.0.1"}
        )
        env["GCE_METADATA_TIMEOUT"] = f"{limit():.0f}"  # seconds, 3 by default
        result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert result.stdout == "narrow\n", result.stderr
