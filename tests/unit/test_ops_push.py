"""What goes to a host: the exact commands, and a stream that unpacks to the right files."""

from __future__ import annotations

import gzip
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from ops.train import push
from ops.train.render import File


def test_the_command_that_takes_a_job_in() -> None:
    assert push.take_in_command("job01") == (
        "sudo -n sh -c 'set -e\n"
        'rm -rf /opt/scaletier/replica "/var/lib/scaletier/jobs/$1"\n'
        "unit=$(cat /etc/systemd/system/scaletier.service 2>/dev/null || true)\n"
        "tar -xzpf - -C /\n"
        '[ "$unit" = "$(cat /etc/systemd/system/scaletier.service)" ] || systemctl daemon-reload\n'
        "exec systemctl restart scaletier.service' sh job01"
    )


def test_the_other_commands() -> None:
    assert push.stop_command() == "sudo -n systemctl stop scaletier.service"
    df = "df --output=avail -B1 -- /var/lib/scaletier '/my bucket' | tail -n +2"
    assert push.check_command(["/var/lib/scaletier", "/my bucket"]) == df
    check = push.check_command(["/var/lib/scaletier", "/my bucket"], {"tensorflow": "x", "numpy": "y"})
    code = "'import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])'"
    assert check == f"{df}; /opt/scaletier/venv/bin/python -c {code} numpy tensorflow"


def test_reading_what_the_check_says(tmp_path: Path) -> None:
    command = push.check_command([str(tmp_path), "/"], ["json", "no_such_module", "numpy_no"]).replace(push.PYTHON, "python3")
    ran = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    free, missing = push.read_check(ran.stdout, [str(tmp_path), "/"])
    assert free.keys() == {str(tmp_path), "/"}
    assert all(room > 0 for room in free.values())
    assert missing == ["no_such_module", "numpy_no"]
    with pytest.raises(ValueError, match="df told nothing"):
        push.read_check("", ["/"])


def test_the_stream_unpacks_as_one(tmp_path: Path) -> None:
    shared = push.shared_stream("job01", {"mine/task.py": b"x = 1\n"}, {"__main__.py": b""})
    own = push.host_stream([File("/etc/scaletier/replica.json", "é{}", 0o640, "trainer"), File("/etc/link", link="../unit")])
    # As on a host: GNU tar, through gzip's two members.
    subprocess.run(["tar", "-xzf", "-", "-C", str(tmp_path), "--no-same-owner"], input=shared + own, check=True)
    package = tmp_path / "var/lib/scaletier/jobs/job01/package"
    assert (package / "mine/task.py").read_text() == "x = 1\n"
    assert (tmp_path / "opt/scaletier/replica/__main__.py").read_bytes() == b""
    assert (tmp_path / "etc/scaletier/replica.json").read_text() == "é{}"
    assert (tmp_path / "etc/link").readlink() == Path("../unit")
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(shared + own))) as tar:
        entries = {entry.name: (entry.uname, entry.gname, oct(entry.mode), entry.mtime) for entry in tar}
    assert entries == {
        "var/lib/scaletier/jobs/job01": ("trainer", "trainer", "0o2775", 0),
        "var/lib/scaletier/jobs/job01/package": ("trainer", "trainer", "0o2775", 0),
        "var/lib/scaletier/jobs/job01/package/mine/task.py": ("trainer", "trainer", "0o644", 0),
        "opt/scaletier/replica/__main__.py": ("root", "root", "0o644", 0),
        "etc/scaletier/replica.json": ("root", "trainer", "0o640", 0),
        "etc/link": ("root", "root", "0o644", 0),
    }
    assert shared == push.shared_stream("job01", {"mine/task.py": b"x = 1\n"}, {"__main__.py": b""})


def test_our_replica_package_is_all_that_goes_along() -> None:
    sent = push.replica_package(Path(push.__file__).parents[2] / "replica")
    assert "__main__.py" in sent
    assert "record.py" in sent
    assert sum(map(len, sent.values())) < 200_000
