"""DistributedModel: what it leaves to the model, and what it refuses.

`tests/multi_worker_test.py`, `tests/runs/training_test.py` and
`tests/runs/server_group_test.py` hold its trainings against plain Keras, on
replicas, workers and parameter servers.
"""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import servers as server_cases
from tests.cases import tiers
from tests.cases import training as cases
from tfdistill.cluster import replicas


def _model(inner=None, optimizer="adam", **compiled):
    model = tfdistill.DistributedModel(inner or cases.dense(keras.Model))
    model.compile(optimizer, "mse", **compiled)
    return model


def test_files_are_those_of_the_model(tmp_path):
    x, y = cases.regression(16)
    model = _model(metrics=["mae"])
    model.fit(x, y, batch_size=8, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    # Plain Keras trains on from here, once it is compiled.
    assert not isinstance(loaded, tfdistill.DistributedModel)
    loaded.compile("adam", "mse", metrics=["mae"])
    assert loaded.evaluate(x, y, verbose=0) == pytest.approx(
        model.evaluate(x, y, verbose=0), rel=1e-5
    )
    model.export(tmp_path / "export", verbose=False)
    exported = tf.saved_model.load(tmp_path / "export")
    answers = exported.serve(x)
    np.testing.assert_allclose(answers, model.predict(x, verbose=0), rtol=1e-5)
    model.save_weights(tmp_path / "all.weights.h5")
    other = tfdistill.DistributedModel(cases.dense(keras.Model))
    other.load_weights(tmp_path / "all.weights.h5")
    np.testing.assert_array_equal(other.get_weights()[0], loaded.weights[0])


def test_a_backup_that_would_lack_an_optimizer_is_refused(tmp_path):
    model = _model(cases.dense(cases.OwnLosses))
    with pytest.raises(ValueError, match="it also has top_optimizer"):
        model.fit(
            *cases.regression(8),
            callbacks=[tfdistill.callbacks.Backup(tmp_path)],
        )


class _OwnMetric(keras.metrics.Mean):
    """One that says nothing of what it was made with."""

    def __init__(self, scale):
        super().__init__()
        self._scale = scale

    def update_state(self, y, y_pred, sample_weight=None):
        return super().update_state(self._scale * tf.abs(y - y_pred))


@pytest.mark.parametrize(
    "wrap", ["CodistillModel", tiers.deep("DistributedModel")]
)
def test_a_worker_evaluates_for_a_callback_by_itself(wrap, two_replicas):
    x, y = cases.regression(22)
    metrics = ["mae", keras.metrics.RootMeanSquaredError()]
    with two_replicas.scope():
        model = getattr(tfdistill, wrap)(cases.dense(keras.Model))
        model.compile("sgd", "mse", metrics=metrics)
    model.fit(x, y, batch_size=8, verbose=0)
    alone = replicas.outside_scopes(model._as_alone)
    assert alone.distribute_strategy.num_replicas_in_sync == 1
    model.test_on_batch(x, y)
    before = model.get_metrics_result()
    found = alone.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    assert model.get_metrics_result() == before
    expected = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    assert found == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(
        alone.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-6
    )
    # What only all workers know, and what no other can be made of.
    for inner, given in (
        (cases.OwnLosses, None),
        (keras.Model, [_OwnMetric(2.0)]),
    ):
        other = tfdistill.DistributedModel(cases.dense(inner))
        other.compile("sgd", "mse", metrics=given)
        assert not other._as_alone().compiled


def test_a_step_of_its_own_is_refused_on_servers(monkeypatch):
    model = tfdistill.DistributedModel(cases.dense(cases.OwnStep))
    server_cases.pretend(monkeypatch)
    with pytest.raises(ValueError, match=r"OwnStep.train_step.*compute_loss"):
        model.compile("sgd", "mse")


def test_a_step_of_its_own_is_refused_with_a_table():
    inputs = keras.Input((3,), dtype="int64")
    table = tfdistill.layers.ShardedEmbedding([5, 5, 5], 2)(inputs)
    model = tfdistill.DistributedModel(cases.OwnStep(inputs, table))
    with pytest.raises(ValueError, match="ShardedEmbedding.*OwnStep"):
        model.compile("sgd", "mse")


class _TwoOfAKind(keras.Model):
    """As the GAN of Keras' guide: no `call`, and optimizers of its own."""

    def __init__(self):
        super().__init__()
        self.parts = [cases.dense(keras.Model), cases.dense(keras.Model)]
        self.tracker = keras.metrics.Mean("both")

    def compile(self, *optimizers):
        super().compile()
        self.first, self.second = optimizers

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, x):
        for part, optimizer in zip(
            self.parts, (self.first, self.second), strict=True
        ):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(part(x) ** 2)
            weights = part.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
            self.tracker.update_state(loss)
        return {"both": self.tracker.result()}


