"""Small trainings whose results must not depend on who shares the work.

Each case builds a model of the given class, trains, evaluates and predicts,
and returns everything that can be compared: weights, logs and predictions.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tfdistill import data as tfdistill_data
from tfdistill import optimizers

Results = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One training: what differs from the plain one."""

    optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.1)
    build: Callable[[type], keras.Model] = None
    data: Callable[[], Any] = None
    loss: Any = "mse"
    loss_weights: Any = None
    metrics: Any = ("mae",)
    weighted_metrics: Any = None
    steps_per_execution: int = 1
    batch_size: int = 8
    epochs: int = 2
    fit: dict = dataclasses.field(default_factory=dict)
    policy: str = "float32"
    tolerance: float = 2e-6
    # Whether workers read only their share, where there are several.
    is_shared_early: bool = False
    # Keras' Adam moves all rows of a table, ours those of the batch.
    is_lazy: bool = False

    @property
    def reference(self) -> Any:
        """The model that trains on one device to the expected results."""
        return shared if self.is_lazy else keras.Model


def _rng() -> np.random.Generator:
    return np.random.default_rng(7)


def regression(num_examples: int = 32) -> tuple[np.ndarray, np.ndarray]:
    rng = _rng()
    x = rng.normal(size=(num_examples, 5)).astype("float32")
    y = (x @ rng.normal(size=(5, 1)) + 0.1).astype("float32")
    return x, y


def classes(num_examples: int = 32) -> tuple[np.ndarray, np.ndarray]:
    x, y = regression(num_examples)
    return x, (np.abs(y[:, 0] * 3).astype("int64") % 3)


def dense(model_class: type, units: int = 1, **kwargs: Any) -> keras.Model:
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(7, activation="tanh", **kwargs)(inputs)
    return model_class(inputs, keras.layers.Dense(units)(hidden))


def dictionaries(model_class: type) -> keras.Model:
    a, b = keras.Input((5,), name="a"), keras.Input((2,), name="b")
    joined = keras.layers.Concatenate()([a, b])
    hidden = keras.layers.Dense(6, activation="relu")(joined)
    outputs = {
        "value": keras.layers.Dense(1, name="value")(hidden),
        "kind": keras.layers.Dense(3, name="kind")(hidden),
    }
    return model_class({"a": a, "b": b}, outputs)


def dictionary_data(num_examples: int = 30) -> tuple[dict, dict]:
    x, y = regression(num_examples)
    _, kind = classes(num_examples)
    return {"a": x, "b": x[:, :2] ** 2}, {"value": y, "kind": kind}


def embedding(model_class: type) -> keras.Model:
    inputs = keras.Input((6,), dtype="int32")
    table = keras.layers.Embedding(20, 4)(inputs)
    pooled = keras.layers.GlobalAveragePooling1D()(table)
    return model_class(inputs, keras.layers.Dense(1)(pooled))


def sharded_table(model_class: type) -> keras.Model:
    inputs = keras.Input((6,), dtype="int32")
    table = tfdistill.layers.ShardedEmbedding([20] * 6, 4, num_shards=3)(inputs)
    hidden = keras.layers.Flatten()(table)
    return model_class(inputs, keras.layers.Dense(1)(hidden))


def normalized(model_class: type, *, synchronized: bool) -> keras.Model:
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(4)(inputs)
    hidden = keras.layers.BatchNormalization(
        momentum=0.5, synchronized=synchronized
    )(hidden)
    return model_class(inputs, keras.layers.Dense(1)(hidden))


def sparse_inputs(model_class: type) -> keras.Model:
    inputs = keras.Input((9,), sparse=True)
    hidden = keras.layers.Dense(4, activation="tanh")(inputs)
    return model_class(inputs, keras.layers.Dense(1)(hidden))


def masked_sequence(model_class: type) -> keras.Model:
    inputs = keras.Input((6,), dtype="int32")
    table = keras.layers.Embedding(20, 4, mask_zero=True)(inputs)
    hidden = keras.layers.LSTM(5, return_sequences=True)(table)
    return model_class(inputs, keras.layers.Dense(20)(hidden))


def ids() -> tuple[np.ndarray, np.ndarray]:
    tokens = _rng().integers(0, 20, size=(30, 6)).astype("int32")
    return tokens, tokens.mean(axis=1, keepdims=True).astype("float32")


def sparse_rows() -> tuple[tf.SparseTensor, np.ndarray]:
    x = _rng().normal(size=(30, 9)) * (_rng().uniform(size=(30, 9)) < 0.3)
    x = x.astype("float32")
    return tf.sparse.from_dense(x), x.sum(axis=1, keepdims=True)


