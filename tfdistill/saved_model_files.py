"""Which files a SavedModel from elsewhere may consist of."""

import os
import re
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdistill import filesystem
from tfdistill import graph_check
from tfdistill import student_graph

GRAPH = "saved_model.pb"
# What a peer may publish whose graph is not the student's.
MAX_OTHER_BYTES = 4 * 1024**3
# A graph's file, and vocabularies.
_SPARE_BYTES = graph_check.MAX_GRAPH_BYTES + 64 * 1024**2

# No saved_model.pbtxt or saved_model.cpb, which TensorFlow loads too; nothing
# that is unpickled or that Keras loads. Assets are texts for lookup tables.
_NAME = re.compile(
    r"saved_model\.pb|fingerprint\.pb"
    r"|variables/variables\.(index|data-[0-9]{5}-of-[0-9]{5})"
    r"|assets/[A-Za-z0-9_-][A-Za-z0-9_-]*(\.[0-9]+)*(\.(txt|tsv|csv|vocab))?"
)
# What other exporters leave beside them, and `tf.saved_model.load` never reads.
_UNREAD = re.compile(
    r"manifest\.json|keras_metadata\.pb|debug/saved_model_debug_info\.pb"
    r"|assets\.extra/[A-Za-z0-9_.-]+"
)


def check_names(names: Iterable[str]) -> None:
    """Checks the files that a version lists.

    Args:
        names: Paths below the version's directory.

    Raises:
        GraphError: One is not a SavedModel's, or the graph is missing.
    """
    found = set(names)
    for name in sorted(found):
        if not _NAME.fullmatch(name):
            raise graph_check.GraphError(
                "its files must be those of a SavedModel (saved_model.pb, "
                "fingerprint.pb, variables, and texts in assets); found "
                f"{name!r}."
            )
    if GRAPH not in found:
        raise graph_check.GraphError(f"its files must include {GRAPH}.")


def check_size(
    num_bytes: int, graph: student_graph.StudentGraph, *, own_graph: bool
) -> None:
    """Checks the bytes that a version has by its manifest.

    Args:
        num_bytes: Of all its files.
        graph: The student's.
        own_graph: Whether the version is of the student's own graph.

    Raises:
        GraphError: They are more than such a version can need.
    """
    ours = sum(_num_bytes(variable) for variable in graph.variables)
    most = 2 * ours + _SPARE_BYTES
    if not own_graph:
        most = max(8 * most, MAX_OTHER_BYTES)
    if num_bytes > most:
        raise graph_check.GraphError(
            f"it must have at most {most} bytes, for a student of {ours}; its "
            f"manifest names {num_bytes}."
        )


def _num_bytes(variable: Any) -> int:
    elements = tf.TensorShape(variable.shape).num_elements() or 0
    return int(elements) * tf.as_dtype(variable.dtype).size


def check_directory(directory: str) -> None:
    """Checks a SavedModel before it is loaded: its files, then its graph.

    Args:
        directory: A path or URL.

    Raises:
        GraphError: It must not be loaded.
        OSError: It cannot be read.
    """
    if "://" not in directory:
        # Only what is below it must not be linked.
        directory = os.path.realpath(directory)
    file_system, root = filesystem.for_root(directory)
    files = _listed(file_system, root)
    check_names(name for name in files if not _UNREAD.fullmatch(name))
    graph_check.check(
        filesystem.read(
            file_system,
            f"{root}/{GRAPH}",
            max_bytes=graph_check.MAX_GRAPH_BYTES,
        )
    )


def _listed(
    file_system: filesystem.FileSystem, root: str
) -> Mapping[str, filesystem.Stat]:
    files = {}
    for name, found in filesystem.walk(file_system, root):
        if found.is_dir:
            continue
        if not found.is_file:
            raise graph_check.GraphError(
                f"its files must be regular ones; {name!r} is a link or a "
                "device."
            )
        files[name] = found
    return files
