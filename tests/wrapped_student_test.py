"""What a wrapper takes over from its student, and what it refuses to lose."""

import codistillation_cases as cases
import keras
import numpy as np
import pytest

import tfdistill
from tfdistill import losses
from tfdistill import multiworker

_X, _Y = cases.data()


class _Own(keras.Model):
    """A student of two layers, to be given methods of its own."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, inputs):
        return self.dense(inputs)


@pytest.mark.parametrize(
    "name", ["train_step", "compute_loss", "compute_metrics", "test_step"]
)
def test_steps_that_would_never_run_are_refused(name):
    kind = type("Student", (_Own,), {name: lambda self, *args: None})
    with pytest.raises(ValueError, match=f"Student with its own {name}, "):
        tfdistill.CodistillModel(kind())


@pytest.mark.parametrize("bases", [(), (multiworker.MultiWorkerTraining,)])
def test_the_steps_of_keras_and_of_this_package_are_not_missed(bases):
    kind = type("Student", (*bases, _Own), {})
    tfdistill.CodistillModel(kind())


def _two_outputs(named):
    inputs = keras.Input((4,))
    kind = keras.layers.Dense(3, name="kind")(inputs)
    size = keras.layers.Dense(1, name="size")(inputs)
    outputs = {"kind": kind, "size": size} if named else [kind, size]
    return keras.Model(inputs, outputs)


@pytest.mark.parametrize("named", [True, False], ids=["dict", "list"])
def test_outputs_are_found_by_name_as_in_keras(named):
    """Losses, metrics and targets by name, whatever holds the outputs."""
    targets = {"kind": _Y, "size": _X[:, :1]}
    loss = {
        "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "size": "mse",
    }
    histories = []
    for wrap in (lambda student: student, tfdistill.CodistillModel):
        keras.utils.set_random_seed(1)
        model = wrap(_two_outputs(named))
        model.compile("sgd", loss, metrics={"kind": ["accuracy"]})
        found = model.fit(_X, targets, batch_size=8, shuffle=False, verbose=0)
        histories.append(found.history)
    plain, ours = histories
    assert {"kind_loss", "size_loss", "kind_accuracy"} <= set(plain)
    for name, values in plain.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-5)


def test_one_of_the_outputs_of_a_list_is_distilled_by_name(tmp_path):
    exchange = tfdistill.Exchange(tmp_path)
    model = cases.codistill(
        _two_outputs(named=False),
        tfdistill.TeacherSet(exchange, [1]),
        loss={"kind": "mse", "size": "mse"},
        distillation_loss={
            "size": losses.LogitsMeanSquaredError(from_logits=True)
        },
    )
    cases.publish(exchange, _two_outputs(named=False))
    targets = {"kind": keras.utils.to_categorical(_Y, 3), "size": _X[:, :1]}
    cases.prepare(model, _X, targets)
    cases.load(model, 10)
    assert cases.fit(model, _X, targets)["distillation_loss"][-1] > 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
