"""Tests for `DynamicEmbedding`; a dict is the judge of its ids."""

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import embedding as cases
from tests.cases import servers
from tests.cases import tiers
from tfdistill.embedding import places

DIM, FIELDS = 4, 3
OPTIMIZERS = {
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.02),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
}


def _student(num_rows=1024, *, seed=1, num_fields=FIELDS, **options):
    keras.utils.set_random_seed(seed)
    ids = keras.Input((num_fields,), dtype="int64")
    table = tfdistill.layers.DynamicEmbedding(
        num_rows, DIM, num_fields=num_fields, name="table", **options
    )
    hidden = keras.layers.Flatten()(table(ids))
    return keras.Model(ids, keras.layers.Dense(1)(hidden))


@functools.cache
def _traced(optimizer, options):
    """A model, traced once for all tests, and what its training begins with."""
    model = tfdistill.DistributedModel(_student(**dict(options)))
    model.compile(OPTIMIZERS[optimizer](), "mse", jit_compile=False)
    num_fields = model.input_shape[1]
    x = np.zeros([1, num_fields], "int64")
    model.fit(x, np.zeros([1, 1]), epochs=0, verbose=0)
    table = model.get_layer("table")
    variables = (
        model.variables + model.optimizer.variables + table.ids.table.shards
    )
    for slots in (
        *table.ids.table.slots,
        *(shard.slots for shard in model.trainer.table_shards),
    ):
        variables += slots.values()
    return model, [(v, v.numpy()) for v in variables]


def _model(optimizer="adagrad", **options):
    """A model that has seen nothing, and its table."""
    model, start = _traced(optimizer, tuple(options.items()))
    for variable, value in start:
        variable.assign(value)
    return model, model.get_layer("table")


def _fit(model, ids, y=None):
    """Trains a step on each element of `ids`, `[steps, batch, fields]`."""
    ids = np.asarray(ids, "int64")
    if y is None:
        y = (ids % 7).sum(-1, keepdims=True) / 10
    x, y = (each.reshape(-1, each.shape[-1]) for each in (ids, y))
    model.fit(x, y, batch_size=ids.shape[1], shuffle=False, verbose=0)


def _use(model, ids, num_steps=1):
    """Trains steps that each have all of these ids of one field."""
    _fit(model, np.repeat(ids[None, :, None], num_steps, axis=0))


def _wild(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**60, count)


def _alone(ids):
    """A step of one id for each, all fields alike."""
    return np.broadcast_to(
        np.asarray(ids)[:, None, None], [len(ids), 1, FIELDS]
    )


def _column(table, name):
    """What is known of each row's id, in stored order."""
    parts = [slots[name].numpy() for slots in table.ids.table.slots]
    return np.concatenate(parts).reshape(-1)


@pytest.mark.parametrize("num_shards", [tiers.deep(1), 3])
def test_no_two_ids_share_a_row_at_four_fifths_of_the_table(num_shards):
    model, table = _model(
        num_rows=4096, num_shards=num_shards, num_fields=1, evict="count"
    )
    known = _wild(int(0.8 * 4096))
    rng = np.random.default_rng(1)
    judge, uses = {}, collections.Counter()
    for share in (0.3, 0.7, 1.0):
        batch = rng.choice(known[: int(share * len(known))], [4, 900, 1])
        _fit(model, batch)
        uses.update(batch.ravel().tolist())
        ids = np.array(list(uses))
        for id_, row in zip(
            ids, table.rows_of(ids[:, None])[:, 0], strict=True
        ):
            assert judge.setdefault(id_, row) == row
    _use(model, known)
    uses.update(known.tolist())
    rows = table.rows_of(known[:, None])[:, 0]
    assert rows.min() >= 0 and rows.max() < 4096
    assert len(set(rows)) == len(known)
    assert len(set(uses)) == len(known)
    counts = _column(table, "count")[rows]
    np.testing.assert_array_equal(counts, [uses[id_] for id_ in known.tolist()])


def test_an_id_of_two_fields_is_two_ids():
    model, table = _model()
    _fit(model, _alone([5]))
    rows = table.rows_of([[5] * FIELDS])[0]
    assert len(set(rows)) == FIELDS and min(rows) >= 0
    assert (table.rows_of([[6] * FIELDS]) == -1).all()