def test_a_step_of_its_own_needs_no_call(two_replicas):
    def trained(wrap, strategy=None):
        keras.utils.set_random_seed(1)
        with (strategy or tf.distribute.get_strategy()).scope():
            model = wrap(_TwoOfAKind())
            model.compile(*(keras.optimizers.SGD(0.1) for _ in range(2)))
        data = tf.data.Dataset.from_tensor_slices(cases.regression(16)[0])
        history = model.fit(data.batch(8), verbose=0, shuffle=False).history
        return [*history["both"], *map(np.sum, model.get_weights())]

    expected = trained(lambda model: model)
    found = trained(tfdistill.DistributedModel, two_replicas)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


class _OwnFit(keras.Model):
    def fit(self, *args, **kwargs):
        """Trains in its own way."""


class Tracked(keras.Model):
    """Tracks a part of its own loss."""

    def __init__(self, *args):
        super().__init__(*args)
        self.size = keras.metrics.Mean("size")

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        self.size.update_state(keras.ops.abs(y_pred))
        return super().compute_loss(x, y, y_pred, sample_weight)


def test_what_its_own_loss_tracks_is_logged(two_replicas):
    x, y = cases.regression(16)
    found = []
    for wrap, strategy in (
        (lambda model: model, tf.distribute.get_strategy()),
        (tfdistill.DistributedModel, two_replicas),
    ):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = wrap(cases.dense(Tracked))
            model.compile("sgd", "mse")
        logs = model.fit(x, y, 8, 2, verbose=0, shuffle=False).history
        found.append([*logs["size"], *logs["loss"]])
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: cases.dense, "`model` must be a keras.Model; .* function"),
        (lambda: cases.dense(_OwnFit), "_OwnFit with its own fit"),
    ],
)
def test_what_it_cannot_train_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        tfdistill.DistributedModel(model())


@pytest.mark.parametrize(
    "wrap",
    [tfdistill.CodistillModel, tiers.deep(tfdistill.DistributedModel)],
)
def test_tools_that_take_a_keras_model_take_ours(tmp_path, wrap):
    rng = np.random.default_rng(0)
    x = rng.normal(size=[40, 3]).astype("float32")
    y = (x[:, 0] > 0).astype("int64")

    def made(wrap):
        keras.utils.set_random_seed(0)
        layers = [keras.Input([3]), keras.layers.Dense(2, "softmax")]
        model = wrap(keras.Sequential(layers))
        model.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
        return model

    # Scikit-learn's, which copy the model with what it was compiled with.
    shares = []
    for kind in (wrap, lambda model: model):
        found = keras.wrappers.SKLearnClassifier(
            made(kind), fit_kwargs={"epochs": 3, "verbose": 0}
        )
        shares.append(found.fit(x, y).model_.predict(x, verbose=0))
    np.testing.assert_allclose(*shares, rtol=1e-5)
    model = made(wrap)
    model.fit(x, np.eye(2)[y], verbose=0)
    copied = copy.deepcopy(model)
    assert copied.evaluate(x, np.eye(2)[y], verbose=0) == pytest.approx(
        model.evaluate(x, np.eye(2)[y], verbose=0), rel=1e-5
    )
    # TensorFlow's, which save what is served, and nothing of the training.
    tf.saved_model.save(model, str(tmp_path / "saved"))
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    (served,) = loaded.signatures["serving_default"](tf.constant(x)).values()
    np.testing.assert_allclose(
        served, model.predict(x, verbose=0), rtol=1e-5, atol=1e-7
    )
    keys = tf.train.list_variables(f"{tmp_path}/saved/variables/variables")
    assert not any("optimizer" in key for key, _ in keys)
    with pytest.raises(ValueError, match=r"Call from_keras_model\(model.model"):
        tf.lite.TFLiteConverter.from_keras_model(model).convert()


@pytest.mark.parametrize("copied", [copy.deepcopy, keras.models.clone_model])
def test_a_copy_is_one_of_the_model_inside(copied):
    model = tfdistill.DistributedModel(cases.dense(keras.Model))
    found = copied(model)
    assert type(found) is tfdistill.DistributedModel
    assert found.model is not model.model
