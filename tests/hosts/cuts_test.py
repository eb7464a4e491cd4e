"""Links between hosts that are cut: who ends, who goes on, what is resumed."""

import time

import pytest

from tests.cases import runs
from tests.cases import waits
from tests.hosts import tasks

pytestmark = [pytest.mark.deep, pytest.mark.multiprocess]
_SCRIPT = """
import sys, time
import keras
import numpy as np

keras.utils.set_random_seed(3)
x = np.random.random((512, 6)).astype("float32")
y = (x[:, 0] > x[:, 1]).astype("int64")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
model.compile(
    "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
)
pause = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda step, logs: time.sleep(0.05)
)
model.fit(x, y, batch_size=32, epochs=30, verbose=0, callbacks=[pause])
"""


def _steps(workdir, group):
    try:
        return [
            line.get("step", 0)
            for line in runs.records(workdir / f"group_{group}")
        ]
    except OSError:
        return []


def test_a_cut_within_a_group_ends_it_and_no_other(hosts, tmp_path):
    alpha, beta, gamma = hosts.hosts[:3]
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    workdir = tmp_path / "run"

    def start_first():
        group = [(alpha, "alpha"), (beta, "beta")]
        return tasks.start(
            script, {"worker": group}, workdir, group=0, num_groups=2
        )

    first = start_first()
    second = tasks.start(
        script, {"worker": [(gamma, "gamma")]}, workdir, group=1, num_groups=2
    )
    backup = workdir / "group_0" / "backup"
    waits.until(
        lambda: (
            backup.is_dir()
            and any(backup.iterdir())
            and max(_steps(workdir, 0), default=0) > 20
        ),
        "a backup of the first group",
    )
    hosts.cut(alpha, beta)
    begun = time.monotonic()
    codes = [task.wait() for task in first]
    print(f"the cut was noticed after {time.monotonic() - begun:.1f} s")
    assert codes == [75, 75]
    hosts.heal()
    for task in [*start_first(), *second]:
        task.check()
    for group in (0, 1):
        assert max(_steps(workdir, group)) == 480
