"""Small trainings that parameter servers must not change.

Each case is trained by one process and by a group of one worker, which takes
the same steps in the same order, and returns all that can be compared.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tfdistill import logical_table

Results = dict[str, np.ndarray]
FIELD_SIZES = [13, 5, 7]
BATCH_SIZE, NUM_EXAMPLES = 8, 43


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One training.

    Attributes:
        optimizer: Makes the optimizer.
        student: Makes the student.
        data: Makes features, labels and perhaps weights.
        steps_per_epoch: Steps of an epoch of repeated data; None for finite
            data, whose last batch is a partial one.
        steps_per_execution: In the group; one process takes single steps.
        from_function: Whether the data come from a function.
        callbacks: Makes callbacks.
        is_plain: Whether plain Keras is the reference; its optimizers move
            rows that a batch does not touch, where ours do not.
        compiled: What else to compile with.
        tolerance: Largest difference.
    """

    optimizer: Callable[[], Any]
    student: Callable[[], keras.Model]
    data: Callable[[], tuple]
    steps_per_epoch: int | None = None
    steps_per_execution: int = 5
    from_function: bool = False
    callbacks: Callable[[], list] = list
    is_plain: bool = True
    compiled: dict = dataclasses.field(default_factory=dict)
    tolerance: float = 2e-6


