"""A Keras model around another one, as which it is called, saved and copied."""

import os
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import keras

from tfdistill.cluster import identity
from tfdistill.cluster import outputs
from tfdistill.cluster import strategy as strategy_lib
from tfdistill.exports import saved_model
from tfdistill.system import keras_internals
from tfdistill.training import own_steps
from tfdistill.training import steps
from tfdistill.training import uncertainty

keras_internals.check_keras()
keras_internals.prepare()


def _of_the_model_inside(name: str) -> Any:
    return property(lambda self: getattr(self.model, name))


class ModelAround(steps.Trained, keras_internals.SavedAsInner, keras.Model):
    """A model that trains the `model` inside it, whose files are its own.

    Subclasses have `compile`, and what `_NEVER_RUN` names of the model inside.
    """

    model: keras.Model
    optimizer: Any = None  # Keras has no such attribute before `compile`.
    # Methods of the model inside that would not be called.
    _NEVER_RUN: tuple[str, ...] = ()
    _compiled_with: Callable[[], Mapping[str, Any]]

    def _wrap(
        self,
        model: keras.Model,
        *,
        name: str | None,
        argument: str,
        prefix: str,
        may_compile: bool,
    ) -> None:
        """Wraps a model, which was given as `argument`.

        It is named after it, with a `prefix`. It `may_compile` a model that
        has its own losses or steps.
        """
        _check_inside(model, argument, self._NEVER_RUN)
        super().__init__(name=name or f"{prefix}_{model.name}")
        self.model = model
        self.built = model.built
        self._own = own_steps.Own(model, may_compile=may_compile)
        # By name in the logs. An attribute, by which Keras finds their
        # variables.
        self._learned: uncertainty.LearnedWeights = {}

    def call(self, inputs: object, training: bool | None = None) -> Any:
        """Runs the model inside."""
        return self._own.call(inputs, training)

    def save(self, filepath: str | os.PathLike[str], **kwargs: object) -> None:
        """Saves the model inside as `.keras`; see `keras.Model.save`."""
        self.model.save(self._files.written(filepath), **kwargs)

    def save_weights(
        self, filepath: str | os.PathLike[str], **kwargs: object
    ) -> None:
        """Saves the weights inside; see `keras.Model.save_weights`."""
        self.model.save_weights(self._files.written(filepath), **kwargs)

    def load_weights(
        self, filepath: str | os.PathLike[str], **kwargs: object
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
        cls,
        config: dict[str, Any],
        custom_objects: Mapping[str, Any] | None = None,
    ) -> Any:
        """Makes the model from `get_config`."""
        model = keras.saving.deserialize_keras_object(
            config["model"], custom_objects=custom_objects
        )
        wrap: Any = cls
        return wrap(model, name=config["name"])

    @property
    def _cluster(self) -> identity.Cluster:
        return strategy_lib.cluster_of(self.distribute_strategy)


def _check_inside(
    model: object, inside: str, never_run: tuple[str, ...]
) -> None:
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"`{inside}` must be a keras.Model; received "
            f"{type(model).__name__}. Pass the model itself, not a "
            "function that builds it."
        )
    if isinstance(model, ModelAround):
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
