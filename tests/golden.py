"""Seven short trainings whose losses are kept, to notice when one changes.

`python -m tests.golden` trains them and writes tests/golden.json, or another
file that it is given; `golden_test.py` compares. Where processor and versions
are those that wrote the file, every bit must be the same, elsewhere five
digits, or two of bfloat16. A change that moves a loss on purpose writes the
file again, and says why.

No case depends on when one process sees what another one wrote.
"""

import contextlib
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
from tfdistill.labels import attached
from tfdistill.labels import forms

FILE = pathlib.Path(__file__).with_suffix(".json")
NUM_STEPS = 6
_BATCH_SIZE, _NUM_EXAMPLES = 8, 27
_SAME_ON_REPLICAS = 1e-6
_TOLERANCE = 1e-5
# Some processors multiply bfloat16, others numbers of more digits.
_TOLERANCES = {"bfloat16": 1e-2}

# By case, the losses of each step, and the sum of the weights' sizes.
Losses = dict[str, dict[str, Any]]
Training = tuple[tfdistill.CodistillModel, tf.data.Dataset]


def _normalized() -> keras.Model:
    """With statistics, random numbers and a regularizer."""
    inputs = keras.Input((cases.NUM_FEATURES,))
    hidden = keras.layers.Dense(
        7, activation="relu", kernel_regularizer=keras.regularizers.L2(0.01)
    )(inputs)
    hidden = keras.layers.BatchNormalization(momentum=0.7)(hidden)
    hidden = keras.layers.Dropout(0.2, seed=3)(hidden)
    return _given(inputs, keras.layers.Dense(cases.NUM_CLASSES)(hidden))


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


# Steps before the teacher counts, and what it counts then.
def _weight() -> Any:
    return tfdistill.schedules.BurnIn(steps=2, weight=0.7)


def _sgd(exchange: tfdistill.Exchange) -> Training:
    weights = np.random.default_rng(8).uniform(0, 3, _NUM_EXAMPLES)
    model = cases.codistill(
        cases.deep(),
        optimizer=keras.optimizers.SGD(0.3, momentum=0.5, global_clipnorm=0.1),
    )
    return model, _dataset(*_examples(), weights.astype("float32"))


def _adam(exchange: tfdistill.Exchange) -> Training:
    rate = keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.7)
    model = cases.codistill(
        _normalized(),
        tfdistill.teachers.FixedTeacher(cases.deep(5)),
        optimizer=keras.optimizers.Adam(rate),
        distillation_loss=tfdistill.losses.ForwardKL(temperature=2.0),
        distillation_weight=_weight(),
    )
    return model, _dataset(*_examples())


def _bfloat16(exchange: tfdistill.Exchange) -> Training:
    with _policy("mixed_bfloat16"):
        model = cases.codistill(
            cases.deep(),
            tfdistill.teachers.FixedTeacher(cases.linear(5)),
            optimizer=keras.optimizers.Adam(0.01),
        )
    return model, _dataset(*_examples())


@contextlib.contextmanager
def _policy(name: str) -> Iterator[None]:
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


def _outputs(exchange: tfdistill.Exchange) -> Training:
    x, y = _examples()
    kinds = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = cases.codistill(
        _two_outputs(),
        tfdistill.teachers.FixedTeacher(_two_outputs(5)),
        loss={"value": "mse", "kind": kinds},
        loss_weights={"value": 0.5, "kind": 2.0},
        distillation_loss={
            "value": tfdistill.losses.LogitsMeanSquaredError(from_logits=True),
            "kind": tfdistill.losses.SoftTargetCrossEntropy(),
        },
        distillation_weight=_weight(),
    )
    targets = {"value": x.sum(1, keepdims=True), "kind": y}
    return model, _dataset(x, targets)


def _labels(exchange: tfdistill.Exchange) -> Training:
    """Soft targets in the data; every fifth row has none."""
    x, y = _examples()
    rows = np.arange(len(x))
    logits = np.sin(rows[:, np.newaxis] * [1.0, 2.0, 3.0]).astype("float32")
    version = np.where(rows % 5, 4, -1)

    def attach(x: Any, y: Any, logits: Any, version: Any) -> Any:
        label = attached.label([forms.Form().encode(logits)], version=version)
        return attached.attach((x, y), {"big": label})

    model = cases.codistill(
        cases.deep(),
        tfdistill.teachers.LabelTeacher("big"),
        distillation_weight=_weight(),
    )
    data = _dataset(x, y, logits, version).map(attach)
    return model, data


def _versions(exchange: tfdistill.Exchange) -> Training:
    """A version that a peer has published."""
    cases.publish(exchange, cases.deep(5))
    model = cases.codistill(
        cases.deep(), cases.peers(exchange), distillation_weight=_weight()
    )
    cases.prepare(model, *_examples())
    cases.load(model, 10)
    return model, _dataset(*_examples())


# By place.
CASES: dict[str, dict[str, Callable[[tfdistill.Exchange], Training]]] = {
    "one_device": {
        "sgd": _sgd,
        "adam": _adam,
        "bfloat16": _bfloat16,
        "outputs": _outputs,
        "labels": _labels,
        "versions": _versions,
    },
    "two_replicas": {"adam": _adam},
}


def train(place: str, strategy: Any, directory: pathlib.Path) -> Losses:
    """Trains all cases of a place."""
    found = {}
    for name, build in CASES[place].items():
        keras.utils.set_random_seed(3)
        with strategy.scope():
            # Versions of one case are no news for the next one.
            model, data = build(tfdistill.Exchange(directory / name))
        # An epoch a step, for logs of each.
        logs = cases.fit(model, data, epochs=NUM_STEPS, steps_per_epoch=1)
        found[name] = _losses(logs, model)
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
    # Replicas share threads: on a busy machine one of twelve losses of Adam was
    # seen to differ in its last bit.
    same = 0.0 if place == "one_device" else _SAME_ON_REPLICAS
    return kept["losses"][place], same if kept["made_by"] == made_by() else None


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
            losses[place] = train(place, strategies[place](), path)
    text = json.dumps({"made_by": made_by(), "losses": losses}, indent=1)
    # A line for each list of numbers.
    text = re.sub(r"\[[^][{}]*\]", lambda m: " ".join(m[0].split()), text)
    file.write_text(text + "\n")


if __name__ == "__main__":
    _write(pathlib.Path(*sys.argv[1:]) if sys.argv[1:] else FILE)
