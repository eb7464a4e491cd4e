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

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill import executions
from tfdistill import fit_options
from tfdistill import keras_internals
from tfdistill import metric_totals
from tfdistill import remote_step
from tfdistill import remote_update
from tfdistill import remote_variables
from tfdistill import share_functions
from tfdistill import training_epoch
from tfdistill import training_state
from tfdistill import worker_data

Logs = dict[str, Any]


def is_used(strategy: tf.distribute.Strategy) -> bool:
    """Whether variables live on parameter servers under this strategy."""
    return isinstance(strategy, tf.distribute.ParameterServerStrategy)


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
        self._executions = executions.Executions(
            self._coordinator, num_workers=self.num_workers
        )
        self.update: remote_update.RemoteUpdate | None = None
        self._variables: remote_variables.RemoteVariables | None = None
        self._shares: dict[Any, Any] = {}

    def forget(self) -> None:
        """Drops what depends on how the model is compiled."""
        self.update = self._variables = None
        self._shares.clear()

    # ---- fit ----

    def fit(self, options: fit_options.FitOptions) -> keras.callbacks.History:
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
        epochs = training_epoch.TrainingEpochs(
            self._model,
            self._remote_step(),
            data,
            self._executions,
            num_workers=self.num_workers,
            steps_per_epoch=options.steps_per_epoch,
            state=training_state.TrainingState(
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
        epochs: training_epoch.TrainingEpochs,
        first_epoch: int,
        options: fit_options.FitOptions,
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

    def _callbacks(
        self, options: fit_options.FitOptions
    ) -> keras.callbacks.CallbackList:
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
            function = share_functions.EvaluateFunction(
                data, step, totals, **options
            )
        else:
            function = share_functions.PredictFunction(data, step, **options)
        self._shares[key] = (source, function)
        return function

    # ---- the model ----

    def _build(self, element_spec: Any) -> None:
        self._model.build_for(element_spec)

    @property
    def _known_variables(self) -> remote_variables.RemoteVariables:
        if self._variables is None:
            self._variables = remote_variables.RemoteVariables(self._model)
        return self._variables

    def _remote_step(self, *, trains: bool = True) -> remote_step.RemoteStep:
        update = self._made_update() if trains else None
        return remote_step.RemoteStep(
            self._model, self._known_variables, update
        )

    def _made_update(self) -> remote_update.RemoteUpdate:
        if self.update is None:
            self.update = remote_update.RemoteUpdate(
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
