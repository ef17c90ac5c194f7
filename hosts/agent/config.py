"""The configuration of this host, which `fab train` or `fab export` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jobs import paths
from jobs.records import HostConfig
from jobs.serialization import RecordError

_ETC = "/etc/scaletier"


def host_file(environ: Mapping[str, str]) -> Path:
    """Return the path of host.json."""
    return Path(environ.get("SCALETIER_ETC", _ETC), "host.json")


def load(environ: Mapping[str, str]) -> tuple[HostConfig, Path]:
    """Return host.json, and the directory of this host's own files.

    SCALETIER_ETC and SCALETIER_STATE override these two directories. RecordError if the file is invalid or missing.
    """
    file, state = host_file(environ), Path(environ.get("SCALETIER_STATE", paths.STATE_DIR))
    try:
        return HostConfig.from_json(file.read_bytes()), state
    except RecordError as error:
        raise RecordError(f"{file}: {error}") from None
    except OSError as error:
        raise RecordError(f"{file}: {error.strerror}; fab train and fab export write it") from None
