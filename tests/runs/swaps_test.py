"""Many swaps of a teacher leave nothing behind: no memory, no traces."""

import json

import pytest

from tests.programs import commands
from tests.programs import swaps

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]


@pytest.mark.deep
def test_swaps_of_a_teacher_leave_nothing_behind(tmp_path):
    text = commands.run(swaps, tmp_path)
    found = json.loads(text.splitlines()[-1])
    assert found["new_traces"] == 0
    assert found["growth_mib"] < swaps.NUM_SWAPS * found["version_mib"] / 3
