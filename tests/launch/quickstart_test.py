"""Tests of the quickstart: a real one on few rows, and its refusals."""

import json
import os
import pathlib
import subprocess

import pytest

from benchmarks import readme_plot
from launch import quickstart

ROOT = pathlib.Path(quickstart.__file__).parent.parent
TINY = (
    "--override=rows_per_day=1000",
    "--override=num_steps=40",
    "--override=evaluate_every_steps=20",
    "--override=burn_in_steps=5",
    "--override=every_steps=10",
)


@pytest.mark.parametrize(
    "option, words",
    [
        ("--override=num_step=3", "Did you mean num_steps"),
        ("--trials=1", "`trials` must be >= 2; received 1"),
    ],
)
def test_wrong_options_start_nothing(tmp_path, refused, option, words):
    workdir = f"--workdir={tmp_path / 'runs'}"
    assert words in refused(quickstart.main, workdir, option)
    assert not (tmp_path / "runs").exists()


@pytest.mark.multiprocess
@pytest.mark.slow("it retrains by three methods")
def test_retrains_end_with_their_churn(tmp_path, no_process_left, capsys):
    (tmp_path / "runs" / "007").mkdir(parents=True)
    arguments = [f"--workdir={tmp_path / 'runs'}", "--trials=2", *TINY]
    assert quickstart.main(arguments) == 0
    directory = tmp_path / "runs" / "008"
    printed = capsys.readouterr().out
    report = json.loads((directory / "report.json").read_text())
    for method, name in quickstart.METHODS.items():
        figures = report["methods"][method]
        assert figures["num_trials"] == 2
        churn = figures["churn"]["churn"]["mean"]
        assert 0 < churn < 0.5
        (line,) = (x for x in printed.splitlines() if f"  {name} " in x)
        assert f"{churn:.4f}" in line
        assert f"{figures['figures']['log_loss']['mean']:.4f}" in line
    codistilled = report["methods"]["codistill_shared"]["figures"]
    assert codistilled["versions_read"]["mean"] >= 1
    picture = tmp_path / "plot.svg"
    found = readme_plot.collect(report)
    readme_plot.draw(found, picture)
    assert "codistilled, two groups" in picture.read_text()
    assert f"{found['truth']:.4f}" in printed


def test_the_readme_s_figures_are_printed_and_no_file_is_written(
    capsys, monkeypatch, tmp_path
):
    record = ROOT / "docs/results/quickstart/figures.json"
    monkeypatch.chdir(tmp_path)
    assert readme_plot.main([f"--figures={record}"]) == 0
    said = capsys.readouterr().out
    assert "0.0162 (-19%, 95% interval -26% to -7%), log loss 0.4591" in said
    assert list(tmp_path.iterdir()) == []


def test_the_script_installs_first_and_passes_options_on(tmp_path):
    root = tmp_path / "checkout"
    (root / "launch").mkdir(parents=True)
    script = root / "launch" / "quickstart.sh"
    script.write_bytes((ROOT / "launch" / "quickstart.sh").read_bytes())
    log = tmp_path / "log"
    (root / "launch" / "install.sh").write_text(f'echo "install $*" >> {log}\n')
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$PYTHONPATH $*" >> {log}\nexit 7\n')
    python.chmod(0o755)
    environ = {"PATH": os.environ["PATH"]}
    found = subprocess.run(
        ["bash", str(script), "--override=weight=a b"],
        cwd=tmp_path,
        env=environ,
    )
    assert found.returncode == 7
    assert log.read_text().splitlines() == [
        "install library",
        f"{root} -m launch.quickstart --override=weight=a b",
    ]
    (root / "launch" / "install.sh").write_text("exit 3\n")
    found = subprocess.run(["bash", str(script)], cwd=tmp_path, env=environ)
    assert found.returncode == 3
    assert len(log.read_text().splitlines()) == 2
