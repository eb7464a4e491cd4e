"""Tests of the quickstart and of the report that it prints."""

import io
import json
import os
import pathlib
import subprocess

import numpy as np
import pytest
import rich.console

from launch import quickstart
from tests.cases import runs
from tfdistill.held_out import predictions
from tfdistill.recipes import outputs

ROOT = pathlib.Path(quickstart.__file__).parent.parent
# Groups of two workers run to their end in tests/runs/kubernetes_test.py.
TINY = (
    "--workers_per_group=1",
    "--override=num_steps=40",
    "--override=evaluate_every_steps=20",
    "--override=every_steps=10",
    "--override=burn_in_steps=5",
)


def _write_run(workdir, *, num_groups=2, accuracy=0.75):
    """Writes the files of a run, as far as a report reads them."""
    for group in range(num_groups):
        directory = workdir / f"group_{group}"
        directory.mkdir(parents=True)
        outputs.write_predictions(
            directory,
            predictions.Distributions(
                probabilities=np.eye(2)[[0, group]], labels=np.array([0, 1])
            ),
        )
        result = {
            "group": group,
            "recipe": "digits",
            "steps": 30,
            "workers": 1,
            "metrics": {"accuracy": accuracy, "log_loss": 0.5},
        }
        outputs.write_results(
            result, workdir=str(workdir), num_groups=num_groups
        )


def _text(table):
    stream = io.StringIO()
    rich.console.Console(file=stream, width=80).print(table)
    return stream.getvalue()


def test_report_compares_runs(tmp_path):
    _write_run(tmp_path / "independent", accuracy=0.75)
    _write_run(tmp_path / "codistilled", accuracy=0.875)
    runs = [
        outputs.read_results(tmp_path / name) for name in quickstart.METHODS
    ]
    rows = dict(quickstart.rows(runs))
    assert rows["accuracy, group 1"] == [0.75, 0.875]
    assert rows["log loss, mean"] == [0.5, 0.5]
    assert rows["disagreement"] == [0.5, 0.5]
    line = next(
        line
        for line in _text(quickstart.table(runs)).splitlines()
        if "accuracy, mean" in line
    )
    assert line.split()[2:] == ["0.7500", "0.8750", "+0.1250"]


@pytest.mark.parametrize(
    "options, words",
    [
        (["--override=num_step=3"], "Did you mean num_steps"),
    ],
)
def test_wrong_options_start_nothing(tmp_path, capsys, options, words):
    with pytest.raises(SystemExit) as caught:
        quickstart.main([f"--workdir={tmp_path / 'runs'}", *options])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_earlier_runs_are_kept_and_a_failed_run_ends_it(tmp_path, caplog):
    (tmp_path / "007").mkdir()
    (tmp_path / "notes").mkdir()
    calls = []

    def fail(argv):
        calls.append(argv)
        return 65

    options = quickstart.PROGRAM.parse([f"--workdir={tmp_path}"])
    for number in ("008", "009"):
        assert quickstart.run(options, launch=fail) == 65
        (argv,) = calls
        assert f"--workdir={tmp_path / number / 'independent'}" in argv
        assert argv[-1] == "--method=independent"
        calls.clear()
    assert "the independent run ended with exit code 65" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "007",
        "008",
        "009",
        "notes",
    ]


@pytest.mark.multiprocess
@pytest.mark.timeout_secs(480)
def test_two_groups_end_to_end(tmp_path, no_process_left, capsys):
    arguments = [f"--workdir={tmp_path / 'runs'}", *TINY]
    assert quickstart.main(arguments) == 0
    printed = capsys.readouterr().out
    directory = tmp_path / "runs" / "001"
    for words in (
        "2 groups x 1 workers, 40 steps each",
        "independent",
        "codistilled",
        "accuracy, mean",
        "log loss, mean",
        "disagreement",
        "mean distance",
        f"--logdir {directory}",
    ):
        assert words in printed
    assert "\x1b" not in printed, "colours although it is no terminal"
    for name in quickstart.METHODS:
        _check_run(directory / name, distilled=name == "codistilled")
    configs = [
        json.loads((directory / name / "config.json").read_text())
        for name in quickstart.METHODS
    ]
    for config in configs:
        del config["method"]
    assert configs[0] == configs[1]
    assert not any(
        record["distillation_weight"]
        for record in _logs(directory / "independent")
    )


def _logs(workdir):
    return runs.records(workdir / "group_0", "epoch_end")


def _check_run(workdir, *, distilled):
    import tensorflow as tf

    from tests.cases import summaries as summary_cases

    results = json.loads((workdir / "results.json").read_text())
    groups = results["groups"]
    assert [(g["group"], g["steps"], g["workers"]) for g in groups] == [
        (0, 40, 1),
        (1, 40, 1),
    ]
    config = json.loads((workdir / "config.json").read_text())
    assert config["method"] == ("codistill" if distilled else "independent")
    for group in (0, 1):
        teachers = groups[group]["teachers"]
        assert [t["name"] for t in teachers] == [
            f"group_{1 - group}"
        ] * distilled
        directory = workdir / f"group_{group}"
        # By the chief alone: two files would repeat each step.
        shown = summary_cases.scalars(
            directory / "tensorboard", "codistillation/task_loss"
        )
        assert [step for step, _ in shown] == [40]
        found = predictions.read(directory)
        assert found.probabilities.shape == (500, 10)
        assert found.labels.shape == (500,)
        path = workdir / "exchange" / f"group_{group}" / "40"
        served = tf.saved_model.load(str(path))
        (answer,) = served.signatures["serving_default"](
            tf.zeros([3, 8, 8])
        ).values()
        assert answer.shape == (3, 10)
    logs = sorted(path.name for path in (workdir / "logs").glob("*.log"))
    assert logs == ["group_0_worker_0.log", "group_1_worker_0.log"]


def test_the_script_installs_first_and_passes_options_on(tmp_path):
    root = tmp_path / "checkout"
    (root / "launch").mkdir(parents=True)
    script = root / "launch" / "quickstart.sh"
    script.write_bytes((ROOT / "launch" / "quickstart.sh").read_bytes())
    log = tmp_path / "log"
    (root / "launch" / "install.sh").write_text(f'echo "install" >> {log}\n')
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$PYTHONPATH $*" >> {log}\nexit 7\n')
    python.chmod(0o755)
    environ = {"PATH": os.environ["PATH"]}
    found = subprocess.run(
        ["bash", str(script), "--override=mode=a b"],
        cwd=tmp_path,
        env=environ,
        timeout=30,
    )
    assert found.returncode == 7
    assert log.read_text().splitlines() == [
        "install",
        f"{root} -m launch.quickstart --override=mode=a b",
    ]
    (root / "launch" / "install.sh").write_text("exit 3\n")
    found = subprocess.run(
        ["bash", str(script)], cwd=tmp_path, env=environ, timeout=30
    )
    assert found.returncode == 3
    assert len(log.read_text().splitlines()) == 2
