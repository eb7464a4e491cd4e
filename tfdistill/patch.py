"""patch_keras: an ordinary Keras script trains on workers, servers, in groups.

The script's own model object stays what it is. Keras' methods on it hand over
to a `DistributedModel` or `CodistillModel` around it, which trains it where the
strategy or the run asks for that. Elsewhere Keras' own methods run.
"""

import collections
import contextlib
import copy
import functools
import importlib
import inspect
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill import callbacks as callbacks_lib
from tfdistill import data
from tfdistill import losses as losses_lib
from tfdistill import model as model_lib
from tfdistill.cluster import identity
from tfdistill.cluster import method
from tfdistill.cluster import outputs
from tfdistill.cluster import replicas
from tfdistill.cluster import strategy as strategy_lib
from tfdistill.system import fits
from tfdistill.system import keras_internals
from tfdistill.teachers import own_past
from tfdistill.teachers import peers
from tfdistill.teachers import predictions
from tfdistill.training import fit_arguments
from tfdistill.training import guards
from tfdistill.training import own_steps
from tfdistill.training import steps

_KINDS: Mapping[str, Callable[[], losses_lib.DistillationLoss]] = {
    "classes": losses_lib.SoftTargetCrossEntropy,
    "binary": losses_lib.BinarySoftTargetCrossEntropy,
    # Any number that is predicted counts as it is.
    "values": lambda: losses_lib.LogitsMeanSquaredError(from_logits=True),
}
# The methods of a `keras.Model` that are replaced, besides `compile`.
_METHODS = (
    "evaluate",
    "fit",
    "get_metrics_result",
    "predict",
    "predict_on_batch",
    "reset_metrics",
    "test_on_batch",
    "train_on_batch",
)
_TRAINING = "fit", "train_on_batch"
# Arguments of `compile` that decide whether others stay, and those.
_METRICS = "metrics", "weighted_metrics"
_KEPT_TOGETHER = (("loss",), ("loss", "loss_weights")), (_METRICS, _METRICS)
# Those that write, and so on the chief only.
_WRITERS = ("export", "save", "save_weights")
# The methods of a comparison in which groups teach each other.
_OF_GROUPS = method.PEERS, method.PREDICTIONS
# Rows of the validation data that are compared.
_MOST_HELD_OUT, _HELD_OUT_BATCH = 4096, 256
# A method of Keras' or a function of TensorFlow's that another replaces, which
# gets it as its first argument.
_Call = Callable[..., Any]
_Path = str | os.PathLike[str]
# Attribute of a script's model, of which Keras knows nothing.
_STATE = "_tfdistill_patch"


def patch_keras(
    on: bool = True,
    *,
    teachers: str = "peers",
    distillation_loss: str | None = None,
    distillation_weight: float | str = "auto",
    every_steps: int | str = "auto",
) -> None:
    """Makes Keras' own `fit` train an ordinary script as its run asks.

    Call it before anything else uses TensorFlow: it makes the strategy of this
    task (see `make_strategy`), which all that the script creates is then
    created under. `tfdistill run` and `python -m tfdistill` call it for a
    script that doesn't import tfdistill. A model that the script wraps in a
    `DistributedModel` or `CodistillModel` trains as that says.

    Args:
        on: False gives Keras its own methods back.
        teachers: In a run of several groups, whom they learn from: "peers",
            "own-past", "predictions" or "none". Default "peers".
        distillation_loss: What is compared with teachers: "classes" (a
            distribution over classes), "binary" (probabilities of yes), or
            "values" (numbers). Default: what fits the loss of `compile`, by
            output.
        distillation_weight: The weight of the distillation loss. Default
            "auto"; see `CodistillModel.compile`.
        every_steps: Steps between exports. Default "auto"; see
            `callbacks.StudentExporter`.

    Raises:
        ValueError: An argument is not as above, or the environment is wrong;
            see `make_strategy`.
    """
    for name, given, known in (
        ("teachers", teachers, method.TEACHERS),
        (
            "distillation_loss",
            distillation_loss,
            (None, *method.DISTILLATION_LOSSES),
        ),
    ):
        if given not in known:
            allowed = ", ".join(map(repr, known))
            raise ValueError(
                f"`{name}` must be one of {allowed}; received {given!r}."
            )
    _patched.undo()
    if on:
        _patched.apply(
            every_steps=every_steps,
            loss=distillation_loss,
            teachers=teachers,
            weight=distillation_weight,
        )


