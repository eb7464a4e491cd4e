"""MultiWorkerTraining: Keras' hooks, each handed to the trainer.

Keras 3's own `fit` fails under `MultiWorkerMirroredStrategy` (keras#20585): it
reduces a batch tuple over the workers, and averages logs over a missing axis.
`MultiWorkerTraining` replaces both. Updates are those of one replica:

- losses are divided by the global batch (`tfdistill.training.global_batch`);
- gradients are summed over the replicas *before* the optimizer clips them
  (`tfdistill.embedding.updates`, which also updates the tables of embeddings);
- logs come from metric states summed over all replicas, in one collective;
- files are written by the chief only (`tfdistill.cluster.replicas`).
"""

import contextlib
import typing
from typing import Any

import keras
import tensorflow as tf

from tfdistill import data
from tfdistill import data_checks
from tfdistill.backup import callback
from tfdistill.cluster import replicas
from tfdistill.embedding import updates
from tfdistill.system import keras_internals
from tfdistill.training import fit_arguments
from tfdistill.training import global_batch
from tfdistill.training import guards
from tfdistill.training import trainer

keras_internals.check_keras()

Logs = trainer.Logs


# A mixin, not a `keras.Model`: building a functional model from a subclass
# makes Keras swap `Model` among the bases of every class above it
# (`inject_functional_model_class`), which must not reach `CodistillModel`.
_Base: Any = keras.Model if typing.TYPE_CHECKING else object


