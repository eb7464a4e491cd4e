"""A script trained by the method that its environment names."""

import contextlib
import json
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tfdistill.cluster import method
from tfdistill.cluster import strategy
from tfdistill.held_out import callback
from tfdistill.held_out import objectives
from tfdistill.held_out import predictions
from tfdistill.training import global_batch

_X = np.random.default_rng(0).normal(size=[64, 3]).astype("float32")
_Y = (_X[:, 0] > 0).astype("int64")


@pytest.fixture
def named(monkeypatch, tmp_path):
    """Names a method in the environment of a launched run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(method, "shares", set())
    clusters = weakref.WeakKeyDictionary()
    monkeypatch.setattr(strategy, "_CLUSTERS", clusters)
    # Two mirrored strategies in one process get in each other's way.
    monkeypatch.setattr(strategy, "_one_task", tf.distribute.get_strategy)

    def name(chosen, **variables):
        variables = {
            "METHOD": chosen,
            "SEED": "7",
            "EVERY_STEPS": "2",
            "WORKDIR": str(tmp_path),
            **variables,
        }
        for key, value in variables.items():
            monkeypatch.setenv(f"TFDISTILL_{key}", value)

    return name


def _make():
    with tfdistill.make_strategy().scope():
        student = keras.Sequential(
            [keras.Input([3]), keras.layers.Dense(2, activation="softmax")]
        )
        model = tfdistill.CodistillModel(
            student, teachers=tfdistill.teachers.Peers()
        )
        model.compile(
            "sgd",
            "sparse_categorical_crossentropy",
            distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(
                from_logits=False
            ),
        )
    return model


def _train():
    """As a user's script would."""
    model = _make()
    x, y = tfdistill.data.group_shard((_X, _Y))
    callbacks = [
        *tfdistill.callbacks.defaults(every_steps=3),
        tfdistill.callbacks.HeldOutPredictions("all", (_X, _Y)),
    ]
    model.fit(x, y, batch_size=8, epochs=2, callbacks=callbacks, verbose=0)
    return model


def _written(tmp_path):
    place = tmp_path / "group_0" / "held_out"
    with np.load(place / "all.npz") as arrays:
        return json.loads((place / "all.json").read_text()), dict(arrays)


def test_own_past_really_teaches(named, tmp_path):
    named("own_past")
    model = _train()
    assert model.history.history["distillation_loss"][-1] > 0
    found, arrays = _written(tmp_path)
    assert found["obeyed"] == {"method": "own_past", "seed": 7}
    (teacher,) = found["teachers"]
    assert teacher["name"] == "own_past" and teacher["swaps"] >= 4
    assert found["steps"] == 16 and found["examples"] == 128
    assert found["exports"]["every_steps"] == 2
    np.testing.assert_allclose(
        arrays["probabilities"], model.predict(_X, verbose=0), rtol=1e-5
    )
    assert arrays["labels"].tolist() == _Y.tolist()


def test_nobody_teaches_an_independent_group_and_seeds_decide(named, tmp_path):
    named("independent")
    _train()
    assert _written(tmp_path)[0]["teachers"] == []
    first = _make().get_weights()[0]
    for seed, is_same in (("7", True), ("8", False)):
        named("independent", SEED=seed)
        assert np.allclose(first, _make().get_weights()[0]) == is_same


@pytest.mark.parametrize(
    "held_out, exports, message",
    [
        ("all", True, None),
        ("day", True, r"HeldOutPredictions\('day'.* made only 'all'. Add"),
        ("all", False, "independent was not applied: no StudentExporter"),
    ],
)
def test_what_a_comparison_lacks_is_told_before_the_first_step(
    named, monkeypatch, held_out, exports, message
):
    monkeypatch.setattr(method, "predicted", set())
    named("independent", HELD_OUT=held_out)
    model = _make()
    callbacks = [
        tfdistill.callbacks.HeldOutPredictions("all", (_X, _Y)),
        *tfdistill.callbacks.defaults(every_steps=3)[: 9 * exports],
    ]
    refused = pytest.raises(ValueError, match=message)
    with refused if message else contextlib.nullcontext():
        model.fit(_X, _Y, batch_size=32, verbose=0, callbacks=callbacks)
    assert int(model.optimizer.iterations.numpy()) == (0 if message else 2)


