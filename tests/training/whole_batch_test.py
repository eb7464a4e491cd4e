"""Which training steps need all rows of a batch."""

import keras
import pytest
import tensorflow as tf

from tfdistill.training import whole_batch

ops = keras.ops


class _Of(keras.Model):
    """A model whose step takes the loss that a function gives."""

    def __init__(self, loss, change=list):
        super().__init__()
        self.layers_of_it = [
            keras.layers.MultiHeadAttention(2, 2),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
        self.tracker = keras.metrics.Mean()
        self.kept = self.add_weight(shape=(3,), trainable=False)
        self.other = tf.Variable([0.0] * 3, trainable=False)
        self.own_optimizer = keras.optimizers.SGD()
        self._loss, self._change = loss, change

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, x):
        with tf.GradientTape() as tape:
            attend, normalize, dense = self.layers_of_it
            z = dense(normalize(attend(x, x), training=True))
            loss = self._loss(self, z[:, 0])
        variables = self.trainable_weights
        gradients = self._change(tape.gradient(loss, variables))
        self.own_optimizer.apply(gradients, variables)
        self.tracker.update_state(loss)
        return {}


def _beside(model, z):
    return ops.mean(ops.exp(-ops.square(z[:, None] - z[None])))


def _correlated(model, z):
    return ops.sum(ops.square(ops.matmul(ops.transpose(z), z)))


def _in_queue(model, z):
    model.kept.assign(0.9 * model.kept + 0.1 * ops.mean(z, 0))
    return ops.mean(z)


def _in_variable(model, z):
    model.other.assign_add(tf.reduce_sum(z, 0))
    return ops.mean(z)


def _of_each_row(model, z):
    """A gradient's length, a quantized row, and noise that is learned."""
    with tf.GradientTape() as tape:
        tape.watch(z)
        score = ops.sum(ops.tanh(z))
    length = ops.norm(tape.gradient(score, z), axis=1)
    nearest = ops.argmin(ops.matmul(z, ops.ones((3, 5))), axis=1)
    chosen = ops.matmul(ops.one_hot(nearest, 5), ops.ones((5, 3)))
    noise = keras.random.normal(ops.shape(z)) * ops.exp(z)
    model.kept.assign(model.kept + 1)
    return ops.mean((length - 1) ** 2) + ops.mean((chosen - z + noise) ** 2)


def _with_noise(model, z):
    return ops.mean((z + keras.random.normal((4, 3), seed=1)) ** 2)


def _over_mask(model, z):
    known = ops.cast(z > 0, "float32")
    return ops.sum(z * known) / ops.sum(known)


def _over_count(model, z):
    return ops.sum(z) / ops.cast(tf.math.count_nonzero(z), "float32")


def _of_means(model, z):
    """Sums and means, with weights that aren't of rows."""
    size = ops.cast(ops.shape(z)[0], "float32")
    weight = ops.exp(-model.kept[0])
    return weight * (ops.sum(z**2) / size - 0.5 * ops.mean(z)) + weight**2


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda m, z: ops.mean(ops.matmul(z, ops.transpose(z)) ** 2), "loss"),
        (lambda m, z: ops.mean(ops.einsum("id,jd->ij", z, z) ** 2), "loss"),
        (lambda m, z: ops.mean(ops.einsum("id,id->i", z, z)), None),
        (_beside, "loss"),
        (_correlated, "loss"),
        (_in_queue, "assigns rows to the variable"),
        (_in_variable, "assigns rows to a variable"),
        (_of_each_row, None),
        (_over_mask, "numbers of the whole batch"),
        (_over_count, "numbers of the whole batch"),
        (lambda m, z: ops.sqrt(ops.mean(z**2)), "numbers of the whole batch"),
        (lambda m, z: ops.mean(z / ops.max(z)), "numbers of the whole batch"),
        (_of_means, None),
        (lambda m, z: ops.mean(z) + ops.sum(z**2) / 8, "adds up rows"),
    ],
)
def test_it_is_seen_in_a_trace(loss, reason, batch_size):
    spec = tf.TensorSpec([batch_size, 5, 3])
    found = whole_batch.reason(_Of(loss), spec, [])
    assert reason in found if reason else found is None


def _clipped(gradients):
    return tf.clip_by_global_norm(gradients, 1.0)[0]


