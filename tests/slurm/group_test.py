"""Tests of a group inside its job: restarts, time limits, cancellation.

Slurm's commands are small programs here that do what a test tells them;
tests/runs/slurm_test.py runs with the real ones.
"""

import json
import os
import signal
import threading

import pytest

from tests.cases import waits
from tfdistill.slurm import group
from tfdistill.slurm import job

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]
# Notes its arguments and does what the test has planned for this start.
SRUN = """#!/bin/sh
number=$(ls "$FAKE_SLURM" | grep -c '^srun_')
printf '%s\\n' "$@" > "$FAKE_SLURM/srun_$number"
for word; do
  case $word in *failure_file*)
    failure=${word##*failure_file?: ?}
    failure=${failure%%.failed*}.failed ;;
  esac
done
fail() {
  printf '{"task": "%s", "exit_code": %s, "told": %s}' \
    "$1" "$2" "${3:-false}" > "$failure"
}
. "$FAKE_SLURM/plan_$number"
"""
SCONTROL = """#!/bin/sh
case "$1 $2" in
  "show hostnames") printf 'node01\\nnode02\\n' ;;
  "--oneliner show") cat "$FAKE_SLURM/state" ;;
  requeue*) echo "$2" >> "$FAKE_SLURM/requeued" ;;
esac
"""
SCANCEL = """#!/bin/sh
echo "$@" >> "$FAKE_SLURM/cancelled"
touch "$FAKE_SLURM/terminated"
"""
# A step whose tasks end once they are told to.
UNTIL_TOLD = """
touch "$FAKE_SLURM/running"
while [ ! -e "$FAKE_SLURM/terminated" ]; do sleep 0.05; done
fail group_1_worker_0 75 true
exit 75
"""


@pytest.fixture
def fake(tmp_path, monkeypatch, caplog):
    """A directory of plans, with Slurm's commands on PATH that follow them."""
    directory = tmp_path / "slurm"
    directory.mkdir()
    for name, text in (
        ("srun", SRUN),
        ("scontrol", SCONTROL),
        ("scancel", SCANCEL),
    ):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (directory / "state").write_text("JobState=RUNNING")
    monkeypatch.setenv("FAKE_SLURM", str(directory))
    caplog.set_level("INFO", "absl")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name, value in (
        ("SLURM_ARRAY_JOB_ID", "40"),
        ("SLURM_ARRAY_TASK_ID", "1"),
        ("SLURM_JOB_NODELIST", "node[01-02]"),
        ("SLURM_RESTART_COUNT", "2"),
    ):
        monkeypatch.setenv(name, value)
    return directory


def _group(fake, *plans, **changes):
    for number, plan in enumerate(plans):
        (fake / f"plan_{number}").write_text(plan)
    fields = {
        "num_groups": 2,
        "workers_per_group": 3,
        "workdir": str(fake.parent / "run"),
        **changes,
    }
    made = job.Job(**fields)
    return group.SlurmGroup(made, ["python", "train.py", "a b"])


def _starts(fake):
    return len(list(fake.glob("srun_*")))


def _told(group, fake, number=signal.SIGUSR1):
    """Runs a group that is told to end once its step runs."""

    def tell():
        waits.until((fake / "running").exists)
        group.tell_to_end(number)
        if number == signal.SIGTERM:
            (fake / "terminated").touch()  # Slurm tells the tasks itself.

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        return group.run()
    finally:
        teller.join()


def test_a_step_has_all_tasks_and_what_they_must_know(fake, caplog):
    group = _group(
        fake,
        "exit 0",
        ps_per_group=2,
        cpus_per_worker=4,
        srun=["--container-image=image"],
        python="python3",
    )
    assert group.run() == 0
    words = (fake / "srun_0").read_text().splitlines()
    assert "--ntasks=6" in words  # With the chief.
    assert "--cpus-per-task=4" in words
    assert "--kill-on-bad-exit=1" in words
    assert not [word for word in words if word.startswith("--gpus-")]
    first = words.index("python3")
    assert words.index("--container-image=image") < first
    assert words[first + 1 : first + 3] == ["-m", "tfdistill.slurm.task"]
    told = json.loads(words[first + 3])
    assert told["nodes"] == ["node01", "node02"]
    assert told["step"]["ps_per_group"] == 2
    assert words[first + 4 :] == ["python", "train.py", "a b"]
    assert "group 1: done" in caplog.text


