"""The pages of the guide, typed as they stand into an empty directory.

Only `/tmp` is another directory here, and programs that a reader would wait for
to import TensorFlow are forks, but for the first of each kind. What each
command must leave behind or print stands in `_EXPECTED`, so that a command that
does nothing is found.
"""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from launch import local
from tests.cases import docs_blocks
from tests.programs import commands

# The first test runs the pages, about 50 s on two idle cores.
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout_secs(800)]
# In the order in which a reader types them; later pages use earlier files.
_PAGES = (
    "docs/guide.md",
    "docs/guide_launching.md",
    "docs/guide_models.md",
    "docs/guide_parameter_servers.md",
    "docs/guide_tuning.md",
    "docs/guide_offline.md",
    "docs/guide_serving.md",
    "docs/guide_troubleshooting.md",
)
_LIMIT_SECS = 300
# For a part of each command: what it prints.
_EXPECTED = {
    "plain_train.py": "val_accuracy",
    "python my_train.py": "distillation_weight",
    "--workdir=/tmp/my_run": "group 1 done",
    "tail -n 1": '"event": "end"',
    "subclassed_train.py": "group 1 done",
    "multi_output_train.py": "group 1 done",
    "clicks_train.py": "group 1 done",
    "offline_train.py": "val_accuracy",
    "--workdir=/tmp/apart": "group 1 done",
    "churn.py": "mean absolute churn: 0.",
    "launch.promote": "/served/digits/300",
    "ask.py": "'outputs': TensorSpec(shape=(None, 10)",
}
# The plain script, and the first run: their commands are typed into a shell.
_IN_A_SHELL = ("python plain_train.py", "--workdir=/tmp/my_run")


def _in_a_shell(text, directory):
    environ = os.environ | {
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-e", "-c", text],
        cwd=directory,
        env=environ,
        timeout=_LIMIT_SECS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-6000:]}"
    return done.stdout


def _by_a_fork(words, directory):
    """What a command prints that imports TensorFlow; None for any other."""
    match words:
        case ["python", "-m", "launch.local", *options]:
            end = options.index("--")
            python, script, *arguments = options[end + 1 :]
            assert python == "python"
            command = commands.of(script, *arguments, cwd=directory)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                code = local.main([*options[: end + 1], *command])
            assert code == 0, printed.getvalue()
            return printed.getvalue()
        case ["python", "-m", program, *arguments]:
            pass
        case ["python", program, *arguments]:
            pass
        case _:
            return None
    return commands.run(
        program, *arguments, cwd=directory, timeout_secs=_LIMIT_SECS
    )


def _printed(block, text, directory):
    """Runs the commands of a block, line by line."""
    lines = text.replace("\\\n", " ").splitlines()
    in_a_shell = any(part in block.text for part in _IN_A_SHELL)
    found = []
    for line in lines:
        words = [] if in_a_shell else shlex.split(line, comments=True)
        forked = _by_a_fork(words, directory)
        found.append(_in_a_shell(line, directory) if forked is None else forked)
    return "".join(found)


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """Runs the pages; returns the directory that stands for /tmp."""
    directory = tmp_path_factory.mktemp("guide")
    tmp = tmp_path_factory.mktemp("tmp")
    expected = dict(_EXPECTED)
    blocks = [block for page in _PAGES for block in docs_blocks.blocks(page)]
    for block in blocks:
        if block.not_run:
            continue
        text = block.text.replace("/tmp/", f"{tmp}/")
        if block.file_name:
            (directory / block.file_name).write_text(text)
        elif block.commands:
            printed = _printed(block, text, directory)
            for part in [part for part in expected if part in block.text]:
                wanted = expected.pop(part)
                assert wanted in printed, f"{block}\n{printed[-6000:]}"
    assert not expected, f"the guide lacks these commands: {expected}"
    return tmp


def test_every_command_of_the_guide_works(typed, no_process_left):
    for name in ("my_run", "towers", "outputs", "clicks", "apart"):
        for group in (0, 1):
            path = typed / name / f"group_{group}" / "metrics.jsonl"
            last = json.loads(path.read_text().splitlines()[-1])
            assert last["event"] == "end", path


def test_its_groups_learn_from_each_other_and_apart_they_do_not(typed):
    def weights(name):
        lines = []
        for group in (0, 1):
            path = typed / name / f"group_{group}" / "metrics.jsonl"
            lines += map(json.loads, path.read_text().splitlines())
        return {line.get("distillation_weight") for line in lines} - {None}

    assert weights("apart") == {0.0}
    assert max(weights("my_run")) == 1.0


def test_its_models_are_saved_and_served(typed):
    log = typed / "towers" / "logs" / "group_0_worker_0.log"
    assert re.search("reloaded: <TwoTowers", log.read_text())
    for group in (0, 1):
        assert (typed / f"my_run/group_{group}/student.keras").is_file()
        assert list((typed / f"clicks/group_{group}/backup").iterdir())
    served = typed / "served" / "digits" / "300"
    assert (served / "saved_model.pb").is_file()
    assert os.listdir(served.parent) == ["300"]
