"""Where figures go: benchmarks/results.json, and a table."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.registry import Benchmark, Figure

PATH = Path(__file__).with_name("results.json")
Entry = dict[str, Any]


def entry(row: Benchmark, figure: Figure, when: datetime | None = None) -> Entry:
    """A figure as results.json has it."""
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
        "unequal": row.unequal,
        "command": row.command,
        "commit": commit(),
        "machine": f"{os.cpu_count()} cores of {_processor()}",
        "code": row.code,
        "when": (when or datetime.now(UTC)).isoformat(timespec="seconds"),
    }


def commit() -> str:
    """The commit that is measured; with a plus where the files are not as it has them."""
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
    """What was measured before; empty where there is no such file."""
    if not path.exists():
        return []
    entries: list[Entry] = json.loads(path.read_text())
    return entries


def write(new: Entry, rows: Mapping[str, Benchmark], path: Path = PATH) -> None:
    """Puts an entry in the place of the one of its name, in the order of the rows.

    The others stay, but for those that no row has any more, and those that were measured by other code than their row has now.
    """
    kept = [old for old in read(path) if old["name"] != new["name"] and current(old, rows)]
    names = list(rows)
    entries = sorted([*kept, new], key=lambda item: names.index(item["name"]))
    part = path.with_name(f".{path.name}")
    part.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")
    part.replace(path)


def current(entry: Entry, rows: Mapping[str, Benchmark]) -> bool:
    """True for what a row's code of today measured; of entries that do not say by what code, its words must be the same."""
    row = rows.get(entry["name"])
    if row is None or (entry["what"], entry["against"]) != (row.what, row.against):
        return False
    code: str = entry.get("code", row.code)
    return code == row.code


def verdict(found: Mapping[str, Any], at_least: bool = False) -> str:
    """`aim met`, `bar met` or `bar missed`, by the ratio, or the value where there is no peer."""
    score = found["value"] if found["ratio"] is None else found["ratio"]

    def reached(limit: float) -> bool:
        return bool(score >= limit if at_least else score <= limit)

    if not reached(found["bar"]):
        return "bar missed"
    return "aim met" if found["aim"] is not None and reached(found["aim"]) else "bar met"


def table(rows: Iterable[tuple[Benchmark, Entry]]) -> Table:
    """One line a figure, the bar and the aim with the direction in which they lie."""
    shown = Table(title="scaletier's figures: ours against a peer, measured in one run")
    for heading in ("figure", "what", "against"):
        shown.add_column(heading, overflow="fold")
    for heading in ("ours", "peer", "ratio", "bar", "aim"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("", no_wrap=True)
    for row, found in rows:
        sign = "≥" if row.at_least else "≤"
        unit = "" if row.against else f" {row.unit}"
        result = verdict(found, row.at_least)
        shown.add_row(
            row.name,
            row.what,
            (row.against or "") + (f"; not equal: {row.unequal}" if row.unequal else ""),
            f"{found['value']:.4g} {row.unit}{_spread(found['runs'])}",
            "" if found["peer"] is None else f"{found['peer']:.4g} {row.unit}{_spread(found['peers'])}",
            "" if found["ratio"] is None else f"{found['ratio']:.2f}",
            f"{sign} {row.bar:g}{unit}",
            "" if row.aim is None else f"{sign} {row.aim:g}{unit}",
            result,
            style="red" if result == "bar missed" else None,
        )
    return shown


def _spread(runs: Sequence[float]) -> str:
    return f" ({min(runs):.4g} to {max(runs):.4g})" if runs else ""


def show(rows: Iterable[tuple[Benchmark, Entry]]) -> None:
    """Prints the table on stdout, as wide as it needs where that is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table(rows))
