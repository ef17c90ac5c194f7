"""Set up TensorFlow in a process: import, messages, threads, memory and devices."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import math
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scaletier.job import JobError

_CGROUP = Path("/sys/fs/cgroup")
_MESSAGE_LENGTH = 300
# The environment variable that names the GPUs of the host's machine type, such as `1 nvidia-tesla-t4`.
ACCELERATOR = "SCALETIER_ACCELERATOR"
# The environment variable with the number of devices into which the CPU is divided, to test several devices without GPUs.
CPU_DEVICES = "SCALETIER_CPU_DEVICES"
# The reason that an error gives for a setting that comes after TensorFlow's first operation.
TOO_LATE_MESSAGE = (
    "TensorFlow has computed something before; pass functions to scaletier.Job that make its model, data, optimizer and metrics"
)
# The call that gives a dataset its number of batches.
ASSERT_CARDINALITY = ".apply(tf.data.experimental.assert_cardinality(n))"
_ERROR_CONTEXT = re.compile(r"^(Graph execution error:|Detected at node .*| +File .*|<stack traces .*)$", re.MULTILINE)
# A process with fewer bytes returns none: it would only request them again. A process that has returned some does so again
# once it has grown by this factor; `give_memory_back_on_growth` checks the growth at this interval.
_LARGE_BYTES, _GROWTH, _WATCH_SECONDS = 1e9, 1.1, 1.0
_STOP_POLL_SECONDS = 0.1
# TensorFlow refuses messages of 2 GB.
MAX_MESSAGE_BYTES = 2**31 - 2**20
# Constants of malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


class StopRequest:
    """A signal handler that notes the signal. A threading.Event would take a lock, which the interrupted code may hold."""

    def __init__(self) -> None:
        self._received = False

    def __call__(self, *_: object) -> None:
        self._received = True

    def is_set(self) -> bool:
        return self._received

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait for a signal; return False after this many seconds without one."""
        end = time.monotonic() + seconds
        while not self._received and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _STOP_POLL_SECONDS))
        return self._received


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Buffer TensorFlow's output to file descriptor 2, and print it only if the body raises."""
    sys.stderr.flush()
    with contextlib.ExitStack() as stack:
        try:
            buffer = stack.enter_context(tempfile.TemporaryFile())
        except OSError:  # a full disk: nothing is buffered
            yield
            return
        saved = os.dup(2)
        os.dup2(buffer.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            buffer.seek(0)
            os.write(saved, buffer.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)


def import_tensorflow() -> Any:
    """Return the tensorflow module, imported without its output; end the program with 2 if it is not installed."""
    if "tensorflow" in sys.modules:
        return sys.modules["tensorflow"]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # TensorFlow's default only with AVX-512, but useful without
    collects = gc.isenabled()
    gc.disable()  # the collector takes a sixth of the import's time, and finds nothing to free
    try:
        with quiet_stderr():
            return importlib.import_module("tensorflow")
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
    finally:
        if collects:
            gc.enable()
    print("error: there is no TensorFlow here: `make tensorflow` installs it for this machine", file=sys.stderr)
    raise SystemExit(2)


def available_cpus(cgroup: Path = _CGROUP) -> int:
    """Return the number of this process's CPUs by affinity and cgroup, v2 or v1; TensorFlow counts those of the machine."""
    cpus = len(os.sched_getaffinity(0))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):  # cgroups of the other version, or "max": no quota
            quota, period = map(int, " ".join((cgroup / name).read_text() for name in names).split())
            if quota > 0:  # v1 has -1 for no quota
                cpus = min(cpus, math.ceil(quota / period))
    return max(1, cpus)


def thread_counts() -> tuple[int, int]:
    """Return the numbers of intra-op and inter-op threads; inter-op has at least two, as an op may wait for another host."""
    cpus = available_cpus()
    return cpus, max(2, cpus)


def reuse_memory() -> None:
    """Make the C library keep freed blocks of up to 32 MB, the most that it can, for reuse; see mallopt(3)."""
    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((_M_MMAP_THRESHOLD, 2**25), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**26)):
            mallopt(parameter, value)


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Return the bytes of memory that this process may have, by machine and cgroup, v2 or v1."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # cgroups of the other version, or "max": no limit
            memory = min(memory, int((cgroup / name).read_text()))
    return memory


def resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def give_memory_back(threshold: float = _LARGE_BYTES) -> float:
    """Return free memory to the kernel if this process has more than `threshold` bytes; see malloc_trim(3).

    Returns:
        The threshold for the next call: after memory was returned, a tenth more than the process had.
    """
    if (resident := resident_bytes()) <= threshold:
        return threshold
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return resident * _GROWTH


def give_memory_back_on_growth() -> None:
    """Start a thread in a server that returns free memory each time that the process has grown by a tenth."""

    def watch() -> None:
        threshold: float = _LARGE_BYTES
        while True:
            threshold = give_memory_back(threshold)
            time.sleep(_WATCH_SECONDS)

    threading.Thread(target=watch, daemon=True).start()


