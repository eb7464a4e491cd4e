"""A Slurm of its own for a test: one controller and two nodes, all here.

It shares nothing with a Slurm that the machine may have: key, ports, sockets,
state and configuration are the test's, in a directory of their own.
"""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from collections.abc import Iterator

from tests.cases import free_ports
from tests.cases import waits

PROGRAMS = ("munged", "sbatch", "scontrol", "slurmctld", "slurmd", "srun")
# Debian keeps the daemons where only root's PATH leads.
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_END_SECS = 20.0
_CONFIGURATION = """\
ClusterName=tfdistill
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# The second is how long a job waits that is requeued; 120 s by default.
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
# More cores than there are, and nobody is hurried on a busy machine.
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
MessageTimeout=60
UnkillableStepTimeout=120
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
    "CPUs=16 SocketsPerBoard=1 CoresPerSocket=16"
)
# Devices that compute nothing, to see which task gets which.
_DEVICES = [pathlib.Path(f"/dev/tty{number}") for number in range(4)]
_PARTITION = "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE\n"


def missing() -> str | None:
    """Why there can be no Slurm here, or None."""
    absent = [p for p in PROGRAMS if shutil.which(p, path=_PATH) is None]
    if absent:
        return (
            f"needs {', '.join(absent)}: apt-get install slurm-wlm munge "
            "(as root)"
        )
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


def has_gpus() -> bool:
    """Whether each node can pretend to have four GPUs."""
    return all(path.is_char_device() for path in _DEVICES)


def node_names() -> list[str]:
    """Names that all mean this machine, so that tasks find each other.

    The first is the machine's own: Slurm takes a second node on a machine only
    in this order.
    """
    host = _host()
    try:
        is_here = socket.gethostbyname(host).startswith("127.")
    except OSError:
        is_here = False
    others = [host] if is_here and host != "localhost" else []
    return [*others, "localhost"]


def _host() -> str:
    return socket.gethostname().partition(".")[0]


class Slurm:
    """Commands for a Slurm that runs."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.env = {
            **os.environ,
            "PATH": _PATH,
            "SLURM_CONF": str(directory / "slurm.conf"),
        }

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, name: str) -> dict[str, str]:
        """What Slurm knows of a job, such as `40_1`."""
        text = self.run("scontrol", "--oneliner", "show", "job", name)
        pairs = (word.partition("=") for word in text.split())
        return {key: value for key, _, value in pairs}

    def wait(self, name: str, *states: str) -> None:
        waits.until(
            lambda: self.job(name)["JobState"] in states, name, pause_secs=0.2
        )


@contextlib.contextmanager
def running() -> Iterator[Slurm]:
    """Runs a Slurm; whatever happens, none of its processes is left."""
    # A socket's path has at most 107 characters, and munged wants its
    # directory to be open to all.
    directory = pathlib.Path(tempfile.mkdtemp(prefix="slurm-"))
    directory.chmod(0o755)
    slurm = Slurm(directory)
    try:
        names = node_names()
        _configure(directory, names)
        with contextlib.ExitStack() as stack:
            processes = []
            for command in _daemons(directory, names):
                processes.append(stack.enter_context(_daemon(slurm, command)))
                # Slurm's daemons need munge's.
                _until((directory / "munge.socket").exists, slurm, processes)
            _until(lambda: _idle(slurm) == len(names), slurm, processes)
            stack.callback(_cancel_all, slurm)
            yield slurm
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _configure(directory: pathlib.Path, names: list[str]) -> None:
    port, *node_ports = free_ports.find(1 + len(names))
    text = _CONFIGURATION.format(host=_host(), port=port, directory=directory)
    for name, node_port in zip(names, node_ports, strict=True):
        text += _NODE.format(name=name, host=_host(), port=node_port)
        text += f" Gres=gpu:{len(_DEVICES)}\n" if has_gpus() else "\n"
        (directory / f"spool-{name}").mkdir()
    if has_gpus():
        text = f"GresTypes=gpu\n{text}"
        gpus = "Name=gpu File=/dev/tty[0-3]\n"
        (directory / "gres.conf").write_text(gpus)
    (directory / "slurm.conf").write_text(text + _PARTITION)
    (directory / "state").mkdir()
    key = directory / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))


def _daemons(directory: pathlib.Path, names: list[str]) -> list[list[str]]:
    configuration = f"{directory}/slurm.conf"
    return [
        [
            *["munged", "--foreground", "--force"],
            f"--socket={directory}/munge.socket",
            f"--key-file={directory}/munge.key",
            f"--pid-file={directory}/munged.pid",
            f"--seed-file={directory}/munged.seed",
            f"--log-file={directory}/munged.log",
        ],
        ["slurmctld", "-D", "-f", configuration],
        *(["slurmd", "-D", "-N", name, "-f", configuration] for name in names),
    ]


@contextlib.contextmanager
def _daemon(
    slurm: Slurm, command: list[str]
) -> Iterator[subprocess.Popen[bytes]]:
    with open(slurm.directory / "daemons.log", "ab") as log:
        process = subprocess.Popen(
            command, env=slurm.env, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_SECS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _idle(slurm: Slurm) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--states=idle"],
        env=slurm.env,
        capture_output=True,
        text=True,
    )
    return len(done.stdout.splitlines()) if done.returncode == 0 else 0


def _until(
    condition: Callable[[], bool],
    slurm: Slurm,
    daemons: list[subprocess.Popen[bytes]],
) -> None:
    def holds() -> bool:
        if any(daemon.poll() is not None for daemon in daemons):
            log = (slurm.directory / "daemons.log").read_text()
            raise RuntimeError(f"Slurm does not start:\n{log[-4000:]}")
        return condition()

    waits.until(holds, "Slurm's start", pause_secs=0.1)


def _cancel_all(slurm: Slurm) -> None:
    """Ends all jobs, and waits, as a node's daemon does not on its end."""
    slurm.run("scancel", "--user=root")
    waits.until(
        lambda: not slurm.run("squeue", "--noheader").strip(),
        "the end of all jobs",
        pause_secs=0.2,
    )
