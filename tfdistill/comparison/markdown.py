"""report.md: the report for people.

Imports neither TensorFlow nor Keras.
"""

import functools
import operator
import textwrap
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill.comparison import collect
from tfdistill.statistics import tables

# Name of a figure to its heading and format, in the order of the tables.
_QUALITY = {
    "log_loss": ("final log loss", ".4f"),
    "best_log_loss": ("best log loss", ".4f"),
    "unexplained_variance": ("final unexplained variance", ".4f"),
    "absolute_error": ("absolute error", ".4f"),
    "accuracy": ("accuracy", ".4f"),
    "auc": ("AUC", ".4f"),
    "normalized_entropy": ("normalized entropy", ".4f"),
    "calibration": ("calibration", ".3f"),
    "perplexity": ("perplexity", ".2f"),
}
_TARGET = {
    "steps_to_target": ("steps of a group", ",.0f"),
    "examples_to_target": ("examples, all groups", ",.0f"),
    "seconds_to_target": ("seconds", ",.1f"),
}
_CHURN = {
    "churn": ("churn", ".4f"),
    "label_churn": ("label churn", ".4f"),
    "prediction_difference": ("PD", ".4f"),
    "relative_prediction_difference": ("relative PD", ".4f"),
}
_GROUPS = {
    "between_groups_churn": ("distance between groups", ".4f"),
    "between_groups_label_churn": ("disagreement of groups", ".4f"),
    "teacher_staleness": ("teacher staleness, steps", ",.0f"),
    "taught": ("steps with a teacher", ".3f"),
    "versions_read": ("versions read", ",.1f"),
    "versions_due": ("versions by the interval", ",.1f"),
    "answered": ("batches answered", ".3f"),
    "bytes_written": ("bytes written", ",.0f"),
    "bytes_read": ("bytes read", ",.0f"),
    "mixes": ("mixes of weights", ",.1f"),
    "mixes_left_out": ("mixes left out", ",.1f"),
    "slow_bytes_per_step": ("bytes a step between groups", ",.0f"),
}
_WIDTH = 80
_TERMS = {
    "unexplained_variance": "unexplained variance: the squared error as a "
    "share of the labels' variance; churn and the absolute error are shares of "
    "their standard deviation"
}
_COST = {
    "total_steps": ("steps, all groups", ",.0f"),
    "total_examples": ("examples, all groups", ",.0f"),
    "seconds": ("seconds, slowest group, after its teacher", ",.1f"),
    "process_seconds": ("processor seconds of chiefs", ",.1f"),
    "seconds_per_step": ("seconds per step", ".4f"),
}


def verdicts(report: Mapping[str, Any]) -> list[str]:
    """Returns whether any method helps, and a line for each one."""
    found = [m["verdict"] for m in report["methods"].values() if "verdict" in m]
    first = filter(None, [report["conclusion"]])
    return [*first, *found, *report["beyond_own_past"]]


def summary(report: Mapping[str, Any]) -> list[list[str]]:
    """Returns a table of quality, churn and cost: the head, then the rows."""
    metric = _metric(report)
    quality = f"final {collect.METRICS[metric]}"
    head = ["method", quality, "churn", "examples", "seconds"]
    baseline = report["methods"].get("independent")
    rows = []
    for name, method in report["methods"].items():
        figures = method["figures"]
        churn = method["churn"].get("churn")
        cells = [
            _estimate(figures[metric], ".4f"),
            _estimate(churn, ".4f") if churn else "",
            f"{figures['total_examples']['mean']:,.0f}",
            f"{figures['seconds']['mean']:,.1f}",
        ]
        versus = method.get("versus_independent", {})
        ratio = versus.get("churn", {}).get("ratio")
        if ratio is not None:
            cells[1] += f" ({ratio - 1:+.0%})"
        if baseline:
            cells[2] += f" ({versus.get('examples', 1):.3g}x)"
        rows.append([name, *cells])
    return [head, *rows]


def _metric(report: Mapping[str, Any]) -> str:
    method = next(iter(report["methods"].values()))
    return collect.metric_in(method["figures"])


def _terms(report: Mapping[str, Any]) -> list[str]:
    """Returns what the words of the figures mean, where they need it."""
    return list(filter(None, [_TERMS.get(_metric(report))]))


