"""The script of the README, pasted as it stands and run as it says."""

import json
import os
import subprocess
import sys

import pytest

from tests.cases import docs_blocks

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout_secs(300),
    pytest.mark.usefixtures("no_process_left"),
]
_SECTION = "## In your own script"
# Some hundred of its steps take a second, and an export may take several where
# other work delays it: in groups, the script trains until a teacher taught it.
_UNTIL_TAUGHT = """

class UntilTaught(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch > 8 and logs["distillation_weight"] > 0


with strategy.scope():"""


def _run(directory, command):
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    environ = os.environ | {"PATH": path}
    # As with the installed package, which is not the directory of the script.
    environ["PYTHONPATH"] = str(docs_blocks.ROOT)
    done = subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=directory,
        env=environ,
        timeout=240,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def test_it_runs_when_it_is_pasted_alone_and_in_groups(tmp_path):
    (script,) = (
        block
        for block in docs_blocks.blocks("README.md")
        if block.file_name == "my_train.py"
    )
    (tmp_path / script.file_name).write_text(script.text)
    assert "accuracy: 0.9" in _run(tmp_path, f"python {script.file_name}")

    section = docs_blocks.read("README.md").partition(_SECTION)[2]
    (command,) = (
        line
        for line in section.partition("\n## ")[0].splitlines()
        if "launch.local" in line
    )
    run = tmp_path / "run"
    # Two workers cost more, and other tests have them.
    for old, new in [
        ("--workers_per_group=2", "--workers_per_group=1"),
        ("/tmp/run", str(run)),
    ]:
        assert old in command
        command = command.replace(old, new)
    text = script.text
    callbacks = "tfdistill.callbacks.defaults(every_steps=50)"
    for old, new in [
        (callbacks, f"[UntilTaught(), *{callbacks}]"),
        ("\nwith strategy.scope():", _UNTIL_TAUGHT),
        ("epochs=20", "epochs=10_000"),
    ]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / script.file_name).write_text(text)
    assert "group 1 done" in _run(tmp_path, command)
    for group in (run / "group_0", run / "group_1"):
        lines = (group / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        assert any(line.get("distillation_weight") for line in found)
        # Of the default callbacks, which alone may make it.
        assert [path.name for path in (group / "backup").iterdir()]
    assert any((run / "exchange" / "group_1").iterdir())
