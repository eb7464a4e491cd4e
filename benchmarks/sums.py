"""Sums where rows live: bytes a step, servers' sums beside workers'.

A model of four fields of 50 ids each, pooled, and of a factorization machine
over 26 fields trains on two workers and two parameter servers, whose links
count all bytes: rows or sums, gradients, and dense variables. Beside the ratio
is what the lookups alone send by the formulas of
`layers.ShardedEmbedding(combine_on_servers=True)`, and what it were if ids
repeated less or more.
"""

import sys
from typing import Any

from benchmarks import measure
from benchmarks import parameter_server
from benchmarks import sums_task
from tfdistill.system import programs

_TARGET = 1 / 3
_NUM_WORKERS = 2
# Ids that repeat more, from left to right.
_EXPONENTS = (1.05, 1.1, sums_task.ZIPF_EXPONENT, 1.3)


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
    by_formula = {one: _by_formula(one) for one in _EXPONENTS}
    record["bytes_by_formula"] = by_formula[sums_task.ZIPF_EXPONENT]
    record["ratio_by_formula_and_zipf_exponent"] = {
        exponent: round(sent["servers"] / sent["workers"], 3)
        for exponent, sent in by_formula.items()
    }
    taken = record["bytes_per_step"]
    ratio = taken["servers"]["median"] / taken["workers"]["median"]
    judged = measure.judge(ratio, at_most=_TARGET)
    record["bytes on servers / on workers"] = judged
    record["met"] = judged["met"]
    record["machine"] = measure.machine()


def _by_formula(exponent: float) -> dict[str, int]:
    features, _ = sums_task.arrays(exponent)
    batch = {k: v[: sums_task.BATCH_SIZE] for k, v in features.items()}
    return sums_task.num_bytes(batch, num_servers=_NUM_WORKERS)


def _add_options(options: programs.Flags) -> None:
    parameter_server.add_turns(options, steps=100, quick_steps=20)


PROGRAM = measure.program("sums", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
