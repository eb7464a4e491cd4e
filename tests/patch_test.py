"""Ordinary scripts under `patch_keras`, against what plain Keras makes of them.

A script is a function here, which knows nothing of tfdistill.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import tiers
from tfdistill import patch
from tfdistill.cluster import method
from tfdistill.system import keras_internals


@pytest.fixture
def patched(monkeypatch):
    """What runs a script under a strategy, with Keras patched."""

    def run(script, strategy):
        monkeypatch.setattr(patch._patched, "strategy", strategy)
        tfdistill.patch_keras()
        is_default = strategy is tf.distribute.get_strategy()
        try:
            with contextlib.nullcontext() if is_default else strategy.scope():
                keras.utils.set_random_seed(1)
                return script()
        finally:
            tfdistill.patch_keras(False)

    return run


@pytest.fixture
def as_in_a_group(patched, run_dir, monkeypatch):
    """What runs a script as the only task of the first of two groups."""
    monkeypatch.setenv("TFDISTILL_NUM_GROUPS", "2")
    monkeypatch.setenv("TFDISTILL_GROUP", "0")
    return lambda script: patched(script, tf.distribute.get_strategy())


def _data(*shape):
    return np.random.default_rng(0).random((12, *shape), "float32")


def _normalized():
    """Batch normalization, and files by functions and by a callback."""
    model = keras.Sequential(
        [
            keras.Input((3,)),
            # A bias would get no gradient but what rounding leaves.
            keras.layers.Dense(4, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    x, y = _data(3), _data(1)
    kept = keras.callbacks.ModelCheckpoint("kept.keras")
    history = model.fit(
        *(x, y),
        batch_size=5,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[kept],
    )
    keras.models.save_model(model, "saved.keras")
    files = [keras.models.load_model(f"{n}.keras") for n in ("kept", "saved")]
    for each in files:
        assert not each.layers[1].get_config()["synchronized"]
        np.testing.assert_array_equal(
            each.get_weights()[0], model.get_weights()[0]
        )
    return model.get_weights(), history.history


def _own_function():
    """A step in a `tf.function`, with data and an optimizer of its own."""

    class Triplets(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed = keras.layers.Dense(2, use_bias=False)
            self.mean = keras.metrics.Mean("loss")
            self.other = keras.optimizers.Adam()

        def call(self, triple):
            first, near, far = triple
            return [self.embed(each) for each in (first, near, far)]

        @tf.function
        def train_step(self, triple):
            with tf.GradientTape() as tape:
                first, near, far = self(triple)
                distances = [
                    tf.reduce_sum(tf.square(first - each), -1)
                    for each in (near, far)
                ]
                loss = tf.reduce_mean(distances[0] - 0.1 * distances[1])
            gradients = tape.gradient(loss, self.trainable_variables)
            self.other.apply_gradients(
                zip(gradients, self.trainable_variables, strict=True)
            )
            self.mean.update_state(loss)
            return {"loss": self.mean.result()}

        @property
        def metrics(self):
            return [self.mean]

    model = Triplets()
    triple = tuple(i + _data(3) ** i for i in (1, 2, 3))
    model(triple)
    model.compile("adam", weighted_metrics=[])
    data = tf.data.Dataset.from_tensor_slices(triple).batch(5)
    history = model.fit(data, epochs=2, shuffle=False, verbose=0)
    # Seeds of what is made after a training are what they would be.
    other = keras.layers.Dense(2)
    other.build((None, 3))
    return model.get_weights(), history.history, other.get_weights()


def _cut_out():
    """A model that was never compiled, asked about one row, and exported."""
    inputs = keras.Input((None, 2))
    states = keras.layers.LSTM(3)(keras.layers.Conv1D(3, 2)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(states))
    cut = keras.Model(model.input, states)
    cut.export("exported", verbose=False)
    exported = tf.saved_model.load("exported")
    x = _data(4, 2)
    return cut.predict(x[:1], verbose=0), exported.serve(x)


def _exported_layer():
    """A frozen layer of an exported model, below one that trains."""
    inputs = keras.Input((3,))
    whole = keras.Model(inputs, keras.layers.Dense(4, "tanh")(inputs))
    whole.export("whole", verbose=False)
    layer = keras.layers.TFSMLayer("whole", trainable=False)
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = _data(3)
    model.fit(x, _data(1), batch_size=5, shuffle=False, verbose=0)
    return model.get_weights(), model(x), model.predict(x, verbose=0)


def _positions():
    """An embedding of positions, each of which a replica has once."""

    class Placed(keras.layers.Layer):
        def build(self, shape):
            self.embed = keras.layers.Embedding(*shape[1:])

        def call(self, x):
            places = keras.ops.arange(keras.ops.shape(x)[1])
            return x + self.embed(keras.ops.expand_dims(places, 0))

    model = keras.Sequential(
        [keras.Input((3, 2)), Placed(), keras.layers.Flatten()]
    )
    model.compile("adam", "mse")
    x, y = _data(3, 2), _data(6)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return model.get_weights()


def _own_evaluate():
    """An evaluation of its own, which `fit` calls, too, and asks Keras'."""

    class Doubled(keras.Model):
        def fit(self, *args, **kwargs):
            history = super().fit(*args, **kwargs).history
            return {name: values * 2 for name, values in history.items()}

        def evaluate(self, x, y=None, **kwargs):
            found = super().evaluate(x, y, **kwargs)
            return {"doubled": 2 * found["loss"]}

    inputs = keras.Input((3,))
    model = Doubled(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    x, y = _data(3), _data(1)
    found = model.fit(
        *(x, y), batch_size=5, validation_data=(x, y), shuffle=False, verbose=0
    )
    return found, model.evaluate(x, y, return_dict=True, verbose=0)


def _ratio():
    """Numbers of a batch or a column, of which rows have unlike shares."""

    def accuracy_where_known(y, predicted):
        known = keras.ops.cast(y > 0.6, "float32")
        right = keras.ops.cast(predicted > 0.3, "float32") * known
        return keras.ops.sum(right) / keras.ops.sum(known)

    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile(
        "sgd",
        keras.losses.CosineSimilarity(axis=0),
        metrics=[accuracy_where_known, keras.metrics.CosineSimilarity(axis=0)],
    )
    history = model.fit(
        *(_data(3), _data(1)), batch_size=5, epochs=2, shuffle=False, verbose=0
    )
    return history.history


def _accumulates():
    """Three batches an update, which is clipped."""
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    optimizer = keras.optimizers.Adam(
        0.1, gradient_accumulation_steps=3, global_clipnorm=0.1
    )
    model.compile(optimizer, "mse")
    # The last batch of an epoch has two rows, and is the first of an update.
    model.fit(
        *(_data(3), _data(1)), batch_size=5, epochs=3, shuffle=False, verbose=0
    )
    return model.get_weights(), optimizer.iterations.numpy()


def _built_by_its_step():
    """A step that alone knows its layers, with losses of each row."""

    class Sorted(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)
            self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

        def call(self, x):
            return self.dense(x)

        def learn(self, x):
            with tf.GradientTape() as tape:
                loss = keras.ops.sum(self(x) ** 2, -1)
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder = keras.Sequential([keras.layers.Dense(4)])
            self.sorted = Sorted()

        def train_step(self, x):
            with tf.GradientTape() as tape:
                loss = keras.losses.mean_squared_error(x, self.encoder(x))
            variables = self.encoder.trainable_variables
            gradients = tape.gradient(loss, variables)
            self.optimizer.apply_gradients(
                zip(gradients, variables, strict=True)
            )
            self.sorted.learn(x)
            return {"loss": keras.ops.mean(loss)}

    model = Own()
    model.compile(keras.optimizers.SGD(0.05))
    data = tf.data.Dataset.from_tensor_slices(_data(4)).batch(5)
    model.fit(data, epochs=2, shuffle=False, verbose=0)
    return model.encoder.get_weights(), model.sorted.get_weights()


def _of_a_graph():
    """A step that calls the model with nodes it has, for some of their rows."""

    class Graph(keras.Model):
        def __init__(self):
            super().__init__()
            self.nodes = keras.ops.convert_to_tensor(_data(4))
            self.scale = keras.ops.convert_to_tensor(0.5)
            self.dense = keras.layers.Dense(3)

        def call(self, inputs):
            nodes, scales = inputs
            return self.dense(nodes * scales)

        def train_step(self, data):
            rows, classes = data
            with tf.GradientTape() as tape:
                outputs = keras.ops.take(
                    self([self.nodes, self.scale]), rows, axis=0
                )
                loss = self.compute_loss(y=classes, y_pred=outputs)
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            self.metrics[0].update_state(loss)
            self.metrics[1].update_state(classes, outputs)
            return self.get_metrics_result()

    model = Graph()
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    rows = np.arange(10)
    model.fit(rows, rows % 3, batch_size=4, shuffle=False, verbose=0)
    return model.get_weights()


def _added_losses():
    """Losses by `add_loss`: a sum over rows, one of each row, and a mean."""

    class Adds(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * keras.ops.sum(x))
            self.add_loss(keras.ops.sum(x**2, -1, keepdims=True))
            self.add_loss(keras.ops.mean(x**2))
            return x

    class Counts(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.tracker = keras.metrics.Mean("loss")

        def compute_loss(self, x, y, y_pred, sample_weight, training=True):
            loss = keras.ops.mean((y - y_pred) ** 2)
            self.tracker.update_state(loss)
            return loss

        @property
        def metrics(self):
            return [self.tracker]

    found = []
    for kind, layers in (
        (keras.Model, [keras.layers.Dense(2, kernel_regularizer="l2"), Adds()]),
        (Counts, [keras.layers.Dense(1)]),
    ):
        outputs = inputs = keras.Input((3,))
        for layer in layers:
            outputs = layer(outputs)
        model = kind(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.01), "mse")
        # The last batch has two rows.
        history = model.fit(
            *(_data(3), _data(1)),
            batch_size=5,
            epochs=2,
            shuffle=False,
            verbose=0,
        )
        found += [model.get_weights(), history.history]
    return found


def _pictures():
    """A frozen part with outputs of two sizes, of one row as in `_volumes`."""
    layers = keras.layers
    x = inputs = keras.Input((8, 8, 3))
    found = []
    for filters in (4, 8):
        x = layers.Conv2D(filters, 4, 2, "same", use_bias=False)(x)
        x = layers.LeakyReLU()(layers.BatchNormalization()(x))
        found.append(x)
    frozen = keras.Model(inputs, found)
    frozen.trainable = False
    inputs = keras.Input((8, 8, 3))
    first, second = frozen(inputs)
    second = layers.Conv2DTranspose(4, 3, 2, "same")(second)
    model = keras.Model(inputs, layers.concatenate([first, second]))
    return model.predict(tf.constant(_data(8, 8, 3)[:1]), verbose=0)


def _volumes():
    """A convolution of any size, of one row: a replica has none."""
    model = keras.Sequential(
        [keras.Input((None, 4, 4, 3)), keras.layers.Conv3D(1, 3)]
    )
    return model.predict(_data(5, 4, 4, 3)[:1], verbose=0)


def _without_training():
    """A `call` without `training`: Keras' layers infer in its steps."""

    class Graph(keras.Model):
        def __init__(self):
            super().__init__()
            self.layers_of_nodes = [
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]

        def call(self, nodes):
            values = keras.ops.convert_to_tensor(_data(3))
            for layer in self.layers_of_nodes:
                values = layer(values)
            return keras.ops.take(values, nodes, axis=0)

    model = Graph()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    history = model.fit(
        *(np.arange(12), _data(1)), batch_size=5, shuffle=False, verbose=0
    )
    return history.history, model.get_weights()


class _Contrastive(keras.Model):
    """Compares rows of two data sets; counts what only sums can tell."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [keras.layers.Dense(4), keras.layers.BatchNormalization()]
        )
        self.tracker = keras.metrics.Mean("contrastive")
        self.count = keras.metrics.Sum("count")
        self.hits = keras.metrics.SparseCategoricalAccuracy("hits")

    @property
    def metrics(self):
        return [self.tracker, self.count, self.hits]

    def train_step(self, data):
        (some, others), flags = data
        x = keras.ops.concatenate([some, others])
        with tf.GradientTape() as tape:
            z = self.encoder(x, training=True)
            products = keras.ops.matmul(z, keras.ops.transpose(z))
            places = keras.ops.arange(keras.ops.shape(x)[0])
            losses = keras.losses.sparse_categorical_crossentropy(
                places, products, from_logits=True
            )
            loss = keras.ops.mean(losses)
        variables = self.encoder.trainable_weights
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.tracker.update_state(loss)
        self.count.update_state(keras.ops.cast(flags, "float32"))
        self.hits.update_state(places, products)
        return {m.name: m.result() for m in self.metrics}


def _pairs():
    """A step whose data are pairs of what the model is called with."""

    class Pairs(keras.Model):
        def train_step(self, pairs):
            with tf.GradientTape() as tape:
                one, other = self(pairs[:, 0]), self(pairs[:, 1])
                loss = self.compute_loss(y=one, y_pred=other)
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(one, other)
            return {m.name: m.result() for m in self.metrics}

    inputs = keras.Input((3,))
    model = Pairs(inputs, keras.layers.Dense(2, "tanh")(inputs))
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    history = model.fit(_data(2, 3), batch_size=5, shuffle=False, verbose=0)
    return history.history, model.get_weights()


def _masked():
    """A step of labels that it makes itself, over those that count."""

    class Masked(keras.Model):
        def train_step(self, data):
            x, classes = data
            y = keras.ops.one_hot(classes, 3)
            known = keras.ops.cast(classes > 0, "float32")
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                losses = keras.losses.categorical_crossentropy(y, y_pred)
                loss = keras.ops.sum(losses * known) / keras.ops.sum(known)
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"masked": loss, **self.compute_metrics(x, y, y_pred)}

    inputs = keras.Input((3,))
    model = Masked(inputs, keras.layers.Dense(3, "softmax")(inputs))
    loss = keras.losses.CategoricalCrossentropy()
    model.compile(keras.optimizers.SGD(0.5), loss, metrics=["accuracy"])
    classes = np.arange(12) % 3
    history = model.fit(
        *(_data(3), classes), batch_size=5, epochs=2, shuffle=False, verbose=0
    )
    del history.history["loss"]  # Keras gives the mean of nothing.
    return history.history, model.get_weights()


class ByStep(keras.Model):
    """The step of its own that public examples have."""

    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, weights)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"own": loss, **self.compute_metrics(x, y, y_pred, weights)}


def _sums():
    """Sums over rows, in a `compute_loss` and in a step."""

    class Adds(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
            return keras.ops.sum((y - y_pred) ** 2)

    class AddsByStep(ByStep, Adds):
        pass

    found = []
    inputs = keras.Input((3,))
    for kind, loss in (
        (Adds, None),
        (AddsByStep, None),
        (ByStep, keras.losses.MeanSquaredError("sum")),
    ):
        model = kind(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.01), loss)
        # The last batch has two rows.
        history = model.fit(
            *(_data(3), _data(1)), batch_size=5, shuffle=False, verbose=0
        )
        found += [model.get_weights(), history.history.get("own", [])]
    return found


def _weighted():
    """Weights of rows, in a `compute_loss` and in steps of its own."""

    class Weighs(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.tracker = keras.metrics.Mean("loss")

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            losses = keras.losses.mean_squared_error(y, y_pred)
            self.tracker.update_state(losses, sample_weight)
            total = keras.ops.sum(losses * sample_weight)
            return total / keras.ops.sum(sample_weight)

        def compute_metrics(self, x, y, y_pred, sample_weight):
            return {"loss": self.tracker.result()}

        @property
        def metrics(self):
            return [self.tracker]

    class WeighsByStep(ByStep, Weighs):
        def test_step(self, data):
            self.compute_loss(data[0], data[1], self(data[0]), data[2])
            return {"loss": self.tracker.result()}

    found = []
    inputs = keras.Input((3,))
    arrays = _data(3), _data(1)
    weights = _data(2)[:, 0]
    for kind in (Weighs, WeighsByStep):
        model = kind(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.1))
        options = dict(batch_size=5, sample_weight=weights, verbose=0)
        history = model.fit(*arrays, shuffle=False, **options)
        evaluated = model.evaluate(*arrays, **options)
        found += [model.get_weights(), history.history, evaluated]
    return found


def _compares_rows():
    """A contrastive step, whose data sets have other rows each."""
    model = _Contrastive()
    model.compile(keras.optimizers.SGD(0.05))
    flags = _data(1)[:, 0] > 0.5
    some = tf.data.Dataset.from_tensor_slices(_data(3)).batch(5)
    others = tf.data.Dataset.from_tensor_slices(_data(3)[:10] ** 2).batch(4)
    flags = tf.data.Dataset.from_tensor_slices(flags).batch(5)
    data = tf.data.Dataset.zip((some, others)), flags
    history = model.fit(
        tf.data.Dataset.zip(data), epochs=2, shuffle=False, verbose=0
    )
    return history.history, model.get_weights()


def _compares_in_call():
    """Rows that a model's own `call` compares, under Keras' own steps."""

    class Dot(keras.layers.Layer):
        def call(self, x):
            products = keras.ops.matmul(x, keras.ops.transpose(x))
            places = keras.ops.arange(keras.ops.shape(x)[0])
            losses = keras.losses.sparse_categorical_crossentropy(
                places, products, from_logits=True
            )
            self.add_loss(keras.ops.mean(losses))
            self.add_loss(losses)
            return x + keras.ops.tensordot(x, x, 2)

    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(2, use_bias=False)(inputs)
    outputs = keras.layers.BatchNormalization()(outputs)
    outputs = keras.layers.Dense(1)(Dot()(outputs))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    x, y = _data(3), _data(1)
    history = model.fit(
        *(x, y), batch_size=5, validation_data=(x, y), shuffle=False, verbose=0
    )
    found = model.predict(x, batch_size=5, verbose=0)
    return history.history, model.get_weights(), found


class _Centered(keras.layers.Layer):
    """Takes rows around their mean, perhaps in training only."""

    def __init__(self, *, always=True):
        super().__init__()
        self._always = always

    def call(self, x, training=None):
        is_centered = self._always or training
        return x - keras.ops.mean(x, 0) if is_centered else x


def _centers():
    """Rows around their mean, in a model that predicts before it trains."""
    layers = [keras.layers.BatchNormalization(), _Centered()]
    model = keras.Sequential([keras.Input((3,)), *layers])
    return model.predict(_data(3), batch_size=5, verbose=0)


def _centers_in_training():
    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(2)(_Centered(always=False)(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    history = model.fit(
        *(_data(3), _data(2)), batch_size=5, shuffle=False, verbose=0
    )
    return history.history, model.get_weights()


def _embeds():
    """Embeddings that several rows have, by Adam, which squares each slice."""

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = keras.ops.sqrt(keras.ops.mean((self(x) - y) ** 2))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"root": loss}

    found = []
    for kind, layers in (keras.Model, [_Centered()]), (Own, []):
        outputs = inputs = keras.Input((2,), dtype="int32")
        for layer in (keras.layers.Embedding(4, 3), *layers):
            outputs = layer(outputs)
        model = kind(inputs, keras.layers.Dense(1)(outputs))
        model.compile("adam", "mse")
        tokens = np.arange(24).reshape(12, 2) % 4
        model.fit(
            *(tokens, _data(2, 1)), batch_size=5, shuffle=False, verbose=0
        )
        found.append(model.get_weights())
    return found


def _compares_in_loss():
    """Rows that a model's own `compute_loss` compares."""

    class Pairs(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
            products = keras.ops.matmul(y_pred, keras.ops.transpose(y_pred))
            places = keras.ops.arange(keras.ops.shape(products)[0])
            losses = keras.losses.sparse_categorical_crossentropy(
                places, products, from_logits=True
            )
            return keras.ops.mean(losses) + keras.ops.mean((y - y_pred) ** 2)

    inputs = keras.Input((3,))
    model = Pairs(inputs, keras.layers.Dense(2)(inputs))
    model.compile(keras.optimizers.SGD(0.1), metrics=["mae"])
    x, y = _data(3), _data(2)
    history = model.fit(
        *(x, y), batch_size=5, validation_data=(x, y), shuffle=False, verbose=0
    )
    return history.history, model.get_weights()


def _queue():
    """A step that keeps its last rows, which it counts."""

    class Queue(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)
            self.dense.build((None, 3))
            self.queue = self.add_weight(
                shape=(6, 3), initializer="ones", trainable=False
            )

        def train_step(self, x):
            with tf.GradientTape() as tape:
                z = self.dense(x)
                known = z @ keras.ops.transpose(self.queue.value)
                loss = keras.ops.mean(keras.ops.logsumexp(known, 1))
            variables = self.dense.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            kept = self.queue[: -keras.ops.shape(x)[0]]
            self.queue.assign(keras.ops.concatenate([z, kept]))
            return {"queue_loss": loss}

    model = Queue()
    model.compile(keras.optimizers.SGD(0.05))
    data = tf.data.Dataset.from_tensor_slices(_data(3))
    history = model.fit(
        data.batch(4, drop_remainder=True), epochs=2, shuffle=False, verbose=0
    )
    return history.history, model.get_weights(), model.queue.numpy()


def _years():
    """Batch normalization of numbers that vary little."""
    layer = keras.layers.BatchNormalization(momentum=0.5)
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = 2000 + _data(3), _data(1)
    model.fit(x, y, batch_size=5, shuffle=False, verbose=0)
    return layer.moving_mean, layer.moving_variance


def _compiled_again():
    """Compiled twice: what the second `compile` leaves out stays."""
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse", loss_weights=0.5, metrics=["mae"])
    found = []
    for rate in (0.1, 0.01):
        model.compile(keras.optimizers.SGD(rate))
        history = model.fit(
            *(_data(3), _data(1)), batch_size=5, shuffle=False, verbose=0
        )
        found.append(history.history)
    return found


def _saturated():
    """Probabilities of 0 and 1, of which Keras knows the logits."""

    class BySoftmax(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, inputs):
            return tf.nn.softmax(self.dense(inputs))

    found = []
    x, classes = _data(3) * 1e3, np.arange(12) % 3
    for last, loss in [
        (keras.layers.Dense(3, "softmax"), "sparse_categorical_crossentropy"),
        (keras.layers.Dense(1, "sigmoid"), "binary_crossentropy"),
        (BySoftmax(), "sparse_categorical_crossentropy"),
    ]:
        model = keras.Sequential([last])
        model.compile("sgd", loss)
        is_binary = loss == "binary_crossentropy"
        y = (classes == 0)[:, None] if is_binary else classes
        model.fit(x, y, batch_size=5, shuffle=False, verbose=0)
        found.append((model.evaluate(x, y, verbose=0), model.get_weights()))
    assert found[0][0] > -np.log(keras.config.epsilon())
    return found


def _gradients_to_look_at():
    """Gradients by a callback, and by a variable that no model has."""
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    x, y = _data(3), _data(1)
    found = []

    def look(epoch, logs):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        found.append(tape.gradient(loss, model.trainable_variables))

    looks = keras.callbacks.LambdaCallback(on_epoch_end=look)
    model.fit(x, y, shuffle=False, verbose=0, callbacks=[looks])
    picture = tf.Variable(x, trainable=False)
    with tf.GradientTape() as tape:
        tape.watch(picture)
        output = model(picture)
    return found, tape.gradient(output, picture)


_FURTHER = (
    *(_own_evaluate, _pairs, _positions, _built_by_its_step, _pictures),
    *(_volumes, _without_training, _ratio, _years, _compiled_again),
    *(_gradients_to_look_at, _saturated, _compares_in_loss, _exported_layer),
    *(_centers_in_training, _embeds, _of_a_graph, _sums, _weighted),
)


@pytest.mark.parametrize(
    "script",
    [
        *(_normalized, _own_function, _cut_out, _added_losses, _compares_rows),
        *(_queue, _accumulates, _compares_in_call, _centers, _masked),
        *map(tiers.deep, _FURTHER),
    ],
)
def test_two_replicas_do_what_keras_does_alone(
    script, patched, two_replicas, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    keras.utils.set_random_seed(1)
    expected = script()
    needs_all = {
        _compares_rows: "compares rows",
        _compares_in_call: "Functional.call .* compares rows",
        _queue: "assigns .*'queue",
        _centers: "Sequential.call .* compares rows",
        _centers_in_training: "Functional.call .* compares rows",
        _embeds: "computes the whole batch",
        _sums: "train_step .* adds up rows",
        _weighted: "train_step .* (weights of rows|whole batch)",
        _masked: "Masked.train_step .* numbers of the whole batch",
    }
    with (
        pytest.warns(UserWarning, match=needs_all[script])
        if script in needs_all
        else contextlib.nullcontext()
    ):
        found = patched(script, two_replicas)
    for a, b in zip(*map(keras.tree.flatten, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_chief", [True, False])
def test_workers_write_a_checkpoint_of_tensorflows_together(
    is_chief, patched, two_replicas, tmp_path, monkeypatch
):
    met = []
    monkeypatch.setattr(patch.replicas, "num_workers", lambda _: 2)
    monkeypatch.setattr(patch.replicas, "is_chief", lambda _: is_chief)
    monkeypatch.setattr(
        patch.replicas, "meet", lambda _, call: met.append(call)
    )

    def script():
        value = tf.Variable(3.0)
        checkpoint = tf.train.Checkpoint(value=value)
        manager = tf.train.CheckpointManager(checkpoint, tmp_path / "many", 1)
        manager.save()
        assert manager.save() == manager.latest_checkpoint
        with patch.fits.one(keras.Sequential()):  # By a callback.
            tf.saved_model.save(checkpoint, tmp_path / "exported")
        return manager.checkpoints, checkpoint.write(tmp_path / "one")

    many, one = patched(script, two_replicas)
    assert many == [str(tmp_path / "many" / "ckpt-2")]
    assert one == str(tmp_path / "one")
    assert met == ["save"] * 3
    written = {path.name for path in tmp_path.rglob("*.index")}
    assert written == (
        {"ckpt-2.index", "one.index", "variables.index"} if is_chief else set()
    )
    if is_chief:
        reader = tf.train.load_checkpoint(one)
        name = next(
            n for n in reader.get_variable_to_shape_map() if "value" in n
        )
        assert reader.get_tensor(name) == 3.0


def test_workers_ask_for_metrics_together(patched, two_replicas, monkeypatch):
    met = []
    monkeypatch.setattr(
        patch.replicas, "meet", lambda _, call: met.append(call)
    )

    def script():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
        # Keras traces it once more, to build them.
        model.evaluate(_data(3), _data(1), verbose=0)
        model.get_metrics_result()

    patched(script, two_replicas)
    assert met == ["evaluate", *["get_metrics_result"] * 2]


def _own_loop():
    layer = keras.layers.Dense(1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(_data(3)))
    tape.gradient(loss, layer.trainable_variables)


def _own_functions():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.make_train_function()


def _own_step():
    class Own(keras.Model):
        def train_step(self, data):
            return {}

    _fit(Own, "mse")


def _fit(kind, loss):
    inputs = keras.Input((3,))
    model = kind(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", loss)
    before = model.get_weights()
    try:
        model.fit(_data(3), _data(1), verbose=0)
    finally:
        np.testing.assert_array_equal(before[0], model.get_weights()[0])


def _by_batches():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.train_on_batch(_data(3), _data(1))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (_own_loop, "training loop of the script's own"),
        (_own_step, "with its own train_step.*--teachers=none"),
        (_by_batches, "`train_on_batch` must not.*--teachers=none"),
        (lambda: _fit(keras.Model, lambda y, p: y - p), "--distillation-loss"),
    ],
)
def test_what_groups_cannot_learn_from_is_refused(
    script, reason, as_in_a_group
):
    with pytest.raises(ValueError, match=reason):
        as_in_a_group(script)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (_own_loop, "training loop of the script's own"),
        (_own_functions, "training loop of the.*`make_train_function`"),
        (
            lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
            "received OneDeviceStrategy where Mirrored.* is in",
        ),
        (
            tf.distribute.experimental.CentralStorageStrategy,
            "received CentralStorageStrategy",
        ),
    ],
)
def test_what_each_worker_would_do_alone_is_refused(
    script, reason, patched, two_replicas
):
    with pytest.raises(ValueError, match=reason):
        patched(script, two_replicas)


def test_one_task_trains_by_the_strategy_of_its_script(patched, run_dir):
    def script():
        strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        model.fit(_data(3), _data(1), shuffle=False, verbose=0)
        assert model.distribute_strategy is strategy
        return model.get_weights()

    keras.utils.set_random_seed(1)
    expected = script()
    found = patched(script, tf.distribute.get_strategy())
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    assert (run_dir / "group_0" / "backup").is_dir()


def test_what_is_only_asked_is_asked_by_keras_itself(as_in_a_group):
    def script():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        # Of a loss that says nothing of how groups would agree.
        model.compile(loss=lambda y, p: y - p)
        x, y = _data(3), _data(1)
        return model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)

    keras.utils.set_random_seed(1)
    expected = script()
    found = as_in_a_group(script)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_array_equal(found[1], expected[1])


def test_a_launched_run_backs_up_in_the_place_of_keras(
    patched, run_dir, tmp_path
):
    def script():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        own = keras.callbacks.BackupAndRestore(tmp_path / "own")
        model.fit(_data(3), _data(1), verbose=0, callbacks=[own])

    patched(script, tf.distribute.get_strategy())
    assert not (tmp_path / "own").exists()
    assert (run_dir / "group_0" / "backup").is_dir()


def test_a_model_of_several_optimizers_is_not_backed_up(patched, run_dir):
    class Two(keras.Model):
        def compile(self, other):
            super().compile("sgd")
            self.other = other

        def train_step(self, data):
            return {"loss": tf.reduce_sum(data)}

    def script():
        inputs = keras.Input((3,))
        model = Two(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD())
        model.fit(_data(3), verbose=0)

    patched(script, tf.distribute.get_strategy())
    assert not (run_dir / "group_0" / "backup").exists()


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("mse", tfdistill.losses.LogitsMeanSquaredError),
        ("MeanSquaredError", tfdistill.losses.LogitsMeanSquaredError),
        (keras.losses.Huber(), tfdistill.losses.LogitsMeanSquaredError),
        ("bce", tfdistill.losses.BinarySoftTargetCrossEntropy),
        (
            keras.losses.binary_crossentropy,
            tfdistill.losses.BinarySoftTargetCrossEntropy,
        ),
        (
            "sparse_categorical_crossentropy",
            tfdistill.losses.SoftTargetCrossEntropy,
        ),
        (
            keras.losses.CategoricalCrossentropy(from_logits=True),
            tfdistill.losses.SoftTargetCrossEntropy,
        ),
    ],
)
def test_distillation_losses_follow_from_the_tasks(task, kind):
    assert type(patch.derived(task)) is kind
    found = patch.derived({"a": task, "b": None})
    assert type(found["a"]) is kind and found["b"] is None
    assert type(patch.derived([task])[0]) is kind


