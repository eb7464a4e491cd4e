"""What callbacks may know: of steps, of the model, and of each other.

What a step reports travels among the logs as far as the training function's
caller: from any replica, by any loop, and from the workers of parameter
servers.
"""

import dataclasses
import numbers
import typing
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple
from typing import TypeVar

import keras
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.system import keras_internals

Logs = dict[str, Any]
Role = TypeVar("Role")


class EverySteps:
    """Finds when a multiple of a number of steps, and an offset, was passed."""

    def __init__(self, every_steps: int, *, offset_steps: int = 0) -> None:
        """Checks that the interval is a whole number >= 1.

        The first time is at `offset_steps`, or, if that is 0, at `every_steps`.
        """
        is_index = isinstance(every_steps, numbers.Integral)
        if not is_index or isinstance(every_steps, bool) or every_steps < 1:
            raise ValueError(
                "`every_steps` must be a whole number >= 1; received "
                f"{every_steps!r}."
            )
        self.every_steps = int(every_steps)
        self._offset_steps = offset_steps
        self._last = self._reached(0)

    def start(self, step: int) -> None:
        """Starts to count at a step, which is not itself due."""
        self._last = self._reached(step)

    def due(self, step: int) -> bool:
        """Whether a multiple was reached since the last time it was due."""
        reached = self._reached(step)
        passed, self._last = reached > self._last, reached
        return passed

    def next(self, step: int) -> int:
        """Returns the first step after this one that is due."""
        return (self._reached(step) + 1) * self.every_steps + self._offset_steps

    def _reached(self, step: int) -> int:
        return (step - self._offset_steps) // self.every_steps


class Stateful(typing.Protocol):
    """What a backup keeps beside the variables of a model."""

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """What it holds; known before training begins."""

    def state(self) -> dict[str, Any]:
        """Returns the rest, as JSON; called before variables are read."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned, once training has begun."""


@typing.runtime_checkable
class ChiefOnly(typing.Protocol):
    """A callback that says where it runs; a user's may, too."""

    # False for all workers of a group; None for what its kind does.
    chief_only: bool | None


@typing.runtime_checkable
class ActsAtSteps(typing.Protocol):
    """A callback that says when it acts; a user's may, too."""

    def next_due(self, step: int) -> int | None:
        """Returns after which step it next acts, as far as it is known."""


class WithEachStep(typing.Protocol):
    """What travels to the workers of servers with each execution."""

    def arguments(self) -> tf.Tensor:
        """Returns what the workers of the next execution are told."""

    def on_worker(self, arguments: tf.Tensor) -> None:
        """Takes that in, while an execution is traced."""

    def note(self) -> None:
        """Notes that an execution has ended."""


class RowsAhead(typing.Protocol):
    """What `compile(rows_ahead=)` takes, such as `contrib.RowsAhead`."""

    def fetching(
        self, model: keras.Model, update: Any, *, endless: bool
    ) -> Any:
        """Returns what reads for a model's steps on servers."""


class WithRows(NamedTuple):
    """An element of the data, and rows that its step gets beside it."""

    data: Any
    rows: Any


class Trained:
    """A model that this package trains, by its `trainer`."""

    trainer: Any

    def stateful(self) -> dict[str, Stateful]:
        """Returns by name what a backup keeps beside its variables."""
        return {}

    def bare(self, data: object) -> Any:
        """Returns data, or their spec, as a plain model would get them."""
        return data

    def rows_beside(self) -> tf.data.Dataset | None:
        """Returns data of which a step gets a batch beside its own, if any."""
        return None

    def before_tracing(self) -> Any:
        """Makes what a training step needs.

        Returns what each execution takes along to the workers of parameter
        servers, which is None if there is nothing.
        """
        return None


class Codistilled(Trained):
    """A model that learns from teachers, too."""

    student: keras.Model
    teachers: Any
    graph: Any


def output_names(model: keras.Model) -> list[str] | None:
    """Returns the names of a model's outputs, if it is known to have some.

    In the order of `keras.tree.flatten`: the keys, if it returns a dict.
    """
    names = getattr(model, "output_names", None)
    outputs = symbolic_output(model)
    if names is None or not isinstance(outputs, dict):
        return names
    return [str(path[0]) for path, _ in keras.tree.flatten_with_path(outputs)]


def symbolic_output(model: keras.Model) -> Any:
    """Returns the outputs of a functional model, symbolic; None of others."""
    return getattr(model, "output", None)


