"""How often the gate is wrong: 100 good candidates and 100 bad ones.

Each line is a model of a generated click log, trained on its first days and
then retrained every day: from the promoted weights, with the promoted version
as a teacher, on 80% of the day's rows. Honest retrains are promoted. On later
days candidates are made, good and bad, and judged by the gate on the other 20%
of the rows, which are always right. What is broken is the rows trained on, or
the training. The true click probabilities tell how much worse a candidate is.
"""

import dataclasses
import time
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks import measure
from models import click_log
from models import clicks
from tfdistill.held_out import predictions
from tfdistill.line import data_summary
from tfdistill.line import gate
from tfdistill.system import programs

KINDS = (
    *("swapped_labels", "drifted_feature", "stale_table", "shuffled_column"),
    *("broken_normalization", "half_the_data", "overfitted", "calibration"),
    *("bad_slice", "wrong_vocabulary"),
)
_BATCH = 512
_FIRST_DAYS, _FIRST_STEPS = 6, 440
# Days of honest retrains before the first candidate that is judged.
_WARM_UP_DAYS = 4
_SITE_GROUPS = 8


class _Trainer:
    """One model and one traced step for all trainings."""

    def __init__(self) -> None:
        self.model = clicks.build_model()
        self._optimizer = keras.optimizers.Adam(1e-3)
        self._optimizer.build(self.model.trainable_variables)

    @tf.function(reduce_retracing=True)
    def _step(self, ids: Any, numbers: Any, y: Any, soft: Any, w: Any) -> None:
        with tf.GradientTape() as tape:
            logits = self.model({"ids": ids, "numbers": numbers}, training=True)
            entropy = tf.nn.sigmoid_cross_entropy_with_logits
            loss = tf.reduce_mean(
                entropy(y, logits) + w * entropy(soft, logits)
            )
        variables = self.model.trainable_variables
        self._optimizer.apply(tape.gradient(loss, variables), variables)

    @tf.function(reduce_retracing=True)
    def _predict(self, ids: Any, numbers: Any) -> Any:
        return tf.sigmoid(self.model({"ids": ids, "numbers": numbers}))

    def predict(self, weights: Any, inputs: Mapping[str, Any]) -> np.ndarray:
        """Returns probabilities, float32 `[rows, 1]`."""
        self.model.set_weights(weights)
        return self._predict(
            *(tf.constant(inputs[name]) for name in ("ids", "numbers"))
        ).numpy()

    def new(self, seed: int) -> list[np.ndarray]:
        """Returns new initial weights."""
        keras.utils.set_random_seed(seed)
        return clicks.build_model().get_weights()

    def train(
        self,
        starts: Sequence[Any],
        log: click_log.Log,
        *,
        steps: int,
        rate: float,
        teacher: np.ndarray | None = None,
        weight: float = 0.0,
        seed: int = 0,
    ) -> list[list[np.ndarray]]:
        """Returns the weights of one student, or of two that teach each other.

        Two learn from the mean of the promoted version and the other one, by
        turns of eight steps.
        """
        orders = [
            _order(len(log.labels), steps, seed=seed + 7919 * student)
            for student in range(len(starts))
        ]
        kept = [list(start) for start in starts]
        slots: list[Any] = [None] * len(starts)
        soft = log.labels if teacher is None else teacher
        turn = 8 if len(starts) > 1 else steps
        for first in range(0, steps, turn):
            others = [
                self.predict(kept[1 - student], log.inputs)
                for student in range(len(starts))
                if len(starts) > 1
            ]
            for student, order in enumerate(orders):
                self.model.set_weights(kept[student])
                for place, value in enumerate(self._optimizer.variables):
                    old = slots[student]
                    value.assign(
                        tf.zeros_like(value) if old is None else old[place]
                    )
                targets = (soft + others[student]) / 2 if others else soft
                for step in range(first, min(first + turn, steps)):
                    cosine = 0.5 * (1 + np.cos(np.pi * step / steps))
                    self._optimizer.learning_rate.assign(rate * cosine)
                    rows = order[step * _BATCH : (step + 1) * _BATCH]
                    self._step(
                        *(
                            tf.constant(array[rows])
                            for array in (
                                log.inputs["ids"],
                                log.inputs["numbers"],
                                log.labels,
                                targets,
                            )
                        ),
                        tf.constant(weight),
                    )
                kept[student] = self.model.get_weights()
                slots[student] = [v.numpy() for v in self._optimizer.variables]
        return kept