def _by_length(gradients):
    return [g / (1 + ops.sum(g * g)) for g in gradients]


def _in_half(gradients):
    return [tf.cast(0.5 * (g + g), "float32") for g in gradients]


def test_a_step_for_one_batch_size_is_seen():
    spec = tf.TensorSpec([None, 5, 3])
    found = whole_batch.reason(_Of(_with_noise), spec, [])
    assert found == "works for one batch size only"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_clipped, "changes the gradients"),
        (_by_length, "changes the gradients"),
        (_in_half, None),
    ],
)
def test_what_a_step_does_with_gradients_is_seen(change, reason):
    model = _Of(lambda m, z: ops.mean(z), change)
    found = whole_batch.reason(model, tf.TensorSpec([None, 5, 3]), [])
    assert reason in found if reason else found is None


def test_what_a_step_does_with_gradients_of_a_function_is_seen():
    class Apart(_Of):
        def train_step(self, x):
            @tf.function(autograph=False)
            def squares(x):
                return [x[0, 0] * 0]

            kept = self.kept
            self.own_optimizer.apply(self._change(squares(x)), [kept])
            return {}

    for change, is_seen in (_clipped, True), (_in_half, False):
        model = Apart(None, change)
        found = whole_batch.reason(model, tf.TensorSpec([None, 5, 3]), [])
        assert bool(found) is is_seen


def test_an_update_under_a_condition_is_refused():
    class Every(_Of):
        def train_step(self, x):
            update = super().train_step
            tf.cond(x[0, 0, 0] > 0, lambda: update(x), dict)
            return {}

    model = Every(lambda m, z: ops.mean(z))
    with pytest.raises(ValueError, match="received Every.train_step"):
        whole_batch.reason(model, tf.TensorSpec([None, 5, 3]), [])


def _normalized_twice(x):
    layer = keras.layers.BatchNormalization()
    return layer(layer(x, training=True), training=True)


def _whole(x):
    return ops.cast(x, "int32")


def _number(x):
    return ops.cast(x, "float32")


def _recurrent(x):
    """Steps in a loop, which are the first axis of what it gives."""
    steps = keras.layers.Reshape((-1, 1))(x)
    return keras.layers.Bidirectional(keras.layers.GRU(2))(steps)


def _longest(x):
    """As the length of a mask is found."""
    return x * _number(ops.max(_whole(x)))


def _with_loss(x):
    layer = keras.layers.ActivityRegularization(l2=1.0)
    return layer(x)


@pytest.mark.parametrize(
    ("call", "is_seen"),
    [
        (lambda x: x - ops.mean(x, 0), True),
        (lambda x: x / ops.max(x), True),
        (lambda x: x - ops.mean(x, 1, keepdims=True), False),
        (lambda x: x - x[:1, :], True),
        (lambda x: x + ops.flip(x, 0), True),
        (lambda x: ops.cumsum(ops.relu(x), 0), True),
        (lambda x: x - ops.roll(x, 1, 0), True),
        (lambda x: ops.concatenate(ops.split(x, 2)[::-1]), True),
        (lambda x: ops.take(x, [1, 0], axis=0), True),
        (lambda x: x / _number(ops.sum(_whole(x), 0)), True),
        (lambda x: ops.reshape(ops.reshape(x, (12,)), (-1, 3)), True),
        (lambda x: ops.cumsum(x[:, ::-1], 1)[:, 1:], False),
        (lambda x: x + ops.expand_dims(x, 0)[0], False),
        (_recurrent, False),
        (_normalized_twice, False),
        (_longest, False),
        (_with_loss, False),
    ],
)
def test_what_a_call_makes_of_all_rows_is_seen(call, is_seen):
    inputs = keras.Input((3,))
    model = keras.Model(inputs, call(inputs))
    found = []

    @tf.function(autograph=False)
    def trace(x):
        results = model(x, training=True)
        found.append(whole_batch.compares(model, x, results))
        return results

    trace.get_concrete_function(tf.TensorSpec([None, 3]))
    assert found == [is_seen]


def test_of_what_cannot_be_traced_nothing_is_said():
    def loss(model, z):
        return z.numpy()

    assert (
        whole_batch.reason(_Of(loss), tf.TensorSpec([None, 5, 3]), []) is None
    )