def not_rows(output: Any) -> str:
    """Returns what an output is if it isn't a tensor of numbers by row.

    Example:
        >>> not_rows(tf.zeros([2, 1])), not_rows(tf.constant("a"))
        ('', 'an EagerTensor of string')
    """
    if output is None:
        return "None"
    is_tensor = isinstance(output, tf.Tensor)
    if not is_tensor or output.dtype in (tf.string, tf.variant):
        kind = f"{type(output).__name__} of {output.dtype.name}"
        return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"
    return "" if output.shape.rank != 0 else "one number for the whole batch"


def check_gatherable(predictions: object, *, within_process: bool) -> None:
    """Refuses predictions that several replicas or workers cannot gather."""
    for path, value in keras.tree.flatten_with_path(predictions):
        # Keras gathers more within a process.
        is_local = isinstance(value, tf.RaggedTensor) or (
            isinstance(value, tf.Tensor) and value.shape.rank != 0
        )
        wrong = not_rows(value)
        if wrong and not (within_process and is_local):
            raise ValueError(
                "Predictions must be tensors of numbers with a row for each "
                "example on several replicas or workers, which gather them; "
                f"received {wrong} for the output {name_of_output(path)!r}. "
                "Return such a tensor, or call the model on each batch."
            )


def name_of_output(path: Sequence[Any]) -> str:
    """Returns how messages name the output at a path of a structure."""
    return "_".join(map(str, path)) or "output"


