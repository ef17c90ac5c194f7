"""The registry's rows, their figures and the results file, without timing."""

from __future__ import annotations

import importlib
import json
import re
import signal
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from benchmarks import __main__ as command
from benchmarks import results
from benchmarks.measure import MeasureError
from benchmarks.registry import REGISTRY, Benchmark, Figure, TargetCrossing, UnknownError, add, chosen
from benchmarks.trained import _Memory, step_with

from infra.scale_tiers import ScaleTier

REQUIRED = {
    "fab-list", "up", "up-premium",
    "first-step", "logs-first-line", "follow-latency", "memory-host", "memory-replica", "memory-fab",
    "push-8-ssh", "push-8-pyinfra", "push-8-ansible", "push-31-ssh", "push-31-pyinfra", "push-31-ansible",
    "program-31", "program-75", "program-300",
    "schedules", "restart-hanging", "worker-killed", "queue-next", "cancel-8", "cancel-chief-off", "jobs-500",
    "async-to-accuracy", "own-async", "own-sync", "own-two", "own-ten", "own-slowed", "own-killed", "sync-to-accuracy",
    "async-bytes-to-accuracy", "job-step", "memory-chief-400", "memory-worker-400", "memory-ps-400", "accuracy-cnn",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Restore the signal handlers after the test: programs started later would ignore signals too."""
    handlers = {number: signal.getsignal(number) for number in command._SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


UNITS = {
    "s": "seconds", "ms": "ms", "MB": "MB", "B": "bytes", "violations": "violations", "times": "times", "": "accuracy",
}  # fmt: skip


@pytest.fixture(autouse=True)
def suite() -> None:
    for module in command.SUITE:
        importlib.import_module(f"benchmarks.{module}")


def row(name: str = "a", bar: float = 1.5, aim: float | None = 1.2, **more: object) -> Benchmark:
    return Benchmark(name, "seconds of it", "its peer", bar, aim, lambda _: Figure(1.0), **more)  # type: ignore[arg-type]


def test_every_figure_has_a_row() -> None:
    assert REGISTRY.keys() >= REQUIRED


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_a_row_names_its_unit_and_an_aim_better_than_its_bar(name: str) -> None:
    benchmark = REGISTRY[name]
    assert UNITS[benchmark.unit] in benchmark.what
    assert benchmark.aim is None or (benchmark.aim > benchmark.bar if benchmark.at_least else benchmark.aim < benchmark.bar)
    assert benchmark.command == f"make bench ONLY={name}"


def test_rows_are_sorted_by_tier() -> None:
    tiers = [benchmark.tier for benchmark in chosen([])]
    assert tiers == sorted(tiers, key=[None, *ScaleTier].index)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="two benchmarks up"):
        add(row("up"))


def test_an_unknown_name_lists_the_valid_ones_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnknownError):
        chosen(["down"])
    assert command.main(["down"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: there is no benchmark 'down'; valid are ")
    assert all(name in err for name in REGISTRY)


def test_a_figure_without_a_peer_has_no_ratio() -> None:
    assert Figure(3.0, 2.0).ratio == 1.5
    assert Figure(3.0).ratio is None


def test_an_entry_has_the_documented_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "commit", lambda: "abc1234+")
    time = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    entry = results.entry(row(unequal="the hosts"), Figure.of([1.5, 1.23456, 1.0], [1.0, 2.0, 0.5]), time)
    assert re.fullmatch(r"\d+ cores of .+", entry.pop("machine"))
    assert re.fullmatch(r"[0-9a-f]{12}", entry.pop("code"))
    assert entry == {
        "name": "a", "what": "seconds of it", "against": "its peer", "value": 1.235, "peer": 1.0, "ratio": 1.235, "bar": 1.5,
        "aim": 1.2, "command": "make bench ONLY=a", "when": "2026-01-02T03:04:05+00:00", "commit": "abc1234+",
        "runs": [1.5, 1.235, 1.0], "peers": [1.0, 2.0, 0.5], "unequal": "the hosts",
    }  # fmt: skip


def test_the_commit_has_a_plus_if_files_were_changed() -> None:
    assert re.fullmatch(r"[0-9a-f]{7,}\+?|unknown", results.commit())


def test_an_entry_of_other_code_or_another_description_or_no_commit_is_outdated() -> None:
    rows, entry = {"a": row("a")}, results.entry(row("a"), Figure(1.0))
    assert results.current(entry, rows)
    assert not results.current({key: value for key, value in entry.items() if key != "commit"}, rows)
    assert not results.current({**entry, "code": "0" * 12}, rows)
    assert not results.current({**entry, "what": "minutes of it"}, rows)
    assert not results.current({**entry, "against": "another"}, rows)
    assert not results.current({**entry, "name": "gone"}, rows)


def test_the_step_at_which_a_curve_reaches_an_accuracy() -> None:
    curve = [(50, 0.9), (100, 0.98), (150, 1.0), (200, 0.97)]
    assert step_with(0.99, curve) == 125
    assert step_with(0.45, curve) == 25
    with pytest.raises(MeasureError, match=r"accuracy of 0\.99: the best is 0\.98"):
        step_with(0.99, curve[:2])


def test_the_steps_and_the_curve_of_each_training_are_written_beside_its_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "commit", lambda: "abc1234")
    ours = [TargetCrossing(step, [(100, 0.98), (200, 0.99125)]) for step in (190, 150)]
    figure = Figure.of([2.0, 3.0], [9.0], ours, [TargetCrossing(95, [(100, 0.991)])])
    path, entry = tmp_path / "results.json", results.entry(row(), figure)
    results.write(entry, {"a": row()}, path)
    (written,) = results.read(path)
    assert (written["steps"], written["peer_steps"]) == ([190, 150], [95])
    assert written["curves"] == [{"100": 0.98, "200": 0.9912}] * 2
    assert path.read_text().count('{ "100": 0.98, "200": 0.9912 }') == 2, "a curve is one line"
    results.show([(row(), entry)])
    out = capsys.readouterr().out
    assert all(text in out for text in ("(2 to 3), 170 steps", "(9 to 9), 95 steps", "abc1234"))


def test_the_files_entries_have_a_commit() -> None:
    assert [entry["name"] for entry in results.read() if not entry.get("commit")] == []


def test_a_new_entry_replaces_only_its_own(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    rows = {name: row(name) for name in ("a", "b", "other")}
    for name, value in (("b", 1.0), ("other", 2.0), ("a", 3.0), ("b", 4.0)):
        results.write(results.entry(row(name), Figure(value)), rows, path)
    assert [(item["name"], item["value"]) for item in json.loads(path.read_text())] == [("a", 3.0), ("b", 4.0), ("other", 2.0)]
    del rows["other"]
    assert results.write(results.entry(row("a"), Figure(5.0)), rows, path) == ["other"]
    assert [(item["name"], item["value"]) for item in json.loads(path.read_text())] == [("a", 5.0), ("b", 4.0)]


@pytest.mark.parametrize(
    ("figure", "at_least", "expected"),
    [
        (Figure(1.2, 1.0), False, "aim met"),
        (Figure(1.5, 1.0), False, "bar met"),
        (Figure(1.51, 1.0), False, "bar missed"),
        (Figure(1.3), False, "bar met"),
        (Figure(1.6), True, "aim met"),
        (Figure(1.4), True, "bar missed"),
    ],
)
def test_the_verdict_uses_the_ratio_or_else_the_value(figure: Figure, at_least: bool, expected: str) -> None:
    assert results.verdict(results.entry(row(aim=1.55 if at_least else 1.2), figure), at_least) == expected


def test_a_bar_of_zero_is_met_by_zero() -> None:
    zero_bar = row(bar=0, aim=None)
    assert results.verdict(results.entry(zero_bar, Figure(0))) == "bar met"
    assert results.verdict(results.entry(zero_bar, Figure(1))) == "bar missed"


def test_the_verdict_is_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    results.show([(row(), results.entry(row(), Figure(2.0, 1.0)))])
    assert "bar missed" in capsys.readouterr().out


def test_a_failed_benchmark_is_reported_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> Figure:
        raise RuntimeError("no such\nthing")

    broken = Benchmark("broken", "seconds of it", None, 1.0, None, fails)
    monkeypatch.setattr(command, "chosen", lambda _: [broken, row()])
    monkeypatch.setattr(results, "write", lambda *_: ["old"])
    assert command.main([]) == 1
    out, err = capsys.readouterr()
    assert "aim met" in out
    assert "measured by other code or of no known commit: old\n" in err
    assert err.endswith("error: broken was not measured: no such thing\n")


def test_without_hosts_to_watch_no_thread_is_started() -> None:
    before = threading.active_count()
    with _Memory(None, (), 0.0) as memory:  # type: ignore[arg-type]
        assert threading.active_count() == before
    assert memory.peaks == {}
