"""Tests of the batch script that runs groups of tasks on Slurm."""

import json
import shutil
import subprocess
import sys

import pytest

from tfdistill.slurm import job


def _script(tmp_path, **fields):
    given = {
        "command": ["python", "train.py"],
        "python": "python",
        "chdir": str(tmp_path),
        "workdir": str(tmp_path / "run"),
    }
    return job.Script(**given | fields)


def _directives(text):
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    options = [line.removeprefix("#SBATCH --") for line in lines]
    return {
        name: value for name, _, value in (o.partition("=") for o in options)
    }


def test_a_group_is_an_element_of_the_array(tmp_path):
    script = _script(
        tmp_path,
        num_groups=3,
        workers_per_group=4,
        cpus_per_worker=3,
        time="12:00:00",
        sbatch=["--account=lab", "--exclusive"],
    )
    assert _directives(script.text) == {
        "job-name": "tfdistill",
        "array": "0-2",
        "ntasks": "4",
        "cpus-per-task": "3",
        "time": "12:00:00",
        "account": "lab",
        "chdir": str(tmp_path),
        "output": f"{tmp_path}/run/logs/slurm_group_%a.log",
        "open-mode": "append",
        "signal": "B:USR1@120",
        "requeue": "",
        "exclusive": "",
    }


@pytest.mark.multiprocess
@pytest.mark.usefixtures("no_process_left")
def test_whatever_stands_in_a_command_arrives_as_it_is(tmp_path):
    words = ["a b", "$HOME", "`id`", "it's", '"', "*", "", "line\nbreak", "ä"]
    show = tmp_path / "my python"
    show.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps([os.environ['PREPARED'], *sys.argv[1:]]))\n"
    )
    show.chmod(0o755)
    workdir = tmp_path / "100% of it"
    script = _script(
        tmp_path,
        workdir=str(workdir),
        command=words,
        python=str(show),
        setup="export PREPARED='a b'\ntrue",
        srun=["--container-image=an image"],
    )
    logs = str(workdir / "logs").replace("%", "%%")
    found = _directives(script.text)["output"]
    assert found == f'"{logs}/slurm_group_%a.log"'
    path = tmp_path / "script.sh"
    path.write_text(script.text)
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", path], check=True)
    printed = subprocess.run(
        ["bash", path], check=True, capture_output=True, text=True
    ).stdout
    prepared, *argv = json.loads(printed)
    assert prepared == "a b"
    assert argv[:2] == ["-m", "tfdistill.slurm.group"]
    told = json.loads(argv[2])
    assert told["workdir"] == str(workdir)
    assert told["srun"] == ["--container-image=an image"]
    assert argv[3:] == words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop_secs": 5}, "`stop_secs` must be >= 10"),
        ({"job_name": "a\n#SBATCH --x"}, "no quotes, backslashes or line"),
    ],
)
def test_wrong_fields_are_refused(tmp_path, fields, words):
    with pytest.raises(ValueError, match=words):
        _ = _script(tmp_path, **fields).text
