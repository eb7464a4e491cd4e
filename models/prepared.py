"""Data sets that TensorFlow Datasets has prepared on this machine.

Nothing is downloaded and nothing prepared here. TensorFlow Datasets takes
seconds to import, so that only its users wait for it.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

__all__ = ["PREFIX", "Prepared"]

# Of a `path` that names a data set instead of files.
PREFIX = "tfds:"


class Prepared:
    """One split of a data set, read in the order of its files.

    Attributes:
        name: What messages call it.
        num_examples: Examples in the split.
    """

    def __init__(
        self, name: str, *, features: Mapping[str, tuple[Any, tuple[int, ...]]]
    ) -> None:
        """Looks for the data set, and reads nothing yet.

        Args:
            name: As TensorFlow Datasets has it, such as `lm1b`, `c4/en` or
                `c4/en:3.0.1`; behind it a split in brackets, such as
                `lm1b[test]` or `c4/en[train[:1%]]`. Default split: `train`.
            features: The dtype and shape of each feature that is needed.

        Raises:
            ValueError: If there is no such data set on this machine, or it has
                other features.
        """
        import tensorflow_datasets as tfds

        self._tfds = tfds
        self.name = f"{PREFIX}{name}"
        found = re.fullmatch(r"([^\[\]]+)(?:\[(.+)\])?", name)
        if not found:
            raise ValueError(
                "A prepared data set must be tfds:NAME or tfds:NAME[SPLIT]; "
                f"received {self.name!r}. Correct the brackets."
            )
        self._split = split = found[2] or "train"
        try:
            # Given, since it is otherwise looked at when tfds is imported.
            data_dir = os.environ.get("TFDS_DATA_DIR")
            self._builder = tfds.builder(found[1], data_dir=data_dir)
        except (AssertionError, ValueError) as cause:
            raise ValueError(
                "A prepared data set must be one of TensorFlow Datasets; "
                f"received {self.name!r}, of which it says: "
                f"{str(cause).strip().splitlines()[0]} See its catalog."
            ) from cause
        if not self._builder.is_prepared():
            raise ValueError(
                f"{self.name!r} must be prepared before it is read; it was "
                f"not found in {self._builder.data_dir}. {self._remedy}, or "
                "set TFDS_DATA_DIR to where it is."
            )
        info = self._builder.info
        try:
            self.num_examples = info.splits[split].num_examples
        except (KeyError, ValueError) as cause:
            known = ", ".join(sorted(info.splits))
            raise ValueError(
                f"A prepared data set must have the split that is read; "
                f"received {self.name!r}, which has {known}."
            ) from cause
        self._check_features(features)

    @property
    def _remedy(self) -> str:
        """How a data set that was not prepared is prepared."""
        name = self.name.removeprefix(PREFIX)
        return f"Run tfds.builder({name!r}).download_and_prepare()"

    def _check_features(
        self, features: Mapping[str, tuple[Any, tuple[int, ...]]]
    ) -> None:
        held = self._builder.info.features
        specs = held.get_tensor_spec() if hasattr(held, "keys") else {}
        for field, (dtype, shape) in features.items():
            spec = specs.get(field)
            fits = isinstance(spec, tf.TensorSpec) and (
                tf.as_dtype(dtype).is_integer == spec.dtype.is_integer
                and tf.as_dtype(dtype).is_floating == spec.dtype.is_floating
                and spec.shape.is_compatible_with(shape)
            )
            if not fits:
                raise ValueError(
                    f"{self.name!r} must have a feature {field!r} of dtype "
                    f"{tf.as_dtype(dtype).name} and shape {list(shape)}; "
                    f"received {', '.join(f'{k!r}' for k in specs) or 'none'}"
                    f"{f', with {spec} for it' if spec is not None else ''}. "
                    "Choose another data set."
                )

    def identity(self) -> dict[str, Any]:
        """Returns what changes whenever the examples do, as JSON has it."""
        return {
            "name": self._builder.info.full_name,
            "split": self._split,
            "examples": self.num_examples,
        }

    def examples(self) -> tf.data.Dataset:
        """Returns the examples in order, whatever the machine."""
        # One file after the other, and within each in order.
        options = tf.data.Options()
        options.deterministic = True
        read = self._tfds.ReadConfig(
            interleave_cycle_length=1, options=options, try_autocache=False
        )
        return self._builder.as_dataset(
            split=self._split, shuffle_files=False, read_config=read
        )
