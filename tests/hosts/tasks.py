"""Tasks of a group, each on a host of its own, as by hand: by TF_CONFIG."""

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from collections.abc import Sequence
from types import ModuleType

from tests.cases import waits
from tests.hosts import network

_PORT = 5000


@dataclasses.dataclass
class Task:
    """A task that runs on a host."""

    name: str
    process: subprocess.Popen[bytes]
    log: pathlib.Path

    def wait(self) -> int:
        """Returns how it has ended."""
        waits.until(lambda: self.process.poll() is not None, self.name)
        return self.process.returncode

    def check(self) -> None:
        """Fails unless it ends well."""
        code = self.wait()
        assert code == 0, f"{self.name}: {code}\n{self.log.read_text()[-6000:]}"


def start(
    program: pathlib.Path | ModuleType,
    places: Mapping[str, Sequence[tuple[network.Host, str]]],
    workdir: pathlib.Path,
    *arguments: object,
    group: int = 0,
    num_groups: int = 1,
    **environ: str,
) -> list[Task]:
    """Starts a program on all hosts of a group.

    Args:
        program: A module, or the file of an ordinary script, in whose directory
            all tasks then run.
        places: For each type of task the hosts, with the names or addresses by
            which the group's other tasks find them.
        workdir: Where the run's files go.
        *arguments: The program's.
        group: The group's index. Default 0.
        num_groups: Groups of the run. Default 1.
        **environ: More of the environment.
    """
    cluster = {
        kind: [f"{address}:{_PORT + 10 * group + place}" for _, address in own]
        for place, (kind, own) in enumerate(places.items())
    }
    words: list[object] = [getattr(program, "__name__", "tfdistill")]
    cwd = workdir
    if isinstance(program, pathlib.Path):
        words.append(program)
        cwd = program.parent
    logs = workdir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    tasks = []
    for kind, own in places.items():
        for index, (host, _) in enumerate(own):
            task = {"type": kind, "index": index}
            config = {"cluster": cluster, "task": task}
            name = f"group_{group}_{kind}_{index}"
            log = logs / f"{name}.log"
            has_config = sum(map(len, cluster.values())) > 1
            process = host.start(
                [sys.executable, "-m", *map(str, [*words, *arguments])],
                environ={
                    "TF_CONFIG": json.dumps(config) if has_config else "",
                    "TFDISTILL_GROUP": str(group),
                    "TFDISTILL_NUM_GROUPS": str(num_groups),
                    "TFDISTILL_WORKDIR": str(workdir),
                    **environ,
                },
                log=log,
                cwd=cwd,
            )
            tasks.append(Task(name, process, log))
    return tasks
