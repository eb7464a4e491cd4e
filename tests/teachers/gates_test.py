"""What a version must pass: a batch, a schema, files and sizes."""

import logging
import types

import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill.exports import student_graph
from tfdistill.teachers import gates
from tfdistill.teachers import peer

_X, _Y = cases.data()
_SPEC = tf.TensorSpec([None, 3])


@pytest.fixture
def exchange(tmp_path):
    return tfdistill.Exchange(tmp_path / "exchange")


def _check(outputs, spec=_SPEC, labels=None, **kwargs):
    batch = gates.Canary(np.zeros([2, 4]), labels=labels, **kwargs)
    batch.check(lambda inputs: [outputs], spec)


def test_finite_outputs_of_the_shape_pass():
    _check(np.zeros([2, 3]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_number_is_enough(bad):
    outputs = np.zeros([2, 3])
    outputs[1, 2] = bad
    with pytest.raises(ValueError, match="must be finite"):
        _check(outputs)


@pytest.mark.parametrize("shape", [[2, 4], [2, 1], [3, 3], [2], [2, 3, 1]])
def test_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"shape \(2, 3\); received"):
        _check(np.zeros(shape))


def test_worse_than_uniform_by_a_margin_is_refused():
    for good in ([[0, 0, 0], [0, 0, 0]], [[5, 0, 0], [0, 5, 0]]):
        _check(np.array(good, float), labels=[0, 1], margin=0.0)
    wrong = np.array([[0, 5, 0], [5, 0, 0]], float)
    expected = np.log(2 + np.exp(5.0))
    with pytest.raises(ValueError, match=f"1.599.*about {expected:.1g}"):
        _check(wrong, labels=[0, 1])
    _check(wrong, labels=[0, 1], margin=5.0)


def test_probabilities_and_one_output():
    probabilities = np.array([[0.01, 0.01, 0.98]] * 2)
    _check(probabilities, labels=[2, 2], from_logits=False, margin=0.0)
    with pytest.raises(ValueError, match="cross-entropy"):
        _check(probabilities, labels=[0, 0], from_logits=False)
    spec = tf.TensorSpec([None, 1])
    for outputs, logits in (
        (np.full([2, 1], 4.0), True),
        ([[0.98]] * 2, False),
    ):
        outputs = np.asarray(outputs)
        _check(outputs, spec, labels=[1, 1], from_logits=logits, margin=0.0)
        with pytest.raises(ValueError, match="cross-entropy"):
            _check(outputs, spec, labels=[0, 0], from_logits=logits)


@pytest.mark.parametrize("labels", [[0, 3], [-1, 0]])
def test_labels_out_of_range(labels):
    with pytest.raises(ValueError, match="labels must be 2 numbers in 0 to 2"):
        _check(np.zeros([2, 3]), labels=labels)


@pytest.mark.parametrize(
    ("inputs", "kwargs"),
    [
        (np.zeros([0, 4]), {}),
        (np.zeros([2, 4]), {"labels": [1]}),
        (np.zeros([2, 4]), {"labels": [1.0, 2.0]}),
        (np.zeros([2, 4]), {"margin": -1.0}),
        ({"a": np.zeros([2, 4]), "b": np.zeros([3, 4])}, {}),
    ],
)
def test_what_is_no_canary(inputs, kwargs):
    with pytest.raises(ValueError, match="must .*received"):
        gates.Canary(inputs, **kwargs)


@pytest.mark.parametrize(
    ("targets", "labels"),
    [
        ([2, 0, 1], [2, 0, 1]),
        ([[1.0], [0.0], [1.0]], [[1], [0], [1]]),
        ([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]], [1, 0, 1]),
        ([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]], None),
        ([1.5, 2.5, 3.5], None),
        ({"a": [1, 2, 3], "b": [1, 2, 3]}, None),
    ],
)
def test_a_data_set_gives_its_first_examples(targets, labels):
    data = tf.data.Dataset.from_tensor_slices((np.eye(3), targets)).batch(2)
    found = gates.Canary.from_dataset(data, num_examples=3)
    np.testing.assert_array_equal(found.inputs, np.eye(3))
    np.testing.assert_equal(found._labels, labels and np.array(labels))
    assert gates.as_canary(data)._batch_size == 3


