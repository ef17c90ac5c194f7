"""Find a shared library, program or Python package that a trainer misses on its host, and how to provide it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from jobs.firsterror import TRACEBACK, strip_rank

LIST = "program_packages in ansible/roles/host/defaults/main.yml"
_CONTENTS = "https://packages.debian.org/search?searchon=contents&suite=bookworm&keywords="


def _table(text: str) -> dict[str, str]:
    """Parse `file=package`, or `name` for a package of the same name."""
    pairs = (word.partition("=") for word in text.split())
    return {file: package or file for file, _, package in pairs}


# The Debian 12 package of libraries that packages from PyPI load, and of common programs; others link to a search.
_LIBRARIES = _table(
    """
    libGL.so.1=libgl1 libEGL.so.1=libegl1 libGLU.so.1=libglu1-mesa libOpenGL.so.0=libopengl0 libOSMesa.so.8=libosmesa6
    libSM.so.6=libsm6 libX11.so.6=libx11-6 libXext.so.6=libxext6 libXrender.so.1=libxrender1 libatlas.so.3=libatlas3-base
    libblas.so.3=libblas3 libcairo.so.2=libcairo2 libfontconfig.so.1=libfontconfig1 libgeos_c.so.1=libgeos-c1v5
    libgfortran.so.5=libgfortran5 libglib-2.0.so.0=libglib2.0-0 libgthread-2.0.so.0=libglib2.0-0 libgomp.so.1=libgomp1
    libhdf5_serial.so.103=libhdf5-103-1 libibverbs.so.1=libibverbs1 liblapack.so.3=liblapack3 libmpi.so.40=libopenmpi3
    libmagic.so.1=libmagic1 libnuma.so.1=libnuma1 libomp.so.5=libomp5 libopenblas.so.0=libopenblas0
    libportaudio.so.2=libportaudio2 libpq.so.5=libpq5 libpython3.11.so.1.0=libpython3.11 libquadmath.so.0=libquadmath0
    libsndfile.so.1=libsndfile1 libsox.so.3=libsox3 libtbb.so.12=libtbb12 libusb-1.0.so.0=libusb-1.0-0 libxml2.so.2=libxml2
    """
)
_PROGRAMS = _table(
    """
    c++=build-essential cc=build-essential convert=imagemagick dot=graphviz ffprobe=ffmpeg g++=build-essential
    gcc=build-essential ifconfig=net-tools java=default-jre-headless killall=psmisc make=build-essential mpirun=openmpi-bin
    ninja=ninja-build node=nodejs pdfinfo=poppler-utils pdftoppm=poppler-utils ping=iputils-ping ps=procps
    tesseract=tesseract-ocr top=procps xz=xz-utils bzip2 cmake curl ffmpeg file git git-lfs gnuplot htop jq less lsof npm
    numactl parallel patch pigz rsync screen sox strace tmux tree unzip wget xvfb zip zstd
    """
)
_LIBRARY = re.compile(
    r"(?:[\w.]*(?:Error|Exception): (?:.*[\s'\"])?|.*error while loading shared libraries: )(lib[\w.+-]+\.so[\w.]*)['\"]?"
    r": cannot open shared object file"
)
_NAME = r"(?:x86_64-linux-gnu-)?([\w.+-]+)"
# The text before an error's message: its class, also those of the errors around it.
_RAISED = r"\s*(?:[\w.]+: )+"
# The messages of shells, env, the host's own start of a trainer, setuptools, graphviz, pydot and pytesseract.
_PROGRAMS_MISSED = tuple(
    re.compile(pattern)
    for pattern in (
        rf"\S+: (?:line )?\d+: (?:exec: )?{_NAME}: (?:command )?not found$",
        rf"(?:\S*/)?env: \W?{_NAME}\W?: No such file or directory$",
        rf"the trainer cannot start: {_NAME}: No such file or directory$",
        rf"{_RAISED}command '{_NAME}' failed: No such file or directory",
        rf"{_RAISED}failed to execute (?:PosixPath\()?\W{{1,3}}{_NAME}[^\w.+-].*make sure the Graphviz",
        rf'{_RAISED}(?:\[Errno 2\] )?"{_NAME}" not found in path',
        rf"{_RAISED}{_NAME} is not installed or it's not in your PATH",
    )
)
# Messages without a name, of PyTorch, Keras, pdf2image, soundfile, sounddevice and python-magic, and the file that is missing.
_UNNAMED = {
    re.compile(_RAISED + text): name
    for text, name in {
        "Failed to find C compiler": "gcc",
        r"No working C\+\+ compiler found": "g++",
        "Ninja is required": "ninja",
        "You must install graphviz": "dot",
        "Unable to get page count. Is poppler installed": "pdfinfo",
        "sndfile library not found": "libsndfile.so.1",
        "PortAudio library not found": "libportaudio.so.2",
        "failed to find libmagic": "libmagic.so.1",
    }.items()
}
# Python raises the same error for a missing file or working folder. A program is missing if the traceback goes through
# subprocess, and the name is in _PROGRAMS or is the first word of the call.
_FROM_SUBPROCESS = re.compile(rf"FileNotFoundError: \[Errno 2\] No such file or directory: (?:PosixPath\()?'{_NAME}'\)?$")
_SUBPROCESS = re.compile(r'  File ".*/subprocess\.py", line \d+, in ')
_IN_FRONT = r"""[(\[]\s*['"]{}['"]"""
# Messages of Python, for a top-level module, and of pip, which reaches no package index from a host.
_PACKAGE = re.compile(r"ModuleNotFoundError: No module named '(\w+)'$|ERROR: No matching distribution found for ([\w.-]+)")
# The training library's prefix of an error in a user's function.
_FAILED_AT = re.compile(r"error: model_fn failed at .*?:\d+: ")
_GPU_LIBRARY = re.compile(r"lib(?:cu|nv|nccl)")


def remedy(lines: Iterable[str]) -> str:
    """Return one line about the last library, program or package that is missing; empty if there is none."""
    hint, traceback = "", ""
    for line in (_FAILED_AT.sub("", strip_rank(line), count=1) for line in lines):
        traceback = "" if TRACEBACK.match(line) else f"{traceback}\n{line}"
        if library := _LIBRARY.match(line):
            hint = _of_library(library[1])
        elif program := next((match for each in _PROGRAMS_MISSED if (match := each.match(line))), None):
            hint = _of_program(program[1])
        elif name := next((name for pattern, name in _UNNAMED.items() if pattern.match(line)), None):
            hint = _of_library(name) if name.startswith("lib") else _of_program(name)
        elif (program := _FROM_SUBPROCESS.match(line)) and _is_program(program[1], traceback):
            hint = _of_program(program[1])
        elif package := _PACKAGE.match(line):
            name = package[1] or package[2]
            how = "put it into the package or a requirements.txt (--package, --runtime), and run `python`, not /usr/bin/python3"
            hint = f"Its Python has no {name}: {how}."
    return hint


def _is_program(name: str, traceback: str) -> bool:
    """Return True if a file missing in a traceback is a program to start."""
    if not _SUBPROCESS.search(traceback):
        return False
    return name in _PROGRAMS or re.search(_IN_FRONT.format(re.escape(name)), traceback) is not None


def _of_library(name: str) -> str:
    if _GPU_LIBRARY.match(name):
        return f"Its host has no {name}, a library of GPUs: use a build of the package for CPUs, or hosts with GPUs."
    any_version = (package for each, package in _LIBRARIES.items() if each.startswith(f"{name}.") and name.endswith(".so"))
    return _add(name, _LIBRARIES.get(name) or next(any_version, None), name)


def _of_program(name: str) -> str:
    if name == "python":
        return "Its PATH lacks the job's Python, as that of a login shell: leave out -l, or what else sets PATH."
    return _add(f"program {name}", _PROGRAMS.get(name), name)


def _add(what: str, package: str | None, file: str) -> str:
    which = f"add {package}" if package else f"add the Debian package that has it ({_CONTENTS}{file})"
    how = "`make image` for local hosts, or `pulumi config set egress open` for Google's, and `pulumi up`"
    return f"Its host has no {what}: {which} to {LIST}, then {how}."
