"""The gate: figures, intervals, verdicts, and what rows and weights show."""

import functools
import importlib
import json
import pathlib
import re
import shutil

import numpy as np
import pytest

import tfdistill
from tests.cases import lines
from tfdistill import metrics
from tfdistill.contrib.line import data_check
from tfdistill.contrib.line import gate as gate_lib
from tfdistill.contrib.line import report as report_lib
from tfdistill.contrib.line import store
from tfdistill.contrib.line import weight_check
from tfdistill.held_out import predictions
from tfdistill.recipes import outputs
from tfdistill.recipes import recipes
from tfdistill.statistics import estimates

_ROWS = 6000
_NUM_RESAMPLES = estimates._NUM_RESAMPLES_OF_ROWS


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    """What is good or bad here is so by much."""
    monkeypatch.setattr(estimates, "_NUM_RESAMPLES_OF_ROWS", 200)


def _sigmoid(logits):
    return 1 / (1 + np.exp(-np.asarray(logits)))


class _Day:
    """Clicks of a day, and models of them that differ by noise."""

    def __init__(self, seed=0, rows=_ROWS):
        self.rng = np.random.default_rng(seed)
        self.logits = self.rng.normal(-1.5, 1, rows)
        self.labels = (self.rng.random(rows) < _sigmoid(self.logits)) * 1.0
        self.groups = self.rng.integers(0, 10, rows)

    def model(self, noise=0.3, add=0.0):
        noise = self.rng.normal(0, noise, len(self.logits))
        return self.of(self.logits + noise + add)

    def of(self, logits):
        return predictions.Distributions(
            probabilities=_sigmoid(logits).astype(np.float32),
            labels=self.labels,
        )

    def slices(self):
        return {f"group {k}": self.groups == k for k in range(10)}

    def judged(self, candidate, promoted, **more):
        return gate_lib.verdict(
            gate_lib.Gate(**more.pop("limits", {})),
            candidate=candidate if isinstance(candidate, list) else [candidate],
            promoted=promoted,
            slices=self.slices(),
            **more,
        )


def _losses(predicted):
    p = np.asarray(predicted.probabilities, np.float64)
    y = predicted.labels
    return -(y * np.log(p) + (1 - y) * np.log(1 - p))


def _auc(labels, p):
    ranks = 1 + np.argsort(np.argsort(p))[labels == 1]
    ones = len(ranks)
    zeros = len(labels) - ones
    return (ranks.sum() - ones * (ones + 1) / 2) / (ones * zeros)


def test_figures_and_intervals_are_those_of_a_plain_bootstrap(monkeypatch):
    monkeypatch.setattr(estimates, "_NUM_RESAMPLES_OF_ROWS", _NUM_RESAMPLES)
    day = _Day(rows=1500)
    new, old = day.model(), day.model(0.5)
    report = day.judged(new, old)
    own, y = report["figures"]["candidate"], day.labels
    p, q = (np.asarray(m.probabilities, np.float64) for m in (new, old))
    right, before = (p > 0.5) == y, (q > 0.5) == y
    assert own["log_loss"] == pytest.approx(_losses(new).mean())
    assert own["auc"] == pytest.approx(_auc(y, p))
    assert own["calibration"] == pytest.approx(p.mean() / y.mean())
    shifted = _sigmoid(np.log(p / (1 - p)) + own["offset"])
    assert shifted.mean() == pytest.approx(y.mean())
    assert own["churn"] == pytest.approx(np.abs(p - q).mean())
    assert own["negative_flips"] == pytest.approx((before & ~right).mean())
    of_slice = report["slices"]["group 3"]
    rows = day.groups == 3
    assert of_slice["figures"]["promoted"]["log_loss"] == pytest.approx(
        _losses(old)[rows].mean()
    )

    rng, drawn = np.random.default_rng(1), []
    for _ in range(1000):
        i = rng.integers(0, 1500, 1500)
        auc = _auc(y[i], p[i]) - _auc(y[i], q[i])
        loss = (_losses(new) - _losses(old))[i].mean()
        offset = metrics.calibration_offset(y[i], p[i])[0]
        flips = (before[i].mean()) - right[i].mean()
        churn = np.abs(p - q)[i].mean()
        drawn.append((loss, auc, offset, flips, churn))
    names = ("log_loss", "auc", "offset", "net_flips", "churn")
    for name, values in zip(names, np.transpose(drawn), strict=True):
        found, width = report["estimates"][name], values.std()
        expected = np.quantile(values, [0.025, 0.975])
        np.testing.assert_allclose(
            found["interval"], expected, atol=0.35 * width, err_msg=name
        )


