"""Finds out before the first step why a run would fail.

tfdistill doctor
tfdistill doctor --recipe=NAME [--override=FIELD=VALUE]...

Run as each task will be run, with TF_CONFIG and TFDISTILL_* set.
"""

import collections
import os
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

from tfdistill.cluster import identity
from tfdistill.commands import recipe_options
from tfdistill.doctor import checks
from tfdistill.recipes import recipes
from tfdistill.system import programs

_REMEDY = (
    "Correct the recipe's arguments (--override=path=...): the sizes of data "
    "and model must match, and every task's host needs the same files. "
    "One-time preparation, such as of a vocabulary, can take minutes: raise "
    "--limit-secs."
)
DATA = "data"
_SLOW_STORAGE = (
    "The storage does not answer: check the mount (mount, nfsstat, dmesg) and "
    "the network. If it is just slow, raise --limit-secs."
)


def _data(
    recipe: recipes.Recipe, cluster: identity.Cluster
) -> Iterator[checks.Result]:
    """Reads a batch of each data set, and has the student predict it."""
    # Only here: wrong options are reported before seconds of imports.
    import keras

    from tfdistill.recipes import task

    workload = recipe.workload()
    keras.config.set_dtype_policy(workload.dtype_policy)
    train, validation = task.open_data(workload, cluster)
    model = task.make_student(workload)
    for kind, dataset in (("training", train), ("validation", validation)):
        yield checks.ok(DATA, f"{kind}: {_first_batch(dataset, model)}")


def _first_batch(dataset: Iterable[Any], student: Callable[..., Any]) -> str:
    import tensorflow as tf

    for inputs, labels, *_ in dataset:
        outputs = student(inputs, training=False)
        for leaf in tf.nest.flatten((inputs, labels, outputs)):
            if leaf.dtype.is_floating:
                tf.debugging.assert_all_finite(
                    leaf, "not all values are finite"
                )
        shapes = tf.nest.map_structure(lambda t: tuple(t.shape), inputs)
        return (
            f"the first batch has inputs {shapes}, labels "
            f"{tuple(labels.shape)}; the student predicts "
            f"{tuple(outputs.shape)}"
        )
    raise ValueError(
        "There is no batch for this task: lower batch_size or the number of "
        "groups and workers, or use more data."
    )


def _asked_for(
    options: programs.Options, recipe: recipes.Recipe | None
) -> Iterator[checks.Check]:
    limit_secs = options.limit_secs
    environ = dict(os.environ)
    if options.workdir:
        environ["TFDISTILL_WORKDIR"] = options.workdir
    cluster, results = checks.cluster_of(environ)
    yield checks.Check(checks.ENVIRONMENT, lambda: results, limit_secs)
    if cluster is None:
        return
    yield checks.Check(
        checks.REACH,
        lambda: checks.of_group(cluster, wait_secs=options.wait_secs),
        # An address that does not answer takes its time, too.
        options.wait_secs + 30.0,
        "Check the network and the name service.",
    )
    yield checks.Check(
        checks.EXCHANGE,
        lambda: checks.of_storage(cluster),
        limit_secs,
        _SLOW_STORAGE,
    )
    yield checks.Check(
        checks.WORKERS, lambda: checks.of_workers(cluster), limit_secs
    )
    if options.no_tensorflow:
        return
    yield checks.Check(checks.TENSORFLOW, checks.of_tensorflow, limit_secs)
    if recipe is not None:
        yield checks.Check(
            DATA, lambda: _data(recipe, cluster), limit_secs, _REMEDY
        )
    yield checks.Check(
        checks.TEACHERS, lambda: _teachers(cluster), limit_secs, _SLOW_STORAGE
    )


def _teachers(cluster: identity.Cluster) -> Iterable[checks.Result]:
    # Only here: they import TensorFlow.
    from tfdistill.doctor import teachers
    from tfdistill.exchange import publisher

    return teachers.examine(
        publisher.Exchange(cluster.exchange),
        group=cluster.group,
        peers=cluster.peers,
    )


_NOTES = """\
Run it as each task will run: on the same host, as the same user, with the same
TF_CONFIG and TFDISTILL_* variables. Run it for all tasks of a group at the same
time, so that they find each other. It trains nothing, and removes everything
that it writes.

Exit code: 0 if no check has failed, 1 if one has, 2 for wrong options.
"""


def _add_options(options: programs.Program) -> None:
    add = options.add
    add(
        "no_tensorflow",
        "skip the checks that need TensorFlow: teachers and data",
        False,
    )
    for name, text in (
        ("wait_secs", "longest wait for the other tasks"),
        ("limit_secs", "longest time for each other check"),
    ):
        add(name, text, 60.0, kind=programs.positive)
    add("workdir", "<DIR>: directory of the run; default: TFDISTILL_WORKDIR")
    recipe_options.add(
        options,
        what="a recipe, or the config.json of a run, to check its data",
    )


def _run(options: programs.Options) -> int:
    with programs.usage_errors():
        recipe = recipe_options.recipe(options)
    # TensorFlow's messages at its start aren't findings.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    counts: collections.Counter[str] = collections.Counter()
    for asked in _asked_for(options, recipe):
        for result in checks.run(asked):
            checks.show(result)
            counts[result.status] += 1
    names = checks.OK, checks.WARNING, checks.FAILED, checks.SKIPPED
    print(", ".join(f"{counts[name]} {name}" for name in names))
    return checks.EXIT_FAILED if counts[checks.FAILED] else 0


PROGRAM = programs.Program(
    name="tfdistill doctor",
    about="Checks a setup for problems before a run.",
    notes=_NOTES,
    define=_add_options,
    run=_run,
)
main = PROGRAM.main
