"""The targets by name. A new one is a package with a `Target`, and a row here."""

from __future__ import annotations

import gc

from infra.target import Target


def target(name: str) -> Target:
    """Return the target of that name; only that one is imported, as a provider's library takes seconds."""
    if name == "gcp":
        # Its objects are hundreds of thousands: to look for garbage among them takes a quarter of the time.
        gc.disable()
        try:
            from infra.gcp.target import GCP
        finally:
            gc.freeze()
            gc.enable()
        return GCP
    from infra.lxd.target import LXD

    return LXD
