"""BatchScaler: batches as large as a group is fast; all update alike."""

import logging
import math
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import tfdistill
from tfdistill.cluster import replicas
from tfdistill.cluster import strategy as strategy_lib
from tfdistill.training import steps

_log = logging.getLogger(__name__)
# In a manifest's `extras`: examples a second that its group trains on, without
# waits for others.
SPEED_FIELD = "examples_per_second"
# A size stays as it is unless it is off by this share, and by this part of the
# unit it is rounded to: noise must not move it to and fro.
_TOLERANCE = 0.05
_TOLERANCE_UNITS = 0.75
# The largest factor of one change, and its inverse.
_MOST_CHANGE = 1.5
# The group's speed is a running mean, of which each block makes up a quarter.
_WEIGHT_OF_LAST = 0.25
# Between two looks at the peers, and the longest wait for the last one.
_LOOK_SECS, _LAST_LOOK_SECS = 0.1, 30.0
# A peer that published nothing for so many blocks sets no pace.
_SILENT_BLOCKS = 4


def next_size(
    size: int,
    speeds: Sequence[float],
    *,
    start: int,
    multiple_of: int = 1,
) -> int:
    """Returns the batch size at which a group updates as often as its peers.

    All groups together take `start` x (number of groups) examples in a step;
    this group's share of them is its share of the sum of all speeds. If a step
    also has a fixed cost, speeds change with the sizes, and the sizes settle
    after a few changes.

    Args:
        size: The current batch size.
        speeds: Examples a second of this group, then of each peer.
        start: The size that all groups began with. Sizes are from a quarter of
            it to four times as many.
        multiple_of: What a size must be a multiple of.

    Example:
        >>> next_size(64, [100.0, 200.0], start=64)
        43
        >>> next_size(64, [200.0, 100.0], start=64)
        85
        >>> next_size(43, [100.0, 205.0], start=64)
        43
    """
    least, most = multiple_of * -(-start // (4 * multiple_of)), 4 * start
    target = start * len(speeds) * speeds[0] / sum(speeds)
    target = min(max(target, size / _MOST_CHANGE), size * _MOST_CHANGE)
    target = min(max(target, least), most)
    if abs(target - size) <= max(
        _TOLERANCE * size, _TOLERANCE_UNITS * multiple_of
    ):
        return size
    rounded = round(target / multiple_of) * multiple_of
    return int(min(max(rounded, least), most))


@keras.saving.register_keras_serializable(package="tfdistill.contrib")
class ScaledRate(keras.optimizers.schedules.LearningRateSchedule):
    """A rate times a factor; see `BatchScaler.scaled`."""

    def __init__(
        self,
        rate: float | keras.optimizers.schedules.LearningRateSchedule,
        factor: tf.Variable | None = None,
    ) -> None:
        """Takes both; a saved one has lost its factor."""
        self._rate, self._factor = rate, factor

    def __call__(self, step: tf.Tensor | int) -> Any:
        """Returns the rate of a step."""
        rate = self._rate(step) if callable(self._rate) else self._rate
        return rate if self._factor is None else rate * self._factor

    def get_config(self) -> dict[str, Any]:
        """Returns the rate's own configuration."""
        return {"rate": keras.saving.serialize_keras_object(self._rate)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ScaledRate":
        """Makes it from what `get_config` returned."""
        return cls(keras.saving.deserialize_keras_object(config["rate"]))


class _Sizes:
    """The sizes of blocks of batches, which pipelines read as well.

    They are decided a block ahead of the training and never changed, so that
    all workers, and a resumed training, cut the same batches.
    """

    def __init__(self, first: int, block: int) -> None:
        self.block = block
        self.decided = [first, first]
        with tf.device("CPU:0"):
            # The same, for pipelines.
            self._variable = tf.Variable(
                self.decided, shape=tf.TensorShape([None]), dtype=tf.int64
            )

    def decide(self, sizes: list[int]) -> None:
        """Sets the sizes of all blocks, from the first on."""
        self.decided = sizes
        self._variable.assign(sizes)

    def of_batch(self, number: int) -> int:
        """The size of a batch; the last one's of those beyond."""
        return self.decided[min(number // self.block, len(self.decided) - 1)]

    def in_pipeline(self, number: tf.Tensor) -> tf.Tensor:
        """The size of a batch, of which a block must have been decided."""
        sizes = tf.convert_to_tensor(self._variable)
        block = number // self.block
        is_decided = tf.debugging.assert_less(
            block,
            tf.size(sizes, tf.int64),
            message=(
                "Batches must be read less than `every_steps` of the "
                f"BatchScaler ahead of the training, which is {self.block}. "
                "Prefetch fewer batches, or increase `every_steps`."
            ),
        )
        with tf.control_dependencies([is_decided]):
            return tf.gather(sizes, block)


class BatchScaler(steps.SteppedCallback):
    """Adapts this group's batch size until all groups update equally often.

    Each group looks at its peers' versions, whose manifests say how many
    examples a second a group trains on, without waits for others. It takes
    larger batches if it is faster than the mean of all groups, smaller ones if
    it is slower; the examples of all groups together stay about the same. Batch
    size scaling in Adaptive SGD (Ma et al. 2021, arXiv:2110.07029) has the same
    aim, but one scheduler counts all updates; here every group decides for
    itself. The learning rate follows the batch size. A peer that has published
    nothing for four blocks is left out.

    Every `every_steps` steps, the group's workers agree on the size of a block
    of as many batches, which begins `every_steps` later: by then no pipeline
    has read so far. All workers change at the same step, no example is lost,
    and nothing is traced again. A `callbacks.Backup` keeps the sizes, so that a
    resumed training cuts the same batches.

    Example:
        ```python
        scaler = contrib.BatchScaler(exchange, batch_size=64, every_steps=100)
        model.compile(keras.optimizers.SGD(scaler.scaled(0.1)), "mse")
        data = scaler.batched(examples.shuffle(10_000, seed=1).repeat())
        model.fit(data, steps_per_epoch=1000, callbacks=[exporter, scaler])
        ```
    """

    def __init__(
        self,
        exchange: tfdistill.Exchange,
        *,
        batch_size: int,
        every_steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads nothing yet.

        Args:
            exchange: Where the groups publish, each with a `StudentExporter`.
            batch_size: Examples of the first steps, of the whole group; >= 1.
                The same in all groups. Sizes are from a quarter of it to four
                times as many.
            every_steps: Steps between two decisions, and from one to its
                effect; >= 1, and more than any pipeline reads ahead. Give it
                several times the exporters' interval.
            clock: Seconds of a clock that never goes backwards.

        Raises:
            ValueError: If an argument is not as above.
        """
        super().__init__()
        if not isinstance(exchange, tfdistill.Exchange):
            raise ValueError(
                "`exchange` must be a tfdistill.Exchange; received "
                f"{exchange!r}. Pass tfdistill.Exchange(directory)."
            )
        if tf.distribute.has_strategy():
            raise ValueError(
                "A tfdistill.contrib.BatchScaler must be made outside of "
                "`strategy.scope()`: pipelines read its sizes; received a call "
                "in the scope of "
                f"{type(tf.distribute.get_strategy()).__name__}."
            )
        block = steps.EverySteps(every_steps).every_steps
        if not batch_size >= 1:
            raise ValueError(
                f"`batch_size` must be >= 1; received {batch_size}."
            )
        self.exchange = exchange
        self._clock = clock
        self._first_size = batch_size
        self._sizes = _Sizes(batch_size, block)
        with tf.device("CPU:0"):
            self._factor = tf.Variable(1.0, trainable=False)
        self._is_scaled = False
        self._multiple = 1
        self._start = 0  # The step at which batch 0 was read.
        self._speed: float | None = None
        # After how many steps, and when, the speed was measured last.
        self._measured: tuple[int, float] | None = None
        # For each peer: its newest version's step and speed, and this group's
        # step when that version was first seen.
        self._news: dict[int, tuple[int, float, int]] = {}
        self._mixers: list[Any] = []
        self._looking: threading.Thread | None = None
        self._is_over = threading.Event()

    @property
    def batch_size(self) -> int:
        """Examples of the group's next step."""
        return self._sizes.of_batch(max(self.step - self._start, 0))

    def batched(
        self,
        dataset: tf.data.Dataset,
        worker: tf.distribute.InputContext | None = None,
    ) -> tf.data.Dataset:
        """Returns batches of the size that the group has at each step.

        In place of `dataset.batch`, at the end of a pipeline. For several
        replicas, pass `fit` a function of a `tf.distribute.InputContext` that
        calls `dataset.shard` for its input pipeline and then this, with it.

        Args:
            dataset: Examples, not batched, that never end.
            worker: Whose examples these are. Default None: one process, and one
                device, read all of them.

        Returns:
            The batches. More than `every_steps` of them must not be prefetched.

        Raises:
            ValueError: If the data end, or the replicas cannot share the sizes.
        """
        if tf.get_static_value(dataset.cardinality()) not in (
            tf.data.INFINITE_CARDINALITY,
            tf.data.UNKNOWN_CARDINALITY,
            None,
        ):
            raise ValueError(
                "`dataset` must be endless, so that its batches can be "
                f"numbered; received {dataset.cardinality()} elements. Call "
                "repeat() first, and pass steps_per_epoch to `fit`."
            )
        num_shares = worker.num_replicas_in_sync if worker else 1
        # All of a worker's replicas read from the same pipeline, in turn.
        num_local = num_shares // (worker.num_input_pipelines if worker else 1)
        if self._first_size % num_shares:
            raise ValueError(
                "`batch_size` must be a multiple of the number of replicas; "
                f"received {self._first_size} for {num_shares}."
            )
        self._multiple = num_shares

        def size(number: tf.Tensor) -> tf.Tensor:
            return self._sizes.in_pipeline(number // num_local) // num_shares

        def cut(state: tuple[Any, ...], element: Any) -> Any:
            number, left = state
            left = tf.cond(left > 0, lambda: left, lambda: size(number))
            is_last = tf.cast(tf.equal(left, 1), tf.int64)
            return (number + is_last, left - 1), (number, element)

        zero = tf.zeros((), tf.int64)
        windows = (
            dataset.scan((zero, zero), cut)
            .group_by_window(
                key_func=lambda number, _: number,
                reduce_func=lambda _, window: window.batch(
                    4 * self._first_size
                ),
                window_size_func=size,
            )
            .map(lambda _, batch: batch)
        )
        # TensorFlow would prefetch at the end, as many as it likes.
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        return windows.with_options(options)

    def scaled(
        self, rate: float | keras.optimizers.schedules.LearningRateSchedule
    ) -> keras.optimizers.schedules.LearningRateSchedule:
        """Returns a learning rate that follows the batch size, in proportion.

        Call it outside of `strategy.scope()`.

        Args:
            rate: A number or a schedule, for the size at the beginning.

        Example:
            ```python
            rate = keras.optimizers.schedules.CosineDecay(0.1, 10_000)
            model.compile(keras.optimizers.SGD(scaler.scaled(rate)), "mse")
            ```
        """
        self._is_scaled = True
        return ScaledRate(rate, self._factor)

    # ---- Keras' hooks ----

    def on_train_begin(self, logs: steps.Logs | None = None) -> None:
        """Starts to look at the peers, on the chief."""
        super().on_train_begin(logs)
        model = self.codistilled
        strategy = model.distribute_strategy
        if replicas.on_servers(strategy):
            raise ValueError(
                "A BatchScaler must not be used with parameter servers, whose "
                "workers don't share a step; received "
                f"{type(strategy).__name__}. Leave it out."
            )
        if not self._is_scaled:
            raise ValueError(
                "The learning rate must follow the batch size, but the "
                "optimizer's doesn't. Pass scaler.scaled(rate) to the "
                "optimizer."
            )
        size = self.batch_size if self.step else self._first_size
        # A change that is on its way from an earlier `fit` is none of this one.
        self._sizes.decide(2 * [size])
        self._start = self.step
        self._blocks = steps.EverySteps(
            self._sizes.block, offset_steps=self._start
        )
        self._speed = self._measured = None
        self._set_factor(self._sizes.of_batch(0))
        # Only the chief's sizes count.
        is_chief = replicas.is_chief(strategy)
        self._peers = (
            strategy_lib.cluster_of(strategy).peers if is_chief else ()
        )
        self._news.clear()
        self._values = replicas.WorkerValues(strategy)
        self._is_over.clear()
        self._looking = threading.Thread(
            target=self._follow, name="tfdistill-batch-scaler", daemon=True
        )
        self._looking.start()

    def on_train_batch_end(
        self, batch: int, logs: steps.Logs | None = None
    ) -> None:
        """Decides on the next block, and moves the learning rate with it."""
        super().on_train_batch_end(batch, logs)
        done = self.step - self._start
        # The first step is traced.
        self._measured = self._measured or (done, self._worked_secs)
        # The last execution of an epoch may have passed the step in question.
        decided, block = self._sizes.decided, self._sizes.block
        while len(decided) < done // block + 2:
            decided = [*decided, self._agreed(done)]
            self._sizes.decide(decided)
        self._set_factor(self._sizes.of_batch(done))

    def on_train_end(self, logs: steps.Logs | None = None) -> None:
        """Ends the thread."""
        if self._looking is not None:
            self._is_over.set()
            self._looking.join(_LAST_LOOK_SECS)
            self._looking = None

    def _agreed(self, done: int) -> int:
        """The size of the block after the next; all workers get the chief's."""
        newest, now = self._sizes.decided[-1], self._sizes.of_batch(done)
        size = newest
        # A change that is on its way shows what it does first.
        if newest == now:
            speeds = self._speeds(done)
            if len(speeds) > 1:
                size = next_size(
                    now,
                    speeds,
                    start=self._first_size,
                    multiple_of=self._multiple,
                )
        size = int(self._values.chiefs(size))
        if size != newest:
            _log.info("Batches of %d examples instead of %d.", size, newest)
        return size

    def _speeds(self, done: int) -> list[float]:
        """Returns the speeds of this group and its peers, as far as known."""
        before, then = self._measured or (done, 0.0)
        self._measured = done, self._worked_secs
        secs = self._measured[1] - then
        if done <= before or secs <= 0:
            return []
        speed = sum(map(self._sizes.of_batch, range(before, done))) / secs
        if self._speed is not None:
            speed = self._speed + _WEIGHT_OF_LAST * (speed - self._speed)
        self._speed = speed
        oldest = self.step - _SILENT_BLOCKS * self._sizes.block
        news = list(self._news.values())
        return [speed, *(theirs for _, theirs, seen in news if seen >= oldest)]

    @property
    def _worked_secs(self) -> float:
        """What the clock shows, without waits of mixers."""
        return self._clock() - sum(m.waits.total_secs for m in self._mixers)

    def manifest_extras(self) -> dict[str, Any]:
        """Returns this group's speed, for peers that keep pace with it."""
        return {} if self._speed is None else {SPEED_FIELD: self._speed}

    def meet(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Finds the callbacks that may wait between steps."""
        self._mixers = [c for c in callbacks if isinstance(c, steps.Mixer)]

    def _set_factor(self, size: int) -> None:
        self._factor.assign(size / self._first_size)

    def _follow(self) -> None:
        """Looks, until the training is over."""
        while not self._is_over.wait(_LOOK_SECS):
            try:
                self._look()
            except Exception:
                _log.exception("Looking for versions failed")

    def _look(self) -> None:
        """Notes the peers' versions as they arrive; errors are tried again."""
        for group in self._peers:
            try:
                version = self.exchange.latest(group)
            except OSError as error:
                _log.debug("Cannot look for group %d: %s", group, error)
                continue
            step, *_ = self._news.get(group, (-1,))
            if version is None or version.step == step:
                continue
            speed = version.manifest.extras.get(SPEED_FIELD)
            if isinstance(speed, int | float) and 0 < speed < math.inf:
                self._news[group] = version.step, speed, self.step

    # ---- kept by `tfdistill.callbacks.Backup` ----

    def state(self) -> dict[str, Any]:
        """Returns what a resumed training continues with, as JSON has it."""
        return {"sizes": self._sizes.decided, "start": self._start}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned."""
        self._sizes.decide(state["sizes"])
        self._start = state["start"]
        self._set_factor(self.batch_size)
