"""Runs one group inside its Slurm job: its steps, restarts and requeues.

python -m tfdistill.slurm.group JSON COMMAND [ARGUMENT ...]

Slurm's batch script becomes this process. It starts the group's tasks by srun;
starts them again in the same allocation if they fail and a retry can help; and,
when the time limit is near or the job is preempted, has them end and puts the
job back into the queue, to resume from the last backup.
"""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Sequence
from typing import Any

from absl import logging

from tfdistill.cluster import signs
from tfdistill.launcher import fields
from tfdistill.launcher import restarts
from tfdistill.slurm import commands
from tfdistill.slurm import job
from tfdistill.status import run_events
from tfdistill.system import programs

_POLL_SECS = 0.2
# Between two attempts to reach the tasks of a step that may just be starting.
_AGAIN_SECS = 2.0
# After SIGTERM srun ends its step by force; this is for one that does not.
_FORCE_SECS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Failure:
    """How a step failed, as the first of its tasks to fail has recorded it."""

    exit_code: int
    task: str = "a task"
    told: bool = False
    port_taken: bool = False

    def __str__(self) -> str:
        return f"{self.task} ended with {self.exit_code}"


class SlurmGroup:
    """One group in its job; `run` runs it to the job's end."""

    def __init__(self, options: job.Job, command: Sequence[str]) -> None:
        """Reads which job this is, and on which nodes.

        A ValueError if this job isn't part of an array; a RuntimeError if Slurm
        does not answer.
        """
        self._options = options
        # Tasks look for the command themselves, on their own nodes.
        self._command = list(command)
        self._group = job.number_of(os.environ, "SLURM_ARRAY_TASK_ID")
        array = job.number_of(os.environ, "SLURM_ARRAY_JOB_ID")
        self._job = f"{array}_{self._group}"
        self._num_requeues = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        node_list = job.text_of(os.environ, "SLURM_JOB_NODELIST")
        self._nodes = commands.hostnames(node_list)
        self._ready_dir = options.logs_dir / "ready"
        self._ready_dir.mkdir(parents=True, exist_ok=True)
        path = run_events.group_path(options.logs_dir, self._group)
        self._events = run_events.EventLog(path)
        self._told: str | None = None
        self._restarts = restarts.Restarts(limit=options.max_restarts)

    def tell_to_end(
        self, number: int, frame: types.FrameType | None = None
    ) -> None:
        """Notes, as a signal's handler, that the job must end soon."""
        self._told = signal.Signals(number).name

    def run(self) -> int:
        """Runs the group to the end of the job; returns the job's exit code."""
        while failure := self._run_step():
            if self._told or not self._waits_for_restart(failure):
                break
            self._restarts.note_start()
        if failure is None:
            self._say("done")
            self._note("done")
            return 0
        if not self._told:
            return failure.exit_code
        self._requeue()
        return signs.EXIT_RETRY

    def _run_step(self) -> _Failure | None:
        """Starts all tasks; returns the first failure, once all have ended."""
        name = f"{self._group}.{uuid.uuid4().hex}.failed"
        failure_file = self._ready_dir / name
        self._note("start")
        code = self._wait(subprocess.Popen(self._srun(failure_file)))
        try:
            failure = _Failure(**json.loads(failure_file.read_text("utf-8")))
        except (OSError, ValueError):  # None, or of a node that was lost, say.
            return _Failure(exit_code=code) if code else None
        failure_file.unlink(missing_ok=True)
        if failure.told and self._told is None:
            # If the job must make way for another, its tasks get some
            # seconds, and this process gets no notice before they are over.
            # If a node is lost, its tasks report nothing, and the others
            # are ended in consequence.
            self._say(
                "the tasks were stopped: the job was preempted, or a node was "
                "lost"
            )
            self._told = "SIGTERM"
        return failure

    def _srun(self, failure_file: pathlib.Path) -> list[str]:
        options = self._options
        gpus = options.gpus_per_worker
        told = {
            "step": fields.chosen(job.Step, options),
            "nodes": self._nodes,
            "failure_file": str(failure_file),
        }
        return [
            "srun",
            f"--ntasks={options.num_tasks}",
            # Not inherited from sbatch since Slurm 22.05.
            f"--cpus-per-task={options.cpus_per_worker}",
            *([f"--gpus-per-task={gpus}"] if gpus else []),
            # So that each task has CUDA_VISIBLE_DEVICES for its own.
            *([f"--gpu-bind=per_task:{gpus}"] if gpus else []),
            # Ranks that follow each other node by node, as task and port need.
            "--distribution=block",
            "--export=ALL",
            "--mpi=none",
            # The loss of one task ends the others at once; the end of one that
            # is done does not.
            "--kill-on-bad-exit=1",
            "--wait=0",
            *options.srun,
            options.python,
            "-m",
            "tfdistill.slurm.task",
            json.dumps(told),
            *self._command,
        ]

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        told: float | None = None
        next_try: float | None = 0.0
        while True:
            try:
                return process.wait(_POLL_SECS)
            except subprocess.TimeoutExpired:
                now = time.monotonic()
            if self._told is None:
                continue
            if told is None:
                self._say(f"{self._told}: the tasks must end")
                told = now
            waited = now - told - self._options.stop_secs / 2
            if waited > _FORCE_SECS:
                process.kill()
            elif waited > 0:
                process.terminate()
            elif self._told == "SIGTERM":
                continue  # Slurm ends the job and signals the tasks itself.
            elif next_try is not None and now >= next_try:
                next_try = None if self._terminate() else now + _AGAIN_SECS

    def _terminate(self) -> bool:
        try:  # Its tasks, and not this process.
            commands.ask("scancel", "--signal=TERM", self._job)
        except RuntimeError as error:
            self._say(str(error))
            return False
        return True

    def _waits_for_restart(self, failure: _Failure) -> bool:
        """Decides about another start; returns once it is due."""
        code, reason = failure.exit_code, str(failure)
        delay, text = self._restarts.plan_after(
            code, port_taken=failure.port_taken
        )
        self._say(f"{reason}; {text or 'not started again (--max-restarts=0)'}")
        self._note("failed", exit_code=code, reason=reason)
        if delay is None:
            return False
        self._note("restart", delay_secs=delay, restart=self._restarts.made)
        while not self._restarts.is_due:
            if self._told:
                return False
            time.sleep(_POLL_SECS)
        return True

    def _requeue(self) -> None:
        """Puts the job back into the queue, unless Slurm ends it anyway."""
        self._note("stopped", reason=f"the job was stopped: {self._told}")
        again = "Submit the script again: the group resumes from its backup."
        if self._num_requeues >= self._options.max_requeues:
            limit = self._options.max_requeues
            self._say(
                f"its {limit} requeues (--max-requeues) are used up. {again}"
            )
            return
        try:
            state = commands.job_state(self._job)
            if state != "RUNNING":
                # Cancelled, or requeued by Slurm itself.
                self._say(f"the job is {state}, so it is left to Slurm")
                return
            self._say("requeued; it will resume from its last backup")
            commands.ask("scontrol", "requeue", self._job)
        except RuntimeError as error:
            self._say(f"not requeued: {error} {again}")

    def _note(self, event: str, **details: Any) -> None:
        attempt = self._restarts.num_starts
        self._events.add(event, group=self._group, attempt=attempt, **details)

    def _say(self, text: str) -> None:
        logging.info("group %d: %s", self._group, text)


def main(argv: Sequence[str]) -> int:
    """Runs one group inside its Slurm job; returns the job's exit code.

    The first argument has, as JSON, the options of `job.Job`; the others are
    the command.
    """
    try:
        group = SlurmGroup(job.Job(**json.loads(argv[0])), argv[1:])
    except ValueError as error:
        logging.error("%s", error)
        return programs.EXIT_OPTIONS
    except RuntimeError as error:
        logging.error("%s", error)
        return signs.EXIT_RETRY
    for number in (getattr(signal, f"SIG{job.SIGNAL}"), signal.SIGTERM):
        signal.signal(number, group.tell_to_end)
    return group.run()


if __name__ == "__main__":
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    sys.exit(main(sys.argv[1:]))
