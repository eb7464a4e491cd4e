"""What predictions lose."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdistill.teachers import scorer


@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize("is_binary", [True, False])
def test_a_guess_loses_the_entropy_of_what_the_student_expects(
    from_logits, is_binary
):
    """Of a student that is sure, and right: that of the labels."""
    labels = np.array([0, 0, 0, 1])
    kind = "Binary" if is_binary else "SparseCategorical"
    loss = getattr(keras.losses, f"{kind}Crossentropy")(from_logits=from_logits)
    shares = labels[:, np.newaxis] if is_binary else np.eye(2)[labels]
    shares = np.clip(shares, 1e-6, 1 - 1e-6)
    rest = 1 - shares if is_binary else 1.0
    outputs = np.log(shares / rest) if from_logits else shares
    found = scorer.Scorer(loss)
    losses = found.losses(labels, found.guess(outputs))
    entropy = -0.25 * np.log(0.25) - 0.75 * np.log(0.75)
    np.testing.assert_allclose(np.mean(losses), entropy, rtol=1e-4)


def test_numbers_are_compared_with_their_mean():
    targets = np.linspace(-1, 1, 64).astype("float32")[:, np.newaxis]
    found = scorer.Scorer(keras.losses.MeanSquaredError())
    base = np.mean(found.losses(targets, found.guess(targets)))
    np.testing.assert_allclose(base, np.var(targets), rtol=1e-5)
    for error in 0.1, 0.5:
        losses = found.losses(targets, targets + error).numpy()
        np.testing.assert_allclose(losses, np.full(64, error**2), rtol=1e-4)


def test_only_one_loss_is_a_scorer():
    assert scorer.of_task(keras.losses.MeanSquaredError()) is not None
    for loss in None, [None], [keras.losses.MeanSquaredError()] * 2:
        assert scorer.of_task(loss) is None


def test_an_ignored_class_loses_nothing():
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=-1
    )
    losses = scorer.Scorer(loss).losses([0, -1], tf.zeros([2, 4]))
    np.testing.assert_allclose(losses, [np.log(4), 0.0], rtol=1e-5)
