"""The figures of a training, from its log lines, checkpoints and kills, and their comparisons."""

from __future__ import annotations

import json
import math
import os
import threading
from contextlib import nullcontext
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmarks import learning, schedules, trained, training
from benchmarks.learning import Killer, evaluated, victims
from benchmarks.measure import MeasureError, Ran
from benchmarks.stack import CONFIG, changes, part_of
from benchmarks.trained import Trained, _follow, seconds_a_step
from benchmarks.training import times
from waiting import limit

from infra.lxd.config import LxdConfig
from infra.scale_tiers import Role, ScaleTier
from trainer import flags, task

WORKERS = ("worker-0", "worker-1", "worker-2", "worker-3")


def flag(arguments: str, name: str) -> float:
    """Return the value of a numeric flag."""
    words = arguments.split()
    return float(words[words.index(name) + 1])


def test_bytes_sent_until_a_step_are_proportional_to_the_last_step() -> None:
    run = Trained([(1.0, "master/0", 1), (2.0, "worker/0", 400), (3.0, "master/0", 390)], 0.9, sent=1000)
    assert run.sent_until(100) == 250.0


def test_the_step_time_is_measured_between_lines_after_the_first_steps() -> None:
    lines = [(0.0, "x"), (1.0, "Train [fit/0], step 1: a"), (9.0, "Train [fit/0], step 100: a")]
    later = [(10.0, "Train [fit/0], step 110: a"), (11.0, "Exporting"), (12.0, "Train [fit/0], step 150: a"), (20.0, "end")]
    assert seconds_a_step([*lines, *later], 100) == 0.05
    for too_few in ([], lines, [*lines, later[0]], [*lines, later[0], later[0]]):
        with pytest.raises(MeasureError, match="no two Train lines after step 100"):
            seconds_a_step(too_few, 100)


def test_a_background_task_runs_from_the_first_step_to_the_end() -> None:
    stack: Any = SimpleNamespace(env={"PATH": os.environ["PATH"]})
    is_over: list[bool] = []

    def background(over: threading.Event) -> None:
        is_over.append(over.is_set())
        assert over.wait(limit())
        is_over.append(over.is_set())

    _follow(
        stack,
        ["sh", "-c", "echo 'master-0  Train [master/0], step 1: a'; sleep 0.2; echo 'Train [worker/0], step 2: a'"],
        background,
    )
    assert is_over == [False, True]
    _follow(stack, ["sh", "-c", "echo 'Final metrics after 1 steps'"], background)
    assert is_over == [False, True]
    with pytest.raises(MeasureError, match=r"ended with 3: why$"):
        _follow(stack, ["sh", "-c", "echo why >&2; exit 3"], None)


def test_the_killed_workers_depend_on_the_seed() -> None:
    chosen = list(islice(victims(1, WORKERS), 100))
    assert set(chosen) == set(WORKERS)
    assert chosen == list(islice(victims(1, WORKERS), 100)) != list(islice(victims(2, WORKERS), 100))


def test_workers_are_killed_until_the_end_and_kills_are_counted() -> None:
    over, hosts = threading.Event(), list[str]()

    def kill(host: str, _: str) -> Any:
        hosts.append(host)
        if len(hosts) == 3:
            over.set()
        return SimpleNamespace(code=1 if host == "b" else 0)

    stack: Any = SimpleNamespace(run=kill, ssh=lambda host, command: [host, command])
    killer = Killer(stack, iter("abcd"), 0.0)
    killer.run(over)
    assert hosts == ["a", "b", "c"]
    assert killer.kills == 2


