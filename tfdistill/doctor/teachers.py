"""Would the newest version of each peer become a teacher of this group?

A peer's graph is run only after the check that `allow_other_graphs` relies on,
from a copy that nobody else can change.
"""

import dataclasses
import tempfile
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill.doctor import check
from tfdistill.exchange import reader
from tfdistill.exchange import versions
from tfdistill.exports import checkpoints
from tfdistill.exports import graph_check
from tfdistill.exports import other_graphs
from tfdistill.exports import student_graph
from tfdistill.follow import screen as screen_lib

NAME = "teachers"
_NUM_EXAMPLES = 2
_SAME_STUDENT = (
    "Give every group the same student and the same inputs (recipe, "
    "overrides, vocabulary sizes), or clear the exchange of an older run."
)
_GOOD_VERSION = (
    "Remove that directory from the exchange and let the group publish "
    "again; if it comes back, look at the storage and at that group's log."
)


class _BadTeacherError(Exception):
    """A version must not become a teacher."""

    def __init__(self, seen: object, remedy: str) -> None:
        super().__init__(str(seen))
        self.remedy = remedy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Student:
    """What teachers must agree with: specs by name, as in a manifest."""

    source: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    fingerprint: str = ""


def as_student(student: Any, input_spec: Any, *, source: str) -> Student:
    """Returns what teachers must agree with, of a Keras model."""
    graph = student_graph.StudentGraph(student, input_spec)
    return Student(
        source=source,
        inputs=student_graph.to_json(graph.input_spec, "inputs"),
        outputs=student_graph.to_json(graph.output_spec, "outputs"),
        fingerprint=graph.fingerprint,
    )


def own_export(reader: reader.VersionReader, group: int) -> Student | None:
    """Returns the student as a group's own newest version has it."""
    found = reader.latest(group)
    if found is None:
        return None
    return Student(
        source=f"this group's version {found.step}",
        inputs=found.manifest.inputs,
        outputs=found.manifest.outputs,
        fingerprint=found.manifest.graph_fingerprint,
    )


def examine(
    reader: reader.VersionReader,
    peers: tuple[int, ...],
    student: Student | None,
) -> Iterator[check.Result]:
    """Examines the newest version of each peer, as a teacher of `student`."""
    if not peers:
        yield check.skipped(NAME, "there is no group to learn from")
    for group in peers:
        try:
            yield _of_peer(reader, group, student)
        except _BadTeacherError as error:
            yield check.failed(NAME, f"group {group}: {error}", error.remedy)
        except OSError as error:
            yield check.failed(
                NAME,
                f"group {group}: the exchange cannot be read: {error}",
                "See the check of the exchange.",
            )


def _of_peer(
    reader: reader.VersionReader, group: int, student: Student | None
) -> check.Result:
    steps = reader.steps(group)
    if not steps:
        return check.skipped(
            NAME,
            f"group {group} has published nothing yet in "
            f"{reader.group_path(group)}: its first version comes after its "
            "first every_steps of StudentExporter",
        )
    step = steps[-1]
    with tempfile.TemporaryDirectory(prefix="tfdistill-doctor-") as directory:
        version = _fetched(reader, group, step, directory)
        return _judge(directory, version, student)


def _judge(
    directory: str, version: versions.Version, student: Student | None
) -> check.Result:
    against, fingerprint = "no student to compare it with", ""
    if student is not None:
        _compare(version, student)
        against = f"inputs and outputs as {student.source}"
        fingerprint = student.fingerprint
    seen = f"group {version.group}, version {version.step}: whole, {against}"
    same = version.manifest.graph_fingerprint == fingerprint != ""
    try:
        graph_check.check_directory(directory)
    except checkpoints.CheckpointError as error:
        raise _BadTeacherError(
            f"version {version.step} must not be read: {error}", _GOOD_VERSION
        ) from error
    except graph_check.GraphError as error:
        if not same:
            raise _BadTeacherError(
                f"version {version.step} must not be loaded: {error}",
                "Check who can write to the exchange. A peer with another "
                "architecture must use only TensorFlow's plain operations.",
            ) from error
        return check.ok(
            NAME,
            f"{seen}, the graph is this group's own; it was not run here, as "
            f"{error}",
        )
    _run(directory, version, student)
    if fingerprint and not same:
        return check.warning(
            NAME,
            f"{seen}, outputs are finite, but its graph is another than this "
            "group's",
            "If groups have different architectures, set allow_other_graphs "
            "(teachers.Peers); else it will be "
            f"quarantined. {_SAME_STUDENT}",
        )
    graph = ", the same graph" if same else ""
    return check.ok(NAME, f"{seen}{graph}, loads, outputs are finite")


def _fetched(
    reader: reader.VersionReader,
    group: int,
    step: int,
    directory: str,
) -> versions.Version:
    try:
        version = reader.open(group, step)
        reader.verify(version)
        reader.fetch(version, directory)
    except versions.CorruptVersionError as error:
        remedy = _GOOD_VERSION
        if "signature" in str(error):
            remedy = (
                "Give every group the same TFDISTILL_EXCHANGE_KEY_FILE, or "
                "clear the exchange of a run with another key."
            )
        raise _BadTeacherError(error, remedy) from error
    except versions.VersionNotFoundError as error:
        raise _BadTeacherError(
            error,
            "It was removed because newer versions came. Run the doctor again.",
        ) from error
    return version


def _compare(version: versions.Version, student: Student) -> None:
    try:
        for what, ours, theirs in (
            ("inputs", student.inputs, version.manifest.inputs),
            ("outputs", student.outputs, version.manifest.outputs),
        ):
            screen_lib.check_spec(what, dict(ours), theirs)
    except screen_lib.Refused as error:
        raise _BadTeacherError(
            f"version {version.step}: {error}", _SAME_STUDENT
        ) from error


def _run(
    directory: str, version: versions.Version, student: Student | None
) -> None:
    """Loads a version and predicts with it once, for zeros."""
    found = version.manifest
    inputs = _specs(found.inputs if student is None else student.inputs)
    outputs = _specs(found.outputs if student is None else student.outputs)
    try:
        teacher = other_graphs.FrozenFunction(
            directory, input_spec=inputs, output_spec=outputs
        )
        predicted = teacher(
            {name: _zeros(spec) for name, spec in inputs.items()}
        )
    except (OSError, ValueError, tf.errors.OpError) as error:
        raise _BadTeacherError(
            f"version {version.step} does not load or run: {error}",
            _GOOD_VERSION,
        ) from error
    for name, value in zip(outputs, predicted, strict=True):
        if (
            value.dtype.is_floating
            and not np.isfinite(tf.cast(value, tf.float32).numpy()).all()
        ):
            raise _BadTeacherError(
                f"version {version.step}: its output {name} for zeros is not "
                "finite",
                "That group has diverged: look at its loss. Lower its "
                "learning rate, or resume it from its last good backup.",
            )


def _specs(found: Any) -> dict[str, tf.TensorSpec]:
    try:
        return {
            name: tf.TensorSpec(spec["shape"], spec["dtype"], name=name)
            for name, spec in sorted(found.items())
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _BadTeacherError(
            f"its manifest says nothing of its inputs and outputs: {error}",
            "Publish with StudentExporter.",
        ) from error


def _zeros(spec: tf.TensorSpec) -> tf.Tensor:
    # The first dimension is the batch; others that are not known are short.
    shape = [1 if size is None else size for size in spec.shape]
    shape[:1] = [_NUM_EXAMPLES] * min(1, len(shape))
    if spec.dtype == tf.string:
        return tf.fill(shape, "")
    return tf.zeros(shape, spec.dtype)
