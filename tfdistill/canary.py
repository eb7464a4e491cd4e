"""A batch that every teacher must answer sensibly before it is obeyed."""

import logging
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)
# Of a mean in float32: the uniform distribution itself is allowed.
_ROUNDING = 1e-5


class Canary:
    """A small batch of real inputs, and perhaps their labels.

    Each version of a peer, and each fixed SavedModel, predicts it before it is
    put in place. One whose outputs are not finite or have another shape is
    refused; with labels, so is one that does worse than knowing nothing. The
    batch is held out by the user: an untrained student fails it by its labels,
    so leave them out, or widen `margin`, where peers publish from the start.
    """

    def __init__(
        self,
        inputs: Any,
        *,
        labels: Any = None,
        from_logits: bool = True,
        margin: float = 0.5,
    ) -> None:
        """Checks the labels.

        Args:
            inputs: As the student is called with, `[batch, ...]`.
            labels: Class indices `[batch, ...]`, or 0 and 1 for a student of
                one output. The student must then have one output tensor,
                `[batch, ..., classes]`. Default: outputs are only looked at.
            from_logits: Whether the outputs are logits, not probabilities.
            margin: The mean cross-entropy, in nats, may exceed that of the
                uniform distribution by this much. Default 0.5.

        Raises:
            ValueError: An argument is not as above.
        """
        if not 0 <= margin < math.inf:
            raise ValueError(
                f"`margin` must be finite and >= 0; received {margin}."
            )
        self.inputs = keras.tree.map_structure(tf.convert_to_tensor, inputs)
        sizes = {int(t.shape[0]) for t in keras.tree.flatten(self.inputs)}
        self._labels = None if labels is None else np.asarray(labels)
        if self._labels is not None:
            sizes.add(len(self._labels))
            if self._labels.dtype.kind not in "iub":
                raise ValueError(
                    "`labels` must be whole numbers, class indices; received "
                    f"{self._labels.dtype}."
                )
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(
                "`inputs` and `labels` must have one and the same number of "
                f"examples, >= 1; received {sorted(sizes)}."
            )
        self._batch_size = sizes.pop()
        self._from_logits = from_logits
        self._margin = margin

    def check(
        self, predict: Callable[[Any], list[Any]], output_spec: Any
    ) -> None:
        """Asks a teacher.

        Args:
            predict: From inputs to the flat list of outputs.
            output_spec: Structure of `tf.TensorSpec` of the student's outputs.

        Raises:
            ValueError: Its answer is not sensible; the message says why.
        """
        wanted = keras.tree.flatten(output_spec)
        outputs = [tf.convert_to_tensor(t) for t in predict(self.inputs)]
        if len(outputs) != len(wanted):
            raise ValueError(
                f"its outputs on the canary batch must be {len(wanted)}; "
                f"received {len(outputs)}."
            )
        for output, spec in zip(outputs, wanted, strict=True):
            shape = tf.TensorShape([self._batch_size, *spec.shape[1:]])
            if not shape.is_compatible_with(output.shape):
                raise ValueError(
                    f"its outputs on the canary batch must have the shape "
                    f"{shape}; received {output.shape}."
                )
            finite = tf.math.is_finite(tf.cast(output, tf.float32))
            if not bool(tf.reduce_all(finite)):
                raise ValueError(
                    "its outputs on the canary batch must be finite; received "
                    "NaN or infinite ones."
                )
        if self._labels is not None:
            self._check_against_uniform(outputs)

    def _check_against_uniform(self, outputs: list[tf.Tensor]) -> None:
        if len(outputs) != 1:
            raise ValueError(
                "a canary batch with labels is for students of one output; "
                f"received {len(outputs)}. Leave the labels out."
            )
        logits = self._logits(tf.cast(outputs[0], tf.float32))
        num_classes = int(logits.shape[-1])
        logits = tf.reshape(logits, [-1, num_classes])
        labels = np.asarray(self._labels).reshape(-1)
        if (
            len(labels) != len(logits)
            or not ((labels >= 0) & (labels < num_classes)).all()
        ):
            raise ValueError(
                f"the canary batch's labels must be {len(logits)} numbers in 0 "
                f"to {num_classes - 1}; received {len(labels)}, up to "
                f"{labels.max()}."
            )
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        loss = float(tf.reduce_mean(losses))
        most = math.log(num_classes) + self._margin
        if not loss <= most + _ROUNDING:
            _log.info("The cross-entropy on the canary batch is %.4f.", loss)
            # One digit: a reason is told once, and each version of a peer
            # that has diverged would have another number.
            raise ValueError(
                "its cross-entropy on the canary batch must be at most "
                f"{most:.3f}, that of the uniform distribution and a margin; "
                f"received about {loss:.1g}."
            )

    def _logits(self, outputs: tf.Tensor) -> tf.Tensor:
        """Gives outputs a logit for each class; one output is that of 1."""
        if self._from_logits:
            logits, other = outputs, tf.zeros_like(outputs)
        else:
            logits = tf.math.log(tf.clip_by_value(outputs, 1e-12, 1.0))
            other = tf.math.log(tf.clip_by_value(1 - outputs, 1e-12, 1.0))
        if outputs.shape[-1] == 1:
            logits = tf.concat([other, logits], axis=-1)
        return logits
