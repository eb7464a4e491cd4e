"""Tests of the doctor with a recipe."""

import json

from launch import doctor
from tfdistill.doctor import check


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