def test_what_a_set_of_teachers_does_not_take_for_a_canary():
    with pytest.raises(ValueError, match="received ndarray.*tfdistill.Canary"):
        tfdistill.TeacherSet(canary=np.eye(3))
    with pytest.raises(ValueError, match="received an empty dataset"):
        gates.Canary.from_dataset(tf.data.Dataset.range(0).batch(2))
    inputs = tf.data.Dataset.from_tensors(np.eye(3))
    assert gates.Canary.from_dataset(inputs)._labels is None


def test_the_student_is_examined_for_a_fiftieth_of_the_time():
    now, asked = [0.0], []

    def predict(values, inputs):
        asked.append(values)
        now[0] += 2.0
        return [np.zeros([2, 3])]

    values = iter("abcdef")
    student = gates.StudentOnCanary(
        gates.Canary(np.zeros([2, 4]), labels=[0, 1]),
        types.SimpleNamespace(output_spec=_SPEC),
        snapshot=lambda: next(values),
        predict=predict,
        most_busy=0.02,
        clock=lambda: now[0],
    )
    student.begin()
    assert student.answer.loss == pytest.approx(np.log(3))
    for _ in range(2):
        student.take()
        student.examine()
    now[0] = 101.9
    student.examine()
    assert asked == ["a", "b"]
    student.take()
    now[0] = 102.0
    student.examine()
    # The newest only.
    assert asked == ["a", "b", "d"]


_TRUE = np.arange(100) % 10


def _classes(classes, confidence=0.9):
    return gates.Answer(
        num_classes=10, classes=np.asarray(classes), confidence=confidence
    )


@pytest.mark.parametrize(
    ("teacher", "confidence", "is_worse"),
    [
        (_TRUE, 0.9, False),
        # It knows a little less, or more, than the student.
        (np.where(np.arange(100) < 20, 0, _TRUE), 0.9, False),
        # It knows nothing, is rotated, or is half rotated.
        (0 * _TRUE, 0.9, True),
        ((_TRUE + 1) % 10, 0.9, True),
        (np.where(_TRUE < 5, (_TRUE + 1) % 5, _TRUE), 0.9, True),
        # The student has not learned anything yet.
        ((_TRUE + 1) % 10, 0.4, False),
    ],
)
def test_without_labels_a_teacher_must_agree(teacher, confidence, is_worse):
    canary = gates.Canary(np.zeros([100, 4]))
    past = np.where(np.arange(100) < 10, 9, _TRUE)
    beside = gates.Beside(student=_classes(_TRUE, confidence), others=[past])
    found = canary.behind(_classes(teacher), beside)
    assert bool(found and found.is_worse(was_worse=False)) == is_worse


def test_the_other_teachers_have_a_vote():
    """Two of them know what the student's past does not."""
    canary = gates.Canary(np.zeros([100, 4]))
    past = np.where(np.arange(100) < 50, 9, _TRUE)
    beside = gates.Beside(student=_classes(_TRUE), others=[past, _TRUE, _TRUE])
    found = canary.behind(_classes(past), beside)
    assert found.is_worse(was_worse=False)
    beside = gates.Beside(student=_classes(past), others=[past])
    found = canary.behind(_classes(past), beside)
    assert not found.is_worse(was_worse=False)


# ---- in a set of teachers ----


