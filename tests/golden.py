"""Twelve short trainings whose losses are kept, to notice when one changes.

`python -m tests.golden` trains them and writes tests/golden.json, or another
file that it is given; `golden_test.py` compares. Where processor and versions
are those that wrote the file, every bit must be the same, elsewhere five
digits, or two of bfloat16. A change that moves a loss on purpose writes the
file again, and says why.

No case depends on when one process sees what another one wrote.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.programs import commands
from tfdistill import mixing
from tfdistill import teachers
from tfdistill.labels import attached
from tfdistill.labels import forms

FILE = pathlib.Path(__file__).with_suffix(".json")
NUM_STEPS = 6
_BATCH_SIZE, _NUM_EXAMPLES, _NUM_IDS = 8, 27, 11
_TOLERANCE = 1e-5
# Some processors multiply bfloat16, others numbers of more digits.
_TOLERANCES = {"bfloat16": 1e-2}
# Where the file was made, all else is the same to the bit. Here TensorFlow cuts
# the step in parts of two processes. One worker takes the steps in turn and our
# sums have one order, yet the sum of sizes was once off by 1e-9 on a busy
# machine; 148 starts on a busy one of another kind all gave the same bits.
_SAME_PLACE = {"one_server": 1e-6}

# By case, the losses of each step, and the sum of the weights' sizes.
Losses = dict[str, dict[str, Any]]


# ---- teachers: the four ways to name one that the cases use ----


def _fixed(model: keras.Model) -> Any:
    return teachers.FixedTeacher(model)


def _labelled() -> Any:
    return teachers.LabelTeacher("big")


def _peers(exchange: tfdistill.Exchange) -> Any:
    return teachers.Peers(exchange, peers=[1])


def _predictions(
    exchange: tfdistill.Exchange, cluster: tfdistill.Cluster
) -> Any:
    return teachers.PeerPredictions(
        exchange, peers=cluster.peers, wait_secs=600.0
    )


def _mixer(exchange: tfdistill.Exchange) -> list[keras.callbacks.Callback]:
    mixer = mixing.WeightMixer(
        mixing.ModelAveraging(0.5),
        every_steps=2,
        wait_secs=600.0,
    )
    return [tfdistill.callbacks.StudentExporter(exchange, every_steps=2), mixer]


# ---- students and data ----


def _normalized() -> keras.Model:
    """With statistics, random numbers and a regularizer."""
    inputs = keras.Input((cases.NUM_FEATURES,))
    hidden = keras.layers.Dense(
        7, activation="relu", kernel_regularizer=keras.regularizers.L2(0.01)
    )(inputs)
    hidden = keras.layers.BatchNormalization(momentum=0.7)(hidden)
    hidden = keras.layers.Dropout(0.2, seed=3)(hidden)
    return _given(inputs, keras.layers.Dense(cases.NUM_CLASSES)(hidden))


def _table(seed: int = 0) -> keras.Model:
    """A table of the ids of two fields beside features."""
    x = keras.Input((cases.NUM_FEATURES,), name="x")
    ids = keras.Input((2,), dtype="int64", name="ids")
    rows = tfdistill.layers.ShardedEmbedding([_NUM_IDS] * 2, 3, num_shards=2)(
        ids
    )
    both = keras.layers.Concatenate()([x, keras.layers.Flatten()(rows)])
    hidden = keras.layers.Dense(6, activation="tanh")(both)
    outputs = keras.layers.Dense(cases.NUM_CLASSES)(hidden)
    return _given({"x": x, "ids": ids}, outputs, seed)


def _two_outputs(seed: int = 0) -> keras.Model:
    inputs = keras.Input((cases.NUM_FEATURES,))
    hidden = keras.layers.Dense(6, activation="tanh")(inputs)
    outputs = {
        "value": keras.layers.Dense(1, name="value")(hidden),
        "kind": keras.layers.Dense(cases.NUM_CLASSES, name="kind")(hidden),
    }
    return _given(inputs, outputs, seed)


def _given(inputs: Any, outputs: Any, seed: int = 0) -> keras.Model:
    """A model whose first weights depend on the seed only."""
    model = keras.Model(inputs, outputs)
    cases.randomize(model, seed)
    return model


def _examples() -> tuple[np.ndarray, np.ndarray]:
    return cases.data(_NUM_EXAMPLES)


def _dataset(*data: Any) -> tf.data.Dataset:
    """Endless; each round ends with a batch of three."""
    dataset = tf.data.Dataset.from_tensor_slices(data)
    return dataset.batch(_BATCH_SIZE).repeat()


def _with_ids() -> tf.data.Dataset:
    x, y = _examples()
    ids = np.random.default_rng(9).integers(0, _NUM_IDS, [len(x), 2])
    return _dataset({"x": x, "ids": ids}, y)


# ---- cases ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Where a case is built."""

    cluster: tfdistill.Cluster
    exchange: tfdistill.Exchange


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What a case builds, in the scope of its place's strategy."""

    model: tfdistill.CodistillModel
    data: tf.data.Dataset
    callbacks: list[keras.callbacks.Callback] = dataclasses.field(
        default_factory=lambda: [cases.never()]
    )


