"""The flags of every job: defaults, spellings, a program's own flags, and one line for an error."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
from pathlib import Path

import pytest

import scaletier
from scaletier.flags import Flags, flags_of, fraction, parser


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOB_DIR", raising=False)
    assert flags_of([]) == Flags(
        job_dir="output",
        strategy="async",
        max_steps=2000,
        eval_interval=1.0,
        eval_steps=None,
        checkpoint_steps=500,
        checkpoint_seconds=60.0,
        keep_checkpoints=5,
        sync_period=None,
        communication="auto",
        microbatches=4,
        seed=0,
        log_interval=1.0,
        allow_cpu=False,
    )
    monkeypatch.setenv("JOB_DIR", "gs://b/jobs/job01/output/")
    assert flags_of([]).job_dir == "gs://b/jobs/job01/output"
    assert flags_of(parser({"JOB_DIR": "/x"}).parse_args([])).job_dir == "/x"
    assert flags_of(["--job-dir=/"]).job_dir == "/"


@pytest.mark.parametrize("spelling", ["--job-dir", "--output_path", "--output-dir"])
def test_spellings(spelling: str) -> None:
    assert flags_of([spelling, "out/"]).job_dir == "out"


def test_a_sync_period_is_a_number_or_measured() -> None:
    assert flags_of(["--sync-period=auto"]).sync_period is None
    assert flags_of(["--sync-period=7"]).sync_period == 7


def test_the_seed_is_a_number_of_32_bits() -> None:
    assert flags_of([f"--seed={2**32 - 1}"]).seed == 2**32 - 1
    with pytest.raises(SystemExit):
        flags_of([f"--seed={2**32}"])


@pytest.mark.parametrize(("text", "valid"), [("0", True), ("0.99", True), ("1", False), ("-0.1", False), ("nan", False)])
def test_a_share_is_from_0_to_below_1(text: str, valid: bool) -> None:
    with contextlib.nullcontext() if valid else pytest.raises(argparse.ArgumentTypeError, match="from 0 to below 1"):
        assert fraction(text) == float(text)


def test_the_minimum_of_each_flag() -> None:
    names = ["max-steps", "eval-steps", "checkpoint-steps", "keep-checkpoints", "sync-period", "microbatches"]
    parsed = vars(flags_of([*(f"--{flag}=1" for flag in names), "--seed=0"]))
    assert {parsed[flag.replace("-", "_")] for flag in names} == {1}
    for flag in names:
        with pytest.raises(SystemExit):
            flags_of([f"--{flag}=0"])


def test_a_program_adds_its_own_flags() -> None:
    flags = parser({}, description="Trains pictures.")
    flags.add_argument("--width", type=int)
    parsed = flags.parse_args(["--width=3", "--max-steps=9"])
    assert (parsed.width, flags_of(parsed).max_steps) == (3, 9)
    assert "Trains pictures." in flags.format_help()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "mirrored"], "invalid choice: 'mirrored' (choose from 'async', 'sync', 'model-parallel')"),
        (["--max-steps", "many"], "--max-steps: 'many' is not a whole number"),
        (["--max-steps", "0"], "--max-steps: 0 is too low; it must be at least 1"),
        (["--seed", str(2**32)], "--seed: 4294967296 is too high; it must be at most 4294967295"),
        (["--seed", "-1"], "--seed: -1 is too low; it must be at least 0"),
        (["--eval-interval", "soon"], "--eval-interval: 'soon' is not a number"),
        (["--checkpoint-seconds", "inf"], "--checkpoint-seconds: inf must be above 0"),
        (["--log-interval", "0"], "--log-interval: 0 must be above 0"),
        (["--sync-period", "x"], "--sync-period: 'x' is not a whole number"),
        (["--communication", "mpi"], "invalid choice: 'mpi' (choose from 'auto', 'ring', 'nccl')"),
        (["--m", "5"], "unrecognized arguments: --m 5; see --help"),
        (["--max-step=5", "--x"], "unrecognized arguments: --max-step=5 --x; did you mean --max-steps?"),
        (["--batch-size", "5"], "unrecognized arguments: --batch-size 5"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        flags_of(arguments)
    stderr = capsys.readouterr().err
    assert error.value.code == 2
    assert message in stderr
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1


def test_the_manual_has_every_flag_and_every_field() -> None:
    manual = (Path(__file__).resolve().parents[2] / "docs/library.md").read_text()
    rows = re.findall(r"^\| (`[^|]+`) \|", manual, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    flags = {action.option_strings[0] for action in scaletier.parser()._actions if action.dest != "help"}
    assert {name for name in documented if name.startswith("--")} == flags
    assert {field.name for field in dataclasses.fields(scaletier.Job)} <= documented