def sequences() -> tuple[np.ndarray, np.ndarray]:
    tokens = _rng().integers(1, 20, size=(30, 6)).astype("int32")
    for row, length in enumerate(_rng().integers(1, 7, size=30)):
        tokens[row, length:] = 0
    return tokens, np.roll(tokens, -1, axis=1)


def weighted(num_examples: int = 30) -> tuple:
    x, y = regression(num_examples)
    weights = _rng().uniform(0, 3, size=num_examples).astype("float32")
    return x, y, weights


def subclassed(model_class: type) -> keras.Model:
    """A user's subclassed model with a regularizer."""

    class Subclassed(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = keras.layers.Dense(
                6,
                activation="relu",
                kernel_regularizer=keras.regularizers.L2(0.1),
            )
            self.top = keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.top(self.hidden(inputs))

    return wrapped(model_class, Subclassed())


def wrapped(model_class: type, model: keras.Model) -> keras.Model:
    """A finished model, wrapped if what trains it is under test."""
    if model_class is keras.Model:
        return model
    return tfdistill.DistributedModel(model)


class Penalty:
    """A loss of a model's own beside the compiled one.

    Without `training`, as before Keras 3.3.
    """

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
    ) -> Any:
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + 0.1 * keras.ops.mean(y_pred**2)


class Penalized(Penalty, keras.Model):
    """A finished model with a loss of its own."""


class OwnStep(keras.Model):
    """A finished model with steps as in Keras' guide, a tape in one of them."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name != "loss":
                metric.update_state(y, y_pred)
        found = {m.name: m.result() for m in self.metrics if m.name != "loss"}
        return {**found, "step_loss": loss}


class OwnLosses(keras.Model):
    """A finished model of two optimizers, its losses none of `compile`'s."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.MeanSquaredError("squared")
        self.loss_fn = keras.losses.Huber(0.5)

    def compile(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().compile(optimizer, jit_compile=False)
        self.top_optimizer = keras.optimizers.SGD(0.2, global_clipnorm=0.02)
        self.top_optimizer.build(self.layers[-1].trainable_variables)

    @property
    def metrics(self) -> list[keras.Metric]:
        return [self.tracker]

    def train_step(self, data: Any) -> Any:
        x, y = data
        top = self.layers[-1].trainable_variables
        rest = self.layers[-2].trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred) + sum(self.losses)
            other = keras.ops.mean(keras.ops.abs(y_pred - y)) + loss
        self.top_optimizer.apply(tape.gradient(other, top), top)
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, rest), rest, strict=True)
        )
        self.tracker.update_state(y, y_pred)
        return {"squared": self.tracker.result()}

    def test_step(self, data: Any) -> Any:
        x, y = data
        self.tracker.update_state(y, self(x, training=False))
        return {"squared": self.tracker.result()}


