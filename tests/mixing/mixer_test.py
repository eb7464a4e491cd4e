"""Groups that mix their weights, in threads of this process."""

import hashlib
import logging
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import servers
from tests.cases import threads
from tests.cases import waits
from tfdistill import mixing

_X, _Y = cases.data(16)


def _exchange(tmp_path, **kwargs):
    return tfdistill.Exchange(tmp_path / "exchange", **kwargs)


def _mixer(rule=None, *, every_steps=1, peers=(1,), **kwargs):
    return mixing.WeightMixer(
        rule or mixing.ModelAveraging(),
        every_steps=every_steps,
        peers=list(peers),
        **kwargs,
    )


def test_groups_that_mix_every_step_are_one_group(tmp_path):
    # Two groups of batches of four, and one group of batches of eight.
    models = [cases.codistill(cases.deep(0)) for _ in range(3)]
    data = [(_X[0::2], _Y[0::2]), (_X[1::2], _Y[1::2]), (_X, _Y)]
    mixers = [_mixer(peers=[1 - group], wait_secs=60.0) for group in range(2)]

    def train(group):
        exporter = cases.exporter(_exchange(tmp_path), group=group)
        callbacks = [exporter, mixers[group]]
        fit = {"batch_size": 4, "epochs": 3, "callbacks": callbacks}
        cases.fit(models[group], *data[group], **fit)

    threads.together(lambda: train(0), lambda: train(1))
    cases.fit(models[2], *data[2], batch_size=8, epochs=3, callbacks=[])
    first, second, expected = models
    cases.assert_close(first, expected, atol=1e-6)
    cases.assert_close(second, expected, atol=1e-6)
    before = cases.deep(0).get_weights()
    for value, begin in zip(expected.get_weights(), before, strict=True):
        assert np.abs(value - begin).max() > 1e-3
    assert [m.num_mixes for m in mixers] == [6, 6]
    assert [m.num_skipped for m in mixers] == [0, 0]


# ---- one group, and versions that others have published ----


def _digest(model):
    values = b"".join(value.tobytes() for value in model.get_weights())
    return hashlib.sha256(values).hexdigest()


def _publish(exchange, student, step, *, group=1, **extras):
    extras = {"initial_weights": _digest(cases.deep(0)), **extras}
    return cases.publish(
        exchange, student, group=group, step=step, extras=extras
    )


class _Read(keras.callbacks.Callback):
    """Gives the reading thread the time that it needs after each step."""

    def __init__(self, mixer, groups=(1,)):
        super().__init__()
        self._mixer, self._groups = mixer, groups

    def on_train_batch_end(self, batch, logs=None):
        readers = [self._mixer._followers[group] for group in self._groups]
        waits.until(lambda: all(r.announced < 0 or r.state for r in readers))


def _fit(model, exchange, mixer, *more, epochs=1):
    """Four steps an epoch."""
    exporter = cases.exporter(exchange)
    return cases.fit(
        model,
        _X,
        _Y,
        batch_size=4,
        epochs=epochs,
        callbacks=[exporter, mixer, *more],
    )


def _still(student=None):
    """A model whose own training changes nothing."""
    return cases.codistill(
        student or cases.deep(0), optimizer=keras.optimizers.SGD(0.0)
    )


def test_training_does_not_wait_and_no_version_is_mixed_twice(exchange, caplog):
    other = cases.deep(1)
    for group in (1, 2):
        _publish(exchange, other, 10, group=group)
    model = _still()
    mixer = _mixer(mixing.ModelAveraging(0.5), peers=[1, 2])
    _fit(model, exchange, mixer, _Read(mixer, (1, 2)), epochs=2)
    # At the first step nothing was read, and afterwards nothing was new,
    # which the log does not say again: the peer may be slow.
    assert caplog.text.count("no mix, because none of") == 1
    assert (mixer.num_mixes, mixer.num_skipped) == (1, 7)
    assert (mixer.num_waits, mixer.staleness_steps) == (0, {1: -8, 2: -8})
    own, theirs = cases.deep(0).get_weights(), other.get_weights()
    mixed = [a + (b - a) / 3 for a, b in zip(own, theirs, strict=True)]
    cases.assert_close(model, mixed, rtol=1e-5)
    version = exchange.open(1, 10)
    assert mixer.num_bytes == 2 * version.num_bytes