def test_a_good_candidate_is_promoted_and_a_first_one_needs_skill_only():
    day = _Day()
    report = day.judged(day.model(0.1), day.model(0.2))
    assert report["verdict"] == "promote"
    loss = report["estimates"]["log_loss"]["value"]
    assert f"{loss:+.4f}" in report["reasons"][0]
    assert day.judged(day.model(), None)["verdict"] == "promote"
    report = day.judged(day.of(np.full(_ROWS, -1.0)), None)
    assert "share of each label" in report["reasons"][0]
    with pytest.raises(ValueError, match="same rows"):
        day.judged(day.model(), _Day(1).model())


_BAD = {
    "needs a shift of all logits": lambda day, x: x + 0.3,
    "In slice group 4": lambda day, x: np.where(day.groups == 4, -1.5 - x, x),
    "The log loss": lambda day, x: day.rng.permutation(x),
    "The AUC": lambda day, x: x + day.rng.normal(0, 1, _ROWS),
    "mean prediction of a row": lambda day, x: -1.5 + 3 * (x + 1.5),
    "error rate": lambda day, x: np.where(day.rng.random(_ROWS) < 0.1, 1, x),
}


@pytest.mark.parametrize("said", _BAD)
def test_a_bad_candidate_is_held_for_what_is_bad(said):
    day = _Day()
    limits = {} if said == "The log loss" else {"log_loss": 10.0}
    bad = day.of(_BAD[said](day, day.logits))
    report = day.judged(bad, day.model(0.05), limits=limits)
    assert report["verdict"] == "hold"
    assert said in " ".join(report["reasons"])


def test_a_candidate_is_held_if_rows_are_too_few_to_tell():
    day = _Day(rows=60)
    report = day.judged(day.model(), day.model(0.05))
    assert report["verdict"] == "hold"
    assert "too few to tell" in " ".join(report["reasons"])


def test_lag_behind_a_drift_is_no_miscalibration_and_overshoot_is():
    day = _Day()
    promoted = day.of(day.logits - 0.5)
    assert day.judged(day.of(day.logits - 0.3), promoted)["verdict"] == (
        "promote"
    )
    limits = {"log_loss": 10.0, "net_flips": None, "slice_log_loss": None}
    for wrong in (0.3, -0.9):
        report = day.judged(day.of(day.logits + wrong), promoted, limits=limits)
        assert report["verdict"] == "hold"


@pytest.mark.deep
def test_more_slices_raise_no_more_false_alarms_than_the_confidence(
    monkeypatch,
):
    monkeypatch.setattr(estimates, "_NUM_RESAMPLES_OF_ROWS", _NUM_RESAMPLES)
    rng, held = np.random.default_rng(0), 0
    gate = gate_lib.Gate(
        log_loss=1.0, slice_log_loss=0.0, least_slice_rows=20, churn=None
    )
    for _ in range(60):
        new, old = (
            predictions.LabelProbabilities(
                label_probabilities=_sigmoid(rng.normal(1, 0.5, 1000)),
                labels=np.ones(1000),
            )
            for _ in range(2)
        )
        report = gate_lib.verdict(
            gate,
            candidate=[new],
            promoted=old,
            slices={str(k): rng.random(1000) < 0.1 for k in range(40)},
        )
        held += report["verdict"] == "hold"
    # 2.5% are expected, 1.5; each slice for itself would hold two thirds.
    assert held <= 5


def test_retrains_that_differ_widen_the_interval():
    day = _Day()
    old = day.model()
    alike = [day.model(0.3) for _ in range(3)]
    unlike = [day.model(noise) for noise in (0.1, 0.3, 0.8)]
    narrow, wide = (
        np.ptp(day.judged(m, old)["estimates"]["log_loss"]["interval"])
        for m in (alike, unlike)
    )
    assert wide > 2 * narrow


