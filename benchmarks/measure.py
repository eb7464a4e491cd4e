"""What all benchmarks share: alternating rounds, medians, one line of JSON.

The machine may be busy with other things, so no figure rests on one run: the
sides take turns, in an order that is turned round each time, and both the
medians and the minima are reported.
"""

import contextlib
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from absl import logging

from tfdistill.system import programs

# Digits of a second that mean something here: microseconds.
_DIGITS = 6


def interleave(
    sides: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    warm_up_rounds: int = 1,
) -> dict[str, list[float]]:
    """Measures all sides in turn, in reverse order every second round.

    Args:
        sides: By name, a function that returns one measurement.
        rounds: Measurements to keep of each side, >= 1.
        warm_up_rounds: Rounds before those, not kept. Default 1.

    Returns:
        The measurements by name, in the order taken.

    Raises:
        ValueError: If `rounds` is out of range.
    """
    if rounds < 1:
        raise ValueError(f"`rounds` must be >= 1; received {rounds}.")
    results: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(warm_up_rounds + rounds):
        names = list(sides)
        for name in names if number % 2 else names[::-1]:
            value = sides[name]()
            log(f"round {number - warm_up_rounds + 1}: {name} {value:.6f}")
            if number >= warm_up_rounds:
                results[name].append(value)
    return results


def timed(function: Callable[[], Any]) -> float:
    """Returns the seconds that one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def summary(values: Sequence[float]) -> dict[str, float | int]:
    """Describes measurements of one thing.

    Args:
        values: The measurements, at least one.

    Returns:
        Their median, minimum, maximum and number.
    """
    return {
        "median": round(statistics.median(values), _DIGITS),
        "min": round(min(values), _DIGITS),
        "max": round(max(values), _DIGITS),
        "count": len(values),
    }


def judge(
    ratio: float, *, at_most: float = float("inf"), at_least: float = 0.0
) -> dict[str, Any]:
    """Compares a ratio with its target.

    Args:
        ratio: What was measured.
        at_most: The target where a smaller ratio is better.
        at_least: The target where a larger ratio is better.

    Returns:
        The ratio, the target and whether it is met.
    """
    target = at_least or at_most
    return {
        "ratio": round(ratio, 5),
        "target": round(target, 5),
        "met": bool(at_least <= ratio <= at_most),
    }


def ratio_of(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    best: Callable[[Sequence[float]], float] = min,
) -> dict[str, float]:
    """Divides two sides' measurements in three ways.

    Args:
        numerators: Measurements of one side, in the order of the rounds.
        denominators: Measurements of the other side. Where a side has more
            of them, its last ones have no partner within a round.
        best: Picks what noise has harmed least: `min` (default) of times,
            `max` of rates.

    Returns:
        The ratio of the medians, of the best, and the median of the ratios
        within a round, which slow drift of the machine leaves alone.
    """
    median = statistics.median
    pairs = zip(numerators, denominators, strict=False)
    return {
        "of_medians": round(median(numerators) / median(denominators), 5),
        "of_best": round(best(numerators) / best(denominators), 5),
        "within_rounds": round(median(a / b for a, b in pairs), 5),
    }


def forward_flops(model: Any, batch_size: int) -> int:
    """Counts the floating-point operations of one inference pass.

    Args:
        model: A Keras 3 model of one float32 input.
        batch_size: Examples in the batch.

    Returns:
        The number, with a multiplication and an addition counted as two.
    """
    import tensorflow as tf

    spec = tf.TensorSpec((batch_size, *model.input_shape[1:]))
    infer = tf.function(lambda x: model(x, training=False))
    profiler = tf.compat.v1.profiler
    builder = profiler.ProfileOptionBuilder
    options = builder(builder.float_operation()).with_empty_output().build()
    graph = infer.get_concrete_function(spec).graph
    return int(profiler.profile(graph, options=options).total_float_ops)


def machine() -> dict[str, Any]:
    """Describes where and beside what load the figures were taken."""
    found = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }
    for name in ("tensorflow", "keras", "tf_keras"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        text = pathlib.Path("/proc/cpuinfo").read_text("utf-8")
        for line in text.splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def log(text: str) -> None:
    """Tells whoever watches how far the benchmark is."""
    logging.info("%s", text)


@contextlib.contextmanager
def one_json_line() -> Iterator[dict[str, Any]]:
    """Prints the yielded dict as the only line on stdout.

    Yields:
        The record to fill. It is printed if the block succeeds; what the
        block itself prints goes to stderr.
    """
    record: dict[str, Any] = {}
    with contextlib.redirect_stdout(sys.stderr):
        yield record
    print(json.dumps(record), flush=True)


def program(
    name: str,
    about: str,
    *,
    define: Callable[[programs.Program], None],
    run: Callable[[programs.Options, dict[str, Any]], None],
) -> programs.Program:
    """Makes the program of a benchmark that prints one JSON line.

    Args:
        name: Of its module.
        about: What it measures.
        define: Adds its options.
        run: Measures, given the options, and fills the record to be printed.
    """

    def print_record(options: programs.Options) -> int:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        with one_json_line() as record:
            run(options, record)
        return 0

    return programs.Program(
        name=f"python -m benchmarks.{name}",
        about=about,
        define=define,
        run=print_record,
    )