def test_a_peer_that_is_ahead_is_mixed_as_of_the_same_step(tmp_path):
    exchange = tfdistill.Exchange(tmp_path, max_to_keep=9)
    for step in range(1, 7):
        _publish(exchange, cases.deep(step), step)
    mixer = _mixer(wait_secs=60.0)
    _fit(_still(), exchange, mixer)
    assert mixer.num_mixes == 4 and mixer.staleness_steps == {1: 0}


def test_a_peer_that_was_missing_is_not_waited_for_until_it_publishes(exchange):
    model, now = _still(), [0.0]
    waited = []

    def clock():
        now[0] += 1.0  # Each look at the clock takes a second.
        return now[0]

    mixer = _mixer(wait_secs=5.0, clock=clock)

    class Peer(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:
                _publish(exchange, cases.deep(1), 3)
            now[0] = 0.0

        def on_train_batch_end(self, batch, logs=None):
            waited.append(now[0] >= 5.0)

    class Seen(keras.callbacks.Callback):
        """Before the mixer: lets the reading thread see the version."""

        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                follower = mixer._followers[1]
                follower._wanted = lambda version: version.step <= 3
                waits.until(lambda: follower.newest >= 0)
                # From here on, time does not run out.
                mixer._rounds._clock = lambda: 0.0

    exporter = cases.exporter(exchange)
    cases.fit(
        model, _X, _Y, batch_size=4, callbacks=[exporter, Seen(), mixer, Peer()]
    )
    assert waited[:2] == [True, False]
    assert (mixer.num_mixes, mixer.num_skipped) == (1, 3)
    np.testing.assert_array_equal(
        model.get_weights()[0],
        (cases.deep(0).get_weights()[0] + cases.deep(1).get_weights()[0]) / 2,
    )


class _OneVersionAStep(keras.callbacks.Callback):
    """Publishes a version before each step, and waits until it is seen."""

    def __init__(self, mixer, exchange, publish):
        super().__init__()
        self._mixer, self._exchange = mixer, exchange
        self._publish = publish

    def on_train_batch_begin(self, batch, logs=None):
        step = int(self.model.optimizer.iterations) + 1
        if step not in self._exchange.steps(1):
            self._publish(step)
        waits.until(lambda: self._mixer._followers[1].newest >= step)


@pytest.mark.deep
def test_two_replicas_mix_as_one_device(tmp_path, two_replicas):
    """With batch statistics, and a rule that has a state."""
    found = []
    for strategy in (tf.distribute.get_strategy(), two_replicas):
        exchange = _exchange(tmp_path / str(len(found)), max_to_keep=9)
        with strategy.scope():
            inputs = keras.Input((4,))
            hidden = keras.layers.Dense(5)(inputs)
            hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
            student = keras.Model(inputs, keras.layers.Dense(3)(hidden))
            cases.randomize(student, 0)
            model = cases.codistill(student)
        mixer = _mixer(
            mixing.OuterOptimizer(
                keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
            )
        )

        def publish(step, student=student, exchange=exchange, mixer=mixer):
            cases.publish(
                exchange,
                student,
                step=step,
                values=[
                    tf.convert_to_tensor(v.numpy() * 0.9 + step / 10)
                    for v in student.variables
                ],
                extras=mixer.manifest_extras(),
            )

        versions = _OneVersionAStep(mixer, exchange, publish)
        with strategy.scope():
            _fit(model, exchange, mixer, versions, _Read(mixer))
        assert mixer.num_mixes == 3
        found.append(student.get_weights())
    cases.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_parameter_servers_are_refused(exchange, monkeypatch):
    servers.pretend(monkeypatch)
    callbacks = [cases.exporter(exchange), _mixer()]
    with pytest.raises(ValueError, match="not be used with parameter servers"):
        servers.model().fit(servers.batches(), callbacks=callbacks, verbose=0)


class Empty(keras.layers.Layer):
    """Has a weight without elements."""

    def build(self, input_shape):
        self.add_weight(shape=(0, 3), trainable=False)

    def call(self, x):
        return x


@pytest.mark.deep
def test_weights_of_any_float_and_size_are_mixed(tmp_path):
    inputs = keras.Input((4,), dtype="bfloat16")
    hidden = keras.layers.Dense(5, dtype="bfloat16")(inputs)
    hidden = Empty(dtype="bfloat16")(hidden)
    outputs = keras.layers.Dense(3, dtype="float64")(hidden)
    student = keras.Model(inputs, outputs)
    cases.randomize(student, 0)
    begin = student.get_weights()
    model, exchange = _still(student), _exchange(tmp_path)
    mixer = _mixer(mixing.ModelAveraging(0.5))

    def publish(step):
        cases.publish(
            exchange,
            student,
            step=step,
            spec=model.trainer.input_spec,
            values=[v.value + tf.cast(1, v.dtype) for v in student.variables],
            extras=mixer.manifest_extras(),
        )

    versions = _OneVersionAStep(mixer, exchange, publish)
    _fit(model, exchange, mixer, versions, _Read(mixer))
    assert mixer.num_mixes == 3
    for found, value in zip(student.get_weights(), begin, strict=True):
        assert found.dtype == value.dtype
        assert not found.size or np.abs(found - value).max() > 0.1


# ---- a training that was stopped ----


def _resumable(tmp_path, notes, *, stop_at=None, publishes=True):
    """Trains eight steps, or fewer, and notes the weights after each."""
    exchange = _exchange(tmp_path, max_to_keep=20)
    rule = mixing.OuterOptimizer(keras.optimizers.Adam(0.1))
    mixer = _mixer(rule)
    backup = tfdistill.callbacks.Backup(tmp_path / "backup", every_steps=4)

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            step = int(self.model.optimizer.iterations)
            notes[step] = self.model.get_weights()
            self.model.stop_training = step == stop_at

    versions = _OneVersionAStep(
        mixer, exchange, lambda n: _publish(exchange, cases.deep(n), n)
    )
    seed = 0 if stop_at else 9  # Whatever a resumed training begins with.
    _fit(
        cases.codistill(cases.deep(seed), optimizer="adam"),
        exchange,
        mixer,
        Notes(),
        *([versions] if publishes else []),
        _Read(mixer),
        backup,
        epochs=2,
    )
    return mixer


def test_a_resumed_training_repeats_its_mixes(tmp_path, caplog, start_again):
    before, after, without = {}, {}, {}
    stopped = _resumable(tmp_path, before, stop_at=7)
    assert stopped.num_mixes == 6
    shutil.copytree(tmp_path, tmp_path / "again")
    # As if it had been killed before its end.
    for directory in (tmp_path, tmp_path / "again"):
        shutil.rmtree(directory / "backup" / "group_0" / "7")
    start_again()
    resumed = _resumable(tmp_path, after)
    assert list(after) == [5, 6, 7, 8]
    for step in (5, 6, 7):
        cases.assert_close(after[step], before[step])
    assert resumed.num_mixes == 7
    assert resumed.manifest_extras() == stopped.manifest_extras()
    extras = _exchange(tmp_path).open(0, 8).manifest.extras
    assert extras["examples"] == 32
    # A version that is gone is told of once.
    shutil.rmtree(tmp_path / "again" / "exchange" / "group_1" / "5")
    shutil.rmtree(tmp_path / "again" / "exchange" / "group_1" / "6")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        _resumable(tmp_path / "again", without, publishes=False)
    assert caplog.text.count("can't be repeated exactly") == 1


# ---- who mixes, and by what ----


class LimitedPull(mixing.Rule):
    """Moves weights towards the mean by at most so much, and counts mixes."""

    def __init__(self, most):
        self._most = most

    def start(self, weights):
        return [tf.zeros([])]

    def mixed(self, own, mean, state, *, num):
        pulled = [
            o + tf.clip_by_value(m - o, -self._most, self._most)
            for o, m in zip(own, mean, strict=True)
        ]
        return pulled, [state[0] + 1]


def test_a_rule_of_ones_own_needs_one_method(tmp_path):
    exchange, other = _exchange(tmp_path), cases.deep(1)
    _publish(exchange, other, 2)
    model = _still()
    mixer = _mixer(LimitedPull(0.01), every_steps=2, wait_secs=60.0)
    callbacks = [cases.exporter(exchange, every_steps=2), mixer]
    # Three steps, so one mix.
    cases.fit(model, _X[:12], _Y[:12], batch_size=4, callbacks=callbacks)
    assert [float(value) for value in mixer.variables] == [1.0]
    own, theirs = cases.deep(0).get_weights(), other.get_weights()
    mixed = [
        a + np.clip((b - a) / 2, -0.01, 0.01)
        for a, b in zip(own, theirs, strict=True)
    ]
    cases.assert_close(model, mixed, atol=1e-6)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "Own must have `mixed`"),
        (lambda own, state: own, "as two lists; received"),
        (lambda own, state: (own[1:], state), "weights of the same shapes"),
        (lambda own, state: (own, [*state, 0.0]), "state of the same shapes"),
    ],
)
def test_a_rule_that_is_wrong_is_refused_before_the_first_step(
    tmp_path, returned, message
):
    def mixed(rule, own, mean, state, *, num):
        return returned(own, state)

    own = type("Own", (mixing.Rule,), {"mixed": mixed} if returned else {})
    model = _still()
    callbacks = [
        cases.exporter(_exchange(tmp_path), every_steps=2),
        _mixer(own(), every_steps=2, peers=[]),
    ]
    with pytest.raises((ValueError, NotImplementedError), match=message):
        cases.fit(model, _X, _Y, batch_size=4, callbacks=callbacks)
    assert int(model.optimizer.iterations.numpy()) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "mean"}, "`rule` .*'mean'"),
        ({"wait_secs": -1.0}, "`wait_secs` .*-1.0"),
        ({"peers": ["a"]}, "`peers` .*'a'"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        _mixer(**options)


def test_versions_of_other_models_are_quarantined(exchange):
    half = {"mixing_rule": "ModelAveraging(alpha=0.5)"}
    _publish(exchange, cases.deep(1, "relu"), 10, group=1)
    _publish(exchange, cases.deep(1), 10, group=2, initial_weights=None)
    _publish(exchange, cases.deep(1), 10, group=3, **half)
    _publish(exchange, cases.deep(1), 10, group=4, initial_weights="0" * 64)
    groups = 1, 2, 3, 4
    mixer = _mixer(peers=groups)
    _fit(_still(), exchange, mixer, _Read(mixer, groups))
    assert mixer.num_mixes == 0
    for group, message in zip(
        groups,
        (
            "its graph differs from the student",
            "doesn't record the weights",
            "its group mixes by ModelAveraging(alpha=0.5)",
            f"began with the weights {'0' * 64}, and this group with",
        ),
        strict=True,
    ):
        assert message in mixer._followers[group].rejected[10]


def test_equal_rules_have_one_name():
    def name(rate):
        rule = mixing.OuterOptimizer(keras.optimizers.SGD(rate, name=f"{rate}"))
        return rule.description

    assert name(0.5) == name(0.50) != name(0.7)
    assert name(0.5).startswith("OuterOptimizer(optimizer=<keras.")
    first, second = (type("Own", (mixing.Rule,), {})() for _ in range(2))
    assert first.description == second.description


def test_one_group_alone_is_moved_by_its_own_progress(tmp_path):
    """As one-replica DiLoCo, here by half of it."""
    model, plain = (cases.codistill(cases.linear(0)) for _ in range(2))
    rule = mixing.OuterOptimizer(keras.optimizers.SGD(0.5))
    mixer = _mixer(rule, every_steps=2, peers=[])
    callbacks = [cases.exporter(_exchange(tmp_path), every_steps=2), mixer]
    cases.fit(model, _X, _Y, batch_size=4, callbacks=callbacks)
    for rows in (slice(8), slice(8, 16)):
        begin = plain.get_weights()
        cases.fit(plain, _X[rows], _Y[rows], batch_size=4, callbacks=[])
        pairs = zip(begin, plain.get_weights(), strict=True)
        plain.set_weights([(a + b) / 2 for a, b in pairs])
    assert mixer.num_mixes == 2
    cases.assert_close(model, plain, rtol=1e-4, atol=1e-6)
