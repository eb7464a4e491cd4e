"""Teachers that come with the data teach as the models that made them."""

import copy
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import mutual_learning
from tests.cases import summaries as summary_cases
from tfdistill.cluster import strategy as strategy_lib
from tfdistill.labels import attached
from tfdistill.labels import forms

_X, _Y = cases.data(32)


def _data(label=None, *, name="big", form=None, batch_size=8, **expires):
    """Batches that carry what a model says of them, as labels."""
    dataset = tf.data.Dataset.from_tensor_slices((_X, _Y))
    dataset = dataset.batch(batch_size, drop_remainder=True)
    if label is None:
        return dataset
    form = form or forms.Form()
    weights = [tf.constant(w) for w in label.get_weights()]

    def add(x, y):
        rows = tf.shape(x)[0]
        kept = form.encode(x @ weights[0] + weights[1])
        return attached.attach(
            (x, y),
            {
                name: attached.label(
                    [kept],
                    version=tf.fill([rows], tf.constant(2, tf.int64)),
                    **{n: tf.fill([rows], v) for n, v in expires.items()},
                )
            },
        )

    return dataset.map(add)


def _labelled_before_batch(x, y):
    """An element whose examples were taken for batches of numbers."""
    version = tf.zeros([8, 4], tf.int64)
    label = {**x.labels["big"], "version": version}
    return attached.attach((x.inputs, y), {"big": label})


def _trained(teachers, data, strategy=None):
    with (strategy or tf.distribute.get_strategy()).scope():
        model = cases.codistill(cases.linear(), teachers)
    history = model.fit(data, epochs=2, verbose=0).history
    return history, model


@pytest.mark.parametrize("taught_by", ["group_1", "big", "big, by steps"])
def test_labels_of_a_burn_in_teach_nothing(taught_by):
    """Of version 2, where steps are those of a group."""
    name, _, steps = taught_by.partition(", ")
    expires = {"expires_step": tf.constant(99, tf.int64)} if steps else {}
    data = _data(cases.linear(5), name=name, **expires)
    model = cases.codistill(
        cases.linear(),
        tfdistill.TeacherSet(labels=[name]),
        distillation_weight=tfdistill.schedules.BurnIn(steps=4),
    )
    logs = model.fit(data, epochs=2, verbose=0).history
    is_served = taught_by == "big"
    assert logs["distillation_weight"] == [0, float(is_served)]
    (status,) = model.teachers.status()
    health, share = ("good", 1) if is_served else ("burn_in", 0)
    assert (status["health"], status["share"]) == (health, share)


def _same(found, expected, rtol=1e-6):
    for name, values in expected[0].items():
        np.testing.assert_allclose(found[0][name], values, rtol=rtol)
    for value, same in zip(
        found[1].get_weights(), expected[1].get_weights(), strict=True
    ):
        np.testing.assert_allclose(value, same, rtol=rtol)


def test_labels_teach_as_the_model_in_the_step_does():
    teacher = cases.linear(5)
    expected = _trained(tfdistill.TeacherSet(models=[teacher]), _data())
    assert expected[0]["distillation_weight"] == [1, 1]
    labelled = tfdistill.TeacherSet(labels=["big"])
    _same(_trained(labelled, _data(teacher)), expected)
    # All classes are top classes.
    labelled = tfdistill.TeacherSet(labels=["big"])
    whole = _data(teacher, form=forms.Form(top_k=3))
    _same(_trained(labelled, whole), expected, rtol=1e-4)


def test_two_replicas_learn_from_labels_as_one_device(two_replicas):
    teacher = cases.linear(5)
    expected = _trained(tfdistill.TeacherSet(models=[teacher]), _data())
    labelled = tfdistill.TeacherSet(labels=["big"])
    _same(_trained(labelled, _data(teacher), two_replicas), expected, rtol=1e-5)


def test_rows_that_have_expired_count_as_absent():
    teacher, last = cases.linear(5), 3
    data = _data(teacher, expires_step=np.int64(last))
    weights = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weights.append(float(logs["distillation_weight"]))

    model = cases.codistill(
        cases.linear(), tfdistill.TeacherSet(labels=["big"])
    )
    model.fit(data, epochs=2, verbose=0, callbacks=[Watch()])
    assert weights == [1.0] * (last + 1) + [0.0] * (8 - last - 1)
    # Nothing is dropped, and good rows teach again.
    (status,) = model.teachers.status()
    assert (status["health"], status["share"]) == ("absent", 0.0)
    assert (status["step"], status["age_steps"]) == (2, 5)


def test_partial_labels_are_seen_as_such(tmp_path):
    data = _data(cases.linear(5)).map(
        lambda x, y: (
            attached.Labelled(
                x.inputs,
                {
                    "big": {
                        **x.labels["big"],
                        "version": tf.constant([5, 3, -1, -1] * 2, tf.int64),
                    }
                },
            ),
            y,
        )
    )
    model = cases.codistill(
        cases.linear(), tfdistill.TeacherSet(labels=["big"])
    )
    log = tfdistill.Summaries(tmp_path, every_steps=2)
    model.fit(data, verbose=0, callbacks=[tfdistill.RunLog(tmp_path), log])
    (status,) = model.teachers.status()
    assert (status["share"], status["step"], status["age_steps"]) == (
        0.5,
        5,
        -2,
    )
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["teachers"][0] == status
    found = dict(summary_cases.scalars(tmp_path, "teachers/big/taught_rows"))
    assert found == {2: 0.5, 4: 0.5}


