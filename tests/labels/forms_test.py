"""What is kept of an output, and what comes back."""

import numpy as np
import pytest

from tfdistill.labels import forms

_LOGITS = np.random.default_rng(3).normal(size=(4, 5, 9)).astype("float32") * 3
_P = np.exp(_LOGITS) / np.exp(_LOGITS).sum(-1, keepdims=True)


def _back(form, output=_LOGITS):
    return form.decode(
        form.encode(output), num_classes=output.shape[-1]
    ).numpy()


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


def test_classes_of_another_number_and_no_probabilities_are_refused():
    form = forms.Form(top_k=2)
    found = form.encode(_LOGITS)
    size = _LOGITS.shape[-1]
    for other in (size - 1, size + 1):
        with pytest.raises(ValueError, match=f"{other} classes.*of_{size}"):
            form.decode(found, num_classes=other)
    shares, logits = np.exp(_back(forms.Form())), np.asarray(_LOGITS)
    shares /= shares.sum(-1, keepdims=True)
    form.check(logits)
    with pytest.raises(ValueError, match="rows that add up to 1.*=False"):
        form.check(shares)
    form = forms.Form(from_logits=False, top_k=2)
    form.check(shares)
    with pytest.raises(ValueError, match="must be probabilities"):
        form.check(logits)
    forms.Form().check(shares)
