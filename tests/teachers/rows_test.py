"""On which rows a student and its teachers are to agree."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import backup as backup_cases
from tests.cases import codistillation as cases
from tests.cases import servers
from tests.cases import tiers
from tfdistill.teachers import rows

_STEP = 7


def _batches(values, size):
    return tf.data.Dataset.from_tensor_slices(values).batch(size)


def _table(dtype, *shape):
    """Rows whose values tell their row, and their column."""
    count = int(np.prod(shape))
    return tf.cast(tf.reshape(tf.range(count), shape), dtype)


def test_columns_of_mixed_rows_are_those_of_two_neighbours():
    text = tf.strings.as_string(_table(tf.int32, 7, 20))
    inputs = {
        "ids": _table(tf.int64, 7, 20),
        "numbers": _table(tf.float32, 7, 20),
        "text": text,
        "flat": _table(tf.int32, 7),
    }
    found = rows.mixed(inputs, _STEP)
    for name, values in inputs.items():
        first, second = values[:6:2].numpy(), values[1::2].numpy()
        is_first, is_second = found[name] == first, found[name] == second
        assert np.all(np.asarray(is_first) ^ np.asarray(is_second)), name
        # One draw for all rows, so that replicas make the same of them.
        assert np.all(np.asarray(is_first) == np.asarray(is_first)[:1]), name
    both_ways = np.asarray(found["ids"] == inputs["ids"][:6:2])[0]
    assert 0 < both_ways.sum() < 20
    # Other columns of other inputs, and in other steps.
    numbers = np.asarray(found["numbers"] == inputs["numbers"][:6:2])[0]
    later = rows.mixed(inputs, _STEP + 1)["ids"] == inputs["ids"][:6:2]
    assert (numbers != both_ways).any()
    assert (np.asarray(later)[0] != both_ways).any()


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_pictures_are_weighted_sums(dtype):
    pictures = _table(dtype, 4, 3, 3, 2)
    found = rows.mixed(pictures, _STEP)
    share = float(tf.random.stateless_uniform([], [7, 0]))
    first, second = pictures.numpy()[::2], pictures.numpy()[1::2]
    expected = share * first + (1 - share) * second
    assert found.dtype == dtype
    atol = 1e-5 if dtype == "float32" else 0.501
    np.testing.assert_allclose(found, expected, atol=atol)


def _taught_by(student, agree_on, *, teacher=None, **compiled):
    """A compiled model that is to agree on some rows with a teacher."""
    return cases.codistill(
        student,
        tfdistill.teachers.FixedTeacher(teacher or cases.linear(3)),
        kind=functools.partial(tfdistill.CodistillModel, agree_on=agree_on),
        **compiled,
    )


def _fit(agree_on, weight, x, y):
    keras.utils.set_random_seed(1)
    student = keras.Sequential(
        [
            keras.Input([4]),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3),
        ]
    )
    model = _taught_by(student, agree_on, distillation_weight=weight)
    return student, cases.fit(model, x, y, batch_size=8)


def test_what_is_trained_on_labels_stays_as_it_was():
    """Mixed rows move no statistics and draw no mask of a dropout."""
    x, y = cases.data(16)
    alone, _ = _fit("batch", 0.0, x, y)
    for agree_on in ("both", _batches(x, 3)):
        student, _ = _fit(agree_on, 0.0, x, y)
        cases.assert_close(student, alone)


@pytest.mark.parametrize(
    "agree_on",
    [tiers.deep("mixed"), "both", lambda inputs: inputs[:3] * 2, "data"],
)
def test_the_loss_is_that_of_the_rows(agree_on):
    """Against the loss by NumPy, of a student that does not move."""
    x, y = cases.data(7)
    weight = np.linspace(0, 3, 7).astype("float32")
    teacher = cases.linear(3)
    student = cases.linear(1)
    model = _taught_by(
        student,
        _batches(x * 2, 3) if agree_on == "data" else agree_on,
        optimizer=keras.optimizers.SGD(0.0),
    )
    logs = cases.fit(model, x, y, sample_weight=weight, batch_size=7)
    # The first step has number 0.
    mixed = rows.mixed(tf.constant(x), 0).numpy()
    pairs = (weight[:6:2] + weight[1::2]) / 2
    asked, counts = {
        "mixed": (mixed, pairs),
        "both": (
            np.concatenate([x[::2], mixed]),
            np.concatenate([weight[::2], pairs]),
        ),
    }.get(agree_on if isinstance(agree_on, str) else "", (x[:3] * 2, [1] * 3))
    targets = cases.softmax(teacher(asked).numpy())
    own = np.log(cases.softmax(student(asked).numpy()))
    expected = -(targets * own).sum(-1) @ np.asarray(counts) / len(asked)
    np.testing.assert_allclose(logs["distillation_loss"], [expected], rtol=1e-5)


def test_what_cannot_be_mixed_is_refused():
    x, y = cases.data(16)
    with pytest.raises(ValueError, match="must be one of 'batch', 'mixed'"):
        _taught_by(cases.linear(1), "rows")
    with pytest.raises(ValueError, match="may not have answers for other rows"):
        tfdistill.CodistillModel(
            cases.linear(1),
            teachers=tfdistill.teachers.LabelTeacher("labels"),
            agree_on="both",
        )
    bags = tf.RaggedTensor.from_row_lengths(tf.range(3), [1, 2])
    with pytest.raises(ValueError, match="Only dense tensors can be mixed"):
        rows.asked(
            rows.BOTH,
            rows.Rows(
                inputs=bags,
                outputs=x,
                taught=x,
                sample_weight=None,
                targets=y,
                count=None,
            ),
            lambda inputs: (inputs, inputs),
            _STEP,
        )


# ---- rows of a data set ----


def _taught(strategy, agree_on, *, backup=None, stop=None, **compiled):
    """Trains three epochs of six batches; the last one has two rows."""
    keras.utils.set_random_seed(1)
    teacher = cases.linear(3)
    with strategy.scope():
        model = _taught_by(
            cases.linear(1),
            agree_on,
            teacher=teacher,
            optimizer=keras.optimizers.Adam(0.05),
            **compiled,
        )
    data = _batches(cases.data(22), 4)
    if "steps_per_execution" in compiled:  # Where they end is not known.
        data = data.filter(lambda *_: True)
    callbacks = [each for each in (backup, stop) if each is not None]
    model.fit(data, epochs=3, callbacks=callbacks, verbose=0)
    return model


def _rows():
    """Six batches, the last of which has one row."""
    return _batches(cases.data(36, seed=5)[0], 7)


def test_rows_of_a_data_set_are_read_on_from_epoch_to_epoch():
    """Step s gets batch s: as a function of the step would say, by NumPy."""
    one_device = tf.distribute.get_strategy()
    seen = []
    unlabelled = _rows().take(5)

    def noted(inputs):
        batch = tf.numpy_function(
            lambda values: seen.append(values) or values, [inputs], tf.float32
        )
        return tf.ensure_shape(batch, inputs.shape)

    _taught(one_device, unlabelled.map(noted))
    expected = [batch.numpy() for batch in unlabelled.repeat().take(18)]
    for found, wanted in zip(seen, expected, strict=False):
        np.testing.assert_array_equal(found, wanted)
    assert len(seen) >= 18


@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("num_steps", [tiers.deep(1), 4])
def test_replicas_get_parts_of_the_same_rows(num_steps, two_replicas):
    alone = _taught(tf.distribute.get_strategy(), _rows())
    found = _taught(two_replicas, _rows(), steps_per_execution=num_steps)
    cases.assert_close(found, alone, atol=1e-6)


def test_a_training_that_resumes_gets_the_rows_it_would_have_had(tmp_path):

    def trained(**callbacks):
        keras.utils.set_random_seed(1)
        shuffled = _rows().shuffle(6, seed=2)
        return _taught(tf.distribute.get_strategy(), shuffled, **callbacks)

    def backup():
        return tfdistill.callbacks.Backup(tmp_path, every_steps=4)

    expected = trained()
    with pytest.raises(backup_cases.Stopped):
        trained(backup=backup(), stop=backup_cases.StopAt(11))
    resumed = trained(backup=(again := backup()))
    assert again.resumed_step in (4, 8)
    cases.assert_close(resumed, expected)


@pytest.mark.parametrize("num_workers", [tiers.deep(1), 2])
def test_workers_of_servers_get_whole_batches_of_them(num_workers, monkeypatch):
    teacher = servers.student(seed=5)

    def trained():
        agree_on = _batches(servers.data(40)[0], 7)
        model = servers.model(
            kind=functools.partial(tfdistill.CodistillModel, agree_on=agree_on),
            teachers=tfdistill.teachers.FixedTeacher(teacher),
            # Two workers in turn, each a step.
            steps_per_execution=3 if num_workers == 1 else 1,
        )
        train = servers.batches().repeat()
        model.fit(train, epochs=2, steps_per_epoch=6, verbose=0)
        return servers.weights(model)

    expected = trained()
    servers.pretend(monkeypatch, num_workers)
    servers.assert_same(trained(), expected)


class _Padded(keras.layers.Layer):
    def call(self, ids):
        return ids.to_tensor() if hasattr(ids, "to_tensor") else ids

    def compute_output_spec(self, ids):
        return keras.KerasTensor(ids.shape, ids.dtype)


@pytest.mark.parametrize("is_ragged", [False, True])
def test_padded_and_ragged_rows_count_as_they_do_in_a_batch(is_ragged):
    """Against the loss by NumPy, at the positions that are not padded."""
    texts = [[1, 2, 3], [2], [3, 1]]

    def tagger(seed):
        keras.utils.set_random_seed(seed)
        inputs = keras.Input([None], dtype="int32", ragged=is_ragged)
        hidden = inputs
        if is_ragged:
            hidden = _Padded()(inputs)
        hidden = keras.layers.Embedding(4, 5, mask_zero=True)(hidden)
        return keras.Model(inputs, keras.layers.Dense(3)(hidden))

    def batches(examples):
        made = _batches(tf.ragged.constant(examples, tf.int32), 3)
        return made if is_ragged else made.map(lambda ids: ids.to_tensor())

    teacher, student = tagger(5), tagger(6)
    model = tfdistill.CodistillModel(
        student,
        teachers=tfdistill.teachers.FixedTeacher(teacher),
        agree_on=batches(texts),
    )
    loss = tfdistill.losses.SoftTargetCrossEntropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.0), distillation_loss=loss)
    logs = cases.fit(model, batches([[1], [2, 3], [1]]))
    (asked,) = batches(texts)
    targets = cases.softmax(teacher(asked).numpy())
    own = np.log(cases.softmax(student(asked).numpy()))
    losses = -(targets * own).sum(-1)
    counted = losses[np.arange(3) < np.array([[3], [1], [2]])]
    assert logs["distillation_loss"] == pytest.approx([counted.mean()])


@pytest.mark.parametrize(
    ("change", "received"),
    [
        (lambda x: (x, x[:, 0]), r"\(float32 \(None, 4\), float32 \(None,\)"),
        (lambda x: {"x": x}, r"\{x: float32 \(None, 4\)\}"),
        (lambda x: tf.cast(x, tf.float64), r"float64 \(None, 4\)"),
        (lambda x: x[:, :3], r"float32 \(None, 3\)"),
        (lambda x: x[0], r"float32 \(4,\)"),
    ],
    ids=["labels", "names", "dtype", "columns", "unbatched"],
)
def test_data_of_something_else_than_inputs_are_refused(change, received):
    message = rf"each as float32 \(None, 4\); received {received}"
    with pytest.raises(ValueError, match=message):
        _taught(tf.distribute.get_strategy(), _rows().map(change))


def test_what_gives_no_rows_is_refused():
    with pytest.raises(ValueError, match="received an empty data set"):
        _taught_by(cases.linear(1), _rows().take(0))
    model = _taught(tf.distribute.get_strategy(), _rows())
    with pytest.raises(ValueError, match="Only `fit` reads the rows"):
        model.train_on_batch(*cases.data(5))
