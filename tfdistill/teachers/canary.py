"""A small batch that each version must answer before it teaches."""

import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

_log = logging.getLogger(__name__)
_NUM_EXAMPLES = 256


class Canary:
    """The first examples of held-out data: inputs, and perhaps targets."""

    def __init__(
        self, examples: object, *, num_examples: int = _NUM_EXAMPLES
    ) -> None:
        """Takes a dataset of batches, as `fit` takes it, or arrays `(x, y)`."""
        if isinstance(examples, tf.data.Dataset):
            rows = examples.unbatch().batch(num_examples)
            batch = next(iter(rows), ())
            batch = batch if isinstance(batch, tuple) else (batch,)
        elif isinstance(examples, tuple):
            batch = keras.tree.map_structure(
                lambda values: tf.convert_to_tensor(values[:num_examples]),
                tuple(part for part in examples if part is not None),
            )
        else:
            raise ValueError(
                "`canary` must be a tf.data.Dataset, arrays `(x, y)` or None; "
                f"received {type(examples).__name__}."
            )
        self.num_examples = len(keras.tree.flatten(batch[0])[0]) if batch else 0
        if not self.num_examples:
            raise ValueError(
                "A canary needs at least one example; received an empty one."
            )
        self.inputs = batch[0]
        self.targets = batch[1] if len(batch) > 1 else None

    def check(
        self, predict: Callable[[Any], list[Any]], output_spec: object
    ) -> list[tf.Tensor]:
        """Runs a model on the canary, checks and returns its outputs.

        `predict` is from inputs to the flat list of outputs. ValueError if
        these are not finite, or of another shape than the student's.
        """
        wanted = [
            tf.TensorShape([self.num_examples, *spec.shape[1:]])
            for spec in keras.tree.flatten(output_spec)
        ]
        outputs = [tf.convert_to_tensor(t) for t in predict(self.inputs)]
        shapes = [output.shape for output in outputs]
        if len(shapes) != len(wanted) or not all(
            map(tf.TensorShape.is_compatible_with, wanted, shapes)
        ):
            raise ValueError(
                "its outputs on the canary batch must have the shape "
                f"{', '.join(map(str, wanted))}; received "
                f"{', '.join(map(str, shapes))}."
            )
        for output in outputs:
            finite = tf.math.is_finite(tf.cast(output, tf.float32))
            if not bool(tf.reduce_all(finite)):
                raise ValueError(
                    "its outputs on the canary batch must be finite; received "
                    "NaN or infinite values."
                )
        return outputs


def of_validation(data: object) -> Canary | None:
    """Returns the canary in `validation_data` of `fit`, if it can be read.

    It cannot if each worker has its own data, or a function makes them.
    """
    if not isinstance(data, tf.data.Dataset | tuple | list):
        return None
    try:
        return Canary(data if isinstance(data, tf.data.Dataset) else (*data,))
    except Exception as error:  # `fit` reads them too, and reports it.
        _log.info("The validation data can't be used as a canary: %s", error)
        return None


def blank(input_spec: object) -> Any:
    """Returns one row of zeros; None if a size is unknown."""
    specs = keras.tree.flatten(input_spec)
    if not all(spec.shape[1:].is_fully_defined() for spec in specs):
        return None
    return keras.tree.map_structure(
        lambda spec: tf.zeros([1, *spec.shape[1:]], spec.dtype), input_spec
    )