class _Patch:
    """What of Keras is replaced in this process, and how models train."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()
        self._said = False
        # Whether Keras writes a model.
        self.is_writing = False
        # Whether the strategy is TensorFlow's own for one device, or entered.
        self._is_default, self._has_entered = True, False
        # Whether the script has asked for a strategy of workers.
        self.is_scripts_own: Callable[[], bool] = lambda: False
        self.strategy: tf.distribute.Strategy | None = None
        self.files = outputs.of(identity.Cluster())
        self.settings: dict[str, Any] = {}

    def apply(self, **settings: object) -> None:
        """Makes the strategy, and replaces what a script calls."""
        self.settings = settings
        keras_internals.prepare()  # What it replaces stays.
        strategy = self.strategy
        if strategy is None:
            strategy = self.strategy = strategy_lib.make_strategy()
            self._is_default = strategy is tf.distribute.get_strategy()
        self.enter()
        cluster = strategy_lib.cluster_of(strategy)
        self._undo.callback(self._leave)
        self._undo.callback(_differ(cluster))
        self.is_scripts_own, undo = keras_internals.give_strategy(strategy)
        self._undo.callback(undo)
        self._undo.callback(keras_internals.normalize_over_replicas())
        self.files = outputs.of(cluster)
        self._replace("compile", _compile)
        for name in _METHODS:
            self._replace(name, functools.partial(_hand_over, name))
        for name in _WRITERS:
            self._replace(name, _write)
        self._undo.callback(
            keras_internals.replace_functions(
                clear_session=_clear, save_model=_save, save_weights=_write
            )
        )
        self.files.find()
        self._undo.callback(self.files.leave)
        # Which TensorFlow puts in the place of another when first imported.
        saved_models = importlib.import_module("tensorflow.saved_model")
        self._replace("load", _load_exported, saved_models)
        self._replace("save", _save_exported, saved_models)
        self._undo.callback(
            keras_internals.replace_checkpoint_writer(_write_checkpoint)
        )
        manager = tf.train.CheckpointManager
        self._replace("__init__", _manage_checkpoints, manager)
        has_others = strategy.num_replicas_in_sync > 1
        has_others |= replicas.on_servers(strategy) or self.teaches(cluster)
        if has_others or cluster.workdir:
            self._undo.callback(outputs.share_directories(cluster))
        if has_others:
            self._replace("make_train_function", _make_train_function)
            self._replace("gradient", _gradient, tf.GradientTape)
            self._replace("watch", _watch, tf.GradientTape)

    def enter(self) -> None:
        """Puts all that is created from now on under the strategy."""
        if not self._is_default and not tf.distribute.has_strategy():
            tf.distribute.experimental_set_strategy(self.strategy)
            self._has_entered = True

    def _leave(self) -> None:
        if self._has_entered:
            tf.distribute.experimental_set_strategy(None)
            self._has_entered = False

    def undo(self) -> None:
        """Gives Keras its own methods back."""
        self._undo.close()

    def _replace(
        self, name: str, by: Callable[..., Any], home: Any = None
    ) -> None:
        # Where Keras has it: it looks whether `compile` is its own.
        home = home or next(
            kind for kind in keras.Model.__mro__ if name in vars(kind)
        )
        self._undo.callback(keras_internals.replace(home, name, by))

    def teaches(self, cluster: identity.Cluster) -> bool:
        """Whether models learn from teachers."""
        if cluster.method:
            return True
        return cluster.num_groups > 1 and self.settings["teachers"] != "none"

    def tell(self, wrapper: model_lib.DistributedModel) -> None:
        """Prints once what is done, and how to change it."""
        if self._said:
            return
        self._said = True
        strategy = wrapper.distribute_strategy
        cluster = strategy_lib.cluster_of(strategy)
        if replicas.on_servers(strategy):
            where = "on parameter servers"
        elif (number := strategy.num_replicas_in_sync) > 1:
            where = f"on {number} replicas"
        else:
            where = "on one device"
        groups = ""
        if cluster.num_groups > 1:
            groups = f", as group {cluster.group} of {cluster.num_groups}"
            if cluster.method:
                groups += f", by the method {cluster.method.name}"
            elif self.teaches(cluster):
                groups += f" with teachers={self.settings['teachers']}"
        if replicas.is_chief(strategy):
            print(
                f"tfdistill: trains the models of this script {where}{groups}. "
                "--no-patch leaves them to Keras.",
                file=sys.stderr,
            )


_patched = _Patch()


def _differ(cluster: identity.Cluster) -> Callable[[], None]:
    """Makes groups begin with other weights, and read the same data.

    Seeds that a script sets, and seeds that Keras draws, differ in each group
    and trial. Python's and NumPy's random numbers, by which scripts split their
    data, do not. Returns what undoes it.
    """
    chosen = cluster.method
    drawn = None if chosen is None else chosen.group_seed(cluster.group)
    if drawn is None and cluster.num_groups == 1:
        return lambda: None
    random.seed(0)
    np.random.seed(0)
    tf.random.set_seed(0)
    own: list[int] = [cluster.group] if drawn is None else [drawn]
    if own == [0]:
        return lambda: None
    return keras_internals.change_seeds(
        lambda seed: int(
            np.random.SeedSequence([seed, *own]).generate_state(1)[0] >> 1
        )
    )


def _compile(
    own: _Call, model: keras.Model, *args: object, **kwargs: object
) -> None:
    """Notes what a script compiles a model with."""
    own(model, *args, **kwargs)
    if not isinstance(model, model_lib.DistributedModel):
        found = _state(model)
        asked = fit_arguments.bind(own.__get__(model), args, kwargs)
        for decide, kept in _KEPT_TOGETHER:
            # As Keras keeps what is left out when a model is compiled again.
            if all(asked.get(name) is None for name in decide):
                asked |= {name: found.arguments.get(name) for name in kept}
        found.arguments, found.is_compiled = asked, False


def _hand_over(
    name: str, own: _Call, model: keras.Model, *args: object, **kwargs: object
) -> Any:
    """Calls a method of the model around a script's own, if it has one."""
    if isinstance(model, model_lib.DistributedModel) or tf.inside_function():
        return own(model, *args, **kwargs)
    wrapper = _state(model).wrapper(name)
    if wrapper is None:
        return own(model, *args, **kwargs)
    return getattr(wrapper, name)(*args, **kwargs)


