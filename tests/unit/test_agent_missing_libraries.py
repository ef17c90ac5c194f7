"""A library, program or package that a trainer misses: the error has one line with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hosts.agent import missing_libraries
from hosts.agent.job_rules import exit_message
from hosts.agent.lines import LONGEST_LINE
from jobs.records import ReplicaRecord

ROOT = Path(__file__).resolve().parents[2]
THEN = (
    "to program_packages in ansible/roles/host/defaults/main.yml, then `make image` for local hosts, or "
    "`pulumi config set egress open` for Google's, and `pulumi up`."
)
NO_FILE = "FileNotFoundError: [Errno 2] No such file or directory:"


def call(source: str) -> list[str]:
    """Return a traceback of a call of subprocess, without its last line."""
    return [
        "Traceback (most recent call last):",
        '  File "/var/lib/scaletier/jobs/a/package/task.py", line 3, in <module>',
        f"    {source}",
        '  File "/usr/lib/python3.11/subprocess.py", line 1955, in _execute_child',
        "    raise child_exception_type(errno_num, err_msg, err_filename)",
    ]


@pytest.mark.parametrize(
    ("lines", "remedy"),
    [
        (["ImportError: libGL.so.1: cannot open shared object file: No such file or directory"], "libGL.so.1: add libgl1 "),
        (["OSError: libgomp.so.1: cannot open shared object file: No such file or directory"], "libgomp.so.1: add libgomp1 "),
        (
            ["OSError: cannot load library 'libsndfile.so': libsndfile.so: cannot open shared object file: No such file"],
            "libsndfile.so: add libsndfile1 ",
        ),
        (
            ["./tool: error while loading shared libraries: libtbb.so.12: cannot open shared object file: No such file"],
            "libtbb.so.12: add libtbb12 ",
        ),
        (
            ["xgboost.core.XGBoostError: libx.so.9: cannot open shared object file"],
            "libx.so.9: add the Debian package that has",
        ),
        (["sh: 1: ffmpeg: not found"], "program ffmpeg: add ffmpeg "),
        (["/bin/sh: 1: wget: not found"], "program wget: add wget "),
        (["run.sh: 12: unzip: not found", "tar: x: Cannot open"], "program unzip: add unzip "),
        (["bash: line 1: dot: command not found"], "program dot: add graphviz "),
        (["./run.sh: line 3: exec: java: not found"], "program java: add default-jre-headless "),
        (["/usr/bin/env: 'node': No such file or directory"], "program node: add nodejs "),
        (["the trainer cannot start: gcc: No such file or directory"], "program gcc: add build-essential "),
        ([*call("run(command)"), f"{NO_FILE} 'git'"], "program git: add git "),
        ([*call("run(['own', '-x'])"), f"{NO_FILE} 'own'"], "program own: add the Debian package that has it"),
        ([*call('Popen("own")'), f"{NO_FILE} 'own'"], "program own: add the Debian package that has it"),
        ([*call("run(cmd)"), f"{NO_FILE} PosixPath('dot')"], "program dot: add graphviz "),
        ([f"[rank1]: {line}" for line in (*call("run(['own'])"), f"{NO_FILE} 'own'")], "program own: add the Debian package"),
        (["RuntimeError: Failed to find C compiler. Please specify via CC"], "program gcc: add build-essential "),
        (
            ["torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found in torch: (None, 'g++')"],
            "program g++: add build-essential ",
        ),
        (["      error: command 'gcc' failed: No such file or directory"], "program gcc: add build-essential "),
        (["error: command 'x86_64-linux-gnu-gcc' failed: No such file or directory"], "program gcc: add build-essential "),
        (
            ["graphviz.backend.execute.ExecutableNotFound: failed to execute PosixPath('dot'), make sure the Graphviz"],
            "program dot: add graphviz ",
        ),
        (
            ["graphviz.backend.ExecutableNotFound: failed to execute ['dot', '-Tpdf'], make sure the Graphviz executables"],
            "program dot: add graphviz ",
        ),
        (['FileNotFoundError: [Errno 2] "dot" not found in path.'], "program dot: add graphviz "),
        (["ImportError: You must install graphviz (see instructions at"], "program dot: add graphviz "),
        (
            ["pytesseract.pytesseract.TesseractNotFoundError: tesseract is not installed or it's not in your PATH. See README"],
            "program tesseract: add tesseract-ocr ",
        ),
        (
            ["pdf2image.exceptions.PDFInfoNotInstalledError: Unable to get page count. Is poppler installed and in PATH?"],
            "program pdfinfo: add poppler-utils ",
        ),
        (["RuntimeError: Ninja is required to load C++ extensions"], "program ninja: add ninja-build "),
        (["OSError: sndfile library not found"], "libsndfile.so.1: add libsndfile1 "),
        (["OSError: PortAudio library not found"], "libportaudio.so.2: add libportaudio2 "),
        (["ImportError: failed to find libmagic.  Check your installation"], "libmagic.so.1: add libmagic1 "),
        (["sh: 1: mytool: not found"], "program mytool: add the Debian package that has it (https://packages.debian.org/"),
    ],
)
def test_a_missing_library_or_program_has_a_remedy(lines: list[str], remedy: str) -> None:
    (line,) = missing_libraries.remedy(lines).splitlines()
    assert line.startswith(f"Its host has no {remedy}")
    assert line.endswith(THEN)


def test_a_gpu_library_needs_no_package() -> None:
    remedy = missing_libraries.remedy(
        ["ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"]
    )
    assert "CPUs" in remedy
    assert "packages" not in remedy


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("ModuleNotFoundError: No module named 'pandas'", "pandas"),
        ("error: model_fn failed at task.py:3, net/blocks.py:7: ModuleNotFoundError: No module named 'pandas'", "pandas"),
        ("ERROR: No matching distribution found for scikit-learn==1.5.0", "scikit-learn"),
    ],
)
def test_a_missing_package_has_a_remedy(line: str, name: str) -> None:
    how = "put it into the package or a requirements.txt (--package, --runtime), and run `python`, not /usr/bin/python3."
    assert missing_libraries.remedy([line]) == f"Its Python has no {name}: {how}"


def test_a_login_shell_has_a_remedy() -> None:
    assert "leave out -l" in missing_libraries.remedy(["bash: line 1: python: command not found"])


def test_a_long_line_takes_linear_time() -> None:
    assert not missing_libraries.remedy([f"graphviz.ExecutableNotFound: failed to execute {'.' * LONGEST_LINE}"])


def test_a_missing_folder_is_no_missing_program() -> None:
    assert not missing_libraries.remedy([*call('subprocess.run(["ls"], cwd="nodir")'), f"{NO_FILE} 'nodir'"])
    handled = [*call("run(['own'])"), f"{NO_FILE} 'other'"]
    assert not missing_libraries.remedy(
        [*handled, "Traceback (most recent call last):", "    open('data')", f"{NO_FILE} 'data'"]
    )


@pytest.mark.parametrize(
    "line",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: 'data'",
        "W tensorflow/x.cc:64] Could not load dynamic library 'libcudart.so.11.0'; dlerror: libcudart.so.11.0: cannot open "
        "shared object file: No such file or directory",
        "OSError: /opt/venv/lib/libown.so: cannot open shared object file: No such file or directory",
        "the trainer cannot start: /no/such: No such file or directory",
        "ModuleNotFoundError: No module named 'tensorflow.contrib'",
        "404: page: not found",
        "/opt/venv/pydub/utils.py:170: RuntimeWarning: Failed to find C compiler",
        "",
    ],
)
def test_other_errors_have_no_remedy(line: str) -> None:
    assert not missing_libraries.remedy(["Traceback (most recent call last):", line])


def test_the_remedy_is_in_the_first_line_of_the_job_s_error() -> None:
    end = "ImportError: libGL.so.1: cannot open shared object file: No such file or directory"
    first, *rest = exit_message(ReplicaRecord("worker-0", exitCode=1, errorMessage=end)).splitlines()
    assert first.startswith("The replica worker 0 exited with a non-zero status of 1. Its host has no libGL.so.1: add libgl1 ")
    assert rest == [end]


def test_the_named_package_list_exists() -> None:
    name, _, path = missing_libraries.LIST.partition(" in ")
    packages = set(yaml.safe_load((ROOT / path).read_text())[name])
    libraries = ("libGL.so.1", "libglib-2.0.so.0", "libgomp.so.1", "libsndfile.so.1", "libgfortran.so.5")
    assert {*(missing_libraries._LIBRARIES[each] for each in libraries), "git", "rsync", "unzip"} <= packages