class Taught(tfdistill.CodistillModel):
    """A student of a model in memory, and of its hidden layer."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        super().compile(
            *args,
            distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(
                temperature=2.0
            ),
            feature_loss=tfdistill.losses.FeatureDistillation(
                [("own", "theirs")], projection=True, weight=0.5
            ),
            **kwargs,
        )


def taught(model_class: type) -> keras.Model:
    def named(units: int, name: str) -> keras.Model:
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(units, activation="tanh", name=name)(inputs)
        hidden = keras.layers.Dropout(0.5)(hidden) if units == 9 else hidden
        return keras.Model(inputs, keras.layers.Dense(3)(hidden))

    teachers = tfdistill.teachers.FixedTeacher(named(9, "theirs"))
    return Taught(named(4, "own"), teachers=teachers)


def shared(*args: Any) -> keras.Model:
    """The functional model whose training is under test."""
    return tfdistill.DistributedModel(keras.Model(*args))


def _sparse_crossentropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _mean_with_weights() -> keras.losses.Loss:
    return keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


def _own_loss(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 1.5, axis=-1)


def falling(start: float) -> Any:
    """A weight decay that is a tenth from the fourth step on, then none."""
    return keras.optimizers.schedules.PiecewiseConstantDecay(
        [2, 5], [start, start / 10, 0.0]
    )


sgd, adam = keras.optimizers.SGD, keras.optimizers.Adam
PARTIAL = {"data": lambda: regression(27)}

CASES: dict[str, Case] = {
    "adam": Case(optimizer=lambda: adam(0.01), tolerance=2e-5),
    "adamw_ema": Case(
        optimizer=lambda: keras.optimizers.AdamW(0.01, use_ema=True),
        tolerance=2e-5,
    ),
    "lars": Case(
        optimizer=lambda: tfdistill.optimizers.LARS(
            0.1,
            trust_coefficient=0.1,
            weight_decay=falling(0.1),
            nesterov=True,
        ),
        tolerance=2e-5,
        **PARTIAL,
    ),
    "coupled_decay": Case(
        optimizer=lambda: optimizers.with_kernel_decay(sgd, coupled=True)(
            0.1, momentum=0.9, clipnorm=0.5, weight_decay=falling(0.1)
        ),
        steps_per_execution=3,
        **PARTIAL,
    ),
    "global_clipnorm": Case(
        optimizer=lambda: sgd(0.3, momentum=0.5, global_clipnorm=0.05),
        **PARTIAL,
    ),
    "schedule_clipnorm": Case(
        optimizer=lambda: sgd(
            keras.optimizers.schedules.ExponentialDecay(0.3, 2, 0.5),
            clipnorm=0.05,
        ),
        **PARTIAL,
    ),
    "shared_early": Case(is_shared_early=True, fit={"steps_per_epoch": 4}),
    "batch_of_one_left": Case(data=lambda: regression(17)),
    "sample_weight": Case(data=weighted, weighted_metrics=["mse"]),
    "mean_with_weights": Case(data=weighted, loss=_mean_with_weights),
    "sum_reduction": Case(
        optimizer=lambda: sgd(0.01),
        loss=lambda: keras.losses.MeanSquaredError(reduction="sum"),
        **PARTIAL,
    ),
    "steps_per_execution_partial": Case(steps_per_execution=3, **PARTIAL),
    "dictionaries": Case(
        build=dictionaries,
        data=dictionary_data,
        loss=lambda: {"value": "mse", "kind": _sparse_crossentropy()},
        loss_weights={"value": 0.5, "kind": 2.0},
        metrics={"kind": "accuracy"},
    ),
    # Each step has another number of distinct rows on each worker.
    "sharded_executions": Case(
        build=sharded_table,
        optimizer=lambda: keras.optimizers.Adagrad(0.1, global_clipnorm=0.1),
        data=ids,
        steps_per_execution=3,
    ),
    "embedding_executions": Case(
        build=embedding,
        optimizer=lambda: keras.optimizers.Adagrad(0.1, global_clipnorm=0.1),
        data=ids,
        steps_per_execution=3,
    ),
    "sharded_adam": Case(
        build=sharded_table,
        data=ids,
        optimizer=lambda: adam(0.01),
        tolerance=2e-5,
        is_lazy=True,
    ),
    # The last batch leaves some replicas without a row.
    "synchronized_normalization": Case(
        build=lambda c: normalized(c, synchronized=True),
        data=lambda: regression(17),
        tolerance=2e-5,
    ),
    # Keras makes the rows of such gradients distinct, in each batch.
    "sparse_adam": Case(
        build=sparse_inputs,
        data=sparse_rows,
        optimizer=lambda: adam(0.01),
        tolerance=2e-5,
    ),
    "masked_sequence": Case(
        build=masked_sequence,
        data=sequences,
        loss=_sparse_crossentropy,
        metrics=("accuracy",),
    ),
    "subclassed_own_loss": Case(
        build=subclassed, loss=lambda: _own_loss, **PARTIAL
    ),
    "taught_in_memory": Case(
        build=taught,
        data=lambda: (*classes(30), weighted()[2]),
        loss=_sparse_crossentropy,
        metrics=("accuracy",),
        optimizer=lambda: adam(0.01),
        tolerance=2e-5,
        is_lazy=True,
    ),
    "mixed_bfloat16": Case(policy="mixed_bfloat16", tolerance=2e-2, **PARTIAL),
    "auc": Case(
        build=lambda c: dense(c),
        data=lambda: (regression(27)[0], regression(27)[1] > 0),
        loss=lambda: keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=("AUC",),
    ),
    # Models with steps and losses of their own.
    "wrapped_own_loss": Case(
        build=lambda c: wrapped(
            c, dense(Penalized, kernel_regularizer=keras.regularizers.L2(0.1))
        ),
        **PARTIAL,
    ),
    "wrapped_own_step": Case(
        build=lambda c: wrapped(
            c, dense(OwnStep, kernel_regularizer=keras.regularizers.L2(0.1))
        ),
        optimizer=lambda: adam(0.01, clipnorm=0.05),
        steps_per_execution=3,
        data=lambda: regression(25),
        tolerance=2e-5,
    ),
    "wrapped_own_losses": Case(
        build=lambda c: wrapped(
            c, dense(OwnLosses, kernel_regularizer=keras.regularizers.L2(0.1))
        ),
        optimizer=lambda: sgd(0.3, momentum=0.5, clipvalue=0.01),
        **PARTIAL,
    ),
    "arrays_shuffled": Case(fit={"shuffle": True}, **PARTIAL),
}

# Two replicas of one process run some of them (tests/multi_worker_test.py). Of
# these, two workers leave out those that take the same path there. They run
# each other case once: these with two replicas a worker, where both kinds of
# sharing meet, the others with one replica.
ON_DEVICES_OF_WORKERS = (
    "global_clipnorm",
    "batch_of_one_left",
    "synchronized_normalization",
    "sample_weight",
    "steps_per_execution_partial",
    "sharded_adam",
)
# One device runs the first to the bit; two replicas run the others.
NOT_ON_WORKERS = (
    "schedule_clipnorm",
    "masked_sequence",
    "mixed_bfloat16",
    "taught_in_memory",
)


def cases(devices: int) -> dict[str, Case]:
    """Returns what workers with that many devices each run."""
    return {
        name: case
        for name, case in CASES.items()
        if name not in NOT_ON_WORKERS
        and (name in ON_DEVICES_OF_WORKERS) == (devices > 1)
    }


def _dataset(case: Case, data: tuple) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(data).batch(case.batch_size)


def _training_data(case: Case, data: tuple) -> tf.data.Dataset:
    if not case.is_shared_early:
        return _dataset(case, data)
    dataset = tfdistill_data.at_workers_share(
        tf.data.Dataset.from_tensor_slices(data),
        tfdistill.Cluster.from_env(),
        global_batch_size=case.batch_size,
    )
    return dataset.repeat().batch(case.batch_size)


def run(case: Case, model_class: type, strategy: Any) -> Results:
    """Trains one case and returns all that must be equal."""
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(case.policy)
    data = (case.data or regression)()
    with strategy.scope():
        model = (case.build or dense)(model_class)
        model.compile(
            case.optimizer(),
            case.loss() if callable(case.loss) else case.loss,
            loss_weights=case.loss_weights,
            metrics=case.metrics
            if isinstance(case.metrics, dict)
            else list(case.metrics),
            weighted_metrics=case.weighted_metrics,
            steps_per_execution=case.steps_per_execution,
            jit_compile=False,
        )
    if case.fit.get("shuffle"):
        x = {"x": data[0], "y": data[1], "batch_size": case.batch_size}
    else:
        x = {"x": _training_data(case, data), "shuffle": False}
    history = model.fit(
        **x,
        epochs=case.epochs,
        verbose=0,
        validation_data=_dataset(case, data),
        **case.fit,
    )
    evaluated = model.evaluate(
        _dataset(case, data), verbose=0, return_dict=True
    )
    predicted = model.predict(_dataset(case, data), verbose=0)
    keras.config.set_dtype_policy("float32")
    results = {
        f"weight_{index}": np.asarray(value)
        for index, value in enumerate(model.get_weights())
    }
    results |= {f"log_{k}": np.array(v) for k, v in history.history.items()}
    results |= {f"eval_{k}": np.array(v) for k, v in evaluated.items()}
    flat = keras.tree.flatten(predicted)
    results |= {
        f"prediction_{i}": np.asarray(v).astype("float64")
        for i, v in enumerate(flat)
    }
    results["iterations"] = model.optimizer.iterations.numpy()
    return results


def assert_equal(actual: Results, expected: Results, tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            actual[name],
            value,
            rtol=max(tolerance * 10, 1e-5),
            atol=tolerance,
            err_msg=name,
        )


def _use_all_devices(number: int) -> None:
    """Gives a worker of several a replica on each of its CPU devices.

    TensorFlow does so for GPUs; of CPUs it takes the first only.
    """
    from tensorflow.python.distribute import collective_all_reduce_strategy

    def devices(self: Any, resolver: Any, worker: str) -> tuple[Any, str]:
        found = tuple(f"{worker}/device:CPU:{i}" for i in range(number))
        return found, "CPU"

    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    extended._initialize_local_devices = devices


def main(path: str, devices: int) -> None:
    """Runs the cases as one task of a cluster and writes their results."""
    if devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * devices
        )
        _use_all_devices(devices)
    cluster = tfdistill.Cluster.from_env()
    strategy = tfdistill.make_strategy(cluster)
    if strategy.num_replicas_in_sync != devices * cluster.num_workers:
        raise RuntimeError(f"{strategy.num_replicas_in_sync} replicas")
    results = {}
    for name, case in cases(devices).items():
        print("case", name, flush=True)
        found = run(case, shared, strategy)
        results |= {f"{name}/{key}": value for key, value in found.items()}
    np.savez(f"{path}/worker_{cluster.task_index}.npz", **results)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
