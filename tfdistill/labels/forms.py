"""How a teacher's output is kept and sent: whole, its top classes, a sample.

What comes back from `decode` has the shape and the meaning of the output
itself, so that every distillation loss takes it. Of the classes left out it
knows only what they have in common: see `Form`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill import losses

_DTYPES = ("float32", "float16")
# Rounded to half precision, probabilities add up to 1 no better than this.
_TOLERANCE = 1e-2
# What is kept says in its name of how many classes it is: a name travels
# everywhere, and costs no bytes.
_CLASSES, _DRAWN = "classes_of_", "drawn_of_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """What of an output `[batch, ..., classes]` is kept.

    Attributes:
        top_k: Keep the likeliest classes, so many of them, with their
            probabilities. The rest comes back as equally likely, and with the
            probability that was left. None: all.
        num_samples: Keep classes drawn from the teacher's distribution, with
            replacement. What comes back counts them, so that its mean over
            draws is the distribution (arXiv:2503.16870). None: all.
        dtype: "float32", or "float16" for half of the bytes. Outputs that are
            kept whole in float32 come back to the bit.
        from_logits: Whether outputs are logits, not probabilities. Logits of
            classes come back as log-probabilities, unless they are kept whole.
    """

    top_k: int | None = None
    num_samples: int | None = None
    dtype: str = "float32"
    from_logits: bool = True

    def __post_init__(self) -> None:
        """Checks that at most one choice is made."""
        for name in ("top_k", "num_samples"):
            count = getattr(self, name)
            is_index = isinstance(count, int) and not isinstance(count, bool)
            if count is not None and not (is_index and count >= 1):
                raise ValueError(
                    f"`{name}` must be a whole number >= 1, or None; received "
                    f"{count!r}."
                )
        if self.top_k and self.num_samples:
            raise ValueError(
                "Labels must be the top classes or a sample; received "
                f"top_k={self.top_k} and num_samples={self.num_samples}. "
                "Leave one of them out."
            )
        if self.dtype not in _DTYPES:
            raise ValueError(
                f"`dtype` must be one of {_DTYPES}; received {self.dtype!r}."
            )

    @property
    def is_whole(self) -> bool:
        """Whether all of an output is kept."""
        return self.top_k is None and self.num_samples is None

    def encode(
        self, output: tf.Tensor, *, seed: Any = None, first_row: Any = 0
    ) -> dict[str, tf.Tensor]:
        """Returns what is kept of an output.

        Args:
            output: Float `[batch, ..., classes]`; with `is_whole` any shape.
            seed: int32 `[2]`. With the number of a row, it decides which
                classes are drawn. Needed with `num_samples`.
            first_row: The number of the first row. Default 0.

        Returns:
            `{"whole"}` in the output's shape; of 10 classes, `{"classes_of_10",
            "log_probability"}` `[batch, ..., top_k]`, or `{"drawn_of_10"}`
            `[batch, ..., num_samples]`.

        Raises:
            ValueError: The output has fewer than two classes.
        """
        output = tf.cast(output, tf.float32)
        dtype = tf.as_dtype(self.dtype)
        if self.is_whole:
            return {"whole": tf.cast(output, dtype)}
        num_classes = _num_classes(output)
        log_p = self._log_probabilities(output)
        if self.num_samples:
            drawn = _drawn(log_p, self.num_samples, seed, first_row)
            return {f"{_DRAWN}{num_classes}": drawn}
        top, classes = tf.math.top_k(log_p, min(self.top_k or 0, num_classes))
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
        if "whole" in kept:
            return tf.cast(kept["whole"], tf.float32)
        if (drawn := kept.get(f"{_DRAWN}{num_classes}")) is not None:
            share = tf.fill(tf.shape(drawn), 1.0 / int(drawn.shape[-1]))
            p = _dense(drawn, share, num_classes)
        elif (classes := kept.get(f"{_CLASSES}{num_classes}")) is not None:
            top = tf.exp(tf.cast(kept["log_probability"], tf.float32))
            p = _filled(classes, top, num_classes)
        else:
            raise ValueError(
                f"The labels must be of the student's {num_classes} classes; "
                f"received {' and '.join(kept)}. Ask a teacher of the same "
                "classes."
            )
        # Of classes that were not drawn: finite, and 0 after a softmax.
        return (
            tf.math.log(tf.maximum(p, losses.TINY)) if self.from_logits else p
        )

    def check(self, output: np.ndarray) -> None:
        """Checks that an output is what `from_logits` says, if that matters.

        Raises:
            ValueError: Classes would be taken from logits that are
                probabilities, or the other way round.
        """
        if self.is_whole or output.ndim < 2 or not output.size:
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

    def _log_probabilities(self, output: tf.Tensor) -> tf.Tensor:
        if self.from_logits:
            return tf.nn.log_softmax(output)
        return tf.math.log(tf.maximum(output, losses.TINY))


def _num_classes(output: tf.Tensor) -> int:
    if output.shape.rank < 2 or output.shape[-1] in (None, 1):
        raise ValueError(
            "Top classes and samples need outputs [batch, ..., classes] with "
            f"two classes or more; received shape {output.shape}. Keep them "
            "whole: leave `top_k` and `num_samples` out."
        )
    return int(output.shape[-1])


def _drawn(
    log_p: tf.Tensor, num_samples: int, seed: Any, first_row: Any
) -> tf.Tensor:
    """Draws classes with replacement: int32 `[batch, ..., num_samples]`."""
    # Not stateless_categorical: on a CPU, rows share draws, and which ones
    # depends on the number of threads.
    shape = tf.concat([tf.shape(log_p)[:-1], [num_samples]], 0)
    num_draws = tf.reduce_prod(shape[1:])
    # Philox makes two numbers of each count: a row begins with a new one.
    num_counts = (num_draws + 1) // 2
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    skipped = tf.cast(first_row, tf.int64) * tf.cast(num_counts, tf.int64)
    uniform = tf.raw_ops.StatelessRandomUniformV2(
        shape=[shape[0], 2 * num_counts],
        key=key,
        counter=counter + tf.cast([skipped, 0], tf.uint64),
        alg=tf.random.Algorithm.PHILOX.value,
        dtype=tf.float64,
    )[:, :num_draws]
    below = tf.cumsum(tf.exp(tf.cast(log_p, tf.float64)), axis=-1)
    drawn = tf.searchsorted(
        below, tf.reshape(uniform, shape) * below[..., -1:], side="right"
    )
    drawn = tf.minimum(drawn, tf.shape(log_p)[-1] - 1)
    return tf.ensure_shape(drawn, [*log_p.shape[:-1], num_samples])


def _filled(classes: tf.Tensor, top: tf.Tensor, num_classes: int) -> tf.Tensor:
    """Spreads what the top classes leave evenly over the others."""
    num_left = num_classes - int(classes.shape[-1])
    left = 1.0 - tf.reduce_sum(top, axis=-1, keepdims=True)
    each = tf.maximum(left / max(num_left, 1), 0.0)
    is_top = _dense(classes, tf.ones_like(top), num_classes) > 0
    return tf.where(is_top, _dense(classes, top, num_classes), each)


def _dense(
    classes: tf.Tensor, values: tf.Tensor, num_classes: int
) -> tf.Tensor:
    """Adds up values at their classes: `[..., count]` to `[..., classes]`."""
    num_rows = tf.reduce_prod(tf.shape(classes)[:-1])
    rows = tf.repeat(tf.range(num_rows), int(classes.shape[-1]))
    places = tf.stack([rows, tf.reshape(classes, [-1])], axis=-1)
    found = tf.scatter_nd(
        places, tf.reshape(values, [-1]), tf.stack([num_rows, num_classes])
    )
    shape = tf.concat([tf.shape(classes)[:-1], [num_classes]], 0)
    found = tf.reshape(found, shape)
    found.set_shape([*classes.shape[:-1], num_classes])
    return found
