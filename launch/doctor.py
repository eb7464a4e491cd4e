"""Finds out before the first step why a recipe would fail.

python -m launch.doctor
python -m launch.doctor --recipe=NAME [--override=FIELD=VALUE]...

Run as each task will be run, with TF_CONFIG and TFDISTILL_* set.
"""

import dataclasses
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import tfdistill
from launch import recipe_options
from launch import recipes
from tfdistill.doctor import check
from tfdistill.doctor import command
from tfdistill.doctor import examination
from tfdistill.system import programs

_SLOW_DATA = (
    "Look at where the data lie: a mount that hangs, or a shuffle buffer that "
    "takes long to fill. What is prepared once, such as a vocabulary, takes "
    "minutes the first time: raise --limit_secs."
)


class RecipeChecks:
    """Makes the checks of one recipe; they share its data and its student."""

    def __init__(
        self, recipe: recipes.Recipe, *, limit_secs: float = 60.0
    ) -> None:
        """Loads nothing yet."""
        self._recipe = recipe
        self._limit_secs = limit_secs
        self._student: Any = None
        self._spec: Any = None

    def __call__(self, cluster: tfdistill.Cluster) -> Iterable[check.Check]:
        """Returns the checks."""
        yield check.Check(
            examination.DATA,
            lambda: self._data(cluster),
            self._limit_secs,
            _SLOW_DATA,
        )
        yield examination.teachers_check(
            cluster,
            self._limit_secs,
            peers=lambda: cluster.peers,
            student=self._described,
        )

    def _data(self, cluster: tfdistill.Cluster) -> Iterator[check.Result]:
        """Reads one batch of each data set, and predicts with the student."""
        # Only here: wrong options are reported before seconds of imports.
        import keras

        from launch import task
        from tfdistill import data_checks

        name = examination.DATA
        try:
            workload = self._recipe.workload()
            keras.config.set_dtype_policy(workload.dtype_policy)
            datasets = task.open_data(workload, cluster)
            student = task.make_student(workload)
        except (data_checks.DataError, recipes.OptionsError) as error:
            yield check.failed(
                name,
                str(error),
                "Correct the recipe's arguments (--override=path=...); the "
                "files must be the same on every task's host.",
            )
            return
        for kind, dataset in zip(
            ("training", "validation"), datasets, strict=True
        ):
            result = _first_batch(kind, dataset, student)
            yield result
            if result.status == check.FAILED:
                return
        self._student, self._spec = student, datasets[0].element_spec[0]

    def _described(self) -> Any:
        """Returns the student, as teachers must agree with it."""
        if self._student is None:
            return None  # The data were at fault: its own export must do.
        from tfdistill.exports import student_graph

        return student_graph.StudentGraph(self._student, self._spec)


def _first_batch(kind: str, dataset: Any, student: Any) -> check.Result:
    """Reads a batch, and has the student predict it."""
    import numpy as np
    import tensorflow as tf

    name = examination.DATA
    remedy = (
        "Give the data and the model the same sizes, and look at the first "
        "rows of the files."
    )
    try:
        batch = next(iter(dataset))
        inputs, labels = batch[0], batch[1]
        outputs = student(inputs, training=False)
    except StopIteration:
        return check.failed(
            name,
            f"the {kind} data have no batch for this task",
            "Lower batch_size or the number of groups and "
            "workers, or give it more data.",
        )
    except (OSError, TypeError, ValueError, tf.errors.OpError) as error:
        return check.failed(name, f"the {kind} data: {error}", remedy)
    shapes = tf.nest.map_structure(lambda t: tuple(t.shape), inputs)
    seen = (
        f"{kind}: the first batch has inputs {shapes}, labels "
        f"{tuple(labels.shape)}; the student predicts {tuple(outputs.shape)}"
    )
    floats = [
        leaf.numpy()
        for leaf in tf.nest.flatten((inputs, labels, outputs))
        if leaf.dtype.is_floating
    ]
    if not all(np.isfinite(np.asarray(f, np.float64)).all() for f in floats):
        return check.failed(name, f"{seen}; not all values are finite", remedy)
    return check.ok(name, seen)


def _add_options(options: programs.Flags) -> None:
    command.add_options(options)
    recipe_options.add(
        options,
        what="a recipe, or the config.json of a run: its data are read, and "
        "teachers compared with its student",
    )


def _run(options: programs.Options) -> int:
    try:
        recipe = recipe_options.recipe(options)
    except ValueError as error:
        raise programs.UsageError(str(error)) from error
    more: examination.More | None = None
    if recipe is not None:
        more = RecipeChecks(recipe, limit_secs=options.limit_secs)
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