def test_the_accuracy_is_read_from_the_job_s_output(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text(json.dumps({"step": 10, "loss": 0.1, "accuracy": 0.99421}))
    assert evaluated(tmp_path) == 0.99421
    for content in ("{}", "{"):
        (tmp_path / "evaluation.json").write_text(content)
        with pytest.raises(MeasureError, match="has no accuracy"):
            evaluated(tmp_path)
    with pytest.raises(MeasureError, match="has no accuracy"):
        evaluated(tmp_path / "gone")


def test_a_process_of_its_own_finds_the_benchmarks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environments = list[dict[str, str]]()

    def run(command: list[str], env: dict[str, str], *_: object) -> Ran:
        environments.append(env)
        return Ran(0, "[[100, 0.5]]", "", 1.0)

    monkeypatch.setattr(trained, "run", run)
    monkeypatch.setattr(trained, "running", lambda command, env, *_: (environments.append(env), nullcontext())[1])
    monkeypatch.setattr(trained, "Lines", lambda _: SimpleNamespace(until=lambda _: ()))
    assert trained.curve(tmp_path) == [(100, 0.5)]
    assert trained.process(["benchmarks.step_once"], tmp_path) == []
    assert all((Path(env["PYTHONPATH"]) / "benchmarks/accuracy_once.py").is_file() for env in environments)


def test_a_sweep_prints_steps_seconds_and_curves_of_each_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainings, curves = list[str](), iter([[(50, 0.9), (100, 0.992)], [(50, 0.9)]])

    def train(way: schedules.TrainingWay, arguments: str, folder: Path) -> Trained:
        assert folder.is_dir()
        trainings.append(f"{way.module} {arguments.removeprefix(way.flags)}")
        return Trained([(1.0, "master/0", 1), (11.0, "master/0", 101)], 0.9)

    monkeypatch.setattr(schedules, "train", train)
    monkeypatch.setattr(schedules, "curve", lambda _: next(curves))
    assert schedules.main(["one", "--max-steps 100", "--seeds", "4", "5"]) == 0
    assert trainings == ["trainer.task  --max-steps 100 --seed 4", "trainer.task  --max-steps 100 --seed 5"]
    assert json.loads(capsys.readouterr().out) == {
        "way": "one", "settings": "--max-steps 100", "seeds": [4, 5], "steps": [99, None], "seconds": [9.8, None],
        "curves": [{"50": 0.9, "100": 0.992}, {"50": 0.9}],
    }  # fmt: skip


def test_the_flags_of_a_sweep_are_the_trainer_s() -> None:
    for name in ("one", "async", "sync"):
        way = schedules.WAYS[name]
        for settings in way.settings:
            words = [*way.flags.split(), *settings.split(), "--seed", "1", "--train-data", "x", "--eval-data", "x"]
            assert flags.parse(words).checkpoint_steps == 50
    assert "--seed" not in (schedules.ROOT / "examples/mwms/task.py").read_text(), "so its trainings are repeated"


def test_memory_is_measured_in_model_sizes_above_a_baseline() -> None:
    assert times({"ps-0": 700.0, "master-0": 1500.0}, {"ps-0": 300.0, "master-0": 500.0}, 400) == {"ps-0": 1.0, "master-0": 2.5}


def test_the_large_model_has_the_documented_size() -> None:
    widths = [784, *flags.widths(training._LARGE), 10]
    numbers = sum((before + 1) * after for before, after in pairwise(widths))
    assert round(numbers * 4 / 1e6) == training._LARGE_MB


@pytest.mark.parametrize("tier", CONFIG)
def test_every_configuration_can_follow_every_other_one(tier: ScaleTier) -> None:
    for before in CONFIG:
        config = dict(CONFIG[before])
        for verb, key, *value in changes(CONFIG[before], CONFIG[tier]):
            config = {**config, key: value[0]} if verb == "set" else {name: config[name] for name in config if name != key}
        assert LxdConfig.parse(config).spec() == LxdConfig.parse(CONFIG[tier]).spec()
    assert LxdConfig.parse(CONFIG[tier]).scale_tier is tier


def test_the_custom_cluster_has_ten_training_hosts() -> None:
    roles = LxdConfig.parse(CONFIG[ScaleTier.CUSTOM]).spec().roles
    assert {role: spec.count for role, spec in roles.items()} == {Role.MASTER: 1, Role.WORKER: 9, Role.PS: 3}


def test_a_fraction_of_a_cpu_quota() -> None:
    assert part_of("20ms/100ms", 0.25) == "5ms/100ms"
    with pytest.raises(MeasureError, match="less than a millisecond"):
        part_of("1ms/100ms", 0.25)


def test_the_synchronous_peer_has_our_learning_rate_and_momentum() -> None:
    from trainer.model import WarmupCosineDecay

    defaults = flags.parse(["--train-data", "x", "--eval-data", "x"])
    peer_flags = {
        name: flag(learning._MWMS, name) for name in ("--learning-rate", "--warmup-steps", "--max-steps", "--momentum")
    }
    steps = int(peer_flags["--max-steps"])  # each trains for as long as it needs
    schedule = WarmupCosineDecay(defaults.learning_rate, defaults.warmup_steps, steps, 1 + len(WORKERS))
    for step in (0, 50, 199, 700, 1499):
        warmup = min(1.0, (step + 1) / peer_flags["--warmup-steps"])
        decay = 0.5 + 0.5 * math.cos(math.pi * (step + 1) / peer_flags["--max-steps"])
        assert float(schedule(step)) == pytest.approx(peer_flags["--learning-rate"] * warmup * decay, rel=1e-4, abs=1e-6)
    assert defaults.momentum == peer_flags["--momentum"]
    assert flag(learning._MWMS, "--clip") == task._CLIP_NORM


def test_all_accuracy_curves_have_the_same_number_of_checkpoints() -> None:
    curves = (learning._OURS, learning._PEERS, learning._TWO, learning._TEN, learning._MWMS, learning._CLOUDML)
    assert {flag(each, "--max-steps") // flag(each, "--checkpoint-steps") for each in curves} == {6}
    execution = flag(learning._MWMS, "--steps-per-execution") * (1 + len(WORKERS))
    assert flag(learning._MWMS, "--checkpoint-steps") == 5 * execution, "a checkpoint is saved only between executions"


def test_checkpoints_of_every_format_are_sorted_by_step(tmp_path: Path) -> None:
    from benchmarks.accuracy_once import checkpoints, values

    for name in ("model-100.index", "model-20.index", "model.ckpt-3.index", "model-20.data-00000-of-00001", "checkpoint"):
        (tmp_path / name).touch()
    arrays = [np.full([2], number) for number in range(12)]
    np.savez(tmp_path / "weights-50.npz", *arrays)
    np.savez(tmp_path / "weights.npz", *arrays)
    paths_by_step = checkpoints(tmp_path)
    assert [(step, path.name) for step, path in paths_by_step] == [
        (3, "model.ckpt-3.index"), (20, "model-20.index"), (50, "weights-50.npz"), (100, "model-100.index"),
    ]  # fmt: skip
    np.testing.assert_array_equal(values(paths_by_step[2][1]), arrays)


def test_a_tensorflow_1_checkpoint_is_read_layer_by_layer(tmp_path: Path) -> None:
    from benchmarks.accuracy_once import tf, values

    layers = ("conv1", "conv2", "full", "logits")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for number, layer in enumerate(reversed(layers)):
            with tf.compat.v1.variable_scope(f"model/{layer}", use_resource=False):
                tf.compat.v1.get_variable("biases", initializer=[10.0 + number])
                tf.compat.v1.get_variable("weights", initializer=[[1.0 * number]])
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver().save(session, str(tmp_path / "model.ckpt"), 7)
    arrays = values(tmp_path / "model.ckpt-7.index")
    assert [float(value.sum()) for value in arrays] == [3.0, 13.0, 2.0, 12.0, 1.0, 11.0, 0.0, 10.0]
