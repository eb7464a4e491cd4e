"""How good predictions are: their task loss, compared with a guess's."""

import keras
import tensorflow as tf

from tfdistill.system import keras_internals
from tfdistill.teachers import output_kinds


class Scorer:
    """The task loss of each prediction of a model's one output."""

    def __init__(self, loss: keras.losses.Loss) -> None:
        """Takes the task loss, of whatever reduction."""
        self._loss, self._takes_logits = loss, output_kinds.gives_logits(loss)
        kind = keras_internals.kind_of_loss(loss)
        self._is_binary, self._of_classes = kind == "binary", kind == "classes"

    def losses(self, targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Returns a float32 vector, in the order of the predictions."""
        given = (tf.cast(value, tf.float32) for value in (targets, outputs))
        return tf.reshape(self._loss.call(*given), [-1])

    def probabilities(self, outputs: tf.Tensor) -> tf.Tensor:
        """Returns outputs as probabilities, if they can be taken for those."""
        outputs = tf.cast(outputs, tf.float32)
        if not self._takes_logits:
            return outputs
        to_shares = tf.sigmoid if self._is_binary else tf.nn.softmax
        return to_shares(outputs)

    def guess(self, outputs: tf.Tensor) -> tf.Tensor:
        """Returns the same answer for all: the mean of the student's.

        Base rates, for any number of classes; the mean of a regression.
        """
        found = self.probabilities(outputs)
        axes = list(range(found.shape.rank - 1)) if self._of_classes else [0]
        mean = tf.reduce_mean(found, axis=axes, keepdims=True)
        if self._takes_logits:
            rest = 1 - mean if self._is_binary else tf.ones_like(mean)
            mean = tf.math.log(mean) - tf.math.log(rest)
        return tf.broadcast_to(mean, tf.shape(outputs))


def of_task(loss: object) -> Scorer | None:
    """Returns one for the task losses of `compile`; None if not for one."""
    found = [output_kinds.inner(each) for each in keras.tree.flatten(loss)]
    is_one = len(found) == 1 and isinstance(found[0], keras.losses.Loss)
    return Scorer(found[0]) if is_one else None
