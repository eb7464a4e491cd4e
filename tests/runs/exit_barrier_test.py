"""Workers of one group that end at different times.

`callbacks_test.py` has a chief that goes on alone.
"""

import json

import pytest

from tests.cases import free_ports
from tests.programs import commands

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]
CODE = """
import time
import tensorflow as tf
import tfdistill
cluster = tfdistill.Cluster.from_env()
strategy = tfdistill.make_strategy(cluster)
with strategy.scope():  # Of dtypes that TensorFlow does not broadcast.
    for dtype in (tf.int8, tf.uint16, tf.uint32, tf.bfloat16):
        begin = tf.cast([3 + cluster.task_index, 0], dtype)
        print("begins with", dtype.name, tf.Variable(begin).numpy().tolist())
if cluster.task_index:
    time.sleep(2)  # A slow last export, say.
print("done", cluster.task_index, flush=True)
"""


@pytest.mark.slow("two workers, one of them late")
def test_a_worker_that_is_done_early_does_not_fail_the_others(tmp_path):
    run = commands.launched(tmp_path, "-c", CODE, workers_per_group=2)
    assert set(run.result().groups[0].exit_codes.values()) == {0}
    for index in range(2):
        log = tmp_path / "logs" / f"group_0_worker_{index}.log"
        said = log.read_text(errors="replace")
        assert f"done {index}" in said
        for begin in ("int8 [3, 0]", "uint16 [3, 0]", "uint32 [3, 0]"):
            assert f"begins with {begin}" in said
        assert "begins with bfloat16 [3.0, 0.0]" in said
        assert "ended before this worker was done" not in said


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
