"""A training that was stopped and gone on with ends as one that was not."""

import backup_cases as cases
import keras
import pytest

CASES = {
    "endless": cases.Case(),
    "finite": cases.Case(data=cases.finite, fit={}),
    "unknown": cases.Case(data=cases.unknown, fit={}),
    "executions": cases.Case(steps_per_execution=2, fit={"steps_per_epoch": 4}),
    "arrays": cases.Case(
        data=lambda: dict(
            zip(
                ("x", "y"),
                next(iter(cases.numbered().batch(cases.NUM_EXAMPLES))),
                strict=True,
            ),
            batch_size=4,
        ),
        fit={},
    ),
    "schedule": cases.Case(
        optimizer=lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.CosineDecay(0.1, 15), momentum=0.9
        )
    ),
    "callbacks": cases.Case(
        callbacks=lambda: [
            keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=10.0)
        ]
    ),
}


_whole = {}


def _never_stopped(name):
    if name not in _whole:
        model, logs, _ = cases.train(CASES[name])
        _whole[name] = cases.values(model), logs.found
    return _whole[name]


# Keras warns when data of unknown length end for the first time.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("endless", [4]),
        ("endless", [8, 2]),
        ("finite", [10]),
        ("finite", [4, 3, 9]),
        ("unknown", [4]),
        ("unknown", [10]),
        ("executions", [5]),
        ("arrays", [11]),
        ("schedule", [7]),
        ("callbacks", [8]),
    ],
    ids=str,
)
def test_it_ends_as_if_it_had_never_stopped(name, stops, tmp_path):
    expected, expected_logs = _never_stopped(name)
    for after in stops:
        cases.train(CASES[name], tmp_path, stop_after=after)
    model, logs, backup = cases.train(CASES[name], tmp_path)
    assert backup.resumed_step
    cases.assert_same(cases.values(model), expected)
    assert logs.found.keys() < expected_logs.keys()
    assert logs.found == {key: expected_logs[key] for key in logs.found}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