def numbers() -> tuple[np.ndarray, np.ndarray]:
    """Features `[n, 5]` and targets `[n, 1]`."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(NUM_EXAMPLES, 5)).astype("float32")
    return x, (x @ rng.normal(size=(5, 1)) > 0).astype("float32")


def weighted() -> tuple:
    """The same with sample weights."""
    weights = np.random.default_rng(8).uniform(0, 3, NUM_EXAMPLES)
    return *numbers(), weights.astype("float32")


def clicks() -> tuple[dict, np.ndarray]:
    """Numbers and the ids of several fields."""
    rng = np.random.default_rng(9)
    x, y = numbers()
    ids = [rng.integers(0, size, NUM_EXAMPLES) for size in FIELD_SIZES]
    return {"x": x, "ids": np.stack(ids, axis=1)}, y


def bags() -> tuple[tf.RaggedTensor, np.ndarray]:
    """Bags of ids, some empty, some with ids that are out of range."""
    rng = np.random.default_rng(10)
    lengths = rng.integers(0, 5, NUM_EXAMPLES)
    ids = rng.integers(-2, 25, lengths.sum())
    return tf.RaggedTensor.from_row_lengths(ids, lengths), numbers()[1]


def dense(**options: Any) -> keras.Model:
    """A student of dense layers; `options` are the first one's."""
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(6, activation="tanh", **options)(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def normalized() -> keras.Model:
    """A student with statistics of its batches."""
    inputs = keras.Input((5,))
    hidden = keras.layers.BatchNormalization(momentum=0.7)(inputs)
    hidden = keras.layers.Dense(6, activation="relu")(hidden)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def regularized() -> keras.Model:
    return dense(kernel_regularizer=keras.regularizers.L2(0.1))


def click_student() -> keras.Model:
    """A student with a table of several fields and dictionaries as inputs."""
    x = keras.Input((5,), name="x")
    ids = keras.Input((len(FIELD_SIZES),), dtype="int64", name="ids")
    rows = tfdistill.ShardedEmbedding(FIELD_SIZES, 4)(ids)
    both = keras.layers.Concatenate()([x, keras.layers.Flatten()(rows)])
    hidden = keras.layers.Dense(6, activation="tanh")(both)
    return keras.Model({"x": x, "ids": ids}, keras.layers.Dense(1)(hidden))


def bag_student() -> keras.Model:
    """A student of bags; ids that are out of range are id 3."""
    ids = keras.Input((None,), dtype="int64", ragged=True)
    table = tfdistill.ShardedEmbedding(20, 4, combiner="mean", oov_index=3)
    return keras.Model(ids, keras.layers.Dense(1)(table(ids)))


def _decay(rate: float) -> Any:
    return keras.optimizers.schedules.ExponentialDecay(rate, 3, 0.7)


def _rates() -> list:
    return [keras.callbacks.LearningRateScheduler(lambda e: [0.2, 0.03][e])]


CASES: dict[str, Case] = {
    "momentum": Case(
        optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        student=dense,
        data=numbers,
        steps_per_epoch=7,
        callbacks=_rates,
        compiled={"metrics": ["mae", "AUC"]},
    ),
    "adagrad": Case(
        optimizer=lambda: keras.optimizers.Adagrad(0.1),
        student=click_student,
        data=clicks,
        steps_per_epoch=8,
        steps_per_execution=1,
        compiled={"metrics": ["mae"]},
    ),
    "lazy_adam": Case(
        optimizer=lambda: keras.optimizers.Adam(
            _decay(0.02), global_clipnorm=0.1
        ),
        student=click_student,
        data=clicks,
        is_plain=False,
        compiled={"metrics": ["mae"]},
        tolerance=2e-5,
    ),
    "ftrl": Case(
        optimizer=lambda: keras.optimizers.Ftrl(0.2),
        student=regularized,
        data=numbers,
        from_function=True,
        steps_per_execution=1,
    ),
    "ftrl_bags": Case(
        optimizer=lambda: keras.optimizers.Ftrl(0.2),
        student=bag_student,
        data=bags,
        is_plain=False,
    ),
    "sample_weight": Case(
        optimizer=lambda: keras.optimizers.Adagrad(0.1),
        student=normalized,
        data=weighted,
        from_function=True,
        compiled={"metrics": ["mae"], "weighted_metrics": ["mse"]},
    ),
}


def _source(case: Case, *, repeats: bool, strategy: Any) -> Any:
    def make(context: Any) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(case.data())
        dataset = dataset.batch(BATCH_SIZE).shard(
            context.num_input_pipelines, context.input_pipeline_id
        )
        return dataset.repeat() if repeats else dataset

    on_servers = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    if case.from_function and on_servers:
        return make
    return make(tf.distribute.InputContext())


def run(case: Case, strategy: Any, *, is_reference: bool = False) -> Results:
    """Trains one case and returns all that must be equal."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        student = model = case.student()
        if not (is_reference and case.is_plain):
            model = tfdistill.CodistillModel(student)
        model.compile(
            case.optimizer(),
            keras.losses.BinaryCrossentropy(from_logits=True),
            steps_per_execution=1 if is_reference else case.steps_per_execution,
            jit_compile=False,
            **case.compiled,
        )
    repeats = case.steps_per_epoch is not None
    finite = _source(case, repeats=False, strategy=strategy)
    history = model.fit(
        _source(case, repeats=repeats, strategy=strategy),
        epochs=2,
        steps_per_epoch=case.steps_per_epoch,
        validation_data=finite,
        callbacks=case.callbacks(),
        shuffle=False,
        verbose=0,
    )
    found = model.evaluate(finite, verbose=0, return_dict=True)
    results = {f"log_{k}": np.array(v) for k, v in history.history.items()}
    results |= {f"eval_{k}": np.array(v) for k, v in found.items()}
    results |= {f"weight_{k}": v for k, v in weights(student).items()}
    results["prediction"] = np.asarray(model.predict(finite, verbose=0))
    results["iterations"] = model.optimizer.iterations.numpy()
    return results


def weights(student: keras.Model) -> Results:
    """Returns a student's weights by index, tables whole."""
    found = logical_table.variables_of(student)
    return {str(i): np.asarray(v.value) for i, v in enumerate(found)}


def assert_equal(actual: Results, expected: Results, tolerance: float) -> None:
    """Compares; ours may log more than plain Keras does, never less."""
    assert not expected.keys() - actual.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            actual[name],
            value,
            rtol=max(tolerance * 10, 1e-5),
            atol=tolerance,
            err_msg=name,
        )
