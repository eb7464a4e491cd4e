"""An LSTM with layer normalization inside the cell (Ba et al. 2016)."""

from typing import Any

import keras

_EPSILON = 1e-5


@keras.saving.register_keras_serializable(package="tfdistill")
class LayerNormLSTMCell(keras.layers.Layer):
    """One step of a layer-normalized LSTM, from gates' inputs.

    The recurrent part of equations 20 to 22 in the supplement of Ba et al.
    2016 (arXiv:1607.06450), for `keras.layers.RNN`:

        f, i, o, g = LN(h @ U) + inputs
        c' = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h' = sigmoid(o) * tanh(LN(c'))

    where LN has a gain, and the LN of c' a bias too. The inputs are what the
    token gives to the gates, `LN(x @ W) + b`: it does not depend on the state,
    so `LayerNormLSTM` computes it for all steps at once.
    """

    def __init__(self, units: int, **kwargs: Any) -> None:
        """Makes the cell; its weights come with the first call."""
        super().__init__(**kwargs)
        self.units = units
        # Keras' RNN reads these two names.
        self.state_size = [units, units]
        self.output_size = units

    def build(self, input_shape: Any) -> None:
        """Makes the weights."""
        units = self.units
        self.recurrent_kernel = self.add_weight(
            shape=(units, 4 * units),
            initializer="orthogonal",
            name="recurrent_kernel",
        )
        self.recurrent_gain = self.add_weight(
            shape=(4 * units,), initializer="ones", name="recurrent_gain"
        )
        self.cell_gain = self.add_weight(
            shape=(units,), initializer="ones", name="cell_gain"
        )
        self.cell_bias = self.add_weight(
            shape=(units,), initializer="zeros", name="cell_bias"
        )
        self.built = True

    def call(
        self, inputs: Any, states: Any, training: Any = None
    ) -> tuple[Any, list[Any]]:
        """Returns the output `[batch, units]`, and the two new states.

        `inputs` are the gates' inputs, `[batch, 4 * units]`.
        """
        ops = keras.ops
        hidden, cell = states
        recurrent = _normalize(ops.matmul(hidden, self.recurrent_kernel))
        gates = recurrent * self.recurrent_gain + inputs
        # One sigmoid for three gates: on a CPU the calls cost, not the sums.
        sigmoids = ops.sigmoid(gates[:, : 3 * self.units])
        forget, write, read = ops.split(sigmoids, 3, axis=-1)
        cell = forget * cell + write * ops.tanh(gates[:, 3 * self.units :])
        scaled = _normalize(cell) * self.cell_gain + self.cell_bias
        hidden = read * ops.tanh(scaled)
        return hidden, [hidden, cell]

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable(package="tfdistill")
class LayerNormLSTM(keras.layers.Layer):
    """A layer of layer-normalized LSTM cells over whole sequences.

    Its state is zero at the beginning of each sequence. The forget gate's
    bias begins at one, as in `keras.layers.LSTM`.
    """

    def __init__(self, units: int, **kwargs: Any) -> None:
        """Makes the layer; its weights come with the first call."""
        super().__init__(**kwargs)
        self.units = units
        self._project = keras.layers.Dense(
            4 * units, use_bias=False, name="input_kernel"
        )
        # A loop: unrolled, 32 steps took 9% less time to run, and three times
        # as long to trace, which each new teacher graph pays too.
        cell = LayerNormLSTMCell(units, name="cell")
        self._recur = keras.layers.RNN(cell, return_sequences=True, name="rnn")

    def build(self, input_shape: Any) -> None:
        """Makes the weights."""
        self._project.build(input_shape)
        gates_shape = (*input_shape[:-1], 4 * self.units)
        self.input_gain = self.add_weight(
            shape=(4 * self.units,), initializer="ones", name="input_gain"
        )
        self.bias = self.add_weight(
            shape=(4 * self.units,), initializer=_gate_bias, name="bias"
        )
        self._recur.build(gates_shape)
        self.built = True

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Returns the outputs of all steps, `[batch, steps, units]`."""
        projected = _normalize(self._project(inputs))
        return self._recur(projected * self.input_gain + self.bias)

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """Returns the shape of the outputs."""
        return (*input_shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), "units": self.units}


def _normalize(x: Any) -> Any:
    """Returns each row with mean 0 and variance 1."""
    ops = keras.ops
    mean, variance = ops.moments(x, axes=-1, keepdims=True)
    return (x - mean) * ops.rsqrt(variance + _EPSILON)


def _gate_bias(shape: Any, dtype: Any = None) -> Any:
    units = shape[0] // 4
    ones = keras.ops.ones((units,), dtype=dtype)
    zeros = keras.ops.zeros((3 * units,), dtype=dtype)
    return keras.ops.concatenate([ones, zeros])
