"""Swaps a teacher many times, and prints what that leaves behind as JSON."""

import ctypes
import gc
import json
import os
import pathlib
import statistics
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases

NUM_WARM_UP, NUM_SWAPS, UNITS = 8, 12, 1536
_MIB = 2**20


def _resident_mib() -> float:
    gc.collect()
    # What the allocator keeps for later comes to as much as several versions.
    ctypes.CDLL(None).malloc_trim(0)
    pages = pathlib.Path("/proc/self/statm").read_text("utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / _MIB


class _Counting(tfdistill.CodistillModel):
    num_traces = 0

    def train_step(self, data):
        self.num_traces += 1
        return super().train_step(data)


def main(directory: str) -> None:
    exchange = tfdistill.Exchange(directory, max_to_keep=2, min_keep_secs=0.0)
    student = keras.Sequential(
        [
            keras.Input((cases.NUM_FEATURES,)),
            *[keras.layers.Dense(UNITS, activation="relu") for _ in range(2)],
            keras.layers.Dense(cases.NUM_CLASSES),
        ]
    )
    x, y = cases.data(4)
    model = cases.codistill(
        student, cases.peers(exchange, canary=(x, y)), kind=_Counting
    )
    # Each `fit` on arrays would leave a graph of its own.
    data = tf.data.Dataset.from_tensors((tf.constant(x), tf.constant(y)))
    cases.prepare(model, data)
    resident = []
    for step in range(NUM_WARM_UP + NUM_SWAPS):
        cases.publish(exchange, student, step=step)
        cases.load(model, step)
        cases.fit(model, data)
        resident.append(_resident_mib())
        if step == NUM_WARM_UP - 1:
            num_traces = model.num_traces
    size = sum(np.asarray(w).nbytes for w in student.get_weights())
    first, last = resident[NUM_WARM_UP:][:3], resident[-3:]
    found = {
        "growth_mib": statistics.median(last) - statistics.median(first),
        "version_mib": size / _MIB,
        "new_traces": model.num_traces - num_traces,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
