"""A Keras `fit` that can go on in the middle of an epoch."""

import types
import typing
from typing import Any

import keras

from tfdistill import backup
from tfdistill import fit_arguments
from tfdistill import keras_internals
from tfdistill import training_state

# See `tfdistill.multiworker`: a mixin must not be a `keras.Model`.
_Base: Any = keras.Model if typing.TYPE_CHECKING else object


class ResumableTraining(_Base):
    """Lets `tfdistill.Backup` say where `fit` begins, and where it stands.

    Comes before `MultiWorkerTraining` among the bases of a class.
    """

    # The step at which the last `fit` went on; None if it began anew.
    resumed_step: int | None = None
    _data_of_fit: keras_internals.EpochData | None = None
    # What `fit` waits to be told of, and where it is to go on.
    _starts_at: tuple[training_state.TrainingPoint | None] | None = None

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains the model, from where a backup among the callbacks stands.

        Args:
            *args: As for `keras.Model.fit`.
            **kwargs: As for `keras.Model.fit`.

        Raises:
            ValueError: There are several backups, or a model of another
                kind is to be resumed.
        """
        arguments = fit_arguments.bind(
            types.MethodType(keras.Model.fit, self), args, kwargs
        )
        self.resumed_step = None
        given = arguments.get("callbacks")
        if isinstance(given, keras.callbacks.CallbackList):
            return super().fit(**arguments)
        others = keras.tree.flatten(given or [])
        backups = [c for c in others if isinstance(c, backup.Backup)]
        if not backups:
            return super().fit(**arguments)
        if len(backups) > 1:
            raise ValueError(
                "`callbacks` must hold one tfdistill.Backup; received "
                f"{len(backups)}. A larger `max_to_keep` keeps more backups."
            )
        (one,) = backups
        others.remove(one)
        try:
            point = one.begin(self, others)
            if point is not None:
                arguments["initial_epoch"] = point.epoch
                self.resumed_step = point.step
            arguments["callbacks"] = [one.first_callback(), *others, one]
            self._starts_at = (point,)
            return super().fit(**arguments)
        finally:
            self._starts_at = self._data_of_fit = None
            one.end()

    def data_position(self) -> dict[str, Any]:
        """Returns how far the `fit` in progress has read its data."""
        if self._data_of_fit is None:
            raise RuntimeError("No `fit` with a tfdistill.Backup is running.")
        return self._data_of_fit.position()

    def _maybe_symbolic_build(
        self, iterator: Any = None, data_batch: Any = None
    ) -> None:
        super()._maybe_symbolic_build(iterator, data_batch)
        # The first iterator is that of the training data.
        if iterator is None or self._starts_at is None or self._data_of_fit:
            return
        self._data_of_fit = keras_internals.EpochData(iterator)
        (point,) = self._starts_at
        if point is not None:
            self._data_of_fit.go_to(dict(point.data), batch=point.batch)