def test_models_of_classes_and_of_words_are_judged():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 3000)
    logits = rng.normal(0, 1, (3000, 5)) + 2 * np.eye(5)[labels]

    def model(noise):
        p = np.exp(logits + rng.normal(0, noise, logits.shape))
        return p / p.sum(axis=1, keepdims=True)

    def words(p):
        return predictions.LabelProbabilities(
            label_probabilities=p[np.arange(3000), labels],
            predicted_labels=p.argmax(axis=1),
            labels=labels,
        )

    gate = gate_lib.Gate(log_loss=0.02, churn=0.2)
    good, bad, old = model(0.1), model(2), model(0.1)
    for made in (
        words,
        lambda p: predictions.Distributions(probabilities=p, labels=labels),
    ):
        first = gate_lib.verdict(gate, candidate=[made(good)])
        assert first["verdict"] == "promote"
        for p, expected in ((good, "promote"), (bad, "hold")):
            report = gate_lib.verdict(
                gate, candidate=[made(p)], promoted=made(old)
            )
            assert report["verdict"] == expected
        assert report["figures"]["candidate"]["accuracy"] < 0.9


def _span(day, *, rows=5000, seed=None):
    rng = np.random.default_rng(day if seed is None else seed)
    ads = rng.zipf(1.4, rows) % 500
    price = rng.normal(0, 1, rows)
    worth = np.random.default_rng(7).normal(0, 1, 500)
    p = _sigmoid(-1.5 + worth[ads] + 0.6 * price)
    labels = (rng.random(rows) < p) * 1.0
    return {"ad": ads, "numbers": np.c_[price, rng.random(rows)]}, labels


def _predict(inputs):
    worth = np.random.default_rng(7).normal(0, 1, 500)
    return _sigmoid(-1.5 + worth[inputs["ad"]] + 0.6 * inputs["numbers"][:, 0])


def _lineage(training, held_out=None):
    found = {"training": training, "held_out": held_out or _span(99, rows=1500)}
    return {
        "data": {
            name: data_check.summary(*rows, predict=_predict)
            for name, rows in found.items()
        }
    }


def _look(lineage, earlier=(), look=data_check.check, **limits):
    """What a look finds, or an empty text."""
    gate = gate_lib.Gate(**limits)
    context = gate_lib.Context(gate=gate, lineage=lineage, earlier=earlier)
    return look(context) or ""


def _shuffled(values):
    return np.random.default_rng(0).permutation(values)


