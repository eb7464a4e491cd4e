"""A workload as a user would write it: in a file of their own."""

import keras
from sklearn import datasets

import tfdistill


def workload(rate=0.5, units=16, batch_size=32, num_steps=40, every_steps=5):
    """Returns a run on wines, which no recipe of ours knows."""
    wine = datasets.load_wine()
    x = ((wine.data - wine.data.mean(0)) / wine.data.std(0)).astype("float32")
    return tfdistill.Workload(
        model=lambda: keras.Sequential(
            [
                keras.Input([13]),
                keras.layers.Dense(units, activation="relu"),
                keras.layers.Dense(3),
            ]
        ),
        data=((x[::2], wine.target[::2]), (x[1::2], wine.target[1::2])),
        batch_size=batch_size,
        num_steps=num_steps,
        optimizer=lambda: keras.optimizers.SGD(rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: ["accuracy"],
        distillation_weight=tfdistill.schedules.BurnIn(steps=5),
        every_steps=every_steps,
        refresh_every_steps=1,
    )
