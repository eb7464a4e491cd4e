"""Labels from servers: the same as in the step, and never in its way."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import prediction_servers as server_cases
from tests.cases import waits
from tfdistill.exports import other_graphs
from tfdistill.labels import attached

_X, _Y = cases.data(32)
_OUTPUTS = {"outputs": (cases.NUM_CLASSES,)}


def _dataset(batch_size=8):
    dataset = tf.data.Dataset.from_tensor_slices((_X, _Y))
    return dataset.batch(batch_size, drop_remainder=True)


@contextlib.contextmanager
def _teachers(*addresses, outputs=_OUTPUTS, timeout_secs=20.0, **options):
    """Generous, so that a busy machine is not a slow server."""
    made = tfdistill.labels.TeacherClient(
        list(addresses), outputs, timeout_secs=timeout_secs, **options
    )
    with contextlib.closing(made):
        yield made


def _asked(teachers, count=4):
    """Labels of some batches, one after the other."""
    return _labels_in(teachers(*batch) for batch in _dataset().take(count))


def _labels_in(dataset):
    return [attached.detach(element)[1]["served"] for element in dataset]


def _fit(dataset, teachers, **arguments):
    student = cases.codistill(cases.linear(), teachers)
    history = student.fit(dataset, verbose=0, **arguments).history
    return history, student.get_weights()


def test_a_label_is_the_prediction_in_the_step_to_the_bit(exchange):
    student = cases.deep(5)
    version = cases.publish(exchange, student, step=10)
    fixed = other_graphs.FrozenFunction(
        version.path,
        input_spec=cases.input_spec(),
        output_spec=cases.input_spec(cases.NUM_CLASSES),
    )
    in_step = tf.function(lambda x: fixed(x)[0])
    with server_cases.serving(exchange) as server:
        with _teachers(server.address, max_age_steps=7) as teachers:
            labelled = _dataset().map(teachers, num_parallel_calls=2)
            for label, (x, _) in zip(
                _labels_in(labelled), _dataset(), strict=True
            ):
                np.testing.assert_array_equal(
                    label["outputs"][0]["whole"], in_step(x)
                )
                assert set(label["version"].numpy()) == {10}
                assert set(label["expires_step"].numpy()) == {17}
            found = _fit(labelled, tfdistill.teachers.LabelTeacher("served"))
            status = teachers.status()
            assert status["absent_rows"] == 0 and not status["refused"]
            assert status["servers"][0]["version"] == 10
    expected = _fit(_dataset(), tfdistill.teachers.FixedTeacher(version.path))
    cases.assert_close(found, expected)


def test_inputs_and_outputs_by_name_and_in_their_order(exchange):
    inputs = {
        "b": keras.Input((2,), name="b"),
        "a": keras.Input((3,), name="a"),
    }
    joined = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
    heads = [keras.layers.Dense(n + 2)(joined) for n in range(11)]
    model = keras.Model(inputs, heads)
    cases.randomize(model, 4)
    spec = {"a": cases.input_spec(3), "b": cases.input_spec(2)}
    cases.publish(exchange, model, spec=spec)
    x = {"a": np.ones([4, 3]), "b": np.ones([4, 2], "float16")}
    outputs = {f"outputs_{n}": (n + 2,) for n in range(11)}
    with server_cases.serving(exchange) as server:
        with _teachers(server.address, outputs=outputs) as teachers:
            dataset = tf.data.Dataset.from_tensor_slices(x).batch(4)
            (label,) = _labels_in(dataset.map(teachers))
    floats = {name: value.astype("float32") for name, value in x.items()}
    found = [kept["whole"] for kept in label["outputs"]]
    cases.assert_close(found, model(floats), rtol=1e-5, atol=1e-6)


@pytest.mark.deep
def test_servers_die_and_return_while_training_goes_on(exchange):
    cases.publish(exchange, cases.linear(5), step=10)
    with contextlib.ExitStack() as stack:
        first, second = (contextlib.ExitStack() for _ in range(2))
        stack.enter_context(first)
        stack.enter_context(second)
        one = first.enter_context(server_cases.serving(exchange))
        two = second.enter_context(server_cases.serving(exchange))
        teachers = stack.enter_context(_teachers(one.address, two.address))
        dataset = _dataset().map(teachers)
        learned = tfdistill.teachers.LabelTeacher(teachers)
        assert _fit(dataset, learned)[0]["distillation_weight"] == [1.0]
        first.close()
        # Each answer that is missing is asked for at the other one.
        for label in _labels_in(dataset.repeat(3)):
            assert (label["version"].numpy() == 10).all()
        assert teachers.status()["servers"][0]["problem"]
        second.close()
        found = _labels_in(dataset.repeat(3))
        assert {v for x in found for v in x["version"].numpy()} == {-1}
        assert teachers.status()["absent_rows"] == 3 * len(_X)
        alone = tfdistill.teachers.LabelTeacher(teachers)
        assert _fit(dataset, alone)[0]["distillation_weight"] == [0.0]
        for known, share, health in (
            (learned, 1.0, "good"),
            (alone, 0.0, "absent"),
        ):
            status = known.status()
            assert (status["share"], status["health"]) == (share, health)
            # Of the one that asks, for all who learn from it.
            assert status["num_missed"] == 3 * 4 + 4
            assert status["num_answers"] == 4 + 3 * 4
            assert status["num_quarantined"] >= 2
        assert learned.status()["step"] == 10
        assert two.address in alone.status()["reason"]
        stack.enter_context(server_cases.serving(exchange, port=two.port))
        waits.until(
            lambda: (_asked(teachers, 1)[0]["version"].numpy() == 10).all()
        )
        assert teachers.status()["servers"][1]["usable"]
        assert set(teachers.status()["refused"]) <= {"unreachable", "refused"}


_GOOD = np.zeros([8, 3], np.float32)


def _without_values():
    content = server_cases.response(outputs=_GOOD)
    made = server_cases.predict_pb2.PredictResponse.FromString(content)
    made.outputs["outputs"].ClearField("tensor_content")
    return made.SerializeToString()


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        pytest.param(kind, server_cases.response(version, **outputs), id=name)
        for name, kind, version, outputs in (
            ("classes", "shape", 10, {"outputs": _GOOD[:, :2]}),
            ("float64", "dtype", 10, {"outputs": _GOOD.astype("float64")}),
            ("nan", "not_finite", 10, {"outputs": _GOOD * np.nan}),
            ("name", "outputs", 10, {"other": _GOOD}),
            ("unversioned", "version", None, {"outputs": _GOOD}),
        )
    ]
    + [
        pytest.param("malformed", b"\xff\xfe nonsense", id="bytes"),
        # A shape, and no values.
        pytest.param("malformed", _without_values(), id="empty"),
    ],
)
def test_a_bad_answer_is_refused_by_kind_and_asked_for_elsewhere(
    kind, answer, caplog
):
    good = server_cases.response(outputs=_GOOD)
    with (
        server_cases.scripted(lambda _: answer) as bad,
        server_cases.scripted(lambda _: good) as other,
        _teachers(bad, other) as teachers,
    ):
        (label,) = _asked(teachers, 1)
        assert (label["version"].numpy() == 10).all()
        assert teachers.status()["refused"] == {kind: 1}
        assert teachers.status()["servers"][0]["problem"]
    assert f"({kind})" in caplog.text and bad in caplog.text


def test_silent_servers_are_left_alone():
    with (
        server_cases.raw() as half_open,
        server_cases.raw(b"HTTP/1.1 400 no\r\n\r\n" * 10) as nonsense,
        _teachers(half_open, nonsense, timeout_secs=0.5) as teachers,
    ):
        found = _asked(teachers)
        status = teachers.status()
    assert all((x["version"].numpy() == -1).all() for x in found)
    # Only the first batch asked them, so that the others did not wait.
    assert sum(status["refused"].values()) == 2
    assert status["refused"]["slow"] >= 1
    assert set(status["refused"]) <= {"slow", "unreachable"}
    assert all(server["problem"] for server in status["servers"])
    assert not any(server["usable"] for server in status["servers"])


def test_a_data_set_with_labels_from_servers_can_be_resumed(tmp_path):
    good = server_cases.response(outputs=_GOOD)
    with (
        server_cases.scripted(lambda _: good) as address,
        _teachers(address) as teachers,
    ):
        iterator = iter(_dataset().map(teachers))
        next(iterator)
        path = tf.train.Checkpoint(it=iterator).save(str(tmp_path / "it"))
        again = iter(_dataset().map(teachers))
        tf.train.Checkpoint(it=again).restore(path)
        np.testing.assert_array_equal(next(again)[1], _Y[8:16])
