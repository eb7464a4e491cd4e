"""What `fit` was asked for under parameter servers, checked."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras

from tfdistill import fit_arguments
from tfdistill import worker_data

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