def _write(
    own: _Call, model: keras.Model, filepath: _Path, *args: object, **kw: object
) -> Any:
    """Writes a model on the chief, for all workers to read after that."""
    strategy = _patched.strategy
    if isinstance(model, model_lib.DistributedModel) or strategy is None:
        return own(model, filepath, *args, **kw)
    path = _patched.files.written(filepath)

    def write() -> Any:
        before, _patched.is_writing = _patched.is_writing, True
        try:
            # Keras makes variables meanwhile, which no other worker would.
            return replicas.outside_scopes(
                lambda: own(model, path, *args, **kw)
            )
        finally:
            _patched.is_writing = before

    if replicas.num_workers(strategy) == 1 or _patched.is_scripts_own():
        return write()
    is_chief, is_within = replicas.is_chief(strategy), fits.is_under_way()
    try:
        if is_chief:
            write()
    finally:
        if not is_within:
            replicas.meet(strategy, "save")
    # A temporary file, say, or a local disk: each worker has another file.
    is_path = isinstance(path, str | os.PathLike)
    if not is_chief and not is_within and is_path and _is_missing(path):
        write()
    return None


def _is_missing(path: str | os.PathLike[str]) -> bool:
    name = os.fspath(path)
    if "://" in name:
        return False
    return not os.path.exists(name) or (
        os.path.isfile(name) and not os.path.getsize(name)
    )


def _save_exported(
    own: _Call, obj: object, export_dir: _Path, *args: object, **kwargs: object
) -> None:
    """Exports what a script gives to TensorFlow itself."""
    # Keras does so, too, on the chief only.
    if _patched.is_writing:
        return own(obj, export_dir, *args, **kwargs)
    path = _patched.files.written(export_dir)
    return _write_together(lambda place: own(obj, place, *args, **kwargs), path)


