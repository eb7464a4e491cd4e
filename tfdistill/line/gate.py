"""May a candidate replace the promoted version? Figures, and a verdict.

Reads files, and imports neither TensorFlow nor Keras.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import numpy as np

from tfdistill.held_out import predictions
from tfdistill.line import data_summary
from tfdistill.line import report as report_lib
from tfdistill.system import run_files

if TYPE_CHECKING:
    from tfdistill.line import store

# In a candidate's directory: its run, what the promoted version predicts of the
# held-out rows, which of them are judged by themselves, and the controls.
RUN, TESTED = "run", "promoted"
SLICES, CONTROLS = "slices.npz", "controls.json"
PROMOTE, HOLD, ROLL_BACK = "promote", "hold", "roll back"
_NUM_RESAMPLES = 2_000
# More rows are first summed in as many blocks, in random order: the sums'
# resamples vary as the rows' do.
_MOST_BLOCKS = 5_000
_CALIBRATION_BINS = 15
_SLICE = "slice "


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """When a candidate is promoted, and when a promoted version is rolled back.

    The candidate's log loss must be shown to be within its limit: if the
    held-out rows are too few for that, it is held. All other limits hold it
    only if they are surely exceeded: the whole interval lies beyond. None
    switches a limit off. The guide has the error rates of the defaults, "What
    the gate can and cannot promise".

    Attributes:
        confidence: Of all intervals, two-sided. Default 0.95.
        log_loss: How much the candidate's log loss may exceed the promoted
            version's, in nats, by the upper end of its interval. Default
            0.005: of 1,600 held-out clicks, a retrain's interval reaches
            0.004 further than its estimate at most.
        slice_log_loss: The same for each slice, by the lower end; with the
            given confidence no slice is beyond its interval. Default 0.002.
        auc: How much it may fall, by the lower end. Default 0.005.
        calibration: What may be added to all logits for a right mean
            prediction; more only if the promoted version lacks it, too, and
            the candidate has moved towards it. By the lower end, of binary
            models. Default 0.06, or 6% of the odds.
        churn: The mean change of a prediction, by the lower end. Default 0.1.
        net_flips: The share of rows that the promoted version had right and
            the candidate has wrong, less that of the reverse, by the lower
            end. Default 0.01.
        least_slice_rows: A smaller slice is not judged. Default 100.
        least_rows: Rows of the new span as a share of the earlier spans'
            median. Default 0.7.
        drift: The share of a column's rows that may change their value from
            one span to the next; half more than before is always allowed.
            Default 0.3.
        label_drift: The same for the label rates of its values, beside a shift
            of all: in standard deviations of the label. Default 0.12.
        false_alarms: The chance, at most, that good training rows are found to
            differ from good held-out rows. Default 0.03.
        ignored_columns: Not compared, such as an hour if the last hours of a
            span are held out. Names as in the report: `"numbers[2]"`.
        canary_examples: Live examples after which a version has passed.
            Default 10,000.
        live_log_loss: How much the live log loss may exceed that of the
            version before in the same period, by the lower end, in nats.
            Default 0.01.
        live_drift: The same if only the held-out rows of the promotion tell
            what to expect: other days differ. Default 0.05.
    """

    confidence: float = 0.95
    log_loss: float = 0.005
    slice_log_loss: float | None = 0.002
    auc: float | None = 0.005
    calibration: float | None = 0.06
    churn: float | None = 0.1
    net_flips: float | None = 0.01
    least_slice_rows: int = 100
    least_rows: float = 0.7
    drift: float = 0.3
    label_drift: float = 0.12
    false_alarms: float = 0.03
    ignored_columns: Sequence[str] = ()
    canary_examples: int = 10_000
    live_log_loss: float = 0.01
    live_drift: float = 0.05

    def __post_init__(self) -> None:
        """Checks ranges."""
        for name in ("confidence", "false_alarms"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be between 0 and 1; received "
                    f"{getattr(self, name)}."
                )


class _Model:
    """One model's predictions of the held-out rows, row by row."""

    def __init__(self, predicted: Any) -> None:
        arrays = predicted.arrays()
        labels = self.labels = np.asarray(predicted.labels).reshape(-1)
        p = np.asarray(predicted.compared, np.float64)
        is_distribution = "probabilities" in arrays
        self.is_binary = is_distribution and p.ndim == 1
        self.right: np.ndarray | None = None
        if self.is_binary:
            chosen = np.where(labels == 1, p, 1 - p)
            self.right = (p > 0.5) == (labels == 1)
        elif is_distribution:
            p = p.reshape(-1, p.shape[-1])
            chosen = p[np.arange(len(p)), labels.astype(np.int64)]
            self.right = p.argmax(axis=1) == labels
        else:
            chosen = p = p.reshape(-1)
            if "predicted_labels" in arrays:
                self.right = arrays["predicted_labels"].reshape(-1) == labels
        self.compared = p
        self.losses = -np.log(np.clip(chosen, 1e-7, 1 - 1e-7))

    def figures(
        self, rows: Any = np.s_[:], before: "_Model | None" = None
    ) -> dict[str, float]:
        """Returns how good it is on some rows, and what has changed."""
        labels, p = self.labels[rows], self.compared[rows]
        found = {"log_loss": self.losses[rows].mean()}
        if self.right is not None:
            found["accuracy"] = self.right[rows].mean()
        if self.is_binary and 0 < labels.mean() < 1:
            found |= predictions.click_figures(labels, p)
            found["offset"] = predictions.calibration(labels, p)[0]
            said, came, counts = np.transpose(curve(labels, p))
            found["calibration_error"] = np.abs(said - came) @ counts / len(p)
        if before:
            found["churn"] = self.distances(before)[rows].mean()
            if self.right is not None and before.right is not None:
                own, other = self.right[rows], before.right[rows]
                found["negative_flips"] = (other & ~own).mean()
                found["positive_flips"] = (own & ~other).mean()
        return {name: float(value) for name, value in found.items()}

    def distances(self, other: "_Model") -> np.ndarray:
        """Returns the total variation distance of each row."""
        gaps = np.abs(self.compared - other.compared)
        return gaps if gaps.ndim == 1 else gaps.sum(axis=1) / 2


