"""What a whole run came to, from the junit files of its stages.

`python -m tests.report DIRECTORY SECS STATUS` prints minutes by room and stage,
the slowest tests, and one closing line in pytest's own form for all stages.
With a fourth argument, a file, it also writes the seconds of each test file.
"""

import collections
import dataclasses
import json
import pathlib
import sys
import xml.etree.ElementTree
from collections.abc import Iterable
from collections.abc import Sequence

# What a test may take without `@pytest.mark.slow("why")`.
BUDGET_SECS = 10.0
_NUM_SLOWEST = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One test of a run.

    Attributes:
        stage: The name of the junit file that it stands in.
        room: The folder of its file.
        place: Its file and name.
        secs: From its set-up to its clean-up, by the clock.
        own_secs: The least that it takes on an idle machine, as conftest.py
            found out.
        may_be_slow: Whether it is marked `slow`, or `deep`.
        result: "passed", "skipped", "failure" or "error".
    """

    stage: str
    room: str
    place: str
    secs: float
    own_secs: float
    may_be_slow: bool
    result: str


def read(directory: str | pathlib.Path) -> list[Case]:
    """Returns all tests of the junit files in a directory."""
    return [
        _case(path.stem, element)
        for path in sorted(pathlib.Path(directory).glob("*.xml"))
        for element in xml.etree.ElementTree.parse(path).iter("testcase")
    ]


def _case(stage: str, element: xml.etree.ElementTree.Element) -> Case:
    module = element.get("classname", "")
    folders = module.split(".")[:-1]
    noted = {p.get("name"): p.get("value") for p in element.iter("property")}
    results = {child.tag for child in element} - {"properties"}
    secs = float(element.get("time", 0))
    return Case(
        stage=stage,
        room="/".join(folders[1:2]) or "at the top",
        place=f"{module.replace('.', '/')}.py::{element.get('name')}",
        secs=secs,
        own_secs=float(noted.get("own_secs", secs)),
        may_be_slow="may_be_slow" in noted,
        result=next(iter(results & {"error", "failure", "skipped"}), "passed"),
    )


def over_budget(cases: Iterable[Case]) -> list[str]:
    """Returns a line for each test that is slow and not marked as such."""
    return [
        f"{case.place} took {case.own_secs:.1f} s"
        for case in cases
        if case.own_secs > BUDGET_SECS and not case.may_be_slow
    ]


def _print_minutes(cases: Sequence[Case]) -> None:
    stages = sorted({case.stage for case in cases})
    secs: dict[str, collections.Counter] = collections.defaultdict(
        collections.Counter
    )
    for case in cases:
        for room in (case.room, "all"):
            secs[room][case.stage] += case.secs
    print("\n== minutes by room, added up over processes")
    print(f"{'':18}" + "".join(f"{stage:>12}" for stage in stages))
    for room in sorted(secs, key=lambda room: -sum(secs[room].values())):
        row = (f"{secs[room][stage] / 60:12.1f}" for stage in stages)
        print(f"{room:18}" + "".join(row))


def _print_slowest(cases: Sequence[Case]) -> None:
    print(f"\n== slowest {_NUM_SLOWEST} tests, in seconds")
    for case in sorted(cases, key=lambda c: -c.secs)[:_NUM_SLOWEST]:
        print(f"{case.secs:7.1f}  {case.place}")


def closing_line(cases: Iterable[Case], secs: str, *, has_failed: bool) -> str:
    """Returns pytest's last line; a stage can fail without a failed test."""
    counts = collections.Counter(case.result for case in cases)
    if has_failed and not counts["failure"] + counts["error"]:
        counts["error"] += 1
    words = {
        "failure": "failed",
        "passed": "passed",
        "skipped": "skipped",
        "error": "error" if counts["error"] == 1 else "errors",
    }
    shown = [f"{counts[key]} {word}" for key, word in words.items()]
    shown = [text for text in shown if not text.startswith("0 ")]
    line = f" {', '.join(shown) or 'no tests ran'} in {secs}.00s "
    return line.center(80, "=")


def _write_durations(cases: Iterable[Case], file: str) -> None:
    """Writes what affected.py chooses by: process-seconds, two at a time."""
    secs: collections.Counter = collections.Counter()
    for case in cases:
        if case.place.startswith("tests/") and case.stage != "lowest":
            # Tests with real processes run four at a time.
            share = 0.5 if case.stage == "processes" else 1.0
            secs[case.place.partition("::")[0]] += share * case.own_secs
    rounded = {path: round(secs[path], 1) for path in sorted(secs)}
    pathlib.Path(file).write_text(json.dumps(rounded, indent=1) + "\n")


def main(directory: str, secs: str, status: str, file: str = "") -> None:
    """Prints the report of a run that took so long and ended so."""
    cases = read(directory)
    if file:
        _write_durations(cases, file)
    if cases:
        _print_minutes(cases)
        _print_slowest(cases)
    print(closing_line(cases, secs, has_failed=status != "0"))


if __name__ == "__main__":
    main(*sys.argv[1:])
