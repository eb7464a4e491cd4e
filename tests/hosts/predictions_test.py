"""Groups that exchange predictions, each on a host of its own."""

import numpy as np
import pytest

from tests.cases import mutual_learning
from tests.hosts import network
from tests.hosts import tasks

pytestmark = [pytest.mark.deep, pytest.mark.multiprocess]
_SCRIPT = """
import numpy as np
import tfdistill
from tests.cases import codistillation as cases
from tests.cases import mutual_learning

cluster = tfdistill.Cluster.from_env()
with tfdistill.make_strategy(cluster).scope():
    model = mutual_learning.model(cluster)
model.fit(
    mutual_learning.data(),
    steps_per_epoch=mutual_learning.NUM_STEPS,
    verbose=0,
    callbacks=[cases.never()],
)
np.savez(f"group_{cluster.group}.npz", *model.get_weights())
"""


@pytest.mark.parametrize(
    "hosts_as",
    [
        pytest.param({"host_names": ["twin", "twin"]}, id="equal_names"),
        pytest.param(
            # The other group does not reach the first's own, known address.
            {"host_names": ["castor", "pollux"], "networks": [[0, 1], [1]]},
            id="unknown_names_two_networks",
        ),
    ],
)
def test_groups_learn_from_each_other_by_any_network_and_name(
    no_process_left, tmp_path, hosts_as
):
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    with network.joined(2, **hosts_as) as hosts:
        hosts.link(delay_secs=0.0025, loss=0.01)
        started = [
            task
            for group, host in enumerate(hosts.hosts)
            for task in tasks.start(
                script,
                {"worker": [(host, host.ipv4)]},
                tmp_path / "run",
                group=group,
                num_groups=2,
            )
        ]
        for task in started:
            task.check()
    expected = mutual_learning.expected(2)
    for group, weights in enumerate(expected):
        found = np.load(tmp_path / f"group_{group}.npz")
        for own, right in zip(found.values(), weights, strict=True):
            np.testing.assert_allclose(own, right, rtol=1e-4, atol=1e-5)
