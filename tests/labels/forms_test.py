"""What is kept of an output, and what comes back."""

import numpy as np
import pytest
import tensorflow as tf

from tfdistill.labels import forms

_LOGITS = np.random.default_rng(3).normal(size=(4, 5, 9)).astype("float32") * 3
_P = np.exp(_LOGITS) / np.exp(_LOGITS).sum(-1, keepdims=True)


def _back(form, output=_LOGITS, seed=(1, 2)):
    kept = form.encode(output, seed=tf.constant(seed, tf.int32))
    return form.decode(kept, num_classes=output.shape[-1]).numpy()


def test_what_is_kept_whole_comes_back_to_the_bit():
    np.testing.assert_array_equal(_back(forms.Form()), _LOGITS)
    clicks = _LOGITS[:, 0, 0]
    np.testing.assert_array_equal(_back(forms.Form(), clicks), clicks)
    half = _back(forms.Form(dtype="float16"))
    np.testing.assert_allclose(half, _LOGITS, rtol=1e-3)


@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_top_classes_keep_their_probability_and_share_the_rest(
    from_logits, dtype
):
    form = forms.Form(top_k=3, dtype=dtype, from_logits=from_logits)
    found = _back(form, _LOGITS if from_logits else _P)
    p = np.exp(found) if from_logits else found
    threshold = np.sort(_P, axis=-1)[..., -3:-2]
    is_top = _P >= threshold
    rest = (_P * ~is_top).sum(-1, keepdims=True) / (9 - 3)
    tolerance = 1e-5 if dtype == "float32" else 5e-3
    np.testing.assert_allclose(p, np.where(is_top, _P, rest), atol=tolerance)
    np.testing.assert_allclose(p.sum(-1), 1, atol=3 * tolerance)


def test_a_certain_teacher_leaves_the_rest_nothing_and_stays_finite():
    sure = np.array([[1000.0, 0.0, 0.0, 0.0]], "float32")
    found = _back(forms.Form(top_k=2), sure)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(np.exp(found), [[1, 0, 0, 0]], atol=1e-6)


def test_the_mean_of_samples_is_the_distribution():
    form = forms.Form(num_samples=8)
    num_draws = 400
    found = np.mean(
        [np.exp(_back(form, seed=(7, draw))) for draw in range(num_draws)],
        axis=0,
    )
    error = np.sqrt(_P * (1 - _P) / (8 * num_draws))
    # One draw more or less, for the rarest classes.
    assert (np.abs(found - _P) < 4 * error + 1 / num_draws).all()
    one = _back(form)
    np.testing.assert_allclose(np.exp(one).sum(-1), 1, rtol=1e-5)
    assert np.isfinite(one).all()


def _drawn(num_rows, threads=0, first_row=0):
    """What is drawn of one distribution in each of several equal rows."""
    data = tf.data.Dataset.from_tensors(tf.zeros([num_rows, 3, 1000]))
    options = tf.data.Options()
    options.threading.max_intra_op_parallelism = threads
    form, extra = forms.Form(num_samples=5), {}
    if first_row:
        extra = {"first_row": first_row}
    data = data.map(lambda x: form.encode(x, seed=[1, 2], **extra))
    (kept,) = data.with_options(options).as_numpy_iterator()
    return kept["drawn_of_1000"]


def test_rows_and_positions_draw_for_themselves():
    drawn = np.reshape(_drawn(200), [600, 5])
    # Two of 600 rows of 5 draws of 1,000 classes are hardly ever the same,
    # and any two draws are in one case of a thousand.
    assert len(np.unique(drawn, axis=0)) == 600
    assert np.mean(drawn[1:] == drawn[:-1]) < 0.005
    _, counts = np.unique(drawn, return_counts=True)
    assert counts.max() < 20


def test_seed_and_row_alone_decide_what_is_drawn():
    drawn = _drawn(200)
    np.testing.assert_array_equal(_drawn(200, threads=1), drawn)
    for first, size in ((0, 7), (7, 50), (57, 143)):
        part = _drawn(size, threads=2, first_row=first)
        np.testing.assert_array_equal(part, drawn[first : first + size])


@pytest.mark.parametrize("kept", [{"top_k": 2}, {"num_samples": 2}])
def test_classes_of_another_number_and_no_probabilities_are_refused(kept):
    form = forms.Form(**kept)
    found = form.encode(_LOGITS, seed=[1, 2])
    size = _LOGITS.shape[-1]
    for other in (size - 1, size + 1):
        with pytest.raises(ValueError, match=f"{other} classes.*of_{size}"):
            form.decode(found, num_classes=other)
    shares, logits = np.exp(_back(forms.Form())), np.asarray(_LOGITS)
    shares /= shares.sum(-1, keepdims=True)
    form.check(logits)
    with pytest.raises(ValueError, match="rows that add up to 1.*=False"):
        form.check(shares)
    form = forms.Form(from_logits=False, **kept)
    form.check(shares)
    with pytest.raises(ValueError, match="must be probabilities"):
        form.check(logits)
    forms.Form().check(shares)
