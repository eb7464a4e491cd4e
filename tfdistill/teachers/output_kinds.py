"""One scale for teachers, student, losses and metrics: logits or probabilities.

Probabilities taken for logits are nearly equal ones, and logits taken for
probabilities are cut off: either teaches nonsense, by finite numbers.
"""

import warnings
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import losses as losses_lib
from tfdistill.exports import student_graph
from tfdistill.system import keras_internals
from tfdistill.training import global_batch

# Losses of outputs that are not one distribution over classes.
OF_NUMBERS = (
    losses_lib.BinarySoftTargetCrossEntropy,
    losses_lib.LogitsMeanSquaredError,
)
_Losses = Sequence[losses_lib.DistillationLoss | None]
# Rows of a batch that are looked at, and how few of them show nothing.
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
_OF_STUDENT = (
    "The student must end as its loss takes its outputs, as {}; received {}. "
    "Give the loss from_logits={}, or {} the student's last activation."
)
# Keras' metrics of probabilities, and the setting for logits.
_SETTINGS = {
    "AUC": "from_logits=True",
    "BinaryAccuracy": "threshold=0",
    "BinaryCrossentropy": "from_logits=True",
    "CategoricalCrossentropy": "from_logits=True",
    "Precision": "thresholds=0",
    "Recall": "thresholds=0",
    "SparseCategoricalCrossentropy": "from_logits=True",
}
_BY_NAME = {name.lower(): name for name in _SETTINGS}


def gives_logits(task_loss: object) -> bool | None:
    """Whether a task loss takes logits; None if it does not say."""
    loss = inner(task_loss)
    if not isinstance(loss, keras.losses.Loss):
        return None
    try:
        answer = loss.get_config().get("from_logits")
    except NotImplementedError:
        return None
    is_of_shares = keras_internals.kind_of_loss(loss) in ("classes", "binary")
    if answer is None and (is_of_shares or "crossentropy" in loss.name.lower()):
        # Named by a string: Keras' functions default to probabilities.
        return False
    return answer


def inner(task_loss: Any) -> Any:
    """Returns the loss that `compile` was given."""
    is_global = isinstance(task_loss, global_batch.GlobalBatchLoss)
    return task_loss.inner if is_global else task_loss


def part(structure: Any, key: Any) -> Any:
    """Returns what is of one output, or what is for all."""
    try:
        return structure[key]
    except (KeyError, IndexError, TypeError):
        return structure


def check_metrics(loss: object, metrics: object) -> None:
    """Warns of metrics, as `compile` takes them, of another scale."""
    if isinstance(metrics, Mapping):
        for key, of_output in metrics.items():
            check_metrics(part(loss, key), of_output)
        return
    losses = keras.tree.flatten(loss)
    logits = {gives_logits(each) for each in losses}
    for metric in keras.tree.flatten(metrics) if len(logits) == 1 else ():
        remedy = _remedy(metric, inner(losses[0]), logits.copy().pop())
        if remedy:
            warnings.warn(
                f"The metric {metric!r} and the loss must both take logits or "
                f"both take probabilities. Pass keras.metrics.{remedy}.",
                stacklevel=3,
            )


def _remedy(
    metric: keras.Metric, loss: keras.losses.Loss, logits: bool | None
) -> str | None:
    kind = metric if isinstance(metric, str) else type(metric).__name__
    kind = kind.lower().replace("_", "")
    is_binary = isinstance(loss, keras.losses.BinaryCrossentropy)
    if kind in ("acc", "accuracy") and is_binary:
        kind = "binaryaccuracy"
    elif kind in ("ce", "crossentropy"):
        kind = type(loss).__name__.lower()
    name = _BY_NAME.get(kind)
    if name is None:
        return None
    config = {} if isinstance(metric, str) else metric.get_config()
    given = config.get(_SETTINGS[name].partition("=")[0])
    if logits is False and given is True:
        return f"{name}(from_logits=False)"
    # Not by equality: a threshold of 0 is right, and equals False.
    is_default = given is None or given is False or given == 0.5
    is_default &= config.get("top_k") is None
    return f"{name}({_SETTINGS[name]})" if logits and is_default else None


def check_student(loss: object, y_pred: object) -> None:
    """Warns if a loss of probabilities gets logits, while a step is traced.

    Keras warns of the reverse.
    """
    losses, outputs = keras.tree.flatten(loss), keras.tree.flatten(y_pred)
    is_traced = all(map(tf.is_symbolic_tensor, outputs))
    takes_shares = {gives_logits(each) for each in losses} == {False}
    if not is_traced or not takes_shares or len(losses) != len(outputs):
        return
    if student_graph.LOGITS in student_graph.ends(outputs):
        said = _OF_STUDENT.format(_PROBABILITIES, _LOGITS, True, "add")
        warnings.warn(said, stacklevel=2)


def check_ends(
    name: str, ends: Sequence[str], losses: _Losses, own: Sequence[str]
) -> None:
    """Refuses a teacher by what its outputs, and the student's `own`, are.

    `ends` and `own` are as `student_graph.ends` returns them, others count as
    unknown. `losses` are the distillation losses of the outputs.
    """
    for end, loss, ours in zip(ends, losses, own, strict=False):
        if end != ours and _clashes(end, loss):
            wants_logits = end != student_graph.LOGITS
            raise ValueError(_told(name, wants_logits=wants_logits))


def check_own_ends(own: Sequence[str], losses: _Losses) -> None:
    """Refuses a student of probabilities that is distilled by logits."""
    for end, loss in zip(own, losses, strict=False):
        if end != student_graph.LOGITS and _clashes(end, loss):
            said = _LOGITS, _PROBABILITIES, False, "leave out"
            raise ValueError(_OF_STUDENT.format(*said))


def _clashes(end: str, loss: losses_lib.DistillationLoss | None) -> bool:
    if loss is None:
        return False
    if end == student_graph.LOGITS:
        return not loss.from_logits
    # A regression from 0 to 1 may have a sigmoid.
    is_number = isinstance(loss, losses_lib.LogitsMeanSquaredError)
    may_be = end == student_graph.SIGMOID and is_number
    is_share = end in student_graph.PROBABILITIES
    return is_share and bool(loss.from_logits) and not may_be


def checked(
    name: str, outputs: Sequence[tf.Tensor], losses: _Losses
) -> list[tf.Tensor]:
    """Returns a teacher's outputs; the step fails if they are another scale.

    A few rows of each batch are examined. Rows of probabilities add up to 1,
    and rows of logits never do; a row of one number may be either, unless it is
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
