"""Which `fit` of a process uses a place: counted by place, if it ended well."""

import contextlib
from concurrent import futures

from tfdistill.system import fits


class _Named:
    """A model, or an optimizer."""


def test_one_that_fails_is_tried_again_by_its_own_model(
    tmp_path, monkeypatch, start_again
):
    """A place by any name is one."""
    monkeypatch.chdir(tmp_path)
    model, others, found = _Named(), [_Named() for _ in range(4)], []
    interrupted = KeyboardInterrupt
    for trained, error, has_begun in (
        (model, None, True),
        (model, OSError, False),
        (others[0], OSError, True),  # Nothing was left there.
        (others[0], OSError, True),
        (others[1], interrupted, True),
        (others[2], OSError, True),
        (others[3], None, True),
        (others[0], None, True),
        (others[0], None, True),
    ):
        with contextlib.suppress(OSError, interrupted), fits.one(trained):
            found.append(fits.number(tmp_path / "backup"))
            assert fits.number("backup") == found[-1]
            if has_begun:
                fits.note_step()
            if error:
                raise error
    assert found == [1, 2, 2, 2, 3, 3, 4, 2, 5]
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


def test_a_fit_is_under_way_in_every_thread():
    with futures.ThreadPoolExecutor(1) as thread:
        with fits.one(_Named()):
            assert fits.is_under_way()
            assert thread.submit(fits.is_under_way).result()
        assert not fits.is_under_way()
