"""Writes a fixed teacher's soft targets of a recipe's training examples.

tfdistill label --teacher=SAVED_MODEL --recipe=NAME --output=DIR

Groups that train with the same recipe read them by `--method=labels
--override=method.directory=DIR`. tfdistill.labels.write does the same for any
data set.
"""

import time

from absl import logging

import tfdistill
from tfdistill.recipes import recipes
from tfdistill.system import programs

_REPORT_SECS = 10.0
_NOTES = """\
The examples are the ones that the group will train on, in the same order (set
by the seed of the recipe's data), for the recipe's steps or for --num-steps.
Pass the same recipe and overrides to the training. A directory of labels is
complete once it contains labels.json.

Exit code: 0 if the labels were written, 1 if not, 2 for wrong options.
"""


def _add_options(options: programs.Program) -> None:
    add = options.add
    add("teacher", "<DIR>: a SavedModel", required=True)
    add("recipe", "<NAME>: a recipe, or a config.json", required=True)
    add("output", "<DIR>: new directory for the labels", required=True)
    recipes.add_override(options, "the recipe, such as batch_size=64")
    add("group", "group whose examples are labeled", 0)
    add("num_groups", "number of groups in the training", 1)
    add(
        "num_steps",
        "<N>: steps to label; default: all steps of the recipe",
        kind=programs.count,
    )
    add("top_k", "keep only this many of the likeliest classes", kind=int)
    add(
        "dtype",
        "dtype of the labels that are kept",
        "float32",
        enum_values=["float32", "float16"],
    )
    add("trust_graph", "load a graph even if it isn't known to be safe", False)


def _run(options: programs.Options) -> int:
    with programs.usage_errors():
        recipe = recipes.override(recipes.get(options.recipe), options.override)
        cluster = tfdistill.Cluster(
            group=options.group, num_groups=options.num_groups
        )
    # Only here: wrong options are reported before seconds of imports.
    from tfdistill import labels
    from tfdistill.recipes import task

    said = time.monotonic()

    def report(done: int) -> None:
        nonlocal said
        if time.monotonic() - said >= _REPORT_SECS:
            said = time.monotonic()
            logging.info("%s of %s examples", f"{done:,}", f"{total:,}")

    workload = recipe.workload()
    steps = options.num_steps or workload.num_steps
    total = steps * workload.batch_size
    num_rows = labels.write(
        # The batches that the group's chief will train on.
        task.open_data(workload, cluster)[0].take(steps),
        options.teacher,
        options.output,
        form=labels.Form(top_k=options.top_k, dtype=options.dtype),
        trust=options.trust_graph,
        progress=report,
    )
    print(f"{options.output}: labels of {num_rows:,} examples")
    return 0


PROGRAM = programs.Program(
    name="tfdistill label",
    usage="--teacher=DIR --recipe=NAME --output=DIR [options]",
    about="Writes a fixed teacher's soft targets for a recipe's examples.",
    notes=_NOTES,
    define=_add_options,
    run=_run,
    reports=(OSError, ValueError),
)
main = PROGRAM.main
