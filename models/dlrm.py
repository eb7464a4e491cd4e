"""DLRM's two towers, with the cross layers of DCN-v2 between them.

A DLRM (Naumov et al. 2019, arXiv:1906.00091) multiplies pairs of vectors.
DCN-v2 (Wang et al. 2021, arXiv:2008.13535) learns which products matter, and
of how many factors: one more with each layer.
"""

from collections.abc import Sequence
from typing import Any

import keras


@keras.saving.register_keras_serializable(package="tfdistill")
class LowRankCross(keras.layers.Layer):
    """Multiplies a layer's input by the network's: DCN-v2's equation 2.

        x_{l+1} = x_0 * (U V^T x_l + b) + x_l

    `*` is by element. x_0 and x_l are `[batch, d]`, U and V `[d, rank]`, b
    `[d]`. A rank far below d costs 2 d rank weights, where the full matrix of
    equation 1 has d^2.
    """

    def __init__(self, rank: int, **kwargs: Any) -> None:
        """Makes the layer, of a rank >= 1."""
        super().__init__(**kwargs)
        if rank < 1:
            raise ValueError(f"`rank` must be >= 1; received {rank}.")
        self.rank = rank

    def build(self, x_0_shape: Sequence[int], x_shape: Sequence[int]) -> None:
        """Makes U, V and b."""
        size = x_shape[-1]
        shape = (size, self.rank)
        self.v = self.add_weight(shape=shape, name="v")
        # Glorot's limits are the same for U and its transpose, which is kept.
        self.u = self.add_weight(shape=shape[::-1], name="u")
        self.b = self.add_weight(shape=(size,), initializer="zeros", name="b")

    def call(self, x_0: Any, x: Any) -> Any:
        """Returns x_{l+1} of x_0 and x_l."""
        projected = keras.ops.matmul(keras.ops.matmul(x, self.v), self.u)
        return x_0 * (projected + self.b) + x

    def compute_output_shape(self, x_0_shape: Any, x_shape: Any) -> Any:
        """Returns the shape of x_l."""
        return x_shape

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {**super().get_config(), "rank": self.rank}


def dense(x: keras.KerasTensor, units: Sequence[int]) -> keras.KerasTensor:
    """Returns the outputs of ReLU layers, one behind the other."""
    for number in units:
        x = keras.layers.Dense(number, activation="relu")(x)
    return x


def logit(x: keras.KerasTensor, units: Sequence[int]) -> keras.KerasTensor:
    """Returns one logit, behind hidden layers."""
    x = dense(x, units)
    # float32 even under a mixed policy: losses want exact logits.
    return keras.layers.Dense(1, dtype="float32", name="logit")(x)


def crossed(
    bottom: keras.KerasTensor,
    vectors: keras.KerasTensor,
    *,
    num_crosses: int,
    rank: int,
) -> keras.KerasTensor:
    """Returns the cross layers' output, which the second tower is over.

    The stacked form of DCN-v2, over the first tower's output `[batch, dim]` and
    the vectors of ids `[batch, fields, dim]`.
    """
    flat = keras.layers.Flatten()(vectors)
    x = x_0 = keras.layers.Concatenate(name="x_0")([bottom, flat])
    for number in range(num_crosses):
        x = LowRankCross(rank, name=f"cross_{number + 1}")(x_0, x)
    return x
