"""Inputs and outputs by name: what signatures and manifests have in common."""

from typing import Any

import keras


def names(structure: Any, default: str) -> list[str]:
    """Names the leaves of a structure, in the order of `keras.tree.flatten`.

    Args:
        structure: A tensor, or dicts, lists and tuples of tensors.
        default: Name of a single leaf, and prefix of numbered ones.

    Returns:
        A name for each leaf: dict keys joined by "_", list positions.
    """
    if not isinstance(structure, (dict, list, tuple)):
        return [default]
    paths = keras.tree.flatten_with_path(structure)
    return [
        "_".join(str(part) for part in path)
        if isinstance(path[0], str)
        else f"{default}_{'_'.join(str(part) for part in path)}"
        for path, _ in paths
    ]


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
