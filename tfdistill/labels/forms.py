"""How a teacher's output is kept and sent: whole, or its top classes.

What comes back from `decode` has the shape and the meaning of the output
itself, so that every distillation loss takes it. The classes left out come back
as equally likely: see `Form`.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfdistill import losses

_DTYPES = ("float32", "float16")
# Rounded to half precision, probabilities add up to 1 no better than this.
_TOLERANCE = 1e-2
# The name of a kept tensor has the number of classes: a name travels
# everywhere, and costs no bytes.
_CLASSES = "classes_of_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How an output `[batch, ..., classes]` is stored.

    Attributes:
        top_k: Keep the likeliest classes, so many of them, with their
            probabilities. The rest comes back as equally likely, and with the
            probability that was left. None: all.
        dtype: "float32", or "float16" for half of the bytes. Outputs that are
            kept whole in float32 come back to the bit.
        from_logits: Whether outputs are logits, not probabilities. Logits of
            classes come back as log-probabilities, unless they are kept whole.
    """

    top_k: int | None = None
    dtype: str = "float32"
    from_logits: bool = True

    def __post_init__(self) -> None:
        """Checks the choices."""
        count = self.top_k
        if count is not None and (type(count) is not int or count < 1):
            raise ValueError(
                f"`top_k` must be a whole number >= 1, or None; received "
                f"{count!r}."
            )
        if self.dtype not in _DTYPES:
            raise ValueError(
                f"`dtype` must be one of {_DTYPES}; received {self.dtype!r}."
            )

    def encode(self, output: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns what is kept of an output.

        Args:
            output: Float `[batch, ..., classes]`; without `top_k` any shape.

        Returns:
            `{"whole"}` in the output's shape; of 10 classes, `{"classes_of_10",
            "log_probability"}` `[batch, ..., top_k]`.

        Raises:
            ValueError: The output has fewer than two classes.
        """
        output = tf.cast(output, tf.float32)
        dtype = tf.as_dtype(self.dtype)
        if self.top_k is None:
            return {"whole": tf.cast(output, dtype)}
        num_classes = _num_classes(output)
        log_p = (
            tf.nn.log_softmax(output)
            if self.from_logits
            else tf.math.log(tf.maximum(output, losses.TINY))
        )
        top, classes = tf.math.top_k(log_p, min(self.top_k, num_classes))
        return {
            f"{_CLASSES}{num_classes}": classes,
            "log_probability": tf.cast(top, dtype),
        }

    def decode(
        self, kept: Mapping[str, tf.Tensor], *, num_classes: int
    ) -> tf.Tensor:
        """Returns an output made of what `encode` kept, float32.

        `num_classes` is the size of the output's last axis. ValueError for
        classes of an output with another one.
        """
        if not is_top(kept):
            (whole,) = kept.values()
            return tf.cast(whole, tf.float32)
        classes = kept.get(f"{_CLASSES}{num_classes}")
        if classes is None:
            raise ValueError(
                f"The labels must be for the student's {num_classes} classes; "
                f"received {' and '.join(kept)}. Use a teacher with the same "
                "classes."
            )
        top = tf.exp(tf.cast(kept["log_probability"], tf.float32))
        p = _filled(classes, top, num_classes)
        # For classes left without probability: finite, and 0 after a softmax.
        return (
            tf.math.log(tf.maximum(p, losses.TINY)) if self.from_logits else p
        )

    def check(self, output: np.ndarray) -> None:
        """Checks that an output is what `from_logits` says, if that matters.

        Raises:
            ValueError: Classes would be taken from logits that are
                probabilities, or the other way round.
        """
        if self.top_k is None or output.ndim < 2 or not output.size:
            return
        is_share = (output >= 0).all() and np.allclose(
            output.sum(axis=-1, dtype=np.float64), 1.0, atol=_TOLERANCE
        )
        if is_share == self.from_logits:
            raise ValueError(
                f"With from_logits={self.from_logits}, outputs must be "
                f"{'logits' if self.from_logits else 'probabilities'}; "
                f"received {'rows that add up to 1' if is_share else 'others'}."
                f" Pass from_logits={not self.from_logits}."
            )


def is_top(kept: Mapping[str, tf.Tensor]) -> bool:
    """Whether only the top classes of an output were kept."""
    return "log_probability" in kept


def _num_classes(output: tf.Tensor) -> int:
    if output.shape.rank < 2 or output.shape[-1] in (None, 1):
        raise ValueError(
            "Top classes need outputs [batch, ..., classes] with two classes "
            f"or more; received shape {output.shape}. Keep them whole: leave "
            "`top_k` out."
        )
    return int(output.shape[-1])


def _filled(classes: tf.Tensor, top: tf.Tensor, num_classes: int) -> tf.Tensor:
    """Spreads what the top classes leave evenly over the others."""
    k = int(classes.shape[-1])
    left = 1.0 - tf.reduce_sum(top, axis=-1, keepdims=True)
    each = tf.maximum(left / max(num_classes - k, 1), 0.0)
    shape = tf.concat([tf.shape(classes)[:-1], [num_classes]], 0)
    rest = tf.reshape(tf.broadcast_to(each, shape), [-1, num_classes])
    rows = tf.repeat(tf.range(tf.shape(rest)[0]), k)
    places = tf.stack([rows, tf.reshape(classes, [-1])], axis=-1)
    found = tf.tensor_scatter_nd_update(rest, places, tf.reshape(top, [-1]))
    found = tf.reshape(found, shape)
    found.set_shape([*classes.shape[:-1], num_classes])
    return found
