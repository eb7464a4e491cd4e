"""Several steps in one call, unrolled or in a loop, against plain `fit`."""

import keras
import numpy as np
import parameter_server_cases as cases
import pytest
import tensorflow as tf

import tfdistill
from tfdistill import metric_totals
from tfdistill import parameter_server_training
from tfdistill import train_function

NUM_STEPS = 3


class Plain(
    parameter_server_training.ParameterServerTraining,
    tfdistill.MultiWorkerTraining,
    keras.Model,
):
    """A model whose steps log nothing but metrics."""


@pytest.fixture(autouse=True)
def _one_worker(monkeypatch):
    cases.Coordinator(monkeypatch)


def _model(make=cases.remote):
    return make(
        optimizer=keras.optimizers.Adam(0.05),
        metrics=[keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")],
    )


class _Run:
    """Calls one function again and again, as a coordinator does."""

    def __init__(self, model, *, endless):
        self.step, *_ = cases.step_of(model)
        self.totals = metric_totals.MetricTotals(model)
        self.function = train_function.TrainFunction(
            model,
            self.step,
            self.totals,
            num_steps=NUM_STEPS,
            endless=endless,
            metric_names=list(self.totals.results()),
        )
        self._arguments = model.execution_arguments()

    def __call__(self, iterator, first_step):
        vector = self.function.function(
            iterator,
            tf.constant(first_step, tf.int64),
            self._arguments,
        )
        result = self.function.result(vector)
        self.totals.add(result.added)
        return result


@pytest.mark.parametrize("endless", [False, True], ids=["loop", "unrolled"])
def test_executions_equal_fit(endless):
    expected = _model(cases.model)
    logs = expected.fit(cases.batches(), verbose=0).history
    model = _model()
    run = _Run(model, endless=endless)
    dataset = cases.batches().repeat() if endless else cases.batches()
    iterator = iter(dataset)
    for first in (0, NUM_STEPS):
        result = run(iterator, first)
        assert (result.num_steps, result.num_examples) == (NUM_STEPS, 12)
    cases.assert_same(cases.weights(model), cases.weights(expected), atol=1e-5)
    found = run.totals.results()
    assert found == pytest.approx({k: logs[k][0] for k in found})
    assert set(result.logs) == {"distillation_weight", "teacher_staleness"}
    assert result.logs["distillation_weight"] == 0
    assert np.isnan(result.logs["teacher_staleness"])
    assert result.report.size == 0
    assert run.function.function.experimental_get_tracing_count() == 1


def test_data_that_end_are_counted_as_they_are():
    expected, model = _model(cases.model), _model()
    # Batches of 4, 4, 4, 4 and 1.
    dataset = cases.batches(num_examples=17)
    expected.fit(dataset, verbose=0)
    run = _Run(model, endless=False)
    iterator = iter(dataset)
    results = [run(iterator, first) for first in (0, 3, 5)]
    assert [r.num_steps for r in results] == [3, 2, 0]
    assert [r.num_examples for r in results] == [12, 5, 0]
    assert not results[2].added.any()
    # That of the last step done.
    assert results[1].logs["distillation_weight"] == 0
    cases.assert_same(cases.weights(model), cases.weights(expected), atol=1e-5)


@pytest.mark.parametrize("endless", [False, True], ids=["loop", "unrolled"])
def test_a_model_may_log_nothing_of_its_own(endless):
    built = cases.student()
    model = Plain(built.input, built.output)
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    dataset = cases.batches(5)
    model.build_for(dataset.element_spec)
    run = _Run(model, endless=endless)
    result = run(iter(dataset), 0)
    assert (result.logs, result.num_steps, result.num_examples) == ({}, 3, 15)
    assert result.added.size == run.totals.size
    assert run.totals.results()["loss"] > 0


def test_it_names_the_worker_and_passes_the_models_report_on(monkeypatch):
    coordinator = cases.Coordinator(monkeypatch, num_workers=3)
    model = _model()
    told = []

    class OnWorker:
        def __init__(self, arguments):
            told.append(arguments)

        def __enter__(self):
            told.append("inside")

        def __exit__(self, *_):
            told.append("outside")

    monkeypatch.setattr(model, "on_worker", OnWorker)
    monkeypatch.setattr(
        model,
        "execution_report",
        lambda: (told.append("asked"), tf.constant([5.0, 6.0], tf.float64))[1],
    )
    run = _Run(model, endless=True)
    iterator = cases.PerWorker([iter(cases.batches().repeat())] * 3)
    results = [coordinator.schedule(run, (iterator, 0)).get() for _ in range(2)]
    assert [r.worker for r in results] == [0, 1]
    assert results[1].report.tolist() == [5, 6]
    assert told[1:] == ["inside", "asked", "outside"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
