"""What a training took, and predictions that `fit` writes at its end."""

import json
import pathlib
import re
import time
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.cluster import method
from tfdistill.cluster import replicas
from tfdistill.cluster import strategy as strategy_lib
from tfdistill.held_out import objectives
from tfdistill.held_out import predictions
from tfdistill.system import fits
from tfdistill.system import keras_internals
from tfdistill.system import run_files
from tfdistill.training import steps
from tfdistill.training import wait_for_groups

_BATCH_SIZE = 256


class Measuring(steps.SteppedCallback):
    """Measures a training, without tracing and without evaluations."""

    def meet(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Finds the callbacks whose doing it measures."""
        self._exporter: Any = steps.first(callbacks, steps.Exporter)
        self._mixer = steps.first(callbacks, steps.Mixer)
        kind = wait_for_groups.WaitForGroups
        self._waits = [c for c in callbacks if isinstance(c, kind)]

    def on_train_begin(self, logs: steps.Logs | None = None) -> None:
        """Starts the clocks."""
        super().on_train_begin(logs)
        self._start = time.perf_counter(), time.process_time()
        # Steps and seconds of each epoch, without its evaluation.
        self._epochs: list[tuple[int, float]] = []
        self._epoch: tuple[int, float] | None = None

    def on_epoch_begin(
        self, epoch: int, logs: steps.Logs | None = None
    ) -> None:
        """Notes when an epoch begins."""
        super().on_epoch_begin(epoch, logs)
        self._epoch = self.step, time.perf_counter()

    def on_test_begin(self, logs: steps.Logs | None = None) -> None:
        """Notes when an epoch ends: its evaluation comes next."""
        if self._epoch is not None:
            step, start = self._epoch
            spent = time.perf_counter() - start
            self._epochs.append((self.step - step, spent))
            self._epoch = None

    def on_epoch_end(self, epoch: int, logs: steps.Logs | None = None) -> None:
        """Notes when an epoch without an evaluation ends."""
        self.on_test_begin()

    def on_train_end(self, logs: steps.Logs | None = None) -> None:
        """Stops the clocks."""
        self.read_step()
        now = time.perf_counter(), time.process_time()
        self._spent = np.subtract(now, self._start).tolist()

    def measured(self) -> dict[str, Any]:
        """Returns the facts of a training that has ended, for its results."""
        exporter, mixer = self._exporter, self._mixer
        examples = exporter.counts["examples"] if exporter else 0.0
        epochs = self._epochs[1:] or self._epochs  # The first one traces.
        num_steps = sum(steps for steps, _ in epochs)
        seconds = sum(secs for _, secs in epochs)
        per_step = examples / self.step if self.step else 0.0
        variables = self.model.student.trainable_variables
        exports = {}
        if exporter:
            exports = {**exporter.totals, "every_steps": exporter.every_steps}
        return {
            "seconds": self._spent[0],
            "process_seconds": self._spent[1],
            "steps": self.step,
            "examples": int(examples),
            "examples_per_second": per_step * num_steps / max(seconds, 1e-9),
            "waited_seconds": sum(each.waited_secs for each in self._waits),
            "parameter_bytes": sum(
                int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size
                for v in variables
            ),
            "exports": exports,
            "teachers": self.model.teachers.status(),
            **({"mixing": mixer.totals} if mixer else {}),
        }


class HeldOutPredictions(Measuring):
    """Writes the student's predictions on held-out data at the end of `fit`.

    The chief writes `held_out/NAME.npz` in its group's directory, or in the
    current one outside of a launched run: the probabilities, or of a
    regression the numbers, and the labels.
    Beside it, `held_out/NAME.json` has what the training took. They are what
    `tfdistill compare my_train.py --held-out=NAME` compares. A second `fit` of
    the process writes in `held_out/fit_2`, and the last one is compared.

    The compiled loss says what outputs are: it must be the only one, and a
    categorical or binary cross-entropy, of logits or of probabilities, or one
    of Keras' losses of regressions, such as "mse". Rows that don't count for
    it, by a weight or a mask of 0 or as `ignore_class`, are left out.

    Example:
        >>> callback = HeldOutPredictions("last_day", (np.eye(3), np.arange(3)))
        >>> callback.name
        'last_day'
    """

    def __init__(self, name: str, data: Any) -> None:
        """Predicts nothing yet.

        Args:
            name: What the data are called: letters, digits, `_` and `-`.
            data: Examples that no group trains on: arrays `(x, y)` or
                `(x, y, sample_weight)`, or a `tf.data.Dataset` of batches of
                them. The same examples in the same order each time.

        Raises:
            ValueError: An argument is not as above.
        """
        super().__init__()
        if not re.fullmatch(r"[\w-]+", name):
            raise ValueError(
                "`name` must have letters, digits, `_` and `-` only; received "
                f"{name!r}."
            )
        is_tuple = isinstance(data, tuple | list) and len(data) in (2, 3)
        if not is_tuple and not isinstance(data, tf.data.Dataset):
            raise ValueError(
                "`data` must be arrays (x, y) or a tf.data.Dataset of batches "
                f"(x, y); received {type(data).__name__}."
            )
        self.name, self._data = name, data
        method.predicted.add(name)

    def on_train_begin(self, logs: steps.Logs | None = None) -> None:
        """Checks what would fail after the training."""
        super().on_train_begin(logs)
        self._first_loss: float | None = None
        _, self._path, _ = objectives.compiled(self.codistilled.loss)
        self._check_obeyed()
        self._labels = self._read(1)
        objectives.check_labels(self.codistilled.loss, self._labels)

    def on_train_batch_end(
        self, batch: int, logs: steps.Logs | None = None
    ) -> None:
        """Notes an early loss, which another seed would not give."""
        super().on_train_batch_end(batch, logs)
        # The first may be one of weights that are 0, whatever the seed.
        if self._first_loss is None and self.step > 1 and logs:
            self._first_loss = float(logs["loss"])

    def on_train_end(self, logs: steps.Logs | None = None) -> None:
        """Predicts on all workers, and writes on the chief."""
        super().on_train_end(logs)
        strategy = self.codistilled.distribute_strategy
        outputs = self._predict()
        if not replicas.is_chief(strategy):
            return
        predicted = objectives.predictions_of(
            self.model.loss,
            self._part(outputs),
            self._labels,
            replicas.outside_scopes(self._weights),
        )
        cluster = strategy_lib.cluster_of(strategy)
        place = f"{cluster.group_dir or '.'}/{predictions.DIRECTORY}"
        number = fits.number(f"{place}/{self.name}")
        directory = pathlib.Path(fits.below(place, number))
        if not self._epochs and (directory / f"{self.name}.json").exists():
            return  # It was done before a restart, which trained nothing.
        predictions.save(directory / f"{self.name}.npz", predicted)
        text = json.dumps(
            {
                "obeyed": _obeyed(cluster.method),
                "first_loss": self._first_loss,
                **self.measured(),
            }
        )
        path = directory / f"{self.name}.json"
        run_files.write(path, [f"{text}\n".encode()])
        if cluster.method is not None:
            told = self._told(_obeyed(cluster.method))
            print(f"tfdistill: the comparison set: {told}", flush=True)

    def _check_obeyed(self) -> None:
        """Refuses a training that is not what the comparison is about."""
        strategy = self.codistilled.distribute_strategy
        cluster, exporter = strategy_lib.cluster_of(strategy), self._exporter
        chosen = cluster.method
        if chosen is None or chosen.held_out != self.name:
            return
        why = _disobeyed(
            chosen,
            is_seeded=strategy_lib.is_made(strategy),
            teachers=self.codistilled.teachers.names,
            every_steps=exporter and exporter.every_steps,
            mixes=self._mixer is not None,
            num_groups=cluster.num_groups,
        )
        if why:
            raise ValueError(f"{chosen.name} was not applied: {why}")

    def _predict(self) -> Any:
        """Returns outputs, in the order of the labels."""
        if not isinstance(self._data, tf.data.Dataset):
            x = self._data[0]
            return self.model.predict(x, batch_size=_BATCH_SIZE, verbose=0)
        outputs = self.model.predict(self._data, verbose=0)
        if not np.array_equal(self._labels, self._read(1)):
            raise ValueError(
                f"The held-out data {self.name!r} must come in the same order "
                "each time; a second pass had a different order. Don't "
                "shuffle() them."
            )
        return outputs

    def _part(self, values: object) -> Any:
        """Returns the output, or its labels, that the loss compares."""
        names = steps.output_names(self.codistilled.student)
        return objectives.part(values, self._path, names)

    def _batches(self) -> Iterator[Any]:
        """Yields batches of the data, in their order."""
        if isinstance(self._data, tf.data.Dataset):
            yield from self._data
            return
        for start in range(
            0, len(keras.tree.flatten(self._data)[0]), _BATCH_SIZE
        ):
            rows = slice(start, start + _BATCH_SIZE)
            yield keras.tree.map_structure(
                lambda array, rows=rows: np.asarray(array[rows]), self._data
            )

    def _read(self, index: int) -> Any:
        """Returns all labels or sample weights."""
        return np.concatenate(
            [np.asarray(self._part(each[index])) for each in self._batches()]
        )

    def _weights(self) -> list[Any]:
        """Returns sample weights and masks, as far as there are any."""
        found = []
        if len(next(self._batches(), ())) > 2:
            found.append(self._read(2))
        student = self.codistilled.student
        if keras_internals.may_mask(student):
            masks = [
                keras_internals.mask_of(self._part(student(x, training=False)))
                for x, *_ in self._batches()
            ]
            if None not in masks:
                found.append(np.concatenate(list(map(np.asarray, masks))))
        return found

    def _told(self, obeyed: Mapping[str, Any]) -> str:
        names = self.model.teachers.names
        parts = [f"{key} {value}" for key, value in obeyed.items()]
        return ", ".join([*parts, f"teachers {', '.join(names) or 'none'}"])


def _obeyed(chosen: method.Method | None) -> dict[str, Any]:
    """Returns what a comparison decided of this training."""
    if chosen is None:
        return {}
    found = {
        "method": chosen.name,
        "seed": chosen.seed,
        "weight_decay": chosen.weight_decay,
        "share": chosen.share if method.shares else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _disobeyed(
    chosen: method.Method,
    *,
    is_seeded: bool,
    teachers: Sequence[str],
    every_steps: int | None,
    mixes: bool,
    num_groups: int,
) -> str:
    """Returns what a training does not show of a method, and a remedy.

    Empty if it shows all. `every_steps` is None without an exporter.
    """
    peers = [each for each in teachers if each != method.OWN_PAST]
    taught = {
        method.NOBODY: not teachers,
        method.OWN_PAST: list(teachers) == [method.OWN_PAST],
        method.PEERS: bool(peers) and len(peers) == len(teachers),
    }
    taught[method.PREDICTIONS] = taught[method.PEERS]
    if not is_seeded:
        return "make_strategy() was not called, which sets the seed."
    if not taught[chosen.teachers]:
        return (
            f"the teachers were {', '.join(teachers) or 'none'}. Make the "
            "tfdistill.CodistillModel after make_strategy()."
        )
    if num_groups > 1 and chosen.share not in method.shares:
        return (
            "the script chooses the groups' data itself. Pass the data through "
            "tfdistill.data.group_shard."
        )
    if every_steps is None or (chosen.every_steps or every_steps) != (
        every_steps
    ):
        return (
            "no StudentExporter was in `fit`. Add "
            "tfdistill.callbacks.defaults(every_steps=...)."
        )
    if mixes != chosen.mixes:
        return (
            "a WeightMixer is missing, or the script adds its own. Leave it to "
            "tfdistill.callbacks.defaults(every_steps=...)."
        )
    return ""
