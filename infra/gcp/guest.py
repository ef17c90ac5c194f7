"""Guest attributes that hosts have written, read through the Compute API.

Source: Compute Engine documentation, "Guest attributes".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import requests

from infra.dynamic import Props
from infra.gcp.api import ApiError, GcpError, UnreachableError, get_json


def url(props: Props, instance: str, what: str) -> str:
    """Return the URL of a call for an instance, with the endpoint, project and zone of `props`."""
    return f"{props['endpoint']}projects/{props['project']}/zones/{props['zone']}/instances/{instance}/{what}"


def ask(client: requests.Session, props: Props, instance: str, space: str, what: str) -> Mapping[str, Any] | None:
    """Return the answer of getGuestAttributes for a namespace, or None if there is none yet.

    Raises:
        GcpError: the right is missing; the message names `what` was read.
    """
    try:
        return get_json(client, url(props, instance, "getGuestAttributes"), queryPath=f"{space}/")
    except ApiError as error:
        if error.status in (401, 403):
            raise GcpError(f"{what} of {instance}: {error} (needs compute.instances.getGuestAttributes)") from None
        return None  # not written yet, or Google is busy: both pass
    except UnreachableError:
        return None


def attributes(answer: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the keys and values in an answer."""
    items = ((answer or {}).get("queryValue") or {}).get("items") or []
    return {str(item.get("key")): str(item.get("value", "")).strip() for item in items}