def first_screen(report: Mapping[str, Any]) -> str:
    """Returns the verdict, a table and the notes, for a terminal."""
    table = summary(report)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in table
    ]
    terms = (
        "churn: how much two retrains' predictions differ; in brackets: "
        f"{100 * report['confidence']:.0f}% intervals"
    )
    notes = [f"note: {note}" for note in report["notes"]]
    said = [terms, *_terms(report), *notes]
    blocks = [_wrapped(verdicts(report)), lines, _wrapped(said)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _wrapped(texts: Sequence[str]) -> list[str]:
    return [textwrap.fill(t, _WIDTH, subsequent_indent="  ") for t in texts]


def render(report: Mapping[str, Any], plots: Sequence[str] = ()) -> str:
    """Returns the report as Markdown."""
    methods = report["methods"]
    target = report["target"]
    head, *rows = summary(report)
    recipe = report["recipe"].rpartition("/")[2]
    blocks = [
        f"# {recipe}: {len(methods)} methods",
        tables.bullets(verdicts(report)),
        tables.section("Quality, churn and cost", tables.table(head, rows)),
        f"Means over trials, and in brackets bootstrap intervals of "
        f"{100 * report['confidence']:.0f}%. "
        "Codistilled runs have {num_groups} groups of {workers_per_group} "
        "workers and {ps_per_group} parameter servers; budget {budget}.".format(
            **report["setup"]
        ),
        _table("Quality", methods, _QUALITY),
        *_terms(report),
    ]
    if target:
        blocks.append(_to_target(methods, target))
    blocks += [
        _table("Churn between retrains", methods, _CHURN),
        _table("Groups of one run", methods, _GROUPS),
        _table("Cost", methods, _COST),
        _pairs(report.get("pairs", ())),
        _tuned(report.get("tuned", {})),
        "\n".join(f"![{name}]({name})" for name in plots),
        tables.section("Notes", tables.bullets(report["notes"])),
        _named("Failed runs", report["failures"]),
        _named("Methods", {n: m["describe"] for n, m in methods.items()}),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _named(title: str, texts: Mapping[str, str]) -> str:
    lines = [f"{name}: {text}" for name, text in texts.items()]
    return tables.section(title, tables.bullets(lines))


def _to_target(methods: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    kinds = {
        "final": "the mean final validation loss of independent",
        "best": "the mean best validation loss of independent",
        "given": "the loss that was asked for",
    }
    reached = {n: m for n, m in methods.items() if "reached" in m}
    is_log_loss = target["metric"] == collect.LOG_LOSS
    unit = " nats" if is_log_loss else ", a validation loss"
    title = (
        f"To {target['value']:.4f}{unit}, {kinds[target['kind']]} (trials that "
        "reached it)"
    )
    table = _table(title, reached, _TARGET)
    counts = ", ".join(
        f"{name} {m['reached']} of {m['num_trials']}"
        for name, m in reached.items()
    )
    ratios = [
        f"{name} {tables.figure(found['ratio'], '.3f', found['interval'])}"
        for name, m in reached.items()
        if (found := m.get("versus_independent", {}).get("steps_to_target"))
    ]
    lines = [table, f"Reached: {counts}."]
    if ratios:
        lines.append(
            f"Steps as a multiple of independent's: {'; '.join(ratios)}."
        )
    return "\n\n".join(line for line in lines if line)


def _pairs(pairs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the differences between methods that are not the baseline."""
    columns = {
        **{
            f"final {words}": (name, "difference", "+.4f")
            for name, words in collect.METRICS.items()
            if any(name in pair for pair in pairs)
        },
        "steps to the target, ratio": ("steps_to_target", "ratio", ".2f"),
        "churn, ratio": ("churn", "ratio", ".2f"),
    }
    rows = [
        [
            f"{pair['one']} - {pair['other']}",
            *(
                _compared(pair.get(name), key, shape)
                for name, key, shape in columns.values()
            ),
        ]
        for pair in pairs
    ]
    return tables.section(
        "Differences between two methods", tables.table(["", *columns], rows)
    )


def _compared(found: Mapping[str, Any] | None, key: str, shape: str) -> str:
    if found is None:
        return ""
    return tables.figure(found[key], shape, found["interval"])


def _tuned(tuned: Mapping[str, Any]) -> str:
    """Returns what was chosen for each method, and by which losses."""
    if not tuned:
        return ""
    lines = [
        f"{name}: {found['value']} ("
        + ", ".join(
            f"{value}: {sum(losses) / len(losses):.4f}"
            for value, losses in found["losses"].items()
        )
        + ")"
        for name, found in tuned.items()
    ]
    field = next(iter(tuned.values()))["field"]
    title = f"{field}, by the final log loss on separate validation data"
    return tables.section(title, tables.bullets(lines))


def _table(
    title: str,
    methods: Mapping[str, Any],
    columns: Mapping[str, tuple[str, str]],
) -> str:
    """Returns one table, of the columns that some method has."""
    found = {name: _estimates(method) for name, method in methods.items()}
    used = {
        key: told
        for key, told in columns.items()
        if any(key in estimates for estimates in found.values())
    }
    rows = [
        [
            name,
            *(
                _estimate(estimates[key], shape) if key in estimates else ""
                for key, (_, shape) in used.items()
            ),
        ]
        for name, estimates in found.items()
        if estimates.keys() & used.keys()
    ]
    head = ["method", *(heading for heading, _ in used.values())]
    return tables.section(title, tables.table(head, rows))


def _estimates(method: Mapping[str, Any]) -> dict[str, Any]:
    to_target = {key: method[key] for key in _TARGET if key in method}
    parts = (method[part] for part in ("figures", "churn", "spread"))
    return functools.reduce(operator.or_, parts, to_target)


def _estimate(found: Mapping[str, Any], shape: str) -> str:
    # Where all trials have the same, there is nothing to tell.
    interval = found["interval"] if found["standard_error"] else None
    return tables.figure(found["mean"], shape, interval)
