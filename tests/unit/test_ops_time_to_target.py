"""Check steps to a target by the number of replicas: flags, crossings, and the model of two numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.progress import MetricPoint
from ops.errors import UsageError
from ops.plan import time_to_target
from ops.plan.scaling import Prediction
from ops.plan.time_to_target import MetricTarget, StepsModel, TimeToTargetModel

ACCURACY, LOSS = MetricTarget("accuracy", 0.9), MetricTarget("loss", 0.2)
counts = st.lists(st.integers(1, 16), min_size=2, max_size=6, unique=True)


def evaluations(metric: str, *points: tuple[int, float]) -> list[MetricPoint]:
    return [MetricPoint(step, {metric: value, "other": 1.0}) for step, value in points]


@pytest.mark.parametrize(
    ("text", "metric", "value", "smaller"),
    [
        ("accuracy=0.97", "accuracy", 0.97, False),
        (" loss = 2e-1 ", "loss", 0.2, True),
        ("top-1=x accuracy=-1", "top-1=x accuracy", -1.0, False),
        ("price mae=3", "price mae", 3.0, True),
        *((f"{metric}=3", metric, 3.0, True) for metric in ("mse", "rmse", "msle", "val_rmsle", "mape", "MAE")),
        *((f"{metric}=0.3", metric, 0.3, False) for metric in ("map", "mAP@0.5", "val_map", "msp")),
        ("mean_absolute_percentage_error=3", "mean_absolute_percentage_error", 3.0, True),
        ("binary_crossentropy=3", "binary_crossentropy", 3.0, True),
        ("summary=3", "summary", 3.0, False),
        ("mean_iou=0.5", "mean_iou", 0.5, False),
    ],
)
def test_a_target_names_a_metric_and_a_value(text: str, metric: str, value: float, smaller: bool) -> None:
    target = time_to_target.parse_target(text)
    assert target == MetricTarget(metric, value)
    assert target.lower_is_better is smaller


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("accuracy", "--until 'accuracy' is not of the form METRIC=VALUE, such as accuracy=0.97 or loss=0.2"),
        ("=0.9", "--until '=0.9' is not of the form METRIC=VALUE, such as accuracy=0.97 or loss=0.2"),
        ("accuracy=high", "--until 'accuracy=high': 'high' is no finite number"),
        ("loss=nan", "--until 'loss=nan': 'nan' is no finite number"),
        ("loss=-inf", "--until 'loss=-inf': '-inf' is no finite number"),
        ("loss=", "--until 'loss=': '' is no finite number"),
    ],
)
def test_an_invalid_target_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        time_to_target.parse_target(text)
    assert str(error.value) == message


@given(st.text(max_size=20) | st.builds("{}={}".format, st.text(max_size=9), st.floats()))
def test_any_text_is_a_target_or_one_error(text: str) -> None:
    try:
        target = time_to_target.parse_target(text)
    except UsageError:
        return
    assert target.metric
    assert np.isfinite(target.value)


def test_numbers_of_replicas_are_sorted_and_unique() -> None:
    assert time_to_target.parse_replicas("5, 1,2,2") == [1, 2, 5]
    assert time_to_target.parse_replicas(time_to_target.REPLICAS) == [1, 2, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,x", "--replicas '1,x': 'x' is no whole number from 1 to 16"),
        ("0,1", "--replicas '0,1': '0' is no whole number from 1 to 16"),
        ("1,17", "--replicas '1,17': '17' is no whole number from 1 to 16"),
        ("", "--replicas '': '' is no whole number from 1 to 16"),
        ("1,\u0662", "--replicas '1,\u0662': '\u0662' is no whole number from 1 to 16"),
        ("3,3", "--replicas '3,3': at least two different numbers are needed, such as 1,2,5"),
    ],
)
def test_invalid_numbers_of_replicas_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        time_to_target.parse_replicas(text)
    assert str(error.value) == message


def test_a_crossing_is_interpolated_between_two_evaluations() -> None:
    rising = time_to_target.crossing(
        ACCURACY, evaluations("accuracy", (100, 0.5), (200, 0.8), (300, 0.84), (400, 0.96), (500, 0.99))
    )
    assert rising
    assert rising.step == pytest.approx(350)
    assert (rising.before.step, rising.after.step) == (300, 400)
    falling = time_to_target.crossing(LOSS, evaluations("loss", (0, 1.0), (100, 0.3), (200, -0.1)))
    assert falling
    assert falling.step == pytest.approx(125)
    assert LOSS.reached(0.2)
    assert not LOSS.reached(0.201)
    exact = time_to_target.crossing(ACCURACY, evaluations("accuracy", (100, 0.5), (200, 0.9), (300, 0.1)))
    assert exact
    assert exact.step == 200


def test_some_evaluations_have_no_crossing() -> None:
    assert time_to_target.crossing(ACCURACY, []) is None
    assert time_to_target.crossing(ACCURACY, evaluations("accuracy", (100, 0.5), (200, 0.89))) is None
    assert time_to_target.crossing(ACCURACY, evaluations("accuracy", (100, 0.9), (200, 0.5), (300, 0.95))) is None
    assert time_to_target.crossing(ACCURACY, evaluations("loss", (100, 0.5), (200, 0.95))) is None


def test_the_nearest_evaluation_to_the_target() -> None:
    assert time_to_target.nearest(ACCURACY, evaluations("accuracy", (1, 0.5), (2, 0.8), (3, 0.7))) == MetricPoint(
        2, {"accuracy": 0.8, "other": 1}
    )
    nearest = time_to_target.nearest(LOSS, evaluations("loss", (1, 0.5), (2, 0.8), (3, 0.7)))
    assert nearest
    assert nearest.step == 1
    assert time_to_target.nearest(LOSS, evaluations("accuracy", (1, 0.5))) is None


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 1)), min_size=2, max_size=20, unique_by=lambda point: point[0]))
def test_a_crossing_lies_between_its_evaluations(points: list[tuple[int, float]]) -> None:
    crossing = time_to_target.crossing(ACCURACY, evaluations("accuracy", *sorted(points)))
    if crossing:
        assert crossing.before.step < crossing.step <= crossing.after.step
        assert crossing.before.values["accuracy"] < 0.9 <= crossing.after.values["accuracy"]


@given(counts, st.lists(st.floats(1, 1e6), min_size=6, max_size=6))
def test_the_fit_is_the_best_nonnegative_model(replicas: list[int], steps: list[float]) -> None:
    points = list(zip(replicas, steps, strict=False))
    count, step_counts = np.array(points).T
    rows, ones = np.stack([count / step_counts, 1 / step_counts], 1), np.ones(len(points))

    def squares(coefficients: np.ndarray) -> float:
        return float(np.sum((rows @ coefficients - ones) ** 2))

    unconstrained = np.linalg.lstsq(rows / rows.max(0), ones, rcond=None)[0] / rows.max(0)
    edges = np.diag(rows.sum(0) / (rows**2).sum(0))
    expected = min((coefficients for coefficients in [unconstrained, *edges] if (coefficients >= 0).all()), key=squares)
    fitted = time_to_target.fit(points)
    assert min(fitted.least, fitted.noise) >= 0
    assert squares(np.array([fitted.least, fitted.noise])) == pytest.approx(squares(expected), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize(("least", "noise"), [(0.5, 10.0), (10.0, 0.5), (0.0, 0.5), (0.5, 0.0)])
def test_a_model_of_less_than_a_step_is_recovered(least: float, noise: float) -> None:
    fitted = time_to_target.fit([(count, least * count + noise) for count in (1, 2, 5)])
    assert (fitted.least, fitted.noise) == (pytest.approx(least, abs=1e-9), pytest.approx(noise, abs=1e-9))


def test_a_model_has_no_negative_number() -> None:
    # Half as many steps with twice the replicas, and three times as many.
    assert time_to_target.fit([(1, 200.0), (2, 100.0)]) == StepsModel(0.0, pytest.approx(120.0))
    assert time_to_target.fit([(1, 100.0), (2, 300.0)]) == StepsModel(pytest.approx(1500 / 13), 0.0)


def test_the_largest_error_of_a_model() -> None:
    assert time_to_target.largest_error(StepsModel(10, 100), [(1, 100.0), (5, 300.0)]) == pytest.approx(50)


def test_seconds_to_a_target_agree_with_a_calculation_by_hand() -> None:
    stored = {"metric": "accuracy", "value": 0.9, "strategy": "apart", "leastSteps": 50, "noiseSteps": 350}
    time_model = TimeToTargetModel.of({**stored, "runs": [{"replicas": 5}]})
    assert (time_model.target, time_model.max_replicas) == (ACCURACY, 5)
    prediction = Prediction(rate=120.0, alone=20.0, replicas=10, bottleneck="compute")
    assert time_model.seconds(prediction) == pytest.approx((10 * 50 + 350) / 120)
    assert time_model.speed_up(prediction) == pytest.approx((400 / 20) / (850 / 120))
    assert time_model.for_strategy("apart") is time_model
    assert time_model.for_strategy("together") is None
