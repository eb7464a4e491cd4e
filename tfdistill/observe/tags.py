"""The names, units and meanings of what TensorBoard shows of a group."""

import re
from collections.abc import Sequence

from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import summary as custom_scalars

from tfdistill.system import run_files

# Of each tag its unit and what it says. `<teacher>` is `group_1`, or
# `saved_model_0` for the first fixed one; `<metric>` is a compiled metric.
SCALARS: dict[str, tuple[str, str]] = {
    "codistillation/task_loss": (
        "as compiled",
        "mean of the steps since the point before, or since the epoch began",
    ),
    "codistillation/distillation_loss": (
        "as compiled",
        "likewise, not yet weighted; 0 without a teacher",
    ),
    "codistillation/loss": (
        "as compiled",
        "likewise: task loss and weighted distillation loss",
    ),
    "codistillation/distillation_weight": (
        "1",
        "weight in force at the last step; 0 in the burn-in and without a "
        "teacher",
    ),
    "teachers/<teacher>/agreement": (
        "fraction",
        "of the last batches' examples, for how many student and teacher "
        "predict the same class",
    ),
    "teachers/<teacher>/mean_absolute_difference": (
        "as the output",
        "the same for outputs without classes",
    ),
    "teachers/<teacher>/staleness_steps": (
        "steps",
        "the student's step less that of the teacher's version",
    ),
    "teachers/<teacher>/staleness_secs": (
        "s",
        "since this group first saw the version",
    ),
    "teachers/<teacher>/version": ("step", "of the version in use"),
    "teachers/<teacher>/health": (
        "code",
        "4 good, 3 fading, 2 too stale, 1 dropped, 0 absent",
    ),
    "teachers/<teacher>/share": (
        "fraction",
        "what its age leaves it; 0 while it is not obeyed",
    ),
    "teachers/<teacher>/num_quarantined": ("versions", "quarantined so far"),
    "teachers/<teacher>/num_swaps": ("versions", "put in place so far"),
    "teachers/<teacher>/read_secs": (
        "s",
        "of the last read, in the background",
    ),
    "teachers/<teacher>/read_bytes": ("bytes", "of the version in use"),
    "exchange/export_secs": (
        "s",
        "of the last export, in the background",
    ),
    "exchange/export_bytes": ("bytes", "of the last version published"),
    "exchange/num_published": ("exports", "published so far"),
    "exchange/num_skipped": ("exports", "left out so far: one was under way"),
    "exchange/num_failed": ("exports", "failed so far"),
    "exchange/export_blocked_secs": (
        "s",
        "for which the last export held the training up",
    ),
    "exchange/refresh_blocked_secs": (
        "s",
        "for which the last refresh of teachers held the training up",
    ),
    "exchange/blocked_share": (
        "fraction",
        "of the time since the point before: held up by either",
    ),
    "host/examples_per_second": (
        "examples/s",
        "of the group since the point before, evaluations not counted",
    ),
    "host/step_secs": ("s", "of a step, likewise"),
    "host/rss_bytes": ("bytes", "resident memory of the chief's process"),
    "training/learning_rate": ("1", "at the end of an epoch"),
    "training/<metric>": ("as compiled", "over the epoch, at its end"),
    "validation/<metric>": (
        "as compiled",
        "over the validation data, at the end of an epoch; `loss` is the "
        "task's; a metric of several values, at most 32, has `_0` and so on",
    ),
}
TEXTS: dict[str, str] = {
    "run/configuration": "what the group runs",
    "teachers/<teacher>/news": "each quarantine and each change of health, "
    "with the version, the step, the time and the reason",
}
HEALTH_CODES = {
    "absent": 0,
    "dropped": 1,
    "too_stale": 2,
    "fading": 3,
    "good": 4,
}

_CHARTS: dict[str, dict[str, Sequence[str]]] = {
    "Does it pay?": {
        "Validation loss": ["validation/loss"],
        "Task loss": ["codistillation/task_loss"],
        "Distillation loss": ["codistillation/distillation_loss"],
        "Distillation weight": ["codistillation/distillation_weight"],
        "Agreement with teachers": [
            "teachers/<teacher>/agreement",
            "teachers/<teacher>/mean_absolute_difference",
        ],
        "Total loss": ["codistillation/loss"],
    },
    "Teachers": {
        "Staleness in steps": ["teachers/<teacher>/staleness_steps"],
        "Staleness in seconds": ["teachers/<teacher>/staleness_secs"],
        "Health: 4 good, 3 fading, 2 too stale, 1 dropped, 0 absent": [
            "teachers/<teacher>/health"
        ],
        "Share": ["teachers/<teacher>/share"],
        "Quarantined versions": ["teachers/<teacher>/num_quarantined"],
    },
    "Exchange": {
        "Seconds of an export and of a read, in the background": [
            "exchange/export_secs",
            "teachers/<teacher>/read_secs",
        ],
        "Bytes of a version": [
            "exchange/export_bytes",
            "teachers/<teacher>/read_bytes",
        ],
        "Share of time for which training is held up": [
            "exchange/blocked_share"
        ],
        "Exports that failed or were skipped": [
            "exchange/num_failed",
            "exchange/num_skipped",
        ],
    },
    "Host": {
        "Examples per second": ["host/examples_per_second"],
        "Resident memory in bytes": ["host/rss_bytes"],
    },
}


def of_teacher(name: str, index: int) -> str:
    """Returns what stands for `<teacher>` in a tag."""
    is_group = run_files.group_of(name) is not None
    return name if is_group else f"saved_model_{index}"


def pattern(tag: str) -> str:
    """Returns the regular expression of the tags that `tag` stands for.

    Example:
        >>> pattern("teachers/<teacher>/share")
        '^teachers/[^/]+/share$'
    """
    parts = re.split(r"<[a-z]+>", tag)
    return f"^{'[^/]+'.join(map(re.escape, parts))}$"


def layout() -> bytes:
    """Returns the summary that lays out the custom-scalars dashboard."""
    categories = [
        layout_pb2.Category(
            title=title,
            chart=[
                layout_pb2.Chart(
                    title=chart,
                    multiline=layout_pb2.MultilineChartContent(
                        tag=list(map(pattern, tags))
                    ),
                )
                for chart, tags in charts.items()
            ],
        )
        for title, charts in _CHARTS.items()
    ]
    return custom_scalars.pb(
        layout_pb2.Layout(category=categories)
    ).SerializeToString()