def _missing(price):
    return np.where(np.arange(len(price)) < len(price) // 3, np.nan, price)


# What is done to the ads, both numbers and the labels, and what is said of it.
_BROKEN = {
    "nothing": (lambda a, p, q, y: (a, p, q, y), None),
    "swapped labels": (lambda a, p, q, y: (a, p, q, 1 - y), "labels"),
    "drifted": (lambda a, p, q, y: (a, p + 0.7, q, y), "numbers[0]"),
    "scaled": (lambda a, p, q, y: (a, p * 100, q, y), "numbers[0]"),
    "missing": (lambda a, p, q, y: (a, p, _missing(q), y), "numbers[1]"),
    "shuffled ids": (lambda a, p, q, y: (_shuffled(a), p, q, y), "ad"),
    "shuffled numbers": (
        lambda a, p, q, y: (a, _shuffled(p), q, y),
        "numbers[0]",
    ),
    "vocabulary": (lambda a, p, q, y: ((a + 1) % 500, p, q, y), "ad"),
    "bad slice": (
        lambda a, p, q, y: (a, p, q, np.where(a == 1, 1 - y, y)),
        "ad",
    ),
    "lost": (lambda *columns: [c[::2] for c in columns], "2,500 training rows"),
}


def _break(kind, inputs, labels):
    broken, _ = _BROKEN[kind]
    ads, *numbers, labels = broken(inputs["ad"], *inputs["numbers"].T, labels)
    return {"ad": ads, "numbers": np.stack(numbers, axis=1)}, labels


@functools.cache
def _past():
    return [_lineage(_span(day)) for day in range(4)]


@pytest.mark.parametrize("kind", _BROKEN)
def test_broken_rows_are_found(kind):
    lineage, (_, said) = _lineage(_break(kind, *_span(4))), _BROKEN[kind]
    for earlier in ([], _past()):
        found = _look(lineage, earlier)
        if said is None or (kind == "lost" and not earlier):
            assert not found
        else:
            assert re.search(rf"\b{re.escape(said)}(?!\w)", found)


def test_a_lineage_of_an_earlier_release_is_read():
    earlier, broken = json.loads(json.dumps(_past())), _span(4)
    for one in earlier:
        for column in one["data"]["training"]["columns"].values():
            column |= {"mean": 0.5, "std": None}
    assert not _look(_lineage(_span(4)), earlier)
    assert _look(_lineage(_break("drifted", *broken)), earlier)
    gate = {"churn": 0.01, "ignored_columns": ["hour"]}
    assert gate_lib.Gate.of(gate).churn == 0.01


@pytest.mark.deep
def test_good_rows_raise_no_more_false_alarms_than_stated():
    alarms = sum(
        bool(_look(_lineage(_span(day), _span(day + 1000, rows=1200))))
        for day in range(60)
    )
    assert alarms <= 4  # 1.2 are expected.


def test_swapped_labels_of_one_id_among_many_are_found_anywhere():
    def swapped(inputs, labels):
        # 1 of 500 ids, in a bucket with others, in 0.5% of the rows.
        few = inputs["ad"] == 26
        assert few.mean() < 0.01
        return inputs, np.where(few, 1 - labels, labels)

    good, bad = _span(3), swapped(*_span(3))
    held_out = _span(99, rows=5000)
    assert not _look(_lineage(good, held_out))
    for lineage, where in (
        (_lineage(bad, held_out), "trained on"),
        (_lineage(good, swapped(*held_out)), "held out"),
    ):
        assert re.match(
            "The labels look swapped where ad is 26, in [0-9]+ rows "
            f"{where}: .* times as likely",
            _look(lineage),
        )


def test_a_column_may_lose_its_worth_from_day_to_day_or_be_ignored():
    broken = _lineage(_break("drifted", *_span(4)))
    assert not _look(broken, ignored_columns=("numbers[0]",))
    *earlier, now = (_lineage(_span(day)) for day in range(5))
    for age, one in enumerate([*earlier, now]):
        for part in one["data"].values():
            part["columns"]["ad"]["worth"] = [0.05 * 0.6**age, 0.001]
    assert not _look(now, earlier)


def test_inputs_of_all_kinds_have_a_summary_that_json_can_hold():
    labels = np.array([0, 1, 2])
    for inputs in (
        np.zeros((3, 28, 28)),
        (np.array(["a", "", "b"]), np.array([1.0, np.inf, np.nan])),
        {"ids": np.array([[1, -2], [3, 4], [5, 6]]), "more": [np.ones(3)]},
    ):
        found = data_check.summary(inputs, labels)
        assert json.loads(json.dumps(found)) == found
    assert found["columns"]["more.0"]["buckets"] == {"4": [3, 0.0]}


def test_a_column_is_worth_what_a_model_of_classes_loses_without_it():
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(2000, 2)), rng.integers(0, 3, 2000)
    inputs[:, 0] = labels

    def predict(inputs):
        return np.eye(3)[inputs[:, 0].astype(int)] * 0.7 + 0.1

    found = data_check.summary(inputs, labels, predict=predict)
    used, unused = (one["worth"] for one in found["columns"].values())
    # Two thirds of the rows get another label's 0.1 in place of 0.8.
    assert used[0] == pytest.approx(np.log(8) * 2 / 3, abs=5 * used[1])
    assert unused[0] == pytest.approx(0)


def test_a_table_from_elsewhere_is_found():
    rng = np.random.default_rng(0)
    before = {"table": rng.normal(size=(2000, 8)), "bias": np.zeros(1)}
    parent = {k: v + 0.1 * rng.normal(size=v.shape) for k, v in before.items()}

    def lineage(table):
        weights = {"table": table, "bias": np.ones(1)}
        return {
            "weights": weight_check.summary(
                weights, parent=parent, before=before
            )
        }

    good = lineage(parent["table"] + 0.1 * rng.normal(size=(2000, 8)))
    assert set(good["weights"]) == {"table"}
    for table, said in (
        (before["table"], "closer to the previous version's"),
        (rng.normal(size=(2000, 8)), "the largest change so far"),
    ):
        assert said in _look(lineage(table), [good, good], weight_check.check)
    assert not _look(good, [good], weight_check.check)


