"""The distillation term of a step: its losses, and what they are over."""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdistill import losses as losses_lib
from tfdistill.exports import student_graph
from tfdistill.teachers import labels as labels_lib
from tfdistill.teachers import output_kinds
from tfdistill.teachers import rows as rows_lib
from tfdistill.teachers import soft_targets
from tfdistill.training import global_batch
from tfdistill.training import steps
from tfdistill.training import uncertainty

# What a step reports of each teacher: the share of rows that it taught, and the
# version that did.
TAUGHT, VERSIONS = labels_lib.TAUGHT_ROWS, "versions"
_OPEN = (
    "{} can't infer from the task loss or the student's last layer whether "
    "outputs are logits. End the student with a softmax, a sigmoid or a layer "
    "without an activation; or construct the loss with from_logits=True or "
    "from_logits=False. For a regression, use True."
)


class Term(NamedTuple):
    """The distillation term of one step on one replica.

    Attributes:
        loss: The replica's share, unweighted; None without teachers.
        weight: What it is multiplied by, a scalar of the loss's dtype.
        logs: What the step logs of its teachers.
    """

    loss: tf.Tensor | None
    weight: tf.Tensor
    logs: steps.Logs


class DistillationTerm:
    """Sums the distillation losses of a student's outputs.

    It is scaled as the task loss is: by the global batch, with the same
    sample weights and masks.
    """

    def __init__(
        self,
        losses: object,
        *,
        task_loss: object,
        output_names: Sequence[str] | None = None,
        weights: object = None,
        by_sample_weight: bool = True,
    ) -> None:
        """Settles each loss's `from_logits` by the task loss, if that says it.

        `losses` is one loss for all outputs, or a dict, list or tuple of losses
        (or None) by output. `output_names` are in the order of the student's
        outputs, for a dict of losses if the outputs are none; None if unknown.
        `weights` are factors of the losses, by output as these, of which some
        may be learned; unless they count `by_sample_weight`, all rows count
        alike.
        """
        if isinstance(losses, list | tuple):
            losses = dict(enumerate(losses))
        # By name, or by place, or one for all.
        self._losses: Any = (
            {
                k: _wrapped(v, output_kinds.part(task_loss, k))
                for k, v in losses.items()
            }
            if isinstance(losses, dict)
            else _wrapped(losses, task_loss)
        )
        self._output_names = list(output_names or ())
        if isinstance(weights, list | tuple):
            weights = dict(enumerate(weights))
        self._weights = weights
        self._by_sample_weight = by_sample_weight
        # By output, once these are known: losses, and their factors.
        self._chosen: list[Any] = []
        self._factors: list[Any] = []

    @property
    def losses(self) -> list[losses_lib.DistillationLoss | None]:
        """The loss of each output; None for one without."""
        return [loss and loss.inner for loss in self._chosen]

    def settle(self, output_spec: object, ends: Sequence[str]) -> None:
        """Settles what each output has, by how the student ends if need be."""
        self._chosen = self._by_output(
            output_spec, self._losses, "distillation_loss"
        )
        factors = self._by_output(
            output_spec, self._weights, "distillation_output_weights"
        )
        self._factors = [1 if factor is None else factor for factor in factors]
        for loss, end in zip(self._chosen, ends, strict=True):
            if loss is None or loss.inner.from_logits is not None:
                continue
            if not end:
                raise ValueError(_OPEN.format(type(loss.inner).__name__))
            is_logits = end == student_graph.LOGITS
            loss.inner = loss.inner.with_from_logits(is_logits)

    def compared(
        self,
        soft: soft_targets.SoftTargets,
        rows: rows_lib.Rows,
        step: tf.Tensor,
        weight: tf.Tensor,
        report: Sequence[tf.Tensor],
    ) -> Term:
        """Compares rows with their soft targets, at a step of the student.

        `weight` is the distillation weight there. The step logs the `report`.
        """
        with losses_lib.at_step(tf.cast(step, tf.int64)), rows.count.scope():
            loss = self(soft, rows.taught, rows.sample_weight)
        logs = {
            "teacher_staleness": soft.staleness,
            **steps.hidden(rows_lib.REPORT, report),
            **steps.hidden(TAUGHT, [soft.taught_rows]),
            **steps.hidden(VERSIONS, [soft.steps]),
        }
        return Term(loss, weight * tf.cast(soft.strength, weight.dtype), logs)

    def __call__(
        self,
        soft: soft_targets.SoftTargets,
        y_pred: object,
        sample_weight: object,
    ) -> tf.Tensor:
        """Computes this replica's share of the term, a float scalar.

        0 if no teacher is in use. `sample_weight` is as in the data: None, a
        tensor, or by output.
        """
        # The whole term is scaled by the greatest share; see `strength`.
        of_rows = tf.math.divide_no_nan(
            soft.share_of_rows, tf.reduce_max(soft.shares)
        )
        flat_pred = keras.tree.flatten(y_pred)
        total = tf.zeros([])
        for outputs, student, loss, weight, factor in zip(
            soft.outputs,
            flat_pred,
            self._chosen,
            _by_output(
                sample_weight if self._by_sample_weight else None,
                len(flat_pred),
            ),
            self._factors,
            strict=True,
        ):
            if loss is not None:
                target = loss.inner.aggregate(outputs, soft.weights)
                share = loss(target, student, _masked(weight, of_rows, student))
                share = tf.cast(share, tf.float32)
                if isinstance(factor, uncertainty.LearnedWeight):
                    # Rows without a teacher show nothing of the variance.
                    cost = factor.cost * global_batch.share_of_mean(of_rows)
                    share, factor = factor.value * share + cost, 1
                total += share if factor == 1 else factor * share
        return total

    def _by_output(
        self, outputs: object, given: object, name: str
    ) -> list[Any]:
        paths = [path for path, _ in keras.tree.flatten_with_path(outputs)]
        count = len(paths)
        if not isinstance(given, dict):
            return [given] * count
        if all(isinstance(key, int) for key in given):
            if len(given) != count:
                raise ValueError(
                    f"`{name}` must hold one entry (or None) for "
                    f"each of {count} outputs; received {len(given)}."
                )
            return list(given.values())
        names = self._output_names
        if isinstance(outputs, dict):
            names = [path[0] for path in paths]
        unknown = set(given).difference(names)
        if unknown or len(names) != count:
            raise ValueError(
                f"`{name}` must be keyed by the student's outputs "
                f"{sorted(names)}, or a list if these have no names; received "
                f"the keys {list(given)}."
            )
        return [given.get(output) for output in names]


