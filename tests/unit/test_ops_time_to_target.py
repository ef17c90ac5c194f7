"""Steps to a target by the number of replicas: flags, crossings, and the law of two numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from jobs.progress import MetricPoint
from ops.errors import UsageError
from ops.plan import time_to_target
from ops.plan.scaling import Prediction
from ops.plan.time_to_target import AccuracyTarget, StepsModel, TargetModel

ACCURACY, LOSS = AccuracyTarget("accuracy", 0.9), AccuracyTarget("loss", 0.2)
counts = some.lists(some.integers(1, 16), min_size=2, max_size=6, unique=True)


def evaluations(metric: str, *points: tuple[int, float]) -> list[MetricPoint]:
    return [MetricPoint(step, {metric: value, "other": 1.0}) for step, value in points]


@pytest.mark.parametrize(
    ("text", "metric", "value", "smaller"),
    [
        ("accuracy=0.97", "accuracy", 0.97, False),
        (" loss = 2e-1 ", "loss", 0.2, True),
        ("top-1=x accuracy=-1", "top-1=x accuracy", -1.0, False),
        ("price mae=3", "price mae", 3.0, True),
        ("rmse=3", "rmse", 3.0, True),
        ("mean_absolute_percentage_error=3", "mean_absolute_percentage_error", 3.0, True),
        ("binary_crossentropy=3", "binary_crossentropy", 3.0, True),
        ("summary=3", "summary", 3.0, False),
        ("mean_iou=0.5", "mean_iou", 0.5, False),
    ],
)
def test_a_target_names_a_metric_and_a_value(text: str, metric: str, value: float, smaller: bool) -> None:
    found = time_to_target.parse_target(text)
    assert found == AccuracyTarget(metric, value)
    assert found.smaller is smaller


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("accuracy", "--until 'accuracy' is not of the form METRIC=VALUE, such as accuracy=0.97 or loss=0.2"),
        ("=0.9", "--until '=0.9' is not of the form METRIC=VALUE, such as accuracy=0.97 or loss=0.2"),
        ("accuracy=high", "--until 'accuracy=high': 'high' is no finite number"),
        ("loss=nan", "--until 'loss=nan': 'nan' is no finite number"),
        ("loss=-inf", "--until 'loss=-inf': '-inf' is no finite number"),
        ("loss=", "--until 'loss=': '' is no finite number"),
    ],
)
def test_a_target_that_is_none(text: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        time_to_target.parse_target(text)
    assert str(error.value) == says


@given(some.text(max_size=20))
def test_any_text_is_a_target_or_one_error(text: str) -> None:
    try:
        found = time_to_target.parse_target(text)
    except UsageError:
        return
    assert found.metric
    assert np.isfinite(found.value)


def test_numbers_of_replicas_are_sorted_and_each_is_tried_once() -> None:
    assert time_to_target.parse_replicas("5, 1,2,2") == [1, 2, 5]
    assert time_to_target.parse_replicas(time_to_target.REPLICAS) == [1, 2, 5]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1,x", "--replicas '1,x': 'x' is no whole number from 1 to 16"),
        ("0,1", "--replicas '0,1': '0' is no whole number from 1 to 16"),
        ("1,17", "--replicas '1,17': '17' is no whole number from 1 to 16"),
        ("", "--replicas '': '' is no whole number from 1 to 16"),
        ("1,\u0662", "--replicas '1,\u0662': '\u0662' is no whole number from 1 to 16"),
        ("3,3", "--replicas '3,3': at least two different numbers are needed, such as 1,2,5"),
    ],
)
def test_numbers_of_replicas_that_tell_nothing(text: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        time_to_target.parse_replicas(text)
    assert str(error.value) == says


def test_a_target_is_crossed_in_proportion_between_two_evaluations() -> None:
    up = time_to_target.crossing(
        ACCURACY, evaluations("accuracy", (100, 0.5), (200, 0.8), (300, 0.84), (400, 0.96), (500, 0.99))
    )
    assert up
    assert up.step == pytest.approx(350)
    assert (up.before.step, up.after.step) == (300, 400)
    down = time_to_target.crossing(LOSS, evaluations("loss", (0, 1.0), (100, 0.3), (200, -0.1)))
    assert down
    assert down.step == pytest.approx(125)
    assert LOSS.reached(0.2)
    assert not LOSS.reached(0.201)
    exactly = time_to_target.crossing(ACCURACY, evaluations("accuracy", (100, 0.5), (200, 0.9), (300, 0.1)))
    assert exactly
    assert exactly.step == 200


def test_what_does_not_cross() -> None:
    assert time_to_target.crossing(ACCURACY, []) is None
    assert time_to_target.crossing(ACCURACY, evaluations("accuracy", (100, 0.5), (200, 0.89))) is None
    assert time_to_target.crossing(ACCURACY, evaluations("accuracy", (100, 0.9), (200, 0.5), (300, 0.95))) is None
    assert time_to_target.crossing(ACCURACY, evaluations("loss", (100, 0.5), (200, 0.95))) is None


def test_the_best_is_the_nearest_to_the_target() -> None:
    assert time_to_target.nearest(ACCURACY, evaluations("accuracy", (1, 0.5), (2, 0.8), (3, 0.7))) == MetricPoint(
        2, {"accuracy": 0.8, "other": 1}
    )
    nearest = time_to_target.nearest(LOSS, evaluations("loss", (1, 0.5), (2, 0.8), (3, 0.7)))
    assert nearest
    assert nearest.step == 1
    assert time_to_target.nearest(LOSS, evaluations("accuracy", (1, 0.5))) is None


@given(some.lists(some.tuples(some.integers(1, 1000), some.floats(0, 1)), min_size=2, max_size=20, unique_by=lambda at: at[0]))
def test_a_crossing_lies_between_its_evaluations(points: list[tuple[int, float]]) -> None:
    found = time_to_target.crossing(ACCURACY, evaluations("accuracy", *sorted(points)))
    if found:
        assert found.before.step < found.step <= found.after.step
        assert found.before.values["accuracy"] < 0.9 <= found.after.values["accuracy"]


@given(counts, some.floats(0, 1e5), some.floats(0, 1e5))
def test_a_law_is_found_again(replicas: Sequence[int], least: float, noise: float) -> None:
    law = StepsModel(least + 1, noise)
    found = time_to_target.fit([(count, law.steps(count)) for count in replicas])
    assert [found.steps(count) for count in replicas] == pytest.approx([law.steps(count) for count in replicas], rel=1e-6)


@given(counts, some.lists(some.floats(1, 1e6), min_size=6, max_size=6))
def test_the_law_is_the_best_of_all_that_are_not_negative(replicas: list[int], steps: list[float]) -> None:
    points = list(zip(replicas, steps, strict=False))
    count, taken = np.array(points).T
    rows, ones = np.stack([count / taken, 1 / taken], 1), np.ones(len(points))

    def squares(law: np.ndarray) -> float:
        return float(np.sum((rows @ law - ones) ** 2))

    free = np.linalg.lstsq(rows / rows.max(0), ones, rcond=None)[0] / rows.max(0)
    edges = [
        np.array([rows[:, 0].sum() / (rows[:, 0] ** 2).sum(), 0]),
        np.array([0, rows[:, 1].sum() / (rows[:, 1] ** 2).sum()]),
    ]
    expected = min((law for law in [free, *edges] if (law >= 0).all()), key=squares)
    found = time_to_target.fit(points)
    assert min(found.least, found.noise) >= 0
    assert squares(np.array([found.least, found.noise])) == pytest.approx(squares(expected), rel=1e-4, abs=1e-7)


def test_how_far_a_law_is_off() -> None:
    assert time_to_target.largest_error(StepsModel(10, 100), [(1, 100.0), (5, 300.0)]) == pytest.approx(50)


@given(some.floats(0, 1e4), some.floats(0, 1e4), some.integers(1, 100))
def test_more_replicas_never_take_more_steps_each_and_never_fewer_together(least: float, noise: float, count: int) -> None:
    law = StepsModel(least, noise)
    assert law.steps(count + 1) >= law.steps(count)
    assert law.steps(count + 1) / (count + 1) <= law.steps(count) / count * (1 + 1e-9)


def test_seconds_to_a_target_by_hand() -> None:
    made = {
        "metric": "accuracy",
        "value": 0.9,
        "strategy": "apart",
        "leastSteps": 50,
        "noiseSteps": 350,
        "runs": [{"replicas": 5}],
    }
    learned = TargetModel.of(made)
    assert (learned.target, learned.most) == (ACCURACY, 5)
    found = Prediction(rate=120.0, alone=20.0, replicas=10, bound="compute")
    assert learned.seconds(found) == pytest.approx((10 * 50 + 350) / 120)
    assert learned.speed_up(found) == pytest.approx((400 / 20) / (850 / 120))
    assert learned.by("apart") is learned
    assert learned.by("together") is None
