"""The output of the figures: tests/benchmarks/results.json, and a table."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.registry import Benchmark, Figure, TargetCrossing

PATH = Path(__file__).with_name("results.json")
_CURVE = re.compile(r'\{(?:\s+"\d+": [\d.]+,?)+\s+\}')
Entry = dict[str, Any]


def entry(row: Benchmark, figure: Figure, when: datetime | None = None) -> Entry:
    """Return a figure in the form of results.json."""
    return {
        "name": row.name,
        "what": row.what,
        "against": row.against,
        "value": _rounded(figure.value),
        "peer": _rounded(figure.peer),
        "ratio": _rounded(figure.ratio),
        "bar": row.bar,
        "aim": row.aim,
        "runs": [_rounded(value) for value in figure.runs],
        "peers": [_rounded(value) for value in figure.peers],
        **_steps("", figure.crossings),
        **_steps("peer_", figure.peer_crossings),
        "unequal": row.unequal,
        "command": row.command,
        "commit": commit(),
        "machine": f"{os.cpu_count()} cores of {_processor()}",
        "code": row.code,
        "when": (when or datetime.now(UTC)).isoformat(timespec="seconds"),
    }


def _steps(whose: str, crossings: Sequence[TargetCrossing]) -> Entry:
    """Return the steps at which trainings reached their target, and the metric of each by step; empty if there are none."""
    if not crossings:
        return {}
    curves = [{str(step): round(value, 4) for step, value in each.curve} for each in crossings]
    return {f"{whose}steps": [each.step for each in crossings], f"{whose}curves": curves}


def commit() -> str:
    """Return the measured commit; with a plus if the files differ from it."""
    git = ("git", "-C", str(PATH.parent))
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    others = [line for line in changed.splitlines() if not line.endswith(PATH.name)]
    return f"{head}+" if others else head


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def read(path: Path = PATH) -> list[Entry]:
    """Return the earlier entries; empty if there is no such file."""
    if not path.exists():
        return []
    entries: list[Entry] = json.loads(path.read_text())
    return entries


def write(new: Entry, rows: Mapping[str, Benchmark], path: Path = PATH) -> list[str]:
    """Write an entry in place of the one of its name, in the order of the rows; return the names of dropped ones.

    The others stay, except those without a row or a commit, and those that other code than their row's measured.
    """
    others = [old for old in read(path) if old["name"] != new["name"]]
    names = list(rows)
    entries = sorted([*(old for old in others if current(old, rows)), new], key=lambda item: names.index(item["name"]))
    part = path.with_name(f".{path.name}")
    text = json.dumps(entries, indent=1, ensure_ascii=False)
    part.write_text(_CURVE.sub(lambda curve: " ".join(curve[0].split()), text) + "\n")
    part.replace(path)
    return [old["name"] for old in others if not current(old, rows)]


def current(entry: Entry, rows: Mapping[str, Benchmark]) -> bool:
    """Return True for an entry of a row with the present words and code, and of a known commit."""
    row = rows.get(entry["name"])
    if row is None or "commit" not in entry:
        return False
    return bool((entry["what"], entry["against"], entry["code"]) == (row.what, row.against, row.code))


def verdict(entry: Mapping[str, Any], at_least: bool = False) -> str:
    """Return `aim met`, `bar met` or `bar missed`, by the ratio, or the value if there is no peer."""
    score = entry["value"] if entry["ratio"] is None else entry["ratio"]

    def reached(limit: float) -> bool:
        return bool(score >= limit if at_least else score <= limit)

    if not reached(entry["bar"]):
        return "bar missed"
    return "aim met" if entry["aim"] is not None and reached(entry["aim"]) else "bar met"


def table(rows: Iterable[tuple[Benchmark, Entry]]) -> Table:
    """Return a table of one line a figure, the bar and the aim with their direction."""
    grid = Table(title="scaletier's figures: ours against a peer, measured in one run")
    for heading in ("figure", "what", "against"):
        grid.add_column(heading, overflow="fold")
    for heading in ("ours", "peer", "ratio", "bar", "aim"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for heading in ("", "commit"):
        grid.add_column(heading, no_wrap=True)
    for row, figure in rows:
        sign = "≥" if row.at_least else "≤"
        unit = "" if row.against else f" {row.unit}"
        result = verdict(figure, row.at_least)
        grid.add_row(
            row.name,
            row.what,
            (row.against or "") + (f"; not equal: {row.unequal}" if row.unequal else ""),
            _measured(figure["value"], row.unit, figure["runs"], figure.get("steps")),
            _measured(figure["peer"], row.unit, figure["peers"], figure.get("peer_steps")),
            "" if figure["ratio"] is None else f"{figure['ratio']:.2f}",
            f"{sign} {row.bar:g}{unit}",
            "" if row.aim is None else f"{sign} {row.aim:g}{unit}",
            result,
            figure["commit"],
            style="red" if result == "bar missed" else None,
        )
    return grid


def _measured(value: float | None, unit: str, runs: Sequence[float], steps: Sequence[int] | None) -> str:
    """Return a result with the range of its runs, and the median of the steps that these took to their target."""
    if value is None:
        return ""
    spread = f" ({min(runs):.4g} to {max(runs):.4g})" if runs else ""
    return f"{value:.4g} {unit}{spread}{f', {statistics.median(steps):.0f} steps' if steps else ''}"


def show(rows: Iterable[tuple[Benchmark, Entry]]) -> None:
    """Print the table on stdout, as wide as it needs without a terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table(rows))