@pytest.mark.parametrize(
    "optimizer", [tiers.deep("adagrad"), "adam", tiers.deep("momentum")]
)
def test_trained_as_a_table_in_which_every_id_has_a_row(optimizer):
    # One vector for all to begin with, as a dynamic table has.
    same = keras.initializers.Constant(0.03)
    ids = np.random.default_rng(2).integers(0, 40, [12, 8, FIELDS])
    model, table = _model(optimizer, embeddings_initializer=same)
    keras.utils.set_random_seed(1)
    inputs = keras.Input((FIELDS,), dtype="int64")
    known = tfdistill.layers.ShardedEmbedding(
        [40] * FIELDS, DIM, embeddings_initializer=same
    )
    other = keras.Model(
        inputs, keras.layers.Dense(1)(keras.layers.Flatten()(known(inputs)))
    )
    other.layers[-1].set_weights(model.model.layers[-1].get_weights())
    reference = tfdistill.DistributedModel(other)
    reference.compile(OPTIMIZERS[optimizer](), "mse", jit_compile=False)
    for each in (model, reference):
        _fit(each, ids)
    x = ids.reshape(-1, FIELDS)
    np.testing.assert_allclose(
        model.predict(x, verbose=0), reference.predict(x, verbose=0), atol=1e-5
    )


def test_an_id_is_admitted_in_the_step_of_its_nth_use():
    model, table = _model(admit_after=2)
    for uses in range(1, 3):
        _fit(model, _alone([8]))
        assert (table.rows_of([[8] * FIELDS]) >= 0).all() == (uses == 2)
    _fit(model, [[[9] * FIELDS] * 2])  # Twice in one batch.
    assert (table.rows_of([[9] * FIELDS]) >= 0).all()


def test_an_id_without_a_row_has_its_fields_vector_and_a_new_row_begins_so():
    model, table = _model(admit_after=2)
    _fit(model, _alone([1]), y=np.full([1, 1, 1], 3.0))
    common = table.unknown.numpy()
    vectors = table(tf.constant([[1] * FIELDS, [77] * FIELDS]))
    np.testing.assert_array_equal(vectors, [common] * 2)
    # At a rate of 0 the row is what it began with.
    model.optimizer.learning_rate = 0.0
    _fit(model, _alone([1]))
    rows = table.rows_of([[1] * FIELDS])[0]
    np.testing.assert_array_equal(cases.table(table)[rows], common)
    assert len(np.unique(common, axis=0)) == FIELDS


def _full(**options):
    """A table of 1,024 rows, all taken by ids of step 0, oldest first."""
    model, table = _model(num_fields=1, **options)
    known = _wild(1400)
    for part in np.split(known, 7):
        _use(model, part)
    return model, table, known, (cases.table(table.ids.table) != 0).mean()


@pytest.mark.parametrize("evict", ["lru", tiers.deep("count")])
def test_a_new_id_takes_the_row_that_the_rule_says(evict):
    model, table, known, share = _full(evict=evict)
    assert share == 1
    rows = table.rows_of(known[:, None])[:, 0]
    holders = known[rows >= 0]
    used = holders[: len(holders) // 2]
    _use(model, used, 4)  # By count or by age, the other half go.
    _use(model, used[:4], places.STEPS_KEPT)
    new = _wild(50, seed=9)
    _use(model, new)
    assert (table.rows_of(new[:, None]) >= 0).all()
    assert (table.rows_of(used[:, None]) >= 0).mean() > 0.99
    left = table.rows_of(holders[len(used) :, None])
    assert (left < 0).sum() == 50 - (table.rows_of(used[:, None]) < 0).sum()


def test_ids_of_the_last_steps_keep_their_rows():
    model, table, known, _ = _full(evict="lru")
    before = table.rows_of(known[:, None])
    new = _wild(50, seed=9)
    _use(model, new)
    np.testing.assert_array_equal(table.rows_of(known[:, None]), before)
    assert (table.rows_of(new[:, None]) < 0).all()


@pytest.mark.deep
def test_ids_that_wait_go_before_those_with_rows():
    model, table = _model(num_fields=1, admit_after=2)
    known = _wild(300)
    _use(model, known, 2)
    for part in np.split(_wild(2000, seed=3), 10):
        _use(model, part)
    _use(model, known[:1], places.STEPS_KEPT)
    new = _wild(100, seed=4)
    _use(model, new, 2)
    assert (table.rows_of(new[:, None]) >= 0).all()
    assert (table.rows_of(known[:, None]) >= 0).all()


@pytest.mark.deep
def test_without_eviction_only_an_id_that_is_too_old_loses_its_row():
    model, table, known, share = _full(evict=None, max_age_steps=80)
    assert share == 1
    before = table.rows_of(known[:, None])
    used = known[before[:, 0] >= 0][:100]
    _use(model, used, 70)
    _use(model, _wild(8, seed=5))
    np.testing.assert_array_equal(table.rows_of(known[:, None]), before)
    # Whatever its count.
    _use(model, used, 11)
    new = _wild(50, seed=9)
    _use(model, new)
    assert (table.rows_of(new[:, None]) >= 0).all()
    assert (table.rows_of(used[:, None]) >= 0).all()


@pytest.mark.parametrize("optimizer", ["adagrad", tiers.deep("adam")])
def test_a_row_that_changes_hands_begins_anew(optimizer):
    model, table, known, _ = _full(evict="lru")
    _use(model, known[:1], places.STEPS_KEPT + 1)
    model.optimizer.learning_rate = 0.0
    common = table.unknown.numpy()[0]
    new = _wild(20, seed=9)
    _use(model, new)
    rows = table.rows_of(new[:, None])[:, 0]
    np.testing.assert_array_equal(
        cases.table(table)[rows], np.broadcast_to(common, [20, DIM])
    )


def test_files_and_exports_hold_the_ids(tmp_path):
    model, table = _model(admit_after=2)
    ids = _wild(60)[np.random.default_rng(1).integers(0, 60, [6, 8, FIELDS])]
    _fit(model, ids)
    x = np.concatenate([ids.reshape(-1, FIELDS), _wild(9).reshape(3, FIELDS)])
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), expected)
    assert loaded.get_layer("table").get_config() == table.get_config()
    model.export(str(tmp_path / "export"), verbose=False)
    served = tf.saved_model.load(str(tmp_path / "export"))
    np.testing.assert_array_equal(served.serve(x), expected)