@pytest.mark.parametrize(
    "name, number", [("codistill", 32), ("codistill_shared", 64)]
)
def test_groups_train_on_their_share(named, name, number):
    named(name, GROUP="1", NUM_GROUPS="2")
    shard = tfdistill.data.group_shard(_Y, mode="coordinated")
    assert len(shard) == number
    assert method.shares == {method.METHODS[name].share}


def test_callbacks_of_averaging_mix_weights(named):
    named("averaging", NUM_GROUPS="2", EXCHANGE="x")
    kinds = [type(c).__name__ for c in tfdistill.callbacks.defaults(9)]
    teaching = ["StudentExporter", "WeightMixer"]
    assert kinds == ["WaitForGroups", *teaching, "Backup"]
    with pytest.raises(ValueError, match="TFDISTILL_METHOD"):
        named("averaged")
        tfdistill.callbacks.defaults(9)


@pytest.mark.parametrize("from_logits", [False, True])
def test_the_compiled_loss_says_what_outputs_are(from_logits):
    share = np.array([[0.2, 0.8], [0.7, 0.3]])
    outputs = np.log(share) + 5 if from_logits else share
    labels = np.array([1, 0])
    for loss, given in (
        (keras.losses.SparseCategoricalCrossentropy, labels),
        (keras.losses.CategoricalCrossentropy, np.eye(2)[labels]),
    ):
        compiled = loss(from_logits=from_logits)
        found = objectives.predictions_of(compiled, outputs, given)
        assert isinstance(found, predictions.Distributions)
        np.testing.assert_allclose(found.probabilities, share)
        assert found.labels.tolist() == [1, 0]
    for other, message in (
        (keras.losses.Hinge(), "received hinge"),
        (keras.losses.MeanSquaredError(), r"shape \(2, 2\) for labels of"),
    ):
        with pytest.raises(ValueError, match=message):
            objectives.predictions_of(other, share, _Y)


@pytest.mark.parametrize(
    ("loss", "path", "objective"),
    [
        ("bce", (), objectives.Clicks),
        (keras.losses.BinaryFocalCrossentropy(), (), objectives.Clicks),
        (["sparse_categorical_crossentropy", None], (0,), objectives.Classes),
        ({"a": None, "b": "bce"}, ("b",), objectives.Clicks),
        ("mse", (), objectives.Values),
        (keras.losses.Huber(), (), objectives.Values),
        ("cosine_similarity", None, None),
        ({"a": "mse", "b": "bce"}, None, None),
        (None, None, None),
    ],
)
def test_the_only_loss_is_found_by_any_name_and_form(loss, path, objective):
    wrapped = global_batch.over_global_batch(loss)
    if objective is None:
        with pytest.raises(ValueError, match="one loss.*leave out"):
            objectives.compiled(wrapped)
        return
    found = objectives.compiled(wrapped)
    assert found[1:] == (path, objective)
    outputs = {"a": 1, "b": 2} if path == ("b",) else [1, 2]
    expected = {(): outputs, (0,): 1, ("b",): 2}[path]
    assert objectives.part(outputs, path) == expected
    if path == ("b",):
        assert objectives.part([1, 2], path, ["a", "b"]) == 2


def test_what_does_not_count_for_the_loss_is_left_out(named, tmp_path):
    """A mask, a weight of 0, and a label that the loss ignores."""
    named("independent")
    words = np.array([[1, 2, 0], [2, 1, 1], [1, 1, 1]])
    labels = np.array([[1, 0, 9], [0, -1, 1], [1, 1, 1]])
    with tfdistill.make_strategy().scope():
        student = keras.Sequential(
            [
                keras.layers.Embedding(3, 4, mask_zero=True),
                keras.layers.Dense(2),
            ]
        )
        model = tfdistill.CodistillModel(student)
        model.compile(
            "sgd",
            keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, ignore_class=-1
            ),
        )
    held_out = words, labels, np.array([1.0, 2.0, 0.0])
    callbacks = [
        *tfdistill.callbacks.defaults(every_steps=3),
        tfdistill.callbacks.HeldOutPredictions("all", held_out),
    ]
    model.fit(words, np.abs(labels) % 2, callbacks=callbacks, verbose=0)
    arrays = _written(tmp_path)[1]
    assert arrays["labels"].tolist() == [1, 0, 0, 1]
    found = tf.nn.softmax(model.predict(words, verbose=0)).numpy()
    np.testing.assert_allclose(
        arrays["label_probabilities"],
        [found[0, 0, 1], found[0, 1, 0], found[1, 0, 0], found[1, 2, 1]],
        rtol=1e-5,
    )


