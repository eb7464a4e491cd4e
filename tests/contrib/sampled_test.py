"""The output layer whose training computes only drawn classes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import servers
from tfdistill import losses
from tfdistill.contrib import sampled

NUM_CLASSES, FEATURES, ROWS = 40, 5, 6


def make(num_sampled=8, **kwargs):
    layer = sampled.SampledOutput(
        NUM_CLASSES, num_sampled=num_sampled, seed=3, **kwargs
    )
    layer.build((None, FEATURES))
    rng = np.random.default_rng(0)
    layer.set_weights([rng.normal(size=w.shape) for w in layer.get_weights()])
    return layer


def features(num=ROWS):
    found = np.random.default_rng(1).normal(size=(num, FEATURES))
    return tf.constant(found, tf.float32)


def labels(num=ROWS, k=3):
    rng = np.random.default_rng(2)
    ids = np.stack([rng.permutation(NUM_CLASSES)[:k] for _ in range(num)])
    return {
        "ids": ids.astype("int32"),
        "probabilities": rng.dirichlet(np.ones(k), num).astype("float32"),
    }


def dense_labels(ids, probabilities):
    target = np.zeros([len(ids), NUM_CLASSES], "float32")
    np.add.at(target, (np.arange(len(ids))[:, None], ids), probabilities)
    return target


def with_gradients(function, layer, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        values = function(x)
    variables = [x, *(v.value for v in layer.trainable_variables)]
    gradients = tape.gradient(values, variables)
    return values, gradients


def test_inference_is_a_dense_layer():
    layer, dense = make(), keras.layers.Dense(NUM_CLASSES)
    dense.build((None, FEATURES))
    kernel, bias = layer.get_weights()
    dense.set_weights([kernel.T, bias])
    x = tf.reshape(features(), [2, 3, FEATURES])
    np.testing.assert_allclose(layer(x), dense(x), atol=1e-6)
    np.testing.assert_array_equal(layer(x, training=True), x)


def test_all_classes_are_the_dense_loss():
    """Also of rows that name a class twice, or are filled up with one."""
    layer, x, y = make(NUM_CLASSES), features(), labels()
    y["ids"][0] = y["ids"][0, 0]
    y["ids"][1, 1:], y["probabilities"][1] = y["ids"][1, 0], [1, 0, 0]
    y["ids"][2, 2] = y["ids"][2, 0]
    loss = losses.SoftTargetCrossEntropy(from_logits=True)
    target = dense_labels(**y)
    exact, expected = with_gradients(
        lambda x: loss.call(target, layer(x)), layer, x
    )
    found, gradients = with_gradients(
        lambda x: layer.cross_entropy(x, y["ids"], y["probabilities"]), layer, x
    )
    np.testing.assert_allclose(found, exact, rtol=1e-5)
    gradients = [tf.convert_to_tensor(each) for each in gradients]
    cases.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)
    inference = layer.cross_entropy(
        layer(x), y["ids"], y["probabilities"], training=False
    )
    np.testing.assert_allclose(inference, exact, rtol=1e-5)


def test_z_is_unbiased_and_its_logarithm_too_small():
    layer, x = make(), features(2)
    y = labels(2, k=1)
    logits = layer(x).numpy()
    own = np.take_along_axis(logits, y["ids"], 1)[:, 0]

    @tf.function
    def draw():
        return layer.cross_entropy(x, y["ids"], y["probabilities"])

    found = np.stack([draw() for _ in range(200)]).astype("float64")
    z = np.exp(found + own)
    exact = np.exp(logits.astype("float64")).sum(-1)
    error = z.std(axis=0) / np.sqrt(len(z))
    assert (error > 1e-3 * exact).all()
    assert (np.abs(z.mean(axis=0) - exact) <= 3 * error).all()
    assert (found.mean(axis=0) < np.log(exact) - own).all()


def test_no_tensor_has_all_classes_of_a_batch():
    layer, x = make(), features()
    spec = tf.TensorSpec(x.shape)
    y = labels()

    @tf.function(input_signature=[spec])
    def step(x):
        return with_gradients(
            lambda x: layer.cross_entropy(x, y["ids"], y["probabilities"]),
            layer,
            x,
        )

    _, (_, kernel, bias) = step(x)
    assert isinstance(kernel, tf.IndexedSlices)
    assert isinstance(bias, tf.IndexedSlices)
    graph = step.get_concrete_function().graph
    shapes = [out.shape for op in graph.get_operations() for out in op.outputs]
    assert len(shapes) > 50
    wide = [
        s for s in shapes if s.rank and NUM_CLASSES in s and s[0] not in (1, 40)
    ]
    assert not wide


class Student(keras.Model):
    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        values = self.get_layer("classes").cross_entropy(
            y_pred, y["ids"], y["probabilities"], training=training
        )
        return tf.reduce_mean(values)


def student():
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(
        FEATURES,
        activation="tanh",
        kernel_initializer=keras.initializers.GlorotUniform(seed=1),
    )(inputs)
    output = sampled.SampledOutput(
        NUM_CLASSES,
        num_sampled=8,
        seed=3,
        kernel_initializer=keras.initializers.GlorotUniform(seed=2),
        name="classes",
    )
    return Student(inputs, output(hidden))


def batches():
    data = tf.data.Dataset.from_tensor_slices((features(24), labels(24)))
    return data.batch(8)


def trained(strategy, optimizer):
    with strategy.scope():
        model = tfdistill.CodistillModel(student())
        model.compile(optimizer())
    history = model.fit(batches(), epochs=2, verbose=0)
    return model, batches(), history.history["loss"]


@pytest.mark.deep
def test_two_replicas_train_as_one_device(two_replicas):
    # Adam takes a gradient row that comes twice for two rows.
    adam = keras.optimizers.Adam
    one, _, losses_of_one = trained(tf.distribute.get_strategy(), adam)
    two, _, losses_of_two = trained(two_replicas, adam)
    np.testing.assert_allclose(losses_of_two, losses_of_one, rtol=1e-5)
    cases.assert_close(two.student, one.student, rtol=1e-4, atol=1e-6)
    assert np.abs(one.student.get_weights()[-1]).max() > 1e-4


@pytest.mark.deep
def test_a_worker_of_parameter_servers_trains_as_fit_does(monkeypatch):
    # There a step takes all variables as values, the seed among them.
    one = tf.distribute.get_strategy(), keras.optimizers.Adam
    expected, *_ = trained(*one)
    servers.pretend(monkeypatch)
    found, *_ = trained(*one)
    cases.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_evaluation_files_and_teachers_see_a_dense_layer(tmp_path):
    model, data, _ = trained(tf.distribute.get_strategy(), keras.optimizers.SGD)
    x, y = features(24), labels(24)
    logits = model.predict(x, verbose=0)
    assert logits.shape == (24, NUM_CLASSES)
    exact = losses.SoftTargetCrossEntropy(from_logits=True)
    expected = float(exact(dense_labels(**y), logits))
    assert model.evaluate(data, verbose=0) == pytest.approx(expected, rel=1e-5)
    model.save(tmp_path / "student.keras")
    copy = keras.models.load_model(
        tmp_path / "student.keras", custom_objects={"Student": Student}
    )
    np.testing.assert_allclose(copy.predict(x, verbose=0), logits, rtol=1e-5)
    assert (
        copy.get_layer("classes").get_config()
        == model.student.get_layer("classes").get_config()
    )


@pytest.mark.parametrize("training", [True, False])
def test_outputs_of_the_other_mode_are_refused(training):
    layer, y = make(), labels()
    other = layer(features(), training=not training)
    with pytest.raises(ValueError, match="Pass the `training` argument"):
        layer.cross_entropy(other, *y.values(), training=training)


@pytest.mark.parametrize(
    "wrap", [lambda model: model, tfdistill.DistributedModel]
)
def test_a_loss_that_takes_features_for_logits_is_refused(wrap):
    # As many features as classes: no shape tells them apart.
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8)(inputs)
    outputs = sampled.SampledOutput(8, num_sampled=4, name="classes")(hidden)
    model = wrap(keras.Model(inputs, outputs))
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    x, y = np.ones([4, 4], "float32"), np.zeros([4])
    with pytest.raises(ValueError, match="'classes' returns features"):
        model.fit(x, y, verbose=0)
    # In inference these are logits.
    assert np.isfinite(model.evaluate(x, y, verbose=0))
