"""What Keras' steps do on one replica, with its part of the global batch."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.model import around
from tfdistill.parameter_server import trainer as server_trainer
from tfdistill.system import keras_internals
from tfdistill.teachers import output_kinds
from tfdistill.training import global_batch
from tfdistill.training import own_steps
from tfdistill.training import steps
from tfdistill.training import trainer as replica_trainer
from tfdistill.training import uncertainty

Logs = steps.Logs


class ReplicaSteps(around.ModelAround):
    """A model whose losses are divided, and gradients summed, by its trainer.

    The model inside may have its own steps, loss or metrics.
    """

    train_function: Any
    test_function: Any
    _trainer: Any = None

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
    def calls_on_all_rows(self) -> bool:
        """Whether each replica calls the model inside on all rows."""
        return self._own.calls_on_all_rows

    @property
    def in_training(self) -> bool | None:
        """What a training step calls this model with, as `training`.

        None if the model inside does not take it: Keras says nothing to its
        layers then, and dropout and batch normalization infer.
        """
        return True if keras_internals.takes_training(self.model) else None

    def _maybe_symbolic_build(
        self, iterator: object = None, data_batch: object = None
    ) -> None:
        spec, epochs = data_batch, None
        if iterator is not None:
            epochs = keras_internals.EpochData(iterator)
            spec = epochs.element_spec
        self._own.spec = self.bare(spec)
        own_steps.mark_built(self.model)
        if self.model.built:
            self.built = True
        self.trainer.build(spec, epochs)

    def _symbolic_build(
        self, iterator: object = None, data_batch: object = None
    ) -> None:
        is_traced = False
        try:
            super()._symbolic_build(iterator, data_batch)
        except Exception:
            # Its step may call it with something else than the data.
            is_traced = self._takes(data_batch)
            if not is_traced:
                raise
            self.model.built = self.built = True
        is_own = self._own.is_compiled and own_steps.has_call(self.model)
        if not is_own or not keras_internals.has_losses_or_metrics(self.model):
            return
        # It may make of the data what its `call`, losses and metrics get.
        is_traced = is_traced or self._takes(data_batch)
        try:
            self.model._symbolic_build(data_batch=data_batch)
        except Exception:
            if not is_traced:
                raise

    def _takes(self, data_batch: object) -> bool:
        """Whether a `train_step` of the model's own takes them; traces it."""
        if "train_step" not in self._own:
            return False
        try:
            keras_internals.trace_own_step(self.model, data_batch)
        except Exception:
            return False  # The step itself will say why.
        return True

    def look(self, dataset: tf.data.Dataset) -> None:
        """Finds out what its call does with rows of data, before `predict`."""
        self._own.look_at_call(
            self, self.bare(dataset.element_spec), training=False
        )

    def make_train_function(self, force: bool = False) -> Any:
        """Builds what `fit` calls for each execution; kept and returned."""
        return self._make("train", super().make_train_function, force)

    def make_test_function(self, force: bool = False) -> Any:
        """Builds what `evaluate` calls for each execution; kept, returned."""
        return self._make("test", super().make_test_function, force)

    def _make(
        self, kind: str, keras_own: Callable[..., Any], force: bool
    ) -> Any:
        name = f"{kind}_function"
        if getattr(self, name) is None or force:
            keras_own(force=True)  # Traces nothing.
            step = self._own.step_of(self, f"{kind}_step")
            make = getattr(self.trainer, name)
            setattr(self, name, make(step, getattr(self, name)))
        return getattr(self, name)

    def train_step(self, data: object) -> Logs:
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
        logs = uncertainty.logs(self._learned)
        self.trainer.apply(tape, scaled, batch)
        batch.record(self._recorded, {"loss": loss})
        metrics = self.compute_metrics(x, y, y_pred, sample_weight)
        return {**metrics, **logs, steps.EXAMPLES: batch.total}

    def test_step(self, data: object) -> Logs:
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

    def predict_step(self, data: object) -> Any:
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
        x: object = None,
        y: object = None,
        y_pred: object = None,
        sample_weight: object = None,
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
        output_kinds.check_student(self.loss, y_pred)
        return super().compute_loss(*given, training=training)

    def _aggregate_additional_loss(self, loss: tf.Tensor) -> Any:
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

    def compute_metrics(self, *args: object, **kwargs: object) -> Logs:
        """Updates the metrics; see `keras.Model.compute_metrics`."""
        owner: Any = self.model if self._own.is_compiled else super()
        with global_batch.metrics_of_all_rows():
            return owner.compute_metrics(*args, **kwargs)
