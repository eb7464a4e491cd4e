"""Versions as key frames with deltas between them: published, and read.

What a delta is, and how it is written down: exchange/deltas.py.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill.embedding import layer
from tfdistill.exchange import deltas
from tfdistill.exchange import filesystem
from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.exports import quantized
from tfdistill.exports import saved_model


class KeyFrames:
    """Publishes each `every`-th version of a student whole, others as deltas.

    It finds what changed by comparing with a copy of the key frame, which
    takes a fraction of the time that writing a version does.
    """

    def __init__(self, every: int, choose: deltas.Chooser | None) -> None:
        """Takes the options of a `StudentExporter`; ValueError if wrong."""
        if type(every) is not int or every < 1:
            raise ValueError(
                f"`key_every` must be a whole number >= 1; received {every!r}."
            )
        if choose is not None and every == 1:
            raise ValueError(
                "`choose` is for deltas between whole versions; received it "
                "with key_every=1, which publishes none. Pass key_every=10."
            )
        self.every = every
        self._choose = choose
        self._writer: saved_model.SavedModelWriter | None = None
        self._encoder: deltas.Encoder | None = None

    def refuse_deltas(self) -> None:
        """Raises a ValueError if not every version is whole."""
        if self.every > 1:
            raise ValueError(
                "Versions that are mixed must be whole, key_every=1; received "
                f"{self.every}."
            )

    def publish(
        self,
        exchange: publisher.Exchange,
        writer: saved_model.SavedModelWriter,
        snapshot: saved_model.Snapshot,
        *,
        whole: bool,
        **described: Any,
    ) -> versions.Version:
        """Publishes a delta if one is due and not `whole` is asked for.

        Takes and raises what `Exchange.publish` does, and NotFiniteError.
        """
        if self.every == 1:
            return exchange.publish(
                lambda path: writer.write(path, snapshot), **described
            )
        step, extras = described["step"], described["extras"]
        extras[deltas.KEY_EVERY_FIELD] = self.every
        encoder = self._encoder if self._writer is writer else None
        # A later frame is of a training before this one.
        if encoder and (
            encoder.num_deltas >= self.every - 1 or encoder.frame >= step
        ):
            encoder = None
        other = exchange.deltas if whole or not encoder else exchange
        # An earlier attempt may have published it the other way: all readers
        # must see the same.
        if not whole and step in other.listed(described["group"]):
            raise versions.VersionExistsError(f"Step {step} is there already.")
        # From servers, too: what is compared must be what was written.
        snapshot = [
            variable.value if value is None else value
            for variable, value in zip(
                writer.graph.variables, snapshot, strict=True
            )
        ]
        stored = writer.stored(snapshot)
        values = {key: value.numpy() for key, value in stored.items()}
        if encoder and not whole:
            extras[deltas.FIELD], blocks = encoder.encode(values)
            return exchange.publish_delta(blocks, **described)
        version = exchange.publish(
            lambda path: writer.write(path, snapshot), **described
        )
        choose = _changed if writer.is_quantized else self._choose
        pairs = zip(writer.variables, writer.graph.variables, strict=False)
        dense = [
            key
            for key, variable in pairs
            if not isinstance(variable, layer.LogicalTable)
            and tf.as_dtype(variable.dtype).is_floating
            and (len(variable.shape) > 1 or not writer.is_quantized)
        ]
        self._writer = writer
        self._encoder = deltas.Encoder(
            step, values, choose=choose, chosen=dense
        )
        return version


def _changed(change: np.ndarray, residue: np.ndarray) -> np.ndarray:
    """Chooses all numbers that changed: few of a kernel's do, in most rows."""
    del residue
    return np.flatnonzero(change)


def read_delta(
    delta: versions.Version,
    held: Sequence[Any],
    variables: Mapping[str, Mapping[str, Any]],
) -> saved_model.Snapshot:
    """Returns a delta's values, from those of a version of its frame.

    Both in the order of `variables`, the student's. ValueError if it does not
    fit these, or is not finite; DeltaError if it does not fit what is held.
    """
    found = delta.manifest.variables
    shapes = {
        key: (tf.TensorShape(spec["shape"]), tf.as_dtype(spec["dtype"]))
        for key, spec in found.items()
    }
    saved_model.check_contents(shapes, variables)
    parts: dict[str, Any] = {}
    for key, value in zip(variables, held, strict=True):
        parts.update(quantized.parts_of(key, value))
    if parts.keys() != found.keys():
        raise deltas.DeltaError("what is held has other variables, or scales.")
    arrays = {
        key: tf.cast(value, found[key]["dtype"]).numpy()
        for key, value in parts.items()
    }
    file_system, root = filesystem.for_root(delta.path)
    content = filesystem.read(
        file_system, f"{root}/{deltas.FILE_NAME}", max_bytes=delta.num_bytes
    )
    results = deltas.patched(
        delta.manifest.extras[deltas.FIELD], content, arrays
    )
    with tf.device("CPU:0"):
        tensors = {key: tf.constant(value) for key, value in results.items()}
        values = saved_model.joined(tensors, variables)
    saved_model.check_finite(values, list(variables))
    return values
