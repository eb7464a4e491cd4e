"""Many classes at the price of a few: an output layer that draws."""

import math
import threading
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="tfdistill")
class SampledOutput(keras.layers.Layer):
    """A dense output layer that computes only sampled classes in training.

    In inference it is `keras.layers.Dense`: `[..., features]` to logits
    `[..., num_classes]`. Exports, `evaluate`, `predict` and teachers see that.
    In training it returns its inputs, and `cross_entropy` computes the loss of
    labels that name a few classes each: no tensor `[batch, num_classes]` is
    made, forward or backward, and the kernel's gradient is `IndexedSlices`.

    So compile such a model without a loss, metrics or a distillation loss: they
    would treat its features as logits, and training with them is refused. The
    model overrides `compute_loss`, which `CodistillModel`, `DistributedModel`
    and plain Keras call:

    Example:
        >>> import numpy as np
        >>> class Student(keras.Model):
        ...     def compute_loss(
        ...         self,
        ...         x=None,
        ...         y=None,
        ...         y_pred=None,
        ...         sample_weight=None,
        ...         training=True,
        ...     ):
        ...         values = self.get_layer("classes").cross_entropy(
        ...             y_pred, y["ids"], y["probabilities"], training=training
        ...         )
        ...         return tf.reduce_mean(values)
        >>> inputs = keras.Input((4,))
        >>> hidden = keras.layers.Dense(8, activation="relu")(inputs)
        >>> logits = SampledOutput(1000, num_sampled=64, name="classes")(hidden)
        >>> student = Student(inputs, logits)
        >>> student.compile("sgd")
        >>> labels = {
        ...     "ids": np.array([[7, 2], [5, 9]]),
        ...     "probabilities": np.array([[0.9, 0.1], [0.6, 0.4]], "float32"),
        ... }
        >>> history = student.fit(np.ones([2, 4]), labels, verbose=0)
        >>> student.predict(np.ones([2, 4]), verbose=0).shape
        (2, 1000)

    What is exact: the logits of a row's own classes, so everything but the
    normalization over all classes. That is `log Z`, and Z is the sum of
    exp(logit) over the row's own classes, exactly, and over all others by those
    that were drawn, each divided by the probability of being drawn.

    What is unbiased: this estimate of Z, to float32 precision. What is not:
    its logarithm, which is too small on average, and hence the loss and its
    gradient. The bias falls with 1 / `num_sampled`, and is 0 once all classes
    are drawn. `evaluate` computes the exact loss.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        num_sampled: int = 1024,
        kernel_initializer: str | keras.Initializer = "glorot_uniform",
        seed: int | None = None,
        **kwargs: object,
    ) -> None:
        """Takes the sizes; variables are made at the first call.

        Args:
            num_classes: Number of classes, >= 1.
            num_sampled: Classes drawn for a batch, >= 1, all different. The
                whole batch shares them, and so do replicas. Default 1024.
            kernel_initializer: Initializer of the kernel, `[num_classes,
                features]`.
            seed: Seed of the draws. Default: drawn from Keras' own seed.
            **kwargs: As for `keras.layers.Layer`.

        Raises:
            ValueError: If an argument is outside the values above.
        """
        super().__init__(**kwargs)
        if min(num_classes, num_sampled) < 1:
            raise ValueError(
                "`num_classes` and `num_sampled` must be >= 1; received "
                f"{num_classes} and {num_sampled}."
            )
        self.num_classes = int(num_classes)
        self.num_sampled = int(num_sampled)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)
        self.supports_masking = True
        # Threads, as replicas have, in which features that `call` returned have
        # not come back to `cross_entropy` yet.
        self._handed_out: set[int] = set()

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Makes kernel and bias."""
        # A cast of the whole kernel would make its gradient dense.
        self.kernel = self.add_weight(
            name="kernel",
            shape=(self.num_classes, input_shape[-1]),
            initializer=self.kernel_initializer,
            autocast=False,
        )
        self.bias = self.add_weight(
            name="bias",
            shape=(self.num_classes,),
            initializer="zeros",
            autocast=False,
        )

    def call(self, inputs: object, training: bool | None = None) -> Any:
        """Returns logits; in training the inputs, for `cross_entropy`."""
        if training:
            self._handed_out.add(threading.get_ident())
            return self._guarded(tf.convert_to_tensor(inputs))
        kernel = tf.convert_to_tensor(self.kernel.value)
        inputs = tf.cast(inputs, kernel.dtype)
        logits = tf.einsum("...d,cd->...c", inputs, kernel)
        return logits + self.bias.value

    @tf.custom_gradient
    def _guarded(self, features: tf.Tensor) -> Any:
        """Returns features, whose gradient only `cross_entropy` may ask for."""

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            if threading.get_ident() in self._handed_out:
                raise ValueError(
                    f"The layer {self.name!r} returns features in training, "
                    "and a loss treated them as logits. Compile the model "
                    "without a loss, and give it a `compute_loss` that calls "
                    "SampledOutput.cross_entropy."
                )
            return upstream

        return tf.identity(features), gradient

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> Any:
        """Returns the shape of the logits."""
        return (*input_shape[:-1], self.num_classes)

    def cross_entropy(
        self,
        outputs: tf.Tensor,
        classes: tf.Tensor,
        probabilities: tf.Tensor,
        *,
        training: bool = True,
    ) -> tf.Tensor:
        """Computes the loss of rows against labels that name a few classes.

        Labels of one class each are `classes[..., None]` with probabilities
        of 1. A class may be named twice, as draws do; its probabilities add
        up. A shorter label is filled up with any class and probability 0.
        Training holds one kernel row for each class of each label in memory.

        Args:
            outputs: What the layer returned for the batch, float `[batch, ...,
                features]`; with `training=False` its logits.
            classes: Whole numbers `[batch, ..., k]`, k of any size.
            probabilities: Float `[batch, ..., k]`, of these classes.
            training: What the layer was called with. Default True.

        Returns:
            Nats, `[batch, ...]`: estimates in training, exact values
            otherwise.

        Raises:
            ValueError: If `outputs` have another size than `training` says.
        """
        self._handed_out.discard(threading.get_ident())
        outputs = tf.convert_to_tensor(outputs)
        size = self.kernel.shape[1] if training else self.num_classes
        if outputs.shape[-1] != size:
            raise ValueError(
                f"`outputs` must be [batch, ..., {size}] with "
                f"training={training}; received {outputs.shape}. Pass the "
                "`training` argument of `compute_loss` on to it."
            )
        dtype = self.kernel.dtype
        classes = tf.cast(classes, tf.int32)
        k = tf.shape(classes)[-1]
        flat = tf.reshape(outputs, [-1, outputs.shape[-1]])
        rows, classes = tf.cast(flat, dtype), tf.reshape(classes, [-1, k])
        if training:
            own, log_z = self._estimated(rows, classes)
        else:
            own = tf.gather(rows, classes, batch_dims=1)
            log_z = tf.reduce_logsumexp(rows, axis=-1)
        share = tf.reshape(tf.cast(probabilities, dtype), [-1, k])
        found = tf.reduce_sum(share * (log_z[:, tf.newaxis] - own), axis=-1)
        return tf.reshape(found, tf.shape(outputs)[:-1])

    def _estimated(
        self, rows: tf.Tensor, classes: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the logits of rows' own classes, and an estimate of log Z."""
        drawn = self._draw()
        own_size = tf.size(classes)
        ids = tf.concat([tf.reshape(classes, [-1]), drawn], axis=0)
        kernel = self._look_up(self.kernel, ids)
        of_rows = tf.reshape(
            kernel[:own_size], [-1, tf.shape(classes)[1], rows.shape[-1]]
        )
        own = tf.einsum("rd,rkd->rk", rows, of_rows)
        others = tf.matmul(rows, kernel[own_size:], transpose_b=True)
        bias = self._look_up(self.bias, ids)
        own += tf.reshape(bias[:own_size], tf.shape(classes))
        # Divided by the probability of being drawn.
        others += bias[own_size:] + math.log(self.num_classes / drawn.shape[0])
        lowest = rows.dtype.min
        # All other classes, so without the row's own.
        others = _without(others, drawn, classes, lowest)
        once = tf.where(_is_repeated(classes), lowest, own)
        both = tf.concat([once, others], axis=-1)
        return own, tf.reduce_logsumexp(both, axis=-1)

    def _look_up(self, variable: tf.Variable, classes: tf.Tensor) -> tf.Tensor:
        """Returns rows, with one gradient row for each distinct class.

        Keras' optimizers treat a row that comes twice as two rows, which gives
        another update than a dense gradient.
        """
        distinct, places = tf.unique(classes)
        return tf.gather(tf.gather(variable.value, distinct), places)

    def _draw(self) -> tf.Tensor:
        """Draws classes, all different and equally likely; returns them sorted.

        Systematic sampling: one random number, and classes at equal distances.
        """
        num_drawn = min(self.num_sampled, self.num_classes)
        first = keras.random.uniform((), seed=self.seed_generator)
        marks = tf.cast(first, tf.float64) + tf.range(
            num_drawn, dtype=tf.float64
        )
        drawn = tf.cast(marks * (self.num_classes / num_drawn), tf.int32)
        return tf.minimum(drawn, self.num_classes - 1)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, for serialization."""
        return {
            **super().get_config(),
            "num_classes": self.num_classes,
            "num_sampled": self.num_sampled,
            "kernel_initializer": keras.initializers.serialize(
                self.kernel_initializer
            ),
            "seed": self.seed,
        }


def _without(
    logits: tf.Tensor, drawn: tf.Tensor, classes: tf.Tensor, lowest: float
) -> tf.Tensor:
    """Returns logits `[rows, drawn + 1]`, the lowest number at own classes.

    The last column is the lowest number as well: there is always something to
    sum over. `drawn` is sorted.
    """
    num_drawn = tf.shape(drawn)[0]
    places = tf.searchsorted(drawn, tf.reshape(classes, [-1]))
    near = tf.gather(drawn, tf.minimum(places, num_drawn - 1))
    is_drawn = near == tf.reshape(classes, [-1])
    columns = tf.where(is_drawn, places, num_drawn)
    num_rows, k = tf.shape(classes)[0], tf.shape(classes)[1]
    rows = tf.repeat(tf.range(num_rows), k)
    padded = tf.pad(logits, [[0, 0], [0, 1]], constant_values=lowest)
    return tf.tensor_scatter_nd_update(
        padded,
        tf.stack([rows, columns], axis=1),
        tf.fill([num_rows * k], tf.cast(lowest, logits.dtype)),
    )


def _is_repeated(classes: tf.Tensor) -> tf.Tensor:
    """Whether a row has named a class already, bool `[rows, k]`.

    Of equal ones all but one are: which one does not matter.
    """
    order = tf.argsort(classes)
    ordered = tf.gather(classes, order, batch_dims=1)
    equal = ordered[:, 1:] == ordered[:, :-1]
    repeated = tf.pad(equal, [[0, 0], [1, 0]])
    return tf.gather(repeated, tf.argsort(order), batch_dims=1)
