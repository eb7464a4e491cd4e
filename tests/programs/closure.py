"""A task of a group with parameter servers: the chief schedules small closures.

Usage: python -m tests.programs.closure DIR. After each round the chief adds a
line to DIR/progress: the value of a variable on a ps, and the processes that
ran the round. It ends when DIR/stop appears.
"""

import pathlib
import sys
import time

import tensorflow as tf

import tfdistill


def main(directory):
    if (directory / "stop").exists():
        return  # There is nothing left to do, for servers neither.
    strategy = tfdistill.make_strategy()
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        count = tf.Variable(0.0)

    @tf.function
    def step():
        count.assign_add(1.0)
        # Read on the worker: begins with its process id.
        return tf.io.read_file("/proc/self/stat")

    while not (directory / "stop").exists():
        results = [coordinator.schedule(step) for _ in range(8)]
        coordinator.join()
        pids = {result.fetch().split()[0].decode() for result in results}
        with (directory / "progress").open("a") as file:
            file.write(f"{count.numpy():.0f} {' '.join(sorted(pids))}\n")
        time.sleep(0.02)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