# Steps before the teacher counts, and what it counts then.
def _weight() -> Any:
    return tfdistill.schedules.BurnIn(steps=2, weight=0.7)


def _sgd(task: Task) -> Training:
    weights = np.random.default_rng(8).uniform(0, 3, _NUM_EXAMPLES)
    model = cases.codistill(
        cases.deep(),
        optimizer=keras.optimizers.SGD(0.3, momentum=0.5, global_clipnorm=0.1),
    )
    return Training(
        model=model, data=_dataset(*_examples(), weights.astype("float32"))
    )


def _adam(task: Task) -> Training:
    rate = keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.7)
    model = cases.codistill(
        _normalized(),
        _fixed(cases.deep(5)),
        optimizer=keras.optimizers.Adam(rate),
        distillation_loss=tfdistill.losses.ForwardKL(temperature=2.0),
        distillation_weight=_weight(),
    )
    return Training(model=model, data=_dataset(*_examples()))


def _bfloat16(task: Task) -> Training:
    with _policy("mixed_bfloat16"):
        model = cases.codistill(
            cases.deep(),
            _fixed(cases.linear(5)),
            optimizer=keras.optimizers.Adam(0.01),
        )
    return Training(model=model, data=_dataset(*_examples()))


@contextlib.contextmanager
def _policy(name: str) -> Iterator[None]:
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


def _outputs(task: Task) -> Training:
    x, y = _examples()
    kinds = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = cases.codistill(
        _two_outputs(),
        _fixed(_two_outputs(5)),
        loss={"value": "mse", "kind": kinds},
        loss_weights={"value": 0.5, "kind": 2.0},
        distillation_loss={
            "value": tfdistill.losses.LogitsMeanSquaredError(from_logits=True),
            "kind": tfdistill.losses.SoftTargetCrossEntropy(),
        },
        distillation_weight=_weight(),
    )
    targets = {"value": x.sum(1, keepdims=True), "kind": y}
    return Training(model=model, data=_dataset(x, targets))


def _labels(task: Task) -> Training:
    """Soft targets in the data; every fifth row has none."""
    x, y = _examples()
    rows = np.arange(len(x))
    logits = np.sin(rows[:, np.newaxis] * [1.0, 2.0, 3.0]).astype("float32")
    version = np.where(rows % 5, 4, -1)

    def attach(x: Any, y: Any, logits: Any, version: Any) -> Any:
        label = attached.label([forms.Form().encode(logits)], version=version)
        return attached.attach((x, y), {"big": label})

    model = cases.codistill(
        cases.deep(), _labelled(), distillation_weight=_weight()
    )
    data = _dataset(x, y, logits, version).map(attach)
    return Training(model=model, data=data)


def _versions(task: Task) -> Training:
    """A version that a peer has published."""
    cases.publish(task.exchange, cases.deep(5))
    model = cases.codistill(
        cases.deep(), _peers(task.exchange), distillation_weight=_weight()
    )
    cases.prepare(model, *_examples())
    cases.load(model, 10)
    return Training(model=model, data=_dataset(*_examples()))


def _adagrad(task: Task, *, seed: int | None = None) -> Training:
    taught = {} if seed is None else {"distillation_weight": _weight()}
    model = cases.codistill(
        _table(),
        None if seed is None else _fixed(_table(seed)),
        optimizer=keras.optimizers.Adagrad(0.1, global_clipnorm=0.5),
        **taught,
    )
    return Training(model=model, data=_with_ids())


def _swapped(task: Task) -> Training:
    """Two groups predict the same batches."""
    group = task.cluster.group
    model = cases.codistill(
        cases.deep(group), _predictions(task.exchange, task.cluster)
    )
    data = tfdistill.data.group_shard(
        _dataset(*_examples()), task.cluster, mode="coordinated"
    )
    return Training(model=model, data=data)


def _mixed(task: Task) -> Training:
    """Two groups see different batches."""
    group = task.cluster.group
    x, y = (part[group::2] for part in cases.data(2 * _NUM_EXAMPLES))
    model = cases.codistill(
        cases.deep(), optimizer=keras.optimizers.SGD(0.1, momentum=0.9)
    )
    return Training(
        model=model, data=_dataset(x, y), callbacks=_mixer(task.exchange)
    )


