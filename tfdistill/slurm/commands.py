"""What a job asks of Slurm, by Slurm's own commands.

All of them raise RuntimeError if Slurm refuses or does not answer.

An element of a job array is named by the array and its index, such as `40_1`.
Its own number (SLURM_JOB_ID) will not do: one element has the array's number,
and a command with that number applies to all elements.
"""

import re
import signal
import subprocess

# Slurm's controller may be restarted meanwhile; its commands wait for it.
_LIMIT_SECS = 120.0


def hostnames(node_list: str) -> list[str]:
    """Returns the nodes of a list such as `node[01-03]`, in Slurm's order."""
    return ask("scontrol", "show", "hostnames", node_list).split()


def job_state(job: str) -> str:
    """Returns the state of a job, such as `RUNNING`."""
    text = ask("scontrol", "--oneliner", "show", "job", job)
    match = re.search(r"\bJobState=([A-Z_]+)", text)
    return match[1] if match else text


def submit(path: str) -> str:
    """Submits a batch script; returns what identifies the job."""
    # On a federation the number is followed by ";" and the cluster's name.
    return ask("sbatch", "--parsable", path).strip().partition(";")[0]


def ask(*command: str) -> str:
    """Returns what a command of Slurm's prints."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECS,
            # Slurm may send SIGTERM to all of the job's processes meanwhile.
            preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        )
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise RuntimeError(
            f"{command[0]} must work; received {cause}. Run this on a host "
            "where Slurm's commands work."
        ) from cause
    if done.returncode:
        raise RuntimeError(
            f"`{' '.join(command)}` must succeed; received exit code "
            f"{done.returncode}: {done.stderr.strip()}"
        )
    return done.stdout
