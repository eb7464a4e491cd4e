"""Tests of following a file of JSON lines."""

import os

import pytest

from tfdistill.system import untrusted


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def _append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_tail_waits_for_the_end_of_a_line(path):
    tail = untrusted.Tail(path)
    assert tail.read() == []  # The file appears late.
    _append(path, '{"st')
    assert tail.read() == []
    _append(path, 'ep": 2')
    assert tail.read() == []
    _append(path, '}\n{"step"')
    assert tail.read() == [{"step": 2}]
    _append(path, ": 3}\n")
    assert tail.read() == [{"step": 3}]


def test_tail_starts_over_with_a_new_file(path, tmp_path):
    _append(path, '{"step": 1}\n{"step": 2}\n')
    tail = untrusted.Tail(path)
    path.write_text('{"step": 3}\n')  # Cut short.
    assert tail.read() == [{"step": 3}]
    other = tmp_path / "other"
    other.write_text('{"step": 4}\n{"step": 5}\n{"step": 6}\n')
    os.replace(other, path)
    assert tail.read() == [{"step": 4}, {"step": 5}, {"step": 6}]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m\x07", "red"),
        ("\x1b]0;title\x07", "]0;title"),
        # Would show the end of the line first.
        ("a\u202eb\u2066c\u200f", "abc"),
        ("Zürich \U0001f600\tok", "Zürich \U0001f600\tok"),
    ],
)
def test_what_steers_a_terminal_goes(text, shown):
    found = untrusted.without_control(text)
    assert found == shown
    found.encode()  # Any stream in UTF-8 takes it.
