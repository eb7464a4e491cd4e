"""Tests of the doctor as real processes, and with a recipe."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from launch import doctor
from tests.cases import free_ports
from tfdistill.doctor import check

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_LIMIT_SECS = 90.0


def _start(workdir, addresses, index):
    config = {
        "cluster": {"worker": addresses},
        "task": {"type": "worker", "index": index},
    }
    environ = os.environ | {
        "PYTHONPATH": str(_ROOT),
        "TFDISTILL_WORKDIR": str(workdir),
        "TF_CONFIG": json.dumps(config),
    }
    command = [sys.executable, "-m", "launch.doctor", "--no_tensorflow"]
    return subprocess.Popen(
        [*command, "--json", "--wait_secs=40"],
        env=environ,
        stdout=subprocess.PIPE,
        cwd=_ROOT,
    )


def _results(processes):
    found = []
    for process in processes:
        out, _ = process.communicate(timeout=_LIMIT_SECS)
        results = json.loads(out)["results"]
        reach = [r for r in results if r["name"] == "reach"]
        found.append((process.returncode, reach))
    return found


@pytest.mark.multiprocess
@pytest.mark.usefixtures("no_process_left")
def test_two_tasks_find_each_other(tmp_path):
    one, two = free_ports.addresses(2)
    right = [_start(tmp_path, [one, two], index) for index in (0, 1)]
    for code, (reach,) in _results(right):
        assert code == 0
        assert reach["status"] == check.OK


def _data(capsys, *overrides):
    code = doctor.main(
        [
            "--json",
            "--recipe=digits",
            "--limit_secs=200",
            *(f"--override={override}" for override in overrides),
        ]
    )
    results = json.loads(capsys.readouterr().out)["results"]
    return code, [r for r in results if r["name"] in ("data", "teachers")]


def test_the_data_of_a_recipe_are_read(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TFDISTILL_WORKDIR", str(tmp_path))
    code, (train, validation, teachers) = _data(capsys)
    assert code == 0
    assert "inputs (64, 8, 8), labels (64,)" in train["seen"]
    assert validation["status"] == check.OK
    assert teachers["status"] == check.SKIPPED
