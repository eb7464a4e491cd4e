"""What is asked of a wrapping model, answered by the model inside it."""

import os
import typing
from typing import Any

import keras

from tfdistill.exports import saved_model

_Base: Any = keras.Model if typing.TYPE_CHECKING else object


class Wrapper(_Base):
    """Calls, files and shapes of a model are those of the model inside it."""

    def wrapped_model(self) -> keras.Model:
        """Returns the model inside, which `call`, files and shapes are of."""
        raise NotImplementedError

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Runs the model inside."""
        return self.wrapped_model()(inputs, training=training)

    # ---- files ----

    def save(self, filepath: str | os.PathLike[str], **kwargs: Any) -> None:
        """Saves the model inside as `.keras`; see `keras.Model.save`."""
        self.wrapped_model().save(filepath, **kwargs)

    def save_weights(
        self, filepath: str | os.PathLike[str], **kwargs: Any
    ) -> None:
        """Saves the weights inside; see `keras.Model.save_weights`."""
        self.wrapped_model().save_weights(filepath, **kwargs)

    def load_weights(
        self, filepath: str | os.PathLike[str], **kwargs: Any
    ) -> None:
        """Loads the weights inside; see `keras.Model.load_weights`."""
        self.wrapped_model().load_weights(filepath, **kwargs)

    def export(self, filepath: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Exports the model inside for inference; see `keras.Model.export`."""
        saved_model.export_for_inference(
            self.wrapped_model(), filepath, **kwargs
        )

    # ---- shapes and names ----

    @property
    def inputs(self) -> Any:
        """The symbolic inputs, if the model inside is a functional one."""
        return self.wrapped_model().inputs

    @property
    def outputs(self) -> Any:
        """The symbolic outputs, if the model inside is a functional one."""
        return self.wrapped_model().outputs

    @property
    def input_shape(self) -> Any:
        """The shape of the inputs, if the model inside is a functional one."""
        return self.wrapped_model().input_shape

    @property
    def output_shape(self) -> Any:
        """The shape of the outputs, if the model inside is a functional one."""
        return self.wrapped_model().output_shape

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs, if the outputs have names.

        `compile` looks for them, so that a dict of losses, metrics or targets
        finds the outputs of a functional model that returns a list.
        """
        return self.wrapped_model().output_names

    def get_layer(
        self, name: str | None = None, index: int | None = None
    ) -> keras.Layer:
        """Returns a layer of the model inside; see `keras.Model.get_layer`."""
        return self.wrapped_model().get_layer(name=name, index=index)
