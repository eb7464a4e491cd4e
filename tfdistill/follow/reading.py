"""Reads the values of versions of a student's graph, whatever their kind.

A version is whole, or a delta: the rows that changed since a key frame, or, if
it has a base, all that the base has not. Each may hold quantized values. What a
delta is, and how its rows are put in: exchange/deltas.py; a base:
exchange/bases.py.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Protocol

import numpy as np
import tensorflow as tf

from tfdistill.exchange import bases
from tfdistill.exchange import deltas
from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.exports import quantized
from tfdistill.exports import saved_model
from tfdistill.follow import follower

_log = logging.getLogger(__name__)


class Copy(Protocol):
    """What holds the values of a version, and reads whole ones."""

    @property
    def held(self) -> Sequence[Any]:
        """The values in use; None for what is not known here."""

    def read(
        self, version: versions.Version, expected: Mapping[str, Any]
    ) -> saved_model.Snapshot:
        """Reads a whole version's values, in the order of `expected`."""


class Reader:
    """Reads versions of one peer. One thread at a time may use it."""

    def __init__(
        self,
        exchange: publisher.Exchange,
        variables: Mapping[str, Mapping[str, Any]],
        screen: Callable[[versions.Version], None],
    ) -> None:
        """Reads nothing yet; the student's manifests have these `variables`.

        `screen` checks versions that are read in place of the announced one.
        """
        self._exchange, self._variables = exchange, variables
        self._screen = screen
        self._namer = bases.Namer()

    def read(
        self, version: versions.Version, copy: Copy, frames: Collection[int]
    ) -> saved_model.Snapshot:
        """Returns values, in the order of the student's variables.

        `version` is as `readable` of its store gives it. Deltas of `frames` fit
        the values that `copy` holds. A delta is put over the first values of
        which it gives its bits; if it does over none, its version is read
        whole, if it is there. None stands for a variable of which `copy` holds
        the base's value. ValueError for a version that must not be used;
        DeltaError, CorruptVersionError and VersionNotFoundError as the last try
        ended.
        """
        if not deltas.is_delta(version.manifest):
            return copy.read(version, self._variables)
        fault: Any = None
        for start in self._starts(version, copy, frames):
            try:
                return self._over(start(), version)
            except (deltas.DeltaError, *follower.CONTRADICTIONS) as error:
                _log.info(
                    "Delta %d isn't used; a whole version is read instead: %s",
                    version.step,
                    error,
                )
                fault = error
        with contextlib.suppress(*follower.CONTRADICTIONS):
            whole = self._exchange.open(version.group, version.step)
            # One publisher gives both the same bits.
            if whole.manifest.incarnation == version.manifest.incarnation:
                return self._whole(whole, copy)
        raise fault

    def _starts(
        self, delta: versions.Version, copy: Copy, frames: Collection[int]
    ) -> list[Callable[[], Sequence[Any]]]:
        """Returns what reads the values that a delta may be put over.

        First the values in place, if they are of its key frame; then the key
        frame as it is. With a `choose`, the frame may hold more than the delta
        of its step: a training ended there, and the exporter's next training
        continues from the frame.
        """
        held, frame = lambda: copy.held, deltas.frame_of(delta.manifest)
        if frame is None or deltas.base_of(delta.manifest) is not None:
            return [held]
        by_delta = functools.partial(
            self._frame_by_delta, delta.group, frame, copy, frames
        )
        return [
            held if frame in frames else by_delta,
            lambda: self._whole(self._exchange.open(delta.group, frame), copy),
        ]

    def _frame_by_delta(
        self, group: int, step: int, copy: Copy, frames: Collection[int]
    ) -> saved_model.Snapshot:
        """Reads a key frame by the delta of its step, if that is enough."""
        delta = self._exchange.deltas.open(group, step)
        if deltas.frame_of(delta.manifest) not in frames:
            raise deltas.DeltaError("its key frame hasn't been read.")
        try:
            self._screen(delta)
            with self._exchange.deltas.readable(delta) as readable:
                return self._over(copy.held, readable)
        except ValueError as error:
            raise deltas.DeltaError(str(error)) from error

    def _whole(
        self, version: versions.Version, copy: Copy
    ) -> saved_model.Snapshot:
        self._screen(version)
        with self._exchange.readable(version) as readable:
            return copy.read(readable, self._variables)

    def _over(
        self, held: Sequence[Any], delta: versions.Version
    ) -> saved_model.Snapshot:
        """Returns a delta's values, from the values of a version of its frame.

        One with a base needs no held values. ValueError if it does not fit the
        student's variables, or is not finite; DeltaError if it does not fit
        what is held.
        """
        found = delta.manifest.variables
        saved_model.check_contents(
            {
                key: (tf.TensorShape(spec["shape"]), tf.as_dtype(spec["dtype"]))
                for key, spec in found.items()
            },
            self._variables,
        )
        field = delta.manifest.extras[deltas.FIELD]
        base = deltas.base_of(delta.manifest)
        parts: dict[str, Any] = {}
        for key, value in zip(self._variables, held, strict=True):
            parts.update(quantized.parts_of(key, value))
        if base is not None:
            arrays = _zeros(field.get("variables"), found)
        elif parts.keys() != found.keys():
            raise deltas.DeltaError(
                "the version it is added to has different variables or scales."
            )
        else:
            arrays = {
                key: tf.cast(value, found[key]["dtype"]).numpy()
                for key, value in parts.items()
            }
        results = deltas.patched(field, delta.content, arrays)
        if base is not None:
            left = {key: found[key] for key in found.keys() - arrays.keys()}
            results |= self._of_base(base, left, parts)
        with tf.device("CPU:0"):
            tensors = {k: tf.constant(value) for k, value in results.items()}
            sent = {k: v for k, v in self._variables.items() if k in tensors}
            values = saved_model.joined(tensors, sent)
        saved_model.check_finite(values, list(sent))
        known = dict(zip(sent, values, strict=True))
        return [known.get(key) for key in self._variables]

    def _of_base(
        self,
        name: str,
        specs: Mapping[str, Mapping[str, Any]],
        held: Mapping[str, Any],
    ) -> dict[str, np.ndarray]:
        """Reads the values of a base, by key; none if the same are held.

        CorruptVersionError if the base is not there, or another.
        """
        empty = {
            key: np.empty(specs[key]["shape"], _dtype(specs[key]))
            for key in sorted(specs)
        }
        ours = {
            key: _exactly(held.get(key), v.dtype) for key, v in empty.items()
        }
        known = {key: value for key, value in ours.items() if value is not None}
        if len(known) == len(specs) and self._namer.name(known) == name:
            return {}
        num_bytes = sum(value.nbytes for value in empty.values())
        content, start = self._exchange.bases.read(name, num_bytes), 0
        for key, value in empty.items():
            flat = np.frombuffer(content, np.uint8, value.nbytes, start)
            empty[key] = flat.view(value.dtype).reshape(value.shape)
            start += value.nbytes
        return empty


def _dtype(spec: Mapping[str, Any]) -> Any:
    return tf.as_dtype(spec["dtype"]).as_numpy_dtype


def _zeros(
    entries: object, found: Mapping[str, Mapping[str, Any]]
) -> dict[str, np.ndarray]:
    """Returns what a delta with a base is written over."""
    named = entries if isinstance(entries, Mapping) else {}
    for key in found:
        if len({part in named for part in quantized.keys_of(key, found)}) > 1:
            raise deltas.DeltaError(f"its delta must have all of {key}.")
    return {
        key: np.zeros(spec["shape"], _dtype(spec))
        for key, spec in found.items()
        if key in named
    }


def _exactly(value: object, dtype: object) -> np.ndarray | None:
    """Casts a value, without a copy where there is nothing to cast.

    None if it is none, or cannot be cast back.
    """
    if value is None:
        return None
    tensor = tf.convert_to_tensor(value)
    cast = tf.cast(tensor, dtype)
    if cast.dtype != tensor.dtype and not bool(
        tf.reduce_all(tf.cast(cast, tensor.dtype) == tensor)
    ):
        return None
    return np.asarray(cast)
