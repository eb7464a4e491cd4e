"""Two groups of two workers on four hosts."""

import pytest

from tests.hosts import tasks
from tests.programs import two_groups

pytestmark = [pytest.mark.deep, pytest.mark.multiprocess]


def test_they_find_by_a_shared_directory_what_one_process_does(hosts, tmp_path):
    hosts.link(delay_secs=0.0025, loss=0.01)
    started = [
        task
        for group in range(2)
        for task in tasks.start(
            two_groups,
            {"worker": [(h, h.ipv4) for h in hosts.hosts[2 * group :][:2]]},
            tmp_path,
            group=group,
            num_groups=2,
        )
    ]
    for task in started:
        task.check()
    two_groups.check(tmp_path)
    # Predictions went from group to group.
    assert min(hosts.num_bytes()[pair] for pair in ((0, 2), (3, 1))) > 5_000
