"""Whether a teacher's outputs are what its student's are: one scale for both.

Probabilities taken for logits are nearly equal ones, and logits taken for
probabilities are cut off: either teaches nonsense, by finite numbers.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfdistill import losses as losses_lib
from tfdistill.exports import student_graph

# Of outputs that are not one distribution over classes.
OF_NUMBERS = (
    losses_lib.BinarySoftTargetCrossEntropy,
    losses_lib.LogitsMeanSquaredError,
)
_Losses = Sequence[losses_lib.DistillationLoss | None]
# Rows of a batch that are looked at, and how few of them tell nothing.
_MOST_ROWS, _FEWEST_ROWS = 16, 8
_WRONG = "The teacher {!r} must give what the student does, {}; received {}. {}"
_LOGITS, _PROBABILITIES = "logits", "probabilities"
_REMEDIES = {
    _LOGITS: (
        "Leave out its last activation, or pass the logarithms of its outputs "
        "(of a sigmoid, log(p / (1 - p)))."
    ),
    _PROBABILITIES: "Add its last activation, a softmax or a sigmoid.",
}


def check_ends(
    name: str, ends: Sequence[str], losses: _Losses, own: Sequence[str]
) -> None:
    """Refuses a teacher by what its outputs, and the student's `own`, are.

    `ends` and `own` are as `student_graph.ends` returns them, others count as
    unknown. `losses` are the distillation losses of the outputs.
    """
    for end, loss, ours in zip(ends, losses, own, strict=False):
        is_logits = end == student_graph.LOGITS
        is_known = is_logits or end in student_graph.PROBABILITIES
        if loss is None or end == ours or not is_known:
            continue
        # A regression from 0 to 1 may have a sigmoid.
        may_be = end == student_graph.SIGMOID and isinstance(
            loss, losses_lib.LogitsMeanSquaredError
        )
        if may_be or loss.from_logits == is_logits:
            continue
        raise ValueError(_told(name, wants_logits=not is_logits))


def checked(
    name: str, outputs: Sequence[tf.Tensor], losses: _Losses
) -> list[tf.Tensor]:
    """Returns a teacher's outputs; the step fails if they are another scale.

    Of each batch it looks at a few rows. Rows of probabilities add up to 1,
    as those of logits never do; one number a row may be either, unless it is
    below 0 or above 1.
    """
    return [
        output if loss is None else _checked(name, output, loss)
        for output, loss in zip(outputs, losses, strict=True)
    ]


def _checked(
    name: str, output: tf.Tensor, loss: losses_lib.DistillationLoss
) -> tf.Tensor:
    size = int(output.shape[-1] or 1) if output.shape.rank > 1 else 1
    rows = tf.reshape(output, [-1, size])[:_MOST_ROWS]
    if not loss.from_logits:
        fits = ~tf.reduce_any((rows < -1e-3) | (rows > 1.01))
    elif size > 1 and not isinstance(loss, OF_NUMBERS):
        sums = tf.reduce_sum(rows, axis=-1)
        is_share = (tf.abs(sums - 1) < 1e-3) & tf.reduce_all(rows >= 0, axis=-1)
        num_answers = tf.math.count_nonzero(tf.math.is_finite(sums))
        num_shares = tf.math.count_nonzero(is_share)
        fits = (num_answers < _FEWEST_ROWS) | (num_shares < num_answers)
    else:
        return output
    said = _told(name, wants_logits=bool(loss.from_logits))
    with tf.control_dependencies([tf.debugging.Assert(fits, [said])]):
        return tf.identity(output)


def _told(name: str, *, wants_logits: bool) -> str:
    wanted, found = _LOGITS, _PROBABILITIES
    if not wants_logits:
        wanted, found = found, wanted
    return _WRONG.format(name, wanted, found, _REMEDIES[wanted])