@pytest.mark.parametrize("kind", ["saved_models", "models"])
def test_a_fixed_teacher_answers_it_on_replicas_too(
    tmp_path, two_replicas, kind
):
    """In the strategy's scope, where what was loaded does not run as it is."""
    teacher = cases.linear(3)
    path = str(tmp_path / "model")
    tfdistill.CodistillModel(teacher).export(path, verbose=False)
    given = path if kind == "saved_models" else teacher
    canary = gates.Canary(_X, labels=np.argmax(teacher(_X), axis=-1))
    with two_replicas.scope():
        model = cases.codistill(
            cases.linear(0),
            tfdistill.TeacherSet(canary=canary, **{kind: [given]}),
        )
    cases.prepare(model, _X, _Y)
    assert model.teachers.status()[0]["health"] == "good"


def test_outputs_are_what_the_distillation_loss_takes_them_for():
    canary = gates.Canary(_X, labels=_Y)
    model = cases.codistill(
        cases.linear(0),
        cases.teacher_set(peers=(), canary=canary),
        loss="sparse_categorical_crossentropy",
    )
    cases.prepare(model, _X, _Y)
    assert canary._from_logits is None  # There is no teacher.
    exchange = tfdistill.Exchange(None)
    model = cases.codistill(
        cases.linear(0),
        cases.teacher_set(exchange, canary=canary),
        loss="sparse_categorical_crossentropy",
    )
    cases.prepare(model, _X, _Y)
    assert canary._from_logits is False and canary._has_classes


@pytest.mark.parametrize("build", [cases.linear, cases.deep])
def test_a_useless_version_is_quarantined_and_a_good_one_obeyed(
    exchange, build
):
    good = build(1)
    labels = np.argmax(good(_X), axis=-1)
    batch = gates.Canary(_X, labels=labels)
    model = cases.following(exchange, canary=batch, allow_other_graphs=True)
    bad = build(1)
    last = bad.layers[-1]
    last.set_weights([-20 * w for w in last.get_weights()])
    cases.publish(exchange, bad, step=10)
    cases.refresh_until(model, lambda: cases.quarantined(model))
    assert "cross-entropy on the canary" in cases.quarantined(model)[10]
    assert model.teachers.status()[0]["step"] == -1
    cases.publish(exchange, good, step=11)
    cases.load(model, 11)


@pytest.mark.parametrize("kind", ["constant", "random"])
def test_a_teacher_that_knows_nothing_and_is_sure_of_it(exchange, kind):
    """No step obeys it; one that knows the base rates passes."""
    labels = np.repeat([0, 1, 2, 2], 4)
    model = cases.following(exchange, canary=gates.Canary(_X, labels=labels))
    rng = np.random.default_rng(0)
    kernel = np.zeros([4, 3]) if kind == "constant" else rng.normal(size=[4, 3])
    bad, good = cases.linear(1), cases.linear(1)
    bad.layers[-1].set_weights([9 * kernel, np.array([9.0, 0, 0])])
    rates = np.log([0.25, 0.25, 0.5])
    good.layers[-1].set_weights([np.zeros([4, 3]), rates])
    cases.publish(exchange, bad, step=10)
    cases.refresh_until(model, lambda: cases.quarantined(model))
    assert "cross-entropy on the canary" in cases.quarantined(model)[10]
    assert cases.fit(model, _X, _Y)["distillation_weight"] == [0]
    cases.publish(exchange, good, step=11)
    cases.load(model, 11)
    assert cases.fit(model, _X, _Y)["distillation_weight"] == [1]


def test_a_fixed_one_that_is_useless_is_refused(tmp_path):
    student = cases.deep(1)
    labels = np.argmin(student(_X), axis=-1)
    student.export(str(tmp_path / "model"), verbose=False)
    with pytest.raises(ValueError, match="cross-entropy on the canary"):
        cases.following(
            peers=(),
            saved_models=[str(tmp_path / "model")],
            canary=gates.Canary(_X, labels=labels, margin=0.0),
        )


# ---- schemas ----

LABELS = ["cat", "dog", "emu"]
SCHEMA = {"labels": LABELS}


