"""Groups that mix by fragments, in threads of this process, beside NumPy."""

import logging
import shutil
import struct
import threading
import time
import zlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import backup as backup_cases
from tests.cases import codistillation as cases
from tests.cases import fragments
from tests.cases import threads
from tests.cases import waits
from tfdistill import mixing
from tfdistill.exchange import filesystem
from tfdistill.mixing import outer_gradients


def _backup(directory):
    return tfdistill.callbacks.Backup(directory, every_steps=5)


@pytest.fixture(scope="module")
def two_groups(tmp_path_factory):
    """Groups that have mixed, and their mixers."""
    directory = tmp_path_factory.mktemp("two_groups")
    mixers = [fragments.mixer([1]), fragments.mixer([0])]
    models = threads.together(
        lambda: fragments.train(
            directory, 0, _backup(directory / "backup"), mixer=mixers[0]
        ),
        lambda: fragments.train(directory, 1, mixer=mixers[1]),
    )
    return models, mixers


def test_two_groups_are_the_equation(two_groups):
    models, mixers = two_groups
    for model, expected in zip(models, fragments.by_hand(), strict=True):
        cases.assert_close(model, expected, rtol=1e-4, atol=1e-5)
    # The common weights and their momentum are equal to the bit.
    cases.assert_close(*(mixer.variables[:-1] for mixer in mixers))
    assert [m.num_mixes for m in mixers] == [11, 11]
    assert [m.num_skipped for m in mixers] == [0, 0]


def test_what_is_not_sent_stays_in_the_weights(tmp_path):
    """The sum of all that was sent, and w - a, is what was trained."""
    still = cases.codistill(cases.deep(0), optimizer=keras.optimizers.SGD(0.0))
    rule = mixing.OuterOptimizer(keras.optimizers.SGD(1.0))
    mixer = fragments.mixer(rule=rule, every_steps=1, num_fragments=1)
    begin = still.get_weights()
    moved = [w + np.float32(0.1) * (1 + i) for i, w in enumerate(begin)]

    moves = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: still.set_weights(moved)
    )
    fragments.train(tmp_path, 0, moves, mixer=mixer, model=still, num_epochs=10)
    # Alone, the common weights follow, a quarter at a time.
    cases.assert_close(still, moved, rtol=1e-5)
    by_size = sorted(moved, key=lambda value: -value.size)
    cases.assert_close(mixer.variables[: len(moved)], by_size, rtol=1e-2)


@pytest.mark.deep
def test_a_resumed_group_is_as_if_it_had_not_stopped(
    tmp_path, two_groups, start_again
):
    backup = tmp_path / "backup"

    def stop(model):
        model.stop_training = True

    def first():
        callbacks = _backup(backup), backup_cases.AtStep(13, stop)
        fragments.train(tmp_path, 0, *callbacks, mixer=fragments.mixer([1]))
        # As if it had been killed before its end.
        shutil.rmtree(backup / "group_0" / "13")
        start_again()
        # A resumed training begins with whatever it is given.
        model = cases.codistill(cases.deep(9))
        return fragments.train(
            tmp_path,
            0,
            _backup(backup),
            mixer=fragments.mixer([1]),
            model=model,
        )

    resumed = threads.together(
        first, lambda: fragments.train(tmp_path, 1, mixer=fragments.mixer([0]))
    )
    for whole, model in zip(two_groups[0], resumed, strict=True):
        cases.assert_close(model, whole)


@pytest.mark.deep
def test_two_replicas_mix_as_one_device(tmp_path, two_replicas):
    found = []
    for strategy in (tf.distribute.get_strategy(), two_replicas):
        with strategy.scope():
            model = cases.codistill(cases.deep(0))
            directory = tmp_path / str(len(found))
            fragments.train(directory, 0, mixer=fragments.mixer(), model=model)
        found.append(model.get_weights())
    cases.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.deep
def test_a_group_that_missed_a_mix_is_told_of(tmp_path, caplog):
    # It stops for a while, and the other one does not wait for so long.
    alone = threading.Event()
    late = backup_cases.AtStep(7, lambda _: alone.wait(60))
    mixers = [fragments.mixer([1]), fragments.mixer([0], wait_secs=0.5)]
    tells = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (
            mixers[1].num_skipped and alone.set()
        )
    )
    with caplog.at_level(logging.WARNING):
        threads.together(
            lambda: fragments.train(
                tmp_path, 0, late, mixer=mixers[0], num_epochs=14
            ),
            lambda: fragments.train(
                tmp_path, 1, tells, mixer=mixers[1], num_epochs=14
            ),
        )
    assert "no longer have equal weights" in caplog.text


class _Hanging(filesystem.LocalFileSystem):
    """Files of outer gradients are written once they may be, or never."""

    def __init__(self):
        self.may_go_on, self.error = threading.Event(), None

    def write(self, path, blocks):
        if "outer_gradients" in path and path.endswith("manifest.json"):
            self.may_go_on.wait()
            if self.error:
                raise self.error
        super().write(path, blocks)


def _slow(changes, residue):
    time.sleep(0.05)
    return tfdistill.contrib.TopOfChunks(chunk=4)(changes, residue)


