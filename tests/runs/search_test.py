"""The search of docs/tuning.md, by Optuna itself."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.cases import docs_blocks

pytest.importorskip("optuna")
pytestmark = [
    pytest.mark.deep,
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]


def _page(name, **changes):
    """Writes a file of the guide, with fewer steps or trials."""
    (text,) = (
        block.text
        for page in ("docs/tuning.md", "docs/your_script.md")
        for block in docs_blocks.blocks(page)
        if block.file_name == name
    )
    for long, short in changes.items():
        assert long in text
        text = text.replace(long, short)
    pathlib.Path(name).write_text(text)


def test_optuna_tries_two_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = {"n_trials=20": "n_trials=2", "/tmp/search": str(tmp_path / "search")}
    _page("search_optuna.py", **few)
    few = {"epochs=6": "epochs=2", "steps_per_epoch=50": "steps_per_epoch=8"}
    _page("my_train.py", **few, **{"every_steps=25": "every_steps=4"})
    root = pathlib.Path(__file__).parents[2]
    here = pathlib.Path(sys.executable).parent
    programs = f"{here}{os.pathsep}{os.environ['PATH']}"
    path = f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "search_optuna.py"],
        env={**os.environ, "PYTHONPATH": path, "PATH": programs},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Trial 1 finished with value" in done.stderr
    assert "{'weight':" in done.stdout
