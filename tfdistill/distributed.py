"""DistributedModel: a finished Keras 3 model under every strategy."""

from typing import Any

import keras

from tfdistill import multi_worker
from tfdistill.cluster import replicas
from tfdistill.embedding import layer as embedding_layer
from tfdistill.training import fit_arguments
from tfdistill.training import own_steps
from tfdistill.training import steps
from tfdistill.training import trainer
from tfdistill.training import wrapper

# What a model may bring of its own; then its own `compile` and metrics count.
_OWN = (
    "compile",
    "compute_loss",
    "compute_metrics",
    "metrics",
    "predict_step",
    "test_step",
    "train_step",
)
_LOOPS = (
    "evaluate",
    "fit",
    "make_predict_function",
    "make_test_function",
    "make_train_function",
    "predict",
)


@keras.saving.register_keras_serializable(package="tfdistill")
class DistributedModel(
    wrapper.Wrapper, multi_worker.MultiWorkerTraining, keras.Model
):
    """Trains a finished model on several workers or parameter servers.

    `compile`, `fit`, `evaluate` and `predict` take what those of the model
    take, under every strategy. `save`, `save_weights`, `load_weights` and
    `export` are those of the model, whose files plain Keras loads.

    A model may have a `compute_loss`, `test_step`, `compute_metrics` or
    `compile` of its own, and outside of parameter servers a `train_step`. On
    several replicas each runs on its own rows, and results count by rows: they
    equal those of one process if each loss is a mean over the rows of a batch.

    Attributes:
        model: The model that was given.

    Example:
        >>> model = DistributedModel(
        ...     keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        ... )
        >>> model.compile("sgd", "mse")
    """

    def __init__(self, model: keras.Model, *, name: str | None = None) -> None:
        """Wraps a model. Make both inside the strategy's scope.

        Args:
            model: Any Keras 3 model: functional, `Sequential`, subclassed.
            name: Name of the wrapping model.

        Raises:
            ValueError: `model` is not a `keras.Model`, trains on several
                workers already, or has a `fit` of its own.
        """
        _check(model)
        super().__init__(name=name or f"distributed_{model.name}")
        self.model = model
        self.built = model.built

    def wrapped_model(self) -> keras.Model:
        """Returns the model that was given."""
        return self.model

    stepping_model = wrapped_model

    @property
    def _has_own(self) -> bool:
        model = getattr(self, "model", None)
        return model is not None and any(
            own_steps.is_own(type(model), name) for name in _OWN
        )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Configures training; takes what the model's own `compile` takes.

        Args:
            *args: As for the model's `compile`.
            **kwargs: As for the model's `compile`.

        Raises:
            ValueError: The model's own `train_step` cannot run under the
                strategy.
        """
        if self._has_own:
            self.model.compile(*args, **kwargs)
            super().compile(
                self.model.optimizer,
                run_eagerly=self.model.run_eagerly,
                steps_per_execution=self.model.steps_per_execution,
                jit_compile=kwargs.get("jit_compile", "auto"),
            )
            return
        super().compile(*args, **kwargs)
        is_elsewhere = replicas.on_servers(
            self.distribute_strategy
        ) or embedding_layer.layers_of(self.model)
        if not is_elsewhere:
            # So that files of the model say how it was compiled.
            arguments = fit_arguments.bind(self.model.compile, args, kwargs)
            self.model.compile(**{**arguments, "optimizer": self.optimizer})

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains the model; see `MultiWorkerTraining.fit`."""
        history = super().fit(*args, **kwargs)
        self._average_statistics()
        return history

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the model; see `MultiWorkerTraining.evaluate`."""
        self._average_statistics()
        return super().evaluate(*args, **kwargs)

    def _average_statistics(self) -> None:
        if self.model.built:
            trainer.BatchStatistics(
                self.model, self.distribute_strategy
            ).average()

    def _symbolic_build(
        self, iterator: Any = None, data_batch: Any = None
    ) -> None:
        super()._symbolic_build(iterator, data_batch)
        if self._has_own:
            # Its own metrics and losses.
            self.model._symbolic_build(data_batch=data_batch)

    # ---- what the model brings of its own ----

    @property
    def metrics(self) -> list[keras.Metric]:
        """The metrics that a step updates."""
        return self.model.metrics if self._has_own else super().metrics

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns the loss; see `keras.Model.compute_loss`."""
        given = (x, y, y_pred, sample_weight)
        if self._has_own:
            return own_steps.loss_of(self.model, *given, training=training)
        return super().compute_loss(*given, training=training)

    def compute_metrics(self, *args: Any, **kwargs: Any) -> steps.Logs:
        """Updates the metrics; see `keras.Model.compute_metrics`."""
        if self._has_own:
            return self.model.compute_metrics(*args, **kwargs)
        return super().compute_metrics(*args, **kwargs)

    def train_step(self, data: Any) -> steps.Logs:
        """Runs one update on one replica's part of the global batch."""
        self._check_weights(data)
        return self._step_of("train_step")(data)

    def test_step(self, data: Any) -> steps.Logs:
        """Evaluates one replica's part of the global batch."""
        self._check_weights(data)
        return self._step_of("test_step")(data)

    def predict_step(self, data: Any) -> Any:
        """Predicts for one replica's part of the global batch."""
        if not own_steps.is_own(type(self.model), "predict_step"):
            return super().predict_step(data)
        return self.trainer.sendable(self.model.predict_step(data))

    def _is_split(self, name: str) -> bool:
        # Its own `compile` took the losses, which therefore know of no share.
        is_loss = name == "compute_loss" and self._has_own
        several = self.distribute_strategy.num_replicas_in_sync > 1
        return several if is_loss else super()._is_split(name)

    def _step_of(self, name: str) -> own_steps.Step:
        is_own = own_steps.is_own(type(self.model), name)
        return getattr(self.model if is_own else super(), name)

    def _check_weights(self, data: Any) -> None:
        weights = keras.utils.unpack_x_y_sample_weight(data)[2]
        if weights is not None and self._is_split("compute_loss"):
            if self._has_own:
                raise ValueError(
                    "Examples must have no weights if several replicas run a "
                    "model's own steps or loss, which count by rows; received "
                    f"`sample_weight` or `class_weight` for {self.model.name}. "
                    "Derive the model from tfdistill.MultiWorkerTraining, "
                    "whose compiled losses take weights."
                )

    # ---- copies ----

    def get_compile_config(self) -> None:
        """Returns nothing: the model says how it was compiled."""
        return None

    def get_config(self) -> dict[str, Any]:
        """Returns the model, serialized, and the name."""
        return {
            "model": keras.saving.serialize_keras_object(self.model),
            "name": self.name,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> "DistributedModel":
        """Makes the model from `get_config`."""
        model = keras.saving.deserialize_keras_object(
            config["model"], custom_objects=custom_objects
        )
        return cls(model, name=config["name"])


def _check(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"`model` must be a keras.Model; received {type(model).__name__}. "
            "Pass the model itself, not a function that builds it."
        )
    if isinstance(model, multi_worker.MultiWorkerTraining):
        raise ValueError(
            "`model` must be one that does not train on several workers by "
            f"itself; received {type(model).__name__}. Call `fit` on it as it "
            "is."
        )
    own = [name for name in _LOOPS if own_steps.is_own(type(model), name)]
    if own:
        raise ValueError(
            "`model` must leave its loops over the data to Keras; received "
            f"{type(model).__name__} with its own {', '.join(own)}, which "
            "would never be run. Override `train_step` or `compute_loss` "
            "instead."
        )
