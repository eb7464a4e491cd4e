"""What a peer's manifest must say before any other file of it is read."""

import logging
from typing import Any

import tensorflow as tf

from tfdistill import data_schema
from tfdistill import peer_reader
from tfdistill import saved_model_files
from tfdistill import specs
from tfdistill import student_graph
from tfdistill import versions

_log = logging.getLogger(__name__)


class VersionScreen:
    """Checks the files, the size, the specs and the schema of a version."""

    def __init__(
        self,
        graph: student_graph.StudentGraph,
        *,
        schema: data_schema.Wanted | None = None,
    ) -> None:
        """Reads nothing.

        Args:
            graph: The student's traced inference.
            schema: What peers must have. Default: nothing is compared.
        """
        self._graph = graph
        self._schema = schema or data_schema.Wanted(None, False)
        self._told: set[str] = set()

    def __call__(self, version: versions.Version) -> None:
        """Checks one version.

        Raises:
            RejectedError: It must not be read.
        """
        found = version.manifest
        own_graph = found.graph_fingerprint == self._graph.fingerprint
        try:
            saved_model_files.check_names(found.files)
            saved_model_files.check_size(
                version.num_bytes, self._graph, own_graph=own_graph
            )
        except ValueError as error:
            raise peer_reader.RejectedError(str(error)) from error
        for what, ours, said in (
            ("inputs", self._graph.input_spec, found.inputs),
            ("outputs", self._graph.output_spec, found.outputs),
        ):
            check_spec(what, specs.to_json(ours, what), said)
        self._check_schema(version)

    def _check_schema(self, version: versions.Version) -> None:
        theirs = version.manifest.extras.get(data_schema.FIELD)
        difference = data_schema.difference(self._schema.ours, theirs)
        if difference is None:
            return
        if not self._schema.only_warn:
            raise peer_reader.RejectedError(
                f"{difference} Give every group's StudentExporter and "
                "TeacherSet the same `schema`, or set "
                "TeacherSet(allow_other_schemas=True)."
            )
        if difference not in self._told:
            self._told.add(difference)
            _log.warning(
                "Obeying the teacher of group %d, though %s",
                version.group,
                difference,
            )


def check_spec(what: str, ours: dict[str, Any], theirs: Any) -> None:
    """Checks a version's inputs or outputs against the student's.

    Args:
        what: `"inputs"` or `"outputs"`.
        ours: What `specs.to_json` made of the student's.
        theirs: What the version's manifest says.

    Raises:
        RejectedError: They differ in names, shapes or kinds of numbers.
    """

    def kinds(spec: Any) -> Any:
        return {
            name: (leaf["shape"], _kind(leaf["dtype"]))
            for name, leaf in spec.items()
        }

    try:
        same = kinds(ours) == kinds(theirs)
    except (AttributeError, KeyError, TypeError):
        same = False
    if not same:
        raise peer_reader.RejectedError(
            f"its {what} must be those of the student, {ours}; received "
            f"{theirs}."
        )


def _kind(name: str) -> str:
    """What a dtype must have in common: numbers of other widths are cast."""
    dtype = tf.as_dtype(name)
    if dtype.is_floating:
        return "float"
    return "integer" if dtype.is_integer else dtype.name
