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
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
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
_GOLDEN, _CLICKS = "golden", "criteo_small"
# By case: the options of launch.local, or none for launch.train, and of both.
_RECIPES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "digits": ((), ["--recipe=digits"]),
    "digits_small": (
        (),
        [
            "--recipe=digits",
            *("--override=num_steps=200", "--override=seed=5"),
            *("--override=learning_rate=0.01", "--override=hidden_sizes=[32]"),
            "--override=batch_size=50",
        ],
    ),
    "digits_two_workers": (
        ["--workers_per_group=2"],
        ["--recipe=digits", "--override=num_steps=200"],
    ),
    _CLICKS: (
        ["--workers_per_group=1", "--ps_per_group=1"],
        ["--recipe=criteo_small"],
    ),
}
NAMES = (*_RECIPES, _GOLDEN)
Found = dict[str, Any]


def _run(command: Sequence[str], workdir: pathlib.Path) -> None:
    """Runs a module to its end; a RuntimeError if it fails."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "TFDISTILL_DATA"
        or not name.startswith(("TFDISTILL_", "TF_CONFIG"))
    }
    workdir.mkdir(parents=True, exist_ok=True)
    # A session of its own, whose processes all end with it.
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=_ROOT,
        env={**kept, **_FIXED_ENV, "PYTHONPATH": str(_ROOT)},
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
        raise RuntimeError(
            f"{' '.join(command)} must end with 0; received "
            f"{process.returncode}. Its last output:\n{output[-3000:]}"
        )


def _run_recipe(name: str, workdir: pathlib.Path) -> Found:
    topology, options = _RECIPES[name]
    program = ["launch.train"]
    if topology:
        program = ["launch.local", "--stuck_secs=0", *topology]
    _run([*program, f"--workdir={workdir}", *options], workdir)
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

    from tfdistill import layers  # noqa: F401  # Keras finds them then.

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


def differences(
    found: Mapping[str, Found], expected: Mapping[str, Found]
) -> list[str]:
    """Names what differs, in a bit, in the cases that were run.

    Args:
        found: Results by case.
        expected: Results by case, of an earlier run.

    Returns:
        A line for each difference.
    """
    lines = []
    for name, ours in found.items():
        theirs = expected.get(name, {})
        lines += [
            f"{name}: {key} is {ours.get(key)}, expected {theirs.get(key)}"
            for key in sorted(ours.keys() | theirs.keys())
            if ours.get(key) != theirs.get(key)
        ]
    return lines


def _add_options(options: programs.Program) -> None:
    options.add(
        "case",
        "<NAME>: a case; may be repeated; default all; criteo_small is left "
        "out without its data",
        [],
        enum_values=list(NAMES),
        quick=["digits"],
    )
    options.add("output", "<FILE>: where the JSON goes, too")
    options.add("against", "<FILE>: an earlier output to compare with")


def _run_all(options: programs.Options) -> int:
    """Trains, prints one line of JSON, and compares.

    Returns the exit code: 1 if something differs from `--against`.
    """
    expected = None
    if options.against:
        try:
            path = pathlib.Path(options.against)
            expected = json.loads(path.read_bytes())["cases"]
        except (KeyError, OSError, ValueError) as error:
            raise programs.UsageError(str(error)) from error
    data = os.environ.get("TFDISTILL_DATA") or _ROOT.parent / "shared" / "data"
    clicks = pathlib.Path(data, "criteo")
    lines, found = [], dict[str, Found]()
    with (
        measure.one_json_line() as record,
        tempfile.TemporaryDirectory(prefix="tfdistill-same-") as directory,
    ):
        for name in options.case or NAMES:
            if name == _CLICKS and not clicks.is_dir():
                measure.log(f"{name}: skipped, there is no {clicks}")
                continue
            workdir = pathlib.Path(directory, name)
            is_golden = name == _GOLDEN
            found[name] = (
                _run_golden(workdir)
                if is_golden
                else _run_recipe(name, workdir)
            )
            measure.log(f"{name}: done")
        record.update(
            benchmark="same_numbers", cases=found, machine=measure.machine()
        )
        if expected is not None:
            lines = differences(found, expected)
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

if __name__ == "__main__":
    PROGRAM.start()
