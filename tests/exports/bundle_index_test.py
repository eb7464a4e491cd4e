"""Checkpoints from elsewhere: what is read of them, and what is refused."""

import pathlib
import random

import numpy as np
import pytest
import tensorflow as tf

from tests.cases import bundles as cases
from tests.cases import codistillation
from tests.cases import fuzzing
from tfdistill.exchange import filesystem
from tfdistill.exports import bundle_index
from tfdistill.exports import graph_check
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph

_DISK = filesystem.LocalFileSystem()
_TENSORS = {
    "a": np.arange(6, dtype="float32").reshape(2, 3),
    "half": np.arange(5).astype(tf.bfloat16.as_numpy_dtype),
    "flags": [True, False, True],
    "none": np.zeros([0, 3], "int64"),
    "scalar": 7,
    "text": ["some", "", "ü" * 200],
}


@pytest.fixture
def prefix(tmp_path):
    cases.write(f"{tmp_path}/x", _TENSORS)
    return f"{tmp_path}/x"


def _read(prefix, *keys):
    index = bundle_index.load(_DISK, prefix)
    return list(bundle_index.read(_DISK, prefix, index, keys))


def test_what_tensorflow_writes_is_read_as_tensorflow_reads_it(prefix):
    bundle_index.check(_DISK, prefix)
    keys = [key for key in _TENSORS if key != "text"]
    reader = tf.train.load_checkpoint(prefix)
    for key, value in zip(keys, _read(prefix, *keys), strict=True):
        expected = reader.get_tensor(key)
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_slices_in_many_files_are_put_together(tmp_path, axis):
    table = np.arange(300.0 * 70).reshape(300, 70)
    parts, first = [], 0
    for number, part in enumerate(np.array_split(table, 9, axis)):
        size = part.shape[axis]
        where = f"{first},{size}:-" if axis == 0 else f"-:{first},{size}"
        parts.append(f"{tmp_path}/part_{number}")
        tf.raw_ops.SaveV2(
            prefix=parts[-1],
            tensor_names=["table"],
            shape_and_slices=[f"300 70 {where}"],
            tensors=[tf.constant(part)],
        )
        first += size
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=parts, destination_prefix=f"{tmp_path}/x"
    )
    bundle_index.check(_DISK, f"{tmp_path}/x")
    np.testing.assert_array_equal(_read(f"{tmp_path}/x", "table")[0], table)


def _sized(proto, *sizes):
    del proto.shape.dim[:]
    for size in sizes:
        proto.shape.dim.add(size=size)


def _set(**fields):
    def edit(proto):
        for name, value in fields.items():
            setattr(proto, name, value)

    return edit


_FORGED = {
    "2^40 x 2^40": ("a", lambda p: _sized(p, 2**40, 2**40)),
    "an overflow times 0": ("none", lambda p: _sized(p, 2**62, 2**62, 0)),
    "negative": ("a", lambda p: _sized(p, -2, -3)),
    "of 300 dimensions": ("a", lambda p: _sized(p, *[1] * 300)),
    "unknown rank": ("a", lambda p: _set(unknown_rank=True)(p.shape)),
    "another size": ("a", lambda p: _sized(p, 3, 3)),
    "an unknown dtype": ("a", _set(dtype=999)),
    "a handle": ("a", _set(dtype=tf.resource.as_datatype_enum)),
    "a wider dtype": ("a", _set(dtype=tf.float64.as_datatype_enum)),
    "beyond the file": ("a", _set(offset=2**40)),
    "before the file": ("a", _set(offset=-8)),
    "another file": ("a", _set(shard_id=1)),
    "a slice of itself": ("a", lambda p: p.slices.add()),
    "no files": ("", _set(num_shards=0)),
    "billions of files": ("", _set(num_shards=2**31 - 1)),
    "another byte order": ("", _set(endianness=1)),
    "texts longer than their file": ("text", _set(size=100)),
}


@pytest.mark.parametrize("name", _FORGED)
def test_an_index_that_could_end_its_reader_is_refused(prefix, name):
    path = pathlib.Path(f"{prefix}.index")
    whole = path.read_bytes()
    path.write_bytes(cases.change(whole, "a", lambda proto: None))
    bundle_index.check(_DISK, prefix)
    path.write_bytes(cases.change(whole, *_FORGED[name]))
    with pytest.raises(bundle_index.BundleError, match="its checkpoint must"):
        bundle_index.check(_DISK, prefix)


