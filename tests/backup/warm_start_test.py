"""Trainings that begin with what an earlier one left behind."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import servers
from tests.cases import tiers
from tfdistill.embedding import rows as table_rows
from tfdistill.training import steps

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.05),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "scheduled": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(0.05, 20)
    ),
}


def _student(num_ids=(12, 5), units=6, table=None):
    inputs = {
        "ids": keras.Input((2,), dtype="int64", name="ids"),
        "numbers": keras.Input((3,), name="numbers"),
    }
    make = table or tfdistill.layers.ShardedEmbedding
    vectors = keras.layers.Flatten()(
        make(num_ids, 4, name="table")(inputs["ids"])
    )
    hidden = keras.layers.Concatenate()([inputs["numbers"], vectors])
    hidden = keras.layers.Dense(units, name="hidden")(hidden)
    hidden = keras.layers.BatchNormalization()(hidden)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def _data():
    rng = np.random.default_rng(3)
    ids = rng.integers(0, [12, 5], (20, 2))
    numbers = rng.normal(size=(20, 3)).astype("float32")
    y = (numbers.sum(1) + ids[:, 1] > 2).astype("float32")[:, None]
    data = ({"ids": ids, "numbers": numbers}, y)
    return tf.data.Dataset.from_tensor_slices(data).batch(4)


def _compiled(model, optimizer):
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def _train(
    directory,
    warm=None,
    *,
    seed=1,
    optimizer="adam",
    epochs=1,
    strategy=None,
    **kwargs,
):
    """Trains 5 steps an epoch; `kwargs` are of the student."""
    keras.utils.set_random_seed(seed)
    begun = {}
    with (strategy or tf.distribute.get_strategy()).scope():
        model = _compiled(
            tfdistill.CodistillModel(_student(**kwargs)),
            OPTIMIZERS[optimizer](),
        )

    def note(batch):
        if not begun:
            begun["step"] = int(model.optimizer.iterations.numpy())
            begun["weights"] = model.student.get_weights()
            if model.trainer.table_shards and "table" not in kwargs:
                begun["tables"] = _tables(model, kwargs.get("num_ids", (12, 5)))

    model.fit(
        _data(),
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_train_batch_begin=lambda batch, logs: note(batch)
            ),
            tfdistill.callbacks.Backup(
                directory, every_steps=5, warm_start=warm
            ),
        ],
    )
    return model, begun


def _slots(optimizer):
    return [v for v in optimizer.variables if len(v.shape)]


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """Where an earlier training of two epochs left its backup; its model."""
    directory = tmp_path_factory.mktemp("old")
    return directory, _train(directory, epochs=2)[0]


@pytest.mark.parametrize(
    "optimizer", ["scheduled", *map(tiers.deep, ("adam", "adagrad"))]
)
def test_it_is_one_done_by_hand_in_keras(tmp_path, optimizer):
    dense = {"table": keras.layers.Embedding, "num_ids": 12}
    old, _ = _train(tmp_path / "old", optimizer=optimizer, epochs=2, **dense)
    model, begun = _train(
        tmp_path / "new", tmp_path / "old", seed=2, optimizer=optimizer, **dense
    )
    assert begun["step"] == 0
    by_hand = _compiled(_student(**dense), OPTIMIZERS[optimizer]())
    by_hand.set_weights(old.student.get_weights())
    by_hand.optimizer.build(by_hand.trainable_variables)
    pairs = zip(_slots(by_hand.optimizer), _slots(old.optimizer), strict=True)
    for slot, value in pairs:
        slot.assign(value)
    by_hand.fit(_data(), shuffle=False, verbose=0)
    servers.assert_same(model.student.get_weights(), by_hand.get_weights())
    servers.assert_same(_slots(model.optimizer), _slots(by_hand.optimizer))


def _by_id(table, sizes):
    """A table, or a slot of it, by fields in the order of their ids."""
    rows = table_rows.RowLayout(sum(sizes)).storage_rows(np.arange(sum(sizes)))
    return np.split(np.asarray(table)[rows], np.cumsum(sizes)[:-1])


def _tables(model, sizes):
    """By fields: the table, then its slots."""
    (shard,) = model.trainer.table_shards
    values = [shard.value, *shard.slots.values()]
    return [_by_id(v, sizes) for v in values]


@pytest.mark.parametrize("replicas", [1, tiers.deep(2)])
def test_tables_keep_rows_and_slots_and_new_ids_begin_anew(
    tmp_path, old, replicas, two_replicas
):
    directory, model = old
    keras.utils.set_random_seed(2)
    (fresh,) = _student((15, 7)).get_layer("table").get_weights()
    initial = [_by_id(fresh, (15, 7)), *[[np.zeros((7, 4))] * 2] * 2]
    _, begun = _train(
        tmp_path,
        directory,
        seed=2,
        num_ids=(15, 7),
        strategy=two_replicas if replicas == 2 else None,
    )
    tables = zip(begun["tables"], _tables(model, (12, 5)), initial, strict=True)
    for found, kept, new in tables:
        for field, size in enumerate((12, 5)):
            np.testing.assert_array_equal(found[field][:size], kept[field])
            rest = found[field][size:]
            np.testing.assert_array_equal(rest, new[field][-len(rest) :])


def _dynamic(num_rows, *args, **kwargs):
    return tfdistill.layers.DynamicEmbedding(
        num_rows, *args, num_fields=2, admit_after=2, **kwargs
    )


@pytest.mark.deep
def test_ids_keep_their_rows_and_their_ages(tmp_path):
    by_id = {"table": _dynamic, "num_ids": 1024}
    old, _ = _train(tmp_path / "old", epochs=2, **by_id)
    model, begun = _train(tmp_path / "new", tmp_path / "old", seed=2, **by_id)
    servers.assert_same(begun["weights"], old.student.get_weights(), rtol=0)
    whole, _ = _train(tmp_path / "whole", epochs=3, **by_id)
    (ours,), (theirs,) = (
        each.student.get_layer("table").ids.table.slots
        for each in (model, whole)
    )
    # A third epoch either way, but that steps count from 0 again.
    is_used = theirs["count"].numpy() > 0
    assert is_used.any()
    np.testing.assert_array_equal(
        (ours["last"].numpy() + 10)[is_used], theirs["last"].numpy()[is_used]
    )
    np.testing.assert_array_equal(ours["count"], theirs["count"])
    by_id["num_ids"] = 4096
    with pytest.raises(ValueError, match="table/table"):
        _train(tmp_path / "larger", tmp_path / "old", **by_id)


@pytest.mark.deep
def test_a_keras_embedding_may_grow(tmp_path):
    grown = {"table": keras.layers.Embedding, "num_ids": 12}
    old, _ = _train(tmp_path / "old", epochs=2, **grown)
    keras.utils.set_random_seed(2)
    grown["num_ids"] = 15
    fresh = _student(**grown).get_layer("table").get_weights()[0]
    _, begun = _train(tmp_path / "new", tmp_path / "old", seed=2, **grown)
    (found,) = [w for w in begun["weights"] if w.shape == (15, 4)]
    before = old.student.get_layer("table").get_weights()[0]
    np.testing.assert_array_equal(found[:12], before)
    np.testing.assert_array_equal(found[12:], fresh[12:])


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"optimizer": "adagrad"}, "optimizer Adam, .* has Adagrad"),
        ({"units": 7}, "hidden/kernel.*FixedTeacher"),
        ({"num_ids": (11, 9)}, "table/table"),
    ],
    ids=["optimizer", "units", "a smaller field"],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, old, other, match):
    with pytest.raises(ValueError, match=match):
        _train(tmp_path, old[0], **other)


def test_a_directory_without_a_backup_is_refused(tmp_path):
    with pytest.raises(ValueError, match="contains no complete backup"):
        _train(tmp_path / "new", tmp_path / "nothing")


@pytest.mark.deep
def test_it_resumes_from_its_own_backup(tmp_path, old, start_again):
    whole, _ = _train(tmp_path / "whole", old[0], epochs=2)
    _train(tmp_path / "new", old[0])
    start_again()
    model, begun = _train(tmp_path / "new", old[0], epochs=2)
    assert begun["step"] == 5
    servers.assert_same(
        model.student.get_weights(), whole.student.get_weights(), rtol=0, atol=0
    )


def test_a_damaged_backup_of_another_stays(tmp_path, old):
    copy = shutil.copytree(old[0], tmp_path / "old")
    (damaged,) = (copy / "group_0" / "10").glob("state.data*")
    damaged.write_bytes(b"x")
    _train(tmp_path / "new", copy)
    assert damaged.exists()


def _on_servers(directory, warm=None, *, seed=0):
    model = servers.remote(
        servers.student(keras.layers.BatchNormalization(), seed=seed),
        keras.optimizers.Adam(0.05),
    )
    return servers.backed_up(model, directory, warm_start=warm), model


def _all_of(model):
    update = model.trainer.update
    slots = [
        v
        for s in [*update.dense_slots, *(s.slots for s in update.shards)]
        for v in s.values()
    ]
    return [*servers.weights(model), *(v.numpy() for v in slots)]


def test_it_does_so_on_servers(tmp_path, monkeypatch):
    servers.pretend(monkeypatch)
    backup, old = _on_servers(tmp_path / "old")
    for value, variable in enumerate(
        old.trainer.update.shards[0].slots.values()
    ):
        variable.assign(tf.fill(variable.shape, float(value + 3)))
    old.optimizer.iterations.assign(7)
    old.optimizer.learning_rate = 0.01
    backup.on_quiet(steps.TrainingPoint(step=7, epoch=1, batch=0))
    _, model = _on_servers(tmp_path / "new", tmp_path / "old", seed=1)
    servers.assert_same(_all_of(model), _all_of(old), rtol=0, atol=0)
    assert int(model.optimizer.iterations) == 0
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05)
    monkeypatch.setattr(servers, "SIZES", (10, 5))
    with pytest.raises(ValueError, match="table/table"):
        _on_servers(tmp_path / "less", tmp_path / "old")


def _held(model, dense_slots, table_slots):
    """Dense weights and their slots; by field, rows of ids 0 to 10, 0 to 4."""
    table, *dense = servers.weights(model)
    slots = [
        np.concatenate([of[name] for of in table_slots]) for name in ("m", "v")
    ]
    rows = [_by_id(t, servers.SIZES) for t in (table, *slots)]
    known = [t[:n] for a, b in rows for t, n in ((a, 11), (b, 5))]
    return [*dense, *map(np.asarray, dense_slots), *known], rows


@pytest.mark.deep
def test_servers_go_on_from_replicas_and_the_other_way(tmp_path, monkeypatch):
    def trained(directory, warm=None, **kwargs):
        begun = []
        model = servers.model(
            servers.student(keras.layers.BatchNormalization(), **kwargs),
            keras.optimizers.Adam(0.05),
        )

        def note(batch, logs):
            slots = [each.slots for each in model.trainer.table_shards]
            begun.append(_held(model, _slots(model.optimizer), slots)[0])

        backup = tfdistill.callbacks.Backup(
            directory, every_steps=6, warm_start=warm
        )
        noted = keras.callbacks.LambdaCallback(
            on_train_batch_begin=note, on_train_batch_end=note
        )
        data = servers.batches()
        model.fit(data, epochs=1, verbose=0, callbacks=[noted, backup])
        return begun

    expected = trained(tmp_path / "old", num_shards=1)[-1]
    monkeypatch.setattr(servers, "SIZES", (13, 5))
    with monkeypatch.context() as patch:
        servers.pretend(patch)
        backup, model = _on_servers(tmp_path / "new", tmp_path / "old", seed=1)
        update = model.trainer.update
        slots = [v for s in update.dense_slots for v in s.values()]
        of_shards = [each.slots for each in update.shards]
        found, (_, *of_tables) = _held(model, slots, of_shards)
        servers.assert_same(found, expected, rtol=0, atol=0)
        # Ids that are new.
        assert not any(fields[0][11:].any() for fields in of_tables)
        backup.on_quiet(steps.TrainingPoint(step=7, epoch=1, batch=0))
    found = trained(tmp_path / "more", tmp_path / "new", num_shards=3)[0]
    servers.assert_same(found, expected, rtol=0, atol=0)
