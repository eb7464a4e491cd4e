"""Bytes of deltas between versions, against whole ones, and of fewer bits.

Trains a recipe in one process and publishes a version at its interval: once
more than a key frame and all of its deltas. Each delta is read back, and must
be what was written, to the bit. What rounding costs is measured on the held-out
data: the last version's KL divergence from the student, and both log losses.
TFDISTILL_DATA names the data. With `--table_rows`, no recipe: how long a table
of so many rows takes to publish, whole and as a delta.
"""

import functools
import os
import tempfile
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from benchmarks import measure
from launch import recipes
from tfdistill import contrib
from tfdistill.exchange import deltas
from tfdistill.exports import frozen
from tfdistill.exports import key_frames
from tfdistill.exports import quantized
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.system import programs

# Of a whole version's bytes to those of an exact delta, at least.
_TARGET = 3.5
# Of a whole version's seconds to those of a delta, of a table, at least.
_TABLE_TARGET = 5.0
# The table, of which so many rows change between versions: a thousandth of 1e7.
_TABLE_WIDTH, _CHANGED_ROWS = 16, 10_000
# From the student to what is written of it, in nats.
_MOST_KL = 1e-3


class _Versions(keras.callbacks.Callback):
    """Publishes the student and reads what it published."""

    def __init__(
        self, exchange: Any, every_steps: int, dtype: str | None, **kwargs: Any
    ) -> None:
        super().__init__()
        self._dtype = dtype
        self._exchange, self._every = exchange, every_steps
        self._publisher = key_frames.KeyFrames(**kwargs)
        self._is_exact = kwargs.get("choose") is None
        self._writer: Any = None
        self._variables: Any = None
        self.graph: Any = None
        self.held: Any = None
        self._step = 0
        self.sizes: dict[bool, list[int]] = {True: [], False: []}
        self.secs: dict[bool, list[float]] = {True: [], False: []}
        # Of the deltas of key frames.
        self.frames_deltas: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Publishes and reads, if a version is due."""
        self._step += 1
        if self._step % self._every:
            return
        if self._writer is None:
            spec = {i.name: i for i in self.model.inputs}
            self.graph = student_graph.StudentGraph(self.model, spec)
            self._variables = saved_model.SavedModelWriter(self.graph).variables
            self._writer = saved_model.SavedModelWriter(
                self.graph, variables_dtype=self._dtype
            )
        writer = self._writer
        snapshot = writer.snapshot()
        start = time.perf_counter()
        version = self._publisher.publish(
            self._exchange,
            writer,
            snapshot,
            whole=False,
            extras={},
            group=0,
            step=self._step,
            variables=writer.variables,
        )
        is_delta = deltas.is_delta(version.manifest)
        self.secs[is_delta].append(time.perf_counter() - start)
        self.sizes[is_delta].append(version.num_bytes)
        written = writer.stored(snapshot)
        if self.held is None:
            self.held = saved_model.joined(written, self._variables)
            return
        if not is_delta:
            # Who has followed so far reads this.
            version = self._exchange.deltas.open(0, self._step)
            self.frames_deltas.append(version.num_bytes)
        with self._exchange.deltas.readable(version) as delta:
            self.held = key_frames.read_delta(
                delta,
                self.held,
                self._variables,
                place=self._exchange.bases,
                namer=frozen.Namer(),
            )
        for key, value in zip(self._variables, self.held, strict=True):
            for name, held in quantized.parts_of(key, value).items():
                is_same = (
                    held.numpy().tobytes() == written[name].numpy().tobytes()
                )
                if self._is_exact and not is_same:
                    raise RuntimeError(f"Version {self._step} is another.")


def _cost(versions: _Versions, dataset: Any) -> dict[str, Any]:
    """Compares what is held with the student, in nats for each example."""
    student = [tf.convert_to_tensor(v.value) for v in versions.graph.variables]
    held = [tf.convert_to_tensor(value) for value in versions.held]
    found = []
    for x, y in dataset:
        logs = [_log_shares(versions.graph(v, x)) for v in (student, held)]
        labels = np.asarray(y).astype("int64").reshape(-1, 1)
        losses = [-np.take_along_axis(log, labels, axis=-1) for log in logs]
        kl = np.sum(np.exp(logs[0]) * (logs[0] - logs[1]), axis=-1)
        found.append([kl, *(loss[:, 0] for loss in losses)])
    kl, own, rounded = (float(column.mean()) for column in np.hstack(found))
    return {"kl": kl, "loss": own, "rounded_loss": rounded}


def _log_shares(logits: Any) -> np.ndarray:
    """Returns log probabilities; one logit is that of the second class."""
    logits = np.asarray(logits, "float64")
    if logits.shape[-1] == 1:
        logits = np.hstack([np.zeros_like(logits), logits])
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def _measure(
    options: Any, choose: Any = None, dtype: str | None = None
) -> dict[str, Any]:
    keras.utils.set_random_seed(0)
    recipe = recipes.get(options.recipe)
    workload = recipe.workload()
    model = workload.model()
    train, held_out = workload.data(
        tfdistill.Cluster(), batch_size=workload.batch_size
    )
    every = options.every_steps or workload.every_steps
    model.compile(workload.optimizer(), workload.loss)
    with tempfile.TemporaryDirectory() as root:
        published = _Versions(
            tfdistill.Exchange(root, key=None),
            every,
            dtype,
            every=options.key_every,
            choose=choose,
        )
        num_versions = options.key_every * options.frames
        model.fit(
            train.repeat(),
            steps_per_epoch=every * num_versions,
            callbacks=[published],
            verbose=0,
        )
    frames, found = (published.sizes[kind] for kind in (False, True))
    full, delta = max(frames), sum(found) / len(found)
    mean = sum(frames + found + published.frames_deltas) / num_versions
    return {
        "every_steps": every,
        "versions": num_versions,
        "full_bytes": full,
        "delta_bytes": round(delta),
        "mean_bytes": round(mean),
        "first_and_last_delta_bytes": [found[0], found[options.key_every - 2]],
        "delta_ratio": round(full / delta, 2),
        "version_ratio": round(full / mean, 2),
        "full_secs": round(min(published.secs[False]), 3),
        "delta_secs": round(min(published.secs[True]), 3),
        **(_cost(published, held_out) if dtype else {}),
    }


def _table(options: Any) -> dict[str, Any]:
    """Publishes a table whole and as a delta, in turn."""
    table = keras.layers.Embedding(options.table_rows, _TABLE_WIDTH)
    ids = keras.Input([1], dtype="int64", name="id")
    model = keras.Model(ids, table(ids))
    graph = student_graph.StudentGraph(model, {"id": ids})
    writer = saved_model.SavedModelWriter(graph)
    found, step = np.random.default_rng(0), 0

    def _publish(
        publisher: key_frames.KeyFrames, exchange: Any, is_delta: bool
    ) -> float:
        nonlocal step
        step += 1
        rows = found.integers(options.table_rows, size=_CHANGED_ROWS)
        new = found.normal(size=[_CHANGED_ROWS, _TABLE_WIDTH])
        table.embeddings.value.scatter_update(tf.IndexedSlices(new, rows))
        snapshot = writer.snapshot()
        start = time.perf_counter()
        version = publisher.publish(
            exchange,
            writer,
            snapshot,
            whole=False,
            extras={},
            group=0,
            step=step,
            variables=writer.variables,
        )
        secs = time.perf_counter() - start
        if deltas.is_delta(version.manifest) != is_delta:
            raise RuntimeError(f"Version {step} is of the other kind.")
        return secs

    with tempfile.TemporaryDirectory() as root:
        sides = {}
        for name, every in {"whole": 1, "delta": 10**9}.items():
            publisher = key_frames.KeyFrames(every, None)
            exchange = tfdistill.Exchange(os.path.join(root, name), key=None)
            _publish(publisher, exchange, False)
            sides[name] = functools.partial(
                _publish, publisher, exchange, every > 1
            )
        secs = measure.interleave(sides, rounds=options.rounds)
    ratio = measure.ratio_of(secs["whole"], secs["delta"])
    return {
        **{name: measure.summary(each) for name, each in secs.items()},
        "bytes": 4 * options.table_rows * _TABLE_WIDTH,
        **measure.judge(ratio["of_medians"], at_least=_TABLE_TARGET),
    }


def run(options: Any, record: dict[str, Any]) -> None:
    """Measures each chooser, or a dtype of versions."""
    if options.table_rows:
        record.update(
            benchmark="deltas", config=vars(options), **_table(options)
        )
        return
    sides: dict[str, dict[str, Any]] = {
        "exact": {},
        "top_of_chunks": {"choose": contrib.TopOfChunks()},
        "local_maximum": {"choose": contrib.LocalMaximum()},
    }
    if options.dtype:
        sides = {"exact": {}, options.dtype: {"dtype": options.dtype}}
    found = {}
    for name, side in sides.items():
        found[name] = _measure(options, **side)
        # Against whole versions of floats.
        ratio = found["exact"]["full_bytes"] / found[name]["mean_bytes"]
        found[name]["ratio"] = round(ratio, 2)
        measure.log(f"{name}: {found[name]}")
    record.update(
        benchmark="deltas",
        config=vars(options),
        **found,
        met=found["exact"]["delta_ratio"] >= _TARGET
        and all(each.get("kl", 0.0) <= _MOST_KL for each in found.values()),
    )


def _add_options(options: programs.Flags) -> None:
    options.add("recipe", "whose student and data", "criteo_small")
    options.add("every_steps", "steps between versions; 0: the recipe's", 0)
    options.add("key_every", "versions for each whole one", 10, quick=3)
    options.add("frames", "whole versions", 2)
    options.add("table_rows", "of a table to publish, in place of a recipe", 0)
    options.add("rounds", "of such a table, each way", 5, quick=1)
    options.add("dtype", "bfloat16, int8 or int4, in place of choosers", "")


PROGRAM = measure.program("deltas", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
