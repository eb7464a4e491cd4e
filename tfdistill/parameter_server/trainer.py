"""Keras 3 fit, evaluate and predict under `ParameterServerStrategy`.

Keras 3 does not support parameter servers (keras#18624). Here the coordinator
runs `fit`: it schedules executions of `steps_per_execution` steps on whichever
worker is free, keeps a few of them in flight, and takes their results in order.

- A step's number travels with it, so learning rate schedules, bias correction
  and step counts never depend on when a worker updates a counter (keras#18668).
- Metric states are computed by the workers and summed here.
- Updates are asynchronous: a step reads what others have written by then.
  Gradients are not summed over workers. Each worker applies its own on the
  servers, in `updates.RemoteUpdate.apply`.
"""

import functools
import warnings
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdistill.parameter_server import epochs as training_epochs
from tfdistill.parameter_server import fetching
from tfdistill.parameter_server import metric_totals
from tfdistill.parameter_server import updates
from tfdistill.parameter_server import variables
from tfdistill.parameter_server import worker
from tfdistill.parameter_server import worker_data
from tfdistill.system import keras_internals
from tfdistill.training import auto_steps
from tfdistill.training import fit_arguments
from tfdistill.training import global_batch
from tfdistill.training import steps
from tfdistill.training import trainer

Logs = steps.Logs
# A table of more values costs more than all else of a usual step.
_MOST_VALUES = 1_000_000


def _source(
    arguments: Mapping[str, Any], *, shuffle: bool = False
) -> worker_data.Source:
    return worker_data.source_of(
        arguments.get("x"),
        arguments.get("y"),
        arguments.get("sample_weight"),
        batch_size=arguments.get("batch_size"),
        shuffle=shuffle,
    )


def _validation(arguments: Mapping[str, Any]) -> worker_data.Source | None:
    given = arguments.get("validation_data")
    if given is None:
        return None
    parts = given if isinstance(given, tuple) else (given,)
    return worker_data.source_of(
        *parts,
        batch_size=arguments.get("validation_batch_size")
        or (arguments.get("batch_size") if len(parts) > 1 else None),
    )


def _looking_up(model: keras.Model) -> keras.layers.Layer | None:
    """Returns a layer whose table of words is on the coordinator only."""
    kinds = (
        keras.layers.IntegerLookup,
        keras.layers.StringLookup,
        keras.layers.TextVectorization,
    )
    layers = keras_internals.all_layers(model)
    return next((each for each in layers if isinstance(each, kinds)), None)


def _check_lookups(model: keras.Model) -> None:
    """Refuses to train what workers cannot look up."""
    if layer := _looking_up(model):
        raise ValueError(
            "Parameter servers must not be used with layers that look up "
            f"words or ids; received the layer {layer.name!r}, whose table "
            "is not on the workers. Call it in the data set: "
            "`dataset.map(lambda x, y: (layer(x), y))`."
        )


def _warn_of_whole_tables(model: keras.Model) -> None:
    """Warns of Keras' own embeddings that are too large to travel whole."""
    layers = {id(x): x for x in keras_internals.all_layers(model)}
    for layer in layers.values():
        if not isinstance(layer, keras.layers.Embedding):
            continue
        size = layer.input_dim * layer.output_dim
        if size > _MOST_VALUES:
            num_bytes = size * tf.as_dtype(layer.variable_dtype).size
            warnings.warn(
                f"The layer {layer.name!r} is a plain keras.layers.Embedding "
                f"of {size:,} values. Parameter servers send all of it, "
                f"{num_bytes / 1e6:.1f} MB, to a worker for each step, and "
                "take a gradient of the same size back. Use "
                "layers.ShardedEmbedding(input_dim, output_dim) instead, which "
                "sends only a batch's rows.",
                stacklevel=3,
            )


