"""Documents of a prepared TensorFlow Datasets data set, such as lm1b or c4."""

import os
import re
from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds

__all__ = ["Source"]

_FIELD = "text"


class Source:
    """The documents of one split; see `language_model_text.Source`.

    Attributes:
        name: What messages call it.
    """

    def __init__(self, name: str) -> None:
        """Looks for the data set, which must have been prepared before.

        Args:
            name: As TensorFlow Datasets has it, such as `lm1b`, `c4/en` or
                `c4/en:3.0.1`; behind it a split in brackets, such as
                `lm1b[test]` or `c4/en[train[:1%]]`. Default split: `train`.

        Raises:
            ValueError: If there is no such data set on this machine, or it has
                no text.
        """
        self.name = f"tfds:{name}"
        found = re.fullmatch(r"([^\[\]]+)(?:\[(.+)\])?", name)
        if not found:
            raise ValueError(
                "`path` must be tfds:NAME or tfds:NAME[SPLIT]; received "
                f"'tfds:{name}'. Mend the brackets."
            )
        self._split = split = found[2] or "train"
        try:
            # Given, since it is otherwise looked at when tfds is imported.
            data_dir = os.environ.get("TFDS_DATA_DIR")
            self._builder = tfds.builder(found[1], data_dir=data_dir)
        except (AssertionError, ValueError) as cause:
            raise ValueError(
                f"`path` must name a data set; received {self.name!r}, of "
                "which TensorFlow Datasets says: "
                f"{str(cause).strip().splitlines()[0]} See its catalog."
            ) from cause
        if not self._builder.is_prepared():
            raise ValueError(
                f"`path` must name a data set that was prepared; found no "
                f"{self.name!r} in {self._builder.data_dir}. Run `tfds build "
                f"{found[1]}`, or set TFDS_DATA_DIR to where it is."
            )
        try:
            self._num_examples = self._builder.info.splits[split].num_examples
        except (KeyError, ValueError) as cause:
            known = ", ".join(sorted(self._builder.info.splits))
            raise ValueError(
                f"`path` must name a split; received {self.name!r}, which has "
                f"{known}."
            ) from cause
        if _FIELD not in self._builder.info.features:
            raise ValueError(
                f"`path` must name a data set with a field {_FIELD!r}; "
                f"received {self.name!r}. Choose another."
            )

    def identity(self) -> dict[str, Any]:
        """Returns what changes whenever the documents do, as JSON has it."""
        return {
            "name": self._builder.info.full_name,
            "split": self._split,
            "examples": self._num_examples,
        }

    def documents(self) -> Iterator[str]:
        """Yields the documents in order, without blank ones."""
        # One file after the other: the order must not depend on the machine.
        read = tfds.ReadConfig(interleave_cycle_length=1)
        dataset = self._builder.as_dataset(
            split=self._split, shuffle_files=False, read_config=read
        )
        for example in dataset.as_numpy_iterator():
            text = " ".join(example[_FIELD].decode("utf-8", "replace").split())
            if text:
                yield text
