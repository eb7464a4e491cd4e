"""Rows fetched ahead, on links to workers and servers that are slow.

The click model of `parameter_server` trains with short steps on one worker and
one server, each behind a link that delays every byte by 5 ms each way. Each
side fetches rows so many batches ahead. One more side has links that delay
nothing: what it takes is the bound of what can be won.
"""

import statistics
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from benchmarks import measure
from benchmarks import parameter_server
from tfdistill.system import programs

_SETTING = "short"
_TARGET = 1.8


def compare(
    rates: Mapping[int, Sequence[float]], without_delay: Sequence[float]
) -> dict[str, Any]:
    """Compares the sides.

    Args:
        rates: Examples per second of each round, by how many batches ahead rows
            are fetched; 0 among them.
        without_delay: Those of links that delay nothing, with 0.

    Returns:
        The medians; the judgement of the best side over 0; and the bound.
    """
    best = max(rates, key=lambda ahead: statistics.median(rates[ahead]))
    ratio = measure.ratio_of(rates[best], rates[0], best=max)["of_medians"]
    bound = measure.ratio_of(without_delay, rates[0], best=max)["of_medians"]
    return {
        "examples_per_second": {
            "without_delay": measure.summary(without_delay),
            **{f"ahead{k}": measure.summary(v) for k, v in rates.items()},
        },
        "best": f"ahead{best}",
        "ahead / not ahead": measure.judge(ratio, at_least=_TARGET),
        "without delay / not ahead": bound,
    }


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Measures all sides in turn and fills the record.

    Args:
        options: The options of the command line.
        record: What will be printed.
    """
    record.update(benchmark="rows_ahead", config=dict(vars(options)))
    number = options.steps_per_execution
    rates: dict[int, list[float]] = {0: [], **{n: [] for n in options.ahead}}
    without_delay: list[float] = []
    record["bytes_per_step"] = {}
    for _ in range(options.rounds):
        for ahead, link_ms, found in (
            (0, 0.0, without_delay),
            *((n, options.link_ms, found) for n, found in rates.items()),
        ):
            turn = parameter_server.turn(
                f"tfdistill_ahead{ahead}_x{number}",
                options,
                setting=_SETTING,
                link_ms=link_ms,
            )
            measure.log(f"{ahead} ahead, {link_ms} ms: {turn}")
            found.append(statistics.median(turn["rates"]))
            num_bytes = round(statistics.median(turn["bytes_per_step"]))
            record["bytes_per_step"][f"ahead{ahead}"] = num_bytes
    record.update(compare(rates, without_delay))
    record["met"] = record["ahead / not ahead"]["met"]
    record["machine"] = measure.machine()


def _add_options(options: programs.Flags) -> None:
    parameter_server.add_turns(options, steps=320, quick_steps=160)
    options.add("steps_per_execution", "steps of an execution", 32, quick=16)
    options.add("ahead", "batches ahead", [2, 4], kind=int, quick=[2])
    options.add("link_ms", "delay of the links, each way", 5.0)


PROGRAM = measure.program("rows_ahead", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