@pytest.mark.parametrize("task", [None, "kl_divergence", lambda y, p: y - p])
def test_losses_that_say_nothing_of_outputs_are_refused(task):
    with pytest.raises(ValueError, match="--distillation-loss"):
        patch.derived(task)


def _replaced():
    names = ("compile", *patch._METHODS, *patch._WRITERS)
    return (
        *(getattr(keras.Model, name) for name in names),
        *(vars(m)["save_model"] for m in (keras.models, keras.saving)),
        tf.GradientTape.gradient,
        tf.distribute.MirroredStrategy.__init__,
        tf.distribute.OneDeviceStrategy.__init__,
        "synchronized" in vars(keras.layers.BatchNormalization),
    )


def test_keras_gets_its_own_methods_back(patched, two_replicas):
    before = _replaced()
    while_patched = patched(_replaced, two_replicas)
    for own, other in zip(before, while_patched, strict=True):
        assert own != other
    assert _replaced() == before
    made = tf.distribute.MirroredStrategy(["CPU:0"])
    assert made.num_replicas_in_sync == 1


def test_a_known_lack_of_rows_is_left_open():
    # Keras would take a matrix of no rows for a bias, and could not add it.
    shapes = []

    @tf.function
    def look(x):
        shapes.append(keras_internals.with_none(x).shape.as_list())

    look(tf.zeros([0, 3]))
    assert shapes == [[None, 3]]


