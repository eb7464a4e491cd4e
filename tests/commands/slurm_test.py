"""Tests of the program that writes a run's batch script, and submits it."""

import stat

import pytest

from tfdistill.commands import slurm


def test_a_recipe_is_checked_before_it_waits_in_a_queue(tmp_path, refused):
    run = f"--workdir={tmp_path / 'run'}"
    for options, said in (
        (["--recipe=digits", "--override=num_stps=1"], "num_stps"),
        ([], "expected a script such as my_train.py"),
        (["--num_groups=0", "--", "python"], "`num_groups` must be >= 1"),
    ):
        assert said in refused(slurm.main, run, *options)
    assert not (tmp_path / "run").exists()


def test_the_directory_is_made_with_a_key_for_its_owner(tmp_path, capsys):
    run = tmp_path / "run"
    argv = [f"--workdir={run}", "--num_groups=2", "--workers_per_group=2"]
    assert slurm.main([*argv, "--recipe=digits"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n")
    assert f"-m launch.train --recipe=digits --workdir={run}\n" in text
    key = run / "exchange.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    # Written again, it goes on with the same key.
    content = key.read_text()
    assert content.strip() not in text
    script = tmp_path / "script.sh"
    argv += [f"--output={script}", "--exchange=gs://bucket/run"]
    assert slurm.main([*argv, "--recipe=digits"]) == 0
    assert not capsys.readouterr().out
    assert '"exchange": "gs://bucket/run"' in script.read_text()
    assert key.read_text() == content


@pytest.mark.multiprocess
@pytest.mark.usefixtures("no_process_left")
def test_a_script_is_submitted(tmp_path, capsys, caplog, monkeypatch):
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text('#!/bin/sh\ncat "$2" > "$SEEN"\necho "77;cluster"\n')
    sbatch.chmod(0o755)
    seen = tmp_path / "seen"
    monkeypatch.setenv("SEEN", str(seen))
    monkeypatch.setenv("PATH", f"{sbatch.parent}:/usr/bin:/bin")
    run = tmp_path / "run"
    argv = [f"--workdir={run}", "--submit", "--", "python", "train.py"]
    assert slurm.main(argv) == 0
    assert capsys.readouterr().out == "77\n"
    assert seen.read_text() == (run / "slurm.sh").read_text()

    sbatch.write_text("#!/bin/sh\necho 'no partition' >&2\nexit 1\n")
    assert slurm.main(argv) == 1
    assert "exit code 1: no partition" in caplog.text
