"""Forward passes of a version in LiteRT, as `tfdistill teach --litert` does.

A recipe's student is trained and published. Its version answers batches of
held-out examples on one core, by TensorFlow and by LiteRT, which take turns.
The record has the forwards a second of both, and on the held-out examples the
KL divergence of LiteRT's predictions from TensorFlow's, their churn, and the
log loss of both.
"""

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tfdistill
from benchmarks import measure
from launch import recipes
from tfdistill.serving import server
from tfdistill.system import programs

_TARGET = 1.5
_WAIT_SECS = 60.0


def _published(workload: Any, exchange: tfdistill.Exchange, steps: int) -> Any:
    """Trains the student and publishes it; returns the held-out batches."""
    cluster = tfdistill.Cluster(group=0, num_groups=1, exchange=exchange.root)
    train, held_out = workload.datasets(cluster)
    model = tfdistill.CodistillModel(workload.model())
    loss = workload.loss
    model.compile(
        workload.optimizer(),
        loss if isinstance(loss, keras.losses.Loss) else loss(train),
    )
    exporter = tfdistill.callbacks.StudentExporter(exchange, every_steps=steps)
    model.fit(train, steps_per_epoch=steps, verbose=0, callbacks=[exporter])
    return [(x, np.asarray(y)) for x, y, *_ in held_out]


def _shares(logits: Any) -> np.ndarray:
    """Returns the probabilities of all classes; one logit is of two."""
    logits = np.asarray(logits, "float64")
    if logits.shape[-1] == 1:
        logits = np.concatenate([np.zeros_like(logits), logits], axis=-1)
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


def _quality(
    answers: dict[str, Callable[[Any], Any]], batches: Any
) -> dict[str, float]:
    own, theirs = (
        np.concatenate([_shares(answer(x)[0]) for x, _ in batches])
        for answer in (answers["tensorflow"], answers["litert"])
    )
    labels = np.concatenate([y for _, y in batches]).ravel().astype(int)
    rows = np.arange(len(labels))
    return {
        "kl_nats": float((own * np.log(own / theirs)).sum(axis=-1).mean()),
        "churn": float(np.abs(own - theirs).max(axis=-1).mean()),
        "log_loss": float(-np.log(own[rows, labels]).mean()),
        "log_loss_litert": float(-np.log(theirs[rows, labels]).mean()),
    }


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_SECS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("No version was served; its log says why.")
        time.sleep(0.05)


def _measured(name: str, options: programs.Options) -> dict[str, Any]:
    workload = recipes.get(name).workload()
    with tempfile.TemporaryDirectory(prefix="tfdistill-bench-") as root:
        exchange = tfdistill.Exchange(root)
        batches = _published(
            workload, exchange, options.steps or workload.num_steps
        )
        followed = server.Followed(exchange, 0, use_litert=True)
        followed.start()
        try:
            _wait(lambda: followed.version >= 0)
        finally:
            followed.stop()
        answers: dict[str, Any] = {
            "tensorflow": followed.function,
            "litert": followed.answering,
        }

        def side(answer: Callable[[Any], Any]) -> Callable[[], float]:
            def turn() -> None:
                for _ in range(options.forwards):
                    [np.asarray(y) for y in answer(batches[0][0])]

            return lambda: measure.timed(turn) / options.forwards

        sides = {name: side(answer) for name, answer in answers.items()}
        secs = measure.interleave(sides, rounds=options.rounds)
        ratio = measure.ratio_of(secs["tensorflow"], secs["litert"])
        return {
            **measure.judge(ratio["of_medians"], at_least=_TARGET),
            "rows": len(batches[0][1]),
            "forward_secs": {k: measure.summary(v) for k, v in secs.items()},
            **_quality(answers, batches),
        }


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Measures every recipe on one core, and fills the record."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found = {}
    for name in options.recipes:
        found[name] = _measured(name, options)
        measure.log(f"{name}: {found[name]}")
    record.update(
        benchmark="litert",
        config=vars(options),
        recipes=found,
        met=all(each["met"] for each in found.values()),
    )
    record["machine"] = measure.machine()


def _add_options(options: programs.Flags) -> None:
    options.add("recipes", "what answers", ["criteo_small", "digits"])
    options.add("steps", "of training; default the recipe's", 0, quick=20)
    options.add("forwards", "in a turn", 50, quick=2)
    options.add("rounds", "turns of each side", 15, quick=2)


PROGRAM = measure.program("litert", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
