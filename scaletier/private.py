"""Use private names of TensorFlow and Keras, each with its reason.

tests/unit/test_scaletier_private.py checks each in the versions of `VERSIONS`, which a job's runtimeVersion must name.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import importlib
import importlib.util
import os
import re
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scaletier.job import JobError
from scaletier.tensorflow_setup import import_tensorflow, quiet_stderr

# The time limit for the end of a coordinator's threads. A thread that runs a round ends after it.
_STOP_SECONDS = 5.0
# The minor versions of TensorFlow that the names below were looked up in, and of Keras with each.
VERSIONS = dict.fromkeys(("2.19", "2.20", "2.21"), ("3.13", "3.14", "3.15"))
# Texts of errors: from a call of another process, sent by that process, and from a process that has started again.
_REMOTE, _SENT = "GRPC error information from remote target", "Error received from peer"
_FORGOTTEN = (
    "Primary device is not remote",
    "Unable to find the relevant tensor remote_handle",
    "is neither a type of a primitive operation nor a name of a function registered",
)
# Of an all-reduce that the process began before it was restarted.
_RESTARTED = "current incarnation doesn't match with one in the group"
# The scopes of all threads in which tf.functions are traced anew.
_entered, _lock = list[Any](), threading.Lock()


def server_library() -> tuple[Any, Any]:
    """Return TensorFlow's server and the protocol buffers of its settings.

    A server needs TensorFlow's C++ and 4% of its Python. Importing only that takes 0.5 s instead of 2.2 s, which counts if
    many replicas start at once on few cpus; so its modules are imported without running TensorFlow's `__init__`.
    """
    # The chief reports errors of a step; a server's own lines are remarks about the CPU.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2") == "2":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    spec = importlib.util.find_spec("tensorflow")
    if "tensorflow" not in sys.modules and spec is not None and spec.submodule_search_locations:
        package = types.ModuleType("tensorflow")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["tensorflow"] = package
        try:
            with quiet_stderr():
                return (
                    importlib.import_module("tensorflow.python.training.server_lib").Server,
                    importlib.import_module("tensorflow.core.protobuf.config_pb2").ConfigProto,
                )
        except ImportError:
            for name in [name for name in sys.modules if name.partition(".")[0] == "tensorflow"]:
                del sys.modules[name]
    tf = import_tensorflow()
    return tf.distribute.Server, tf.compat.v1.ConfigProto


def check_keras() -> None:
    tensorflow, keras = (".".join(importlib.import_module(name).__version__.split(".")[:2]) for name in ("tensorflow", "keras"))
    valid = VERSIONS.get(tensorflow, (keras,))
    if keras not in valid:
        line = f"Keras {keras} is invalid with TensorFlow {tensorflow}. Valid: {', '.join(valid)}."
        raise JobError(f"{line} Run: pip install 'keras=={valid[-1]}.*'")


def is_lost_host(error: Exception) -> bool:
    """Return True if an error means that another host of the cluster is lost, whatever its code.

    A call to a peer that is gone is mostly Unavailable. A call to a peer that has restarted is Aborted, refers to what the peer
    does not know, or is FailedPrecondition in an all-reduce. Operations that waited for a peer are Cancelled or
    DeadlineExceeded; half a message is Internal. Unknown comes from the connection, unless a peer sent it: then the program
    that makes the data has raised an error.
    """
    errors, message = import_tensorflow().errors, str(error)
    if isinstance(error, errors.UnknownError):
        return _REMOTE in message and _SENT not in message
    if isinstance(error, errors.InvalidArgumentError | errors.NotFoundError):
        return any(text in message for text in _FORGOTTEN)
    if isinstance(error, errors.FailedPreconditionError):
        return _RESTARTED in message
    codes = "Unavailable", "Aborted", "Cancelled", "DeadlineExceeded", "Internal"
    return isinstance(error, tuple(getattr(errors, f"{code}Error") for code in codes))


class CoordinatorWorkers:
    """The coordinator's workers, one of which may become unresponsive without blocking the others.

    TensorFlow sends every function, and each operation on its first use, to all hosts and waits for each answer, unless it
    streams them; ParameterServerStrategy turns streaming off. Here only the workers' threads wait, as they must see errors.
    TensorFlow also removes functions that were garbage-collected, under a lock that all operations need: they are kept instead.
    And it frees tensors in an executor that threads share: this thread gets its own.
    """

    def __init__(self, coordinator: Any) -> None:
        self._cluster = coordinator._cluster
        eager = "tensorflow.python.eager."
        new_executor = importlib.import_module(f"{eager}executor").new_executor
        for worker in self._cluster.workers:
            worker.executor = new_executor(enable_async=False, enable_streaming_enqueue=False)
        os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "True"
        context = importlib.import_module(f"{eager}context").context()
        context.remove_function = lambda _name: None
        self._executor = new_executor(enable_async=False)  # lives as long as it is known here
        context.executor = self._executor

    def schedule(self, work: Callable[[], None]) -> None:
        """Schedule a Python function in a worker's thread; the public schedule() takes a tf.function, which knows no worker."""
        self._cluster.schedule(work, (), {})

    def stop(self) -> None:
        """End the coordinator's threads, so that they cannot abort the interpreter when the program ends.

        If one waits for an unresponsive host, the process ends by `os._exit`, with 1 after an uncaught error, else 0.
        """
        self._cluster.stop()
        threads = [one for one in threading.enumerate() if one.name.startswith(("WorkerClosure", "WorkerPreemption"))]
        end = time.monotonic() + _STOP_SECONDS
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            atexit.register(lambda: os._exit(int(hasattr(sys, "last_value"))))

    @property
    def failure(self) -> Exception | None:
        """The error that no worker can recover from; the public done() raises it only when no worker is in a round."""
        return self._cluster.closure_queue._error  # type: ignore[no-any-return]