def test_evaluate_and_predict_take_the_same_data():
    teacher = cases.linear(5)
    model = cases.codistill(
        cases.linear(), tfdistill.TeacherSet(labels=["big"])
    )
    model.fit(_data(teacher), verbose=0)
    assert model.evaluate(_data(teacher), verbose=0) == pytest.approx(
        model.evaluate(_data(), verbose=0)
    )
    np.testing.assert_array_equal(
        model.predict(_data(teacher), verbose=0),
        model.predict(_data(), verbose=0),
    )


def _two_heads(seed):
    """Probabilities of classes, and logits of others."""
    inputs = keras.Input((4,))
    heads = [
        keras.layers.Dense(3, activation="softmax", name="p")(inputs),
        keras.layers.Dense(2, name="q")(inputs),
    ]
    model = keras.Model(inputs, heads)
    cases.randomize(model, seed)
    return model


def test_each_output_is_taken_as_its_own_loss_does():
    teacher, y = _two_heads(5), {"p": _Y, "q": _Y % 2}
    parts = [forms.Form(top_k=3, from_logits=v) for v in (False, True)]

    def add(x, y):
        said = zip(parts, teacher(x), strict=True)
        kept = [form.encode(output) for form, output in said]
        label = attached.label(kept, version=tf.zeros([8], tf.int64))
        return attached.attach((x, y), {"big": label})

    def trained(teachers, data):
        model = tfdistill.CodistillModel(_two_heads(1), teachers=teachers)
        loss = keras.losses.SparseCategoricalCrossentropy
        model.compile(
            "sgd",
            {"p": loss(), "q": loss(from_logits=True)},
            distillation_loss={
                name: tfdistill.losses.SoftTargetCrossEntropy()
                for name in ("p", "q")
            },
        )
        return model.fit(data, epochs=2, verbose=0).history, model

    data = tf.data.Dataset.from_tensor_slices((_X, y)).batch(8)
    expected = trained(tfdistill.TeacherSet(models=[teacher]), data)
    labelled = tfdistill.TeacherSet(labels=["big"])
    _same(trained(labelled, data.map(add)), expected, rtol=1e-4)


def test_top_classes_are_refused_where_a_loss_compares_no_classes():
    model = cases.codistill(
        cases.linear(), tfdistill.TeacherSet(labels=["big"])
    )
    model.compile(
        "sgd",
        None,
        distillation_loss=tfdistill.losses.BinarySoftTargetCrossEntropy(
            from_logits=True
        ),
    )
    with pytest.raises(ValueError, match="'big' must be whole for Binary"):
        model.fit(_data(cases.linear(5), form=forms.Form(top_k=2)), verbose=0)


def test_data_without_the_labels_are_refused_with_the_remedy():
    model = cases.codistill(
        cases.linear(), tfdistill.TeacherSet(labels=["big", "other"])
    )
    with pytest.raises(ValueError, match="labels of the teacher 'other'"):
        model.fit(_data(cases.linear(5)), verbose=0)
    model = cases.codistill(
        cases.linear(classes=4), tfdistill.TeacherSet(labels=["big"])
    )
    with pytest.raises(ValueError, match="shape of the student's output"):
        model.fit(_data(cases.linear(5)), verbose=0)
    model = cases.codistill(
        cases.linear(), tfdistill.TeacherSet(labels=["big"])
    )
    with pytest.raises(ValueError, match="call `batch` first, and once"):
        model.fit(_data(cases.linear(5)).map(_labelled_before_batch), verbose=0)
    for wrong in (["a", "a"], [""], [3]):
        with pytest.raises(ValueError, match="names of teachers, each once"):
            tfdistill.TeacherSet(labels=wrong)


# ---- peers that send what they predict of the same batch ----


def _cluster(tmp_path, num_groups=2):
    return tfdistill.Cluster(num_groups=num_groups, exchange=str(tmp_path))


def _model(cluster, strategy=None, **kwargs):
    strategy = strategy or tf.distribute.get_strategy()
    strategy_lib._CLUSTERS[strategy] = cluster
    with strategy.scope():
        return mutual_learning.model(cluster, **kwargs)


def _fit(model, **kwargs):
    return model.fit(
        mutual_learning.data(),
        **{
            "steps_per_epoch": mutual_learning.NUM_STEPS,
            "verbose": 0,
            "callbacks": [cases.never()],
            **kwargs,
        },
    )


