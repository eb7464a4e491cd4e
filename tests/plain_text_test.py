"""Tests of what is left of others' text before it reaches a terminal."""

import pytest

from tfdistill import plain_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m\x07", "red"),
        ("\x1b]0;title\x07", "]0;title"),
        # Would show the end of the line first.
        ("a\u202eb\u2066c\u200f", "abc"),
        ("half\ud800 a pair\udfff", "half a pair"),
        ("Zürich \U0001f600\tok", "Zürich \U0001f600\tok"),
    ],
)
def test_what_steers_a_terminal_goes(text, shown):
    found = plain_text.without_control(text)
    assert found == shown
    found.encode()  # Any stream in UTF-8 takes it.


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