def _write_checkpoint(
    own: _Call,
    checkpoint: tf.train.Checkpoint,
    prefix: str,
    options: tf.train.CheckpointOptions | None = None,
) -> str:
    """Writes a checkpoint of TensorFlow's."""
    path = _patched.files.written(prefix)

    def write(place: _Path) -> None:
        changed = options
        if place != path and options and options.experimental_write_callbacks:
            # Such as those that note which checkpoints there are.
            tf.io.gfile.makedirs(os.path.dirname(path) or os.curdir)
            changed = copy.copy(options)
            changed.experimental_write_callbacks = [
                functools.partial(_call_with, callback, path)
                for callback in options.experimental_write_callbacks
            ]
        own(checkpoint, place, changed)

    _write_together(write, path)
    return path


def _call_with(callback: Callable[..., None], path: str, _: str) -> None:
    callback(*[path][: len(inspect.signature(callback).parameters)])


def _write_together(write: Callable[[_Path], None], path: _Path) -> None:
    """Writes on all workers, and keeps what the chief has written.

    TensorFlow's own variables may be of a kind that all workers read together.
    """
    strategy = _patched.strategy
    is_apart = _patched.is_scripts_own()
    if strategy is None or is_apart or replicas.num_workers(strategy) == 1:
        write(path)
        return
    if replicas.is_chief(strategy):
        write(path)
    else:
        with tempfile.TemporaryDirectory() as place:
            write(os.path.join(place, "files"))
    if not fits.is_under_way():
        replicas.meet(strategy, "save")


def _manage_checkpoints(
    own: _Call,
    manager: tf.train.CheckpointManager,
    checkpoint: tf.train.Checkpoint,
    directory: _Path,
    *a: object,
    **k: object,
) -> None:
    """Keeps a group's checkpoints apart from other groups'."""
    own(manager, checkpoint, _patched.files.written(directory), *a, **k)


def _clear(own: _Call, *args: object, **kwargs: object) -> None:
    """Clears what Keras keeps, but not the strategy of the task."""
    own(*args, **kwargs)
    _patched.enter()


def _save(
    own: _Call, model: keras.Model, filepath: _Path, *args: object, **kw: object
) -> Any:
    """Saves a whole model as its method does."""
    if isinstance(model, model_lib.DistributedModel):
        return model.save(filepath, *args, **kw)
    return _write(own, model, filepath, *args, **kw)


def _load_exported(own: _Call, *args: object, **kwargs: object) -> Any:
    """Loads what was exported, for calls as in one process."""
    return replicas.outside_scopes(lambda: own(*args, **kwargs))


def _gradient(
    own: _Call,
    tape: tf.GradientTape,
    target: object,
    sources: object,
    *a: object,
    **k: object,
) -> Any:
    """Refuses a script's own loop that each worker or group would run alone."""
    is_step = fits.is_under_way() or replicas.in_replica()
    if not is_step and any(
        isinstance(each, keras.Variable | tf.Variable) and each.trainable
        for each in keras.tree.flatten(sources)
    ):
        raise _own_loop("tape.gradient")
    found = keras.tree.map_structure(keras_internals.copy_here, sources)
    return own(tape, target, found, *a, **k)


def _watch(own: _Call, tape: tf.GradientTape, tensor: object) -> None:
    """Watches what is read of a variable here."""
    own(tape, keras.tree.map_structure(keras_internals.copy_here, tensor))


def _make_train_function(
    own: _Call, model: keras.Model, *args: object, **kw: object
) -> Any:
    """Refuses a loop over Keras' own step, which knows no other task."""
    if not isinstance(model, model_lib.DistributedModel):
        raise _own_loop("make_train_function")
    return own(model, *args, **kw)


def _own_loop(call: str) -> ValueError:
    return ValueError(
        f"A training loop of the script's own, which calls `{call}` outside of "
        "Keras' `fit`, must not be run on several workers, servers or groups: "
        "each would train all by itself. Move the step into the `train_step` "
        "of a keras.Model and call `fit`; or train in one task, or with "
        "--no-patch."
    )


def _state(model: keras.Model) -> "_State":
    found = vars(model).get(_STATE)
    if found is None:
        found = _State(model)
        object.__setattr__(model, _STATE, found)
    return found


