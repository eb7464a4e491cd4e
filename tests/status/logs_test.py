"""Tests of what is found in the logs of tasks."""

import pytest

from tfdistill.status import logs


@pytest.mark.parametrize(
    "line, text",
    [
        ("/a b/train.py:12: UserWarning: 3 labels are odd", "3 labels are odd"),
        ("<string>:5: my.own.RowsWarning: empty", "empty"),
        ("WARNING:tfdistill.backup.store:no room", "no room"),
        (
            "W1122 12:00:00.123456 140023 peer.py:19] it \x1b[31mfades",
            "it fades",
        ),
        ("1/9 loss 3\r2/9 loss 2\rx.py:1: UserWarning: late", "late"),
        # For whoever wrote the code, or of TensorFlow's C++ code.
        ("x.py:3: DeprecationWarning: use y", None),
        ("W0000 00:00:1795350036.268016 11634 gpu.cc:31] no driver", None),
        ("WARNING: All log messages before absl::InitializeLog()", None),
        ("I1122 12:00:00.123456 140023 peer.py:19] all is well", None),
        ("ValueError: x", None),
        ("", None),
        ("W" * 100_000, None),
    ],
)
def test_lines(line, text):
    assert logs.text_of(line) == text


def _followed(tmp_path):
    return logs.LogWarnings(lambda: sorted(tmp_path.glob("*.log")))


def test_each_warning_is_found_once_though_tasks_and_steps_repeat_it(tmp_path):
    first, second = (tmp_path / f"group_0_worker_{n}.log" for n in (0, 1))
    found = _followed(tmp_path)
    found.read()  # No log is there yet.
    line = "WARNING:x:Step {} was not saved at .tmp-{}-ab12cd; peer group_{}"
    first.write_text(line.format(10, 10, 1) + "\n" + line.format(20, 20, 1))
    found.read()
    # The second is still being written.
    told = "Step 10 was not saved at .tmp-10-ab12cd; peer group_1"
    assert found.found == [f"{told} (group_0_worker_0.log)"]
    with first.open("a") as file:
        file.write("\n" + line.format(30, 30, 2) + "\n")
    second.write_text(line.format(40, 40, 1) + "\n")
    found.read()
    assert [text.partition("; ")[2] for text in found.found] == [
        "peer group_1 (group_0_worker_0.log)",
        "peer group_2 (group_0_worker_0.log)",
    ]
    first.write_text("WARNING:x:anew\n")  # Shorter: another file.
    found.read()
    assert found.found[-1].startswith("anew")


def test_a_flood_of_warnings_ends(tmp_path):
    words = [a + b for a in "qrstuvwxyz" for b in "qrstuvwxyz"]
    lines = [f"WARNING:x:{word}\n" for word in words]
    (tmp_path / "a.log").write_text("".join(lines))
    found = _followed(tmp_path)
    found.read()
    assert len(found.found) == 21
    assert found.found[-1] == "there are further warnings in the logs"


def test_of_a_long_log_beginning_and_end_are_read(tmp_path):
    path = tmp_path / "a.log"
    with path.open("w") as file:
        for text in ("first", "middle", "last"):
            file.write(f"WARNING:x:{text}\n")
            if text != "last":
                file.write(f"{'loss ' * 100}\n" * 12_000)
    found = _followed(tmp_path)
    found.read()
    assert [text.split()[0] for text in found.found] == ["first", "last"]
    path.unlink()
    found.read()
