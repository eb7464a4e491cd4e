"""A user's own file runs by the same commands as our recipes."""

import dataclasses
import json
import shutil

import pytest

from launch import local
from launch import recipes
from tests.programs import own_recipe

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]


def test_two_groups_train_by_a_file_of_the_user(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(own_recipe.__file__, "mine.py")
    code = local.main(
        [
            *("--num_groups=2", "--workers_per_group=1", "--workdir=run"),
            *("--recipe=mine.py", "--override=units=8", "--override=seed=3"),
            "--override=start_together_secs=60",
        ]
    )
    assert code == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["mean"]["accuracy"] > 0.8
    assert [len(group["teachers"]) for group in results["groups"]] == [1, 1]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["recipe"] == str(tmp_path / "mine.py")
    assert config["arguments"]["units"] == 8
    # The file is enough to repeat the run.
    again = recipes.read("run/config.json")
    assert dataclasses.asdict(again) == config
    assert again.workload().seed == 3
