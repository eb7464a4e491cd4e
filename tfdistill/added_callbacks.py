"""The callbacks that `CodistillModel.fit` adds by itself."""

import warnings
from typing import Any

import keras

from tfdistill import cluster as cluster_lib
from tfdistill import run_log
from tfdistill import summaries


def completed(callbacks: Any, *, follows_peers: bool) -> Any:
    """Adds a `RunLog` and `Summaries` in a launched run.

    Warns of teachers that nobody follows.

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
    directory = cluster_lib.Cluster.from_env().group_dir
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
