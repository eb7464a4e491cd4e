"""Workers of one group that end at different times.

`callbacks_test.py` has a chief that goes on alone.
"""

import pytest

from tests.programs import commands

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]
CODE = """
import time
import tfdistill
cluster = tfdistill.Cluster.from_env()
strategy = tfdistill.make_strategy(cluster)
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
        assert "ended before this worker was done" not in said
