"""Inputs in which a resumed `fit` cannot find its place again.

A resume creates the iterators again and skips the batches that were trained
on. That is right if the same program gets the same batches in the same order.
"""

import logging
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

_log = logging.getLogger(__name__)


def check(arguments: Mapping[str, Any]) -> None:
    """Refuses or warns of what `fit` reads, given that it has a backup."""
    data = arguments.get("x")
    if isinstance(data, keras.utils.PyDataset):
        if arguments.get("shuffle", True):
            _log.warning(
                "Keras shuffles the batches of a PyDataset anew after a "
                "resume: of the epoch in progress, some come twice and others "
                "not at all. Pass shuffle=False to `fit`, and shuffle in the "
                "PyDataset with a seed."
            )
        return
    for service in _services(data):
        job_name = getattr(service, "_job_name", None)
        if job_name is not None and job_name.numpy():
            raise ValueError(
                "Data of a tf.data service must have no `job_name` if `fit` "
                f"has a callbacks.Backup; received {job_name.numpy()!r}. A "
                "shared job goes on where it is, so that a resumed training "
                "would skip examples that it has never seen. Leave the name "
                "out, or train without a backup."
            )
        _log.warning(
            "A tf.data service with several workers delivers its batches in "
            "another order after a resume: some of them then come twice and "
            "others not at all. For an exact resume, give the service one "
            "worker, or read the data in the training's own processes."
        )


def _services(data: Any) -> Iterator[Any]:
    """Yields the parts of a dataset that another process reads."""
    if isinstance(data, tf.data.Dataset):
        # Its class is private, and of another name in earlier releases.
        if type(data).__name__.startswith("_DataServiceDataset"):
            yield data
        for part in data._inputs():
            yield from _services(part)