def curve(
    labels: np.ndarray, probabilities: np.ndarray
) -> list[tuple[float, float, int]]:
    """Returns mean prediction, mean label and rows of bins of equal size."""
    order = np.argsort(probabilities, kind="stable")
    return [
        (float(probabilities[r].mean()), float(labels[r].mean()), len(r))
        for r in np.array_split(order, _CALIBRATION_BINS)
        if len(r)
    ]


def _auc_parts(model: _Model) -> tuple[float, np.ndarray]:
    """The AUC, and what each row adds to its error (DeLong et al. 1988)."""
    from scipy import stats

    is_one, p = model.labels == 1, model.compared
    ones, zeros = int(is_one.sum()), int((~is_one).sum())
    ranks = stats.rankdata(p)
    within = np.zeros(len(p))
    for side in (is_one, ~is_one):
        within[side] = stats.rankdata(p[side])
    # Share of the other side's rows that lie below.
    below = (ranks - within) / np.where(is_one, zeros, ones)
    won = np.where(is_one, below, 1 - below)
    auc = float(won[is_one].mean())
    return auc, (won - auc) * len(p) / np.where(is_one, ones, zeros)


def _parts(
    one: _Model, other: _Model | None, slices: Mapping[str, np.ndarray]
) -> dict[str, tuple[float, np.ndarray]]:
    """Each figure that has an interval, and what each row adds to its error.

    To first order all are means of these, so that one resample serves all.
    """
    size = len(one.labels)
    found: dict[str, tuple[float, np.ndarray]] = {}

    def mean(name: str, values: np.ndarray, rows: Any = np.s_[:]) -> None:
        centre, parts = values[rows].mean(), np.zeros(size)
        parts[rows] = (values[rows] - centre) * size / len(values[rows])
        found[name] = float(centre), parts

    ranked = one.is_binary and 0 < one.labels.mean() < 1
    if ranked:
        offset, _ = predictions.calibration(one.labels, one.compared)
        p = np.clip(one.compared, 1e-7, 1 - 1e-7)
        p = 1 / (1 + (1 - p) / p * math.exp(-offset))
        found["offset"] = offset, (one.labels - p) / np.mean(p * (1 - p))
    if other is None:
        return found
    mean("log_loss", one.losses - other.losses)
    mean("churn", one.distances(other))
    if ranked:
        (auc, parts), (base, others) = _auc_parts(one), _auc_parts(other)
        found["auc"] = auc - base, parts - others
    if one.right is not None and other.right is not None:
        mean("net_flips", other.right.astype(float) - one.right)
    for name, rows in slices.items():
        mean(_SLICE + name, one.losses - other.losses, rows)
    return found


