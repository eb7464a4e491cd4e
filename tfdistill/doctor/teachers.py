"""Would the newest version of each peer become a teacher of this group?

Its files and what its manifest says are checked; its graph is not run.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from tfdistill.doctor import check
from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.exports import student_graph
from tfdistill.follow import screen

NAME = "teachers"
_SAME_STUDENT = (
    "Give every group the same student, the same inputs (recipe, overrides, "
    "vocabulary sizes) and the same key (TFDISTILL_EXCHANGE_KEY_FILE), or "
    "clear the exchange of an older run. A damaged version is removed by hand; "
    "if it comes back, look at the storage and at that group's log."
)


class Student(NamedTuple):
    """What teachers must agree with, as a manifest has it."""

    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    fingerprint: str


def of_graph(graph: student_graph.StudentGraph) -> Student:
    """Returns the student that a group is about to train."""
    return Student(
        student_graph.to_json(graph.input_spec, "inputs"),
        student_graph.to_json(graph.output_spec, "outputs"),
        graph.fingerprint,
    )


def own_export(reader: publisher.Exchange, group: int) -> Student | None:
    """Returns the student as a group's own newest version has it."""
    if (found := reader.latest(group)) is None:
        return None
    said = found.manifest
    return Student(said.inputs, said.outputs, said.graph_fingerprint)


def examine(
    reader: publisher.Exchange,
    peers: Sequence[int],
    student: Student | None = None,
) -> Iterator[check.Result]:
    """Examines the newest version of each peer, as a teacher of `student`."""
    if not peers:
        yield check.skipped(NAME, "there is no group to learn from")
    for group in peers:
        who = f"group {group}"
        try:
            steps = reader.steps(group)
            if not steps:
                yield check.skipped(
                    NAME,
                    f"{who} has published nothing yet in "
                    f"{reader.group_path(group)}: its first version comes "
                    "after its first every_steps of StudentExporter",
                )
                continue
            who += f", version {steps[-1]}"
            version = reader.open(group, steps[-1])
            reader.verify(version)
            yield _judge(who, version, student)
        except OSError as error:
            seen = f"{who}: the exchange cannot be read: {error}"
            yield check.failed(NAME, seen, "See the check of the exchange.")
        except (ValueError, RuntimeError) as error:
            yield check.failed(NAME, f"{who}: {error}", _SAME_STUDENT)


def _judge(
    who: str, version: versions.Version, student: Student | None
) -> check.Result:
    if student is None:
        return check.ok(NAME, f"{who}: whole, no student to compare with")
    found = version.manifest
    screen.check_spec("inputs", student.inputs, found.inputs)
    screen.check_spec("outputs", student.outputs, found.outputs)
    if found.graph_fingerprint != student.fingerprint:
        return check.warning(
            NAME,
            f"{who}: whole, but its graph is another than this group's",
            "If groups have different architectures, set "
            f"teachers.Peers(allow_other_graphs=True). Else: {_SAME_STUDENT}",
        )
    return check.ok(NAME, f"{who}: whole, as this group's own")
