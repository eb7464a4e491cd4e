"""Versions as key frames with deltas between them: how they are published.

What a delta is, and how it is written down: exchange/deltas.py.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill.embedding import tables
from tfdistill.exchange import bases
from tfdistill.exchange import deltas
from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.exports import quantized
from tfdistill.exports import saved_model

_log = logging.getLogger(__name__)


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
                "with key_every=1, which publishes no deltas. Pass "
                "key_every=10."
            )
        self.every = every
        self._choose = choose
        self.forget()
        self._encoder: deltas.Encoder | None = None
        # Keys of frozen weights, and their base, when the encoder was made.
        self._frozen: tuple[set[str], str] = (set(), "")
        self._namer, self._moves = bases.Namer(), False

    def forget(self) -> None:
        """Forgets an earlier training: its frames are not of this one."""
        self._writer: saved_model.SavedModelWriter | None = None

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
        group, step = described["group"], described["step"]
        extras = {**described.pop("extras"), deltas.KEY_EVERY_FIELD: self.every}
        stored = writer.stored(_read_from_servers(writer, snapshot))
        values = {key: np.asarray(value) for key, value in stored.items()}
        due = self.next_frame(writer, step, values, whole=whole)
        other = exchange.deltas if due.is_key else exchange
        # An earlier attempt may have published it the other way: all readers
        # must see the same.
        if not whole and step in other.listed(group):
            raise versions.VersionExistsError(
                f"Step {step} has already been added."
            )
        if due.base:
            exchange.bases.publish(due.base, bases.blocks(due.frozen))
        if due.encoder:
            field, blocks = due.encoder.encode(
                due.values, everything=due.is_key
            )
            field |= {deltas.BASE: due.base} if due.base else {}
            # If a whole version is needed, the delta may have been published.
            known = [versions.VersionExistsError] if whole else []
            with contextlib.suppress(*known):
                version = exchange.deltas.publish_file(
                    blocks, extras={**extras, deltas.FIELD: field}, **described
                )
            if not due.is_key:
                return version
        version = exchange.publish(
            lambda path: writer.write_stored(path, stored),
            extras=extras,
            **described,
        )
        self._writer, self._frozen = writer, ({*due.frozen}, due.base)
        self._encoder = self._encoder_of(writer, step, due)
        return version

    def next_frame(
        self,
        writer: saved_model.SavedModelWriter,
        step: int,
        values: Mapping[str, np.ndarray],
        *,
        whole: bool,
    ) -> "Due":
        """Returns what is due of a step's version; publishes nothing.

        A delta, or a key frame, or both: readers that follow take the delta of
        a key frame, not the frame. Only the first frame has none, unless there
        is a base.
        """
        keys, base = self._find_base(writer, values)
        frozen = {key: values[key] for key in keys}
        moving = {key: v for key, v in values.items() if key not in keys}
        encoder = self._encoder
        is_of_frame = self._writer is writer and self._frozen == (keys, base)
        # A later frame is of a training before this one.
        if encoder and not (is_of_frame and encoder.frame < step):
            encoder = None
        is_key = whole or not encoder or encoder.num_deltas >= self.every - 1
        start = moving
        if base:
            start = {key: np.zeros_like(v) for key, v in moving.items()}
            encoder = encoder or deltas.Encoder(step, start)
        return Due(is_key, encoder, moving, start, frozen, base)

    def _encoder_of(
        self, writer: saved_model.SavedModelWriter, step: int, due: "Due"
    ) -> deltas.Encoder:
        """Makes the encoder of the deltas of a new key frame."""
        pairs = zip(writer.variables, writer.graph.variables, strict=False)
        dense = [
            key
            for key, variable in pairs
            if not isinstance(variable, tables.Table)
            and tf.as_dtype(variable.dtype).is_floating
            and (len(variable.shape) > 1 or not writer.is_quantized)
        ]
        choose = _changed if writer.is_quantized else self._choose
        return deltas.Encoder(
            step,
            due.start,
            choose=None if due.base else choose,
            chosen=dense,
        )

    def _find_base(
        self,
        writer: saved_model.SavedModelWriter,
        values: Mapping[str, np.ndarray],
    ) -> tuple[set[str], str]:
        """Returns the keys of the frozen variables, and their base's name.

        Nothing unless these are most of the bytes, and keep their values: each
        version looks again.
        """
        variables = list(writer.variables)
        found = {
            key
            for index in writer.graph.frozen
            for key in quantized.keys_of(variables[index], writer.variables)
        }
        most = sum(value.nbytes for value in values.values()) / 2
        num_bytes = sum(values[key].nbytes for key in found)
        if self._choose or self._moves or num_bytes <= most:
            return set(), ""
        name = self._namer.name({key: values[key] for key in found})
        keys, before = self._frozen
        if self._writer is writer and keys == found and name != before:
            self._moves = True
            _log.warning(
                "Frozen weights have changed since the last version, so "
                "versions now include them and are larger."
            )
            return set(), ""
        return found, name


@dataclasses.dataclass(frozen=True)
class Due:
    """What is published of a version.

    Attributes:
        is_key: Whether a key frame is.
        encoder: Makes its delta; None if there is none.
        values: The values that may change, by key.
        start: What the deltas of this frame are compared with.
        frozen: The values in the base, by key.
        base: The base's name, or "".
    """

    is_key: bool
    encoder: deltas.Encoder | None
    values: Mapping[str, np.ndarray]
    start: Mapping[str, np.ndarray]
    frozen: Mapping[str, np.ndarray]
    base: str


def _read_from_servers(
    writer: saved_model.SavedModelWriter, snapshot: saved_model.Snapshot
) -> saved_model.Snapshot:
    """Fills a snapshot: what is compared must be what is written."""
    pairs = zip(writer.graph.variables, snapshot, strict=True)
    return [
        variable.value if value is None else value for variable, value in pairs
    ]


def _changed(change: np.ndarray, residue: np.ndarray) -> np.ndarray:
    """Chooses all numbers that changed: few of a kernel's do, in most rows."""
    del residue
    return np.flatnonzero(change)
