"""Keras 3 fit, evaluate and predict under `ParameterServerStrategy`.

Keras 3 does not support parameter servers (keras#18624). Here the coordinator
runs `fit`: it schedules executions of `steps_per_execution` steps on whichever
worker is free, keeps a few of them in flight, and takes their results in order.

- A step's number travels with it, so learning rate schedules, bias correction
  and step counts never depend on who updates a counter when (keras#18668).
- Metric states are computed by the workers and summed here.
- Updates of variables are asynchronous, as parameter servers are: a step reads
  what others have written by then.
"""

import contextlib
import dataclasses
import types
import typing
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill import data_checks
from tfdistill.backup import callback
from tfdistill.cluster import replicas
from tfdistill.parameter_server import epochs as training_epochs
from tfdistill.parameter_server import metric_totals
from tfdistill.parameter_server import variables
from tfdistill.parameter_server import worker
from tfdistill.parameter_server import worker_data
from tfdistill.system import keras_internals
from tfdistill.training import fit_arguments
from tfdistill.training import guards

_UNSUPPORTED = ("validation_split", "class_weight")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The arguments of `fit`.

    Attributes:
        source: The training data.
        epochs: Index of the epoch to stop before.
        initial_epoch: Index of the first epoch.
        steps_per_epoch: Steps of the whole group an epoch; None where the
            data end.
        verbose: As in Keras: 0, 1 or 2.
        callbacks: Run on the coordinator.
        validation: The validation data, or None.
        validation_steps: Batches of them to read; None for all.
        validation_freq: Epochs between validations.
    """

    source: worker_data.Source
    epochs: int
    initial_epoch: int
    steps_per_epoch: int | None
    verbose: int
    callbacks: list[keras.callbacks.Callback]
    validation: worker_data.Source | None
    validation_steps: int | None
    validation_freq: int

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "FitOptions":
        """Reads the arguments of `keras.Model.fit`.

        Args:
            arguments: By name; those that are absent have Keras' defaults.

        Raises:
            ValueError: An argument does not fit parameter servers.
        """
        for name in _UNSUPPORTED:
            if arguments.get(name):
                raise ValueError(
                    f"`{name}` does not work with parameter servers; received "
                    f"{arguments[name]!r}. Split or weight the examples in "
                    "the data set."
                )
        verbose = arguments.get("verbose", "auto")
        found = cls(
            source=worker_data.source_of(
                arguments.get("x"),
                arguments.get("y"),
                arguments.get("sample_weight"),
                batch_size=arguments.get("batch_size"),
                shuffle=bool(arguments.get("shuffle", True)),
            ),
            epochs=arguments.get("epochs", 1),
            initial_epoch=arguments.get("initial_epoch", 0),
            steps_per_epoch=arguments.get("steps_per_epoch"),
            verbose=1 if verbose == "auto" else int(verbose),
            callbacks=list(arguments.get("callbacks") or []),
            validation=_validation(arguments),
            validation_steps=arguments.get("validation_steps"),
            validation_freq=arguments.get("validation_freq", 1),
        )
        # Here each epoch reads the data from their start.
        fit_arguments.check(arguments, starts_over=True)
        return found


def _validation(arguments: Mapping[str, Any]) -> worker_data.Source | None:
    given = arguments.get("validation_data")
    if given is None:
        return None
    parts = given if isinstance(given, tuple) else (given,)
    return worker_data.source_of(
        *parts, batch_size=arguments.get("validation_batch_size")
    )


Logs = dict[str, Any]


class Trainer:
    """Trains, evaluates and predicts with one model on a cluster's workers.

    Attributes:
        num_workers: Number of workers of the group.
        update: Makes the updates; None before the first `fit`.
    """

    def __init__(self, model: keras.Model) -> None:
        """Connects to the workers of the model's strategy.

        Args:
            model: A compiled model, made in the strategy's scope.
        """
        self._model = model
        self._strategy = model.distribute_strategy
        jobs = keras_internals.jobs_of(self._strategy)
        self.num_workers = len(jobs["worker"])
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(
            self._strategy
        )
        self._executions = training_epochs.Executions(
            self._coordinator, num_workers=self.num_workers
        )
        self.update: variables.RemoteUpdate | None = None
        self._variables: variables.RemoteVariables | None = None
        self._shares: dict[Any, Any] = {}

    def forget(self) -> None:
        """Drops what depends on how the model is compiled."""
        self.update = self._variables = None
        self._shares.clear()

    # ---- fit ----

    def fit(self, options: FitOptions) -> keras.callbacks.History:
        """Trains the model.

        Args:
            options: What `fit` was given.

        Returns:
            The `History`.
        """
        data = worker_data.WorkerData(
            self._coordinator, options.source, num_workers=self.num_workers
        )
        self._build(data.element_spec)
        self._model.prepare_executions()
        epochs = training_epochs.TrainingEpochs(
            self._model,
            self._remote_step(),
            data,
            self._executions,
            num_workers=self.num_workers,
            steps_per_epoch=options.steps_per_epoch,
            state=variables.TrainingState(
                self._known_variables, self._made_update()
            ),
            backups=[c for c in options.callbacks if hasattr(c, "on_quiet")],
        )
        callbacks = self._callbacks(options)
        self._model.stop_training = False
        try:
            first_epoch = epochs.start(options.initial_epoch)
            callbacks.on_train_begin()
            logs = self._epochs(epochs, first_epoch, options, callbacks)
            callbacks.on_train_end(logs)
        finally:
            self._executions.cancel()
        return self._model.history

    def _epochs(
        self,
        epochs: training_epochs.TrainingEpochs,
        first_epoch: int,
        options: FitOptions,
        callbacks: keras.callbacks.CallbackList,
    ) -> Logs:
        logs: Logs = {}
        for epoch in range(first_epoch, options.epochs):
            callbacks.on_epoch_begin(epoch)
            logs = epochs.run(epoch, callbacks)
            if options.validation is not None and (
                (epoch + 1) % options.validation_freq == 0
            ):
                found = self.evaluate(
                    options.validation,
                    steps=options.validation_steps,
                    callbacks=callbacks,
                )
                logs.update({f"val_{k}": v for k, v in found.items()})
            callbacks.on_epoch_end(epoch, logs)
            epochs.back_up(epoch + 1, 0)
            if self._model.stop_training:
                break
        return logs

    def _callbacks(self, options: FitOptions) -> keras.callbacks.CallbackList:
        return keras.callbacks.CallbackList(
            options.callbacks,
            add_history=True,
            add_progbar=options.verbose != 0,
            verbose=options.verbose,
            epochs=options.epochs,
            steps=options.steps_per_epoch,
            model=self._model,
        )

    # ---- evaluate and predict ----

    def evaluate(
        self,
        source: worker_data.Source,
        *,
        steps: int | None = None,
        callbacks: keras.callbacks.CallbackList | None = None,
    ) -> dict[str, float]:
        """Evaluates on the workers; each example counts once.

        Args:
            source: The data.
            steps: How many batches to read. None for all.
            callbacks: Told of the evaluation's start, shares and end.

        Returns:
            The metrics' results by name.
        """
        function = self._share("evaluate", source, steps)
        totals = function.totals
        totals.reset()
        callbacks = callbacks or keras.callbacks.CallbackList()
        callbacks.on_test_begin()
        results = self._executions.run(function.function, self._share_indices())
        for share, added in enumerate(results):
            callbacks.on_test_batch_begin(share)
            totals.add(added.numpy())
            callbacks.on_test_batch_end(share, totals.results())
        found = totals.results()
        logs = {k: found[k] for k in function.log_names if k in found}
        callbacks.on_test_end(logs)
        return logs

    def predict(
        self, source: worker_data.Source, *, steps: int | None = None
    ) -> Any:
        """Predicts on the workers.

        Args:
            source: The data.
            steps: How many batches to read. None for all.

        Returns:
            Arrays in the order of the data, in the structure of the outputs.
        """
        function = self._share("predict", source, steps)
        by_share = [
            (rows.numpy(), [output.numpy() for output in outputs])
            for rows, outputs in self._executions.run(
                function.function, self._share_indices()
            )
        ]
        flat = [
            _interleaved([(rows, outputs[i]) for rows, outputs in by_share])
            for i in range(len(by_share[0][1]))
        ]
        return keras.tree.pack_sequence_as(function.output_spec, flat)

    def _share_indices(self) -> list[tuple[tf.Tensor]]:
        return [
            (tf.constant(index, tf.int64),) for index in range(self.num_workers)
        ]

    def _share(
        self, kind: str, source: worker_data.Source, steps: int | None
    ) -> Any:
        """Returns the function for a share, traced once for each source."""
        # The source itself is kept with it, so that its id stays its own.
        key = (kind, id(source), steps)
        if key in self._shares:
            return self._shares[key][1]
        data = worker_data.TravellingDataset(source)
        self._build(data.element_spec)
        step = self._remote_step(trains=False)
        options: dict[str, Any] = {
            "read": self._known_variables.read,
            "num_shares": self.num_workers,
            "num_batches": steps,
        }
        function: Any
        if kind == "evaluate":
            totals = metric_totals.MetricTotals(self._model)
            function = worker.EvaluateFunction(data, step, totals, **options)
        else:
            function = worker.PredictFunction(data, step, **options)
        self._shares[key] = (source, function)
        return function

    # ---- the model ----

    def _build(self, element_spec: Any) -> None:
        self._model.build_for(element_spec)

    @property
    def _known_variables(self) -> variables.RemoteVariables:
        if self._variables is None:
            self._variables = variables.RemoteVariables(self._model)
        return self._variables

    def _remote_step(self, *, trains: bool = True) -> worker.RemoteStep:
        update = self._made_update() if trains else None
        return worker.RemoteStep(self._model, self._known_variables, update)

    def _made_update(self) -> variables.RemoteUpdate:
        if self.update is None:
            self.update = variables.RemoteUpdate(
                self._model.optimizer, self._known_variables, self._strategy
            )
        return self.update


def _interleaved(shares: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Joins shares whose batches were dealt out in turn.

    Args:
        shares: For each share the rows of its batches, and all of its rows.
    """
    parts = [
        iter(np.split(values, np.cumsum(rows)[:-1])) if len(rows) else iter(())
        for rows, values in shares
    ]
    count = max(len(rows) for rows, _ in shares)
    batches = [next(part, None) for _ in range(count) for part in parts]
    found = [batch for batch in batches if batch is not None]
    return np.concatenate(found) if found else shares[0][1]


