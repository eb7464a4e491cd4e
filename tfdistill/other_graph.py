"""Loads graphs that are not the student's own, once they have been checked."""

import logging
import tempfile

from tfdistill import exchange as exchange_lib
from tfdistill import frozen_function
from tfdistill import graph_check
from tfdistill import saved_model_files
from tfdistill import student_graph
from tfdistill import versions

_log = logging.getLogger(__name__)


def load(
    directory: str, graph: student_graph.StudentGraph, *, trust: bool
) -> frozen_function.FrozenFunction:
    """Loads a SavedModel that the user has named.

    Args:
        directory: A path or URL.
        graph: The student's, whose inputs and outputs it must have.
        trust: Whether to load it whatever it holds, with a warning.

    Returns:
        The SavedModel as a function.

    Raises:
        ValueError: It holds what may not run, or does not fit the student.
        OSError: It cannot be read.
    """
    try:
        saved_model_files.check_directory(directory)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            "`saved_models` must name directories that hold a saved_model.pb; "
            f"received {directory!r}. Of a .keras file make one by "
            "keras.models.load_model(FILE).export(DIR)."
        ) from error
    except graph_check.GraphError as error:
        if not trust:
            raise ValueError(
                f"The SavedModel {directory} is not loaded: {error} If you "
                "trust whoever made it as you trust a program, set "
                "TeacherSet(trust_saved_models=True), in a recipe "
                "codistillation.trust_saved_models."
            ) from error
        _log.warning("Loading the SavedModel %s, though %s", directory, error)
    return _loaded(directory, graph)


def load_version(
    exchange: exchange_lib.Exchange,
    version: versions.Version,
    graph: student_graph.StudentGraph,
) -> frozen_function.FrozenFunction:
    """Loads a peer's graph from a copy that nobody else can change.

    Args:
        exchange: Where the version is.
        version: A version of a graph other than the student's.
        graph: The student's.

    Returns:
        The version as a function.

    Raises:
        ValueError: It holds what may not run, or does not fit the student.
        CorruptVersionError: It differs from its manifest.
        OSError: It cannot be read or copied.
    """
    with tempfile.TemporaryDirectory(prefix="tfdistill-peer-") as directory:
        exchange.fetch(version, directory)
        saved_model_files.check_directory(directory)
        return _loaded(directory, graph)


def _loaded(
    directory: str, graph: student_graph.StudentGraph
) -> frozen_function.FrozenFunction:
    return frozen_function.FrozenFunction(
        directory, input_spec=graph.input_spec, output_spec=graph.output_spec
    )
