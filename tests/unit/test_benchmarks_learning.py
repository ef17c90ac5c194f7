"""The figures of a training: from its lines, checkpoints and kills, and their comparisons."""

from __future__ import annotations

import json
import math
import os
import threading
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmarks import learning, training
from benchmarks.learning import Killer, evaluated, victims
from benchmarks.measure import MeasureError
from benchmarks.stack import CONFIG, changes, part_of
from benchmarks.trained import Trained, _follow, seconds_a_step
from benchmarks.training import times

from infra.lxd.config import LxdConfig
from infra.scale_tiers import Role, ScaleTier
from trainer import flags, task

WORKERS = ("worker-0", "worker-1", "worker-2", "worker-3")


def flag(arguments: str, name: str) -> float:
    """Return the number behind a flag."""
    words = arguments.split()
    return float(words[words.index(name) + 1])


def test_what_was_sent_until_a_step_is_in_proportion_to_the_last_of_any_replica() -> None:
    trained = Trained([(1.0, "master/0", 1), (2.0, "worker/0", 400), (3.0, "master/0", 390)], 0.9, sent=1000)
    assert trained.sent_until(100) == 250.0


def test_a_step_takes_what_lies_between_two_lines_behind_the_first_steps() -> None:
    lines = [(0.0, "x"), (1.0, "Train [fit/0], step 1: a"), (9.0, "Train [fit/0], step 100: a")]
    later = [(10.0, "Train [fit/0], step 110: a"), (11.0, "Exporting"), (12.0, "Train [fit/0], step 150: a"), (20.0, "end")]
    assert seconds_a_step([*lines, *later], 100) == 0.05
    for too_few in ([], lines, [*lines, later[0]], [*lines, later[0], later[0]]):
        with pytest.raises(MeasureError, match="no two Train lines after step 100"):
            seconds_a_step(too_few, 100)


def test_what_runs_beside_a_job_begins_with_its_first_step_and_ends_with_it() -> None:
    stack: Any = SimpleNamespace(env={"PATH": os.environ["PATH"]})
    seen: list[bool] = []

    def beside(over: threading.Event) -> None:
        seen.append(over.is_set())
        assert over.wait(30)
        seen.append(over.is_set())

    _follow(
        stack,
        ["sh", "-c", "echo 'master-0  Train [master/0], step 1: a'; sleep 0.2; echo 'Train [worker/0], step 2: a'"],
        beside,
    )
    assert seen == [False, True]
    _follow(stack, ["sh", "-c", "echo 'Final metrics after 1 steps'"], beside)
    assert seen == [False, True]
    with pytest.raises(MeasureError, match=r"ended with 3: why$"):
        _follow(stack, ["sh", "-c", "echo why >&2; exit 3"], None)


def test_any_worker_may_be_killed_and_a_seed_says_which() -> None:
    chosen = list(islice(victims(1, WORKERS), 100))
    assert set(chosen) == set(WORKERS)
    assert chosen == list(islice(victims(1, WORKERS), 100)) != list(islice(victims(2, WORKERS), 100))


def test_workers_are_killed_until_the_training_is_over_and_kills_are_counted() -> None:
    over, asked = threading.Event(), list[str]()

    def ran(host: str, _: str) -> Any:
        asked.append(host)
        if len(asked) == 3:
            over.set()
        return SimpleNamespace(code=1 if host == "b" else 0)

    stack: Any = SimpleNamespace(run=ran, ssh=lambda host, command: [host, command])
    killer = Killer(stack, iter("abcd"), 0.0)
    killer.run(over)
    assert asked == ["a", "b", "c"]
    assert killer.kills == 2


