"""Tests of what is said where a package of an extra isn't installed."""

import sys

import pytest

import tfdistill
from tfdistill.commands import main
from tfdistill.system import extras


@pytest.fixture
def without(monkeypatch):
    def hide(package):
        # Earlier tests may have imported it, and what imports it.
        heads = "tfdistill.labels.", "tfdistill.serving.", f"{package}."
        for name in sorted(sys.modules, reverse=True):
            if name.startswith(heads):
                parent, _, child = name.rpartition(".")
                monkeypatch.delattr(sys.modules[parent], child, raising=False)
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return hide


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("compare my.py", "matplotlib", "compare"),
        ("compare my.py", "scipy", "compare"),
        ("line judge clicks", "matplotlib", "compare"),
        ("teach --exchange=runs/1/exchange", "grpc", "teach"),
        ("teach --exchange=runs/1/exchange", "tensorflow_serving", "teach"),
        (
            "kubernetes --name=run1 --workdir=/x --image=me my.py",
            "yaml",
            "kubernetes",
        ),
    ],
)
def test_a_command_says_in_one_line_what_it_needs(
    without, capsys, command, package, extra
):
    first, *arguments = command.split()
    program = main.load(first)
    without(package)
    assert program.main(arguments) == 2
    name = " ".join(w for w in command.split()[:2] if w.isalpha())
    assert capsys.readouterr().err == (
        f'tfdistill {name} needs {package}: pip install "tfdistill[{extra}]"\n'
    )


def test_a_class_says_what_it_needs(without):
    without("grpc")
    with pytest.raises(ModuleNotFoundError) as caught:
        tfdistill.labels.TeacherClient  # noqa: B018
    assert str(caught.value) == (
        "tfdistill.labels.TeacherClient needs grpc: "
        'pip install "tfdistill[teach]"'
    )


def test_other_modules_that_are_missing_are_left_alone():
    with pytest.raises(ModuleNotFoundError, match="^No module named 'absent'"):
        with extras.needed_by("this"):
            import absent  # noqa: F401
