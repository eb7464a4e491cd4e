"""One side of `click_quality`: trains a recipe's model with several seeds.

Every side begins with the same weights and reads the same batches; worker i of
n reads batches i, i + n, and so on. What follows runs on the chief, or in the
only process where there is no cluster.
"""

import json
from typing import Any

import numpy as np

from benchmarks import parameter_server_task
from tfdistill.system import programs

# By side: whether it is tf_keras, and whether it has servers.
SIDES = {
    "one_process": (False, False),
    "servers": (False, True),
    "tf_keras_one_process": (True, False),
    "tf_keras_servers": (True, True),
}


def work(options: programs.Options) -> None:
    """Trains one side and ends with its quality on held-out rows, by seed.

    Args:
        options: The options of the command line.
    """
    import tfdistill
    from launch import recipes

    identity = tfdistill.Cluster.from_env()
    strategy = tfdistill.make_strategy(identity)
    recipe = recipes.get(options.recipe).changed(json.loads(options.changes))
    is_twin, _ = SIDES[options.side]
    fit = train_twin if is_twin else train
    found = []
    for seed in range(options.seeds):
        workload = recipe.changed({"seed": seed}).workload()
        _, held_out = workload.datasets(identity)
        logits = fit(workload, identity, strategy).predict(held_out, verbose=0)
        labels = np.concatenate([np.asarray(y) for _, y in held_out])
        found.append(_quality(labels, np.asarray(logits, np.float64)))
        print(options.side, seed, found[-1], flush=True)
    parameter_server_task.end(identity, found)


def _quality(labels: np.ndarray, logits: np.ndarray) -> dict[str, float]:
    from sklearn import metrics as sklearn_metrics

    from tfdistill import metrics

    probabilities = 1 / (1 + np.exp(-logits))
    return {
        "auc": float(sklearn_metrics.roc_auc_score(labels, logits)),
        "log_loss": metrics.quality(labels, probabilities)["log_loss"],
    }


def student_of(workload: Any) -> Any:
    """Returns the recipe's model as every side begins with it."""
    import keras

    keras.utils.set_random_seed(workload.seed)
    return workload.model()


def train(workload: Any, identity: Any, strategy: Any) -> Any:
    """Trains the recipe's model with `fit` of this package."""
    import tfdistill

    with strategy.scope():
        model = tfdistill.CodistillModel(student_of(workload))
        model.compile(
            workload.optimizer(),
            workload.loss,
            steps_per_execution=workload.steps_per_execution,
        )
    data, _ = workload.datasets(identity)
    model.fit(data, steps_per_epoch=workload.num_steps, verbose=0)
    return model


def train_twin(workload: Any, identity: Any, strategy: Any) -> Any:
    """Trains the same model with `fit` of tf_keras."""
    import tensorflow as tf
    import tf_keras

    from tfdistill.parameter_server import worker_data

    student = student_of(workload)
    with strategy.scope():
        model = twin_of(student)
        model.compile(
            _twin_of_adagrad(workload.optimizer()),
            tf_keras.losses.BinaryCrossentropy(from_logits=True),
            steps_per_execution=workload.steps_per_execution,
            jit_compile=False,
        )
    data, _ = workload.datasets(identity)
    if identity.uses_parameter_servers:
        sent = worker_data.TravellingDataset(data)

        def read(context: Any) -> tf.data.Dataset:
            del context  # It says that each worker is the only one.
            index = worker_data.this_worker()
            return sent.share(index, identity.num_workers)

        data = parameter_server_task.tf_keras_data(read)
    model.fit(data, steps_per_epoch=workload.num_steps, verbose=0)
    return model


def twin_of(student: Any) -> Any:
    """Builds a DLRM with cross layers of tf_keras' own layers, weights too.

    Args:
        student: Of `models.criteo.build_dlrm` or `models.clicks.build_dcn`.

    Returns:
        A model of the same inputs; its values are those of the student.
    """
    import keras
    import tf_keras

    from models import dlrm

    layers = tf_keras.layers
    begin: list[tuple[Any, list[Any]]] = []

    def dense(like: Any, x: Any) -> Any:
        made = layers.Dense(like.units, activation=like.activation.__name__)
        begin.append((made, [like.kernel, like.bias]))
        return made(x)

    def cross(like: Any, x_0: Any, x: Any) -> Any:
        v = layers.Dense(like.rank, use_bias=False)
        u = layers.Dense(x.shape[-1])
        begin.extend([(v, [like.v]), (u, [like.u, like.b])])
        return layers.Add()([layers.Multiply()([x_0, u(v(x))]), x])

    def look_up(like: Any, ids: Any) -> Any:
        # One table is faster than one a field.
        rows = like.layout.num_rows
        made = layers.Embedding(rows, like.output_dim)
        in_order = like.layout.storage_rows(np.arange(rows))
        begin.append((made, [np.concatenate(like.shards)[in_order]]))
        offsets = np.cumsum([0, *like.input_dim[:-1]]).astype(ids.dtype.name)
        return layers.Flatten()(made(ids + offsets))

    inputs = {
        name: tf_keras.Input(x.shape[1:], dtype=x.dtype, name=name)
        for name, x in student.input.items()
    }
    (ids,) = (x for x in inputs.values() if x.dtype.is_integer)
    (x,) = (x for x in inputs.values() if not x.dtype.is_integer)
    x_0 = None  # Where the first tower has ended.
    for layer in student.layers:
        if isinstance(layer, keras.layers.Dense):
            x = dense(layer, x)
        elif isinstance(layer, dlrm.LowRankCross):
            x = cross(layer, x_0, x)
        elif layer.name == "x_0":
            rows = look_up(student.get_layer("embedding"), ids)
            x = x_0 = layers.Concatenate()([x, rows])
    twin = tf_keras.Model(inputs, x)
    for made, values in begin:
        made.set_weights([np.asarray(value) for value in values])
    return twin


def _twin_of_adagrad(optimizer: Any) -> Any:
    import tf_keras

    config = optimizer.get_config()
    rate = config["learning_rate"]
    if isinstance(rate, dict):
        rate = tf_keras.optimizers.schedules.deserialize(
            {key: rate[key] for key in ("class_name", "config")}
        )
    return tf_keras.optimizers.Adagrad(
        rate,
        initial_accumulator_value=config["initial_accumulator_value"],
        epsilon=config["epsilon"],
    )


def _add_options(options: programs.Flags) -> None:
    for name, text, kind in (
        ("side", "one of SIDES", str),
        ("recipe", "of a DLRM with cross layers", str),
        ("changes", "<JSON>: its arguments", str),
        ("seeds", "trainings, one after the other", int),
    ):
        options.add(name, text, kind=kind, required=True)


PROGRAM = parameter_server_task.program(
    "click_quality_task", __doc__, define=_add_options, run=work
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