class ServerTrainer(trainer.Trainer):
    """Trains on workers, with all variables on parameter servers.

    Everything runs on the coordinator; the data may be a batched
    `tf.data.Dataset`, of which each worker takes every n-th batch, or a
    function of a `tf.distribute.InputContext`, which is called on each worker.
    One batch is one step of one worker, and `steps_per_epoch` counts the steps
    of all workers.
    """

    counts_done = True

    def __init__(self, model: keras.Model) -> None:
        """Opens no connections yet: that is for the first `fit`."""
        super().__init__(model)
        self._variables: variables.RemoteVariables | None = None
        self._update: updates.RemoteUpdate | None = None
        self._evaluations: dict[Any, Any] = {}
        self._predict: Any = None

    @functools.cached_property
    def _workers(self) -> training_epochs.Executions:
        strategy = self._model.distribute_strategy
        return training_epochs.Executions(
            tf.distribute.coordinator.ClusterCoordinator(strategy),
            num_workers=len(keras_internals.jobs_of(strategy)["worker"]),
        )

    def new_auto_steps(self) -> auto_steps.AutoSteps:
        """What finds a number of steps; each is a graph of so many."""
        strategy = self._model.distribute_strategy
        num_workers = len(keras_internals.jobs_of(strategy)["worker"])
        return auto_steps.AutoSteps(
            strategy,
            most=16,
            longest_secs=0.5,
            # In flight before a change, or first of their graph on a worker.
            num_unsteady=2 * training_epochs.IN_FLIGHT_PER_WORKER * num_workers,
        )

    def compiled(
        self, num_steps: int | str | None, *, rows_ahead: steps.RowsAhead | None
    ) -> None:
        """Drops what depends on how the model was compiled before."""
        super().compiled(num_steps, rows_ahead=rows_ahead)
        self._update = self._variables = self._predict = None
        self._evaluations.clear()

    def build(
        self,
        element_spec: object,
        epochs: object = None,
        *,
        predicts: bool = False,
    ) -> None:
        """Builds from the spec of an element of the data."""
        trainer.check_scope(self._model, predicts=predicts)
        trainer.check_stateful(self._model)
        self.input_spec = keras_internals.build_from_spec(
            self._model,
            self._model.bare(element_spec),
            scope=self._model.distribute_strategy.scope,
            # Fused updates keep their own slots, beside the variables.
            optimized=lambda model: [],
            predicts=predicts,
        )
        trainer.adopt_metrics(self._model)

    # ---- one step ----

    def tape(self) -> tf.GradientTape:
        """Returns a tape over the values that the worker has read."""
        return self.update.tape()

    def apply(
        self,
        tape: updates.StepTape,
        loss: tf.Tensor,
        batch: global_batch.GlobalBatch,
    ) -> None:
        """Updates the variables on their servers."""
        self.update.apply(tape, loss)

    @property
    def known_variables(self) -> variables.RemoteVariables:
        """The variables of the model, which is built."""
        if self._variables is None:
            self._variables = variables.RemoteVariables(self._model)
        return self._variables

    @property
    def update(self) -> updates.RemoteUpdate:
        """What updates them; made when first needed, with its slots."""
        if self._update is None:
            self._update = updates.RemoteUpdate(
                self._model.optimizer,
                self.known_variables,
                self._model.distribute_strategy,
            )
        return self._update

    def state(self) -> variables.ServerState:
        """All that training changes, for backups."""
        return variables.ServerState(self.known_variables, self.update)

    def _step(
        self, reading: fetching.Fetching | None = None
    ) -> worker.RemoteStep:
        return worker.RemoteStep(self._model, self.known_variables, reading)

    # ---- fit ----

    def opened_beside(self, rows: tf.data.Dataset) -> Any:
        """Gives each worker whole batches of the rows, as of the data."""
        return self._sent(rows).iterator(0)

    def _sent(self, source: worker_data.Source) -> worker_data.WorkerData:
        workers = self._workers
        return worker_data.WorkerData(
            workers.coordinator, source, num_workers=workers.num_workers
        )

    def fit(
        self, arguments: dict[str, Any], keras_own: Callable[..., Any]
    ) -> keras.callbacks.History:
        """Trains the model; see `keras.Model.fit`."""
        fit_arguments.split(arguments)
        fit_arguments.weigh(arguments)
        shuffle = bool(arguments.get("shuffle", True))
        source = _source(arguments, shuffle=shuffle)
        validation = _validation(arguments)
        # Here each epoch reads the data from their start.
        fit_arguments.check(arguments, starts_over=True)
        _check_lookups(self._model)
        data = self._sent(source)
        self.build(data.element_spec)
        _warn_of_whole_tables(self._model)
        epochs = self._training(data, arguments.get("steps_per_epoch"))
        callbacks = self._callbacks(arguments)
        self._model.stop_training = False
        try:
            callbacks.on_train_begin()
            logs: Logs = {}
            first_epoch = arguments.get("initial_epoch", 0)
            for epoch in range(first_epoch, arguments.get("epochs", 1)):
                callbacks.on_epoch_begin(epoch)
                logs = epochs.run(epoch, callbacks)
                is_due = (epoch + 1) % arguments.get("validation_freq", 1) == 0
                if validation is not None and is_due:
                    found = self._evaluated(
                        validation, arguments.get("validation_steps"), callbacks
                    )
                    logs.update({f"val_{k}": v for k, v in found.items()})
                callbacks.on_epoch_end(epoch, logs)
                epochs.back_up(epoch + 1, 0)
                if self._model.stop_training:
                    break
            callbacks.on_train_end(logs)
        finally:
            self._workers.cancel()
        return self._model.history

    def _training(
        self, data: worker_data.WorkerData, steps_per_epoch: int | None
    ) -> training_epochs.TrainingEpochs:
        with_each_step = self._model.before_tracing()
        # Made with the optimizer's slots, outside of any trace.
        update = self.update
        endless = data.is_endless()
        if self.rows_ahead is not None:
            update.fetching = self.rows_ahead.fetching(
                self._model, update, endless=endless
            )
        return training_epochs.TrainingEpochs(
            self._model,
            self._step(update.fetching),
            data,
            self._workers,
            with_each_step=with_each_step,
            last=self.last,
            endless=endless,
            steps_per_epoch=steps_per_epoch,
            backup=self.backup,
            auto=self.auto_steps,
            beside=self._beside,
        )

    def _callbacks(
        self, arguments: Mapping[str, Any]
    ) -> keras.callbacks.CallbackList:
        verbose = arguments.get("verbose", "auto")
        verbose = 1 if verbose == "auto" else int(verbose)
        return keras.callbacks.CallbackList(
            list(arguments.get("callbacks") or []),
            add_history=True,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=arguments.get("epochs", 1),
            steps=arguments.get("steps_per_epoch"),
            model=self._model,
        )

    # ---- evaluate and predict ----

    def evaluate(
        self, arguments: dict[str, Any], keras_own: Callable[..., Any]
    ) -> Any:
        """Evaluates; each example counts once.

        On the workers, or here if only this process has tables of words.
        """
        callbacks = arguments.get("callbacks")
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = keras.callbacks.CallbackList(
                callbacks, model=self._model
            )
        found = self._evaluated(
            _source(arguments), arguments.get("steps"), callbacks
        )
        if arguments.get("return_dict", False):
            return found
        return keras_internals.in_order_of_metrics(self._model, found)

    def _evaluated(
        self,
        source: worker_data.Source,
        num_batches: int | None,
        callbacks: keras.callbacks.CallbackList,
    ) -> Logs:
        function = self._evaluation(source, num_batches)
        totals = function.totals
        totals.reset()
        callbacks.on_test_begin()
        if _looking_up(self._model) is None:
            results = self._workers.on_each(function.function)
        else:
            # No worker has its table, nor does the body of a loop.
            alone = tf.distribute.InputContext()
            rows = worker_data.made_by(source, alone).take(num_batches or -1)
            results = iter([function.batch_by_batch(rows)])
        for share, added in enumerate(results):
            callbacks.on_test_batch_begin(share)
            totals.add(added.numpy())
            callbacks.on_test_batch_end(share, totals.results())
        found = totals.results()
        logs = {k: found[k] for k in function.log_names if k in found}
        callbacks.on_test_end(logs)
        return logs

    def _evaluation(
        self, source: worker_data.Source, num_batches: int | None
    ) -> worker.EvaluateFunction:
        """Returns the function for a share, traced once for each source."""
        # The source itself is kept with it, so that its id stays its own.
        key = (id(source), num_batches)
        if key not in self._evaluations:
            data = worker_data.TravellingDataset(source)
            self.build(data.element_spec)
            function = worker.EvaluateFunction(
                data,
                self._step(),
                metric_totals.MetricTotals(self._model),
                num_shares=self._workers.num_workers,
                num_batches=num_batches,
            )
            self._evaluations[key] = (source, function)
        return self._evaluations[key][1]

    def predict(
        self, arguments: dict[str, Any], keras_own: Callable[..., Any]
    ) -> Any:
        """Predicts on the coordinator, which reads the weights once."""
        data = worker_data.made_by(
            _source(arguments), tf.distribute.InputContext()
        )
        self.build(data.element_spec, predicts=True)
        known = self._variables
        step = self._step()
        self._variables = known  # A `fit` will know more of them.
        if self._predict is None:
            self._predict = tf.function(
                step.predict, autograph=False, reduce_retracing=True
            )
        values, batches = step.read(), []
        for element in data.take(arguments.get("steps") or -1):
            predicted, values = self._predict(element, values=values)
            batches.append(predicted)
        if not batches:
            raise fit_arguments.no_batch(0)
        return keras_internals.predictions_of(batches)
