"""DistributedModel and CodistillModel: what Keras sees of a training.

Keras 3's own `fit` fails under `MultiWorkerMirroredStrategy` (keras#20585): it
reduces a batch tuple over the workers, and averages logs over a missing axis.
`DistributedModel` replaces both, around any model:

- losses are divided by the global batch (`training.global_batch`);
- gradients are summed over the replicas *before* the optimizer clips them
  (`training.trainer`), or each worker of parameter servers applies its own
  (`parameter_server.trainer`);
- logs come from metric states summed over all replicas, in one collective;
- files are written by the chief only (`training.guards`).

`CodistillModel` adds teachers to a step, and nothing else.
"""

import os
import warnings
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import schedules
from tfdistill.backup import callback as backup
from tfdistill.cluster import identity
from tfdistill.cluster import method
from tfdistill.cluster import outputs
from tfdistill.cluster import replicas
from tfdistill.cluster import strategy as strategy_lib
from tfdistill.exchange import publisher
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.follow import follower
from tfdistill.labels import attached
from tfdistill.observe import run_log
from tfdistill.observe import summaries
from tfdistill.parameter_server import trainer as server_trainer
from tfdistill.system import fits
from tfdistill.system import keras_internals
from tfdistill.system import run_files
from tfdistill.teachers import auto_burn_in
from tfdistill.teachers import auxiliary
from tfdistill.teachers import churn_budget
from tfdistill.teachers import labels as labels_lib
from tfdistill.teachers import peers as peers_lib
from tfdistill.teachers import rows as rows_lib
from tfdistill.teachers import scale
from tfdistill.teachers import teacher as teacher_lib
from tfdistill.teachers import teacher_list
from tfdistill.training import auto_steps
from tfdistill.training import fit_arguments
from tfdistill.training import global_batch
from tfdistill.training import guards
from tfdistill.training import own_steps
from tfdistill.training import steps
from tfdistill.training import trainer as replica_trainer
from tfdistill.training import uncertainty

keras_internals.check_keras()
keras_internals.prepare()

Logs = steps.Logs
# What would never be run of a model inside another.
_STEPS = ("train_step", "compute_metrics", "test_step", "predict_step")
_LOOPS = (
    "evaluate",
    "fit",
    "make_predict_function",
    "make_test_function",
    "make_train_function",
    "predict",
)
# What is logged of the loss besides `loss` itself.
_PARTS = ("task_loss", "distillation_loss")


def _of_the_model_inside(name: str) -> Any:
    return property(lambda self: getattr(self.model, name))


