"""Which tests `run.sh --changed` chooses."""

import pytest

from tests import affected

pytestmark = pytest.mark.deep
_ALL = {affected._path(test) for test in affected._tests()}


def _chosen(*paths, durations=None):
    return affected.choose(paths, durations or {})[0]


def test_own_room_comes_first_and_then_who_can_see_it():
    chosen = _chosen("tfdistill/teachers/staleness.py")
    room = [path for path in chosen if path.startswith("tests/teachers/")]
    assert "tests/teachers/staleness_test.py" in room
    assert "tests/golden_test.py" in chosen
    # It reads files of a run, and knows no teacher.
    assert "tests/status/goodput_test.py" not in chosen


def test_a_name_of_the_face_leads_to_its_module():
    named = affected.names("tests.cases.codistillation")
    assert {"tfdistill.model.codistilled", "tfdistill.callbacks"} <= named
    assert "tfdistill.model.distributed" in affected.names("tfdistill")


@pytest.mark.parametrize(
    ("path", "test"),
    [
        ("tests/cases/fragments.py", "tests/mixing/fragments_test.py"),
        ("models/digits.py", "tests/models/digits_test.py"),
        ("README.md", "tests/project/docs_test.py"),
        ("tests/conftest.py", "tests"),
    ],
)
def test_what_is_no_library_has_its_tests(path, test):
    assert test in _chosen(path)


def test_what_would_take_too_long_is_left_out_and_counted():
    paths = ["tfdistill/system/run_files.py"]
    every = _chosen(*paths, durations=dict.fromkeys(_ALL, 0.0))
    durations = dict.fromkeys(every, affected.BUDGET_SECS / 10)
    chosen, left = affected.choose(paths, durations)
    assert left and len(chosen) + len(left) == len(every)
    assert "tests/system/run_files_test.py" in chosen