def make_stateless(
    optimizer: Any, place: Callable[[Any], Any] | None = None, in_place: Callable[..., bool] = lambda *_: False
) -> Any:
    """Return the optimizer, not built yet, such that its `stateless_apply` works.

    Keras's TensorFlow-specific base class disables that, for tf.distribute's variables; the generic class takes its place. If
    `in_place(optimizer, gradient, variable, learning_rate)` returns True, it has updated the variable. `place(variable)` is
    a context to update each in; what else is done for each variable, such as weight decay, is then on the device of the
    variable's value. `global_clipnorm` takes the length of each gradient on its device, and allocates nothing of its size.
    `weights_by_slot` maps the id of a variable that is made for a weight, such as a velocity, to the weight.
    """
    import keras

    if hasattr(optimizer, "weights_by_slot"):
        return optimizer
    own = next(kind for kind in type(optimizer).__mro__ if kind.__name__ == "TFOptimizer")
    shared: Any = next(kind for kind in type(optimizer).__mro__ if kind.__name__ == "BaseOptimizer")
    kind: Any = type(optimizer)
    methods = {name: vars(shared)[name] for name in vars(own) if name in vars(shared) and not name.startswith("__")}

    def update(self: Any, gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
        for gradient, variable in zip(gradients, variables, strict=True):
            with place(variable) if place else contextlib.nullcontext():
                if not in_place(self, gradient, variable, learning_rate):
                    self.update_step(gradient, variable, learning_rate)

    def apply(self: Any, gradients: Sequence[Any], variables: Any = None) -> None:
        with import_tensorflow().compat.v1.device(_by_largest_input) if place else contextlib.nullcontext():
            shared.apply(self, gradients, variables)

    def clip(self: Any, gradients: Sequence[Any]) -> Any:
        most = self.global_clipnorm
        if not most:
            return shared._clip_gradients(self, gradients)
        tf, squares, clipped = import_tensorflow(), list[Any](), list[Any]()
        for gradient in gradients:
            with tf.device(gradient.device):
                squares.append(2.0 * tf.nn.l2_loss(getattr(gradient, "values", gradient)))
        scale = most / tf.maximum(tf.sqrt(tf.add_n(squares)), most)
        for gradient in gradients:
            with tf.device(gradient.device):
                if isinstance(gradient, tf.IndexedSlices):
                    clipped.append(tf.IndexedSlices(gradient.values * scale, gradient.indices, gradient.dense_shape))
                else:
                    clipped.append(gradient * scale)
        return clipped

    def clip_one(self: Any, gradient: Any, axes: Any = None) -> Any:
        tf = import_tensorflow()
        if isinstance(gradient, tf.IndexedSlices):  # as they are; the common way would sum those of a row
            return tf.clip_by_norm(gradient, self.clipnorm, axes)
        return shared._clip_by_norm(self, gradient, axes)

    def add(self: Any, reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
        slot = shared.add_variable_from_reference(self, reference_variable, name, initializer)
        weights_by_slot[id(slot)] = reference_variable
        return slot

    def make(self: Any, *args: Any, **named: Any) -> Any:
        # Without a value yet; what `build` makes besides are single numbers, which Keras makes in no such scope.
        with keras.StatelessScope(initialize_variables=False):
            return shared.add_variable(self, *args, **named)

    weights_by_slot: dict[int, Any] = {}
    methods |= {"_backend_update_step": update, "_clip_gradients": clip, "_clip_by_norm": clip_one, "apply": apply}
    methods |= {"add_variable": make, "add_variable_from_reference": add, "weights_by_slot": weights_by_slot}
    # Between the optimizer's own methods, which may call these, and what is for TensorFlow.
    common = type("Stateless", (keras.optimizers.Optimizer,), methods)
    made: Any = type(kind.__name__, (kind, common), {})

    def apply_to_all(self: Any, gradients: Sequence[Any], variables: Any = None) -> None:
        """Name the variables to an overridden `apply`, as Keras's `apply_gradients` does."""
        super(made, self).apply(gradients, self._trainable_variables if variables is None else variables)

    made.apply = apply_to_all
    optimizer.__class__ = made
    for inner in (getattr(optimizer, "inner_optimizer", optimizer), *inner_optimizers(optimizer)):
        make_stateless(inner, place, in_place)
    if choose := getattr(optimizer, "_optimizer_map", None):  # of a MultiOptimizer, which may make one for each variable
        optimizer._optimizer_map = lambda variable: make_stateless(choose(variable), place, in_place)
    return optimizer


def update_kernel(optimizer: Any, variable: Any) -> tuple[list[Any], Callable[..., Any]] | None:
    """Return what an optimizer's step changes for a weight, and TensorFlow's kernel for it; None if there is none.

    The function takes the handles of the changed variables, the gradient and the learning rate. The kernels compute what
    `update_step` of Keras does, in one pass.
    """
    import keras

    tf = import_tensorflow()
    optimizers, raw, kind = keras.optimizers, tf.raw_ops, type(optimizer).__mro__[1]  # without the class of `make_stateless`
    at = optimizer._get_variable_index(variable)
    if kind is optimizers.SGD and not optimizer.momentum:
        return [variable], lambda weight, gradient, rate: raw.ResourceApplyGradientDescent(
            var=weight, alpha=rate, delta=gradient
        )
    if kind is optimizers.SGD:
        return [variable, optimizer.momentums[at]], lambda weight, velocity, gradient, rate: raw.ResourceApplyKerasMomentum(
            var=weight,
            accum=velocity,
            lr=rate,
            grad=gradient,
            momentum=optimizer.momentum,
            use_nesterov=optimizer.nesterov,
        )
    if kind not in (optimizers.Adam, optimizers.AdamW) or optimizer.amsgrad:
        return None

    def adam(weight: Any, mean: Any, square: Any, gradient: Any, rate: Any) -> Any:
        step = tf.cast(optimizer.iterations, tf.float32) + 1.0
        powers = {f"beta{number}_power": tf.pow(beta, step) for number, beta in enumerate(betas, 1)}
        settings = {"lr": rate, "beta1": betas[0], "beta2": betas[1], "epsilon": optimizer.epsilon}
        return raw.ResourceApplyAdam(var=weight, m=mean, v=square, grad=gradient, **powers, **settings)

    betas = optimizer.beta_1, optimizer.beta_2
    return [variable, optimizer._momentums[at], optimizer._velocities[at]], adam


def _by_largest_input(operation: Any) -> str:
    """Return the device for an operation in a graph: that of its largest input, unless it has one."""
    if operation.device or not operation.inputs:
        return str(operation.device)
    return str(max(operation.inputs, key=lambda tensor: tensor.shape.num_elements() or 0).device)


def copy_optimizer(optimizer: Any) -> tuple[Any, dict[int, Any]]:
    """Return a copy of an optimizer, and the variable that each of its variables was copied from, by the copy's id.

    Unlike Keras's copy by configuration, it keeps a user's own functions.
    """
    optimizers = [optimizer]
    for one in optimizers:
        optimizers += [one.inner_optimizer] if hasattr(one, "inner_optimizer") else getattr(one, "optimizers", [])
    strategy = import_tensorflow().distribute.get_strategy()  # which no copy may be made of
    copies = {id(strategy): strategy, **{id(one): object.__new__(type(one)) for one in optimizers}}
    for one in optimizers:
        vars(copies[id(one)]).update(copy.deepcopy(vars(one), copies))
    return copies[id(optimizer)], {id(copies[id(one)]): one for one in optimizer.variables}


def unbuilt_copy(optimizer: Any) -> Any:
    """Return a copy of a built optimizer by its configuration, which lacks the weights without decay; it is not built."""
    made = type(optimizer).from_config(optimizer.get_config())
    for one, other in zip(inner_optimizers(made), inner_optimizers(optimizer), strict=True):
        kept = "_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"
        vars(one).update({name: value for name, value in vars(other).items() if name in kept})
    return made


def keep_weights_without_decay(optimizer: Any, variables: Sequence[Any]) -> None:
    """Keep the arguments of `exclude_from_weight_decay` for `make_stateless`.

    Keras's TensorFlow-specific class has other keys of weights, and searches for `var_names` in names such as `norm/gamma:0`.
    """
    for one in inner_optimizers(optimizer):
        excluded, pattern = (getattr(one, f"_exclude_from_weight_decay{end}", None) for end in ("", "_pattern"))
        if excluded or pattern:
            one._exclude_from_weight_decay = {
                id(variable)
                for variable in variables
                if getattr(stored(variable), "_unique_id", None) in (excluded or ())
                or (pattern and re.search(pattern, f"{variable.path}:0"))
            }
            one._exclude_from_weight_decay_pattern, one._exclude_from_weight_decay_cache = None, {}


def clear_session() -> None:
    """Reset Keras's names, as `keras.utils.clear_session`, but keep the settings that a program has made for its models."""
    keras, state = (importlib.import_module(name) for name in ("keras", "keras.src.backend.common.global_state"))
    names = "dtype_policy", "safe_mode_saving", "custom_objects_scope_dict", "flash_attention"
    kept = {name: value for name in names if (value := state.get_global_attribute(name)) is not None}
    keras.utils.clear_session(free_memory=False)
    for name, value in kept.items():
        state.set_global_attribute(name, value)


@contextlib.contextmanager
def optimizers_in_stateless_scope() -> Iterator[None]:
    """Let optimizers be created in a StatelessScope, which otherwise refuses their step counts: they have values at once."""
    state = importlib.import_module("keras.src.backend.common.global_state")
    base = importlib.import_module("keras").optimizers.Optimizer
    create = base.__init__

    def create_outside(self: Any, *args: Any, **kwargs: Any) -> None:
        scope = state.get_global_attribute("stateless_scope")
        state.set_global_attribute("stateless_scope", None)
        try:
            create(self, *args, **kwargs)
        finally:
            state.set_global_attribute("stateless_scope", scope)

    base.__init__ = create_outside
    try:
        yield
    finally:
        base.__init__ = create


@functools.cache
def _function_calls() -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """Return the class of tf.functions, its `__call__`, and one that traces anew in a StatelessScope.

    A trace from elsewhere has other values of variables. A scope's own is used again if it assigns nothing, while what it has
    read is unchanged, and within or outside of a custom gradient as before.
    """
    value_in = importlib.import_module("keras").StatelessScope.get_current_value
    state = importlib.import_module("keras.src.backend.common.global_state")
    kind: Any = type(import_tensorflow().function(lambda: None))  # not that of a loaded SavedModel, whose function is a graph
    call = kind.__call__

    def call_here(self: Any, *args: Any, **named: Any) -> Any:
        scope = state.get_global_attribute("stateless_scope")  # of this thread
        if type(self) is not kind or scope is None:
            return call(self, *args, **named)
        traces, tracing = vars(scope).setdefault("traces", {}), vars(scope).setdefault("tracing", [])
        get, update, key = scope.get_current_value, scope.add_update, (self, custom_gradient_around())
        trace, reads = traces.get(key, (None, {}))
        if trace is None or any(value_in(scope, variable) is not value for variable, value in reads.values()):
            trace, reads = traces[key] = self._clone(None), {}
        for outer in tracing:  # it reads the same also where this one is not traced again
            outer |= reads

        def read(variable: Any) -> Any:
            reads[id(variable)] = variable, get(variable)
            return reads[id(variable)][1]

        def assign(pair: Any) -> None:
            traces.pop(key, None)
            update(pair)

        scope.get_current_value, scope.add_update = read, assign
        tracing.append(reads)
        try:
            return call(trace, *args, **named)
        finally:
            scope.get_current_value, scope.add_update = get, update
            tracing.pop()

    return kind, call, call_here


@functools.cache
def _conditions() -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """Return the module of tf.cond, its `cond`, and one whose branches may assign variables in a StatelessScope.

    A first trace finds what they assign, which then is among their results. A weight whose reads have gradients is left out.
    Within a first trace only what is assigned counts, so branches within branches are not traced twice there.
    """
    module = importlib.import_module("tensorflow.python.ops.cond")
    state, tf = importlib.import_module("keras.src.backend.common.global_state"), import_tensorflow()
    cond, value_in = module.cond, importlib.import_module("keras").StatelessScope.get_current_value

    def cond_here(pred: Any, true_fn: Any = None, false_fn: Any = None, *args: Any, **named: Any) -> Any:
        scope = state.get_global_attribute("stateless_scope")
        if scope is None or tf.executing_eagerly():
            return cond(pred, true_fn, false_fn, *args, **named)
        around = vars(scope).get("recorded")
        assigned: dict[int, Any] = {} if around is None else around

        def run(function: Any) -> Any:
            update, before = scope.add_update, dict(scope.state_mapping)

            def assign(pair: Any) -> None:
                assigned[id(pair[0])] = pair[0]
                scope.state_mapping[id(pair[0])] = without_gradient(tf.convert_to_tensor(pair[1]))

            scope.add_update = assign
            try:
                result, values = function(), [(one, value_in(scope, one)) for one in assigned.values()]
                return result, [tf.cast(one.value, one.dtype) if value is None else value for one, value in values]
            finally:
                scope.add_update, scope.state_mapping = update, before

        def record() -> None:
            for function in (true_fn, false_fn):
                run(function)

        if around is not None:
            return cond(pred, lambda: run(true_fn)[0], lambda: run(false_fn)[0], *args, **named)
        scope.recorded = assigned
        try:
            tf.function(record, autograph=False).get_concrete_function()
        finally:
            del scope.recorded
        watched = hasattr(scope, "watched") and any(one.trainable for one in assigned.values())
        if watched or not assigned:
            return cond(pred, true_fn, false_fn, *args, **named)
        result, values = cond(pred, lambda: run(true_fn), lambda: run(false_fn), *args, **named)
        for pair in zip(assigned.values(), values, strict=True):
            scope.add_update(pair)
        return result

    return module, cond, cond_here


def trace_functions_in_scopes(scope: Any, entered: bool) -> None:
    """Have tf.functions and tf.cond use the values of StatelessScopes, from the first scope's begin to the last one's end."""
    kind, call, call_here = _function_calls()
    module, cond, cond_here = _conditions()
    with _lock:
        (_entered.append if entered else _entered.remove)(scope)
        kind.__call__, module.cond = (call_here, cond_here) if _entered else (call, cond)


def without_gradient(value: Any) -> Any:
    """Return a tensor without a gradient, in the tensor's own graph: a variable that a tf.function assigns may outlast it."""
    tf = import_tensorflow()
    if not tf.is_symbolic_tensor(value):
        return value
    with value.graph.as_default():
        return tf.stop_gradient(value)


def custom_gradient_around() -> str:
    """Return what the caller is within: `recompute` for tf.recompute_grad, `own` for another tf.custom_gradient, else ''.

    The arguments of a function with a custom gradient are read outside of it.
    """
    code = importlib.import_module("tensorflow.python.ops.custom_gradient")._graph_mode_decorator.__code__
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    if not any(frame.f_code is code and "variable_watcher" in frame.f_locals for frame in frames):
        return ""
    recomputes = any((one.f_code.co_name, one.f_code.co_filename) == ("inner", code.co_filename) for one in frames)
    return "recompute" if recomputes else "own"


def captures_other_graph() -> bool:
    """Return True if the present graph uses a tensor of one that is not around it, for which a call would have no value."""
    tf = import_tensorflow()
    graph = inner = tf.compat.v1.get_default_graph()
    graphs = [graph]
    while (inner := getattr(inner, "outer_graph", None)) is not None:
        graphs.append(inner)
    return any(tf.is_symbolic_tensor(one) and one.graph not in graphs for one, _ in getattr(graph, "captures", ()))


def forget_uninitialized() -> None:
    """Have Keras forget the variables that have no value yet, which it would initialize with the next model that is made."""
    state = importlib.import_module("keras.src.backend.common.global_state")
    state.set_global_attribute("uninitialized_variables", [])


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers that update variables: those within this one, or else itself."""
    if inner := getattr(optimizer, "inner_optimizer", None):
        return inner_optimizers(inner)
    return list(getattr(optimizer, "optimizers", [optimizer]))


def ema_variables(optimizer: Any) -> list[Any]:
    """Return the optimizer's moving averages of weights, which `use_ema` asks for."""
    return [one for one in getattr(optimizer, "_model_variables_moving_average", ()) if one is not None]


def layers(model: Any) -> list[Any]:
    return list(model._flatten_layers())


def is_loaded(value: Any) -> bool:
    """Return True for what tf.saved_model.load returns; the attribute alone may be one that a user's object makes up."""
    return isinstance(value, import_tensorflow().__internal__.tracking.AutoTrackable) and "signatures" in vars(value)


def resources(model: Any) -> list[Any]:
    """Return what layers use besides their variables: lookup tables, and what they have loaded by tf.saved_model.load."""
    kind, own = import_tensorflow().saved_model.experimental.TrackableResource, layers(model)
    values, parts = {id(one): one for one in own}, [part for layer in own for part in vars(layer).values()]
    while parts:
        if id(value := parts.pop()) not in values:
            values[id(value)] = value
            parts += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [one for one in list(values.values())[len(own) :] if isinstance(one, kind) or is_loaded(one)]


def stored(variable: Any) -> Any:
    """Return the tf.Variable of a Keras variable, None if it has no value yet; the public name depends on the scope."""
    return variable._value


def initializer_seed(variable: Any) -> Any:
    """Return the seed of a variable's initializer, None if it has none."""
    return getattr(variable._initializer, "seed", None)


def is_seed(variable: Any) -> bool:
    """Return True if a variable is the state of a random generator; the public SeedGenerator names it."""
    return "seed_generator_state" in variable.path


def rate_of(optimizer: Any) -> Any:
    """Return the optimizer's learning rate: a schedule, a function, or a number's variable; the public name is a value."""
    return optimizer._learning_rate


def iterations_of(optimizer: Any) -> Any:
    """Return the variable that counts an optimizer's steps; the public name may be divided by those of an accumulation."""
    return getattr(optimizer, "inner_optimizer", optimizer)._iterations


def compile_settings(model: Any) -> dict[str, Any]:
    """Return a model's settings by the names of `compile`, with functions, which the public `get_compile_config` only names."""
    return {**model._compile_config.config, "optimizer": model.optimizer} if model.compiled else {}


def compiled_loss(model: Any) -> Any:
    """Return the compiled function of targets, outputs and weights, or None; layers add nothing to it."""
    return model._compile_loss


def losses(model: Any) -> list[Any]:
    """Return the losses of a compiled model's outputs, once one was computed."""
    return [one.loss for one in (model._compile_loss and model._compile_loss._flat_losses) or ()]


@contextlib.contextmanager
def checked_losses(model: Any, check: Callable[..., Any]) -> Iterator[None]:
    """Call `check(function, targets, outputs, …)` in place of each loss's function, once Keras has aligned these."""
    functions = [(loss, loss.fn) for loss in losses(model) if hasattr(loss, "fn")]
    for loss, function in functions:
        loss.fn = functools.partial(check, function)
    try:
        yield
    finally:
        for loss, function in functions:
            loss.fn = function


def track_loss(model: Any, loss: Any, inputs: Any) -> Any:
    """Add a batch's loss to the mean over samples that `fit` of Keras logs; return the mean."""
    tf, tracker = import_tensorflow(), model._loss_tracker
    tracker.update_state(loss, sample_weight=tf.shape(next(one for one in tf.nest.flatten(inputs) if one is not None))[0])
    return tracker.result()


def attach(variable: Any, value: Any) -> None:
    variable._value = value


def metric_variables(model: Any) -> list[Any]:
    """Return the variables of all metrics of a compiled model, also those that `metrics` leaves out."""
    metrics = [*model._get_own_metrics(), *model.metrics]
    return list({id(one): one for metric in metrics for one in metric.variables}.values())


def copy_to_device(tensor: Any) -> Any:
    """Copy a tensor to the current device, with its Keras mask, which is kept beside it."""
    tf = import_tensorflow()
    copy = tf.identity(tensor)
    if (mask := getattr(tensor, "_keras_mask", None)) is not None:
        copy._keras_mask = tf.identity(mask)
    return copy
