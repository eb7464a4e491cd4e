"""Tests of which scripts are trained as they stand, and how tasks run them."""

import runpy

import pytest

from tfdistill import patch as patch  # A script of these tests finds it.
from tfdistill.commands import keras_script
from tfdistill.commands import recipe_options
from tfdistill.commands import run


def _command(tmp_path, text, *options):
    script = tmp_path / "train.py"
    script.write_text(text)
    parsed = run.PROGRAM.parse([*options, str(script), "--epochs=3"])
    found = recipe_options.command(parsed, python="py", workdir="run")
    return [each.replace(str(script), "train.py") for each in found]


def test_a_task_runs_an_ordinary_script_by_tfdistill(tmp_path):
    options = [
        "--teachers=own-past",
        "--distillation_weight=2",
        "--num-groups=2",
    ]
    assert _command(tmp_path, "import keras", *options) == [
        *("py", "-m", "tfdistill"),
        *("--teachers=own-past", "--distillation-weight=2.0"),
        *("train.py", "--epochs=3"),
    ]


@pytest.mark.parametrize(
    "text, options",
    [
        ("import keras", ["--no-patch"]),
        ("import keras, tfdistill.losses", []),
        ("def f():\n    from tfdistill import make_strategy", []),
        ("from tfdistill.callbacks import defaults", []),
        ("no Python", []),
    ],
)
def test_a_script_that_chooses_for_itself_is_left_alone(
    tmp_path, text, options
):
    found = _command(tmp_path, text, *options)
    assert found == ["py", "train.py", "--epochs=3"]


@pytest.mark.parametrize(
    "text, options, message",
    [
        (
            "import tfdistill",
            [],
            "imports tfdistill, .* Leave out --teachers",
        ),
        (
            "import keras",
            ["--no-patch"],
            "--no-patch leaves .* Leave out",
        ),
    ],
)
def test_an_option_without_effect_is_refused(tmp_path, text, options, message):
    with pytest.raises(ValueError, match=message):
        _command(tmp_path, text, "--teachers=none", *options)


@pytest.fixture
def as_program(monkeypatch):
    """Runs a script in this process, which is as it was before that."""
    own = keras_script.sys
    for name in ("argv", "path"):
        monkeypatch.setattr(own, name, list(getattr(own, name)))
    monkeypatch.setattr(own, "excepthook", own.excepthook)
    monkeypatch.setitem(own.modules, "__main__", own.modules["__main__"])
    import_ = keras_script.builtins.__import__
    monkeypatch.setattr(keras_script.builtins, "__import__", import_)
    return lambda *argv: keras_script.PROGRAM.main(list(map(str, argv)))


def test_a_script_without_keras_is_only_run(
    tmp_path, capsys, monkeypatch, as_program
):
    """As by its own Python, and without a strategy."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from json import dumps\n"
        "if __name__ == '__main__':\n"
        "    print(dumps([sys.argv[1:], sys.path[0], __file__]))\n"
    )
    monkeypatch.setattr(keras_script, "_patch", lambda given: pytest.fail())
    assert as_program(script, "--a=1") == 0
    assert capsys.readouterr().out.split() == (
        f'[["--a=1"], "{tmp_path}", "{script}"]'.split()
    )


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (
            "patch.patch_keras(teachers='all')",
            ["line 3, in f", "ValueError: `teachers` must be one of"],
        ),
        (
            "patch._hand_over('fit', None, None)",
            ["line 3, in f", "patch.py", "TypeError: "],
        ),
        ("{}['none']", ["line 3, in f", "KeyError: 'none'"]),
    ],
)
def test_what_ends_a_script_is_shown_without_our_lines(
    call, shown, tmp_path, capsys, as_program
):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\ndef f(patch):\n    {call}\n"
        "f(sys.modules['tfdistill.patch'])\n"
    )
    with pytest.raises(Exception) as raised:
        as_program(script)
    own = keras_script.sys
    own.excepthook(raised.type, raised.value, raised.tb)
    text = capsys.readouterr().err
    places = [text.index(part) for part in ("line 4", *shown)]
    assert places == sorted(places)
    assert ("tfdistill/" in text) == ("patch.py" in shown)


def test_the_module_has_the_commands_too(monkeypatch, capsys):
    """For where the script `tfdistill` isn't on the path."""
    monkeypatch.setattr("sys.argv", ["tfdistill", "run", "--num-group=2"])
    with pytest.raises(SystemExit):
        runpy.run_module("tfdistill", run_name="__main__")
    assert "tfdistill run: error" in capsys.readouterr().err
