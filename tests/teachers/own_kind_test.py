"""A kind of teacher that is not ours: all that it takes is one class."""

import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases

_X, _Y = cases.data()
_FREQUENCIES = np.bincount(_Y) / len(_Y)


class ClassPriors(tfdistill.teachers.Teacher):
    """Predicts each class as often as it occurs."""

    def __init__(self, frequencies, **kwargs):
        super().__init__(**kwargs)
        self._logits = np.log(frequencies).astype("float32")

    def ask(self, batch):
        return tf.broadcast_to(self._logits, tf.shape(batch.outputs))


class _Counting(ClassPriors):
    """One with a variable, which changes between steps and is backed up."""

    def attach(self, student):
        self.count = tf.Variable(0, trainable=False)

    def refresh(self, step):
        self.count.assign_add(1)

    @property
    def variables(self):
        return [self.count]

    def status(self):
        return {**super().status(), "refreshes": int(self.count)}


def _cross_entropy(student):
    own = cases.softmax(student(_X).numpy())
    return -(_FREQUENCIES * np.log(own)).sum(axis=-1).mean()


def test_it_teaches_as_any_other(two_replicas):
    expected = _cross_entropy(cases.linear(0))
    found = []
    for strategy in (tf.distribute.get_strategy(), two_replicas):
        with strategy.scope():
            model = cases.codistill(cases.linear(0), ClassPriors(_FREQUENCIES))
        data = tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(16)
        found.append(cases.fit(model, data))
        (status,) = model.teachers.status()
        assert (status["name"], status["health"]) == ("class_priors", "good")
        assert found[-1]["distillation_weight"] == [1]
    for logs in found:
        np.testing.assert_allclose(
            logs["distillation_loss"], [expected], rtol=1e-5
        )


def test_what_it_keeps_comes_back_with_a_backup(tmp_path, start_again):
    def run(epochs):
        model = cases.codistill(cases.linear(0), _Counting(_FREQUENCIES))
        cases.fit(
            model,
            _X,
            _Y,
            epochs=epochs,
            callbacks=[
                tfdistill.callbacks.TeacherLoader(every_steps=1),
                tfdistill.callbacks.Backup(tmp_path),
            ],
        )
        return model.teachers.status()[0]["refreshes"]

    assert run(2) == 2
    start_again()
    assert run(5) == 5


@pytest.mark.parametrize(
    ("answer", "received"), [(None, "nothing"), (np.zeros([1, 4]), r"\(1, 4\)")]
)
def test_an_answer_that_does_not_fit_says_whose(answer, received):
    class Odd(tfdistill.teachers.Teacher):
        def ask(self, batch):
            return answer

    model = cases.codistill(cases.linear(0), Odd())
    words = rf"teacher odd .* \(None, 3\); received {received}\."
    with pytest.raises(ValueError, match=words):
        cases.fit(model, _X, _Y)
