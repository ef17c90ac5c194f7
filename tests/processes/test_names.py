"""Check that a name that tests use, and that does not exist, is found in every folder of tests."""

from __future__ import annotations

from pathlib import Path

import names
import pytest


def test_only_what_does_not_exist_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {
        "product.py": "import os\ndef act(count: int) -> int | None: return count\nclass Host: name: str | None = None\n",
        "tests/e2e/helper.py": "import product\nproduct.act(number=1)\n",
        "tests/e2e/conftest.py": "import helper, product\nproduct.os.sep\nhelper.play()\n",
        "tests/e2e/test_examples.py": "from product import Host\ndef ask(host: Host | int) -> None: host.name\n",
        "tests/gcp_emulation/conftest.py": "import products\n",
        "tests/gcp_emulation/test_examples.py": "import product\nproduct.act('1') + 1\nproduct.Host().name.upper()\nabsent\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(names, "TESTS", tmp_path / "tests")
    monkeypatch.setenv("MYPYPATH", "")
    options = ("--strict", "--cache-dir", "/dev/null")
    assert names.main(*options) == 1
    assert sorted(line.partition(": error: ")[0] for line in capsys.readouterr().out.splitlines()) == [
        "tests/e2e/conftest.py:3",
        "tests/e2e/helper.py:2",
        "tests/e2e/test_examples.py:2",
        "tests/gcp_emulation/conftest.py:1",
        "tests/gcp_emulation/test_examples.py:4",
    ]
    for name in texts:
        (tmp_path / name).write_text("")
    assert (names.main(*options), capsys.readouterr().out) == (0, "")
    (tmp_path / "tests/e2e/conftest.py").write_text("import (\n")
    assert names.main(*options) == 2
    assert "tests/e2e/conftest.py:1: error: " in capsys.readouterr().out
