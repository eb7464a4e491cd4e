"""The guide and the script of the README, typed as they stand.

Only `/tmp` is another directory here, a group has one worker where a page says
two, the script of the README trains for fewer epochs, and programs that import
TensorFlow are forks, but for the first launcher.
What each command must leave behind or print stands in `_EXPECTED`, so that a
command that does nothing is found.
"""

import contextlib
import io
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests.cases import docs_blocks
from tests.cases import runs
from tests.programs import commands
from tfdistill.commands import keras_script
from tfdistill.commands import run

pytestmark = pytest.mark.multiprocess
# In the order in which a reader types them; later pages use earlier files.
_PAGES = (
    "docs/tutorial_workers.md",
    "docs/your_script.md",
    "docs/models.md",
    "docs/large_tables.md",
    "docs/tuning.md",
    "docs/teachers.md",
    "docs/serving.md",
)
# For a part of each command: what it prints.
_EXPECTED = {
    "workers-per-group=2 train.py": "group 0: done",
    "ps-per-group=1 train.py": "group 0: done",
    "python my_train.py": "distillation_weight",
    "--workdir=/tmp/my_run": "group 1: done",
    "tail -n 1": '"event": "end"',
    "subclassed_train.py": "group 1: done",
    "multi_output_train.py": "group 1: done",
    "clicks_train.py": "group 1: done",
    "--to=/tmp/served/clicks": "/served/clicks/300",
    "ask_clicks.py": "probabilities: [0.",
    "offline_train.py": "val_accuracy",
    "--workdir=/tmp/apart": "group 1: done",
    "churn.py": "mean absolute difference: 0.",
    "--to=/tmp/served/digits": "/served/digits/300",
    "ask.py": "'outputs': TensorSpec(shape=(None, 10)",
    "to_litert.py": "the same class in ",
}
# The first run, whose command is typed into a shell.
_IN_A_SHELL = "--workdir=/tmp/my_run"


def _in_a_shell(text):
    environ = os.environ | {
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    }
    done = subprocess.run(
        ["bash", "-e", "-c", text],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-6000:]}"
    return done.stdout


def _by_a_fork(words):
    """What a command prints that imports TensorFlow; None for any other."""
    match words:
        case ["tfdistill", "run", *options]:
            end = [word.startswith("--") for word in options].index(False)
            command = commands.of(*_ordinary(options[end]), *options[end + 1 :])
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                code = run.PROGRAM.main([*options[:end], "--", *command])
            assert code == 0, printed.getvalue()
            return printed.getvalue()
        case ["tfdistill", name, *arguments]:
            program = f"launch.{name}"
        case ["python", "-m", program, *arguments]:
            pass
        case ["python", program, *arguments]:
            pass
        case _:
            return None
    return commands.run(program, *arguments)


def _ordinary(script):
    """A script as `tfdistill run` has a task run it."""
    if keras_script.imports_tfdistill(script):
        return [script]
    return ["tfdistill", script]


def _here(text, tmp):
    """A page's text with another /tmp, and one worker in a group."""
    workers = "--workers-per-group="
    return text.replace("/tmp/", f"{tmp}/").replace(
        f"{workers}2", f"{workers}1"
    )


def _printed(block, text):
    """Runs the commands of a block, line by line."""
    lines = text.replace("\\\n", " ").splitlines()
    in_a_shell = _IN_A_SHELL in block.text
    found = []
    for line in lines:
        words = [] if in_a_shell else shlex.split(line, comments=True)
        forked = _by_a_fork(words)
        found.append(_in_a_shell(line) if forked is None else forked)
    return "".join(found)


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """Runs the pages; returns the directory that stands for /tmp."""
    tmp = tmp_path_factory.mktemp("tmp")
    expected = dict(_EXPECTED)
    blocks = [block for page in _PAGES for block in docs_blocks.blocks(page)]
    # All in one directory: forks of one parent begin in its own.
    with contextlib.chdir(tmp_path_factory.mktemp("guide")):
        for block in blocks:
            text = _here(block.text, tmp)
            if block.not_run:
                continue
            if block.file_name:
                pathlib.Path(block.file_name).write_text(text)
            if not block.commands:
                continue
            printed = _printed(block, text)
            for part in [part for part in expected if part in block.text]:
                wanted = expected.pop(part)
                assert wanted in printed, f"{block}\n{printed[-6000:]}"
    assert not expected, f"the guide lacks these commands: {expected}"
    return tmp


@pytest.mark.deep
def test_every_command_of_the_guide_works(typed, no_process_left):
    for name in ("my_run", "towers", "outputs", "clicks", "apart"):
        for group in (0, 1):
            path = typed / name / f"group_{group}"
            assert runs.records(path)[-1]["event"] == "end", path


@pytest.mark.deep
def test_its_groups_learn_from_each_other_and_apart_they_do_not(typed):
    def weights(name):
        lines = []
        for group in (0, 1):
            lines += runs.records(typed / name / f"group_{group}")
        return {line.get("distillation_weight") for line in lines} - {None}

    assert weights("apart") == {0.0}
    assert max(weights("my_run")) == 1.0


@pytest.mark.deep
def test_its_models_are_saved_and_served(typed):
    log = typed / "towers" / "logs" / "group_0_worker_0.log"
    assert re.search("reloaded: <TwoTowers", log.read_text())
    for group in (0, 1):
        assert (typed / f"my_run/group_{group}/student.keras").is_file()
        assert list((typed / f"clicks/group_{group}/backup").iterdir())
    served = typed / "served" / "digits" / "300"
    assert (served / "saved_model.pb").is_file()
    assert os.listdir(served.parent) == ["300"]


@pytest.mark.slow("a script of the README, by one process, two, and in groups")
def test_the_script_of_the_readme_runs_as_it_stands(
    tmp_path, monkeypatch, no_process_left
):
    monkeypatch.chdir(tmp_path)
    script, command = docs_blocks.blocks("README.md")[1:3]
    assert "epochs=40" in script.text
    shorter = script.text.replace("epochs=40", "epochs=20")
    pathlib.Path("my_train.py").write_text(shorter)
    assert "accuracy: 0.8" in _by_a_fork(["python", "my_train.py"])

    by_workers, _, in_groups, _ = command.commands
    saved = pathlib.Path("digits.keras")
    saved.unlink()
    assert "group 0: done" in _by_a_fork(by_workers)
    assert saved.exists()
    assert "group 1: done" in _by_a_fork(in_groups)
    workdir = pathlib.Path("last_run")
    for group in ("group_0", "group_1"):
        # Without a line for them.
        assert any((workdir / group / "backup").iterdir())
        assert any((workdir / "exchange" / group).iterdir())
    assert (workdir / "group_1/files/digits.keras").exists()


@pytest.mark.deep
def test_the_same_in_code_learns_from_the_other_group(
    tmp_path, monkeypatch, no_process_left
):
    monkeypatch.chdir(tmp_path)
    script = docs_blocks.blocks("README.md")[3]
    pathlib.Path("my_model.py").write_text(script.applied)
    run = ["tfdistill", "run", "--num-groups=2", "my_model.py"]
    assert "group 1: done" in _by_a_fork(run)
    assert any(pathlib.Path("last_run/group_1/backup").iterdir())
