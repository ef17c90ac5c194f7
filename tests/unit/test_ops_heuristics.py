"""Check the reading of progress from a line of any trainer."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from ops.logs.heuristics import MAX_LENGTH, LineMetrics, UnitOfProgress, parse_metrics
from scaletier import loop

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("line", "reading"),
    [
        (
            "Train [worker/0], step 348: loss: 0.729, accuracy: 0.834 (1.0 sec)",
            LineMetrics(348, loss="0.729", accuracy="0.834"),
        ),
        ("INFO:tensorflow:loss = 0.28, step = 101 (0.5 sec)", LineMetrics(101, loss="0.28")),
        ("global_step: 7 of many", LineMetrics(7)),
        ("step 30/2000 - acc: 0.5", LineMetrics(30, 2000, accuracy="0.5")),
        ("Epoch 3/10", LineMetrics(3, 10, UnitOfProgress.EPOCH)),
        ("469/469 - 2s - loss: 1.5e-03 - sparse_categorical_accuracy: 0.91", LineMetrics(loss="1.5e-03", accuracy="0.91")),
        ("val_loss: 0.5", None),
        ("loss: nan", LineMetrics(loss="nan")),
        ("loss: -0.25", LineMetrics(loss="-0.25")),
        ("global_step/sec: 200", None),
        ("steps 5", None),
        ("step 7 of Step STEP Epoch loss LOSS acc", LineMetrics(7)),
        ("glossy: 1", None),
        ('{"scaletier.progress": {"step": 3, "totalSteps": 9, "loss": 0.25}}', LineMetrics(3, 9, loss="0.25")),
        ('{"scaletier.progress": {"step": 3, "metrics": {"accuracy": 0.51234567}}}', LineMetrics(3, accuracy="0.5123")),
        ('{"scaletier.progress": {"step": -1}}', None),
        ("next step: none", None),
        ("", None),
    ],
)
def test_a_line_is_read_as_progress(line: str, reading: LineMetrics | None) -> None:
    assert parse_metrics(line) == reading
    assert reading is None or reading.evaluation is False


@pytest.mark.parametrize("file", ["torch/ddp", "jax_gloo/train", "multi_worker/train", "parameter_server/train"])
def test_lines_of_examples_are_read(file: str) -> None:
    source = (ROOT / "examples" / f"{file}.py").read_text()
    (line,) = re.findall(r'print\(f"(step .*?)"', source)
    assert parse_metrics(re.sub(r"{.*?}", "5", line)) == LineMetrics(5, loss="5")


def test_lines_of_the_shipped_trainer_are_read() -> None:
    train = loop.train_line("worker/1", 9, 0.5, {"accuracy": 0.75}, 1.25, 10, 5)
    assert parse_metrics(train) == LineMetrics(9, None, UnitOfProgress.STEP, "0.500", "0.750", 5.0)
    assert parse_metrics(loop.eval_line(990, 0.4, {"accuracy": 0.89})) == LineMetrics(
        990, loss="0.400", accuracy="0.890", evaluation=True
    )
    assert parse_metrics(loop.final_line(5006, 0.228, {"accuracy": 0.935})) == LineMetrics(
        5006, loss="0.228", accuracy="0.935", evaluation=True
    )


def test_a_very_long_line_is_read_quickly() -> None:
    assert parse_metrics("x" * MAX_LENGTH + " step 5") is None
    start = time.process_time()
    for line in ("step " * 20_000, "loss: " * 20_000, "loss:" + " " * 60_000, "step" + " " * 60_000, "loss: " + "1" * 60_000):
        parse_metrics(line)
    assert time.process_time() - start < 1.0
