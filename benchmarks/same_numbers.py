"""Trains fixed cases, to compare the numbers of two releases.

Runs with one release, with --output; then with another one, with --against
that file: the exit code is 1 if a number differs in a single bit. The cases are
recipes (digits, criteo_small), by the digests of their weights, and the short
trainings of tests/golden.py, by their losses. No case depends on when one
process sees what another one wrote. TensorFlow's deterministic kernels and one
thread for each kernel keep the machine's load out of the numbers.

With one worker there is one execution in flight, so that a parameter server
applies the updates in one order.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from benchmarks import measure
from tfdistill.system import programs

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_TIMEOUT_SECS = 900.0
_FIXED_ENV = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "KERAS_BACKEND": "tensorflow",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_DETERMINISTIC_OPS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
}
_GOLDEN = "golden"
_CRITEO = "criteo_small"
Found = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Recipe:
    """One run of a recipe.

    Attributes:
        name: Of the recipe.
        overrides: Fields to change.
        topology: Options of the launcher; None for one process without it.
    """

    name: str
    overrides: tuple[str, ...] = ()
    topology: tuple[str, ...] | None = None


_RECIPES: dict[str, _Recipe] = {
    "digits": _Recipe(name="digits"),
    "digits_small": _Recipe(
        name="digits",
        overrides=(
            "num_steps=200",
            "seed=5",
            "learning_rate=0.01",
            "hidden_sizes=[32]",
            "batch_size=50",
        ),
    ),
    "digits_two_workers": _Recipe(
        name="digits",
        overrides=("num_steps=200",),
        topology=("--workers_per_group=2",),
    ),
    _CRITEO: _Recipe(
        name=_CRITEO, topology=("--workers_per_group=1", "--ps_per_group=1")
    ),
}


def names() -> list[str]:
    """Returns the names of all cases."""
    return [*_RECIPES, _GOLDEN]


# ---- processes ----


def _environ() -> dict[str, str]:
    root = str(_ROOT)
    inherited = os.environ.get("PYTHONPATH")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "TFDISTILL_DATA"
        or not name.startswith(("TFDISTILL_", "TF_CONFIG"))
    }
    path = os.pathsep.join([root, inherited] if inherited else [root])
    return {**kept, **_FIXED_ENV, "PYTHONPATH": path}


def _run(command: Sequence[str], workdir: pathlib.Path) -> None:
    """Runs a command to its end.

    Raises:
        RuntimeError: If it fails.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    # A session of its own, whose processes all end with it.
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        env=_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=_TIMEOUT_SECS)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        logs = [
            path.read_text("utf-8", errors="replace")[-3000:]
            for path in sorted(workdir.glob("logs/*.log"))
        ]
        raise RuntimeError(
            f"{' '.join(command)} must end with 0; received "
            f"{process.returncode}. Its last output:\n"
            + "\n".join([output[-3000:], *logs])
        )


def _launched(
    topology: Sequence[str], workdir: pathlib.Path, command: Sequence[str]
) -> list[str]:
    return [
        "launch.local",
        f"--workdir={workdir}",
        "--plain",
        "--stuck_secs=0",
        *topology,
        *command,
    ]


def _run_recipe(recipe: _Recipe, workdir: pathlib.Path) -> Found:
    options = [f"--recipe={recipe.name}"]
    options += [f"--override={override}" for override in recipe.overrides]
    if recipe.topology is None:
        _run(["launch.train", f"--workdir={workdir}", *options], workdir)
    else:
        _run(_launched(recipe.topology, workdir, options), workdir)
    group = workdir / "group_0"
    results = json.loads((group / "results.json").read_bytes())
    lines = (group / "metrics.jsonl").read_text("utf-8").splitlines()
    losses = [x["loss"] for x in map(json.loads, lines) if "loss" in x]
    return {
        "weights": _digest(group / "student.keras"),
        "loss": losses[-1],
        **{f"val_{k}": v for k, v in sorted(results["metrics"].items())},
    }