_Base: Any = keras.Model if typing.TYPE_CHECKING else object


class ParameterServerTraining(_Base):
    """Takes over fit, evaluate and predict under `ParameterServerStrategy`.

    Under any other strategy it changes nothing. Everything runs on the
    coordinator; the data may be a batched `tf.data.Dataset`, of which each
    worker takes every n-th batch, or a function of a
    `tf.distribute.InputContext`, which is called on each worker.
    """

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Configures training; see `keras.Model.compile`."""
        super().compile(*args, **kwargs)
        trainer = getattr(self, "_trainer", None)
        if trainer is not None:
            trainer().forget()

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains the model; see `keras.Model.fit`.

        Under parameter servers one batch of the data is one step of one
        worker, and `steps_per_epoch` counts the steps of all workers.
        """
        if not self._on_parameter_servers:
            return super().fit(*args, **kwargs)
        arguments = self._bind(keras.Model.fit, args, kwargs)
        callbacks = self.complete_callbacks(arguments.get("callbacks"))
        watch = guards.over_steps(self.distribute_strategy)
        arguments["callbacks"] = [*guards.added_to(callbacks), watch]
        options = FitOptions.of(arguments)
        with contextlib.ExitStack() as stack:
            stack.enter_context(data_checks.told())
            # Also where `fit` ends with an error.
            stack.callback(watch.on_train_end)
            stack.enter_context(
                callback.on_sigterm(arguments, self.distribute_strategy)
            )
            stack.enter_context(guards.reported(arguments))
            return self.parameter_server_trainer.fit(options)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the model; see `keras.Model.evaluate`."""
        if not self._on_parameter_servers:
            return super().evaluate(*args, **kwargs)
        arguments = self._bind(keras.Model.evaluate, args, kwargs)
        told: dict[str, Any] = {}
        with guards.reported(told):
            found = self.parameter_server_trainer.evaluate(
                _source(arguments),
                steps=arguments.get("steps"),
                callbacks=keras.callbacks.CallbackList(told.get("callbacks")),
            )
        if arguments.get("return_dict", False):
            return found
        values = list(found.values())
        return values[0] if len(values) == 1 else values

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts; see `keras.Model.predict`."""
        if not self._on_parameter_servers:
            return super().predict(*args, **kwargs)
        arguments = self._bind(keras.Model.predict, args, kwargs)
        return self.parameter_server_trainer.predict(
            _source(arguments), steps=arguments.get("steps")
        )

    def _bind(self, method: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        bound = types.MethodType(method, self)
        return fit_arguments.bind(bound, args, kwargs)

    @property
    def _on_parameter_servers(self) -> bool:
        return replicas.is_used(self.distribute_strategy)

    @property
    def tells_last_batch_done(self) -> bool:
        """Whether callbacks get the last batch that was done.

        Keras gives them the last one that was asked for.
        """
        return self._on_parameter_servers

    @property
    def parameter_server_trainer(self) -> Trainer:
        """Who trains this model on its parameter-server cluster."""
        if getattr(self, "_trainer", None) is None:
            trainer = Trainer(self)
            # In a function, so that Keras does not look into it.
            self._trainer = lambda: trainer
        return self._trainer()

    # ---- what else an execution takes along ----

    def prepare_executions(self) -> None:
        """Makes what executions need, before the first is traced."""

    def execution_arguments(self) -> tf.Tensor:
        """Returns what an execution is told, an int64 tensor."""
        return tf.zeros([0], tf.int64)

    def on_worker(self, arguments: tf.Tensor) -> Any:
        """Returns a context for one execution while it is traced.

        Args:
            arguments: What `execution_arguments` returned.
        """
        return contextlib.nullcontext()

    def execution_report(self) -> tf.Tensor:
        """Returns what an execution reports at its end, float64 `[size]`."""
        return tf.zeros([0], tf.float64)

    def note_report(self, report: Any) -> None:
        """Takes an execution's report, on the coordinator."""

    def shown_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Returns what callbacks see of an execution's logs."""
        return logs

    def build_for(self, element_spec: Any) -> None:
        """Builds model, metrics, loss and optimizer for some data.

        Args:
            element_spec: Specs of an element of the data.
        """
        inputs = keras_internals.build_from_spec(
            self,
            element_spec,
            scope=self.distribute_strategy.scope,
            # Fused updates keep their own slots, beside the variables.
            optimized=lambda model: [],
        )
        self._spec_of_inputs = lambda: inputs

    @contextlib.contextmanager
    def updating_by(
        self,
        tape: Callable[[], Any],
        apply: Callable[[tf.GradientTape, tf.Tensor], None],
    ) -> Iterator[None]:
        """Has a step record and apply its gradients by other means.

        Args:
            tape: Returns the context of a tape.
            apply: Takes the tape and the loss.
        """
        self.gradient_tape, self.apply_summed_gradients = tape, apply
        try:
            yield
        finally:
            del self.gradient_tape, self.apply_summed_gradients


def _source(arguments: dict[str, Any]) -> worker_data.Source:
    return worker_data.source_of(
        arguments.get("x"),
        arguments.get("y"),
        arguments.get("sample_weight"),
        batch_size=arguments.get("batch_size"),
    )
