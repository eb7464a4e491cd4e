"""Who mixes with whom, in every group alike."""

import numpy as np
import pytest

from tfdistill.mixing import topologies


def _matrix(kind, num_groups, number, **options):
    """Equal weights for each group and its peers, `[groups, groups]`."""
    rows = np.eye(num_groups)
    for group in range(num_groups):
        topology = topologies.Topology(
            kind, group=group, num_groups=num_groups, **options
        )
        found = topology.peers(number)
        assert set(found) <= set(topology.everyone)
        rows[group, list(found)] = 1
    return rows / rows.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("num_groups", [2, 3, 4, 7])
@pytest.mark.parametrize("kind", topologies.NAMES)
def test_mixing_keeps_the_mean_of_all_groups(kind, num_groups):
    for number in range(5):
        matrix = _matrix(kind, num_groups, number)
        np.testing.assert_allclose(matrix.sum(axis=0), 1)
        np.testing.assert_array_equal(matrix > 0, matrix.T > 0)


def test_gossip_draws_other_pairs_each_time_and_for_each_seed():
    def pairs(**options):
        return [str(_matrix("gossip", 6, n, **options)) for n in range(20)]

    assert len(set(pairs())) > 5
    assert pairs() == pairs() != pairs(seed=1)
    # Everyone meets everyone.
    met = sum(_matrix("gossip", 4, n) for n in range(30))
    assert (met > 0).all()


def test_a_list_is_taken_as_it_is():
    topology = topologies.Topology([4, 2], group=0, num_groups=1)
    assert topology.peers(3) == (2, 4)