def _digest(path: pathlib.Path) -> str:
    """Returns the SHA-256 of the weights of a `.keras` file, in order."""
    # Only now: a run of other commands needs no TensorFlow here.
    import keras
    import numpy as np

    import tfdistill  # noqa: F401  # Keras finds its layers then.

    student = keras.saving.load_model(path, compile=False)
    found = hashlib.sha256()
    for value in map(np.ascontiguousarray, student.get_weights()):
        found.update(f"{value.dtype.str}{value.shape}".encode())
        found.update(value.tobytes())
    return found.hexdigest()


def _run_golden(workdir: pathlib.Path) -> Found:
    path = workdir / "golden.json"
    _run(["tests.golden", str(path)], workdir)
    return dict(json.loads(path.read_bytes())["losses"])


# ---- all of them ----


def run(wanted: Sequence[str]) -> tuple[dict[str, Found], dict[str, str]]:
    """Trains cases.

    Args:
        wanted: Their names.

    Returns:
        What was found by name, and why others were left out.
    """
    found: dict[str, Found] = {}
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="tfdistill-same-") as directory:
        for name in wanted:
            workdir = pathlib.Path(directory, name)
            if reason := _lacks_data(name):
                skipped[name] = reason
                measure.log(f"{name}: skipped, {reason}")
                continue
            with _timed(name):
                if name == _GOLDEN:
                    found[name] = _run_golden(workdir)
                else:
                    found[name] = _run_recipe(_RECIPES[name], workdir)
    return found, skipped


def _lacks_data(name: str) -> str | None:
    """Why the data of a recipe cannot be read, if they cannot."""
    given = os.environ.get("TFDISTILL_DATA")
    directory = pathlib.Path(given or _ROOT.parent / "shared" / "data")
    if name != _CRITEO or (directory / "criteo").is_dir():
        return None
    return (
        f"no folder criteo in {directory}; set TFDISTILL_DATA to the "
        "directory of the data"
    )


@contextlib.contextmanager
def _timed(name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    measure.log(f"{name}: {time.perf_counter() - start:.1f} s")


def differences(
    found: Mapping[str, Found],
    expected: Mapping[str, Found],
    *,
    left_out: Sequence[str] = (),
) -> list[str]:
    """Names what differs.

    Args:
        found: Results by case.
        expected: Results by case that they must equal to the bit.
        left_out: Cases that were not run.

    Returns:
        A line for each difference.
    """
    lines = []
    for name in sorted((found.keys() | expected.keys()) - set(left_out)):
        ours, theirs = found.get(name), expected.get(name)
        if ours is None or theirs is None:
            where = "here" if theirs is None else "in the file"
            lines.append(f"{name}: only {where}")
            continue
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                lines.append(
                    f"{name}: {key} is {ours.get(key)}, "
                    f"expected {theirs.get(key)}"
                )
    return lines


def _add_options(options: programs.Flags) -> None:
    options.add(
        "case",
        "<NAME>: a case; may be repeated; default all",
        [],
        enum_values=names(),
        quick=["digits"],
    )
    options.add("output", "<FILE>: where the JSON goes, too")
    options.add("against", "<FILE>: an earlier output to compare with")


def _run_all(options: programs.Options) -> int:
    """Trains, prints one line of JSON, and compares.

    Returns the exit code: 1 if something differs from `--against`.
    """
    wanted, expected = options.case or names(), None
    if options.against:
        try:
            path = pathlib.Path(options.against)
            expected = json.loads(path.read_bytes())["cases"]
        except (KeyError, OSError, ValueError) as error:
            raise programs.UsageError(str(error)) from error
    lines = []
    with measure.one_json_line() as record:
        found, skipped = run(wanted)
        record.update(
            benchmark="same_numbers",
            cases=found,
            skipped=skipped,
            machine=measure.machine(),
        )
        if expected is not None:
            left_out = [n for n in names() if n not in wanted]
            lines = differences(found, expected, left_out=[*left_out, *skipped])
            record.update(against=options.against, different=lines)
    if options.output:
        text = json.dumps(record, indent=1) + "\n"
        pathlib.Path(options.output).write_text(text, "utf-8")
    for line in lines:
        measure.log(f"different: {line}")
    return 1 if lines else 0


PROGRAM = programs.Program(
    name="python -m benchmarks.same_numbers",
    about=__doc__,
    define=_add_options,
    run=_run_all,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