def _close(model, expected, atol=1e-6):
    for value, wanted in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("num_groups", "form"), [(2, None), (3, forms.Form(top_k=3))]
)
def test_groups_learn_as_models_in_one_process(tmp_path, num_groups, form):
    cluster = _cluster(tmp_path, num_groups)
    model = _model(cluster, form=form)
    # Several steps in an execution, several executions in a training.
    model.steps_per_execution = 5
    expected = mutual_learning.expected(num_groups)
    with mutual_learning.numpy_peers(cluster, is_whole=form is None) as peers:
        _fit(model, steps_per_epoch=10, epochs=2)
    # Top classes are log-probabilities, which float32 rounds otherwise.
    atol = 1e-6 if form is None else 1e-5
    _close(model, expected[0], atol)
    for found, weights in zip(peers, expected[1:], strict=True):
        for value, wanted in zip(found, weights, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=0, atol=atol)
    for teacher in model.teachers.status():
        assert (teacher["num_answers"], teacher["num_missed"]) == (20, 0)
        assert (teacher["health"], teacher["step"]) == ("good", 19)
        assert teacher["num_quarantined"] == 0
        assert 0 < teacher["last_bytes"] == teacher["bytes"] / 20


def test_two_replicas_learn_from_their_counterparts(tmp_path, two_replicas):
    cluster = _cluster(tmp_path)
    model = _model(cluster, two_replicas)
    with mutual_learning.numpy_peers(cluster, num_replicas=2):
        _fit(model)
    _close(model, mutual_learning.expected(2)[0])
    (teacher,) = model.teachers.status()
    assert (teacher["num_answers"], teacher["num_missed"]) == (40, 0)


def test_a_peer_that_is_gone_and_back_teaches_while_it_is_there(tmp_path):
    cluster = _cluster(tmp_path)
    model = _model(cluster, wait_secs=0.01)
    copy.deepcopy(model.teachers)
    # Of whole passes: the second one begins where the first has ended.
    _fit(model, steps_per_epoch=16)
    (teacher,) = model.teachers.status()
    assert (teacher["health"], teacher["num_missed"]) == ("absent", 16)
    assert "address is not known" in teacher["reason"]
    _close(model, mutual_learning.expected(2, num_steps=16, alone=16)[0])
    # The same training goes on, and the peer is there.
    model.teachers._swaps[0].mailbox._wait_secs = 60.0
    with mutual_learning.numpy_peers(cluster, alone=16):
        _fit(model)
    _close(model, mutual_learning.expected(2, num_steps=36, alone=16)[0])
    (teacher,) = model.teachers.status()
    assert (teacher["health"], teacher["age_steps"]) == ("good", 0)
    # It lives, and is too far behind to be of use.
    model.teachers._swaps[0].mailbox.peer(1).last_asked += 17
    (teacher,) = model.teachers.status()
    assert (teacher["health"], teacher["age_steps"]) == ("absent", None)
    assert "its last answer was of step 35" in teacher["reason"]


def test_nothing_is_sent_while_the_weight_is_zero(tmp_path, monkeypatch):
    model = _model(_cluster(tmp_path), wait_secs=0.0)
    _fit(model, steps_per_epoch=1)
    sent = []
    mailbox = model.teachers._swaps[0].mailbox
    send = mailbox.send
    monkeypatch.setattr(
        mailbox, "send", lambda **kwargs: sent.append(kwargs) or send(**kwargs)
    )
    for active in (False, True):
        assert not sent
        soft = model.teachers.predict(
            _X, step=1, active=tf.constant(active), like=model(_X)
        )
        assert not np.any(soft.weights)
    assert len(sent) == 1


def test_rows_that_are_not_finite_are_left_out_alone(tmp_path):
    cluster = _cluster(tmp_path)
    model, alone = _model(cluster), cases.codistill(cases.linear())
    with mutual_learning.numpy_peers(cluster, factor=np.nan):
        _fit(model)
    _fit(alone, callbacks=[])
    for value, wanted in zip(
        model.get_weights(), alone.get_weights(), strict=True
    ):
        np.testing.assert_allclose(value, wanted, rtol=1e-6)
    (teacher,) = model.teachers.status()
    assert teacher["num_quarantined"] == 20
    assert teacher["refused"] == {"finite": 20}
    assert "must be finite" in teacher["quarantined"][19]


def test_what_contradicts_predictions_is_refused_with_the_remedy(tmp_path):
    cluster = _cluster(tmp_path)
    exchange = tfdistill.Exchange(tmp_path)
    for wrong, match in (
        ({"by": "letters"}, '"versions" or "predictions"'),
        ({"form": forms.Form(top_k=2)}, 'by="predictions"'),
        ({"by": "predictions", "wait_secs": -1}, "wait_secs"),
        ({"by": "predictions", "form": "all"}, "labels.Form"),
        (
            {"by": "predictions", "max_staleness_secs": 3},
            "max_staleness_secs are about versions",
        ),
        (
            {"by": "predictions", "canary": tfdistill.Canary(_X)},
            "canary are about versions",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            tfdistill.TeacherSet(exchange, [1], **wrong)
    model = _model(cluster)
    assert not model.jit_compile
    with pytest.raises(ValueError, match="XLA cannot compile"):
        model.compile(
            "sgd",
            "mse",
            distillation_loss=model.distillation["distillation_loss"],
            jit_compile=True,
        )
    teachers = model.teachers._options
    with pytest.raises(ValueError, match="parameter servers.*labels="):
        teachers.check_remote()