def _order(rows: int, steps: int, *, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    epochs = steps * _BATCH // rows + 1
    return np.concatenate([rng.permutation(rows) for _ in range(epochs)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """What the gate gets of one candidate, and what it does not know."""

    kind: str
    candidate: list[Any]
    promoted: Any
    slices: dict[str, np.ndarray]
    lineage: dict[str, Any]
    earlier: list[dict[str, Any]]
    # Of the true probabilities' log loss: the candidate's less the promoted's.
    true_harm: float


class _Line:
    """One line over the days of one log."""

    def __init__(self, trainer: _Trainer, seed: int, num_days: int) -> None:
        rng = np.random.default_rng(seed)
        self._trainer, self._seed, self._rng = trainer, seed, rng
        self._log = click_log.generate(
            seed,
            int(rng.integers(7000, 11000)),
            drift=float(rng.uniform(0.08, 0.18)),
            num_days=num_days,
        )
        # A line's own way to retrain.
        self._rate = 1e-3
        self._weight = float(rng.choice([1.0, 2.0, 3.0]))
        self._epochs = int(rng.choice([1, 2]))
        first = self._log.where(self._log.days < _FIRST_DAYS)
        self.versions = trainer.train(
            [trainer.new(seed)], first, steps=_FIRST_STEPS, rate=1e-3, seed=seed
        )
        self.lineages: list[dict[str, Any]] = []

    def day(self, day: int) -> tuple[click_log.Log, click_log.Log]:
        """Returns the rows to train on and those held out."""
        rng = np.random.default_rng([self._seed, day])
        log = self._log.where(self._log.days == day)
        # Some days are slow.
        log = log.where(rng.random(len(log.labels)) < rng.uniform(0.85, 1))
        held_out = rng.random(len(log.labels)) < 0.2
        return log.where(~held_out), log.where(held_out)

    def retrain(
        self, log: click_log.Log, *, seed: int, num: int = 1, **changes: Any
    ) -> list[list[np.ndarray]]:
        """Returns the weights of a candidate."""
        promoted = self.versions[-1]
        steps = max(self._epochs * len(log.labels) // _BATCH, 1)
        options: dict[str, Any] = {
            "steps": steps,
            "rate": self._rate,
            "weight": self._weight,
            **changes,
        }
        return self._trainer.train(
            [promoted] * num,
            log,
            teacher=self._trainer.predict(promoted, log.inputs),
            seed=seed,
            **options,
        )

    def lineage(
        self, weights: Any, train: click_log.Log, held_out: click_log.Log
    ) -> dict[str, Any]:
        """Returns the part of a lineage that the gate reads."""

        def predict(inputs: Any) -> np.ndarray:
            return self._trainer.predict(self.versions[-1], inputs)

        def named(weights: Any) -> dict[str, Any]:
            return {str(k): value for k, value in enumerate(weights)}

        return {
            "weights": data_summary.weight_summary(
                named(weights),
                parent=named(self.versions[-1]),
                before=named(self.versions[-2])
                if len(self.versions) > 1
                else None,
            ),
            "data": {
                name: data_summary.data_summary(
                    log.inputs, log.labels, predict=predict
                )
                for name, log in (("training", train), ("held_out", held_out))
            },
        }

    def judged(
        self,
        kind: str,
        weights: Sequence[Any],
        train: click_log.Log,
        held_out: click_log.Log,
    ) -> Judged:
        """Returns what the gate gets."""

        def predicted(one: Any) -> Any:
            p = self._trainer.predict(one, held_out.inputs).reshape(-1)
            return predictions.Distributions(
                probabilities=p, labels=held_out.labels.reshape(-1)
            )

        candidate = [predicted(one) for one in weights]
        promoted = predicted(self.versions[-1])
        truth = held_out.probabilities

        def loss(p: np.ndarray) -> float:
            p = np.clip(np.asarray(p, np.float64), 1e-7, 1 - 1e-7)
            return -float(
                (truth * np.log(p) + (1 - truth) * np.log(1 - p)).mean()
            )

        return Judged(
            kind=kind,
            candidate=candidate,
            promoted=promoted,
            slices=_slices(held_out),
            lineage=self.lineage(weights[0], train, held_out),
            earlier=list(self.lineages[-7:]),
            true_harm=float(
                np.mean([loss(one.probabilities) for one in candidate])
                - loss(promoted.probabilities)
            ),
        )

    def promote(self, day: int) -> None:
        """Retrains honestly, and moves on."""
        train, held_out = self.day(day)
        candidate = self.retrain(train, seed=day)
        self.lineages.append(self.lineage(candidate[0], train, held_out))
        self.versions += candidate

    def good(self, day: int, number: int) -> Judged:
        """Makes a good candidate, of one of four kinds."""
        train, held_out = self.day(day)
        seed = 1000 * (number + 1) + day
        kinds: list[dict[str, Any]] = [
            {},
            {"num": 2},
            {"weight": 0.0},
            {"rate": 3e-4, "weight": 1.0},
        ]
        weights = self.retrain(train, seed=seed, **kinds[number % 4])
        return self.judged("good", weights, train, held_out)

    def bad(self, kind: str, day: int, number: int) -> Judged:
        """Makes a bad candidate."""
        clean, held_out = self.day(day)
        rng = np.random.default_rng(
            [self._seed, day, KINDS.index(kind), number]
        )
        train = _broken(kind, clean, rng, number)
        changes: dict[str, Any] = {}
        if kind == "overfitted":
            steps = 30 * len(train.labels) // _BATCH
            changes = {"steps": steps, "rate": 5e-3, "weight": 0.0}
        seed = 1000 * (number + 1) + day
        weights = self.retrain(train, seed=seed, **changes)[0]
        if kind == "calibration":
            weights[-1] = weights[-1] + (-0.3 if number % 2 else 0.3)
        if kind == "stale_table":
            others = [
                self.versions[-2],
                self.versions[0],
                self._trainer.new(seed),
            ]
            tables = max(range(len(weights)), key=lambda i: weights[i].size)
            weights[tables] = others[number % 3][tables]
        return self.judged(kind, [weights], train, held_out)


def _broken(
    kind: str, log: click_log.Log, rng: np.random.Generator, number: int
) -> click_log.Log:
    inputs = {name: array.copy() for name, array in log.inputs.items()}
    ids, numbers, labels = inputs["ids"], inputs["numbers"], log.labels.copy()
    column = number % 3
    if kind == "swapped_labels":
        labels = 1 - labels
    elif kind == "drifted_feature":
        shift = rng.choice([-1, 1]) * rng.uniform(0.5, 1.5)
        numbers[:, column] += shift * numbers[:, column].std()
    elif kind == "shuffled_column":
        array = (ids, numbers)[number // 3 % 2]
        array[:, column] = rng.permutation(array[:, column])
    elif kind == "broken_normalization":
        scale = (0.1, 10, 100)[number // 3 % 3]
        numbers[:, column] *= scale
    elif kind == "bad_slice":
        bad = ids[:, 2] % _SITE_GROUPS == number % _SITE_GROUPS
        if number % 2:
            places = np.unique(numbers[:, 0])
            bad = numbers[:, 0] == places[number // 2 % len(places)]
        labels[bad] = 1 - labels[bad]
    elif kind == "wrong_vocabulary":
        size = list(click_log.NUM_IDS.values())[column]
        if number // 3 % 2:
            ids[:, column] = (ids[:, column] + rng.integers(1, 9)) % size
        else:
            ids[:, column] = rng.permutation(size)[ids[:, column]]
    broken = dataclasses.replace(log, inputs=inputs, labels=labels)
    if kind != "half_the_data":
        return broken
    kept = rng.random(len(labels)) < 0.5
    if number % 2:  # A file by hours.
        kept = numbers[:, 2] < np.median(numbers[:, 2])
    return broken.where(kept)


def _slices(log: click_log.Log) -> dict[str, np.ndarray]:
    groups = log.inputs["ids"][:, 2] % _SITE_GROUPS
    places = log.inputs["numbers"][:, 0]
    return {
        **{f"sites {k}": groups == k for k in range(_SITE_GROUPS)},
        **{
            f"place {1 + k}": places == v
            for k, v in enumerate(np.unique(places))
        },
    }


def candidates(seeds: Sequence[int], each: int) -> Iterator[Judged]:
    """Yields candidates: on each line `each` good ones, and as many bad."""
    trainer = _Trainer()
    number = 0
    for seed in seeds:
        num_days = _FIRST_DAYS + _WARM_UP_DAYS + each
        line = _Line(trainer, seed, num_days)
        for day in range(_FIRST_DAYS, num_days):
            if day >= _FIRST_DAYS + _WARM_UP_DAYS:
                yield line.good(day, number)
                kind = KINDS[number % len(KINDS)]
                yield line.bad(kind, day, number // len(KINDS))
                number += 1
            line.promote(day)


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Makes and judges the candidates, and fills the record."""
    seeds = range(options.seed, options.seed + options.lines)
    made = {kind: 0 for kind in ("good", *KINDS)}
    wrong, worse = dict(made), dict(made)
    judging = 0.0
    for one in candidates(seeds, options.each):
        start = time.perf_counter()
        report = gate.verdict(
            gate.Gate(),
            candidate=one.candidate,
            promoted=one.promoted,
            slices=one.slices,
            lineage=one.lineage,
            earlier=one.earlier,
        )
        judging += time.perf_counter() - start
        made[one.kind] += 1
        worse[one.kind] += one.true_harm > 0
        if (report["verdict"] == gate.PROMOTE) != (one.kind == "good"):
            wrong[one.kind] += 1
        measure.log(
            f"{one.kind} ({one.true_harm:+.4f}): {report['verdict']}: "
            f"{report['reasons'][0]}"
        )
    held = wrong.pop("good")
    record.update(
        benchmark="line_gate",
        config=vars(options),
        made=made,
        truly_worse=worse,
        promoted_bad=wrong,
        held_good=held,
        seconds_per_verdict=round(judging / sum(made.values()), 3),
        met=not any(wrong.values()) and held <= 0.05 * made["good"],
    )


def _add_options(options: programs.Flags) -> None:
    options.add("seed", "of the first line", 2000)
    options.add("lines", "lines, each on a log of its own", 10, quick=1)
    options.add("each", "good candidates of a line, and bad ones", 10, quick=2)


PROGRAM = measure.program("line_gate", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
