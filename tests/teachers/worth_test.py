"""Who is clearly worse than the student: on held-out rows, or on batches."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cases import codistillation as cases
from tests.cases import tiers
from tfdistill.exports import student_graph
from tfdistill.teachers import canary as canary_lib
from tfdistill.teachers import scorer
from tfdistill.teachers import teacher
from tfdistill.teachers import worth

_X, _ = cases.data(64)
_REPORTS = 4


def _sharp(seed, factor):
    model = cases.linear(seed)
    model.set_weights([factor * w for w in model.get_weights()])
    return model


def _rotated(weights):
    return [np.roll(w, 1, axis=-1) for w in weights]


# By kind of peer: its weights, from those of a student that knows the labels;
# what it counts; and what is said of it.
_PEERS = {
    "honest": (lambda ws: ws, 1.0, ""),
    "half_as_sure": (lambda ws: [w / 8 for w in ws], 1.0, "may be bad"),
    "base_rates": (lambda ws: [0 * w for w in ws], 0.0, "used as a teacher"),
    "rotated": (_rotated, 0.0, "used as a teacher"),
}


def _after_steps(model, *data, count=_REPORTS):
    """Trains and refreshes; returns what the teachers counted at last."""
    for _ in range(count):
        logs = cases.fit(model, *data, batch_size=256)
        model.teachers.refresh(step=int(model.optimizer.iterations))
    return logs["distillation_weight"][-1]


@pytest.mark.parametrize(
    "kind",
    [
        *("honest", "base_rates"),
        tiers.deep("half_as_sure"),
        tiers.deep("rotated"),
    ],
)
def test_a_peer_that_has_learned_nothing_has_no_weight(kind, exchange, caplog):
    changed, counts, said = _PEERS[kind]
    student, peer = _sharp(0, 9), cases.linear(0)
    peer.set_weights(changed(student.get_weights()))
    labels = np.argmax(student(_X), axis=-1)
    model = cases.codistill(
        student, cases.peers(exchange), optimizer=keras.optimizers.SGD(0.0)
    )
    cases.prepare(model, _X, labels)
    cases.publish(exchange, peer, step=10)
    cases.load(model, 10)
    with caplog.at_level(logging.WARNING):
        assert _after_steps(model, _X, labels) == counts
    assert ("group_1" in caplog.text) == bool(said)
    assert said in caplog.text
    (status,) = model.teachers.status()
    assert status["own_loss"] < status["base_loss"]
    assert status["teacher_loss"] >= status["own_loss"]
    assert f"{status['teacher_loss']:.3g}" in caplog.text or not said
    if not counts:
        # It is still asked, and its next version may be better.
        peer.set_weights(student.get_weights())
        cases.publish(exchange, peer, step=20)
        cases.load(model, 20)
        assert _after_steps(model, _X, labels, count=8) == 1.0


_SEQUENCES = keras.utils.pad_sequences([[1, 2, 3], [2]], padding="post")


@pytest.mark.parametrize(
    ("mask_zero", "weights", "expected"),
    [
        tiers.deep(True, None, 4),
        tiers.deep(False, None, 6),
        tiers.deep(False, [[1.0] * 3, [0.0] * 3], 3),
        (True, [[1.0] * 3, [0.0] * 3], 4),
    ],
)
def test_predictions_that_do_not_count_are_left_out(
    exchange, mask_zero, weights, expected
):
    """Padded tokens, or else those of no weight."""
    keras.utils.set_random_seed(0)
    student = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(4, 5, mask_zero=mask_zero),
        ]
    )
    model = cases.codistill(student, cases.peers(exchange))
    data = _SEQUENCES, _SEQUENCES
    weights = weights and np.array(weights)
    spec = tf.TensorSpec([None, 3], tf.int32)
    cases.prepare(model, *data)
    cases.publish(exchange, student, step=10, spec=spec)
    cases.load(model, 10)
    cases.fit(model, *data, sample_weight=weights, batch_size=2)
    model.teachers.refresh(step=1)
    (teacher,) = model.teachers
    assert teacher.score._means()[0] == expected


@pytest.mark.parametrize(
    ("student", "teacher", "base", "error", "is_worse"),
    [
        # Measured on digits, held-out rows: honest, half of the labels
        # rotated, all rotated, learning rate 0; early and late.
        (0.94, 0.89, 2.3, 0.02, False),
        (0.20, 0.18, 2.3, 0.02, False),
        (0.20, 1.09, 2.3, 0.02, True),
        (0.20, 2.4, 2.3, 0.02, True),
        # The student knows nothing yet: only what is wrong is told apart.
        (2.35, 2.5, 2.3, 0.02, False),
        (2.35, 7.5, 2.3, 0.02, True),
        # Of clicks: base rates save nothing, and an honest peer a bit less.
        (0.44, 0.46, 0.52, 0.01, False),
        (0.44, 0.51, 0.52, 0.01, True),
        # Beside a student worse than a guess only a worse one is.
        (0.0854, 0.085, 0.0566, 0.001, False),
        (0.0854, 0.2, 0.0566, 0.001, True),
    ],
)
def test_a_version_needs_most_of_the_students_skill(
    student, teacher, base, error, is_worse
):
    assert worth.is_worse(teacher, student, base, error) == is_worse


_LABELS = np.arange(30) % 3


def _held_out(labels=_LABELS, **own):
    """What compares versions with a student whose losses at steps are known."""
    inputs = np.zeros([len(labels), cases.NUM_FEATURES])
    graph = student_graph.StudentGraph(cases.linear(0), cases.input_spec())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    known = teacher.Student(
        graph, tf.distribute.get_strategy(), scorer=scorer.Scorer(loss)
    )
    found = worth.HeldOut(canary_lib.Canary((inputs, labels)), known)
    for step, mean in own.items():
        found.own.note(int(step[1:]), np.full(30, mean), 0.75)
    return found


@pytest.mark.parametrize(
    ("step", "loss", "is_good"),
    [
        (20, 0.55, True),
        # What the student has by now is no measure of it.
        (10, 0.58, True),
        (20, 0.8, False),
        # It falls steeply from there, so a version may know as little.
        (0, 0.74, True),
        (0, 2.0, False),
        # Of a step to come: what the student has now.
        (30, 0.54, True),
        (30, 0.8, False),
    ],
)
def test_versions_are_compared_with_the_student_of_their_own_step(
    step, loss, is_good
):
    found = _held_out(s0=1.0, s10=0.57, s20=0.53)
    said = found.doubt(np.full(30, loss), step, since=step)
    if is_good:
        assert not said
    else:
        assert f"held-out batch is {loss:.3g}," in said
        assert "student's at step 20, 0.53" in said


def test_the_student_is_looked_at_on_held_out_rows():
    found = _held_out()
    # Whom nobody has compared with anything is not worse.
    assert not found.doubt(np.full(30, 9.0), 0, since=0)
    found.take_student(7)
    found.look()
    step, losses, base = found.own.at(7)
    expected = keras.losses.sparse_categorical_crossentropy(
        _LABELS, cases.linear(0)(found._inputs), from_logits=True
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert (step, base) == (7, pytest.approx(np.mean(expected)))


def test_labels_that_do_not_fit_compare_nothing(caplog):
    """Padded, say: no version is at fault."""
    found = _held_out(np.array([0, 7, -1]))
    found.take_student()
    found.look()
    assert not found.can_compare
    assert not found.own


def _known(model):
    """Has a student know the labels that it predicts; returns these."""
    model.set_weights([9 * w for w in model.get_weights()])
    return np.argmax(model(_X), axis=-1)


def _scaled(student, factor, exchange, step):
    peer = cases.linear(0)
    peer.set_weights([factor * w for w in student.get_weights()])
    cases.publish(exchange, peer, step=step)


@pytest.mark.parametrize("given", ["validation_data", tiers.deep("canary")])
def test_a_bad_version_waits_and_so_does_a_good_one_once_it_is_old(
    given, exchange
):
    """The one before goes on teaching until the student has left it behind."""
    student = cases.linear(0)
    labels = _known(student)
    held_out = {given: (_X, labels)}
    of_fit = held_out if given == "validation_data" else {}
    model = cases.codistill(
        student,
        cases.peers(exchange, **({} if of_fit else held_out)),
        optimizer=keras.optimizers.SGD(0.0),
    )
    cases.prepare(model, _X, labels, **of_fit)
    _scaled(student, 0.6, exchange, 10)
    cases.load(model, 10)
    (peer,) = model.teachers
    # It knows nothing, and passes for a uniform guess.
    _scaled(student, 0.0, exchange, 20)
    cases.refresh_until(model, lambda: 20 in cases.quarantined(model))
    assert "clearly worse" in cases.quarantined(model)[20]
    assert (peer.standing().step, peer.waits) == (10, "")
    # By now the student is much better than that version.
    student.set_weights([9 * w for w in student.get_weights()])
    cases.refresh_until(model, lambda: peer.waits)
    assert "on the held-out batch" in peer.waits
    assert model.teachers.status()[0]["share"] == 0
    # A good one has its weight at once.
    _scaled(student, 1.0, exchange, 30)
    cases.load(model, 30)
    cases.refresh_until(model, lambda: not peer.waits)


def test_there_is_no_verdict_while_the_student_improves_steeply():
    record, losses = worth.Score(), [np.full(64, v) for v in (2.2, 1.0, 2.3)]
    record.add(*losses, falls=True)
    assert (record.doubt("a", ""), record.doubt("a", "as before")) == (
        "",
        "as before",
    )
    # But of one that knows less than a guess.
    worse = worth.Score()
    worse.add(np.full(64, 2.36), *losses[1:], falls=True)
    assert "its loss is 2.36, the student's 1; base" in worse.doubt("a", "")
    # Nothing newer is in sight, so nothing is to be waited for.
    assert "rates have a loss of 2.3" in record.doubt("a", "", is_late=True)
    record.add(*losses, falls=False)
    assert "its loss is 2.2, the student's 1; base" in record.doubt("a", "")


def test_what_a_backup_holds_gives_the_same_verdict():
    record = worth.Score()
    record.add(*(np.full(64, v) for v in (2.2, 1.0, 2.3)), falls=False)
    restored = worth.Score(record.reports.tolist())
    assert restored.doubt("a", "") == record.doubt("a", "") != ""
    assert restored.status() == record.status()
