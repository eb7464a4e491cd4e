"""Tasks that are no trainers, for tests of what launches and watches them.

None imports TensorFlow, but they speak with the launcher as trainers do.
"""

import pathlib
import sys

import psutil

from tests.cases import waits
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run
from tfdistill.status import tables

# What the code of a task may use. `train` counts its steps in a file, so that a
# task that is started again resumes as from a backup.
PRELUDE = f"""
import ctypes, json, logging, os, pathlib, signal, socket, subprocess, sys
import time, warnings
sys.path.insert(0, {str(pathlib.Path(__file__).resolve().parents[2])!r})
from tfdistill.cluster import signs
GROUP = int(os.environ["TFDISTILL_GROUP"])
CONFIG = json.loads(os.environ.get("TF_CONFIG", "{{}}"))
TYPE = CONFIG.get("task", {{}}).get("type", "worker")
INDEX = CONFIG.get("task", {{}}).get("index", 0)
NAME = f"group_{{GROUP}}_{{TYPE}}_{{INDEX}}"
WORKDIR = pathlib.Path(os.environ["TFDISTILL_WORKDIR"])
def connect():
    signs.announce(signs.STARTING)
    signs.announce(signs.READY)
def family():
    far = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        start_new_session=True,
    )
    print("pids", os.getpid(), far.pid, flush=True)
def wait_for(name):
    while not (WORKDIR / name).exists():
        time.sleep(0.02)
def train(num_steps):
    state = WORKDIR / f"{{NAME}}.steps"
    done = int(state.read_text()) if state.exists() else 0
    for step in range(done, num_steps):
        signs.own().say(signs.STEP)
        hang = WORKDIR / f"{{NAME}}.hang"
        if hang.exists():
            hang.unlink()
            # Holds Python's lock, so that no thread of this process can run.
            ctypes.PyDLL(None).sleep(600)
        if TYPE == "chief" or not CONFIG or "chief" not in CONFIG["cluster"]:
            draft = state.with_suffix(".draft")
            draft.write_text(str(step + 1))
            draft.replace(state)
        with (WORKDIR / f"{{NAME}}.done").open("a") as file:
            print(step + 1, file=file)
        time.sleep(0.05)
"""


def command(code):
    return sys.executable, "-c", PRELUDE + code


def topology(tmp_path, code, **fields):
    fields = {"grace_secs": 3.0, "start": "spawn"} | fields
    return local_cluster.LocalCluster(
        command=command(code), workdir=str(tmp_path / "run"), **fields
    )


def shown(topology, **options):
    """A run that prints what a launcher prints."""
    return local_run.LocalRun(topology, display=tables.Lines(), **options)


def run(topology, **options):
    with shown(topology, **options) as started:
        return end(started)


def end(run):
    """Supervises a run to its end; returns its result."""
    waits.until(lambda: run.poll() or run.over, "the run", pause_secs=0.0)
    return run.wait()


def poll_until(run, condition):
    """Supervises a run, which goes on, until a condition holds."""

    def holds():
        run.poll(0.05)
        value = condition()
        assert value or not run.over, run.result()
        return value

    return waits.until(holds, pause_secs=0.0)


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
