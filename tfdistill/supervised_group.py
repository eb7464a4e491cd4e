"""One group from its first start to its last: restarts it as a whole.

Under synchronous training one lost worker ends all the others' collectives,
and a group with parameter servers does not outlive its chief or a ps. So what
is left of a failed group is killed, and all of it is started again, at other
ports and after a delay; the program goes on from its own backup.
"""

import dataclasses
import functools
import socket
import time
from collections.abc import Mapping

from tfdistill import group_restarts
from tfdistill import group_result
from tfdistill import group_run
from tfdistill import group_status
from tfdistill import local_cluster
from tfdistill import run_events
from tfdistill import run_files
from tfdistill import task_process


class SupervisedGroup:
    """Runs a group, again and again if it may."""

    def __init__(
        self,
        group: int,
        *,
        topology: local_cluster.LocalCluster,
        events: run_events.EventLog,
    ) -> None:
        """Reserves the ports of the group; `start` starts it.

        Args:
            group: Index of the group.
            topology: What it is a part of.
            events: Where to note what happens.
        """
        self._group = group
        self._topology = topology
        self._events = events
        self._holders: list[socket.socket] = []
        self._restarts = group_restarts.GroupRestarts(
            limit=topology.max_restarts, now=time.monotonic()
        )
        # Whether a failed attempt is being ended, or was, to be followed by
        # another; and why there will be none, once it was decided so.
        self._awaits_restart = False
        self._last_error = ""
        self._stop_reason: str | None = None
        self._judged = False
        self._run = self._make_run()

    def _make_run(self) -> group_run.GroupRun:
        # The new ports before the old are let go, so that they differ.
        holders = local_cluster.reserve_ports(self._topology.ports_per_group)
        self.close()
        self._holders = holders
        ports = [holder.getsockname()[1] for holder in holders]
        tasks = self._topology.group_tasks(self._group, ports)
        if self.num_starts > 1:
            for task in tasks:
                run_files.mark_restart(task.log_path, self.num_starts)
        return group_run.GroupRun(
            tasks,
            topology=self._topology,
            note=functools.partial(
                self._events.add,
                group=self._group,
                attempt=self._restarts.num_starts,
            ),
        )

    def start(self) -> None:
        """Starts a process for each task."""
        self._run.start()

    @property
    def num_starts(self) -> int:
        """How often the group has been started."""
        return self._restarts.num_starts

    @property
    def status(self) -> group_status.GroupStatus:
        """What is shown of the group."""
        status = self._run.status
        status.num_restarts = self._restarts.made
        if self._run.exit_code:
            status.last_error = self._run.reason
        status.last_error = status.last_error or self._last_error
        if self._awaits_restart:
            stopped = self._stop_reason is not None
            status.state = "stopped" if stopped else "restarting"
        return status

    @property
    def processes(self) -> Mapping[str, task_process.TaskProcess]:
        """The processes of the present attempt, by name of the task."""
        return self._run.processes

    @property
    def over(self) -> bool:
        """Whether no process of the group is left, and none will come."""
        waits = self._awaits_restart and self._stop_reason is None
        return self._run.over and not waits

    @property
    def exit_code(self) -> int:
        """What the group makes the launcher's exit code; 0 if it may go on."""
        return self._run.exit_code if self._judged else 0

    @property
    def failure_time(self) -> float | None:
        """When it failed in the end, by `time.monotonic()`; None if not."""
        return self._run.failure_time if self._judged else None

    def advance(self) -> list[str]:
        """Takes in the news and acts on it; returns what to tell the user."""
        messages = self._run.advance()
        now = time.monotonic()
        if self._run.exit_code and not self._awaits_restart:
            messages += self._decide(now)
        if (
            self._awaits_restart
            and self._stop_reason is None
            and self._run.over
            and self._restarts.is_due(now=now)
        ):
            self._start_again(now)
        return messages

    def _decide(self, now: float) -> list[str]:
        """Decides, once for each failure, whether the group comes back."""
        if self._judged:
            return []
        delay, text = self._restarts.plan(
            self._run.exit_code, port_taken=self._run.port_taken, now=now
        )
        if delay is None:
            self._judged = True
        else:
            self._awaits_restart = True
            self._events.add(
                "restart",
                group=self._group,
                attempt=self.num_starts,
                delay_secs=delay,
                restart=self._restarts.made,
            )
            # Its tasks could only wait for each other.
            self._run.hang_up()
        return [f"group {self._group}: {text}"] if text else []

    def _start_again(self, now: float) -> None:
        self._awaits_restart = False
        self._last_error = self._run.reason
        self._restarts.note_start(now=now)
        self._run = self._make_run()
        self._run.start()

    def stop(self, reason: str) -> None:
        """Asks all tasks to end, and kills them after the grace time.

        Args:
            reason: What the result will say.
        """
        if self._awaits_restart and self._stop_reason is None:
            self._stop_reason = reason
            self._events.add("stopped", group=self._group, reason=reason)
        self._run.stop(reason)

    def kill(self) -> None:
        """Kills all tasks at once; returns when they are gone."""
        if self._awaits_restart and self._stop_reason is None:
            self._stop_reason = "killed"
        self._run.kill()

    def result(self) -> group_result.GroupResult:
        """Returns how the group ended."""
        result = self._run.result()
        result = dataclasses.replace(result, group_restarts=self._restarts.made)
        if not self._awaits_restart:
            return result
        reason = self._stop_reason
        return dataclasses.replace(
            result,
            state="restarting" if reason is None else "stopped",
            reason=result.reason if reason is None else reason,
            failed_task=None,
            last_lines=(),
        )

    def close(self) -> None:
        """Frees the ports of the present attempt."""
        for holder in self._holders:
            holder.close()
        self._holders = []
