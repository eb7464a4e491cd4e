"""MultiWorkerTraining: Keras' hooks, each handed to the trainer.

Keras 3's own `fit` fails under `MultiWorkerMirroredStrategy` (keras#20585): it
reduces a batch tuple over the workers, and averages logs over a missing axis.
`MultiWorkerTraining` replaces both. Updates are those of one replica:

- losses are divided by the global batch (`tfdistill.training.global_batch`);
- gradients are summed over the replicas *before* the optimizer clips them
  (`tfdistill.training.trainer`);
- logs come from metric states summed over all replicas, in one collective;
- files are written by the chief only (`tfdistill.training.guards`).
"""

import typing
from typing import Any

import keras
import tensorflow as tf

from tfdistill.backup import callback as backup
from tfdistill.cluster import replicas
from tfdistill.cluster import strategy as strategy_lib
from tfdistill.observe import run_log
from tfdistill.parameter_server import trainer as server_trainer
from tfdistill.system import keras_internals
from tfdistill.training import fit_arguments
from tfdistill.training import global_batch
from tfdistill.training import guards
from tfdistill.training import own_steps
from tfdistill.training import steps
from tfdistill.training import trainer as replica_trainer

keras_internals.check_keras()
keras_internals.make_scalars_readable()

Logs = steps.Logs


def trainer_of(model: Any, **options: Any) -> replica_trainer.Trainer:
    """Makes what trains a model under its strategy."""
    if replicas.on_servers(model.distribute_strategy):
        return server_trainer.ServerTrainer(model, **options)
    return replica_trainer.ReplicaTrainer(model, **options)


# A mixin, not a `keras.Model`: building a functional model from a subclass
# makes Keras swap `Model` among the bases of every class above it
# (`inject_functional_model_class`), which must not reach `CodistillModel`.
_Base: Any = keras.Model if typing.TYPE_CHECKING else object


