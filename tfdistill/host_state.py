"""What a training keeps in Python and not in variables, as JSON."""

import random
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

# Keras' own callbacks decide by these; weights that they keep are left out.
_ATTRIBUTES = (
    (keras.callbacks.EarlyStopping, ("wait", "best", "best_epoch")),
    (keras.callbacks.ReduceLROnPlateau, ("wait", "best", "cooldown_counter")),
    (keras.callbacks.ModelCheckpoint, ("best",)),
)


def of_random() -> dict[str, Any]:
    """Returns the states of Python's and NumPy's global generators."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [
            str(name),
            np.asarray(keys).tolist(),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }


def set_random(state: dict[str, Any]) -> None:
    """Gives both generators the states that `of_random` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))


def of_callbacks(
    callbacks: Sequence[keras.callbacks.Callback],
) -> list[list[Any]]:
    """Returns what Keras' own callbacks have counted so far.

    Args:
        callbacks: Those of `fit`.

    Returns:
        For each that is known its class's name and its numbers by name.
    """
    return [
        [
            type(callback).__name__,
            {
                name: None if value is None else float(value)
                for name in names
                for value in [getattr(callback, name, None)]
            },
        ]
        for callback, names in _known(callbacks)
    ]


def set_callbacks(
    callbacks: Sequence[keras.callbacks.Callback], state: list[list[Any]]
) -> bool:
    """Gives callbacks what they had counted, once their training has begun.

    Args:
        callbacks: Those of `fit`.
        state: What `of_callbacks` returned.

    Returns:
        Whether the callbacks are those of then; else nothing is changed.
    """
    known = _known(callbacks)
    if [type(c).__name__ for c, _ in known] != [name for name, _ in state]:
        return False
    for (callback, names), (_, numbers) in zip(known, state, strict=True):
        for name in names:
            value = numbers[name]
            counts = name in ("wait", "best_epoch", "cooldown_counter")
            if value is not None:
                setattr(callback, name, int(value) if counts else value)
    return True


def _known(
    callbacks: Sequence[keras.callbacks.Callback],
) -> list[tuple[keras.callbacks.Callback, tuple[str, ...]]]:
    return [
        (callback, names)
        for callback in callbacks
        for known, names in _ATTRIBUTES
        if isinstance(callback, known)
    ]