class _State:
    """What is kept beside a script's model.

    Attributes:
        arguments: What Keras compiled it with.
        is_compiled: Whether the model around it was compiled with that.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._wrapper: Any = None
        self.arguments: dict[str, Any] = {}
        self.is_compiled = False

    def wrapper(self, call: str) -> Any:
        """Returns the model around it; None if Keras' own method will do."""
        model = self._model
        # A new thread has no strategy.
        strategy: Any = model.distribute_strategy or _patched.strategy
        cluster = strategy_lib.cluster_of(strategy)
        is_alone = strategy.num_replicas_in_sync == 1
        if is_alone and not replicas.on_servers(strategy):
            is_late = cluster.method is None and _is_built_late(model)
            is_helped = cluster.workdir is not None and not is_late
            if cluster.num_groups == 1 and not is_helped:
                return None
            if self._wrapper is None and call not in _TRAINING:
                return None
        if not model.compiled and not call.startswith("predict"):
            return None  # Keras says so.
        wrapper = self._wrapper
        if wrapper is None:
            kind = _Codistilled if _patched.teaches(cluster) else _Distributed
            with strategy.scope():
                wrapper = kind.around(model, _patched.settings)
        if model.compiled and not self.is_compiled:
            with strategy.scope():
                wrapper.compile_as(model, dict(self.arguments))
            self.is_compiled = True
        self._wrapper = wrapper
        if call in _TRAINING:
            _patched.tell(wrapper)
        return wrapper


def _is_built_late(model: keras.Model) -> bool:
    """Whether only its own `train_step` can build it, as with a GAN."""
    if not own_steps.is_own(model, "train_step"):
        return False
    parts = keras_internals.all_layers(model)
    return not all(part.built for part in parts if part is not model)


def _of_script(name: str) -> Any:
    def write(self: "_OfScript", value: object) -> None:
        # Keras sets some before there is a model inside.
        if "model" in vars(self):
            setattr(self.model, name, value)

    return property(lambda self: getattr(self.model, name), write)