def test_nothing_is_added_outside_of_training():
    model, table = _model()
    x = _wild(30).reshape(10, FIELDS)
    model.evaluate(x, np.zeros([10, 1]), verbose=0)
    model.predict(x, verbose=0)
    assert not cases.table(table.ids.table).any()


@pytest.mark.deep
def test_vectors_are_of_the_layers_dtype():
    model, table = _model(dtype="mixed_bfloat16")
    ids = np.random.default_rng(2).integers(0, 9, [1, 8, FIELDS])
    _fit(model, ids)
    assert table.unknown.dtype == "float32"
    assert table(ids[0]).dtype == tf.bfloat16
    model.predict(ids[0], verbose=0)


def test_bags_and_ragged_ids():
    bags = tfdistill.layers.DynamicEmbedding(1024, DIM, combiner="mean")
    ids = tf.ragged.constant([[5, 7], [], [5]], dtype=tf.int64)
    assert bags(ids).shape == [3, DIM]
    np.testing.assert_array_equal(bags(ids)[1], np.zeros(DIM))


def test_what_cannot_be_is_refused(two_replicas):
    make = tfdistill.layers.DynamicEmbedding
    for name, value in (
        *(("num_rows", 0), ("num_rows", 1000.5), ("num_fields", 0)),
        *(("admit_after", 0), ("admit_after", 2.5)),
        *(("max_age_steps", 3), ("evict", "oldest")),
    ):
        with pytest.raises(ValueError, match=f"`{name}` .*{value}"):
            make(**{"num_rows": 9, "output_dim": 2, name: value})
    with two_replicas.scope(), pytest.raises(ValueError, match="2 replicas"):
        make(9, 2)(tf.constant([1]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="received -1"):
        make(9, 2)(tf.constant([-1]))
    plain = _student()
    plain.compile("sgd", "mse")
    with pytest.raises(ValueError, match="a model of tfdistill"):
        plain.fit(np.zeros([2, FIELDS], "int64"), np.zeros(2), verbose=0)


def test_a_peer_teaches_by_id_whatever_rows_it_has(tmp_path):
    peer, table = _model()
    ids = _wild(90).reshape(30, FIELDS)
    _fit(peer, ids[::-1, None])
    rows = table.rows_of(ids)
    assert (rows >= 0).all()
    answers = peer.predict(ids, verbose=0)
    peer.save(tmp_path / "peer.keras")
    teacher = tfdistill.teachers.FixedTeacher(tmp_path / "peer.keras")
    learner = tfdistill.CodistillModel(_student(), teachers=teacher)
    loss = tfdistill.losses.LogitsMeanSquaredError(from_logits=True)
    learner.compile(OPTIMIZERS["adagrad"](), None, distillation_loss=loss)
    _fit(learner, ids[:, None])
    assert (learner.get_layer("table").rows_of(ids) != rows).any()
    # The same with what the peer says of the ids as labels.
    told, _ = _model()
    _fit(told, ids[:, None], y=answers[:, None])
    servers.assert_same(learner.get_weights(), told.get_weights(), atol=1e-6)


def test_its_weights_are_not_mixed(tmp_path):
    model = tfdistill.CodistillModel(_student())
    model.compile("adagrad", "mse")
    exchange = tfdistill.Exchange(tmp_path)
    callbacks = [
        tfdistill.callbacks.StudentExporter(exchange, every_steps=1, group=0),
        tfdistill.mixing.WeightMixer(
            tfdistill.mixing.ModelAveraging(0.5), every_steps=1, peers=[1]
        ),
    ]
    x = np.zeros([2, FIELDS], "int64")
    with pytest.raises(ValueError, match="received a DynamicEmbedding"):
        model.fit(x, np.zeros([2, 1]), callbacks=callbacks, verbose=0)
