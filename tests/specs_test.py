import pytest
import tensorflow as tf

from tfdistill import specs

_SPEC = tf.TensorSpec([None, 2], tf.float32)


@pytest.mark.parametrize(
    ("structure", "expected"),
    [
        (_SPEC, ["x"]),
        ([_SPEC, _SPEC], ["x_0", "x_1"]),
        ((_SPEC,), ["x_0"]),
        ({"b": _SPEC, "a": _SPEC}, ["a", "b"]),
        ({"a": [_SPEC, _SPEC], "b": {"c": _SPEC}}, ["a_0", "a_1", "b_c"]),
        ({"sepal length (cm)": _SPEC}, ["sepal_length__cm_"]),
        ({"C1-x/y": _SPEC, "2nd": _SPEC}, ["x_2nd", "C1_x_y"]),
    ],
)
def test_names_are_legal_and_in_the_order_of_the_leaves(structure, expected):
    assert specs.names(structure, "x") == expected


@pytest.mark.parametrize(
    "structure",
    [{"a b": _SPEC, "a_b": _SPEC}, {"a": {"b": _SPEC}, "a_b": _SPEC}],
)
def test_leaves_of_one_name_are_refused(structure):
    with pytest.raises(ValueError, match="must differ.*a_b"):
        specs.names(structure, "x")


def test_named_pairs_names_with_their_own_leaves():
    found = specs.named({"b": 1, "a": [2, 3]}, "x")
    assert found == {"a_0": 2, "a_1": 3, "b": 1}


def test_to_json_describes_each_leaf():
    structure = {"a": _SPEC, "b": tf.TensorSpec([], tf.string)}
    assert specs.to_json(structure, "x") == {
        "a": {"shape": [None, 2], "dtype": "float32"},
        "b": {"shape": [], "dtype": "string"},
    }


def test_to_json_of_an_unknown_rank_is_none():
    assert specs.to_json(tf.TensorSpec(None), "x")["x"]["shape"] is None


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