class MultiWorkerTraining(updates.TableTraining, _Base):
    """Makes a `keras.Model`'s training independent of who shares the work.

    With one replica the model trains exactly as Keras does; under
    `MirroredStrategy` and `MultiWorkerMirroredStrategy` the same global batch
    gives the same weights, to float tolerance. Batch normalization is the
    exception by its nature: it normalizes over each replica's own rows
    (`keras.layers.BatchNormalization(synchronized=True)` over all).

    Example:
        >>> class MyModel(MultiWorkerTraining, keras.Model):
        ...     pass
        >>> inputs = keras.Input((4,))
        >>> model = MyModel(inputs, keras.layers.Dense(1)(inputs))
        >>> model.compile("sgd", "mse")
    """

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Configures training; takes what `keras.Model.compile` takes.

        Args:
            *args: As for `keras.Model.compile`.
            **kwargs: As for `keras.Model.compile`. `jit_compile="auto"`, the
                default, means no XLA: compiled steps were seven times slower
                on CPU, and a collective cannot be compiled at all.
        """
        bound = fit_arguments.bind(super().compile, args, kwargs)
        bound["loss"] = global_batch.over_global_batch(bound.get("loss"))
        if bound.get("jit_compile", "auto") == "auto":
            bound["jit_compile"] = False
        super().compile(**bound)
        if self.optimizer is not None and self._num_replicas > 1:
            keras_internals.leave_reduction_to_caller(self.optimizer)

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains the model; takes what `keras.Model.fit` takes.

        Args:
            *args: As for `keras.Model.fit`.
            **kwargs: As for `keras.Model.fit`. Every worker passes the same
                arguments. Callbacks that write files run on the chief only;
                `batch_size` and the batches of a data set are global.

        Returns:
            The `History`, equal on all workers.

        Raises:
            ValueError: Arguments are out of range or contradict each other.
            data_checks.DataError: The data are empty, faulty or too few.
            RuntimeError: The loss is not finite; see `FiniteLoss`.
        """
        bound = fit_arguments.bind(super().fit, args, kwargs)
        fit_arguments.check(bound, self)
        strategy = self.distribute_strategy
        callbacks = self.complete_callbacks(bound.get("callbacks"))
        bound["callbacks"] = guards.added_to(guards.select(callbacks, strategy))
        if isinstance(bound.get("x"), tf.data.Dataset):
            bound.setdefault("shuffle", False)  # Keras warns of its default.
        self._prepare(bound)
        validation = bound.get("validation_data")
        if isinstance(validation, tf.data.Dataset):
            bound["validation_data"] = data.by_element(validation)
        with contextlib.ExitStack() as stack:
            stack.enter_context(data_checks.told())
            if replicas.num_workers(strategy) > 1:
                fit_arguments.check_alike(bound, strategy)
                watch = guards.over_steps(strategy)
                bound["callbacks"].append(watch)
                stack.callback(watch.on_train_end)  # Also after an error.
            stack.enter_context(callback.on_sigterm(bound, strategy))
            stack.enter_context(guards.reported(bound))
            return super().fit(**bound)

    def complete_callbacks(self, callbacks: Any) -> Any:
        """Returns the callbacks of `fit`; a subclass may add its own."""
        return callbacks

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates as `keras.Model.evaluate` does.

        Each example counts once; results are equal on all workers.
        """
        bound = fit_arguments.bind(super().evaluate, args, kwargs)
        self._prepare(bound)
        with guards.reported(bound):
            return super().evaluate(**bound)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts as `keras.Model.predict` does.

        Every worker gets all predictions, in the order of the data.
        """
        bound = fit_arguments.bind(super().predict, args, kwargs)
        self._prepare(bound)
        with guards.reported(bound):
            predictions = super().predict(**bound)
        if replicas.num_workers(self.distribute_strategy) == 1:
            return predictions
        flat = keras.tree.flatten(predictions)
        return keras.tree.pack_sequence_as(
            predictions,
            [
                v.astype(d)
                for v, d in zip(flat, self._prediction_dtypes, strict=True)
            ],
        )

    def _prepare(self, arguments: dict[str, Any]) -> None:
        """Adjusts the arguments of fit, evaluate and predict in place."""
        fit_arguments.check_data("x", arguments.get("x"))
        strategy = self.distribute_strategy
        if strategy.num_replicas_in_sync == 1:
            return
        if not replicas.is_chief(strategy):
            arguments["verbose"] = 0
        arguments["x"] = trainer.prepare(
            arguments.get("x"), arguments.get("shuffle", False), strategy
        )

    @property
    def _num_replicas(self) -> int:
        return int(self.distribute_strategy.num_replicas_in_sync)

    train_function: Any
    test_function: Any

    # ---- one step ----

    def train_step(self, data: Any) -> Logs:
        """Runs one update on one replica's part of the global batch.

        Args:
            data: `x`, `(x, y)` or `(x, y, sample_weight)`.

        Returns:
            The metrics' results.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        batch = global_batch.GlobalBatch.of(x)
        with batch.scope(), self.gradient_tape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight, training=True)
            scaled = self.optimizer.scale_loss(loss)
        self.apply_summed_gradients(tape, scaled)
        self.record_loss(loss, batch)
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def test_step(self, data: Any) -> Logs:
        """Evaluates one replica's part of the global batch.

        Args:
            data: `x`, `(x, y)` or `(x, y, sample_weight)`.

        Returns:
            The metrics' results.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        batch = global_batch.GlobalBatch.of(x)
        with batch.scope():
            y_pred = self(x, training=False)
            loss = self.compute_loss(
                x, y, y_pred, sample_weight, training=False
            )
        self.record_loss(loss, batch)
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def predict_step(self, data: Any) -> Any:
        """Predicts for one replica's part of the global batch.

        On several workers it answers in a dtype that collectives can gather,
        which `predict` turns back.
        """
        predictions = super().predict_step(data)
        if replicas.num_workers(self.distribute_strategy) == 1:
            return predictions
        self._prediction_dtypes = tuple(
            value.dtype.as_numpy_dtype
            for value in keras.tree.flatten(predictions)
        )
        return keras.tree.map_structure(replicas.gatherable, predictions)

    def gradient_tape(self) -> Any:
        """Returns the context of a tape that records one step."""
        return tf.GradientTape()

    def record_loss(
        self,
        share: tf.Tensor,
        batch: global_batch.GlobalBatch,
        name: str = "loss",
    ) -> None:
        """Adds one step's loss to a mean over examples.

        Args:
            share: This replica's share of the step's loss, a scalar.
            batch: The step's batch.
            name: Name of the `keras.metrics.Mean` to update.
        """
        tracker = next(m for m in self.metrics if m.name == name)
        # Summed: loss * examples by examples, though a replica may hold none.
        tracker.update_state(
            share * batch.num_replicas,
            sample_weight=batch.total / batch.num_replicas,
        )

    # ---- many replicas ----

    def make_train_function(self, force: bool = False) -> Any:
        """Builds what `fit` calls for each execution; kept and returned."""
        self.table_updates()
        if self._num_replicas == 1:
            return super().make_train_function(force)
        if self.train_function is None or force:
            self.train_function = trainer.on_replicas(self, self.train_step)
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """Builds what `evaluate` calls for each execution; kept, returned."""
        if self._num_replicas == 1:
            return super().make_test_function(force)
        if self.test_function is None or force:
            self.test_function = trainer.on_replicas(self, self.test_step)
        return self.test_function

    def _maybe_symbolic_build(
        self, iterator: Any = None, data_batch: Any = None
    ) -> None:
        spec = data_batch
        if iterator is not None:
            spec = keras_internals.distributed_element_spec(iterator)
        inputs = keras_internals.build_from_spec(
            self,
            spec,
            scope=self.distribute_strategy.scope,
            optimized=updates.dense_variables,
        )
        # In a function, since Keras replaces the containers that it tracks.
        self._spec_of_inputs = lambda: inputs

    @property
    def input_spec_of_data(self) -> Any:
        """Specs `[batch, ...]` of the inputs in the data last given.

        Raises:
            RuntimeError: No data was given to `fit` or `evaluate` yet.
        """
        if getattr(self, "_spec_of_inputs", None) is None:
            raise RuntimeError(
                "The model has not seen any data yet, so the spec of its "
                "inputs is unknown. Call `fit` first."
            )
        return self._spec_of_inputs()