def test_texts_as_long_as_terabytes_are_refused(prefix):
    text = bundle_index.load(_DISK, prefix).tensors["text"].pieces[0]
    path = pathlib.Path(f"{prefix}.data-00000-of-00001")
    content = bytearray(path.read_bytes())
    content[text.offset : text.offset + 6] = cases.varint(2**40)
    path.write_bytes(content)
    with pytest.raises(bundle_index.BundleError, match="made of texts"):
        bundle_index.check(_DISK, prefix)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 100,
        b"\0" * 40 + cases.table({})[-8:],
        cases.table({}),
        cases.table({})[:-48] + cases.table({b"": b"\x08\x01"})[-48:],
    ],
    ids=["empty", "noise", "footer", "no header", "another's footer"],
)
def test_what_is_no_index_is_refused(content):
    with pytest.raises(bundle_index.BundleError):
        bundle_index.parse(content)


@pytest.mark.parametrize("block", ["data", "metadata", "index"])
@pytest.mark.parametrize("size", [0, 2**60])
def test_blocks_of_a_size_that_nobody_has_are_refused(block, size):
    header = {b"": b"\x08\x01"}
    assert bundle_index.parse(cases.table(header)).num_shards == 1
    with pytest.raises(bundle_index.BundleError, match="blocks inside of it"):
        bundle_index.parse(cases.table(header, **{block: size}))


def test_what_is_let_pass_ends_no_process_of_tensorflow(prefix, tmp_path):
    """Whatever was changed: hundreds of indexes, opened by one process."""
    whole = pathlib.Path(f"{prefix}.index").read_bytes()
    data = pathlib.Path(f"{prefix}.data-00000-of-00001").read_bytes()
    rng, passed = random.Random(7), []
    for number in range(1000):
        found = {k: bytearray(v) for k, v in cases.entries(whole).items()}
        for _ in range(rng.choice((1, 1, 2))):
            value = found[rng.choice([*found])]
            place = rng.randrange(len(value))
            value[place] = rng.choice((0, 1, value[place] ^ 1, 127, 255))
        changed = cases.table({k: bytes(v) for k, v in found.items()})
        path = tmp_path / f"{number}.index"
        path.write_bytes(changed)
        path.with_suffix(".data-00000-of-00001").write_bytes(data)
        try:
            bundle_index.check(_DISK, str(path.with_suffix("")))
            passed.append(str(path.with_suffix("")))
        except bundle_index.BundleError:
            pass
    assert 50 < len(passed) < 800
    printed = codistillation.run_python(_OPEN, *passed)
    assert printed.split() == ["opened", str(len(passed))]


_OPEN = """
import sys
import tensorflow as tf
for prefix in sys.argv[1:]:
    try:
        reader = tf.train.load_checkpoint(prefix)
        for key in reader.get_variable_to_shape_map():
            reader.get_tensor(key)
    except (ValueError, tf.errors.OpError):
        pass
print("opened", len(sys.argv) - 1)
"""


def test_libfuzzer_finds_no_bytes_that_break_the_reader(prefix, tmp_path):
    pytest.importorskip("atheris", reason="it has no wheel for this platform")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    content = pathlib.Path(f"{prefix}.index").read_bytes()
    (corpus / "written").write_bytes(content)
    (corpus / "small").write_bytes(cases.table({b"": b"\x08\x01"}))
    found = fuzzing.num_covered(
        "bundle_fuzzer.py", corpus, runs=15000, max_len=2048
    )
    assert found > 60


# ---- versions ----


def _written(directory):
    graph = student_graph.StudentGraph(
        codistillation.linear(1), codistillation.input_spec()
    )
    writer = saved_model.SavedModelWriter(graph)
    writer.write(str(directory), writer.snapshot())
    return writer


def _forge(directory):
    path = pathlib.Path(directory, "variables", "variables.index")
    path.write_bytes(cases.with_shape(path.read_bytes(), 2**40, 2**40))


def test_a_signed_shape_that_is_a_lie_ends_no_reader(tmp_path):
    """TensorFlow's own reader aborts the process on it."""
    writer = _written(tmp_path)
    _forge(tmp_path)
    with pytest.raises(ValueError, match="its checkpoint must be of shapes"):
        saved_model.read_variables(str(tmp_path), writer.variables)
    with pytest.raises(ValueError, match="its checkpoint must be of shapes"):
        graph_check.check_directory(str(tmp_path))


def test_variables_that_no_student_has_are_refused(tmp_path):
    writer = _written(tmp_path)
    fewer = dict(list(writer.variables.items())[:1])
    with pytest.raises(ValueError, match="1 variables of the student and no"):
        saved_model.read_variables(str(tmp_path), fewer)


def test_some_variables_are_read_and_all_are_checked(tmp_path):
    writer = _written(tmp_path)
    _, second = writer.variables
    (value,) = saved_model.read_variables(
        str(tmp_path), writer.variables, only=[second]
    )
    assert value.shape == writer.variables[second]["shape"]
    _forge(tmp_path)
    with pytest.raises(ValueError, match="its checkpoint must be"):
        saved_model.read_variables(
            str(tmp_path), writer.variables, only=[second]
        )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