def _resamples(parts: np.ndarray) -> np.ndarray:
    """Returns errors `[resamples, retrains, figures]`.

    Of parts `[retrains, rows, figures]`. A row is drawn a Poisson number of
    times, the same in all retrains and for all figures (Chamandy et al. 2012,
    "Estimating Uncertainty for Massive Data Streams"): with a hundred rows or
    more, that is the paired bootstrap.
    """
    from scipy import special

    rng = np.random.default_rng(0)
    retrains, size, figures = parts.shape
    blocks = min(size, _MOST_BLOCKS)
    order = rng.permutation(size)
    starts = np.linspace(0, size, blocks, endpoint=False).astype(np.int64)
    sums = np.add.reduceat(parts[:, order].transpose(1, 0, 2), starts)
    flat = sums.reshape(blocks, -1).astype(np.float32)
    shares = np.exp(-1) / special.factorial(np.arange(9))
    table = np.searchsorted(shares.cumsum(), (np.arange(2**16) + 0.5) / 2**16)
    table = table.astype(np.float32)
    drawn = [
        table[rng.integers(0, 2**16, (100, blocks), np.uint16)] @ flat
        for _ in range(_NUM_RESAMPLES // 100)
    ]
    return np.concatenate(drawn).reshape(-1, retrains, figures) / size


def _estimates(
    found: Sequence[Mapping[str, tuple[float, np.ndarray]]], confidence: float
) -> dict[str, dict[str, Any]]:
    """Returns each figure's mean over retrains and its interval.

    Retrains are drawn again, too. The intervals of slices are as wide as the
    worst of all slices needs them, by the same draws (max-t: Romano and Wolf
    2005, "Exact and Approximate Stepdown Methods").
    """
    names = list(found[0])
    if not names:  # Of classes, without a version before.
        return {}
    values = np.array([[one[name][0] for name in names] for one in found])
    parts = np.array([[one[name][1] for name in names] for one in found])
    drawn = _resamples(parts.transpose(0, 2, 1)) + values
    again = np.random.default_rng(1).integers(
        0, len(found), (len(drawn), len(found), 1)
    )
    drawn = np.take_along_axis(drawn, again, axis=1).mean(axis=1)
    means, errors = values.mean(axis=0), drawn.std(axis=0)
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    of_slices = np.array([name.startswith(_SLICE) for name in names])
    if of_slices.any():
        scaled = np.abs(drawn - means) / np.maximum(errors, 1e-12)
        most = np.quantile(scaled[:, of_slices].max(axis=1), confidence)
        low = np.where(of_slices, means - most * errors, low)
        high = np.where(of_slices, means + most * errors, high)
    return {
        name: {
            "value": float(means[k]),
            "interval": [float(low[k]), float(high[k])],
        }
        for k, name in enumerate(names)
    }


def verdict(
    gate: Gate,
    *,
    candidate: Sequence[Any],
    promoted: Any = None,
    slices: Mapping[str, np.ndarray] | None = None,
    lineage: Mapping[str, Any] | None = None,
    earlier: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Returns the report on a candidate, with its verdict.

    Args:
        gate: The thresholds.
        candidate: `held_out.predictions`, one for each retrain.
        promoted: Those of the promoted version, for the same rows. None if
            there is none: the candidate then has to be better than the share
            of each label.
        slices: By name, bool `[rows]`.
        lineage: The candidate's; see `data_summary` for what is compared.
        earlier: Those of the versions promoted before, the oldest first.

    Returns:
        For JSON: `verdict`, "promote" or "hold"; `reasons`, a sentence each;
        `figures` of the candidate, means over retrains, and of the promoted
        version; `estimates`, with intervals, of the candidate less the
        promoted version; the same by slice; `curves` of calibration;
        `expected`, of a live row's log loss; and the `gate`.

    Raises:
        ValueError: If predictions are not of the same rows.
    """
    models = [_Model(one) for one in candidate]
    before = None if promoted is None else _Model(promoted)
    masks = {k: np.asarray(rows, bool) for k, rows in (slices or {}).items()}
    labels = models[0].labels
    for other in (*models, *([before] if before else ())):
        if not np.array_equal(other.labels, labels):
            raise ValueError(
                "A candidate and the promoted version must have predicted the "
                f"same rows in the same order; received {len(labels)} and "
                f"{len(other.labels)} rows, or other labels. Retrain it."
            )
    for name, rows in masks.items():
        if rows.shape != labels.shape:
            raise ValueError(
                f"A slice must have one bool for each of the {len(labels)} "
                f"held-out rows; received shape {rows.shape} of {name!r}."
            )

    def figures(rows: Any) -> dict[str, Any]:
        found = [one.figures(rows, before) for one in models]
        return {
            "candidate": predictions.means(found),
            "promoted": before.figures(rows) if before else None,
        }

    judged = {
        k: r for k, r in masks.items() if r.sum() >= gate.least_slice_rows
    }
    parts = [_parts(one, before, judged) for one in models]
    estimates = _estimates(parts, gate.confidence)
    data = (lineage or {}).get("data", {})
    failed = _beyond(gate, estimates, [_SLICE + name for name in judged])
    if before is None:
        failed += _unskilled(models)
    if "offset" in estimates:
        own = before.figures()["offset"] if before else None
        estimates["offset"], lacked = _calibrated(
            estimates["offset"], own, data, gate.confidence
        )
        if gate.calibration is not None:
            failed += _miscalibrated(
                estimates["offset"], lacked, gate.calibration
            )
    failed += data_summary.compare(lineage or {}, earlier, gate=gate)
    losses = np.mean([one.losses for one in models], axis=0)
    reasons = failed or [_passed(estimates, len(judged), data)]
    return {
        "verdict": HOLD if failed else PROMOTE,
        "reasons": reasons,
        "rows": len(labels),
        "retrains": len(models),
        "figures": figures(np.s_[:]),
        "estimates": {
            k: v for k, v in estimates.items() if not k.startswith(_SLICE)
        },
        "slices": {
            name: {
                "rows": int(rows.sum()),
                "log_loss": estimates.get(_SLICE + name),
                "figures": figures(rows),
            }
            for name, rows in masks.items()
            if rows.any()
        },
        "curves": {
            name: curve(labels, model.compared)
            for name, model in (("candidate", models[0]), ("promoted", before))
            if model and model.is_binary
        },
        "expected": {
            "log_loss": float(losses.mean()),
            "standard_deviation": float(losses.std()),
            "examples": len(losses),
        },
        "gate": dataclasses.asdict(gate),
    }


def _beyond(
    gate: Gate, estimates: Mapping[str, Any], slices: Sequence[str]
) -> list[str]:
    """Returns which limits of a change are exceeded, a sentence each."""
    found = []
    limits = [
        ("The log loss", "log_loss", gate.log_loss, 1),
        ("The AUC", "auc", gate.auc, -1),
        ("The mean prediction of a row", "churn", gate.churn, 1),
        ("The share of wrong rows", "net_flips", gate.net_flips, 1),
        *(
            (f"In {name} the log loss", name, gate.slice_log_loss, 1)
            for name in slices
        ),
    ]
    for what, name, limit, sign in limits:
        if name not in estimates or limit is None:
            continue
        near, far = sorted(sign * end for end in estimates[name]["interval"])
        # What must be shown, and what must not be refuted.
        if not (far if name == "log_loss" else near) <= limit:
            is_unsure = near <= limit
            found.append(
                f"{what} has changed by {_said(estimates[name])}; the limit is "
                f"{sign * limit:+.4f}"
                + is_unsure * ", and the held-out rows are too few to tell"
                + "."
            )
    return found


def _calibrated(
    offset: Mapping[str, Any],
    lacked: float | None,
    data: Mapping[str, Any],
    confidence: float,
) -> tuple[dict[str, Any], float]:
    """Returns the candidate's offset and the promoted version's.

    The promoted version has not seen the rows that the candidate was trained
    on. Its offset there, if known, makes both more precise: they share the
    noise of the held-out labels.
    """
    known = [
        data[part]["calibration"]
        for part in ("training", "held_out")
        if "calibration" in data.get(part, {})
    ]
    if lacked is None or len(known) < 2:
        return dict(offset), lacked or 0.0
    from scipy import stats

    pooled, error = data_summary.pooled(known)
    value = offset["value"] + pooled - lacked
    reach = error * float(stats.norm.ppf(0.5 + confidence / 2))
    return {"value": value, "interval": [value - reach, value + reach]}, pooled


def _miscalibrated(
    offset: Mapping[str, Any], lacked: float, limit: float
) -> list[str]:
    low, high = offset["interval"]
    if low <= max(lacked, 0) + limit and high >= min(lacked, 0) - limit:
        return []
    beside = f" and the {lacked:+.4f} that the promoted version lacks"
    return [
        f"All logits lack {_said(offset)} for a right mean prediction; the "
        f"limit is {limit:.4f} beyond 0{beside if lacked else ''}."
    ]


def _unskilled(models: Sequence[_Model]) -> list[str]:
    """What is asked of the first version of a line."""
    loss = float(np.mean([one.losses.mean() for one in models]))
    _, counts = np.unique(models[0].labels, return_counts=True)
    shares = counts / counts.sum()
    base = -float((shares * np.log(shares)).sum())
    if loss < base:
        return []
    return [
        f"The log loss is {loss:.4f}; always predicting the share of each "
        f"label has {base:.4f}."
    ]


def _passed(
    estimates: Mapping[str, Any], num_slices: int, data: Mapping[str, Any]
) -> str:
    rows = "its rows are as those held out and those before"
    if "training" not in data:
        rows = "its rows were not compared, as its lineage has no summary"
    loss = estimates.get("log_loss")
    if loss is None:
        return f"The first version has skill, and {rows}."
    return (
        f"The log loss has changed by {_said(loss)}, predictions by "
        f"{estimates['churn']['value']:.4f}; none of {num_slices} slices is "
        f"surely worse, and {rows}."
    )


def _said(estimate: Mapping[str, Any]) -> str:
    low, high = estimate["interval"]
    return f"{estimate['value']:+.4f} ({low:+.4f} to {high:+.4f})"


def judge(line: "store.Line", number: int) -> dict[str, Any]:
    """Returns the report on a trained candidate, and writes it beside it.

    The gate is that of the workload that it was trained by.
    """
    path = pathlib.Path(line.candidate_path(number))
    lineage = line.lineage(number)
    groups = sorted((path / RUN).glob(run_files.group_name(0)[:-1] + "*"))
    if not groups:
        raise ValueError(
            f"{path} must have the run of candidate {number}; it was removed, "
            "or is on another machine. Judge it there, or retrain."
        )
    promoted = path / TESTED
    slices = {}
    if (path / SLICES).exists():
        with np.load(path / SLICES) as arrays:
            slices = {name: arrays[name] for name in arrays.files}
    pointer = line.pointer()
    served = pointer.get("version")
    kept = [n for n in (*pointer.get("before", []), served) if n]
    earlier = []
    for one in kept:
        with contextlib.suppress(ValueError):  # Old ones may be removed.
            earlier += [line.lineage(one)] if one < number else []
    report = verdict(
        Gate(**lineage.get("gate", {})),
        candidate=[predictions.read(group) for group in groups],
        promoted=predictions.read(promoted) if promoted.exists() else None,
        slices=slices,
        lineage=lineage,
        earlier=earlier,
    )
    report |= {"number": number, "parent": lineage.get("parent")}
    if (path / CONTROLS).exists():
        report["controls"] = json.loads((path / CONTROLS).read_bytes())
    late = line.too_late(number) if number != served else ""
    if not late and served not in (number, report["parent"]):
        late = (
            f"It was compared with version {report['parent']}, and {served} is "
            "promoted now. Train another candidate: tfdistill line retrain "
            f"{line.root} --span={lineage['span']}."
        )
    if late:
        report["verdict"] = HOLD
        report["reasons"].insert(0, late)
    past = [
        {"number": event["number"], **event.get("figures", {})}
        for event in line.events("judge")
        if event["number"] < number
    ]
    own = {"number": number, **report["figures"]["candidate"]}
    report_lib.write(path, report, [*past, own])
    return report


def live_verdict(
    line: "store.Line", *, more: Sequence[dict[str, Any]] = ()
) -> tuple[str, list[str]]:
    """Returns whether the promoted version stays, by its live log loss.

    Args:
        line: The line, whose `report` events have the number of a version, its
            live `log_loss` and how many `examples` that is the mean of.
        more: Reports that are not noted in the line.

    Returns:
        "promote" if it stays, "hold" while its canary period lasts, or "roll
        back"; and the reasons, a sentence each.
    """
    pointer = line.pointer()
    served = pointer.get("version")
    if served is None:
        return HOLD, ["No version is promoted."]
    lineage = line.lineage(served)
    gate = Gate(**lineage.get("gate", {}))
    since = [e for e in line.events("report") if e["event"] > pointer["event"]]
    since += more
    live = _live(since, served)
    if live is None:
        return HOLD, [f"Nothing is reported of version {served} yet."]
    loss, size = live
    judged = [e for e in line.events("judge") if e["number"] == served]
    expected = judged[-1].get("expected") if judged else None
    previous = _live(since, pointer.get("previous"))
    # Of a row; without a judgement, as wide as a loss of this size may be.
    deviation = expected["standard_deviation"] if expected else max(loss, 1.0)
    if previous is not None:
        base, rows, limit = *previous, gate.live_log_loss
        what = f"version {pointer['previous']} has in the same period"
    elif expected:
        base, rows = expected["log_loss"], expected["examples"]
        limit, what = gate.live_drift, "its held-out rows had"
    else:
        return HOLD, [
            f"Version {served} has a live log loss of {loss:.4f}, and there is "
            "nothing to compare it with: judge it, or report the version "
            "before, too."
        ]
    from scipy import stats

    # One-sided. The k-th report errs with 1 / (k (k + 1)) of what may be, so
    # that all of them together err no more often.
    looks = sum(event["version"] == served for event in since)
    level = (1 - gate.confidence) / (looks * (looks + 1))
    reach = float(stats.norm.isf(level))
    reach *= deviation * math.sqrt(1 / size + 1 / rows)
    said = (
        f"Version {served} has a live log loss of {loss:.4f} on {size:,} "
        f"examples, {loss - base:+.4f} (+- {reach:.4f}) from the {base:.4f} "
        f"that {what}; the limit is {limit:+.4f}."
    )
    if not loss - base - reach <= limit:
        return ROLL_BACK, [said]
    if size < gate.canary_examples:
        return HOLD, [
            said,
            f"The canary period lasts until {gate.canary_examples:,} examples.",
        ]
    return PROMOTE, [said]


def _live(
    events: Sequence[Mapping[str, Any]], version: int | None
) -> tuple[float, int] | None:
    """The mean live log loss of a version, and of how many examples."""
    found = [
        (float(event["log_loss"]), int(event["examples"]))
        for event in events
        if version is not None and event["version"] == version
    ]
    size = sum(examples for _, examples in found)
    if not size:
        return None
    return sum(loss * examples for loss, examples in found) / size, size
