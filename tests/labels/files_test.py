"""Labels written beside examples: read back with the same data, or refused."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill import labels

_X, _Y = cases.data(50)


def _data(x=_X, y=_Y, batch_size=8):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)


def _all(dataset, name="labels"):
    """Inputs, classes and whole outputs of all rows."""
    rows = list(dataset.unbatch().as_numpy_iterator())
    x, y, outputs = zip(
        *(
            (x.inputs, y, x.labels[name]["outputs"][0]["whole"])
            for x, y in rows
        ),
        strict=True,
    )
    return np.array(x), np.array(y), np.array(outputs)


def test_what_was_written_comes_with_its_example(tmp_path):
    teacher = cases.linear(5)
    seen = []
    num_rows = labels.write(_data(), teacher, tmp_path, progress=seen.append)
    assert num_rows == seen[-1] == 50
    found = labels.read(tmp_path)
    assert found.num_rows == 50
    x, y, outputs = _all(_data().apply(found))
    np.testing.assert_array_equal(x, _X)
    np.testing.assert_array_equal(y, _Y)
    np.testing.assert_allclose(outputs, teacher(_X), rtol=1e-5, atol=1e-6)
    # Shuffled, a part of the data, and the same data again.
    shuffled = _data().apply(found).unbatch().shuffle(50).batch(8)
    assert len(_all(shuffled)[0]) == 50
    part = _data().take(2).apply(found).repeat(2)
    assert len(_all(part)[0]) == 32


def test_outputs_of_a_saved_model_have_the_order_of_the_students(tmp_path):
    """By their names, and not by the numbers at the end of these."""
    inputs = keras.Input((cases.NUM_FEATURES,))
    outputs = {
        name: keras.layers.Dense(size)(inputs)
        for name, size in (("tail_1", 2), ("head_2", 3))
    }
    teacher = keras.Model(inputs, outputs)
    tfdistill.CodistillModel(teacher).export(tmp_path / "model", verbose=False)
    labels.write(_data(), teacher, tmp_path / "of_model")
    labels.write(_data(), tmp_path / "model", tmp_path / "of_file")
    for name in ("of_model", "of_file"):
        x, _ = next(iter(_data().apply(labels.read(tmp_path / name))))
        found = [o["whole"] for o in x.labels["labels"]["outputs"]]
        cases.assert_close(found, teacher(_X[:8]), rtol=1e-6)


def _first_difference(dataset, found):
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="the same order"
    ) as caught:
        list(dataset.apply(found))
    return int(str(caught.value).split("[")[2].split("]")[0])


def test_other_data_and_another_order_are_refused(tmp_path):
    labels.write(_data(), cases.linear(5), tmp_path)
    found = labels.read(tmp_path)
    swapped = _X.copy()
    swapped[[20, 21]] = swapped[[21, 20]]
    assert _first_difference(_data(swapped), found) == 2
    changed = _X.copy()
    changed[49, 3] += 1e-6
    assert _first_difference(_data(changed), found) == 6
    longer = _data().concatenate(_data())
    assert _first_difference(longer, found) == 7
    for wrong in (
        _data().unbatch(),
        _data(batch_size=7),
        _data(_X.astype("float64")),
    ):
        assert _first_difference(wrong, found) == 0


def test_top_classes_are_smaller(tmp_path):
    sizes = {}
    for name, form in (
        ("whole", labels.Form()),
        ("top", labels.Form(top_k=2, dtype="float16")),
    ):
        teacher = cases.linear(5, classes=100)
        labels.write(_data(), teacher, tmp_path / name, form=form)
        found = labels.read(tmp_path / name)
        # One example at a time, too: TensorFlow does not survive that with
        # tensors that have a shape and no bytes.
        x, _ = next(iter(_data().apply(found).unbatch().batch(8)))
        (kept,) = x.labels["labels"]["outputs"]
        sizes[name] = sum(int(tf.size(v)) * v.dtype.size for v in kept.values())
    assert sizes == {"whole": 8 * 400, "top": 8 * 12}


def test_labels_that_were_changed_or_not_finished_are_refused(tmp_path):
    labels.write(_data(), cases.linear(5), tmp_path / "a")
    changed = tmp_path / "changed"
    shutil.copytree(tmp_path / "a", changed)
    (file,) = changed.glob("*.tfrecord")
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(tf.errors.DataLossError):
        list(_data().apply(labels.read(changed)))
    file.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="labels.tfrecord must have"):
        labels.read(changed)
    (changed / "labels.json").unlink()
    with pytest.raises(
        ValueError, match="labels.json, which is written last; rec"
    ):
        labels.read(changed)
    # What a stopped writer has left is written anew.
    labels.write(_data(), cases.linear(5), changed)
    assert labels.read(changed).num_rows == 50
    with pytest.raises(ValueError, match="new or empty.*labels.json"):
        labels.write(_data(), cases.linear(5), changed)
    whole = (changed / "labels.json").read_text()
    for wrong in (
        *("[]", "{}", "not"),
        whole.replace('"format": 3', '"format": 2'),
    ):
        (changed / "labels.json").write_text(wrong)
        with pytest.raises(ValueError, match="must be complete labels"):
            labels.read(changed)
    (changed / "labels.json").write_text(whole)
    (changed / "labels.tfrecord").unlink()
    with pytest.raises(ValueError, match="complete labels.*labels.tfrecord"):
        labels.read(changed)


def test_what_cannot_be_labelled_is_refused(tmp_path):
    teacher = cases.linear(5)
    teacher.layers[-1].bias.assign([np.nan, 0, 0])
    for data, match in (
        (_data().repeat(), "must end"),
        (_data().take(0), "at least one example"),
        (_data(), "finite.*after 0 ex"),
    ):
        with pytest.raises(ValueError, match=match):
            labels.write(data, teacher, tmp_path)
    large = cases.linear(5)
    large.layers[-1].bias.assign([1e5, 0, 0])
    form = labels.Form(dtype="float16")
    with pytest.raises(ValueError, match="finite, as float16"):
        labels.write(_data(), large, tmp_path, form=form)
    shares = keras.Sequential([large, keras.layers.Softmax()])
    with pytest.raises(ValueError, match="must be logits"):
        labels.write(_data(), shares, tmp_path, form=labels.Form(top_k=2))
    with pytest.raises(ValueError, match="local or mounted"):
        labels.write(_data(), teacher, "s3://bucket/labels")