def test_a_failure_is_tried_again_on_the_same_nodes(fake, caplog):
    # The others of a step are ended in consequence: their codes are higher.
    plans = ["fail group_1_worker_2 1; exit 143", "exit 137", "exit 0"]
    assert _group(fake, *plans).run() == 0
    assert _starts(fake) == 3
    said = caplog.text
    assert "group_1_worker_2 ended with 1; restart 1 of 3 in 0.5 s" in said
    assert "a task ended with 137; restart 2 of 3" in said
    assert not list((fake.parent / "run" / "logs" / "ready").iterdir())
    assert not (fake / "requeued").exists()


def test_what_a_retry_cannot_mend_is_not_tried_again(fake, caplog):
    plan = "fail group_1_worker_0 65; exit 143"
    assert _group(fake, plan).run() == 65
    assert _starts(fake) == 1
    assert "exit code 65 means wrong" in caplog.text


def test_near_the_time_limit_the_tasks_end_and_the_job_is_requeued(
    fake, caplog
):
    assert _told(_group(fake, UNTIL_TOLD), fake) == 75
    assert (fake / "cancelled").read_text() == "--signal=TERM 40_1\n"
    # Not "40": that would be all groups.
    assert (fake / "requeued").read_text() == "40_1\n"
    assert _starts(fake) == 1
    said = caplog.text
    assert "group 1: SIGUSR1: the tasks must end" in said
    assert "group 1: requeued" in said


def test_a_job_that_is_preempted_or_lost_a_node_is_requeued_at_once(
    fake, caplog
):
    # The first task to report was told to end, and not by this group.
    assert _group(fake, "fail group_1_worker_1 75 true; exit 75").run() == 75
    assert (fake / "requeued").read_text() == "40_1\n"
    assert _starts(fake) == 1
    assert "preempted, or a node was lost" in caplog.text


@pytest.mark.parametrize("state", ["CANCELLED", "PENDING"])
def test_a_job_that_slurm_ends_is_left_to_slurm(fake, caplog, state):
    (fake / "state").write_text(f"JobState={state}")
    assert _told(_group(fake, UNTIL_TOLD), fake, signal.SIGTERM) == 75
    assert not (fake / "requeued").exists()
    assert not (fake / "cancelled").exists()
    assert f"the job is {state}" in caplog.text


def test_requeues_come_to_an_end_and_may_fail(fake, caplog):
    assert _told(_group(fake, UNTIL_TOLD, max_requeues=2), fake) == 75
    said = caplog.text
    assert "its 2 requeues (--max-requeues) are used up" in said
    assert "Submit the script again" in said
    assert not (fake / "requeued").exists()

    scontrol = fake.parent / "bin" / "scontrol"
    broken = SCONTROL.replace("requeue*)", "requeue*) echo no >&2; exit 1;")
    scontrol.write_text(broken)
    (fake / "plan_1").write_text(UNTIL_TOLD)
    caplog.clear()
    assert _told(_group(fake), fake) == 75
    said = caplog.text
    assert "`scontrol requeue 40_1` must succeed" in said
    assert "Submit the script again" in said


def test_a_step_that_does_not_end_is_ended_by_force(fake):
    deaf = """
touch "$FAKE_SLURM/running"
trap 'kill $!; exit 137' TERM
sleep 600 & wait
"""
    group = _group(fake, deaf)
    object.__setattr__(group._options, "stop_secs", 1)  # No test has the time.
    assert _told(group, fake) == 75
    assert (fake / "requeued").exists()


def test_outside_a_job_it_is_refused(fake, monkeypatch, caplog):
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    assert group.main([json.dumps({"workdir": str(fake)}), "true"]) == 2
    assert "SLURM_ARRAY_TASK_ID must be set" in caplog.text
