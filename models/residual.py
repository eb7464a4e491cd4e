"""What the residual networks for images are built of."""

from collections.abc import Mapping
from typing import Any

import keras

_NORM_GROUPS = 8
_NORMS = ("group", "batch")


def check(*, width: int, norm: str) -> None:
    """Checks what such a network is built with."""
    if width < _NORM_GROUPS or width % _NORM_GROUPS:
        raise ValueError(
            f"`width` must be a multiple of {_NORM_GROUPS}; received {width}."
        )
    if norm not in _NORMS:
        raise ValueError(
            f'`norm` must be "group" or "batch"; received {norm!r}.'
        )


def convolve(
    x: keras.KerasTensor,
    filters: int,
    *,
    size: int,
    strides: int = 1,
    norm: str,
    gamma: str = "ones",
    batch_norm: Mapping[str, Any] | None = None,
) -> keras.KerasTensor:
    """Returns a convolution without bias, normalized."""
    x = keras.layers.Conv2D(
        filters,
        size,
        strides=strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
    )(x)
    if norm == "group":
        return keras.layers.GroupNormalization(
            groups=_NORM_GROUPS, gamma_initializer=gamma
        )(x)
    return keras.layers.BatchNormalization(
        gamma_initializer=gamma, **(batch_norm or {})
    )(x)