@keras.saving.register_keras_serializable(package="tfdistill")
class DistributedModel(
    steps.Trained, keras_internals.SavedAsInner, keras.Model
):
    """Trains any Keras model on several workers or parameter servers.

    `compile`, `fit`, `evaluate` and `predict` accept the model's own arguments,
    under every strategy. With one replica the model trains exactly as Keras
    does. Under `MirroredStrategy` and `MultiWorkerMirroredStrategy` the same
    global batch gives the same weights, to float tolerance, except that batch
    normalization normalizes over each replica's own rows
    (`keras.layers.BatchNormalization(synchronized=True)` over all), and that
    layers which draw random numbers, such as dropout, draw the same numbers on
    each replica, for its rows. A metric's variables must be sums over examples,
    maxima or minima.
    `save`, `save_weights`, `load_weights` and `export` are the wrapped model's
    own methods, and plain Keras loads its files. The files don't contain how
    the model was compiled.

    A model may override `compute_loss`, `test_step`, `compute_metrics` or
    `compile`, and outside of parameter servers `train_step`. On several
    replicas each runs on its own rows, and results are weighted by the number
    of rows: they equal the results of one process if each loss is a mean over
    the rows of a batch, or has a value for each row. A `train_step` that
    compares rows, or assigns them to a variable, runs on all rows on each
    replica.

    Attributes:
        model: The model that was given.

    Example:
        >>> model = DistributedModel(
        ...     keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        ... )
        >>> model.compile("sgd", "mse")
    """

    optimizer: Any = None  # Keras has no such attribute before `compile`.
    train_function: Any
    test_function: Any
    _trainer: Any = None
    _compiled_with: Callable[[], Mapping[str, Any]]
    _INSIDE, _PREFIX, _MAY_COMPILE = "model", "distributed", True
    _NEVER_RUN: tuple[str, ...] = _LOOPS

    def __init__(self, model: keras.Model, *, name: str | None = None) -> None:
        """Wraps a model. Make both inside the strategy's scope.

        Args:
            model: Any Keras 3 model: functional, `Sequential`, subclassed.
            name: Name of the wrapping model.

        Raises:
            ValueError: `model` is not a `keras.Model`, trains on several
                workers already, or overrides methods that would never be run,
                such as `fit`.
        """
        _check_inside(model, self._INSIDE, self._NEVER_RUN)
        super().__init__(name=name or f"{self._PREFIX}_{model.name}")
        self.model = model
        self.built = model.built
        self._own = own_steps.Own(model, may_compile=self._MAY_COMPILE)
        # By name in the logs. An attribute, by which Keras finds their
        # variables.
        self._learned: dict[str, uncertainty.LearnedWeight] = {}

    @property
    def trainer(self) -> Any:
        """The `Trainer` of this model; made when first needed, then kept."""
        if self._trainer is None:
            kind: Any = replica_trainer.ReplicaTrainer
            if replicas.on_servers(self.distribute_strategy):
                kind = server_trainer.ServerTrainer
            self._trainer = kind(self)
        return self._trainer

    @property
    def in_training(self) -> bool | None:
        """What a training step calls this model with, as `training`.

        None if the model inside does not take it: Keras says nothing to its
        layers then, and dropout and batch normalization infer.
        """
        return True if keras_internals.takes_training(self.model) else None

    # ---- calls, files, shapes and copies of the model inside ----

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Runs the model inside."""
        return self._own.call(inputs, training)

    def save(self, filepath: str | os.PathLike[str], **kwargs: Any) -> None:
        """Saves the model inside as `.keras`; see `keras.Model.save`."""
        self.model.save(self._files.written(filepath), **kwargs)

    def save_weights(
        self, filepath: str | os.PathLike[str], **kwargs: Any
    ) -> None:
        """Saves the weights inside; see `keras.Model.save_weights`."""
        self.model.save_weights(self._files.written(filepath), **kwargs)

    def load_weights(
        self, filepath: str | os.PathLike[str], **kwargs: Any
    ) -> None:
        """Loads the weights inside; see `keras.Model.load_weights`."""
        self.model.load_weights(self._files.read(filepath), **kwargs)

    def export(self, filepath: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Exports the model inside for inference; see `keras.Model.export`."""
        path = self._files.written(filepath)
        saved_model.export_for_inference(self.model, path, **kwargs)

    @property
    def _files(self) -> outputs.GroupFiles:
        return outputs.of(self._cluster)

    # For a functional model; `compile` finds losses and metrics by the names.
    inputs, outputs, input_shape, output_shape, output_names = map(
        _of_the_model_inside,
        ("inputs", "outputs", "input_shape", "output_shape", "output_names"),
    )

    def get_layer(
        self, name: str | None = None, index: int | None = None
    ) -> keras.Layer:
        """Returns a layer of the model inside; see `keras.Model.get_layer`."""
        return self.model.get_layer(name=name, index=index)

    def get_compile_config(self) -> dict[str, Any] | None:
        """Returns what it was compiled with, for copies; None if it was not.

        Its files are the wrapped model's, and don't contain this.
        """
        if not self.compiled:
            return None
        return {
            name: keras.saving.serialize_keras_object(value)
            for name, value in self._compiled_with().items()
        }

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a copy as `get_compile_config` says."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.model.built:
            self.optimizer.build(self.trainable_variables)

    def get_config(self) -> dict[str, Any]:
        """Returns the model, serialized, and the name."""
        return {
            "model": keras.saving.serialize_keras_object(self.model),
            "name": self.name,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> Any:
        """Makes the model from `get_config`."""
        model = keras.saving.deserialize_keras_object(
            config["model"], custom_objects=custom_objects
        )
        wrap: Any = cls
        return wrap(model, name=config["name"])

    # ---- Keras' methods ----

    def compile(self, *args: Any, rows_ahead: int = 0, **kwargs: Any) -> None:
        """Configures training; accepts the arguments of the model's `compile`.

        Args:
            *args: As for the model's `compile`.
            rows_ahead: On parameter servers with slow links, how many batches
                ahead of its step a worker fetches rows and variables: 1 or 2.
                The results of one worker stay the same; with several, each sees
                the others' updates that many steps later. It needs data that
                repeat and several steps per execution, starts again with each
                execution, and fetches the optimizer's slots, too. Default 0.
            **kwargs: As for the model's `compile`. `steps_per_execution` may
                be `"auto"` besides: `fit` starts with one, measures, and grows
                while steps a second do, to 64 at most, or 16 on servers.
                Executions end where an epoch does, or where a callback of
                this package is due, so that training is the same as with one
                step per execution; other callbacks are called once an
                execution, as with a number. It is the default on parameter
                servers, except for a `fit` with another callback that acts by
                batches, which is called for each batch. `jit_compile="auto"`,
                the default, is Keras' own choice on one device, which is XLA on
                a GPU if all layers support it. Several replicas, workers and
                parameter servers train without XLA, which cannot compile what
                they exchange. `loss_weights` may be `"uncertainty"` besides:
                the weight exp(-s) of each output is learned, with s / 2 added
                to the loss (Kendall, Gal & Cipolla, CVPR 2018, equation 10),
                and logged as `<output>_loss_weight`, as it is before the step.
                The logged losses of single outputs are without it.

        Raises:
            ValueError: The model's own `train_step`, XLA or the optimizer's
                `ema_overwrite_frequency` cannot run under the strategy; or
                weights cannot be learned, as the losses are not by output.
        """
        strategy = self.distribute_strategy
        own_steps.check(self.model, strategy)
        if rows_ahead < 0:
            raise ValueError(
                f"`rows_ahead` must be >= 0; received {rows_ahead}. It is a "
                "number of batches."
            )
        asked, arguments = self._compile_inside(args, kwargs)
        # In a function, in which Keras tracks no metric and no variable.
        self._compiled_with = lambda: {**asked, "rows_ahead": rows_ahead}
        loss = global_batch.over_global_batch(arguments.get("loss"))
        arguments["loss"] = loss
        for each in self._learned.values():
            each.trainable = False  # Unless it is asked for again.
        if uncertainty.is_asked(arguments.get("loss_weights")):
            arguments["loss_weights"] = self._learned_weights(loss)
        if self._exchanges:
            _leave_out_xla(arguments)
        num_steps = arguments.get("steps_per_execution")
        if num_steps in (None, "auto"):
            # Keras' own loops count in single steps.
            arguments["steps_per_execution"] = 1
        for given in ("metrics", "weighted_metrics"):
            scale.check_metrics(loss, arguments.get(given))
        super().compile(**arguments)
        is_alone = strategy.num_replicas_in_sync == 1
        optimizer = keras_internals.inner(self.optimizer)
        averages = optimizer is not None and optimizer.use_ema
        if not is_alone and averages and optimizer.ema_overwrite_frequency:
            raise ValueError(
                "`ema_overwrite_frequency` must be left out of the optimizer; "
                f"received it with {strategy.num_replicas_in_sync} replicas. "
                "With use_ema=True `fit` leaves the averages at its end."
            )
        if self._own.has_loss and not self._own.is_compiled:
            keras_internals.lend_compiled(self, self.model, metrics=False)
        self.trainer.compiled()
        self.trainer.rows_ahead = rows_ahead
        is_auto = num_steps is None and replicas.on_servers(strategy)
        is_auto |= num_steps == "auto"
        self.trainer.auto_steps = (
            self.trainer.new_auto_steps() if is_auto else None
        )

    def _compile_inside(
        self, args: Any, kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Compiles the model inside if its own losses and metrics count.

        Returns the arguments that were given, and those for Keras.
        """
        if not self._own.is_compiled:
            keras_own = super().compile
            asked = fit_arguments.bind(keras_own, args, kwargs)
            return asked, dict(asked)
        asked = fit_arguments.bind(self.model.compile, args, kwargs)
        return asked, self._own.compile(*args, **kwargs)

    def _learned_weights(self, loss: Any) -> Any:
        """Returns learned weights of the task's losses, by output."""
        if self._own.has_loss:
            raise ValueError(
                "`loss_weights` must not be learned for a model with its own "
                "`compute_loss`, which may leave out the penalty that keeps "
                f"them from growing; received {type(self.model).__name__}. "
                "Learn the weights in `compute_loss`."
            )
        return uncertainty.by_output(
            loss,
            steps.output_names(self.model),
            lambda output: self._learned_weight(
                f"{output}_loss_weight", is_regularized=True
            ),
            argument="loss",
        )

    def _learned_weight(
        self, name: str, *, is_regularized: bool
    ) -> uncertainty.LearnedWeight:
        """Returns the weight of a name; kept if the model has it already."""
        if name not in self._learned:
            self._learned[name] = uncertainty.LearnedWeight(
                name=name, is_regularized=is_regularized
            )
        self._learned[name].trainable = True
        return self._learned[name]

    def _weight_logs(self) -> Logs:
        """Returns the weights of losses that are being learned, by name."""
        return {
            name: each.value
            for name, each in self._learned.items()
            if each.trainable
        }

    @property
    def _exchanges(self) -> bool:
        """Whether a step waits for others, which XLA cannot compile."""
        strategy = self.distribute_strategy
        has_replicas = strategy.num_replicas_in_sync > 1
        return has_replicas or replicas.on_servers(strategy)

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains the model; accepts the arguments of `keras.Model.fit`.

        In a launched run it adds callbacks: one that writes what the launcher
        shows, and for a `CodistillModel` a `CodistillTensorBoard`. Training
        begins where the `Backup` among your callbacks, if there is one, ended.

        Under parameter servers one batch of the data is one step of one
        worker, and `steps_per_epoch` counts the steps of all workers.

        Args:
            *args: As for `keras.Model.fit`.
            **kwargs: As for `keras.Model.fit`. Every worker passes the same
                arguments. Callbacks that write files run on the chief only,
                and `fit` returns on all workers once they are done;
                `batch_size` and the batches of a data set are global.

        Returns:
            The `History`, equal on all workers.

        Raises:
            ValueError: Arguments are out of range or contradict each other, or
                a backup is of another model.
            data_checks.DataError: The data are empty, faulty or too few.
            RuntimeError: The loss or a weight is not finite.
        """
        # The `Backup` decides where to begin (`backup.callback.session`),
        # checks are added (`training.guards.over`), and the trainer prepares
        # the data and runs Keras' own loop (`training.trainer.ReplicaTrainer`)
        # or that over the workers of servers (`parameter_server.trainer`). The
        # order of callbacks, those in brackets only if they are needed:
        #
        #     [same_data.Watch], [_Before], _DataWatch, TerminateOnNonFinite,
        #     [FitBackup], [TensorBoardBatches], [TeachingWatch], yours,
        #     [RunLogger], [CodistillTensorBoard], [Backup], [AutoSteps],
        #     [Together], [StepWatchdog], [_After]
        if self.model.built and not self.model.trainable_weights:
            warnings.warn(
                f"{self.model.name!r} has no trainable weights. Set `trainable "
                "= True` on it or its layers before `compile`.",
                stacklevel=2,
            )
        with fits.one(self.model):
            return self._fit(super().fit, args, kwargs)

    def _fit(self, keras_own: Any, args: Any, kwargs: Any) -> Any:
        self._check_compiled()
        strategy = self.distribute_strategy
        arguments = fit_arguments.of_loop(keras_own, args, kwargs, strategy)
        callbacks = self._callbacks(arguments)
        self._files.move(callbacks)
        if self.trainer.auto_steps is not None:
            callbacks = auto_steps.added(callbacks, self.trainer.auto_steps)
        arguments["callbacks"] = callbacks
        for callback in callbacks:
            if isinstance(callback, steps.SteppedCallback):
                callback.meet(callbacks)
        with backup.session(self, arguments):
            fit_arguments.check_strategy(strategy)
            replicas.meet(strategy, "fit")
            with (
                guards.over(arguments, strategy),
                self.trainer.reading_beside(),
            ):
                history = self.trainer.fit(arguments, keras_own)
        self.average_statistics()
        # What the chief's callbacks write is complete then, for all to read.
        replicas.meet(strategy, "fit to its end")
        return history

    def _check_compiled(self) -> None:
        """Refuses a model of which only the inner one was compiled."""
        if self.model.compiled and not self.compiled:
            kind = type(self).__name__
            raise ValueError(
                f"`compile` must be called on the {kind}, too; only the model "
                f"inside it, {self.model.name!r}, was compiled. Call `compile` "
                f"on the {kind}, with the same arguments."
            )

    def _callbacks(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Returns the callbacks of a `fit`, and what this model adds."""
        found = guards.listed(arguments.get("callbacks"))
        run_log.add_to(found, self._cluster.group_dir)
        return found

    @property
    def _cluster(self) -> identity.Cluster:
        return strategy_lib.cluster_of(self.distribute_strategy)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the model as `keras.Model.evaluate` does.

        Each example counts once; results are equal on all workers. A callback
        of `fit` may call it on any worker, which then evaluates by itself; of
        a model with its own loss or steps, on all workers.
        """
        self._check_compiled()
        return self._loop("evaluate", super().evaluate, args, kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts by the model as `keras.Model.predict` does.

        Every worker gets all predictions, in the order of the data. A callback
        of `fit` may call it on any worker, which then predicts by itself.
        """
        return self._loop("predict", super().predict, args, kwargs)

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Makes one step, of a global batch; see `keras.Model`."""
        self._check_on_batch("train_on_batch", "fit(x, y, batch_size=...)")
        return super().train_on_batch(*args, **kwargs)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates one global batch; see `keras.Model`."""
        self._check_on_batch("test_on_batch", "evaluate(x, y)")
        if alone := self._alone("evaluate"):
            return replicas.outside_scopes(
                lambda: alone.test_on_batch(*args, **kwargs)
            )
        return super().test_on_batch(*args, **kwargs)

    def predict_on_batch(self, x: Any) -> Any:
        """Predicts for one global batch; see `keras.Model`."""
        self._check_on_batch("predict_on_batch", "predict(x)")
        if self.distribute_strategy.num_replicas_in_sync == 1:
            return super().predict_on_batch(x)
        num_rows = len(keras.tree.flatten(x)[0])
        return self.predict(x, batch_size=num_rows, verbose=0)

    def _check_on_batch(self, name: str, remedy: str) -> None:
        if replicas.on_servers(self.distribute_strategy):
            raise ValueError(
                f"`{name}` does not work with parameter servers, whose workers "
                f"read their data themselves. Call {remedy}."
            )

    def _loop(self, name: str, keras_own: Any, args: Any, kwargs: Any) -> Any:
        strategy = self.distribute_strategy
        arguments = fit_arguments.of_loop(keras_own, args, kwargs, strategy)
        is_of_fit = arguments.get("_use_cached_eval_dataset")
        alone = None if is_of_fit else self._alone(name)
        if alone is not None:
            if not replicas.is_chief(strategy):
                arguments["verbose"] = 0
            return replicas.outside_scopes(
                lambda: getattr(alone, name)(**arguments)
            )
        replicas.meet(strategy, name)
        if name == "evaluate":
            self.average_statistics()
        with guards.reported(arguments):
            return getattr(self.trainer, name)(arguments, keras_own)

    def _alone(self, name: str) -> Any:
        """Returns what answers a callback of one of several workers.

        Others may not have that callback, or be at their next step. None if
        all workers make the call together, as in an evaluation by a loss or
        steps of the model's own, whose metrics are theirs.
        """
        several = replicas.num_workers(self.distribute_strategy) > 1
        if not several or not fits.is_under_way():
            return None
        if self.trainer.alone is None:
            self.trainer.alone = replicas.outside_scopes(self._as_alone)
        found = self.trainer.alone
        return found if found.compiled or name == "predict" else None

    def _as_alone(self) -> Any:
        is_codistilled = isinstance(self, CodistillModel)
        kind: Any = CodistillModel if is_codistilled else DistributedModel
        made = type(kind.__name__, (kind,), {"_NEVER_RUN": ()})(self.model)
        if not self.compiled or self._own.has_loss:
            return made
        asked = dict(self._compiled_with())
        try:
            for name in ("metrics", "weighted_metrics"):
                asked[name] = keras.tree.map_structure(_again, asked.get(name))
        except (TypeError, ValueError):
            return made  # One's own metric, of which no other can be made.
        made._learned = self._learned
        made.compile(**{**asked, "optimizer": None})
        return made

    def average_statistics(self) -> None:
        """Gives all replicas the mean of the batch statistics.

        Replicas keep them apart. A collective: all workers of the group call
        it at the same step.
        """
        self.trainer.average_statistics()

    # ---- Keras' hooks ----

    def _maybe_symbolic_build(
        self, iterator: Any = None, data_batch: Any = None
    ) -> None:
        spec = data_batch
        if iterator is not None:
            spec = keras_internals.distributed_element_spec(iterator)
        self._own.spec = self.bare(spec)
        own_steps.mark_built(self.model)
        if self.model.built:
            self.built = True
        self.trainer.build(spec, iterator)

    def _symbolic_build(
        self, iterator: Any = None, data_batch: Any = None
    ) -> None:
        super()._symbolic_build(iterator, data_batch)
        is_own = self._own.is_compiled and own_steps.has_call(self.model)
        if is_own and keras_internals.has_losses_or_metrics(self.model):
            self.model._symbolic_build(data_batch=data_batch)

    def make_train_function(self, force: bool = False) -> Any:
        """Builds what `fit` calls for each execution; kept and returned."""
        if self.train_function is None or force:
            super().make_train_function(force=True)  # Traces nothing.
            self.train_function = self.trainer.train_function(
                self._own.step_of(self, "train_step"), self.train_function
            )
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """Builds what `evaluate` calls for each execution; kept, returned."""
        if self.test_function is None or force:
            super().make_test_function(force=True)  # Traces nothing.
            self.test_function = self.trainer.test_function(
                self._own.step_of(self, "test_step"), self.test_function
            )
        return self.test_function

    # ---- one step ----

    def train_step(self, data: Any) -> Logs:
        """Runs one update on one replica's part of the global batch."""
        if "train_step" in self._own:
            return self._own.step("train_step", data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        batch = global_batch.GlobalBatch.of(x)
        with batch.scope(), self.trainer.tape() as tape:
            y_pred = self(x, training=self.in_training)
            loss = self._own.share_of_loss(
                self, batch, x, y, y_pred, sample_weight, training=True
            )
            scaled = self.optimizer.scale_loss(loss)
        logs = self._weight_logs()
        self.trainer.apply(tape, scaled, batch)
        batch.record(self._recorded, {"loss": loss})
        metrics = self.compute_metrics(x, y, y_pred, sample_weight)
        return {**metrics, **logs, steps.EXAMPLES: batch.total}

    def test_step(self, data: Any) -> Logs:
        """Evaluates one replica's part of the global batch.

        Args:
            data: `x`, `(x, y)` or `(x, y, sample_weight)`.

        Returns:
            The metrics' results.
        """
        data = self.bare(data)
        if "test_step" in self._own:
            return self._own.step("test_step", data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        batch = global_batch.GlobalBatch.of(x)
        with batch.scope():
            y_pred = self(x, training=False)
            loss = self._own.share_of_loss(
                self, batch, x, y, y_pred, sample_weight, training=False
            )
        batch.record(self._recorded, {"loss": loss})
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def predict_step(self, data: Any) -> Any:
        """Predicts for one replica's part of the global batch.

        On several workers it returns a dtype that collectives can gather, and
        `predict` converts it back.
        """
        self.trainer.begin_step()
        is_own = "predict_step" in self._own
        step = self.model.predict_step if is_own else super().predict_step
        data = keras_internals.with_none(data)
        return self.trainer.sendable(step(self.bare(data)))

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns the loss; see `keras.Model.compute_loss`.

        If the model has its own `compute_loss`, it is called instead. On
        several replicas each calls it with its own rows, and its value is
        treated as a mean over these rows.
        """
        given = (x, y, y_pred, sample_weight)
        if self._own.has_loss:
            return self._own.loss(*given, training=training)
        scale.check_student(self.loss, y_pred)
        return super().compute_loss(*given, training=training)

    def _aggregate_additional_loss(self, loss: Any) -> Any:
        batch = global_batch.GlobalBatch.here()
        if batch is None or batch.is_alone or not replicas.in_replica():
            return super()._aggregate_additional_loss(loss)
        if keras_internals.is_of_other_replica(loss):
            return tf.zeros([], loss.dtype)
        return batch.share_of_added(
            tf.convert_to_tensor(loss), is_of_all=self._own.calls_on_all_rows
        )

    @property
    def metrics(self) -> list[keras.Metric]:
        """The metrics of `compile`, and the metrics of the model's own loss."""
        if self._own.is_compiled:
            return self.model.metrics
        found = super().metrics
        if not self._own.has_loss or self.model.compiled:
            return found
        known = set(map(id, found))
        return [*found, *(m for m in self.model.metrics if id(m) not in known)]

    @property
    def _recorded(self) -> list[keras.Metric]:
        """What counts losses for Keras, of which a loss's own may be unlike."""
        if not self._own.is_compiled:
            return self.metrics
        own = keras_internals.loss_tracker(self.model)
        return [metric for metric in self.metrics if metric is own]

    def get_metrics_result(self) -> Logs:
        """Returns the metrics' results; between steps, over all replicas."""
        return self.trainer.metrics_result(super().get_metrics_result)

    def reset_metrics(self) -> None:
        """Resets the metrics, on all replicas."""
        self.trainer.reset_metrics(super().reset_metrics)

    def compute_metrics(self, *args: Any, **kwargs: Any) -> Logs:
        """Updates the metrics; see `keras.Model.compute_metrics`."""
        owner: Any = self.model if self._own.is_compiled else super()
        with global_batch.metrics_of_all_rows():
            return owner.compute_metrics(*args, **kwargs)


def _again(metric: Any) -> Any:
    """Returns a copy of a metric, with its own variables."""
    if not isinstance(metric, keras.Metric):
        return metric
    return type(metric).from_config(metric.get_config())


def _check_inside(model: Any, inside: str, never_run: tuple[str, ...]) -> None:
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"`{inside}` must be a keras.Model; received "
            f"{type(model).__name__}. Pass the model itself, not a "
            "function that builds it."
        )
    if isinstance(model, DistributedModel):
        raise ValueError(
            f"`{inside}` must not be a wrapper that already trains on several "
            f"workers; received {type(model).__name__}. Call its own `fit`, or "
            "pass the model inside it."
        )
    own = [n for n in never_run if own_steps.is_own(model, n)]
    if own:
        raise ValueError(
            f"`{inside}` must leave training to its wrapper; received "
            f"{type(model).__name__} with its own {', '.join(own)}, which "
            "would never run. Move that code into `compute_loss`, or into "
            "`self.add_loss` in `call` or a layer; or wrap a model with the "
            "same layers and without these methods."
        )


def _check_preprocessor(student: Any) -> None:
    is_hub = any(
        kind.__module__.partition(".")[0] == "keras_hub"
        for kind in type(student).__mro__
    )
    if is_hub and getattr(student, "preprocessor", None) is not None:
        raise ValueError(
            "`student` must receive preprocessed inputs; received "
            f"{type(student).__name__} with a preprocessor, which would never "
            "run. Set `student.preprocessor = None`, or pass preprocessor=None "
            "to its constructor, and map the data: `dataset.map(preprocessor)`."
        )


@keras.saving.register_keras_serializable(package="tfdistill")
class CodistillModel(steps.Codistilled, DistributedModel):
    """Trains a student on its task and on its teachers' predictions.

    The loss of a step is

        task_loss + w(step) * psi(mean of the teachers' predictions, own)

    with one psi on the aggregate (Anil et al. 2018, Algorithm 1). The second
    term is absent while `w(step)` is 0 or no healthy teacher is in use.
    Teachers run in inference mode on the student's own batch, or on the rows
    that `agree_on` gives. With `auxiliary_heads`, `own` are the outputs that
    only learn from teachers.

    `evaluate`, `predict`, `save`, `save_weights`, `load_weights` and `export`
    use only the student. Its files contain neither the teachers nor how it was
    compiled.

    `fit` logs `loss`, `task_loss`, `distillation_loss` (unweighted),
    `teacher_loss` (with teachers: the mean task loss of those in use, on rows
    of the batches before the last five refreshes; NaN if there is none),
    `distillation_weight` (the weight in force at the last step),
    `teacher_staleness` (mean over peers, and one's own past, in use at the
    last step, in steps; NaN while there is none) and the compiled metrics.

    Example:
        >>> student = keras.Sequential(
        ...     [keras.Input((4,)), keras.layers.Dense(3)]
        ... )
        >>> model = CodistillModel(student)
        >>> model.compile("sgd", "mse")
    """

    # Its own loops may do the same as Keras', as KerasHub's loops do.
    _INSIDE, _PREFIX, _MAY_COMPILE = "student", "codistill", False
    _NEVER_RUN = _STEPS
    _task_tracker: Any = None

    def __init__(
        self,
        student: keras.Model,
        *,
        teachers: teacher_lib.Teacher
        | Sequence[teacher_lib.Teacher]
        | None = None,
        auxiliary_heads: Mapping[str, str] | None = None,
        agree_on: str | tf.data.Dataset | Callable[[Any], Any] = rows_lib.BATCH,
        name: str | None = None,
    ) -> None:
        """Wraps a student. Make both inside the strategy's scope.

        Args:
            student: Any Keras 3 model: functional, subclassed, multi-output.
            teachers: The teachers to learn from: one of `tfdistill.teachers`,
                or a list of them. Defaults to no teachers: plain training.
            auxiliary_heads: Outputs of `student`, a functional model that
                returns a dict, that learn from teachers in place of others:
                with `{"click_soft": "click"}`, the teachers' `click` teaches
                `click_soft`, and `click` learns from labels only. A head has no
                label and is only used in training; `CodistillModel.student`
                doesn't have it. Without teachers it isn't trained either.
                Defaults to no heads.
            agree_on: The rows on which the student learns from its teachers.
                "batch": the rows it is trained on. "mixed": one row for each
                two neighbors in the batch, with each column from one of the
                two; pictures, and sequences of floats, are a weighted sum. The
                student answers about them in inference mode, as its teachers
                do. "both": every second row of the batch, and the mixed rows. A
                function of the batch's inputs returns other rows, any number of
                them. A `tf.data.Dataset` of batches of inputs, without
                labels and of any size, is repeated by `fit`: step s gets its
                batch s, both counted from 0, also after a restart. Labels count
                on the batch only. Default "batch".
            name: Name of the model.

        Raises:
            ValueError: `student` is not a `keras.Model`, overrides the training
                step or has a preprocessor; `teachers` contains something else;
                `auxiliary_heads` names other outputs; or `agree_on` has another
                value, is an empty data set, or isn't "batch" although a
                teacher answers about the batch only.
        """
        _check_preprocessor(student)
        with_heads = student
        if auxiliary_heads:
            student = auxiliary.student_of(with_heads, auxiliary_heads)
        super().__init__(student, name=name)
        cluster = strategy_lib.cluster_of(tf.distribute.get_strategy())
        self.teachers = teacher_list.TeacherList(teachers, cluster)
        self._agree_on = self.teachers.checked_rows(agree_on)
        self._heads: auxiliary.AuxiliaryHeads | None = None
        if auxiliary_heads and len(self.teachers):
            self._heads = auxiliary.AuxiliaryHeads(with_heads, auxiliary_heads)
        self._graph: student_graph.StudentGraph | None = None

    @property
    def student(self) -> keras.Model:
        """The student."""
        return self.model

    @property
    def graph(self) -> student_graph.StudentGraph:
        """The student's inference, traced once for the data of `fit`."""
        if self._graph is None:
            if self.trainer.input_spec is None:
                raise RuntimeError(
                    "The model has not seen any data yet, so the spec of its "
                    "inputs is unknown. Call `fit` first."
                )
            self._graph = student_graph.StudentGraph(
                self.student, self.trainer.input_spec
            )
        return self._graph

    # ---- what a training asks of it ----

    def bare(self, data: Any) -> Any:
        """Returns data, or their spec, without what is there for teachers."""
        if isinstance(data, steps.WithRows):
            data = data.data
        return attached.detach(data)[0]

    def rows_beside(self) -> tf.data.Dataset | None:
        """Returns the rows that teachers are asked about, if they are data."""
        is_data = isinstance(self._agree_on, tf.data.Dataset)
        return self._agree_on if is_data and len(self.teachers) else None

    def stateful(self) -> dict[str, steps.Stateful]:
        """Returns the teachers: backups keep their versions and values."""
        return {"teachers": self.teachers} if len(self.teachers) else {}

    def before_tracing(self) -> Any:
        """Makes what a step needs of teachers; returns what travels along."""
        if len(self.teachers):
            rows_lib.check_inputs(self._agree_on, self.trainer.input_spec)
            strategy, last = self.distribute_strategy, self.trainer.last
            self.teachers.attach(self.graph, strategy, last)
        return self.teachers.remote

    def compile(
        self,
        *args: Any,
        distillation_loss: Any = None,
        distillation_weight: Any = "auto",
        distillation_loss_weights: Any = None,
        distillation_sample_weights: bool = True,
        **kwargs: Any,
    ) -> None:
        """Configures training.

        Args:
            *args: As for `keras.Model.compile`.
            distillation_loss: A `tfdistill.losses.DistillationLoss` for every
                output; or, by output, a dict, list or tuple of them with None
                for outputs that are not distilled. Needed with teachers.
                With `loss=None` the student learns from them only.
            distillation_weight: A number or a callable of the global step
                (int64 scalar tensor) that gives a float scalar, such as the
                schedules of `tfdistill.schedules`. Default "auto": 0 until
                the first steep fall of the task loss is over, then 1; see
                `teachers.auto_burn_in`.
            distillation_loss_weights: By output, as `distillation_loss`, a
                number by which its distillation loss is multiplied, as Keras'
                `loss_weights` for the task; or `"uncertainty"`, to learn these
                factors, logged as `<output>_distillation_loss_weight`. Default
                1 each.
            distillation_sample_weights: Whether sample weights count for the
                distillation loss, too. With False, all rows are distilled
                alike: rows without a label have weight 0 beside rows with one.
                Masks count in any case. Default True.
            **kwargs: As for `DistributedModel.compile`.

        Raises:
            ValueError: There are teachers and no `distillation_loss`, or an
                argument is unknown.
        """
        fit_arguments.check_names(
            keras.Model.compile,
            kwargs,
            *("distillation_loss", "distillation_weight"),
            *("distillation_loss_weights", "distillation_sample_weights"),
            "rows_ahead",
        )
        if len(self.teachers) and distillation_loss is None:
            raise ValueError(
                "`compile` needs a `distillation_loss` when the model has "
                f"teachers; received None with {len(self.teachers)} of them. "
                "For classes: tfdistill.losses.SoftTargetCrossEntropy()."
            )
        super().compile(*args, **kwargs)
        chosen = self._cluster.method
        if chosen and chosen.weight_decay:
            optimizer = keras_internals.inner(self.optimizer)
            optimizer.weight_decay = chosen.weight_decay
        names = steps.output_names(self.student)
        if uncertainty.is_asked(distillation_loss_weights):
            distillation_loss_weights = self._learned_distillation_weights(
                distillation_loss, names
            )
        is_auto = distillation_weight == auto_burn_in.AUTO
        self.teachers.compile(
            distillation_loss,
            auto_burn_in.AutoBurnIn()
            if is_auto
            else schedules.get(distillation_weight),
            task_loss=self.loss,
            output_names=names,
            weights=distillation_loss_weights,
            by_sample_weight=distillation_sample_weights,
        )
        # Attributes, by which Keras finds metrics; and keeps them, so once.
        if self._task_tracker is None:
            self._task_tracker = keras.metrics.Mean("task_loss")
            self._distillation_tracker = keras.metrics.Mean("distillation_loss")

    def _learned_distillation_weights(
        self, loss: Any, names: Sequence[str] | None
    ) -> Any:
        """Returns learned weights by output; None if nobody teaches."""
        if not len(self.teachers):
            return None
        is_for_all = not isinstance(loss, Mapping | list | tuple)
        if is_for_all and names:
            loss = dict.fromkeys(names, loss)
        return uncertainty.by_output(
            loss,
            names,
            # Its cost is part of the term, which has its own weight.
            lambda output: self._learned_weight(
                f"{output}_distillation_loss_weight", is_regularized=False
            ),
            argument="distillation_loss",
        )

    @property
    def _exchanges(self) -> bool:
        return super()._exchanges or self.teachers.swaps_predictions

    def _callbacks(self, arguments: Mapping[str, Any]) -> list[Any]:
        found = super()._callbacks(arguments)
        self.teachers.validation_data = arguments.get("validation_data")
        self.teachers.has_exporter = bool(steps.first(found, steps.Exporter))
        weight = self.teachers.weight
        kinds = auto_burn_in.AutoBurnIn, churn_budget.ChurnBudget
        if isinstance(weight, kinds) and weight not in found:
            # Before an exporter publishes the last step.
            found.insert(0, weight)
        _check_predicted(self._cluster)
        _check_roles(found, self.teachers, self._cluster)
        self._turn_exchanges(found)
        directory = self._cluster.group_dir
        if directory and not steps.first(found, summaries.CodistillTensorBoard):
            path = f"{directory}/{summaries.DIRECTORY}"
            found.append(summaries.CodistillTensorBoard(path))
        watch = [run_log.TeachingWatch()] if len(self.teachers) else []
        return [*watch, *found]

    def _turn_exchanges(self, callbacks: Sequence[Any]) -> None:
        """Keeps apart what groups publish in this training and in others."""
        exporter: Any = steps.first(callbacks, steps.Exporter)
        group = exporter.group if exporter else self._cluster.group
        # Not one in which only others publish, such as another run's.
        places = [exporter.exchange.base] if exporter else []
        places += [self._cluster.exchange] if self._cluster.exchange else []
        ours = {run_files.real(place) for place in places if place}
        for holder in (*callbacks, *self.teachers.holders):
            found = getattr(holder, "exchange", None)
            if isinstance(found, publisher.Exchange) and (
                run_files.real(found.base) in ours
            ):
                before, place = found.root, f"{found.base}/group_{group}"
                found.turn_to(fits.number(place, of=self.optimizer))
                if found.root != before:
                    self.teachers.forget()

    # ---- one step ----

    def _outputs(
        self, x: Any, training: bool | None = False
    ) -> tuple[Any, Any]:
        """Returns the student's outputs, and those that learn from teachers."""
        if self._heads is not None:
            found: tuple[Any, Any] = self._heads(x, training=training)
            return found
        outputs = self(x, training=training)
        return outputs, outputs

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns the task loss, or 0 if the student has teachers and no task.

        See `DistributedModel.compute_loss`.
        """
        has_task = self._own.has_loss or self.loss is not None or self.losses
        if not has_task and len(self.teachers):
            return tf.zeros([], keras.config.floatx())
        return super().compute_loss(
            x, y, y_pred, sample_weight, training=training
        )

    def train_step(self, data: Any) -> Logs:
        """Runs one codistilled update on one replica's part of the batch."""
        agree_on = self._agree_on
        if isinstance(data, steps.WithRows):
            agree_on = rows_lib.given(data.rows)
            data = data.data
        data, labels = attached.detach(data)
        _check_labels(labels, self.teachers)
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        batch = global_batch.GlobalBatch.of(x)
        counter = keras_internals.num_batches(self.optimizer)
        step = tf.convert_to_tensor(counter)
        with batch.scope(), self.trainer.tape() as tape:
            y_pred, taught = self._outputs(x, training=self.in_training)
            task_loss = self._own.share_of_loss(
                self, batch, x, y, y_pred, weights, training=True
            )
            rows = rows_lib.Rows(
                inputs=x,
                outputs=y_pred,
                taught=taught,
                sample_weight=weights,
                targets=y,
                count=batch,
            )
            term = self.teachers.term(
                tape,
                step,
                rows,
                agree_on=agree_on,
                run=self._outputs,
                dtype=task_loss.dtype,
                labels=labels,
            )
            loss = task_loss
            if term:
                distillation_loss, logs = term
                weight = logs["distillation_weight"]
                loss += weight * tf.cast(distillation_loss, loss.dtype)
            scaled = self.optimizer.scale_loss(loss)
        learned = self._weight_logs()
        self.trainer.apply(tape, scaled, batch)
        shares = {"loss": loss, "task_loss": task_loss}
        if term:
            shares["distillation_loss"] = distillation_loss
        else:
            logs = {
                "distillation_weight": tf.zeros([], task_loss.dtype),
                "teacher_staleness": tf.constant(float("nan")),
            }
        batch.record(self.metrics, shares)
        metrics = self.compute_metrics(x, y, y_pred, weights)
        return {**metrics, **logs, **learned, steps.EXAMPLES: batch.total}

    def test_step(self, data: Any) -> Logs:
        """Evaluates only the student on one replica's part of the batch."""
        logs = super().test_step(data)
        return {k: v for k, v in logs.items() if k not in _PARTS}

    def get_config(self) -> dict[str, Any]:
        """Returns the student, serialized, if the model has no teachers.

        Raises:
            ValueError: The model has teachers, which a copy would lack.
        """
        if len(self.teachers):
            raise ValueError(
                "A CodistillModel with teachers must not be copied, cloned or "
                f"pickled; received {self.name!r} with {len(self.teachers)}, "
                "which the copy would lack. Copy `model.student` and wrap the "
                "copy: tfdistill.CodistillModel(copy, teachers=...)."
            )
        return super().get_config()


def _leave_out_xla(arguments: dict[str, Any]) -> None:
    """Compiles without XLA, which can't exchange values in a step."""
    if arguments.get("jit_compile", "auto") not in ("auto", False, None):
        raise ValueError(
            "`jit_compile` must be left out of `compile` if replicas, servers "
            "or peers exchange values in a step; received "
            f"{arguments['jit_compile']!r}. XLA cannot compile that."
        )
    arguments["jit_compile"] = False


def _check_predicted(cluster: identity.Cluster) -> None:
    """Refuses a `fit` after which a comparison would have no predictions."""
    name = cluster.method and cluster.method.held_out
    if name and name not in method.predicted:
        others = ", ".join(map(repr, sorted(method.predicted)))
        raise ValueError(
            f"`fit` must have a HeldOutPredictions({name!r}, ...), which the "
            "comparison reads; this script has "
            f"{f'made only {others}' if others else 'none'}. Add "
            f"tfdistill.callbacks.HeldOutPredictions({name!r}, (x, y)) to the "
            "callbacks, before the first `fit`."
        )


def _check_labels(
    labels: Mapping[str, Any], taught: teacher_list.TeacherList
) -> None:
    """Warns of labels in the data that no teacher reads."""
    readers = labels_lib.LabelTeacher
    is_read = any(isinstance(each, readers) for each in taught)
    if labels and not is_read and taught.loss:
        warnings.warn(
            f"The data contain labels of {', '.join(labels)}, which no teacher "
            "reads. Add tfdistill.teachers.LabelTeacher(name) to `teachers`, "
            "or leave out `distillation_loss` to train without teachers.",
            stacklevel=2,
        )


def _check_roles(
    callbacks: list[keras.callbacks.Callback],
    teachers: teacher_list.TeacherList,
    cluster: identity.Cluster,
) -> None:
    """Refuses doubles and one's own group; warns of what nobody follows."""
    for role in (steps.Exporter, steps.Loader, steps.Mixer):
        kinds = [type(c).__name__ for c in callbacks if isinstance(c, role)]
        if len(kinds) > 1:
            raise ValueError(
                f"`callbacks` must hold at most one {role.__name__}; received "
                f"{', '.join(kinds)}. Keep only one."
            )
    exporter: Any = steps.first(callbacks, steps.Exporter)
    if exporter:
        exporter.find_place(cluster)
        here = run_files.real(exporter.exchange.base)
    for each in teachers if exporter else ():
        if not isinstance(each, peers_lib.Peer):
            continue
        if run_files.real(each.exchange.base) == here:
            follower.checked_groups(each.places.groups, own=exporter.group)
        else:
            warnings.warn(
                f"The StudentExporter publishes to {exporter.exchange.base}, "
                f"and {each.name} reads from {each.exchange.base}. Give both "
                "the same exchange.",
                stacklevel=4,
            )
    moves = teachers.follows_peers or teachers.past_moves_at_refreshes
    if moves and not steps.first(callbacks, steps.Loader):
        warnings.warn(
            "The model learns from other groups or from its own past, but "
            "`fit` got no TeacherLoader, so its teachers are never loaded or "
            "never change. Add "
            "tfdistill.callbacks.TeacherLoader(every_steps=...) to "
            "`callbacks`.",
            stacklevel=4,
        )
    is_heard = cluster.num_groups == 1 or exporter
    if teachers.needs_versions and not is_heard:
        warnings.warn(
            f"This is group {cluster.group} of {cluster.num_groups}, but "
            "`fit` got no StudentExporter, so the other groups can't learn "
            "from it. Add tfdistill.callbacks.StudentExporter(exchange, "
            "every_steps=...) to `callbacks`.",
            stacklevel=4,
        )