def cpu_devices() -> int:
    """Return the number of devices into which the CPU is divided; JobError if the setting is invalid."""
    setting = os.environ.get(CPU_DEVICES, "1")
    if not setting.isdecimal() or not int(setting):
        raise JobError(f"{CPU_DEVICES}={setting!r} is not a number of devices; valid are 1 and above")
    return int(setting)


def prepare_process() -> None:
    """Set the threads, devices and memory use of TensorFlow in this process.

    If the job's own code has started TensorFlow, its threads stay as they are, and several CPU devices raise JobError.
    """
    tf, count = import_tensorflow(), cpu_devices()
    reuse_memory()
    intra_op, inter_op = thread_counts()
    with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(intra_op)
        tf.config.threading.set_inter_op_parallelism_threads(inter_op)
    if count > 1:
        one = tf.config.LogicalDeviceConfiguration()
        try:
            tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], [one] * count)
        except RuntimeError:
            raise JobError(f"{CPU_DEVICES}={count} is set too late: {TOO_LATE_MESSAGE}") from None


def local_devices() -> tuple[str, ...]:
    """Return the devices of this process: its GPUs, or the CPU, by default as one device."""
    tf = import_tensorflow()
    if gpus := tf.config.list_physical_devices("GPU"):
        return tuple(f"/device:GPU:{index}" for index in range(len(gpus)))
    configuration = tf.config.get_logical_device_configuration(tf.config.list_physical_devices("CPU")[0])
    return tuple(f"/device:CPU:{index}" for index in range(len(configuration or [None])))


def devices_of(job: str, task: int) -> tuple[str, ...]:
    """Return the devices of another task of the cluster to which this process is connected."""
    tf = import_tensorflow()
    for kind in ("GPU", "CPU"):
        specs = [tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices(kind)]
        if names := [f"/device:{kind}:{spec.device_index}" for spec in specs if (spec.job, spec.task) == (job, task)]:
            break
    return tuple(names)


def on_this_process() -> Any:
    """Return a context in which values become tensors of this process, whatever the current device is.

    For a device of another host TensorFlow would send the value while it creates the tensor, and hold Python's GIL until the
    host answers: an unresponsive host would stop all threads. Inputs of operations are sent without the GIL.
    """
    return import_tensorflow().device(None)


def send(value: Any, device: str) -> Any:
    """Return an array as a tensor for a device. Zeros are created there; an array larger than a message is sent in parts."""
    tf, parts = import_tensorflow(), []
    with on_this_process():
        if value.any():
            if value.nbytes < MAX_MESSAGE_BYTES:
                return tf.constant(value)
            flat, count = value.reshape(-1), MAX_MESSAGE_BYTES // value.itemsize
            parts = [tf.constant(flat[at : at + count]) for at in range(0, len(flat), count)]
        axis, shape, zero = tf.constant(0), tf.constant(value.shape, tf.int32), tf.zeros([], value.dtype)
    with tf.device(device):
        return tf.reshape(tf.concat(parts, axis), shape) if parts else tf.fill(shape, zero)


def say_device(allow_cpu: bool, environ: Mapping[str, str] | None = None) -> None:
    """Log the device that this process computes on; JobError if TensorFlow does not find the GPU of its host."""
    tf, accelerator = import_tensorflow(), (os.environ if environ is None else environ).get(ACCELERATOR)
    gpus = tf.config.list_physical_devices("GPU")
    if accelerator and not gpus and not allow_cpu:
        reason = "its driver does not load" if tf.test.is_built_with_cuda() else "this TensorFlow is built without CUDA"
        line = f"this host has {accelerator} and TensorFlow finds no GPU: {reason}; --allow-cpu trains on the CPU anyway"
        raise JobError(line)
    names = [tf.config.experimental.get_device_details(one).get("device_name", "GPU") for one in gpus]
    cpus = available_cpus()
    processors = "1 processor" if cpus == 1 else f"{cpus} processors"
    division = "" if (count := cpu_devices()) == 1 else f", as {count} devices"
    say(f"Trains on {', '.join(names) or f'{processors}{division}'}")


def say(line: str) -> None:
    print(line, flush=True)


def say_on_device(line: str) -> None:
    """Print one line to the log of the host of the current device."""
    with on_this_process():
        text = import_tensorflow().constant(line)
    import_tensorflow().raw_ops.PrintV2(input=text, output_stream="stdout", end="\n")


def one_line(error: Exception) -> str:
    """Return an error's message on one line, without TensorFlow's graph nodes and lines of code."""
    text = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
    message = _ERROR_CONTEXT.sub("", text.partition("Traceback (most recent call last)")[0])
    message = re.sub(r"\[*\{\{[^}]*\}\}\]*|\x1b\[[0-9;]*m|\[Op:[^]]*\].*", " ", message, flags=re.DOTALL)
    return " ".join(message.split())[:_MESSAGE_LENGTH]
