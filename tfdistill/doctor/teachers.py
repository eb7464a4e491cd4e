"""Would the newest version of each peer become a teacher of this group?

A peer's graph is run only after the check that `allow_other_graphs` relies on,
from a copy that nobody else can change.
"""

from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from tfdistill.doctor import check
from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.exports import graph_check
from tfdistill.exports import other_graphs
from tfdistill.follow import screen

NAME = "teachers"
_NUM_EXAMPLES = 2
_SAME_STUDENT = (
    "Give every group the same student, the same inputs (recipe, overrides, "
    "vocabulary sizes) and the same key (TFDISTILL_EXCHANGE_KEY_FILE), or "
    "clear the exchange of an older run. A damaged version is removed by hand; "
    "if it comes back, look at the storage and at that group's log."
)


class Student(NamedTuple):
    """What teachers must agree with, as `student_graph.StudentGraph` has it."""

    input_spec: Any
    output_spec: Any
    fingerprint: str


def own_export(reader: publisher.Exchange, group: int) -> Student | None:
    """Returns the student as a group's own newest version has it."""
    found = reader.latest(group)
    return _student(found) if found else None


def _student(version: versions.Version) -> Student:
    found = version.manifest
    return Student(
        _specs(found.inputs), _specs(found.outputs), found.graph_fingerprint
    )


def _specs(found: Any) -> dict[str, tf.TensorSpec]:
    try:
        return {
            name: tf.TensorSpec(spec["shape"], spec["dtype"], name=name)
            for name, spec in sorted(found.items())
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise screen.Refused(
            f"its manifest says nothing of its inputs and outputs: {error}"
        ) from error


def examine(
    reader: publisher.Exchange,
    peers: Sequence[int],
    student: Any = None,
) -> Iterator[check.Result]:
    """Examines the newest version of each peer, as a teacher of `student`.

    That is a `Student` or a `StudentGraph`; without one, versions are only read
    and run.
    """
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
            yield _judge(who, reader, reader.open(group, steps[-1]), student)
        except OSError as error:
            seen = f"{who}: the exchange cannot be read: {error}"
            yield check.failed(NAME, seen, "See the check of the exchange.")
        except (ValueError, RuntimeError) as error:
            yield check.failed(NAME, f"{who}: {error}", _SAME_STUDENT)


def _judge(
    who: str,
    reader: publisher.Exchange,
    version: versions.Version,
    student: Any,
) -> check.Result:
    if student is not None:
        screen.Screen(student)(version)
    ours = student or _student(version)
    is_own = ours.fingerprint == version.manifest.graph_fingerprint
    try:
        _predict_once(other_graphs.load_version(reader, version, ours), ours)
    except graph_check.GraphError as error:
        if student is None or not is_own:
            raise
        return check.ok(
            NAME, f"{who}: as this group's own; not run here, as {error}"
        )
    if not is_own:
        return check.warning(
            NAME,
            f"{who}: it runs, but its graph is another than this group's",
            "If groups have different architectures, set "
            f"teachers.Peers(allow_other_graphs=True). Else: {_SAME_STUDENT}",
        )
    against = "as this group's own" if student else "no student to compare with"
    return check.ok(NAME, f"{who}: whole, {against}; outputs are finite")


def _predict_once(teacher: other_graphs.FrozenFunction, student: Any) -> None:
    """Predicts for zeros; `Refused` if that fails or is not finite."""
    inputs = tf.nest.map_structure(_zeros, student.input_spec)
    try:
        predicted = teacher(inputs)
    except tf.errors.OpError as error:
        raise screen.Refused(f"it does not run: {error}") from error
    for value in predicted:
        if value.dtype.is_floating and not tf.reduce_all(
            tf.math.is_finite(value)
        ):
            raise screen.Refused(
                "its outputs for zeros are not finite: that group has diverged"
            )


def _zeros(spec: tf.TensorSpec) -> tf.Tensor:
    # The first dimension is the batch; others that are not known are short.
    shape = [1 if size is None else size for size in spec.shape]
    shape[:1] = [_NUM_EXAMPLES] * min(1, len(shape))
    if spec.dtype == tf.string:
        return tf.fill(shape, "")
    return tf.zeros(shape, spec.dtype)
