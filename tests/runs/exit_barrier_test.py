"""A worker of a group that fails alone.

`callbacks_test.py` has a chief that goes on alone, and `two_groups_test.py`
workers that end at different times.
"""

import json

import pytest

from tests.cases import free_ports
from tests.programs import commands

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]
_FAILS = """
import keras
import numpy as np
import tfdistill
cluster = tfdistill.Cluster.from_env()
strategy = tfdistill.make_strategy(cluster)
with strategy.scope():
    inner = keras.Sequential([keras.layers.Dense(1)])
    model = tfdistill.DistributedModel(inner)
    model.compile("sgd", "mse")
class Fails(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if cluster.task_index and epoch:
            raise KeyError("what one worker lacks")
x = np.ones([8, 1], "float32")
model.fit(x, x, epochs=1000, verbose=0, callbacks=[Fails()])
"""


@pytest.mark.deep
def test_the_others_hear_why_a_worker_failed(tmp_path):
    """Without a launcher, which would end them."""
    jobs = {"worker": free_ports.addresses(2)}
    with commands.starting(tmp_path) as start:
        processes = [
            start(
                *("-c", _FAILS),
                TF_CONFIG=json.dumps(
                    {
                        "cluster": jobs,
                        "task": {"type": "worker", "index": index},
                    }
                ),
            )
            for index in range(2)
        ]
        assert [process.wait() for process in processes] == [1, 1]
    reason = "another worker failed: KeyError: 'what one worker lacks'"
    assert reason in processes[0].text()
