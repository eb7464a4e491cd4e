"""Runs an ordinary Keras script on workers, on servers or in groups.

python -m tfdistill train.py --epochs=3

For each task of any launcher. Imports neither TensorFlow nor Keras: the script
does, and is helped from then on.
"""

import ast
import builtins
import functools
import os
import pathlib
import sys
import traceback
from collections.abc import Callable
from collections.abc import Sequence
from types import ModuleType
from types import TracebackType
from typing import Any

from tfdistill.cluster import ending
from tfdistill.cluster import method
from tfdistill.cluster import signs
from tfdistill.system import programs

_HELPED = "tensorflow", "keras"
# What a sentence of this package says better than lines of code below it.
_EXPLAINED = ValueError, RuntimeError
_NOTES = """\
The script is run with this Python, as `python SCRIPT.py ARGUMENT ...` would be.
Once it imports Keras or TensorFlow, `tfdistill.patch_keras()` is called: models
are created under the strategy of TF_CONFIG, and their own `fit`, `evaluate` and
`predict` train on all of its tasks. Without TF_CONFIG and TFDISTILL_* it trains
as Keras does. A script that imports tfdistill chooses for itself.
"""


def add(options: programs.Program) -> None:
    """Adds the options of how an ordinary script is trained."""
    options.section("ordinary Keras scripts, which do not import tfdistill")
    options.add(
        "teachers",
        "<WHOM>: in a run of several groups, learn from peers (the other "
        "groups), own-past, predictions or none; default peers",
        enum_values=method.TEACHERS,
    )
    options.add(
        "distillation_loss",
        "<WHAT>: what groups agree on: classes, binary or values; "
        "default: what fits the loss of `compile`",
        enum_values=method.DISTILLATION_LOSSES,
    )
    options.add(
        "distillation_weight",
        "<X>: weight of the distillation loss; default: found in training",
        kind=float,
    )
    options.add(
        "every_steps",
        "<N>: steps between the versions that groups publish; default auto",
        kind=int,
    )
    options.add("no_patch", "leave the script's training to Keras", False)


def _given(options: programs.Options) -> dict[str, Any]:
    names = "teachers", "distillation_loss", "distillation_weight"
    found = {x: getattr(options, x) for x in (*names, "every_steps")}
    return {name: value for name, value in found.items() if value is not None}


def as_options(options: programs.Options) -> list[str]:
    """Returns the options of `add` that were given, as they are written."""
    return [f"--{programs.dashed(n)}={v}" for n, v in _given(options).items()]


def imports_tfdistill(script: str | os.PathLike[str]) -> bool:
    """Whether a script imports tfdistill itself, or is none that Python reads.

    Example:
        >>> imports_tfdistill("/no/script.py")
        True
    """
    try:
        tree = ast.parse(pathlib.Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return True  # Python says what is wrong.
    names = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
    ]
    return any(name.partition(".")[0] == "tfdistill" for name in names)


def command(
    options: programs.Options, script: Sequence[str], *, python: str
) -> list[str]:
    """Returns how a task runs a script, the path and its arguments."""
    given = _given(options)
    is_left = options.no_patch or imports_tfdistill(script[0])
    if is_left and given:
        name = programs.dashed(next(iter(given)))
        why = f"{script[0]} imports tfdistill, and chooses in its code"
        if options.no_patch:
            why = "--no-patch leaves the script to Keras"
        raise ValueError(
            f"--{name} is for scripts that tfdistill trains as they stand; "
            f"{why}. Leave out --{name}."
        )
    if is_left:
        return [python, *script]
    return [
        *(python, "-m", "tfdistill"),
        *as_options(options),
        *script,
    ]


def run(options: programs.Options) -> int:
    """Becomes the script; returns at its end."""
    if options.command[:1] != [programs.PYTHON]:
        raise programs.UsageError(
            "expected a script such as train.py; received "
            f"{' '.join(options.command) or 'none'}"
        )
    script = options.command[1]
    if not imports_tfdistill(script) and not options.no_patch:
        _at_first_import(lambda: _patch(_given(options)))
    sys.argv[:] = options.command[1:]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    try:
        text = pathlib.Path(script).read_bytes()
    except OSError as error:
        raise programs.UsageError(str(error)) from error
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(
        __builtins__=builtins,
        __file__=os.path.join(os.getcwd(), script),
        __spec__=None,
    )

    sys.excepthook = functools.partial(_report, script)
    code = compile(text, script, "exec", dont_inherit=True)
    try:
        exec(code, vars(main))
    except Exception as error:
        if not (lost := ending.lost_task(error)):
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        print(
            f"tfdistill: lost another task of the group: {lost}",
            file=sys.stderr,
        )
        return signs.EXIT_RETRY
    return 0


def _report(script: str, _: Any, error: BaseException, trace: Any) -> None:
    """Prints what ended a script as its own Python would, without our lines."""
    traces: list[TracebackType] = []
    while trace:
        traces.append(trace)
        trace = trace.tb_next
    while traces and traces[0].tb_frame.f_code.co_filename != script:
        del traces[0]
    is_explained = isinstance(error, _EXPLAINED) and _is_of(
        traces[-1:], "tfdistill"
    )
    while is_explained and _is_of(traces[-1:], "tfdistill", *_HELPED):
        del traces[-1]
    if is_explained:
        traces[-1].tb_next = None
    error = error.with_traceback(traces[0] if traces else None)
    traceback.print_exception(error, chain=not is_explained)


def _is_of(traces: Sequence[TracebackType], *packages: str) -> bool:
    """Whether code of these packages runs there."""
    names = [each.tb_frame.f_globals.get("__name__", "") for each in traces]
    return any(name.partition(".")[0] in packages for name in names)


def _patch(given: dict[str, Any]) -> None:
    from tfdistill import patch

    patch.patch_keras(**given)


def _at_first_import(act: Callable[[], None]) -> None:
    """Acts once the script, or a module of it, has imported Keras.

    Or TensorFlow; so it acts before the script creates anything.
    """
    of_statement = builtins.__import__
    done: list[bool] = []

    def import_(name: str, *args: Any, **kwargs: Any) -> ModuleType:
        found = of_statement(name, *args, **kwargs)
        is_helped = name.partition(".")[0] in _HELPED
        if is_helped and not done and not _is_being_imported():
            done.append(True)
            # A launcher's own watch may have taken its place by now, and gone.
            if builtins.__import__ is import_:
                builtins.__import__ = of_statement
            act()
        return found

    builtins.__import__ = import_


def _is_being_imported() -> bool:
    """Whether this statement is one of Keras' or TensorFlow's own."""
    specs = [sys.modules[n].__spec__ for n in _HELPED if n in sys.modules]
    return any(getattr(spec, "_initializing", False) for spec in specs)


PROGRAM = programs.Program(
    name="python -m tfdistill",
    usage="[options] SCRIPT.py [ARGUMENT ...]",
    about="Trains an ordinary Keras script as the run of its task asks.",
    notes=_NOTES,
    define=add,
    run=run,
    takes_command=True,
)
