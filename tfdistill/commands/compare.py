"""Does codistillation help this model? Runs it against its controls.

tfdistill compare my_train.py
tfdistill compare my_workload.py --methods=independent,own_past --trials=4

The same command resumes where it was stopped, and adds more methods and trials
to the same report.
"""

import difflib
import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any

from tfdistill.cluster import method
from tfdistill.commands import keras_script
from tfdistill.commands import recipe_options
from tfdistill.commands import run as run_lib
from tfdistill.comparison import trials
from tfdistill.launcher import fields
from tfdistill.launcher import parent
from tfdistill.recipes import recipes
from tfdistill.system import programs

_METHODS = "independent,codistill_shared"
# For an ordinary script, whose groups read the same batches.
_METHODS_OF_SCRIPTS = f"{_METHODS},predictions"
# For a user's method: what it changes, and by what.
_BASE = "codistill_shared"
_OF_OWN = ("distillation_loss", "distillation_weight", "every_steps")
# Where comparisons without --workdir go, and the link to the newest of them.
_HERE, _LAST = "comparisons", "last_comparison"
EXIT_INTERRUPTED = 130


def _notes() -> str:
    return (
        recipe_options.listing("methods", trials.DESCRIPTIONS)
        + "\n\nmethods for a training script:\n  "
        f"{', '.join(method.METHODS)}, ensemble"
        + f"\n\nfields for --sweep:\n  {trials.NUM_GROUPS}, exchange_interval, "
        "and each argument of the recipe; burn_in for\n  a recipe with the "
        "argument burn_in_steps; for a script only\n  exchange_interval and "
        f"{trials.NUM_GROUPS}"
    )


def _add_options(options: programs.Program) -> None:
    options.section("what is compared")
    _add_what(options.add)
    recipes.add_override(options, "the recipe for all methods")
    fields.add(options, trials.Setup)
    keras_script.add(options)
    options.add(
        "jobs",
        "<N>: runs at a time; more than one distorts wall times",
        1,
        kind=programs.count,
    )
    options.add(
        "report_only", "train nothing; report the finished trials", False
    )


def _add_what(add: Callable[..., None]) -> None:
    add(
        "held_out",
        "<NAME>: FILE.py is a script that imports tfdistill, whose callback "
        "HeldOutPredictions with this name writes the predictions to compare; "
        "default: what an ordinary script predicts for its validation data",
    )
    add(
        "recipe",
        "<NAME>: instead of FILE.py: a recipe, a module with a function "
        "workload, or the config.json of an earlier run",
    )
    add(
        "workdir",
        f"<DIR>: directory for all runs and the report; default: ./{_HERE}/1, "
        f"./{_HERE}/2 and so on, or the one that has the same settings",
    )
    add(
        "methods",
        f"<NAME,...>: default {_METHODS}, and for an ordinary script "
        "predictions",
    )
    add(
        "method",
        "<NAME:OPTION=VALUE,...>: a method of your own for an ordinary script, "
        "such as heavy:distillation_weight=2,every_steps=10, beside --methods; "
        f"options: {', '.join(_OF_OWN)}, and of=METHOD, which they change "
        f"(default {_BASE})",
        [],
    )
    add(
        "sweep",
        "<[METHOD:]FIELD=V,V,...>: run a method (codistill if you name none) "
        "once for each value of a field, such as exchange_interval=50,250,1000",
        [],
    )
    add(
        "trials",
        "<N>: retrains of each method, with different seeds; default "
        f"{trials.LEAST_TRIALS}, the fewest that allow a verdict",
        trials.LEAST_TRIALS,
        kind=programs.count,
    )
    add(
        "tune",
        "<FIELD=V,V,...>: first choose this field's value for each method, by "
        "the mean final loss of --tune-trials runs with other seeds",
    )
    add(
        "tune_trials",
        "<N>: retrains with each value of --tune",
        2,
        kind=programs.count,
    )
    add(
        "tune_override",
        "<FIELD=VALUE>: change one field of the recipe for --tune, which needs "
        "validation data other than the report's",
        [],
    )
    add(
        "target",
        "<LOSS>: count the steps to this validation log loss: a number, or "
        "final (default) or best for the mean final or best loss of "
        "independent",
        "final",
    )


def _compared(options: programs.Options) -> recipes.Recipe:
    """Returns what is compared: a recipe, a file of one, or a script."""
    file, name = options.file, options.recipe
    if (file is None) == (name is None):
        received = "neither" if file is None else f"{file} and {name}"
        raise ValueError(
            "expected a Keras script, a file with a function `workload`, or "
            f"--recipe=NAME; received {received}"
        )
    is_ordinary = file is not None and not keras_script.imports_tfdistill(file)
    if options.held_out is None and not is_ordinary:
        if options.command:
            raise ValueError(
                "arguments after -- are for a training script, which needs "
                f"--held-out=NAME; received {' '.join(options.command)}"
            )
        return recipes.get(name or file)
    from tfdistill.comparison import scripts

    return scripts.Script.of(
        file or name,
        held_out=options.held_out,
        command=options.command,
        options=keras_script.as_options(options),
    )


def _workdir(options: programs.Options, setup: trials.Setup) -> pathlib.Path:
    """Returns the directory: an earlier one if the same is compared there."""
    from tfdistill.comparison import experiment

    if options.workdir:
        return pathlib.Path(options.workdir).absolute()
    place = pathlib.Path(_HERE).absolute()
    last = (place.parent / _LAST).resolve()
    for each in sorted(place.glob("*")):
        if experiment.holds(each, setup, _tuning(options)):
            run_lib.link(each, _LAST)
            return each
    if options.report_only:
        raise ValueError(
            "--report-only found no comparison with these options in "
            f"{place}. Pass its directory: --workdir=DIR"
        )
    if experiment.is_unused(last):
        return last
    return run_lib.new_directory(place, _LAST)


