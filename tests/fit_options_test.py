import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdistill import fit_options


def _dataset():
    return tf.data.Dataset.range(6).batch(2)


def test_absent_arguments_have_the_defaults_of_keras():
    dataset = _dataset()
    assert fit_options.FitOptions.of({"x": dataset}) == fit_options.FitOptions(
        source=dataset,
        epochs=1,
        initial_epoch=0,
        steps_per_epoch=None,
        verbose=1,
        callbacks=[],
        validation=None,
        validation_steps=None,
        validation_freq=1,
    )


def test_given_arguments_are_kept():
    train, validation = _dataset().repeat(2), _dataset()
    callback = keras.callbacks.Callback()
    arguments = {
        "epochs": 7,
        "initial_epoch": 2,
        "steps_per_epoch": 5,
        "verbose": 2,
        "validation_steps": 4,
        "validation_freq": 3,
    }
    found = fit_options.FitOptions.of(
        {
            **arguments,
            "x": train,
            "callbacks": (callback,),
            "validation_data": validation,
            "class_weight": None,
            "validation_split": 0.0,
        }
    )
    assert {name: getattr(found, name) for name in arguments} == arguments
    assert found.callbacks == [callback]
    assert (found.source, found.validation) == (train, validation)


def _rows(source):
    return [[part.tolist() for part in e] for e in source.as_numpy_iterator()]


def test_arrays_become_batches_and_are_shuffled_for_training_alone():
    x, y = np.arange(40), np.arange(40) + 100
    found = fit_options.FitOptions.of(
        {
            "x": x,
            "y": y,
            "batch_size": 16,
            "validation_data": (x, y),
            "validation_batch_size": 30,
        }
    )
    train, validation = _rows(found.source), _rows(found.validation)
    assert [len(batch[0]) for batch in train] == [16, 16, 8]
    rows = [pair for batch in train for pair in zip(*batch, strict=True)]
    expected = list(zip(x, y, strict=True))
    assert rows != expected and sorted(rows) == expected
    assert validation == [
        [x[:30].tolist(), y[:30].tolist()],
        [x[30:].tolist(), y[30:].tolist()],
    ]
    plain = fit_options.FitOptions.of({"x": x, "y": y, "shuffle": False})
    assert _rows(plain.source)[0] == [x[:32].tolist(), y[:32].tolist()]


@pytest.mark.parametrize(
    ("verbose", "expected"), [("auto", 1), (0, 0), (True, 1), (2, 2)]
)
def test_verbose_is_a_number(verbose, expected):
    arguments = {"x": _dataset(), "verbose": verbose}
    assert fit_options.FitOptions.of(arguments).verbose == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"validation_split": 0.1}, "`validation_split` .* received 0.1"),
        ({"class_weight": {0: 2.0}}, "`class_weight` .* received {0: 2.0}"),
        ({"steps_per_epoch": 0}, "`steps_per_epoch` .* received 0"),
        ({"y": np.ones(3)}, "`y`, .* must be left out"),
        ({"validation_data": (_dataset, 1)}, "`y`, .* must be left out"),
        ({"x": None}, "`x` must be a tf.data.Dataset.* received NoneType"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        fit_options.FitOptions.of({"x": _dataset(), **arguments})


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
