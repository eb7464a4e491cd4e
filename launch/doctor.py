"""Finds out before the first step why a recipe would fail.

python -m launch.doctor
python -m launch.doctor --recipe=NAME [--override=FIELD=VALUE]...

Run as each task will be run, with TF_CONFIG and TFDISTILL_* set.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import tfdistill
from launch import recipe_options
from launch import recipes
from tfdistill.doctor import checks
from tfdistill.doctor import command
from tfdistill.system import programs

_REMEDY = (
    "Correct the recipe's arguments (--override=path=...): data and model must "
    "have the same sizes, and the files be the same on every task's host. What "
    "is prepared once, such as a vocabulary, takes minutes the first time: "
    "raise --limit_secs."
)


def _check_of(recipe: recipes.Recipe, limit_secs: float) -> command.More:
    return lambda cluster: checks.Check(
        command.DATA, lambda: _data(recipe, cluster), limit_secs, _REMEDY
    )


def _data(
    recipe: recipes.Recipe, cluster: tfdistill.Cluster
) -> Iterator[checks.Result]:
    """Reads a batch of each data set, and has the student predict it."""
    # Only here: wrong options are reported before seconds of imports.
    import keras

    from launch import task

    workload = recipe.workload()
    keras.config.set_dtype_policy(workload.dtype_policy)
    train, validation = task.open_data(workload, cluster)
    model = task.make_student(workload)
    for kind, dataset in (("training", train), ("validation", validation)):
        yield checks.ok(command.DATA, f"{kind}: {_first_batch(dataset, model)}")


def _first_batch(dataset: Any, student: Any) -> str:
    import tensorflow as tf

    for inputs, labels, *_ in dataset:
        outputs = student(inputs, training=False)
        for leaf in tf.nest.flatten((inputs, labels, outputs)):
            if leaf.dtype.is_floating:
                tf.debugging.assert_all_finite(leaf, "not all are finite")
        shapes = tf.nest.map_structure(lambda t: tuple(t.shape), inputs)
        return (
            f"the first batch has inputs {shapes}, labels "
            f"{tuple(labels.shape)}; the student predicts "
            f"{tuple(outputs.shape)}"
        )
    raise ValueError(
        "The data have no batch for this task: lower batch_size or the number "
        "of groups and workers, or give it more data."
    )


def _add_options(options: programs.Flags) -> None:
    command.add_options(options)
    recipe_options.add(
        options,
        what="a recipe, or the config.json of a run: its data are read",
    )


def _run(options: programs.Options) -> int:
    try:
        recipe = recipe_options.recipe(options)
    except ValueError as error:
        raise programs.UsageError(str(error)) from error
    more = _check_of(recipe, options.limit_secs) if recipe else None
    return command.examine(options, more=more)


PROGRAM = dataclasses.replace(
    command.PROGRAM,
    name="python -m launch.doctor",
    define=_add_options,
    run=_run,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