# By place; all cases of a place train in the same processes.
CASES: dict[str, dict[str, Callable[[Task], Training]]] = {
    "one_device": {
        "sgd": _sgd,
        "adam": _adam,
        "bfloat16": _bfloat16,
        "outputs": _outputs,
        "labels": _labels,
        "versions": _versions,
    },
    "two_replicas": {"adam": _adam},
    "two_workers": {"adagrad": functools.partial(_adagrad, seed=5)},
    "one_server": {
        "adagrad": functools.partial(_adagrad, seed=5),
        "sgd": _sgd,
    },
    "two_groups": {"predictions": _swapped, "mixing": _mixed},
}
# How the groups of a place start; the others are this process.
LAUNCHED: dict[str, dict[str, int]] = {
    "two_workers": {"workers_per_group": 2},
    "one_server": {"ps_per_group": 1},
    "two_groups": {"num_groups": 2},
}


# ---- training ----


def train(
    place: str,
    strategy: Any,
    directory: pathlib.Path,
    *,
    cluster: tfdistill.Cluster | None = None,
) -> Losses:
    """Trains all cases of a place as one of its tasks."""
    found = {}
    for name, build in CASES[place].items():
        keras.utils.set_random_seed(3)
        with strategy.scope():
            # Versions of one case are no news for the next one.
            training = build(
                Task(
                    cluster=cluster or tfdistill.Cluster(),
                    exchange=tfdistill.Exchange(directory / name),
                )
            )
        # An epoch a step, for logs of each.
        history = training.model.fit(
            training.data,
            epochs=NUM_STEPS,
            steps_per_epoch=1,
            shuffle=False,
            verbose=0,
            callbacks=training.callbacks,
        )
        found[name] = _losses(history.history, training.model)
    return found


def _losses(logs: dict[str, list], model: Any) -> dict[str, Any]:
    names = ("loss", "distillation_loss")
    sizes = [
        np.abs(np.asarray(value, "float64")).sum()
        for value in model.student.get_weights()
    ]
    return {
        # Those of a student without teachers are all 0, or not there.
        **{
            k: [float(v) for v in logs[k]]
            for k in names
            if any(logs.get(k, ()))
        },
        "weights": float(sum(sizes)),
    }


def launch(place: str, directory: pathlib.Path) -> Losses:
    """Trains all cases of a place in processes; groups give lists of tasks."""
    commands.launched(
        *(directory / "run", "tests.golden", place, directory),
        **LAUNCHED[place],
    )
    found: Losses = {}
    for path in sorted(directory.glob("task_*.json")):
        for name, losses in json.loads(path.read_text()).items():
            found[f"{name}, {path.stem}"] = losses
    return found


def _run_task(place: str, directory: pathlib.Path) -> None:
    cluster = tfdistill.Cluster.from_env()
    strategy = tfdistill.make_strategy(cluster)
    found = train(place, strategy, directory, cluster=cluster)
    if cluster.is_chief:
        name = f"task_{cluster.group}.json"
        (directory / name).write_text(json.dumps(found))


# ---- the file ----


def made_by() -> dict[str, Any]:
    """What decides about the last bits of a loss."""
    cpu = pathlib.Path("/proc/cpuinfo")
    flags = cpu.read_text().split() if cpu.is_file() else []
    # Those by which Eigen and oneDNN choose their kernels.
    chosen = re.compile(r"sse4_[12]|avx\w*|fma|f16c|amx\w*")
    return {
        "processor": sorted(set(filter(chosen.fullmatch, flags))),
        "versions": {
            module.__name__: module.__version__ for module in (tf, keras, np)
        },
    }


def read(place: str) -> tuple[Losses, float | None]:
    """Returns the losses of a place, and a tolerance if it was made as here."""
    kept = json.loads(FILE.read_text())
    tolerance = _SAME_PLACE.get(place, 0.0)
    is_same = kept["made_by"] == made_by()
    return kept["losses"][place], tolerance if is_same else None


def assert_same(found: Losses, expected: Losses, same: float | None) -> None:
    """Compares the losses of a place, with what `read` has returned."""
    assert found.keys() == expected.keys()
    for name, losses in expected.items():
        tolerance = _TOLERANCES.get(name, _TOLERANCE) if same is None else same
        assert found[name].keys() == losses.keys()
        for key, values in losses.items():
            np.testing.assert_allclose(
                found[name][key],
                values,
                rtol=tolerance,
                atol=0.0,
                err_msg=f"{name}: {key}",
            )


def _write(file: pathlib.Path) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    strategies = {
        "one_device": tf.distribute.get_strategy,
        "two_replicas": lambda: tf.distribute.MirroredStrategy(
            ["CPU:0", "CPU:1"]
        ),
    }
    losses = {}
    for place in CASES:
        print(place, flush=True)
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory)
            if place in LAUNCHED:
                losses[place] = launch(place, path)
            else:
                losses[place] = train(place, strategies[place](), path)
    text = json.dumps({"made_by": made_by(), "losses": losses}, indent=1)
    # A line for each list of numbers.
    text = re.sub(r"\[[^][{}]*\]", lambda m: " ".join(m[0].split()), text)
    file.write_text(text + "\n")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if len(arguments) == 2:
        _run_task(arguments[0], pathlib.Path(arguments[1]))
    else:
        _write(pathlib.Path(*arguments) if arguments else FILE)
