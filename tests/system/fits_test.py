"""Which `fit` of a process uses a place: counted by place, if it ended well."""

import contextlib

from tfdistill.system import fits


class _Named:
    """A model, or an optimizer."""


def test_one_that_fails_is_not_counted_and_a_place_by_any_name_is_one(
    tmp_path, monkeypatch, start_again
):
    monkeypatch.chdir(tmp_path)
    model, found = _Named(), []
    for is_good in (True, False, False, True, True):
        with contextlib.suppress(OSError), fits.one(model):
            found.append(fits.number(tmp_path / "backup"))
            assert fits.number("backup") == found[-1]
            if not is_good:
                raise OSError
    assert found == [1, 2, 2, 2, 3]
    assert fits.number(tmp_path / "other") == 1
    start_again()
    assert fits.number("backup") == 1


def test_a_training_goes_on_with_its_optimizer(tmp_path):
    first, second = _Named(), _Named()
    found = []
    for optimizer in (first, second, first, second):
        with fits.one(_Named()):
            found.append(fits.number(tmp_path, of=optimizer))
    assert found == [1, 2, 1, 2]
    with fits.one(_Named()):
        assert fits.number(tmp_path, of=_Named()) == 3
