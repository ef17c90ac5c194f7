"""Settings of all tests: modules of this folder can be imported, and a test's time limit follows the machine's speed."""

from __future__ import annotations

import contextlib
import gc
import os
import pwd

import pytest
from hosts_report import pytest_runtest_makereport
from run import cores
from waiting import limit, scale

__all__ = ["pytest_runtest_makereport"]


def pytest_configure(config: pytest.Config) -> None:
    """Scale the time limit of a single test, which only ends hanging tests; use no proxy on loopback, and one user name."""
    gc.disable()  # what collection makes is kept
    with contextlib.suppress(KeyError):  # a container's user may have no name; plain `su` leaves the caller's in these
        os.environ |= dict.fromkeys(("LOGNAME", "USER"), pwd.getpwuid(os.getuid()).pw_name)
    os.environ |= {"KERAS_BACKEND": "tensorflow", "KERAS_HOME": os.devnull}  # the user's may be another
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, ["127.0.0.1,localhost", os.environ.get(name)]))
    scale()
    if config.getini("timeout") and not config.getoption("timeout", None):
        config.option.timeout = limit(float(config.getini("timeout")))


def pytest_collection_finish() -> None:
    """Exclude the existing objects, such as TensorFlow's, from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Count the processes of `-n auto` by a container's limits too."""
    return cores()