class MultiWorkerTraining(steps.Trained, _Base):
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

    train_function: Any
    test_function: Any
    _trainer_made: Any = None

    def make_trainer(self) -> replica_trainer.Trainer:
        """Makes what trains this model under its strategy."""
        return trainer_of(self)

    @property
    def trainer(self) -> replica_trainer.Trainer:
        """What trains this model; made when first needed, then kept."""
        if self._trainer_made is None:
            self._trainer_made = self.make_trainer()
        return self._trainer_made

    def stepping_model(self) -> keras.Model:
        """Returns the model whose own `train_step` or loss is run, if any.

        A method: Keras saves the models that it finds in properties.
        """
        return self

    # ---- Keras' methods ----

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Configures training; takes what `keras.Model.compile` takes.

        Args:
            *args: As for `keras.Model.compile`.
            **kwargs: As for `keras.Model.compile`. `jit_compile="auto"`, the
                default, is Keras' own choice on one device, which is XLA on a
                GPU if all layers support it. Several replicas, workers and
                parameter servers train without XLA, which cannot compile what
                they exchange.
        """
        arguments = fit_arguments.bind(super().compile, args, kwargs)
        arguments["loss"] = global_batch.over_global_batch(
            arguments.get("loss")
        )
        strategy = self.distribute_strategy
        is_alone = strategy.num_replicas_in_sync == 1
        if arguments.get("jit_compile", "auto") == "auto" and (
            not is_alone or replicas.on_servers(strategy)
        ):
            arguments["jit_compile"] = False
        own_steps.check(self.stepping_model(), strategy)
        super().compile(**arguments)
        self.trainer.compiled()

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains the model; takes what `keras.Model.fit` takes.

        In a launched run it adds a `RunLog`, which the launcher reads.

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
        arguments = fit_arguments.bind(super().fit, args, kwargs)
        strategy = self.distribute_strategy
        fit_arguments.call_functions(arguments, strategy)
        callbacks = arguments.get("callbacks")
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            arguments["callbacks"] = keras.tree.flatten(callbacks or [])
            directory = strategy_lib.cluster_of(strategy).group_dir
            run_log.add_to(arguments["callbacks"], directory)
        with backup.session(self, arguments):
            fit_arguments.check_strategy(strategy)
            replicas.meet(strategy, "fit")
            with guards.over(arguments, strategy):
                return self.trainer.fit(arguments, super().fit)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates as `keras.Model.evaluate` does.

        Each example counts once; results are equal on all workers.
        """
        arguments = fit_arguments.bind(super().evaluate, args, kwargs)
        fit_arguments.call_functions(arguments, self.distribute_strategy)
        replicas.meet(self.distribute_strategy, "evaluate")
        with guards.reported(arguments):
            return self.trainer.evaluate(arguments, super().evaluate)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts as `keras.Model.predict` does.

        Every worker gets all predictions, in the order of the data.
        """
        arguments = fit_arguments.bind(super().predict, args, kwargs)
        fit_arguments.call_functions(arguments, self.distribute_strategy)
        replicas.meet(self.distribute_strategy, "predict")
        with guards.reported(arguments):
            return self.trainer.predict(arguments, super().predict)

    # ---- Keras' hooks ----

    def _maybe_symbolic_build(
        self, iterator: Any = None, data_batch: Any = None
    ) -> None:
        spec = data_batch
        if iterator is not None:
            spec = keras_internals.distributed_element_spec(iterator)
        own_steps.mark_built(self.stepping_model())
        if self.stepping_model().built:
            self.built = True
        self.trainer.build(spec, iterator)

    def make_train_function(self, force: bool = False) -> Any:
        """Builds what `fit` calls for each execution; kept and returned."""
        if self.train_function is None or force:
            super().make_train_function(force=True)  # Traces nothing.
            if self._is_split("train_step"):
                own_steps.take_gradients(self.stepping_model())
            self.train_function = self.trainer.train_function(
                self._on_replicas("train_step"), self.train_function
            )
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """Builds what `evaluate` calls for each execution; kept, returned."""
        if self.test_function is None or force:
            super().make_test_function(force=True)  # Traces nothing.
            self.test_function = self.trainer.test_function(
                self._on_replicas("test_step"), self.test_function
            )
        return self.test_function

    def _is_split(self, name: str) -> bool:
        """Whether several replicas run a method that knows of one device."""
        several = self.distribute_strategy.num_replicas_in_sync > 1
        kind = type(self.stepping_model())
        return several and own_steps.is_for_one_device(kind, name)

    def _on_replicas(self, name: str) -> own_steps.Step:
        step = getattr(self, name)
        return (
            own_steps.on_replicas(step, self) if self._is_split(name) else step
        )

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
        with batch.scope(), self.trainer.tape() as tape:
            y_pred = self(x, training=True)
            loss = self._share_of_loss(
                batch, x, y, y_pred, sample_weight, training=True
            )
            scaled = self.optimizer.scale_loss(loss)
        self.trainer.apply(tape, scaled, batch)
        batch.record(self.metrics, {"loss": loss})
        metrics = self.compute_metrics(x, y, y_pred, sample_weight)
        return {**metrics, steps.EXAMPLES: batch.total}

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
            loss = self._share_of_loss(
                batch, x, y, y_pred, sample_weight, training=False
            )
        batch.record(self.metrics, {"loss": loss})
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def _share_of_loss(
        self, batch: global_batch.GlobalBatch, *args: Any, training: bool
    ) -> tf.Tensor:
        """This replica's share of what `compute_loss` gives of the batch."""
        if not self._is_split("compute_loss"):
            return own_steps.loss_of(self, *args, training=training)
        with batch.alone():
            loss = own_steps.loss_of(self, *args, training=training)
        return loss * tf.cast(batch.share, loss.dtype)

    def predict_step(self, data: Any) -> Any:
        """Predicts for one replica's part of the global batch.

        On several workers it answers in a dtype that collectives can gather,
        which `predict` turns back.
        """
        return self.trainer.sendable(super().predict_step(data))
