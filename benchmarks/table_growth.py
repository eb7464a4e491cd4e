"""What a step costs as the table grows, and what it sends."""

import functools
import statistics
import time
from typing import Any

from benchmarks import click_training
from benchmarks import measure
from benchmarks import parameter_server_turn
from tfdistill.system import programs

_SIDE = "tfdistill_x10"
_MOST_GROWTH = 1.2
_FLOAT_BYTES = 4
_INDEX_BYTES = 4
_QUIET_SECS = 2.0


def rows(options: programs.Options) -> dict[str, Any]:
    """Trains with the same rows read, in tables of growing size.

    Args:
        options: Of the command line.

    Returns:
        The largest ratio of a step's time to that of the smallest table,
        judged; and by number of rows the seconds and each task's memory.
    """
    found: dict[str, list[dict[str, Any]]] = {}

    def turn(name: str) -> float:
        taken = parameter_server_turn.take(_SIDE, options, setting=name)
        found.setdefault(name, []).append(taken)
        batch_size = click_training.SETTINGS[name].batch_size
        return batch_size / statistics.median(taken["rates"])

    names = [f"rows_{spread}" for spread in sorted(options.spreads)]
    secs = measure.interleave(
        {name: functools.partial(turn, name) for name in names},
        rounds=options.rounds,
        warm_up_rounds=0,
    )
    ratios = {
        name: measure.ratio_of(secs[name], secs[names[0]]) for name in names
    }
    growth = max(ratio["of_medians"] for ratio in ratios.values())
    return {
        **measure.judge(growth, at_most=_MOST_GROWTH),
        "tables": {
            click_training.SETTINGS[name].num_rows: {
                "step_secs": measure.summary(secs[name]),
                "ratios": ratios[name],
                "resident_megabytes": {
                    kind: round(
                        max(t["resident_bytes"][kind] for t in found[name])
                        / 1e6
                    )
                    for kind in ("chief", "worker", "ps")
                },
            }
            for name in names
        },
    }


def traffic(options: programs.Options) -> dict[str, Any]:
    """Measures the bytes of a step, with and without repeated ids.

    They are counted on this host's loopback, so nothing else may use it;
    `idle_bytes_per_second` is what others sent before the start.

    Args:
        options: Of the command line.

    Returns:
        By setting: bytes a step of both ways to look ids up, their ratio,
        and what must travel at least.
    """
    before = click_training.loopback_bytes()
    time.sleep(_QUIET_SECS)
    idle = (click_training.loopback_bytes() - before) / _QUIET_SECS
    result: dict[str, Any] = {"idle_bytes_per_second": round(idle)}
    for setting in options.settings:
        num_bytes = {}
        for side in (_SIDE, "every_id_x10"):
            taken = parameter_server_turn.take(side, options, setting=setting)
            num_bytes[side] = round(statistics.median(taken["bytes_per_step"]))
            measure.log(f"{setting}: {side} {num_bytes[side]} bytes a step")
        ours, every = num_bytes.values()
        result[setting] = {
            "bytes_per_step": num_bytes,
            "ratio": round(every / ours, 3),
            "bound": bound(setting),
        }
    return result


def bound(setting: str) -> dict[str, Any]:
    """What each step must at least send between worker and servers.

    Args:
        setting: Key of `click_training.SETTINGS`.

    Returns:
        Distinct ids of a batch; bytes that carry each id's number once, its
        row and its gradient, and all dense variables and gradients; the same
        for every id, repeated or not.
    """
    found = click_training.SETTINGS[setting]
    num_ids = found.batch_size * click_training.NUM_FIELDS
    distinct = click_training.distinct_ids(found)
    dense = 2 * found.num_dense * _FLOAT_BYTES
    a_row = 2 * found.dim * _FLOAT_BYTES + _INDEX_BYTES
    return {
        "ids": num_ids,
        "distinct_ids": round(distinct, 1),
        "bytes_per_step": round(distinct * a_row + dense),
        "bytes_per_step_every_id": num_ids * a_row + dense,
    }
