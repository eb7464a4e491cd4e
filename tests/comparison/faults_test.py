"""Comparisons that go wrong: wrong data, two at once, files that are broken."""

import fcntl
import types

import pytest

from launch import recipes
from tfdistill.cluster import signs
from tfdistill.comparison import experiment
from tfdistill.comparison import trials


def _experiment(workdir, *overrides, chosen="independent,large_group"):
    recipe = recipes.override(recipes.get("digits"), overrides)
    return experiment.Experiment(
        workdir,
        setup=trials.Setup(recipe=recipe),
        variants=trials.parse_methods(chosen),
        num_trials=4,
    )


@pytest.fixture
def started():
    """Runs that end at once, by the codes in `codes`, without processes."""
    found = types.SimpleNamespace(workdirs=[], codes=[], groups=())

    class Ended:
        over = True

        def __init__(self, topology):
            self._workdir = topology.workdir

        def __enter__(self):
            found.workdirs.append(self._workdir)
            return self

        def close(self):
            pass

        def poll(self, timeout_secs):
            pass

        def result(self):
            code = found.codes.pop(0) if found.codes else 0
            if not code:
                with open(f"{self._workdir}/results.json", "w") as file:
                    file.write("{}")
            return types.SimpleNamespace(exit_code=code, groups=found.groups)

    found.launch = Ended
    return found


def _run(tmp_path, started, *overrides):
    """Runs an experiment; returns its failures, and what was said last."""
    said = []
    failures = _experiment(tmp_path, *overrides).run(
        1, say=said.append, launch=started.launch
    )
    return failures, said[-1]


@pytest.mark.parametrize("code", [2, 65])
def test_wrong_data_and_options_are_told_once(tmp_path, started, code):
    wrong = "ValueError: the data must be digits."
    started.codes = [code] * 8
    started.groups = [
        types.SimpleNamespace(
            reason=f"group_{group}_worker_0: {wrong} (exit code {code})",
            failed_task=f"group_{group}_worker_0",
            last_lines=("Traceback (most recent call last):", f"  {wrong}"),
        )
        for group in (0, 1)
    ]
    said = []
    compared = _experiment(tmp_path)
    failures = compared.run(1, say=said.append, launch=started.launch)
    assert len(started.workdirs) == len(failures) == 1
    assert "the other 7 would fail the same way" in said[-1]
    with pytest.raises(ValueError, match="no finished trial.*above") as error:
        compared.report("final", failures, jobs=1)
    text = "\n".join([*said, str(error.value)])
    assert text.count(wrong) == 1
    assert f"exit code {code}; logs: " in text


def test_what_one_method_cannot_do_does_not_stop_the_others(tmp_path, started):
    started.codes = [0, 65, 0, 2]
    failures, _ = _run(tmp_path, started)
    assert len(started.workdirs) == 8 and len(failures) == 2
    # Gone on with: six are done, so that a refusal is not that of all.
    started.codes, started.workdirs = [65, 0], []
    failures, _ = _run(tmp_path, started)
    assert len(started.workdirs) == 2 and len(failures) == 1


def test_a_run_that_loses_a_task_is_tried_three_times(tmp_path, started):
    """Or one that loses it each time would keep the comparison from ending."""
    lost = signs.EXIT_RETRY
    started.codes = [lost, lost, 0, lost, lost, lost]
    failures, _ = _run(tmp_path, started)
    # All come to their end but the second; none but these two begins again.
    tries = [started.workdirs.count(each) for each in started.workdirs]
    assert tries == [3] * 6 + [1] * 6
    ((key, why),) = failures.items()
    assert started.workdirs[3].endswith(key) and f"exit code {lost}" in why


def test_a_mistake_of_which_nothing_came_can_be_corrected(tmp_path, started):
    started.codes = [65]
    _run(tmp_path, started, "num_steps=900")
    _run(tmp_path, started, "num_steps=800")
    with pytest.raises(ValueError, match="different settings: num_steps"):
        _experiment(tmp_path, "num_steps=700")


def test_a_second_comparison_at_the_same_time_is_refused(tmp_path, started):
    _experiment(tmp_path)._write_record()
    assert experiment.is_unused(tmp_path)
    with (tmp_path / experiment.LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # Another script's takes a directory of its own.
        assert not experiment.is_unused(tmp_path)
        with pytest.raises(ValueError, match="in use by another comparison"):
            _run(tmp_path, started)
    assert not started.workdirs
    _run(tmp_path, started)
    assert started.workdirs