def test_numbers_of_a_regression_are_written(named, tmp_path):
    named("independent")
    with tfdistill.make_strategy().scope():
        model = tfdistill.CodistillModel(
            keras.Sequential([keras.layers.Dense(1)])
        )
        model.compile("sgd", "mse")
    labels = _X.sum(axis=1)
    counts = np.ones(64)
    counts[:4] = 0
    callbacks = [
        *tfdistill.callbacks.defaults(every_steps=3),
        tfdistill.callbacks.HeldOutPredictions("all", (_X, labels, counts)),
    ]
    model.fit(_X, labels, callbacks=callbacks, verbose=0)
    arrays = _written(tmp_path)[1]
    np.testing.assert_allclose(arrays["labels"], labels[4:])
    np.testing.assert_allclose(
        arrays["values"], model.predict(_X, verbose=0)[4:, 0], rtol=1e-5
    )


@pytest.mark.parametrize(
    ("loss", "labels", "message"),
    [
        ("binary_crossentropy", _X[:, :1], "must be 0 and 1, and both must"),
        ("binary_crossentropy", np.ones((64, 1)), "must be 0 and 1, and both"),
        ("mse", np.ones((64, 1)), "must differ.*received 64 times 1"),
    ],
)
def test_labels_without_figures_are_refused_before_the_first_step(
    loss, labels, message, named
):
    named("independent")
    with tfdistill.make_strategy().scope():
        model = tfdistill.CodistillModel(
            keras.Sequential([keras.layers.Dense(1, activation="sigmoid")])
        )
        model.compile("sgd", loss)
    callbacks = [
        *tfdistill.callbacks.defaults(every_steps=3),
        tfdistill.callbacks.HeldOutPredictions("all", (_X, labels)),
    ]
    with pytest.raises(ValueError, match=message):
        model.fit(_X, _Y, callbacks=callbacks, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 0


def test_shuffled_held_out_data_are_refused(named):
    named("independent")
    data = tf.data.Dataset.from_tensor_slices((_X, _Y)).shuffle(64).batch(8)
    callback = tfdistill.callbacks.HeldOutPredictions("all", data)
    model = tfdistill.CodistillModel(
        keras.Sequential([keras.layers.Dense(2, activation="softmax")])
    )
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="in the same order each time"):
        model.fit(_X, _Y, callbacks=[callback], verbose=0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, ""),
        ({"is_seeded": False}, "make_strategy"),
        ({"teachers": []}, "teachers were none"),
        ({"teachers": ["own_past"]}, "teachers were own_past"),
        ({"shares": {"shared"}}, "group_shard"),
        ({"shares": set()}, "group_shard"),
        ({"every_steps": None}, "no StudentExporter"),
        ({"every_steps": 3}, "no StudentExporter"),
        ({"mixes": True}, "WeightMixer"),
    ],
)
def test_a_script_that_goes_round_its_method_is_told_why(
    monkeypatch, changes, message
):
    shown = {
        "is_seeded": True,
        "teachers": ["group_1"],
        "every_steps": 25,
        "mixes": False,
        "num_groups": 2,
    }
    monkeypatch.setattr(method, "shares", changes.pop("shares", {"disjoint"}))
    chosen = method.from_env(
        {"TFDISTILL_METHOD": "codistill", "TFDISTILL_EVERY_STEPS": "25"}
    )
    why = callback._disobeyed(chosen, **shown | changes)
    assert message in why and bool(message) == bool(why)
