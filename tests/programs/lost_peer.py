"""A group that publishes every few steps until it is killed.

Arguments: the exchange, and the step to begin at, as a resumed group does.
"""

import sys
import time

import keras
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases

EVERY_STEPS = 5
_STEP_SECS = 0.1
# Nobody waits for it if whoever started it is gone.
_MOST_STEPS = 6000


class _Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(_STEP_SECS)


def main(directory: str, first_step: int) -> None:
    x, y = cases.data(seed=1)
    model = cases.codistill(cases.linear(1))
    cases.prepare(model, x, y)
    model.optimizer.iterations.assign(first_step)
    data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(16)
    exporter = cases.exporter(
        tfdistill.Exchange(directory), EVERY_STEPS, group=1
    )
    cases.fit(
        model, data, steps_per_epoch=_MOST_STEPS, callbacks=[exporter, _Slow()]
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