_CHECKED = '''
import tfdistill

line = tfdistill.contrib.line


def is_sunday(context):
    auc = context.figures["candidate"]["auc"]
    return f"{context.lineage['span']} is a Sunday, with AUC {auc:.1f}."


def workload(spans=()):
    """Returns what has nothing but its gate."""
    gate = line.Gate(checks=[*line.Gate().checks, is_sunday])
    return tfdistill.Workload(
        model=None,
        data=None,
        batch_size=1,
        num_steps=1,
        evaluate_every_steps=1,
        optimizer=None,
        loss=None,
        line=line.LineSettings(gate=gate),
    )
'''


@pytest.fixture
def line(tmp_path, monkeypatch):
    """A line whose reports have no plot."""
    monkeypatch.setattr(report_lib, "_draw", lambda *_: None)
    return lines.make(tmp_path / "clicks")


def _candidate(line, span, models, promoted, **more):
    number, path = lines.add_candidate(line, span)
    candidate = pathlib.Path(line.candidate_path(number))
    for group, model in enumerate(models):
        place = candidate / "run" / f"group_{group}"
        predictions.save(place / predictions.FILE, model)
    if promoted:
        place = candidate / "promoted"
        predictions.save(place / predictions.FILE, promoted)
    lineage = {"number": number, "span": span, "parent": line.promoted()}
    text = json.dumps(lineage | more)
    (candidate / "lineage.json").write_text(text)
    return number, path


def _judge(line, number):
    report = gate_lib.judge(line, number)
    line.journal.note(
        "judge",
        number=number,
        verdict=report["verdict"],
        expected=report["expected"],
        figures=report["figures"]["candidate"],
    )
    return report


def _promoted(line, day, span):
    number, path = _candidate(line, span, [day.model()], None)
    assert _judge(line, number)["verdict"] == "promote"
    line.promote(number, path, extra=lines.extra(line, number))
    return number