class SteppedCallback(keras.callbacks.Callback):
    """A callback that knows the global step; subclasses fill the hooks.

    What callbacks know of each other, and what is kept of them, is declared
    here. `fit` calls `meet` before it begins, where a callback finds others by
    their class: a role such as `Exporter`, so that no room imports another
    for it. Each version says the `manifest_extras` of all. A `Backup` keeps
    `state` and `variables`, by `backup_key`, and restores both.

    A step is a batch, as for Keras' learning rate schedules, also with
    `gradient_accumulation_steps`. Reading the optimizer's counter waits for the
    device, so it is read once an epoch and counted on from there.

    Attributes:
        step: The global step: number of batches trained on.
        exchange: Where it publishes or looks for versions; None for nowhere.
        backup_key: What a backup calls its state; None for the class's name. A
            class that gets another name keeps its first one here.
    """

    exchange: Any = None
    backup_key: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.step = self._next_batch = 0
        self._is_fresh = True

    def meet(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Sees all callbacks of a `fit`, itself among them."""

    def manifest_extras(self) -> dict[str, Any]:
        """Returns what the next version says on its behalf, as JSON."""
        return {}

    def state(self) -> dict[str, Any]:
        """Returns what a backup keeps of it, before it reads `variables`.

        As JSON.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned, once training has begun."""

    def next_due(self, step: int) -> int | None:
        """Returns after which step it next acts, as far as it is known.

        An execution of `steps_per_execution="auto"` ends there. By default the
        first that is due by any `EverySteps` it has.
        """
        schedules = [s for s in vars(self).values() if type(s) is EverySteps]
        return min((s.next(step) for s in schedules), default=None)

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """What a backup keeps of it; known before training begins."""
        return ()

    @property
    def planned_steps(self) -> int:
        """Steps of the whole `fit`, by its arguments; 0 if not known."""
        return (self.params.get("steps") or 0) * self.params["epochs"]

    @property
    def codistilled(self) -> Any:
        """The model that `fit` trains, which must be a `CodistillModel`."""
        if not isinstance(self.model, Codistilled):
            raise self.misplaced()
        return self.model

    def misplaced(self) -> ValueError:
        """Returns the error of a callback that `fit` could not prepare."""
        return ValueError(
            f"{type(self).__name__} must be given to the `fit` of a "
            "tfdistill.CodistillModel, in a list of callbacks; received "
            f"{type(self.model).__name__}. Wrap your model: "
            "tfdistill.CodistillModel(model)."
        )

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Reads the step to start from."""
        self.read_step()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Reads the exact step: an epoch may have ended early."""
        self.read_step()

    def on_train_batch_begin(
        self, batch: int, logs: Logs | None = None
    ) -> None:
        """Notes where an epoch begins: not at 0 if it was resumed."""
        if self._is_fresh:
            self._next_batch, self._is_fresh = batch, False

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Counts the steps of one execution."""
        next_batch = batch + 1
        if not self.model.trainer.counts_done:
            # With several steps an execution Keras gives the last batch that
            # was asked for, though the data may have ended before it.
            num_batches = self.params.get("steps")
            if num_batches is None and self.model.trainer.num_steps > 1:
                self.read_step()
                return
            if num_batches is not None:
                next_batch = min(next_batch, num_batches)
        self.step += next_batch - self._next_batch
        self._next_batch = next_batch

    @property
    def on_servers(self) -> bool:
        """Whether the model trains on parameter servers."""
        return replicas.on_servers(self.model.distribute_strategy)

    def read_step(self) -> None:
        """Takes the exact step from the optimizer."""
        counter = keras_internals.num_batches(self.model.optimizer)
        self.step, self._next_batch = int(counter.numpy()), 0
        self._is_fresh = True


class Around(keras.callbacks.Callback):
    """The role of what only calls the hooks of another `callback`."""

    callback: keras.callbacks.Callback


class Exporter(SteppedCallback):
    """The role of what publishes versions of the student.

    Others ask it for `every_steps`, `offset_steps`, `exports_averages`,
    `group`, `exchange`, `counts` and the step `published` last (None before),
    and to publish this step by `ensure_published`. `find_place` settles `group`
    and `exchange`.
    """


class Loader(SteppedCallback):
    """The role of what brings news of teachers between steps."""


class BurnIn(SteppedCallback):
    """The role of what decides when a student begins to learn from teachers.

    Others ask it for `end`, the first step at which it does: a large number
    until that is known, and alike on all workers.
    """

    end = 0


class Mixer(SteppedCallback):
    """The role of what mixes the groups' versions of one step.

    Others ask it for `totals` and `waits`, and whether it mixes what the
    `Exporter` publishes.
    """

    mixes_versions = True


def first(
    callbacks: Iterable[keras.callbacks.Callback], kind: type[Role]
) -> Role | None:
    """Returns the first callback of a kind, if there is one."""
    return next((c for c in callbacks if isinstance(c, kind)), None)


def introduce(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Lets the callbacks of a `fit` find each other."""
    for each in callbacks:
        if isinstance(each, SteppedCallback):
            each.meet(callbacks)


HIDDEN = "_tfdistill/"
# Number of examples in the step's batch.
EXAMPLES = "_examples"
# What is logged of a student's loss besides `loss` itself.
PARTS = ("task_loss", "distillation_loss")


def hidden(name: str, values: Sequence[tf.Tensor]) -> Logs:
    """Returns logs that `fit` does not show, one for each of some tensors.

    Callbacks read them by `LastExecution.detail(name)`.
    """
    return {
        f"{HIDDEN}{name}/{index:04d}": value
        for index, value in enumerate(values)
    }


def flat(logs: Logs) -> Logs:
    """Logs as Keras shows them: a metric may have results by name."""
    found: Logs = {}
    for key, value in logs.items():
        found.update(flat(value) if isinstance(value, dict) else {key: value})
    return found


class LastExecution:
    """What the last execution reported besides the logs that `fit` shows."""

    def __init__(self) -> None:
        # A float scalar; None if no step has reported any.
        self.examples: Any = None
        # Numbers that `fit` shows beside what steps log.
        self.also: dict[str, float] = {}
        self._details: dict[str, list[Any]] = {}

    def detail(self, name: str) -> list[Any] | None:
        """Returns what the last step reported by `hidden`, in order.

        Reading values waits for the device. None if the step reported nothing
        of this name.
        """
        return self._details.get(name)

    def taken_from(self, logs: Logs, *, num_steps: int = 1) -> Logs:
        """Keeps the details of an execution's last step; returns the rest."""
        shown = {k: v for k, v in logs.items() if not k.startswith(HIDDEN)}
        self._details = {}
        for key in sorted(logs.keys() - shown.keys()):
            name = key.split("/")[1]
            self._details.setdefault(name, []).append(logs[key])
        if EXAMPLES in shown:
            self.examples = shown.pop(EXAMPLES) * num_steps
        return {**shown, **self.also}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPoint:
    """Where a training stands between two steps, with none in flight."""

    step: int
    epoch: int
    batch: int  # Steps of this epoch done.
    # Under parameter servers, the sums of its metrics so far; otherwise, how
    # far the data were read.
    metric_sums: tuple[float, ...] = ()
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
