"""Versions as key frames with deltas between them: how they are published.

What a delta is, and how it is written down: exchange/deltas.py.
"""

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill.embedding import layer
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
        step = described["step"]
        described["extras"] = {
            **described["extras"],
            deltas.KEY_EVERY_FIELD: self.every,
        }
        stored = writer.stored(_read_from_servers(writer, snapshot))
        values = {key: np.asarray(value) for key, value in stored.items()}
        keys, base = self._find_base(writer, values)
        encoder = self._encoder if self._writer is writer else None
        # A later frame is of a training before this one.
        if encoder and (encoder.frame >= step or self._frozen != (keys, base)):
            encoder = None
        is_key = whole or not encoder or encoder.num_deltas >= self.every - 1
        other = exchange.deltas if is_key else exchange
        # An earlier attempt may have published it the other way: all readers
        # must see the same.
        if not whole and step in other.listed(described["group"]):
            raise versions.VersionExistsError(
                f"Step {step} has already been added."
            )
        start = values
        if base:
            kept = {key: values.pop(key) for key in keys}
            exchange.bases.publish(base, bases.blocks(kept))
            start = {key: np.zeros_like(v) for key, v in values.items()}
            encoder = encoder or deltas.Encoder(step, start)
        # Followers up to here need only a delta, even when a key frame is due.
        if encoder:
            field, blocks = encoder.encode(values, everything=is_key)
            field |= {deltas.BASE: base} if base else {}
            of_delta = {**described["extras"], deltas.FIELD: field}
            # If a whole version is needed, the delta may have been published.
            known = [versions.VersionExistsError] if whole else []
            with contextlib.suppress(*known):
                version = exchange.deltas.publish_file(
                    blocks, **{**described, "extras": of_delta}
                )
            if not is_key:
                return version
        version = exchange.publish(
            lambda path: writer.write_stored(path, stored), **described
        )
        self._writer, self._frozen = writer, (keys, base)
        self._encoder = self._encoder_of(writer, step, start, base)
        return version

    def _encoder_of(
        self,
        writer: saved_model.SavedModelWriter,
        step: int,
        start: Mapping[str, np.ndarray],
        base: str,
    ) -> deltas.Encoder:
        """Makes the encoder of the deltas of a new key frame."""
        pairs = zip(writer.variables, writer.graph.variables, strict=False)
        dense = [
            key
            for key, variable in pairs
            if not isinstance(variable, layer.LogicalTable)
            and tf.as_dtype(variable.dtype).is_floating
            and (len(variable.shape) > 1 or not writer.is_quantized)
        ]
        choose = _changed if writer.is_quantized else self._choose
        return deltas.Encoder(
            step, start, choose=None if base else choose, chosen=dense
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
