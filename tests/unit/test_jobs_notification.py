"""Targets of a job's notification, and their form in output."""

from __future__ import annotations

import pytest

from jobs.notification import quote_target, redact_target
from ops.commands import check_target


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("https://hooks.example.com/services/T0/B0/secret?a=b", "POST https://hooks.example.com/…"),
        ("http://10.0.0.1:8080", "POST http://10.0.0.1:8080/"),
        ("http://[fd00::1]:80/x", "POST http://[fd00::1]:80/…"),
        ("http://localhost/?token=1", "POST http://localhost/…"),
        ("./done.sh --token 'a b'", "command ./done.sh …"),
        ("mail", "command mail"),
        ("TOKEN=a ./done.sh", "command TOKEN=… …"),
        ("curl http://example.com/${JOB_ID}", "command curl …"),
        ("http://example.com/" + "a" * 2029, "POST http://example.com/…"),
        ("https://example.com//", "POST https://example.com/"),
        ("http://[64:ff9b::808:808]/x", "POST http://[64:ff9b::808:808]/…"),
    ],
)
def test_targets_and_their_form_without_secrets(target: str, expected: str) -> None:
    check_target(target)
    assert redact_target(target) == expected


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("", "it is empty"),
        ("  ", "it is empty"),
        ("ftp://example.com/x", "its scheme is ftp"),
        ("mailto:me@example.com", "its scheme is mailto"),
        ("example.com:8080/done", "its scheme is example.com"),
        ("file:///etc/passwd", "its scheme is file"),
        ("gopher://169.254.169.254/", "its scheme is gopher"),
        ("http://", "it has no host"),
        ("http:///path", "it has no host"),
        ("http://ann:secret@example.com/", "it names a user"),
        ("http://example.com:99999/", "Port out of range"),
        ("http://example.com/a b", "it holds a space"),
        ("http://example.com/é", "it holds a space or a character that is not ASCII"),
        ("http://example.com/\r\nX: y", "it holds a control character"),
        ("http://[1::", "Invalid IPv6 URL"),
        ("http://example.com/" + "a" * 2030, "it has 2049 characters, and 2048 are allowed"),
        ("http://@example.com/", "it names a user"),
        ("./done.sh 'a", "it cannot be split into words (No closing quotation)"),
        ("http://metadata.google.internal/computeMetadata/v1/", "is the metadata server"),
        ("http://METADATA.google.internal./", "is the metadata server"),
        ("http://169.254.169.254/latest", "169.254.169.254 is a link-local, multicast, unspecified or metadata address"),
        ("http://2852039166/", "169.254.169.254 is a link-local"),
        ("http://0xa9fea9fe/", "169.254.169.254 is a link-local"),
        ("http://[::ffff:169.254.169.254]/", "is a link-local"),
        ("http://[64:ff9b::a9fe:a9fe]/", "is a link-local"),
        ("http://[2002:a9fe:a9fe::]/", "is a link-local"),
        ("https://[fe80::1]/", "is a link-local"),
        ("https://[fd20:ce::254]/", "is a link-local, multicast, unspecified or metadata address"),
        ("http://0.0.0.0:80/", "is a link-local"),
        ("http://224.0.0.1/", "is a link-local"),
    ],
)
def test_invalid_targets_are_refused(target: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        check_target(target)
    assert message in str(error.value)


_WITH_PASSWORD = "https://ann:hunter2@example.com/x"


@pytest.mark.parametrize(
    "target",
    [
        *(f"{before}{_WITH_PASSWORD}" for before in ("(", "“", "-", "@", "`", "\\", " ", "curl|", "\ufeff", "\u200b", "a=")),
        f"<{_WITH_PASSWORD}>",
        f"`{_WITH_PASSWORD}`",
        f"\\{_WITH_PASSWORD}|x",
        "//ann:hunter2@example.com/x",
    ],
)
def test_a_password_is_never_shown(target: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        check_target(target)
    assert "hunter2" not in f"{error.value} {quote_target(target)} {quote_target([target])} {redact_target(target)}"
