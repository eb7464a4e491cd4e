"""The click model's step written by hand: the bound for what Keras adds."""

from typing import Any

import tensorflow as tf

from benchmarks import click_training


class BareStep:
    """Forward pass, gradients and Adagrad in one process, and no more.

    Each distinct id is gathered once, and its gradients are summed before
    one fused operation updates the table: as in `tfdistill`, without its
    layers, metrics, callbacks and parameter servers.
    """

    def __init__(self, setting: click_training.Setting) -> None:
        """Makes the variables.

        Args:
            setting: The sizes.
        """
        self._setting = setting
        self._offsets = tf.constant(click_training.field_offsets(setting))
        shape = [setting.num_rows, setting.dim]
        self._table = tf.Variable(tf.random.uniform(shape, -0.05, 0.05))
        numbers = click_training.NUM_NUMBERS
        fields = click_training.NUM_FIELDS
        widths = [fields * setting.dim + numbers, *setting.hidden, 1]
        self._dense = []
        for before, after in zip(widths, widths[1:], strict=False):
            weights = tf.random.normal([before, after], stddev=before**-0.5)
            self._dense += [tf.Variable(weights), tf.Variable(tf.zeros(after))]
        self._slots = [
            tf.Variable(tf.fill(variable.shape, 0.1))
            for variable in [self._table, *self._dense]
        ]

    def run(self, features: dict[str, tf.Tensor], clicks: tf.Tensor) -> Any:
        """Runs one step and returns the loss."""
        ids = tf.reshape(features["ids"] + self._offsets, [-1])
        distinct, positions = tf.unique(ids)
        rows = tf.raw_ops.ResourceGather(
            resource=self._table.handle, indices=distinct, dtype=tf.float32
        )
        with tf.GradientTape() as tape:
            tape.watch(rows)
            vectors = _expand(rows, positions)
            loss = self._loss(features["x"], vectors, clicks)
        gradients = tape.gradient(loss, [rows, *self._dense])
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=self._table.handle,
            accum=self._slots[0].handle,
            lr=click_training.LEARNING_RATE,
            epsilon=0.0,
            grad=gradients[0],
            indices=distinct,
        )
        for variable, slot, gradient in zip(
            self._dense, self._slots[1:], gradients[1:], strict=True
        ):
            tf.raw_ops.ResourceApplyAdagradV2(
                var=variable.handle,
                accum=slot.handle,
                lr=click_training.LEARNING_RATE,
                epsilon=0.0,
                grad=gradient,
            )
        return loss

    def _loss(self, x: Any, vectors: Any, clicks: Any) -> tf.Tensor:
        width = click_training.NUM_FIELDS * self._setting.dim
        hidden = tf.concat([x, tf.reshape(vectors, [-1, width])], axis=1)
        layers = list(zip(self._dense[::2], self._dense[1::2], strict=True))
        for index, (weights, biases) in enumerate(layers):
            hidden = tf.matmul(hidden, weights) + biases
            if index + 1 < len(layers):
                hidden = tf.nn.relu(hidden)
        return tf.reduce_mean(
            tf.nn.sigmoid_cross_entropy_with_logits(
                labels=clicks, logits=hidden
            )
        )


def _expand(rows: tf.Tensor, positions: tf.Tensor) -> Any:
    @tf.custom_gradient
    def expand(rows: tf.Tensor) -> tuple[tf.Tensor, Any]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return tf.math.unsorted_segment_sum(
                upstream, positions, tf.shape(rows)[0]
            )

        return tf.gather(rows, positions), gradient

    return expand(rows)
