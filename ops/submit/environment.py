"""The environment of a trainer besides TF_CONFIG: the variables of every job, the user's, and secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.inventory import Host, Inventory
from infra.ports import TENSORFLOW_PORT
from infra.scale_tiers import Role
from jobs import variables
from jobs.records import STOP_FILE_VARIABLE
from jobs.variables import JAX_COORDINATOR, MASTER_ADDR
from ops import terminal
from ops.errors import UsageError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONGEST_WORD = 32 * 4096 - 1  # MAX_ARG_STRLEN of Linux, without the final NUL
# The roles that train together, in PyTorch's order: the master is rank 0, and the workers follow.
RANKED_ROLES = (Role.MASTER, Role.WORKER)
# A port of jobs that neither TensorFlow nor PyTorch's rank 0 uses, outside the ephemeral port range.
_JAX_PORT = TENSORFLOW_PORT + 1
# The GPUs of the host, as `1 nvidia-tesla-t4`; absent if it has none.
ACCELERATOR = "SCALETIER_ACCELERATOR"
# The variables that the cluster sets, and that a user must not.
_RESERVED = (
    *("TF_CONFIG", "CLOUD_ML_JOB", "CLOUD_ML_JOB_ID"),
    *variables.NAMES,
    STOP_FILE_VARIABLE,
    ACCELERATOR,
)


DEFAULTS = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_ENABLE_ONEDNN_OPTS": "1",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "GRPC_VERBOSITY": "ERROR",
}
"""Defaults, which a user may change.

TensorFlow logs errors only, and uses oneDNN on every CPU: without AVX-512 a convolution then takes half of the time. It takes
a GPU's memory as it needs it: the host's model server may use the same GPU. A crash in native code prints its stack. The host
sets what depends on it (`hosts.agent.job_files`): threads and HOME.
"""


def task_variables(inventory: Inventory, host: Host, job_id: str, job_dir: str, data: str) -> dict[str, str]:
    """Return the variables that identify a task; TYPE is `master` on the chief, as in Cloud ML's samples."""
    values = {"TYPE": str(host.role), "INDEX": str(host.index), "JOB_ID": job_id, "JOB_DIR": job_dir, "SCALETIER_DATA": data}
    values["CLOUD_ML_JOB_ID"] = job_id
    if host.accelerator:
        values[ACCELERATOR] = f"{host.accelerator['count']} {host.accelerator['type']}"
    return values | _ranks(inventory, host)


def _ranks(inventory: Inventory, host: Host) -> dict[str, str]:
    """Return the rendezvous variables of PyTorch, JAX and others, for one process per host; none for other roles.

    They are the variables of torch.distributed's `env://` and of torchrun, and those that JAX programs read: JAX itself reads
    only the coordinator's address.
    """
    peers = [inventory.chief, *(other for other in inventory.hosts if other.role is Role.WORKER)]
    if host.role not in RANKED_ROLES:
        return {}
    rank, peers_count = str(peers.index(host)), str(len(peers))
    return {
        MASTER_ADDR: inventory.chief.address,
        "MASTER_PORT": str(TENSORFLOW_PORT),
        "RANK": rank,
        "WORLD_SIZE": peers_count,
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": rank,
        JAX_COORDINATOR: f"{inventory.chief.address}:{_JAX_PORT}",
        "JAX_NUM_PROCESSES": peers_count,
        "JAX_PROCESS_ID": rank,
    }


def merge_environment(config_values: Mapping[str, str], file: str | None, pairs: Sequence[str], where: str) -> dict[str, str]:
    """Merge `environment:` of config.yaml, `--env-file` and `--env`; the later wins.

    UsageError if a name is invalid or reserved, a value has a NUL character, or the file is unreadable.
    """
    variables_by_name = dict(config_values)
    for name in variables_by_name:
        _check(name, f"{where}: trainingInput.environment")
    if file is not None:
        variables_by_name |= _read(file, "--env-file")
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--env {pair!r} is not of the form NAME=VALUE")
        _check(name, "--env")
        variables_by_name[name] = value
    for name, value in variables_by_name.items():
        check_word(f"{name}={value}", f"the environment's {name}")
    return variables_by_name


def check_word(word: str, what: str) -> None:
    """Raise UsageError for an argument or a variable that the kernel passes to no program."""
    if "\0" in word:
        raise UsageError(f"{what} holds a NUL character, which no program can receive")
    if (size := len(word.encode("utf-8", "surrogateescape"))) > _LONGEST_WORD:
        how = f"Valid: {_LONGEST_WORD:,} at most; put more into a file of the package"
        raise UsageError(f"{what} is invalid: it has {size:,} bytes. {how}")


def read_secrets(names: Sequence[str], file: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets of `--secret NAME`, from the operator's environment, and of `--secret-file`.

    UsageError if a name is invalid or reserved, a value is unset, empty or has a NUL character, or the file is unreadable.
    """
    values = _read(file, "--secret-file", hidden=True) if file is not None else {}
    for name in names:
        if not _NAME.fullmatch(name):  # and not shown: it may be the secret itself
            raise UsageError("--secret takes the NAME of a variable of this shell, and no value: --secret TOKEN")
        _check(name, "--secret")
        if name not in environ:
            raise UsageError(f"--secret {name} is not set in this shell: export {name}=…, or put it in a --secret-file")
        values[name] = environ[name]
    for value in values.values():  # without its name, which may be the secret itself: a token may end in =
        if not value or "\0" in value:
            raise UsageError(f"a secret {'holds a NUL character' if value else 'is empty, and NAME=VALUE is the form'}")
    return values


def _check(name: str, where: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where}: {name!r} is no name of a variable: letters, digits and _, and no digit first")
    if name in _RESERVED:
        raise UsageError(f"{where}: {name} is set by the cluster, and cannot be changed; nor can {', '.join(_RESERVED)}")


def _read(file: str, flag: str, hidden: bool = False) -> dict[str, str]:
    """Parse lines NAME=VALUE like `docker run --env-file`: nothing is unquoted, # begins a comment line.

    No message shows a value that is `hidden`.
    """
    try:
        lines = Path(file).read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{flag} {file} cannot be read: {reason}") from None
    values, quoted = {}, []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, equals, value = line.partition("=")
            if not equals or (hidden and not _NAME.fullmatch(name.strip())):
                raise UsageError(f"{flag} {file}:{number} is not of the form NAME=VALUE")
            _check(name.strip(), f"{flag} {file}:{number}")
            values[name.strip()] = value
            quoted += [str(number)] if re.fullmatch(r"""(['"]).*\1""", value.strip()) else []
    if quoted:
        how = "as with docker run --env-file: take them out if the program is to get the value alone"
        terminal.note(f"{flag} {file}: the quotes in line {terminal.list_some(quoted)} are part of the value, {how}")
    return values
