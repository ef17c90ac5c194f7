"""Where figures go: benchmarks/results.json, and a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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
        "command": row.command,
        "when": (when or datetime.now(UTC)).isoformat(timespec="seconds"),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def read(path: Path = PATH) -> list[Entry]:
    """What was measured before; empty where there is no such file."""
    if not path.exists():
        return []
    entries: list[Entry] = json.loads(path.read_text())
    return entries


def write(new: Entry, order: Iterable[str], path: Path = PATH) -> None:
    """Puts an entry in the place of the one of its name; the others stay, in the registry's order, unknown ones last."""
    names = list(order)
    entries = [*(old for old in read(path) if old["name"] != new["name"]), new]
    entries.sort(key=lambda item: names.index(item["name"]) if item["name"] in names else len(names))
    part = path.with_name(f".{path.name}")
    part.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")
    part.replace(path)


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
            row.against or "",
            f"{found['value']:.4g} {row.unit}",
            "" if found["peer"] is None else f"{found['peer']:.4g} {row.unit}",
            "" if found["ratio"] is None else f"{found['ratio']:.2f}",
            f"{sign} {row.bar:g}{unit}",
            "" if row.aim is None else f"{sign} {row.aim:g}{unit}",
            result,
            style="red" if result == "bar missed" else None,
        )
    return shown


def show(rows: Iterable[tuple[Benchmark, Entry]]) -> None:
    """Prints the table on stdout, as wide as it needs where that is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table(rows))