def test_a_file_stands_for_its_bytes(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    for path, text in zip(paths, ("x\ny\n", "x\ny\n", "y\nx\n"), strict=True):
        path.write_text(text)
    found = [gates.digests({"words": path})["words"] for path in paths]
    assert found[0] == found[1] != found[2]
    # Not the path's text.
    assert found[0] != gates.digests({"words": str(paths[0])})["words"]
    with pytest.raises(FileNotFoundError):
        gates.digests({"words": tmp_path / "absent"})


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("", 1),
        ("a/b", 1),
        ("x" * 65, 1),
        (3, 1),
        ("labels", {1, 2}),
        ("labels", b"x"),
        ("labels", float("nan")),
        ("labels", object()),
    ],
)
def test_what_cannot_be_hashed(name, part):
    with pytest.raises(ValueError, match="must be .*received"):
        gates.digests({name: part})


def test_the_order_of_columns_does_not_count_but_that_of_labels_does():
    columns = {"age": "years", "name": "text"}
    assert gates.digests({"f": columns}) == gates.digests(
        {"f": dict(reversed(columns.items()))}
    )
    assert gates.digests({"l": LABELS}) != gates.digests({"l": LABELS[::-1]})


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"labels": LABELS}, "has no part 'words'"),
        ({"labels": LABELS, "words": [1], "z": 1}, "has a part 'z'"),
        ({"labels": LABELS[::-1], "words": [1]}, "'labels' must be the same"),
    ],
)
def test_a_difference_is_named(theirs, message):
    ours = gates.digests({"labels": LABELS, "words": [1]})
    assert gates.schema_difference(ours, dict(ours)) is None
    found = gates.schema_difference(ours, gates.digests(theirs))
    assert message in found


@pytest.mark.parametrize("theirs", [None, [], "labels", 3])
def test_a_manifest_without_a_schema_differs(theirs):
    ours = gates.digests({"labels": LABELS})
    assert "its manifest has no schema" in gates.schema_difference(ours, theirs)
    assert gates.schema_difference({}, theirs) is None


def _export(exchange, schema):
    """One version of group 1, published while it trains."""
    model = cases.codistill(cases.linear(1))
    exporter = tfdistill.StudentExporter(
        exchange, every_steps=100, group=1, schema=schema
    )
    cases.fit(model, _X, _Y, callbacks=[exporter])


@pytest.mark.parametrize("ours", [SCHEMA, None])
def test_one_schema_or_none_to_compare(exchange, ours):
    _export(exchange, SCHEMA)
    model = cases.following(exchange, schema=ours)
    cases.load(model, exchange.latest(1).step)


@pytest.mark.parametrize(
    "theirs", [None, {"labels": ["dog", "cat", "emu"]}, {"words": [1]}]
)
def test_another_schema_is_quarantined_unless_overridden(
    exchange, theirs, caplog
):
    _export(exchange, theirs)
    step = exchange.latest(1).step
    model = cases.following(exchange, schema=SCHEMA)
    cases.refresh_until(model, lambda: cases.quarantined(model))
    assert "allow_other_schemas=True" in cases.quarantined(model)[step]
    with caplog.at_level(logging.WARNING):
        model = cases.following(
            exchange, schema=SCHEMA, allow_other_schemas=True
        )
        cases.load(model, step)
    assert caplog.text.count("Using the teacher of group 1 although") == 1


def test_a_warning_is_given_once(exchange, caplog):
    graph = student_graph.StudentGraph(cases.linear(0), cases.input_spec())
    screen = gates.VersionScreen(
        graph, schema=gates.digests(SCHEMA), only_warn=True
    )
    version = cases.publish(exchange, cases.linear(1))
    for _ in range(3):
        screen(version)
    assert caplog.text.count("although its manifest has no schema") == 1


def test_files_and_sizes_are_looked_at_first(exchange):
    graph = student_graph.StudentGraph(cases.linear(0), cases.input_spec())

    def write(directory):
        with open(f"{directory}/saved_model.pbtxt", "w") as file:
            file.write("x")

    version = exchange.publish(write, group=1, step=1)
    with pytest.raises(peer.RejectedError, match="saved_model.pbtxt"):
        gates.VersionScreen(graph)(version)