def test_the_accuracy_of_a_job_is_in_its_output(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text(json.dumps({"step": 10, "loss": 0.1, "accuracy": 0.99421}))
    assert evaluated(tmp_path) == 0.99421
    for content in ("{}", "{"):
        (tmp_path / "evaluation.json").write_text(content)
        with pytest.raises(MeasureError, match="has no accuracy"):
            evaluated(tmp_path)
    with pytest.raises(MeasureError, match="has no accuracy"):
        evaluated(tmp_path / "gone")


def test_memory_is_told_in_models_beyond_a_program_without_one() -> None:
    assert times({"ps-0": 700.0, "master-0": 1500.0}, {"ps-0": 300.0, "master-0": 500.0}, 400) == {"ps-0": 1.0, "master-0": 2.5}


def test_the_large_model_is_as_large_as_is_said() -> None:
    widths = [784, *flags.widths(training._LARGE), 10]
    numbers = sum((before + 1) * after for before, after in pairwise(widths))
    assert round(numbers * 4 / 1e6) == training._LARGE_MB


@pytest.mark.parametrize("tier", CONFIG)
def test_every_cluster_has_a_configuration_and_comes_after_any_other(tier: ScaleTier) -> None:
    for before in CONFIG:
        held = dict(CONFIG[before])
        for verb, key, *value in changes(CONFIG[before], CONFIG[tier]):
            held = {**held, key: value[0]} if verb == "set" else {name: held[name] for name in held if name != key}
        assert LxdConfig.parse(held).spec() == LxdConfig.parse(CONFIG[tier]).spec()
    assert LxdConfig.parse(CONFIG[tier]).scale_tier is tier


def test_ten_replicas_train_on_the_cluster_of_ten() -> None:
    roles = LxdConfig.parse(CONFIG[ScaleTier.CUSTOM]).spec().roles
    assert {role: spec.count for role, spec in roles.items()} == {Role.MASTER: 1, Role.WORKER: 9, Role.PS: 3}


def test_a_part_of_a_share_of_a_core() -> None:
    assert part_of("20ms/100ms", 0.25) == "5ms/100ms"
    with pytest.raises(MeasureError, match="less than a millisecond"):
        part_of("1ms/100ms", 0.25)


def test_the_synchronous_peer_has_the_rate_and_the_momentum_of_ours() -> None:
    from trainer.model import WarmupCosineDecay

    defaults = flags.parse(["--train-data", "x", "--eval-data", "x"])
    told = {name: flag(learning._MWMS, name) for name in ("--learning-rate", "--warmup-steps", "--max-steps", "--momentum")}
    ours = WarmupCosineDecay(defaults.learning_rate, int(flag(learning._OURS, "--max-steps")), 1 + len(WORKERS))
    for step in (0, 50, 199, 700, 1499):
        rise = min(1.0, (step + 1) / told["--warmup-steps"])
        fall = 0.5 + 0.5 * math.cos(math.pi * (step + 1) / told["--max-steps"])
        assert float(ours(step)) == pytest.approx(told["--learning-rate"] * rise * fall, rel=1e-4, abs=1e-6)
    assert defaults.momentum == told["--momentum"]
    assert flag(learning._MWMS, "--clip") == task._CLIP_NORM


def test_all_that_comes_to_an_accuracy_is_looked_at_on_one_grid() -> None:
    curves = (learning._OURS, learning._PEERS, learning._TWO, learning._TEN, learning._MWMS, learning._CLOUDML)
    assert {flag(arguments, "--checkpoint-steps") for arguments in curves} == {100}
    assert flag(learning._MWMS, "--steps-per-execution") * (1 + len(WORKERS)) == 50, "two of which are one step of the grid"


def test_checkpoints_of_every_kind_are_found_in_the_order_of_their_steps(tmp_path: Path) -> None:
    from benchmarks.accuracy_once import checkpoints, values

    for name in ("model-100.index", "model-20.index", "model.ckpt-3.index", "model-20.data-00000-of-00001", "checkpoint"):
        (tmp_path / name).touch()
    arrays = [np.full([2], number) for number in range(12)]
    np.savez(tmp_path / "weights-50.npz", *arrays)
    np.savez(tmp_path / "weights.npz", *arrays)
    found = checkpoints(tmp_path)
    assert [(step, path.name) for step, path in found] == [
        (3, "model.ckpt-3.index"), (20, "model-20.index"), (50, "weights-50.npz"), (100, "model-100.index"),
    ]  # fmt: skip
    network: Any = None
    np.testing.assert_array_equal(values(found[2][1], network), arrays)


def test_a_checkpoint_of_tensorflow_1_is_read_layer_by_layer(tmp_path: Path) -> None:
    from benchmarks.accuracy_once import tf, values

    layers = ("conv1", "conv2", "full", "logits")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for number, layer in enumerate(reversed(layers)):
            with tf.compat.v1.variable_scope(f"model/{layer}", use_resource=False):
                tf.compat.v1.get_variable("biases", initializer=[10.0 + number])
                tf.compat.v1.get_variable("weights", initializer=[[1.0 * number]])
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver().save(session, str(tmp_path / "model.ckpt"), 7)
    network: Any = None
    found = values(tmp_path / "model.ckpt-7.index", network)
    assert [float(value.sum()) for value in found] == [3.0, 13.0, 2.0, 12.0, 1.0, 11.0, 0.0, 10.0]
