"""Sums where rows live: bytes a step, servers' sums beside workers'.

A model of four fields of 50 ids each, pooled, and of a factorization machine
over 26 fields trains on two workers and two parameter servers, whose links
count all bytes: rows or sums, gradients, and dense variables. Beside the ratio
is what the lookups alone send by the formulas of
`layers.ShardedEmbedding(combine_on_servers=True)`.
"""

import sys
from typing import Any

from benchmarks import measure
from benchmarks import parameter_server
from benchmarks import sums_task
from tfdistill.system import programs

_TARGET = 1 / 3
_NUM_WORKERS = 2


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Trains both sides in turn and fills the record.

    Args:
        options: The options of the command line.
        record: What will be printed.
    """
    record.update(benchmark="sums", config=dict(vars(options)))
    found: dict[str, list[Any]] = {side: [] for side in sums_task.SIDES}
    for _ in range(options.rounds):
        for side, turns in found.items():
            turn = parameter_server.train_in_cluster(
                [
                    *(sys.executable, "-m", "benchmarks.sums_task"),
                    f"--side={side}",
                    f"--steps={options.steps}",
                    f"--epochs={options.epochs}",
                ],
                name=side,
                num_workers=_NUM_WORKERS,
                timeout_secs=options.turn_timeout_secs,
            )
            measure.log(f"{side}: {turn}")
            turns.append(turn)
    for name in ("bytes_per_step", "rates"):
        record[name] = {
            side: measure.summary([n for turn in turns for n in turn[name]])
            for side, turns in found.items()
        }
    features, _ = sums_task.arrays()
    batch = {k: v[: sums_task.BATCH_SIZE] for k, v in features.items()}
    record["bytes_by_formula"] = sums_task.num_bytes(
        batch, num_servers=_NUM_WORKERS
    )
    taken = record["bytes_per_step"]
    ratio = taken["servers"]["median"] / taken["workers"]["median"]
    judged = measure.judge(ratio, at_most=_TARGET)
    record["bytes on servers / on workers"] = judged
    record["met"] = judged["met"]
    record["machine"] = measure.machine()


def _add_options(options: programs.Flags) -> None:
    for name, number, text, fewer in (
        ("steps", 100, "steps an epoch", 20),
        ("epochs", 3, "measured epochs a turn", 1),
        ("rounds", 5, "turns of each side", 1),
    ):
        options.add(name, text, number, quick=fewer)
    options.add("turn_timeout_secs", "limit of a turn", 300.0)


PROGRAM = measure.program("sums", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