class _OfScript(model_lib.DistributedModel):
    """What models around a script's own do otherwise than any other."""

    _is_validating = False
    # By these a script and its callbacks talk to Keras.
    history, stop_training, _initial_epoch = map(
        _of_script, ("history", "stop_training", "_initial_epoch")
    )

    def compile_as(self, model: keras.Model, arguments: dict[str, Any]) -> None:
        """Compiles it as a script has compiled its own model."""
        if self._exchanges and arguments.get("jit_compile") is True:
            warnings.warn(
                "`jit_compile=True` is left out: XLA cannot compile what "
                "replicas and servers exchange.",
                stacklevel=2,
            )
            arguments["jit_compile"] = False
        if not self._own.is_compiled:
            # Keras has made of it what it makes for the dtype.
            own = {"optimizer": model.optimizer, "auto_scale_loss": False}
            self.compile(**{**arguments, **own})
            keras_internals.lend_compiled(self, model, metrics=True)
        else:
            self.compile(jit_compile=arguments.get("jit_compile", "auto"))

    def _compile_inside(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        if self._own.is_compiled:
            return kwargs, {**self._own.compiled, **kwargs}
        return super()._compile_inside(args, kwargs)

    def _callbacks(self, arguments: dict[str, Any]) -> list[Any]:
        given = guards.listed(arguments.get("callbacks"))
        added = self._added(given)
        if steps.first(added, callbacks_lib.Backup):
            # It does the same, and on several workers.
            kind = keras.callbacks.BackupAndRestore
            given = [each for each in given if not isinstance(each, kind)]
        return super()._callbacks({**arguments, "callbacks": [*given, *added]})

    def _added(self, given: list[Any]) -> list[Any]:
        """Returns the callbacks that a launched run adds."""
        directory = self._cluster.group_dir
        if directory is None or steps.first(given, callbacks_lib.Backup):
            return []
        # No backup counts other optimizers' steps, such as a GAN's.
        optimizers = keras_internals.optimizers_of(self.model).values()
        if any(each is not self.optimizer for each in optimizers):
            return []
        return [callbacks_lib.Backup(f"{directory}/backup")]

    def fit(self, *args: object, **kwargs: object) -> Any:
        """Trains the script's model; see `DistributedModel.fit`."""
        keras_own = keras.Model.fit.__get__(self)
        arguments = fit_arguments.bind(keras_own, args, kwargs)
        # Keras leaves these out without a word.
        if isinstance(arguments.get("x"), tf.data.Dataset):
            arguments.pop("batch_size", None)
        if arguments.get("validation_data") is not None:
            arguments.pop("validation_split", None)
        with _shown(self.model, arguments.get("callbacks")):
            history = super().fit(**arguments)
        history.set_model(self.model)
        return history

    def evaluate(self, *args: object, **kwargs: object) -> Any:
        """Evaluates as `keras.Model.evaluate`; within `fit` as the script does.

        Keras' `fit` calls the `evaluate` that the script's class may define,
        which may call Keras' again.
        """
        is_of_fit = "_use_cached_eval_dataset" in kwargs
        if not is_of_fit or self._is_validating:
            return super().evaluate(*args, **kwargs)
        self._is_validating = True
        try:
            return self.model.evaluate(*args, **kwargs)
        finally:
            self._is_validating = False

    def _loop(
        self,
        name: str,
        keras_own: _Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        arguments = fit_arguments.bind(keras_own, args, kwargs)
        with _shown(self.model, arguments.get("callbacks")):
            return super()._loop(name, keras_own, (), arguments)


@contextlib.contextmanager
def _shown(model: keras.Model, callbacks: object) -> Iterator[None]:
    """Makes a script's callbacks see its own model, not the model around it."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        yield  # The `fit` that it is called in has them.
        return
    changed = [
        each
        for each in guards.listed(callbacks)
        if not isinstance(each, steps.SteppedCallback)
    ]
    for each in changed:
        own = type(each).set_model.__get__(each)
        each.set_model = lambda _, own=own: own(model)
    try:
        yield
    finally:
        for each in changed:
            vars(each).pop("set_model", None)


class _Distributed(_OfScript):
    """Trains a script's model on workers or servers."""

    # Its own loops run, and their calls of Keras are handed over.
    _NEVER_RUN = (
        "make_predict_function",
        "make_test_function",
        "make_train_function",
    )

    @classmethod
    def around(cls, model: keras.Model, settings: Mapping[str, Any]) -> Any:
        """Wraps a script's model."""
        return cls(model)


class _Codistilled(_OfScript, model_lib.CodistillModel):
    """Trains a script's model in one of several groups."""

    _settings: Mapping[str, Any] = {}

    @classmethod
    def around(cls, model: keras.Model, settings: Mapping[str, Any]) -> Any:
        """Wraps a script's model."""
        # Into these nothing can be added.
        if own := [n for n in cls._NEVER_RUN if own_steps.is_own(model, n)]:
            raise ValueError(
                "Groups must train by Keras' own steps, to which they add what "
                f"they learn from each other; received {type(model).__name__} "
                f"with its own {', '.join(own)}. Move that code into "
                "`compute_loss`, or into `self.add_loss` in `call` or a layer; "
                "or train without teachers: `tfdistill run --teachers=none`."
            )
        kinds: Mapping[str, Any] = {
            "peers": peers.Peers,
            "own-past": own_past.OwnPast,
            "predictions": predictions.PeerPredictions,
            "none": lambda: None,
        }
        made = cls(model, teachers=kinds[settings["teachers"]]())
        object.__setattr__(made, "_settings", settings)
        return made

    def compile_as(self, model: keras.Model, arguments: dict[str, Any]) -> None:
        """Compiles it so that it learns from others what its loss is about."""
        if len(self.teachers):
            loss = self._settings["loss"]
            arguments["distillation_loss"] = (
                _KINDS[loss]() if loss else derived(arguments.get("loss"))
            )
            arguments["distillation_weight"] = self._settings["weight"]
        super().compile_as(model, arguments)

    def _callbacks(self, arguments: dict[str, Any]) -> list[Any]:
        if chosen := self._cluster.method:
            if chosen.teachers in _OF_GROUPS or chosen.mixes:
                _share(arguments, self._cluster)
            arguments["callbacks"] = [
                *guards.listed(arguments.get("callbacks")),
                *_held_out(arguments),
            ]
        return super()._callbacks(arguments)

    def train_on_batch(self, *args: object, **kwargs: object) -> Any:
        """Refuses what no group would learn from another by."""
        raise ValueError(
            "`train_on_batch` must not be called in a run of several groups, "
            "which exchange what they have learned in `fit`. Call `fit`; or "
            "train without teachers: `tfdistill run --teachers=none`."
        )

    def _added(self, given: list[Any]) -> list[Any]:
        roles = steps.Exporter, steps.Loader, steps.Mixer
        if any(isinstance(callback, roles) for callback in given):
            return super()._added(given)
        every, chosen = self._settings["every_steps"], self._cluster.method
        if chosen and chosen.mixes and every == "auto":
            every = method.MIX_EVERY_STEPS
        found = callbacks_lib.defaults(every)
        waits = steps.first(found, callbacks_lib.WaitForGroups) is not None
        if self._cluster.workdir is not None and not waits:
            # A script may be done before another group has begun.
            found.append(
                callbacks_lib.WaitForGroups(
                    self._cluster, limit_secs=method.TOGETHER_SECS
                )
            )
        return [
            each for each in found if steps.first(given, type(each)) is None
        ]


def _share(arguments: dict[str, Any], cluster: identity.Cluster) -> None:
    """Leaves a group its share of the data, if the comparison gives it one."""
    fit_arguments.split(arguments)
    names = "x", "y", "sample_weight"
    x = arguments.get("x")
    if isinstance(x, tf.data.Dataset):
        arguments["x"] = data.group_shard(x, cluster, mode="shared")
        return
    parts = {n: arguments[n] for n in names if arguments.get(n) is not None}
    kind = keras_internals.Array
    if not all(isinstance(v, kind) for v in keras.tree.flatten(parts)):
        # Nothing is to be left out of data that all groups have.
        number = cluster.num_groups
        if method.share(cluster.method, "shared", num_groups=number) != (
            "disjoint"
        ):
            return
        raise ValueError(
            "Only arrays and a tf.data.Dataset can be shared out among groups; "
            f"received {type(x).__name__}. Compare with codistill_shared."
        )
    arguments.update(data.group_shard(parts, cluster, mode="shared"))


def _held_out(arguments: dict[str, Any]) -> list[Any]:
    """Returns what writes the predictions for the validation data."""
    fit_arguments.split(arguments)
    held = arguments.get("validation_data")
    if held is None:
        if method.VALIDATION in method.predicted:
            return []  # Another `fit` has written them.
        raise ValueError(
            "`fit` must have validation data, whose predictions the comparison "
            "is about; received none. Pass `validation_data=(x, y)` or "
            "`validation_split=0.2`."
        )
    if isinstance(held, keras.utils.PyDataset):
        held = _rows_of(held)
    if isinstance(held, tf.data.Dataset):
        held = (
            held.unbatch().take(_MOST_HELD_OUT).batch(_HELD_OUT_BATCH).cache()
        )
        # Read now: the order of a later pass would depend on how many there
        # were before, which differs by method.
        collections.deque(held, maxlen=0)
    elif isinstance(held, tuple | list):
        held = keras.tree.map_structure(
            lambda array: array[:_MOST_HELD_OUT],
            tuple(each for each in held if each is not None),
        )
    else:
        raise ValueError(
            "`validation_data` must be arrays (x, y), a tf.data.Dataset or a "
            "PyDataset of batches in a comparison, which reads it again; "
            f"received {type(held).__name__}."
        )
    return [callbacks_lib.HeldOutPredictions(method.VALIDATION, held)]


def _rows_of(dataset: keras.utils.PyDataset) -> tuple[Any, ...]:
    """Returns the rows of the first batches, as many as are compared."""
    batches: list[Any] = []
    count = 0
    for index in range(dataset.num_batches or 0):
        if count >= _MOST_HELD_OUT:
            break
        batches.append(tuple(dataset[index]))
        count += len(keras.tree.flatten(batches[-1])[0])
    found: tuple[Any, ...] = keras.tree.map_structure(
        lambda *parts: np.concatenate([*map(np.asarray, parts)]), *batches
    )
    return found


def derived(task: object) -> Any:
    """Returns the distillation loss that fits the loss of a task.

    Args:
        task: As `compile` takes it: a loss by any name or form, or several of
            them by output in a dict, list or tuple.

    Returns:
        A loss, or several of them by output in the same structure.

    Raises:
        ValueError: Nothing fits for sure, such as for a user's function.
    """
    if isinstance(task, Mapping):
        return {name: each and derived(each) for name, each in task.items()}
    if isinstance(task, list | tuple):
        return type(task)(each and derived(each) for each in task)
    kind = keras_internals.kind_of_loss(task)
    if kind is None:
        raise ValueError(
            "What students are to agree on must follow from the loss of "
            f"`compile`; received {task!r}, which may be about anything. Pass "
            "--distillation-loss=classes, binary or values."
        )
    return _KINDS[kind]()
