"""The callbacks that `CodistillModel.fit` adds by itself."""

import warnings
from typing import Any

import keras

from tfdistill import cluster as cluster_lib
from tfdistill import run_log
from tfdistill import summaries


def completed(callbacks: Any, *, follows_peers: bool) -> Any:
    """Adds a `RunLog` and `Summaries` in a launched run.

    Warns of teachers that nobody follows, and of a group that nobody hears.

    Args:
        callbacks: What `fit` was given.
        follows_peers: Whether the model has teachers in other groups.

    Returns:
        The callbacks to run.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    found = keras.tree.flatten(callbacks or [])
    follows = any(getattr(c, "follows_teachers", False) for c in found)
    if follows_peers and not follows:
        warnings.warn(
            "The model has teachers in other groups and `fit` got no "
            "tfdistill.TeacherLoader, so none will ever arrive. Add "
            "tfdistill.TeacherLoader(every_steps=...) to `callbacks`.",
            stacklevel=4,
        )
    cluster = cluster_lib.Cluster.from_env()
    exports = any(getattr(c, "exports_student", False) for c in found)
    if follows_peers and cluster.num_groups > 1 and not exports:
        warnings.warn(
            f"This is group {cluster.group} of {cluster.num_groups}, and `fit` "
            "got no tfdistill.StudentExporter, so the other groups will never "
            "learn from it. Add tfdistill.StudentExporter(exchange, "
            "every_steps=...) to `callbacks`.",
            stacklevel=4,
        )
    directory = cluster.group_dir
    if directory and not _has(found, run_log.RunLog):
        found.append(run_log.RunLog(directory))
    if directory and not _has(found, summaries.Summaries):
        path = f"{directory}/{summaries.DIRECTORY}"
        found.append(summaries.Summaries(path))
    for callback in found:
        if isinstance(callback, summaries.Summaries):
            callback.observe(found)
    return found


def _has(callbacks: list[keras.callbacks.Callback], kind: type) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)