def test_own_storage_that_hangs_holds_up_no_mix(tmp_path):
    """All is published in the end, and weights are the same to the bit."""
    expected = fragments.train(tmp_path / "fine", 0, mixer=fragments.mixer())
    hanging = _Hanging()
    goes_on = backup_cases.AtStep(24, lambda _: hanging.may_go_on.set())
    model = fragments.train(
        tmp_path,
        0,
        goes_on,
        mixer=fragments.mixer(choose=_slow, wait_secs=20.0),
        file_system=hanging,
    )
    cases.assert_close(model, expected)
    exchange = tfdistill.Exchange(tmp_path / "exchange")
    assert exchange.outer_gradients.steps(0) == list(range(2, 25, 2))


def test_own_storage_that_fails_is_given_up_with_the_training(tmp_path):
    hanging = _Hanging()
    hanging.may_go_on.set()
    hanging.error = OSError("the storage is away")
    mixer = fragments.mixer(wait_secs=0.5)
    fragments.train(tmp_path, 0, mixer=mixer, file_system=hanging)
    assert mixer.num_mixes == 11
    waits.until(
        lambda: all(t.name != "tfdistill-mixing" for t in threading.enumerate())
    )


@pytest.mark.parametrize(
    ("choose", "bits", "share"),
    [
        (None, 8, 0.9999),
        (None, 1, 2 / np.pi),
        (tfdistill.contrib.TopOfChunks(chunk=16), 8, 0.286),
        (tfdistill.mixing.AboveRms(), 8, 0.8),
        (tfdistill.mixing.AboveRms(), 1, 0.74),
    ],
)
def test_an_outer_gradient_travels(choose, bits, share):
    """Of normally distributed numbers, so much of the sum of squares."""
    rng = np.random.default_rng(0)
    sizes = [100_000, 300, 1]
    arrays = [rng.normal(size=size).astype("float32") for size in sizes]
    blocks = outer_gradients.encode(arrays, choose, bits=bits)
    content = b"".join(blocks)
    found = outer_gradients.decode(content, sizes)
    sent, whole = (np.sum(np.square(v[0])) for v in (found, arrays))
    lost = np.sum(np.square(arrays[0] - found[0]))
    np.testing.assert_allclose([sent, whole - lost], share * whole, rtol=0.02)
    entropy = {None: 0, 16: 0.34, 256: 0.91}[
        choose and vars(choose).get("_chunk", 256)
    ]
    picked = 1 if choose is None else np.mean(found[0] != 0)
    limit = (1.05 * entropy + picked * (bits + 0.13)) / 8 * 100_400
    assert len(content) < limit + 100
    zeros = outer_gradients.encode([np.zeros(9, np.float32)], bits=bits)
    assert not np.any(outer_gradients.decode(b"".join(zeros), [9]))


def test_files_that_are_wrong_are_refused():
    array = np.arange(40, dtype=np.float32)
    choose = tfdistill.contrib.TopOfChunks(chunk=4)
    good = b"".join(outer_gradients.encode([array], choose))
    bomb = zlib.compress(bytes(10**6))
    wrong = {
        "cut short": good[:-1],
        "bytes are left": good + b"x",
        "as many numbers as": struct.pack("<III", len(bomb), 1, 8)
        + bomb
        + bytes(5),
        "8 bits or 1": struct.pack("<III", 0, 40, 4) + bytes(60),
        "isn't valid deflate": struct.pack("<III", 3, 0, 1) + b"abc",
        "numbers must be finite": struct.pack("<III", 0, 40, 8)
        + np.float32(np.nan).tobytes()
        + bytes(40),
    }
    for message, content in wrong.items():
        with pytest.raises(ValueError, match=message):
            outer_gradients.decode(content, [40])
    with pytest.raises(ValueError, match="index must have 48 entries"):
        outer_gradients.decode(good, [48])
    rng = np.random.default_rng(0)
    for _ in range(300):  # No other error, whatever comes.
        flipped = bytearray(good)
        flipped[rng.integers(len(good))] ^= 1 << rng.integers(8)
        try:
            (value,) = outer_gradients.decode(bytes(flipped), [40])
        except ValueError:
            continue
        assert np.isfinite(value).all()
    with pytest.raises(ValueError, match="must be finite"):
        outer_gradients.encode([np.array([np.nan], np.float32)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": mixing.ModelAveraging()}, "OuterOptimizer"),
        ({"num_fragments": 0}, "`num_fragments` .* 0"),
        ({"bits": 4}, "`bits` .* 4"),
        ({"wait_secs": 0.0}, "`wait_secs` .* 0"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        fragments.mixer(**options)


def test_more_fragments_than_variables_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at most the number"):
        fragments.train(tmp_path, 0, mixer=fragments.mixer(num_fragments=5))


def test_other_settings_are_refused_by_name(tmp_path, caplog):
    mixers = [fragments.mixer([1 - g], wait_secs=2.0) for g in range(2)]
    mixers[1]._num_fragments = 4
    with caplog.at_level(logging.WARNING):
        threads.together(
            *(
                lambda g=g: fragments.train(
                    tmp_path, g, mixer=mixers[g], num_epochs=3
                )
                for g in range(2)
            )
        )
    assert "one of 4 fragments every 2 steps, and this group by" in caplog.text
    assert [m.num_mixes for m in mixers] == [0, 0]
