"""Links between hosts that are cut: who ends, who goes on, what is resumed."""

import time

import pytest

from tests.cases import runs
from tests.cases import waits
from tests.hosts import tasks

pytestmark = [pytest.mark.deep, pytest.mark.multiprocess]
# Of 16 steps each.
_NUM_EPOCHS = 12
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
model.fit(
    x, y, batch_size=32, epochs=int(sys.argv[1]), verbose=0, callbacks=[pause]
)
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
            *(script, {"worker": group}, workdir, _NUM_EPOCHS),
            group=0,
            num_groups=2,
        )

    first = start_first()
    second = tasks.start(
        *(script, {"worker": [(gamma, "gamma")]}, workdir, _NUM_EPOCHS),
        group=1,
        num_groups=2,
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
        assert max(_steps(workdir, group)) == 16 * _NUM_EPOCHS


@pytest.mark.parametrize(
    ("source", "target", "one_way"),
    [
        ("chief", "worker", False),
        ("worker", "chief", True),
    ],
)
def test_a_cut_from_the_chief_of_servers_ends_the_group(
    hosts, tmp_path, source, target, one_way
):
    started, workdir = _with_servers(hosts, tmp_path)
    at = {"chief": 0, "worker": 1}
    ends = [hosts.hosts[at[kind]] for kind in (source, target)]
    hosts.cut(*ends, one_way=one_way)
    codes = _ends(started)
    print(f"{source} to {target}, one way {one_way}: {codes}")
    assert [code for code, _ in codes.values()] == [75, 0, 0, 0]
    assert max(_steps(workdir, 0)) < 16 * _NUM_EPOCHS


def test_a_cut_between_a_worker_and_a_server_ends_the_group(hosts, tmp_path):
    started, workdir = _with_servers(hosts, tmp_path)
    hosts.cut(hosts.hosts[1], hosts.hosts[3])
    codes = _ends(started)
    print(f"worker to ps: {codes}")
    # The second worker has reached all others.
    assert [code for code, _ in codes.values()] == [75, 75, 0, 75]
    assert max(_steps(workdir, 0)) < 16 * _NUM_EPOCHS


def _with_servers(hosts, directory):
    """Starts a chief, two workers and a server, which are at work."""
    alpha, beta, gamma, delta = hosts.hosts[:4]
    script = directory / "train.py"
    script.write_text(_SCRIPT)
    workdir = directory / "run"
    places = {
        "chief": [(alpha, "alpha")],
        "worker": [(beta, "beta"), (gamma, "gamma")],
        "ps": [(delta, "delta")],
    }
    started = tasks.start(script, places, workdir, _NUM_EPOCHS)
    waits.until(lambda: max(_steps(workdir, 0), default=0) > 20, "steps")
    return started, workdir


def _ends(started):
    """Waits for all tasks; by name their exit codes, and after which time."""
    begun, ends = time.monotonic(), {}

    def are_over():
        for task in started:
            if task.process.poll() is not None and task.name not in ends:
                secs = round(time.monotonic() - begun, 1)
                ends[task.name] = task.process.returncode, secs
        return len(ends) == len(started)

    waits.until(are_over, "the end of all tasks")
    return {task.name: ends[task.name] for task in started}
