"""SIGTERM to real tasks, in every phase of a training."""

import functools
import json
import signal
import time

import pytest

import tfdistill
from tests.cases import free_ports
from tests.cases import tiers
from tests.cases import waits
from tests.programs import commands
from tests.programs import preemption as program

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]
_until = functools.partial(waits.until, pause_secs=0.05)
# By phase, how many tasks a group of workers has; one needs no TF_CONFIG.
IN_EVERY_RUN = {"start": 2, "step": 1, "backup": 1, "collective": 2}
OTHERS = {"trace": 1, "evaluation": 1, "exchange": 1}


def _configs(num_tasks):
    """TF_CONFIG of each of so many workers."""
    hosts = free_ports.addresses(num_tasks)
    tasks = [{"type": "worker", "index": i} for i in range(num_tasks)]
    return [
        json.dumps({"cluster": {"worker": hosts}, "task": task})
        for task in tasks
    ]


@pytest.fixture
def start(tmp_path):
    with commands.starting(tmp_path) as starter:

        def act(phase, config=""):
            env = {"TFDISTILL_GROUP": "0", "TFDISTILL_NUM_GROUPS": "2"}
            env["TFDISTILL_EXCHANGE"] = str(tmp_path / "exchange")
            if config:
                env["TF_CONFIG"] = config
            return starter(program, phase, tmp_path, **env)

        yield act


@pytest.mark.parametrize("phases", [IN_EVERY_RUN, tiers.deep(OTHERS)])
@pytest.mark.slow("a training for each phase")
def test_sigterm_ends_a_task_in_every_phase(tmp_path, start, phases):
    tasks = {}
    for phase, num_tasks in phases.items():
        if num_tasks == 1:
            tasks[f"{phase}_0"] = start(phase)
            continue
        configs = _configs(num_tasks)
        # Each of these waits for a peer that does not come.
        alone = phase == "start"
        for index in range(num_tasks):
            config = _configs(num_tasks)[index] if alone else configs[index]
            tasks[f"{phase}_{index}"] = start(phase, config)
    # The one that waits in a collective before the one it waits for.
    for name, process in tasks.items():
        _until(
            lambda name=name, process=process: (
                (tmp_path / name).exists() or process.poll() is not None
            ),
            f"{name} was not reached: {process.text()[-2000:]}",
        )
        assert process.poll() is None, process.text()
    time.sleep(1.0)  # They are on their way into C.
    for name, process in tasks.items():
        if process.poll() is None or name != "collective_1":
            process.send_signal(signal.SIGTERM)
            process.wait()
    codes = {name: process.returncode for name, process in tasks.items()}
    assert codes == dict.fromkeys(tasks, 75)
    if "backup" in phases:  # What could be saved was saved.
        (step,) = tfdistill.Exchange(tmp_path / "backup", key=None).steps(0)
        assert step >= 4
