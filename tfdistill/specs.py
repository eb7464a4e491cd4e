"""Inputs and outputs by name: what signatures and manifests have in common."""

import re
from typing import Any

import keras


def names(structure: Any, default: str) -> list[str]:
    """Names the leaves of a structure, in the order of `keras.tree.flatten`.

    Args:
        structure: A tensor, or dicts, lists and tuples of tensors.
        default: Name of a single leaf, and prefix of numbered ones.

    Returns:
        A name for each leaf: dict keys joined by "_", list positions.

    Raises:
        ValueError: Two leaves would have one name.
    """
    if not isinstance(structure, (dict, list, tuple)):
        return [default]
    paths = keras.tree.flatten_with_path(structure)
    found = [
        "_".join(str(part) for part in path)
        if isinstance(path[0], str)
        else f"{default}_{'_'.join(str(part) for part in path)}"
        for path, _ in paths
    ]
    legal = [legal_name(name, default) for name in found]
    if len(set(legal)) != len(legal):
        raise ValueError(
            f"The names of {default} must differ in more than characters "
            "that a signature cannot hold (all but letters, digits and _); "
            f"received {found}. Rename some."
        )
    return legal


def legal_name(name: str, default: str) -> str:
    """Makes a name one that TensorFlow takes as a signature's argument.

    Args:
        name: Any name, such as a data set's column.
        default: Prefix for a name that does not start with a letter.

    Returns:
        The name, with "_" for each character that is not allowed.
    """
    legal = re.sub("[^A-Za-z0-9_]", "_", name)
    return legal if legal[:1].isalpha() else f"{default}_{legal}"


def named(structure: Any, default: str) -> dict[str, Any]:
    """Flattens a structure to a dict by `names`.

    Args:
        structure: A tensor, or dicts, lists and tuples of tensors.
        default: Name of a single leaf.

    Returns:
        Leaf by name.
    """
    leaves = keras.tree.flatten(structure)
    return dict(zip(names(structure, default), leaves, strict=True))


def to_json(structure: Any, default: str) -> dict[str, Any]:
    """Describes specs for a manifest.

    Args:
        structure: Structure of `tf.TensorSpec`.
        default: Name of a single leaf.

    Returns:
        `{"shape": [None, ...], "dtype": "float32"}` by leaf name.
    """
    return {
        name: {
            "shape": None if spec.shape.rank is None else list(spec.shape),
            "dtype": spec.dtype.name,
        }
        for name, spec in named(structure, default).items()
    }
