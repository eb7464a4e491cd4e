"""DistributedModel: `compile`, `fit`, `evaluate` and `predict` of any model."""

import warnings
from collections.abc import Callable
from typing import Any

import keras

from tfdistill.backup import callback as backup
from tfdistill.cluster import replicas
from tfdistill.model import replica_steps
from tfdistill.observe import run_log
from tfdistill.system import fits
from tfdistill.system import keras_internals
from tfdistill.teachers import output_kinds
from tfdistill.training import auto_steps
from tfdistill.training import fit_arguments
from tfdistill.training import global_batch
from tfdistill.training import guards
from tfdistill.training import own_steps
from tfdistill.training import steps
from tfdistill.training import uncertainty

# Methods of a model inside another that would never be called.
_LOOPS = (
    "evaluate",
    "fit",
    "make_predict_function",
    "make_test_function",
    "make_train_function",
    "predict",
)


@keras.saving.register_keras_serializable(package="tfdistill")
class DistributedModel(replica_steps.ReplicaSteps):
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
        self._wrap(
            model,
            name=name,
            argument="model",
            prefix="distributed",
            may_compile=True,
        )

    # ---- Keras' methods ----

    def compile(
        self,
        *args: object,
        rows_ahead: steps.RowsAhead | None = None,
        **kwargs: Any,
    ) -> None:
        """Configures training; accepts the arguments of the model's `compile`.

        Args:
            *args: As for the model's `compile`.
            rows_ahead: For parameter servers with slow links, a
                `contrib.RowsAhead`, which fetches what steps read some batches
                ahead. Default None.
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
                `ema_overwrite_frequency` cannot run under the strategy;
                weights cannot be learned, as the losses are not by output; or
                `rows_ahead` is a number.
        """
        if isinstance(rows_ahead, int):  # As it was given before.
            raise ValueError(
                "`rows_ahead` must be a tfdistill.contrib.RowsAhead, or None; "
                f"received {rows_ahead}. Pass RowsAhead({rows_ahead or 2}), or "
                "leave it out to fetch nothing ahead."
            )
        strategy = self.distribute_strategy
        own_steps.check(self.model, strategy)
        asked, arguments = self._compile_inside(args, kwargs)
        # In a function, in which Keras tracks no metric and no variable.
        self._compiled_with = lambda: {**asked, "rows_ahead": rows_ahead}
        loss = global_batch.over_global_batch(arguments.get("loss"))
        arguments["loss"] = loss
        for each in self._learned.values():
            each.trainable = False  # Unless it is asked for again.
        if uncertainty.is_asked(arguments.get("loss_weights")):
            arguments["loss_weights"] = uncertainty.of_task(
                loss,
                self.model,
                self._learned,
                has_own_loss=self._own.has_loss,
            )
        if self._exchanges:
            _leave_out_xla(arguments)
        num_steps = arguments.get("steps_per_execution")
        if num_steps in (None, "auto"):
            # Keras' own loops count in single steps.
            arguments["steps_per_execution"] = 1
        for given in ("metrics", "weighted_metrics"):
            output_kinds.check_metrics(loss, arguments.get(given))
        super().compile(**arguments)
        if self._own.has_loss and not self._own.is_compiled:
            keras_internals.lend_compiled(self, self.model, metrics=False)
        self.trainer.compiled(num_steps, rows_ahead=rows_ahead)

    def _compile_inside(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
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

    @property
    def _exchanges(self) -> bool:
        """Whether a step waits for others, which XLA cannot compile."""
        return replicas.exchange_values(self.distribute_strategy)

    def fit(self, *args: object, **kwargs: object) -> keras.callbacks.History:
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
            data.DataError: The data are empty, faulty or too few.
            RuntimeError: The loss or a weight is not finite.
        """
        # The `Backup` decides where to begin (`backup.callback.session`),
        # checks are added (`training.guards.over`), and the trainer prepares
        # the data and runs Keras' own loop (`training.trainer.ReplicaTrainer`)
        # or that over the workers of servers (`parameter_server.trainer`). The
        # order of callbacks, those in brackets only if they are needed:
        #
        #     [same_data.Watch], [_Phases], _DataWatch, TerminateOnNonFinite,
        #     [FitBackup], [TensorBoardBatches], [TeachingWatch], yours,
        #     [RunLogger], [CodistillTensorBoard], [Backup], [AutoSteps],
        #     [Together], [StepWatchdog], [_Phases]
        if self.model.built and not self.model.trainable_weights:
            warnings.warn(
                f"{self.model.name!r} has no trainable weights. Set `trainable "
                "= True` on it or its layers before `compile`.",
                stacklevel=2,
            )
        with fits.one(self.model):
            return self._fit(super().fit, args, kwargs)

    def _fit(
        self,
        keras_own: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self._check_compiled()
        strategy = self.distribute_strategy
        arguments = fit_arguments.of_loop(keras_own, args, kwargs, strategy)
        callbacks = self._callbacks(arguments)
        self._files.move(callbacks)
        if self.trainer.auto_steps is not None:
            callbacks = auto_steps.added(callbacks, self.trainer.auto_steps)
        arguments["callbacks"] = callbacks
        steps.introduce(callbacks)
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

    def _callbacks(self, arguments: dict[str, Any]) -> list[Any]:
        """Returns the callbacks of a `fit`, and what this model adds."""
        found = guards.listed(arguments.get("callbacks"))
        run_log.add_to(found, self._cluster.group_dir)
        return found

    def evaluate(self, *args: object, **kwargs: object) -> Any:
        """Evaluates the model as `keras.Model.evaluate` does.

        Each example counts once; results are equal on all workers. A callback
        of `fit` may call it on any worker, which then evaluates by itself; of
        a model with its own loss or steps, on all workers.
        """
        self._check_compiled()
        return self._loop("evaluate", super().evaluate, args, kwargs)

    def predict(self, *args: object, **kwargs: object) -> Any:
        """Predicts by the model as `keras.Model.predict` does.

        Every worker gets all predictions, in the order of the data. A callback
        of `fit` may call it on any worker, which then predicts by itself.
        """
        return self._loop("predict", super().predict, args, kwargs)

    def train_on_batch(self, *args: object, **kwargs: object) -> Any:
        """Makes one step, of a global batch; see `keras.Model`."""
        self._check_on_batch("train_on_batch", "fit(x, y, batch_size=...)")
        return super().train_on_batch(*args, **kwargs)

    def test_on_batch(self, *args: object, **kwargs: object) -> Any:
        """Evaluates one global batch; see `keras.Model`."""
        self._check_on_batch("test_on_batch", "evaluate(x, y)")
        if alone := self._alone("evaluate"):
            return replicas.outside_scopes(
                lambda: alone.test_on_batch(*args, **kwargs)
            )
        return super().test_on_batch(*args, **kwargs)

    def predict_on_batch(self, x: object) -> Any:
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

    def _loop(
        self,
        name: str,
        keras_own: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
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

    @property
    def _kind(self) -> type["DistributedModel"]:
        """This package's class that it is made of, whatever a user derived."""
        return DistributedModel

    def _as_alone(self) -> "DistributedModel":
        kind = self._kind
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


def _again(metric: object) -> object:
    """Returns a copy of a metric, with its own variables."""
    if not isinstance(metric, keras.Metric):
        return metric
    return type(metric).from_config(metric.get_config())


def _leave_out_xla(arguments: dict[str, Any]) -> None:
    """Compiles without XLA, which can't exchange values in a step."""
    if arguments.get("jit_compile", "auto") not in ("auto", False, None):
        raise ValueError(
            "`jit_compile` must be left out of `compile` if replicas, servers "
            "or peers exchange values in a step; received "
            f"{arguments['jit_compile']!r}. XLA cannot compile that."
        )
    arguments["jit_compile"] = False