class _Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = np.arange(4 * index, 4 * index + 4)
        return {"a": rows}, rows % 2


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [("codistill", True), ("codistill_shared", False), ("predictions", False)],
)
def test_only_arrays_and_data_sets_are_shared_out(
    name, is_refused, monkeypatch
):
    monkeypatch.setattr(method, "shares", set())
    chosen = method.METHODS[name]
    cluster = tfdistill.Cluster(group=1, num_groups=2, method=chosen)
    arguments = {"x": _Batches()}
    refused = pytest.raises(ValueError, match="with codistill_shared")
    with refused if is_refused else contextlib.nullcontext():
        patch._share(arguments, cluster)
    assert list(arguments) == ["x"]
    assert method.shares == {chosen.share}


def test_a_comparison_holds_out_the_rows_of_a_pydataset(monkeypatch):
    monkeypatch.setattr(method, "predicted", set())
    monkeypatch.setattr(patch, "_MOST_HELD_OUT", 11)
    (held_out,) = patch._held_out({"validation_data": _Batches()})
    x, y = held_out._data
    assert x["a"].tolist() == list(range(11))
    assert y.tolist() == [n % 2 for n in range(11)]


def test_a_comparison_holds_out_the_rows_of_the_first_pass(monkeypatch):
    """In their order: methods differ in how often they read them before."""
    monkeypatch.setattr(method, "predicted", set())

    def batches():
        numbers = tf.data.Dataset.range(40).shuffle(40, seed=1)
        return numbers.map(lambda number: (number, number)).batch(8)

    def rows(found):
        return np.concatenate([x for x, _ in found.as_numpy_iterator()])

    validation = batches()
    (held_out,) = patch._held_out({"validation_data": validation})
    assert list(rows(validation)) != list(rows(batches()))
    np.testing.assert_array_equal(rows(held_out._data), rows(batches()))
