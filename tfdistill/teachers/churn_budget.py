"""ChurnBudget: the distillation weight that a bound on the churn asks for."""

import concurrent.futures
import logging
import math
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill import metrics
from tfdistill.cluster import replicas
from tfdistill.embedding import tables
from tfdistill.exports import saved_model
from tfdistill.system import keras_internals
from tfdistill.teachers import auto_burn_in
from tfdistill.teachers import canary
from tfdistill.teachers import fixed
from tfdistill.teachers import on_servers
from tfdistill.teachers import scorer
from tfdistill.teachers import teacher as teacher_lib
from tfdistill.training import steps

_log = logging.getLogger(__name__)
# Held-out rows that count, and that are predicted at once.
_NUM_ROWS, _CHUNK = 4096, 512
# Measurements in a training, and steps between two if its length is unknown.
_NUM_MEASUREMENTS, _DEFAULT_STEPS = 40, 20
# See `ChurnBudget`: what the dual steps aim at and what the last one leaves, of
# the target; and the dual step at the end of training.
_AIM, _KEPT_SHARE = 1.2, 0.95
_RATE = 0.2
# Halvings by which the last step is found.
_NUM_HALVINGS = 10
# By how much a teacher's outputs may differ between two ways to run it.
_SAME = 1e-3
_MISSED = (
    "%s. The budget wasn't met. Measure more often (`every_steps`), or begin "
    "with a larger `initial_weight`, or with the teacher's weights: "
    "callbacks.Backup(warm_start=)."
)
_AT_MOST = (
    "%s. The weight is at its maximum, so the budget can't be met this way. "
    "Allow a larger `max_weight`, train for fewer steps or at a lower rate, or "
    "begin with the teacher's weights: callbacks.Backup(warm_start=)."
)


def next_weight(
    weight: float,
    churn: float,
    before: float,
    *,
    target: float,
    most: float,
    done: float,
) -> float:
    """Returns the weight after a dual step, as `ChurnBudget` has it.

    The churn was `before` when the weight came into force; `done` is the share
    of the training that is.

    Example:
        >>> known = {"target": 0.1, "most": 10.0, "done": 1.0}
        >>> round(next_weight(1.0, 0.5, 0.4, **known), 3)
        1.221
        >>> next_weight(1.0, 0.05, 0.04, **known)  # Low, and rising.
        1.0
    """
    error = churn / (_AIM * target) - 1
    if not math.isfinite(error) or (error < 0 and churn > before):
        return weight
    return min(most, weight * math.exp(_RATE * done * min(max(error, -1.0), 1)))


