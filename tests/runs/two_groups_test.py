"""Two groups of two workers, as real processes, are what one process is."""

import pytest

from tests.programs import commands
from tests.programs import two_groups as program

pytestmark = pytest.mark.multiprocess


@pytest.mark.usefixtures("no_process_left")
@pytest.mark.slow("three trainings of two groups of two")
def test_groups_that_mix_are_one_and_those_that_swap_are_two_models(tmp_path):
    commands.launched(tmp_path, program, num_groups=2, workers_per_group=2)
    program.check(tmp_path)
