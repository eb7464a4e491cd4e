import codistillation_cases as cases
import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdistill import frozen_function
from tfdistill import savedmodel
from tfdistill import student_graph

_OUT = tf.TensorSpec([None, cases.NUM_CLASSES])


def _load(path, inputs=None, outputs=_OUT):
    return frozen_function.FrozenFunction(
        str(path),
        input_spec=cases.input_spec() if inputs is None else inputs,
        output_spec=outputs,
    )


def _module(path, function, spec, **signatures):
    module = tf.Module()
    module.function = tf.function(function, input_signature=[spec])
    tf.saved_model.save(
        module, str(path), signatures=signatures or module.function
    )


def _two_heads():
    inputs = keras.Input((4,))
    b = keras.layers.Dense(3, name="b")(inputs)
    a = keras.layers.Dense(3, name="a")(inputs)
    model = keras.Model(inputs, {"b": b, "a": a})
    cases.randomize(model, 2)
    return model


def test_our_own_export(tmp_path):
    student = cases.deep(1)
    graph = student_graph.StudentGraph(student, cases.input_spec())
    writer = savedmodel.SavedModelWriter(graph)
    writer.write(str(tmp_path), writer.snapshot())
    teacher = _load(tmp_path)
    x, _ = cases.data()
    np.testing.assert_allclose(teacher(x)[0], student(x), rtol=1e-5)
    assert [tuple(v.shape) for v in teacher.variables] == [
        tuple(v.shape) for v in student.variables
    ]
    other = cases.deep(2)
    for variable, value in zip(teacher.variables, other.variables, strict=True):
        variable.assign(value.value)
    np.testing.assert_allclose(teacher(x)[0], other(x), rtol=1e-5)


def test_a_keras_export(tmp_path):
    student = cases.deep(1)
    student.export(str(tmp_path), verbose=False)
    x, _ = cases.data()
    np.testing.assert_allclose(_load(tmp_path)(x)[0], student(x), rtol=1e-5)


def test_a_keras_export_with_several_outputs(tmp_path):
    student = _two_heads()
    student.export(str(tmp_path), verbose=False)
    x, _ = cases.data()
    outputs = {"a": _OUT, "b": _OUT}
    found = _load(tmp_path, outputs=outputs)(x)
    expected = student(x)
    np.testing.assert_allclose(found[0], expected["a"], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected["b"], rtol=1e-5)


def test_more_than_ten_numbered_outputs_stay_in_order(tmp_path):
    """As text, output_10 comes before output_2."""
    inputs = keras.Input((4,))
    heads = [keras.layers.Rescaling(float(i))(inputs) for i in range(12)]
    keras.Model(inputs, heads).export(str(tmp_path), verbose=False)
    outputs = [tf.TensorSpec([None, 4])] * 12
    found = _load(tmp_path, outputs=outputs)(tf.ones([1, 4]))
    assert [float(value[0, 0]) for value in found] == list(range(12))


def test_any_module_with_a_signature(tmp_path):
    _module(tmp_path, lambda x: {"p": x[:, :3] * 2.0}, cases.input_spec())
    x, _ = cases.data()
    np.testing.assert_array_equal(_load(tmp_path)(x)[0], x[:, :3] * 2)


def test_inputs_are_cast_to_what_the_teacher_takes(tmp_path):
    spec = cases.input_spec(dtype=tf.float64)
    _module(tmp_path, lambda x: {"p": x[:, :3]}, spec)
    x, _ = cases.data()
    found = _load(tmp_path)(tf.cast(x, tf.bfloat16))[0]
    assert found.dtype == tf.float64
    np.testing.assert_allclose(found, x[:, :3], atol=0.02)


def test_inputs_by_name(tmp_path):
    module = tf.Module()
    module.function = tf.function(
        lambda a, b: {"p": a - b},
        input_signature=[
            tf.TensorSpec([None, 3], name="a"),
            tf.TensorSpec([None, 3], name="b"),
        ],
    )
    tf.saved_model.save(module, str(tmp_path), signatures=module.function)
    specs = {"b": tf.TensorSpec([None, 3]), "a": tf.TensorSpec([None, 3])}
    found = _load(tmp_path, inputs=specs)(
        {"b": tf.fill([1, 3], 5.0), "a": tf.fill([1, 3], 7.0)}
    )
    np.testing.assert_array_equal(found[0], [[2, 2, 2]])


def test_names_that_signatures_cannot_hold_still_match(tmp_path):
    _module(
        tmp_path, lambda x: {"c-1": x[:, :3], "d": x[:, 1:]}, cases.input_spec()
    )
    found = _load(tmp_path, outputs={"d": _OUT, "c-1": _OUT})(tf.ones([1, 4]))
    assert len(found) == 2


@pytest.mark.parametrize("classes", [1, 2, 4])
def test_other_classes_are_refused(tmp_path, classes):
    _module(tmp_path, lambda x: {"p": x[:, :classes]}, cases.input_spec())
    with pytest.raises(ValueError, match=rf"3\).*found \(None, {classes}\)"):
        _load(tmp_path)


def test_other_features_are_refused(tmp_path):
    _module(tmp_path, lambda x: {"p": x[:, :3]}, cases.input_spec(9))
    with pytest.raises(ValueError, match=r"inputs of.*4\).*9\)"):
        _load(tmp_path)


def test_other_names_are_refused_naming_both(tmp_path):
    _module(tmp_path, lambda x: {"p": x, "q": x}, cases.input_spec())
    outputs = {"mine": _OUT, "yours": _OUT}
    with pytest.raises(ValueError, match="mine.*yours.*p.*q"):
        _load(tmp_path, outputs=outputs)


def test_another_number_of_outputs_is_refused(tmp_path):
    _module(tmp_path, lambda x: {"p": x[:, :3], "q": x}, cases.input_spec())
    with pytest.raises(ValueError, match="outputs.*found.*p.*q"):
        _load(tmp_path)


def test_a_savedmodel_without_the_signature_is_refused(tmp_path):
    module = tf.Module()
    module.function = tf.function(
        lambda x: {"p": x}, input_signature=[cases.input_spec()]
    )
    tf.saved_model.save(
        module, str(tmp_path), signatures={"mine": module.function}
    )
    with pytest.raises(ValueError, match="'serving_default'; found.*mine"):
        _load(tmp_path)


def test_no_savedmodel_at_all_is_an_error(tmp_path):
    with pytest.raises(OSError, match=str(tmp_path)):
        _load(tmp_path)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