def _setup(options: programs.Options) -> trials.Setup:
    from tfdistill.comparison import collect

    recipe = recipes.override(_compared(options), options.override)
    collect.check(options.target)
    return trials.Setup(recipe=recipe, **fields.chosen(trials.Setup, options))


def _variants(
    options: programs.Options, recipe: recipes.Recipe
) -> list[trials.Variant]:
    named: list[trials.Variant] = []
    # --report-only adds no method that was not asked for.
    if options.methods is not None:
        named = trials.parse_methods(options.methods)
    elif not options.report_only:
        is_ordinary = recipe.arguments.get("held_out", "") is None
        named = trials.parse_methods(
            _METHODS_OF_SCRIPTS
            if is_ordinary and not options.ps_per_group
            else _METHODS
        )
    named += map(_own_method, options.method)
    swept = [v for text in options.sweep for v in trials.parse_sweep(text)]
    return trials.unique([*named, *swept])


def _own_method(text: str) -> trials.Variant:
    """Returns the user's method that an option describes."""
    name, _, rest = text.partition(":")
    parts = [part.partition("=") for part in trials.split(rest)]
    if not name.isidentifier() or not all(p[0] and p[2] for p in parts):
        raise ValueError(
            "--method must be NAME:OPTION=VALUE,..., such as heavy:"
            f"distillation_weight=2,every_steps=10; received {text!r}."
        )
    if name in trials.DESCRIPTIONS:
        raise ValueError(
            f"--method must have a new name; received {name!r}, which "
            f"is a method already. To change it: my_{name}:of={name},..."
        )
    given = {option.replace("-", "_"): value for option, _, value in parts}
    base = given.pop("of", _BASE)
    taught = [
        n for n, m in method.METHODS.items() if m.teachers != method.NOBODY
    ]
    if base not in taught:
        raise ValueError(
            "--method must change a method with teachers, by of= one of "
            f"{', '.join(taught)}; received of={base}."
        )
    for option in given:
        if option not in _OF_OWN:
            near = difflib.get_close_matches(option, (*_OF_OWN, "of"), n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"--method has no option {option!r}.{hint} Options: "
                f"{', '.join(_OF_OWN)}, of."
            )
    # Which says what is wrong with a value.
    keras_script.PROGRAM.named("tfdistill compare --method").parse(
        [*(f"--{programs.dashed(n)}={v}" for n, v in given.items()), "x.py"]
    )
    options = ",".join(f"{option}={value}" for option, value in given.items())
    return trials.Variant(method=base, label=name, options=options)


def _tuning(options: programs.Options) -> trials.Tuning | None:
    if options.tune is None:
        if options.tune_override:
            raise ValueError(
                "--tune-override needs --tune; received none. Add "
                "--tune=FIELD=VALUE,VALUE,..., or leave it out."
            )
        return None
    return trials.Tuning.parse(
        options.tune,
        overrides=options.tune_override,
        num_trials=options.tune_trials,
    )


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _run(options: programs.Options) -> int:
    """Returns 0 if all runs are done and reported, 1 if some failed."""
    # Only here: --help is answered without NumPy.
    from tfdistill.comparison import experiment
    from tfdistill.comparison import markdown

    with programs.usage_errors():
        setup = _setup(options)
        planned: dict[str, Any] = {
            "setup": setup,
            "variants": _variants(options, setup.recipe),
            "num_trials": 0 if options.report_only else options.trials,
            "tune": _tuning(options),
        }
        if not options.workdir:  # No directory is made for wrong options.
            experiment.Experiment(pathlib.Path(_HERE, "0"), **planned)
        workdir = _workdir(options, setup)
        compared = experiment.Experiment(workdir, **planned)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    _say(f"comparison in {compared.workdir}")
    failures: dict[str, str] = {}
    earlier = signal.signal(signal.SIGTERM, _interrupt)
    try:
        if not options.report_only:
            with parent.keep():  # One for all trials.
                failures = compared.run(options.jobs, say=_say)
        report = compared.report(options.target, failures, jobs=options.jobs)
    except KeyboardInterrupt:
        _say("interrupted; run the same command again to resume")
        return EXIT_INTERRUPTED
    except ValueError as error:
        if not failures:
            raise
        _say(f"no report: {error}")
        return programs.EXIT_FAILURE
    finally:
        signal.signal(signal.SIGTERM, earlier)
    print(f"\n{markdown.first_screen(report)}\n")
    print(f"report  {compared.workdir / experiment.MARKDOWN}")
    return programs.EXIT_FAILURE if failures else 0


def _say(text: str) -> None:
    print(text, flush=True)


PROGRAM = programs.Program(
    name="tfdistill compare",
    usage="my_train.py [options] [-- ARGUMENT ...]\n"
    "my_train.py --held-out=NAME [options] [-- ARGUMENT ...]\n"
    "my_workload.py [options]\n"
    "--recipe=NAME [options]",
    about="Trains a model with several methods, several times each with "
    "different seeds,\nand reports quality, churn and cost in report.md, "
    "report.json and plots.",
    notes=_notes(),
    define=_add_options,
    run=_run,
    takes_file="a training script, or a file with a function workload",
    needs=("matplotlib", "scipy"),
    reports=(OSError, ValueError),
)
main = PROGRAM.main
