"""Tests of the doctor with a recipe."""

from launch import doctor


def _data(capsys, *overrides):
    code = doctor.main(
        [
            "--recipe=digits",
            "--limit_secs=200",
            *(f"--override={override}" for override in overrides),
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    return code, [x for x in lines if " data: " in x or " teachers: " in x]


def test_the_data_of_a_recipe_are_read(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TFDISTILL_WORKDIR", str(tmp_path))
    code, (train, validation, teachers) = _data(capsys)
    assert code == 0
    assert "inputs (64, 8, 8), labels (64,)" in train
    assert validation.startswith("ok ")
    assert teachers.startswith("skipped ")
