"""A failed round, or a host lost during one: what is kept is of one step, and counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from scaletier.asynchronous import Asynchronous
from scaletier.checkpoint import LocalCopy
from scaletier.job import Job
from scaletier.loop import Progress
from scaletier.network import FunctionalModel
from scaletier.round_graph import State, make_round
from scaletier.runtime import import_tensorflow
from scaletier.shared_parameters import SharedParameters
from scaletier.synchronous import AllReduce

tf = import_tensorflow()
import keras  # noqa: E402 - it comes with TensorFlow, whose import is the quiet one

DEVICES = ("/device:CPU:0",)


def job() -> Job:
    data = tf.data.Dataset.from_tensors((tf.ones([2, 1]), tf.zeros([2, 1]))).repeat()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    return Job(model, data, "mse", optimizer=keras.optimizers.SGD(0.1, 0.9))


def waits(operation: Any) -> set[Any]:
    """Return the operations that are over before this one begins."""
    found, ahead = set[Any](), [operation]
    while ahead:
        one = ahead.pop()
        before = {*one.control_inputs, *(tensor.op for tensor in one.inputs)} - found
        found |= before
        ahead += before
    return found


def assigned(graph: Any) -> dict[int, Any]:
    """Return the operations that assign variables, by the ids of the variables' handles."""
    handles = {internal.name: id(external) for external, internal in graph.captures}
    return {handles[one.inputs[0].name]: one for one in graph.get_operations() if one.type.startswith("Assign")}


def test_steps_are_counted_before_anything_of_them_is_added() -> None:
    specs = [SimpleNamespace(size=6, shape=(6,))]
    held = SharedParameters(SimpleNamespace(shared=specs), DEVICES * 3, [np.zeros(6, np.float32)], 7)  # type: ignore[arg-type]
    ends = [tf.TensorSpec([6])], [tf.TensorSpec([6])]
    add = tf.function(lambda start, reached: held.push_delta(start, reached, 0.5, tf.constant(4, tf.int64)), autograph=False)
    assigns = assigned(add.get_concrete_function(*ends).graph)
    count = assigns[id(held._step.handle)]
    assert len(held._pieces) == 3
    assert all(count in waits(assigns[id(piece.handle)]) for piece in held._pieces)


def test_a_synchronous_round_without_a_mean_changes_nothing() -> None:
    data = job()
    network = FunctionalModel(data, data.data.element_spec, 0)
    copy = LocalCopy(network)
    exchange = AllReduce(copy, copy.local, 2, lambda value: tf.identity(value, name="all_reduce"))
    graph = make_round(network, exchange, iter(data.data), DEVICES).graph
    mean, assigns = graph.get_operation_by_name("all_reduce"), assigned(graph)
    assert len(assigns) == len([*copy.shared, *copy.local, copy.step])
    assert all(mean in waits(one) for one in assigns.values())


def test_a_rescued_checkpoint_has_the_step_that_its_weights_were_read_at() -> None:
    made, data = Asynchronous.__new__(Asynchronous), job()
    made.job = data
    made.network = network = FunctionalModel(data, data.data.element_spec, 0, 2)
    begun = State.initial(network)
    made.servers = held = SharedParameters(network, DEVICES, [np.asarray(value) for value in begun.shared], 10)
    made.copy = copy = LocalCopy(network)
    made.count, made.chief = 2, MagicMock()
    made.flags = SimpleNamespace(sync_period=4, max_steps=100, eval_steps=None, log_interval=1.0)
    iterator = iter(data.data)
    made.graphs = {DEVICES: make_round(network, held, iterator, DEVICES)}
    made.progress = Progress(10, 100, 2)
    replica = made._replica("master/0", iterator, DEVICES, print)
    state, _ = replica.take(State((), begun.local), 4, 0, 2)
    read = [np.asarray(value) for value in held.pull_fp16()]
    held.push_delta([tf.zeros(one.shape) for one in read], [tf.ones(one.shape) for one in read], 1.0, tf.constant(5, tf.int64))
    made.progress.step = 19
    replica.take(state, 4, 0, 2)
    made.progress.step = 50
    made.rescue()
    made.chief.rescue.assert_called_once_with()
    assert int(copy.step) == 19
    for variable, value in zip(copy.shared, read, strict=True):
        np.testing.assert_allclose(variable, value + 1, atol=2e-3)
