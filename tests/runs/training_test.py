"""The same trainings on real workers, against plain Keras in one process."""

import numpy as np
import pytest

from tests.cases import tiers
from tests.cases import training as training_cases
from tests.programs import commands

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]


@pytest.mark.parametrize(
    "place",
    [
        "two_workers",
        tiers.deep("more_on_two_workers"),
        tiers.deep("two_workers_of_two"),
    ],
)
@pytest.mark.slow("each case is traced by two workers")
def test_two_workers_train_as_keras_in_one_process(place, tmp_path):
    commands.launched(
        *(tmp_path / "run", training_cases, tmp_path, place),
        workers_per_group=2,
        # Each case is traced anew, in a blink; beside a test that starts ten
        # processes at once, a blink can take ten times as long.
        stuck_secs=60,
    )
    found = [np.load(tmp_path / f"worker_{i}.npz") for i in range(2)]
    for name, case in training_cases.of(place).items():
        for arrays in found:
            actual = training_cases.found_in(arrays, name)
            expected = training_cases.reference(name)
            training_cases.assert_equal(actual, expected, case.tolerance)