def test_a_candidate_is_judged_from_files_and_the_report_says_why(tmp_path):
    line, day = lines.make(tmp_path / "clicks"), _Day()
    _promoted(line, day, "day_1")
    bad = [day.model(), day.of(day.logits + 2)]
    number, _ = _candidate(
        line, "day_2", bad, day.model(), gate={"auc": None, "churn": 0.01}
    )
    np.savez(f"{line.candidate_path(number)}/slices.npz", **day.slices())
    report = _judge(line, number)
    assert report["verdict"] == "hold" and report["retrains"] == 2
    assert report["gate"]["churn"] == 0.01
    directory = pathlib.Path(line.candidate_path(number))
    text = (directory / "report.md").read_text()
    assert text.startswith(f"# Candidate {number}: hold\n\n- The log loss")
    for reason in report["reasons"]:
        assert reason in text
    assert "| group 4 |" in text
    text = (directory / "report.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(report))
    assert (directory / "report.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_promoted_long_ago_may_be_removed(line):
    day = _Day()
    first = _promoted(line, day, "day_1")
    number, path = _candidate(line, "day_2", [day.model()], day.model())
    line.promote(number, path, extra=lines.extra(line, number))
    for place in (line.version_path(first), line.candidate_path(first)):
        shutil.rmtree(place)
    same = day.model()
    number, _ = _candidate(line, "day_3", [same], same)
    assert _judge(line, number)["verdict"] == "promote"
    with pytest.raises(FileNotFoundError, match="versions/1"):
        line.local_version(first)
    with pytest.raises(store.RefusedError, match="versions/1 was removed"):
        line.rollback()


def test_checks_of_a_workload_hold_a_candidate(line, tmp_path, monkeypatch):
    day = _Day()
    _promoted(line, day, "day_1")
    (tmp_path / "checked.py").write_text(_CHECKED)
    monkeypatch.syspath_prepend(str(tmp_path))
    checked = importlib.import_module("checked")
    gate = gate_lib.Gate(checks=[*gate_lib.Gate().checks, checked.is_sunday])
    same = day.model()
    # As `retrain` leaves it: functions by their names, and the recipe.
    settings = json.loads(json.dumps(gate.settings()))
    number, _ = _candidate(line, "day_2", [same], same, gate=settings)
    recipe = recipes.get(str(tmp_path / "checked.py"))
    run = pathlib.Path(line.candidate_path(number), "run")
    outputs.write_config(recipe, str(run))
    report = _judge(line, number)
    assert report["verdict"] == "hold"
    assert report["reasons"] == ["day_2 is a Sunday, with AUC 0.7."]
    assert gate_lib.live_verdict(line)[0] == "hold"
    # Without it the same candidate passes.
    number, _ = _candidate(line, "day_3", [same], same)
    assert _judge(line, number)["verdict"] == "promote"


def test_a_candidate_of_another_parent_is_held(line):
    day = _Day()
    _promoted(line, day, "day_1")
    same = day.model()
    old, _ = _candidate(line, "day_2", [same], same)
    _, path = lines.add_candidate(line, "day_3")
    line.promote(old + 1, path, extra=lines.extra(line, old + 1))
    report = _judge(line, old)
    assert report["verdict"] == "hold"
    assert "--span=day_2 --again" in report["reasons"][0]
    # It was compared with the version that serves again.
    line.rollback()
    assert _judge(line, old)["verdict"] == "promote"


def test_a_candidate_that_was_rolled_back_or_replaced_is_held(line):
    day = _Day()
    for number in (1, 2, 3):
        _promoted(line, day, f"day_{number}")
    assert _judge(line, 3)["verdict"] == "promote"  # As before.
    line.rollback(why="Ads went blank.")
    for number, said in (
        (3, "was rolled back: Ads went blank. Train another candidate: "),
        (1, "was promoted before 2. To serve it again: tfdistill line roll"),
    ):
        report = _judge(line, number)
        assert report["verdict"] == "hold" and said in report["reasons"][0]
    shutil.rmtree(line.candidate_path(3))
    with pytest.raises(ValueError, match="the run of candidate 3; it was rem"):
        _judge(line, 3)


def test_the_live_loss_decides_whether_a_version_stays(line):
    day = _Day()
    assert gate_lib.live_verdict(line)[0] == "hold"
    first = _promoted(line, day, "day_1")
    expected = _losses(day.model()).mean()

    def report(version, loss, examples):
        line.journal.note(
            "report", version=version, log_loss=loss, examples=examples
        )
        return gate_lib.live_verdict(line)

    assert report(first, expected, 3000)[0] == "hold"  # The canary period.
    assert report(first, expected, 9000)[0] == "promote"
    verdict, reasons = report(first, expected + 0.4, 20_000)
    assert verdict == "worse" and "the limit is +0.05" in reasons[0]
    assert "No version was promoted before it" in reasons[1]

    number, path = _candidate(line, "day_2", [day.model()], day.model())
    _judge(line, number)
    line.promote(number, path, extra=lines.extra(line, number))
    # A bad day for both is none of the new version's fault.
    report(first, expected + 0.3, 50_000)
    assert report(number, expected + 0.3, 50_000)[0] == "promote"
    assert report(number, expected + 0.4, 50_000)[0] == "roll back"
    assert report(number, float("nan"), 10)[0] == "roll back"


@pytest.mark.deep
def test_looking_often_rolls_nothing_good_back(line):
    day = _Day(rows=20_000)
    first = _promoted(line, day, "day_1")
    losses = _losses(day.model())
    for _ in range(30):
        mean = float(day.rng.choice(losses, 200).mean())
        line.journal.note("report", version=first, log_loss=mean, examples=200)
        assert gate_lib.live_verdict(line)[0] == "hold"


def test_a_churn_budget_is_the_gate_s_limit_unless_it_has_its_own():
    kind = tfdistill.contrib.line.LineSettings
    assert kind().gate_settings() == {}
    assert kind(churn_budget=0.02).gate_settings() == {"churn": 0.02}
    own = kind(churn_budget=0.02, gate=gate_lib.Gate(churn=0.03))
    assert own.gate_settings()["churn"] == 0.03
    with pytest.raises(ValueError, match="`churn_budget` must be >= 0"):
        kind(churn_budget=1.0)