def _wrapped(
    loss: object, task_loss: object
) -> global_batch.GlobalBatchLoss | None:
    """Takes `from_logits` from the task loss where it was left open."""
    if loss is None:
        return None
    if not isinstance(loss, losses_lib.DistillationLoss):
        raise ValueError(
            "`distillation_loss` must be a tfdistill.losses.DistillationLoss; "
            f"received {loss!r}. A task loss compares predictions with labels, "
            "not with teachers."
        )
    if loss.from_logits is None:
        found = map(output_kinds.gives_logits, keras.tree.flatten(task_loss))
        answers = {answer for answer in found if answer is not None}
        if len(answers) > 1:
            raise ValueError(_OPEN.format(type(loss).__name__))
        if answers:
            loss = loss.with_from_logits(answers.pop())
    return global_batch.GlobalBatchLoss(loss)


def _by_output(sample_weight: object, count: int) -> list[Any]:
    if sample_weight is None or not isinstance(
        sample_weight, (dict, list, tuple)
    ):
        return [sample_weight] * count
    return keras.tree.flatten(sample_weight)


def _masked(
    weight: tf.Tensor | None, of_rows: tf.Tensor, student: tf.Tensor
) -> tf.Tensor:
    """Scales examples, at all positions: those without a teacher by 0."""
    if weight is None:
        # As many as the loss has values: one for each position of a sequence.
        rank = max(len(student.shape) - 1, 1)
        mask = tf.reshape(of_rows, [-1, *[1] * (rank - 1)])
        return tf.broadcast_to(mask, tf.shape(student)[:rank])
    weight = tf.cast(weight, tf.float32)
    extra = weight.shape.rank - 1
    return weight * tf.reshape(of_rows, [-1, *[1] * extra])