class ChurnBudget(steps.SteppedCallback):
    """The distillation weight that keeps the churn to a teacher at a target.

    For the retrain of a model that serves: start from its weights
    (`callbacks.Backup(warm_start=)`), have it teach, and say how much
    predictions may change.

        model = tfdistill.CodistillModel(
            student, teachers=tfdistill.teachers.FixedTeacher(serving_model)
        )
        model.compile(
            ..., distillation_weight=tfdistill.callbacks.ChurnBudget(0.02)
        )
        model.fit(data, validation_data=held_out)

    It is a callback, too, which `fit` adds by itself. The problem is to

        minimize task_loss subject to E |student - teacher| <= target.

    Training under such a constraint is equivalent to distillation from the
    base model (Jiang et al. 2021, arXiv:2106.02654, abstract), whose weight is
    the constraint's multiplier. How that is found is ours: by dual ascent on
    the churn c (`metrics.churn`) that is measured on held-out rows,

        log w <- log w + 0.2 t clip(c / (1.2 target) - 1, -1, 1)

    within (0, max_weight]. t is the share of the training that is done: early
    steps at a high rate show little of its end. w waits while c is low and
    grows, as after a start with the teacher's weights. A few dozen noisy steps
    do not find w exactly. So, if the student has the teacher's variables and c
    exceeds the target after the last step of training, all of them move to

        v_teacher + a (v_student - v_teacher)

    with the largest a, from 0 to 1, for which c is at most 0.95 target, as
    Wortsman et al. 2022 (arXiv:2109.01903) average weights.

    Every `every_steps` steps the training thread takes a snapshot of the
    student, which the chief measures in the background. The weight that
    follows is in force from exactly the next multiple of `every_steps` on, on
    all workers alike, so that a resumed training is the same to the bit. On
    parameter servers the coordinator measures, tables as they are by then, and
    workers use a weight from when they read it on. `fit`
    logs `churn` and `churn_budget`, and warns at the end if the budget was
    not kept. With several teachers, the weight applies to their mean.

    Attributes:
        target: The budget.
        churn: The churn measured last; NaN before training.
        weight: The weight in force.
    """

    def __init__(
        self,
        target: float,
        *,
        held_out: object = None,
        teacher: str | None = None,
        every_steps: int | None = None,
        initial_weight: float = 1.0,
        max_weight: float = 10.0,
    ) -> None:
        """Measures nothing yet.

        Args:
            target: The largest churn to the teacher, as `metrics.churn` has
                it, between 0 and 1.
            held_out: Rows that are not trained on: a dataset of batches, or
                arrays `x` or `(x, y)`, of which the first 4,096 count.
                Default: the `validation_data` of `fit`.
            teacher: The name of the `FixedTeacher` that the churn is measured
                to. Default: the model's only one.
            every_steps: Steps between measurements, >= 1. Default: a fortieth
                of the training, or 20 if its length is unknown.
            initial_weight: The weight until the first measurement, > 0.
            max_weight: The largest weight, at least `initial_weight`. Larger
                ones make steps unstable. Default 10.

        Raises:
            ValueError: An argument is not as above.
        """
        super().__init__()
        if not 0 < target < 1:
            raise ValueError(
                "`target` must be a churn between 0 and 1, such as 0.02; "
                f"received {target!r}."
            )
        if not 0 < initial_weight <= max_weight < math.inf:
            raise ValueError(
                "`initial_weight` must be > 0 and at most `max_weight`, which "
                f"is finite; received {initial_weight!r} and {max_weight!r}."
            )
        if every_steps is not None:
            steps.EverySteps(every_steps)
        self.target = float(target)
        self._held_out, self._teacher = held_out, teacher
        self._every_steps = every_steps
        self._initial, self._most = float(initial_weight), float(max_weight)
        self._owner: Any = None
        self._variable: Any = None
        self._thread: Any = None
        self._restoring: list[keras.callbacks.EarlyStopping] = []
        self._forget()

    def _forget(self) -> None:
        self.weight, self.churn = self._initial, math.nan
        # The chief's measurement of the last due step, in progress or done.
        self._pending: Any = None

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the weight in force, float32 scalar tensor."""
        if self._variable is None:
            return tf.constant(self.weight, tf.float32)
        return tf.convert_to_tensor(self._variable)

    # ---- Keras' hooks ----

    def meet(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Finds the callbacks that restore earlier weights at the end."""
        self._restoring = [
            each
            for each in callbacks
            if isinstance(each, keras.callbacks.EarlyStopping)
            and each.restore_best_weights
        ]

    def on_train_begin(self, logs: steps.Logs | None = None) -> None:
        """Lets the teacher and the student predict the held-out rows."""
        super().on_train_begin(logs)
        model = self.codistilled
        if isinstance(model.teachers.weight, auto_burn_in.AutoBurnIn):
            raise ValueError(
                "A ChurnBudget must be the `distillation_weight`; received it "
                "only among the callbacks. Pass it to `compile`: `fit` adds it "
                "to the callbacks."
            )
        strategy = model.distribute_strategy
        if self._owner is not model:
            self._owner = model
            self._variable = replicas.told(
                strategy, tf.constant(self._initial), name="churn_weight"
            )
        planned = self.planned_steps
        self._due = steps.EverySteps(
            self._every_steps
            or planned // _NUM_MEASUREMENTS
            or (1 if planned else _DEFAULT_STEPS)
        )
        self._due.start(self.step)
        self._writer = saved_model.SavedModelWriter(model.graph)
        self._values = replicas.WorkerValues(strategy)
        self._task = _task_of(model)
        self._rows = _chunks(
            model.teachers.validation_data
            if self._held_out is None
            else self._held_out
        )
        teacher = _named(model.teachers, self._teacher)
        self._theirs = self._predicted(teacher.predict)
        self._anchor = self._anchored(teacher)
        self._forget()
        self._take(self._measured(self._snapshot()))
        self._thread = concurrent.futures.ThreadPoolExecutor(1)

    def _anchored(self, teacher: fixed.FixedTeacher) -> list[Any] | None:
        """Returns the teacher's values, if the student could have them."""
        graph = self._writer.graph
        # Averages take the place of the weights later.
        averages = keras_internals.moving_averages(self.model.optimizer)
        found = None if averages else teacher.values(self._writer)
        self._run: Any = lambda values, inputs, share: graph(values, inputs)
        if self.on_servers:
            # It takes a share of the way from the tables of the teacher.
            self._run = on_servers.student_runner(graph, found)
        if found is None:
            return None
        same = self._predicted(lambda x: self._run(found, x, 0.0))
        return found if np.abs(same - self._theirs).max() <= _SAME else None

    def on_train_batch_end(
        self, batch: int, logs: steps.Logs | None = None
    ) -> None:
        """Uses the measurement of the last due step, and begins another."""
        super().on_train_batch_end(batch, logs)
        if self.step == self.planned_steps:
            self._keep()
        if not self._due.due(self.step):
            return
        if self._pending is not None:
            before = self.churn
            self._take(self._finished())
            self.weight = next_weight(
                self.weight,
                self.churn,
                before,
                target=self.target,
                most=self._most,
                done=self.step / (self.planned_steps or self.step),
            )
            self._show()
        self._pending = math.nan
        if replicas.is_chief(self.model.distribute_strategy):
            self._pending = self._thread.submit(self._tried, self._snapshot())

    def on_train_end(self, logs: steps.Logs | None = None) -> None:
        """Keeps to the budget with what remains, and says what was reached."""
        self._thread.shutdown()
        found = [c for c in self._restoring if c.best_weights is not None]
        for each in found:
            self.model.set_weights(each.best_weights)
        self._keep()
        for each in found:  # It may put them back after this.
            each.best_weights = self.model.get_weights()
        if logs is not None:
            logs["churn"] = self.churn
        said = (
            f"The churn to the teacher is {self.churn:.4g}, with a budget of "
            f"{self.target:.4g} and the weight at {self.weight:.3g}"
        )
        if self._anchor is None:
            said += (
                ", without a final correction, because the teacher's "
                "variables differ from the student's"
            )
        if not replicas.is_chief(self.model.distribute_strategy):
            return
        if self.churn <= self.target:
            _log.info("%s.", said)
        else:
            is_most = self.weight >= self._most
            _log.warning(_AT_MOST if is_most else _MISSED, said)

    def _take(self, churn: float) -> None:
        """Takes the chief's churn, and shows it; all workers alike."""
        self.churn = self._values.chiefs(churn)
        self._show()

    def _show(self) -> None:
        self._variable.assign(self.weight)
        also = self.model.trainer.last.also
        also["churn"], also["churn_budget"] = self.churn, self.target

    # ---- the last step ----

    def _keep(self) -> None:
        """Moves the student towards the teacher, as far as it takes."""
        own = self._snapshot()
        self._take(self._measured(own))
        if self._anchor is None or not self.churn > self.target:
            return
        strategy = self.model.distribute_strategy
        least, most = 0.0, 1.0
        for _ in range(_NUM_HALVINGS if replicas.is_chief(strategy) else 0):
            middle = (least + most) / 2
            churn = self._measured(_between(self._anchor, own, middle), middle)
            if churn <= _KEPT_SHARE * self.target:
                least = middle
            else:
                most = middle
        share = self._values.chiefs(least)
        moved = _between(self._anchor, own, share)
        for variable, start, value in zip(
            self._writer.graph.variables, self._anchor, moved, strict=True
        ):
            if value is not None:
                tables.assign(variable, value, strategy)
                continue
            shards = [part.value for part in tables.parts_of(variable)]
            for shard, theirs in zip(shards, start, strict=True):
                with tf.device(shard.device):
                    shard.assign(_between([theirs], [shard], share)[0])
        self._take(self._measured(moved))

    # ---- the measurement ----

    def _snapshot(self) -> list[Any]:
        """Takes what `fit` would leave: averages, where it has some."""
        found = keras_internals.moving_averages(self.model.optimizer)
        return list(self._writer.snapshot({id(v): a.value for v, a in found}))

    def _measured(
        self, values: saved_model.Snapshot, share: float = 1.0
    ) -> float:
        ours = self._predicted(lambda x: self._run(values, x, share))
        return metrics.churn(ours, self._theirs)["churn"]

    def _tried(self, snapshot: saved_model.Snapshot) -> float:
        try:
            return self._measured(snapshot)
        except Exception as error:  # TensorFlow raises many kinds.
            _log.warning("The churn couldn't be measured: %s", error)
            return math.nan

    def _finished(self) -> float:
        if isinstance(self._pending, concurrent.futures.Future):
            self._pending = self._pending.result()
        return self._pending

    def _predicted(self, predict: Callable[[Any], Any]) -> np.ndarray:
        found = []
        for rows in self._rows:
            (outputs,) = keras.tree.flatten(predict(rows))
            found.append(self._task.probabilities(outputs).numpy())
        return np.concatenate(found)

    # ---- for a backup ----

    def state(self) -> dict[str, Any]:
        """Returns what a resumed training continues with."""
        if self._pending is not None:
            self._finished()
        return {
            "weight": self.weight,
            "churn": self.churn,
            "_pending": self._pending,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned."""
        self.weight, self.churn = state["weight"], state["churn"]
        self._pending = state["_pending"]
        self._show()


def _between(
    starts: Sequence[Any], ends: Sequence[Any], share: float
) -> list[Any]:
    return [
        None
        if isinstance(theirs, list)  # A table on servers, by shard.
        else (start := tf.cast(theirs, end.dtype))
        + tf.cast(share, end.dtype) * (end - start)
        if end.dtype.is_floating
        else end
        for theirs, end in zip(starts, ends, strict=True)
    ]


def _task_of(model: keras.Model) -> scorer.Scorer:
    found = scorer.of_task(model.loss)
    if found is None or len(keras.tree.flatten(model.graph.output_spec)) != 1:
        raise ValueError(
            "A ChurnBudget needs a student with one output and one compiled "
            "loss, which determines whether outputs are logits; received "
            f"{model.loss!r} and {model.graph.output_spec}."
        )
    return found


def _named(
    teachers: Iterable[teacher_lib.Teacher], name: str | None
) -> fixed.FixedTeacher:
    known = [t for t in teachers if isinstance(t, fixed.FixedTeacher)]
    found = [t for t in known if name in (None, t.name)]
    if len(found) != 1:
        raise ValueError(
            "A ChurnBudget measures the churn to a teachers.FixedTeacher: the "
            "model's only FixedTeacher, or the one named by `teacher`; "
            f"received {name!r} and {[t.name for t in known]}."
        )
    return found[0]


def _chunks(held_out: object) -> list[Any]:
    """Returns the inputs of the rows that count, in parts."""
    if held_out is None:
        raise ValueError(
            "A ChurnBudget needs rows that are not trained on, but has no such "
            "rows. Pass `held_out`, or `validation_data` to `fit`."
        )
    is_whole = isinstance(held_out, tf.data.Dataset | tuple | list)
    found = canary.Canary(
        held_out if is_whole else (held_out,), num_examples=_NUM_ROWS
    )
    return [
        keras.tree.map_structure(
            lambda values: values[first : first + _CHUNK],  # noqa: B023
            found.inputs,
        )
        for first in range(0, found.num_examples, _CHUNK)
    ]
