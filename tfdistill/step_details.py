"""What a training step tells callbacks besides the logs that `fit` shows.

It travels among the logs as far as the training function's caller: from any
replica, by any loop, and from the workers of parameter servers.
"""

import typing
from typing import Any

import keras
import tensorflow as tf

_Base: Any = keras.Model if typing.TYPE_CHECKING else object
_PREFIX = "_tfdistill/"
# Number of examples in the step's batch.
EXAMPLES = "_examples"


def hidden(name: str, values: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns logs that `fit` does not show, one for each value.

    Args:
        name: What is told.
        values: `[count]`.
    """
    return {
        f"{_PREFIX}{name}/{index}": value
        for index, value in enumerate(tf.unstack(values))
    }


class StepDetails(_Base):
    """Keeps the details of the last execution for callbacks.

    Attributes:
        examples_of_last_execution: Number of examples, a float scalar.
    """

    examples_of_last_execution: Any = 0.0
    # In a function: Keras must not track what it holds.
    _details: Any = staticmethod(dict)

    def detail(self, name: str) -> list[Any] | None:
        """Returns float scalars of the last step of the last execution.

        Reading their values waits for the device.

        Args:
            name: What `hidden` was called with.

        Returns:
            The values, in order; None where the step does not tell it.
        """
        return self._details().get(name)

    def shown_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Takes the details out of an execution's logs.

        Args:
            logs: Of the last step.
        """
        shown: dict[str, Any] = {}
        details: dict[str, list[Any]] = {}
        for key, value in logs.items():
            if key.startswith(_PREFIX):
                name = key.split("/")[1]
                details.setdefault(name, []).append((key, value))
            else:
                shown[key] = value
        found = {
            name: [value for _, value in sorted(pairs, key=_index)]
            for name, pairs in details.items()
        }
        self._details = lambda: found
        return shown


def _index(pair: tuple[str, Any]) -> int:
    return int(pair[0].rpartition("/")[2])
