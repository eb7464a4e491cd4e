"""Workers of one group that end at different times."""

import pytest

from tests.programs import commands
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout_secs(300),
    pytest.mark.usefixtures("no_process_left"),
]
CODE = """
import time
import tfdistill
cluster = tfdistill.Cluster.from_env()
strategy = tfdistill.make_strategy(cluster)
if cluster.task_index != int(cluster.group):
    time.sleep(5)  # A slow last export, say.
print("done", cluster.task_index, flush=True)
"""


def test_a_worker_that_is_done_early_does_not_fail_the_others(tmp_path):
    # In group 0 the chief is done early, in group 1 the other worker.
    topology = local_cluster.LocalCluster(
        command=commands.of("-c", CODE),
        workdir=str(tmp_path),
        num_groups=2,
        workers_per_group=2,
    )
    with local_run.LocalRun(topology) as run:
        result = run.wait(timeout_secs=240)
    assert result.exit_code == 0, result.groups
    assert [set(g.exit_codes.values()) for g in result.groups] == [{0}, {0}]
    for group in range(2):
        for index in range(2):
            log = topology.logs_dir / f"group_{group}_worker_{index}.log"
            said = log.read_text(errors="replace")
            assert f"done {index}" in said
            assert "left before this one was done" not in said


ALONE = """
import keras
import numpy as np
import tfdistill
cluster = tfdistill.Cluster.from_env()
strategy = tfdistill.make_strategy(cluster)
with strategy.scope():
    model = tfdistill.CodistillModel(
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    )
    model.compile(keras.optimizers.SGD(0.5), "mse")

class Own(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        optimizer = self.model.optimizer
        optimizer.learning_rate.assign(float(optimizer.learning_rate) / 2)
        print("rate", float(optimizer.learning_rate), int(optimizer.iterations))

x = np.ones((8, 2), "float32")
model.fit(x, x[:, :1], epochs=2, verbose=0, batch_size=4, callbacks=[Own()])
print("together", model.predict(x, verbose=0).shape)
if cluster.is_chief:
    model.predict(x, verbose=0)
"""


def test_a_prediction_by_the_chief_alone_is_refused_in_words(tmp_path):
    topology = local_cluster.LocalCluster(
        command=commands.of("-c", ALONE),
        workdir=str(tmp_path),
        num_groups=1,
        workers_per_group=2,
    )
    with local_run.LocalRun(topology) as run:
        result = run.wait(timeout_secs=240)
    assert result.exit_code
    chief, other = (
        (topology.logs_dir / f"group_0_worker_{i}.log").read_text(
            errors="replace"
        )
        for i in range(2)
    )
    for said in (chief, other):
        # Callbacks read and set what plain Keras lets them, on every worker.
        assert "rate 0.25 2" in said and "rate 0.125 4" in said
        assert "together (8, 1)" in said
    assert "`predict` must be called by all workers" in chief
    assert "while others ended their program" in chief
    assert "Collective" not in chief
