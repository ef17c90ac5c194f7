"""Call Google's REST APIs for what Pulumi's provider cannot do: quotas, host keys, objects in the bucket, orphans.

Credentials and endpoints are those of the provider. Credentials are the first of: the token in `gcp:` configuration or in the
environment, the key in one of these, Application Default Credentials. An endpoint is the first of: `gcp:` configuration, the
environment, Google's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import google.auth
import google.auth.exceptions
import google.oauth2.credentials
import requests
from google.auth.transport.requests import AuthorizedSession

from infra.scale_tiers import TargetError

ReadConfig = Callable[[str], str | None]
"""A function that returns a value of the stack's configuration by its key, such as `gcp:zone`."""


class ApiEndpoint(NamedTuple):
    """The sources of an API's base URL: a configuration key, else an environment variable, else a default."""

    key: str
    variable: str
    default: str


COMPUTE = ApiEndpoint(
    "gcp:computeCustomEndpoint", "GOOGLE_COMPUTE_CUSTOM_ENDPOINT", "https://compute.googleapis.com/compute/v1/"
)
STORAGE = ApiEndpoint(
    "gcp:storageCustomEndpoint", "GOOGLE_STORAGE_CUSTOM_ENDPOINT", "https://storage.googleapis.com/storage/v1/"
)
IAM = ApiEndpoint("gcp:iamCustomEndpoint", "GOOGLE_IAM_CUSTOM_ENDPOINT", "https://iam.googleapis.com/v1/")
_SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
_TOKEN = ("GOOGLE_OAUTH_ACCESS_TOKEN",)
_KEY = ("GOOGLE_CREDENTIALS", "GOOGLE_CLOUD_KEYFILE_JSON", "GCLOUD_KEYFILE_JSON")
TIMEOUT = 20.0
_MAX_THREADS = 16
LOGIN = "`gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to a key file"


class GcpError(TargetError):
    """A request that Google refused, or that cannot be sent; the message is one line."""


class UnreachableError(GcpError):
    """No answer, or one that cannot be read, so the request's outcome is unknown."""


class ApiError(GcpError):
    """An error of a REST API: its HTTP `status`, and Google's `reason`, such as `accessNotConfigured`."""

    def __init__(self, message: str, status: int, reason: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


def endpoint(api: ApiEndpoint, read_config: ReadConfig) -> str:
    """Return the base URL of an API, with a slash at its end."""
    return (read_config(api.key) or os.environ.get(api.variable) or api.default).rstrip("/") + "/"


def session(read_config: ReadConfig) -> requests.Session:
    """Return a session, with which threads may send GETs at once; GcpError if there are no valid credentials."""
    client: requests.Session = AuthorizedSession(credentials(read_config), refresh_status_codes=())
    return client


def credentials(read_config: ReadConfig) -> Any:
    """Return the operator's credentials; GcpError if there are no valid credentials."""
    try:
        return _credentials(read_config)
    except (google.auth.exceptions.GoogleAuthError, OSError, ValueError) as error:
        raise GcpError(f"no Google credentials ({_first_sentence(error)}): run {LOGIN}") from None


def _credentials(read_config: ReadConfig) -> Any:
    token = read_config("gcp:accessToken") or _first_variable(_TOKEN)
    if token:
        return google.oauth2.credentials.Credentials(token)
    key = read_config("gcp:credentials") or _first_variable(_KEY)
    if key:
        info = json.loads(key if key.lstrip().startswith("{") else Path(key).expanduser().read_text())
        return google.auth.load_credentials_from_dict(info, scopes=_SCOPES)[0]
    return google.auth.default(scopes=_SCOPES)[0]


def _first_variable(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def get_json(client: requests.Session, url: str, **params: str) -> dict[str, Any]:
    """Return the answer to a GET.

    Raises:
        ApiError: the API refuses it.
        UnreachableError: there is no answer.
        GcpError: there are no valid credentials.
    """
    try:
        answer = client.get(url, params=params, timeout=TIMEOUT)
    except google.auth.exceptions.RefreshError as error:
        raise GcpError(f"Google refused the credentials ({_first_sentence(error)}): run {LOGIN}") from None
    except (google.auth.exceptions.GoogleAuthError, requests.exceptions.RequestException) as error:
        raise UnreachableError(f"{url.split('/')[2]} does not answer ({type(error).__name__})") from None
    if answer.ok:
        try:
            content: dict[str, Any] = answer.json()
        except ValueError:
            raise UnreachableError(f"{url.split('/')[2]} gave an answer that is no JSON") from None
        return content
    raise _refusal(answer)


def get_all(client: requests.Session, url: str, key: str = "items", **params: str) -> Iterator[Any]:
    """Yield the items below `key` on all pages of a list.

    An aggregated list yields pairs of a scope and its content. Errors are those of `get_json`.
    """
    for page in get_pages(client, url, **params):
        items = page.get(key) or ()
        yield from items.items() if isinstance(items, dict) else items


def get_pages(client: requests.Session, url: str, **params: str) -> Iterator[Mapping[str, Any]]:
    """Yield the pages of a list; errors are those of `get_json`."""
    token: dict[str, str] = {}
    while True:
        page = get_json(client, url, **params, **token)
        yield page
        if not (next_token := page.get("nextPageToken")):
            return
        token = {"pageToken": str(next_token)}


def _refusal(answer: requests.Response) -> ApiError:
    try:
        error = answer.json()["error"]
        message, errors = str(error["message"]), error.get("errors") or [{}]
        details = [str(item.get("reason", "")) for item in error.get("details", []) if isinstance(item, dict)]
        reason = next((name for name in details if name), str(errors[0].get("reason", "")))
    except (ValueError, KeyError, TypeError, AttributeError):
        message, reason = answer.reason or "", ""
    return ApiError(" ".join(message.split()), answer.status_code, reason)


def _first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error."""
    return " ".join(str(error.args[0] if error.args else error).split()).partition(". ")[0].rstrip(".")


def instance_url(props: Mapping[str, Any], instance: str, what: str) -> str:
    """Return the URL of a call on an instance; `props` has the endpoint, project and zone."""
    return f"{props['endpoint']}projects/{props['project']}/zones/{props['zone']}/instances/{instance}/{what}"


def guest_attributes(
    client: requests.Session, props: Mapping[str, Any], hosts: Iterable[str], namespace: str, what: str
) -> dict[str, dict[str, str]]:
    """Return the guest attributes of hosts in a namespace, by host; read all hosts in parallel.

    Source: Compute Engine documentation, "Guest attributes".

    Args:
        props: has the endpoint, the project, the zone, and the names of the instances by host.

    Raises:
        GcpError: there are no valid credentials, or Google refuses the operator, for which the message begins with `what`, such
            as "host key".
    """

    def read_host(host: str) -> dict[str, str]:
        instance = props["hosts"][host]
        try:
            answer = get_json(client, instance_url(props, instance, "getGuestAttributes"), queryPath=f"{namespace}/")
        except ApiError as error:
            if error.status in (401, 403):
                raise GcpError(f"{what} of {instance}: {error} (needs compute.instances.getGuestAttributes)") from None
            return {}  # not written yet, or another error, as when Google is busy: the caller tries again
        except UnreachableError:
            return {}
        items = (answer.get("queryValue") or {}).get("items") or []
        return {str(item.get("key")): str(item.get("value", "")).strip() for item in items}

    names = list(hosts)
    with ThreadPoolExecutor(_MAX_THREADS) as pool:
        return dict(zip(names, pool.map(read_host, names), strict=True))
