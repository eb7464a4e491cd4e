"""Checkpoints from elsewhere: what is read of them, and what is refused."""

import pathlib

import pytest

from tests.cases import codistillation
from tfdistill.exchange import filesystem
from tfdistill.exports import checkpoints
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph

_DATA = "variables.data-00000-of-00001"


@pytest.fixture
def writer(tmp_path):
    graph = student_graph.StudentGraph(
        codistillation.linear(1), codistillation.input_spec()
    )
    writer = saved_model.SavedModelWriter(graph)
    writer.write(str(tmp_path), writer.snapshot())
    return writer


def _cut(name, size):
    def change(variables):
        content = (variables / name).read_bytes()
        (variables / name).write_bytes(content[:size])

    return change


def _flip(name, place):
    def change(variables):
        content = bytearray((variables / name).read_bytes())
        content[place] ^= 1
        (variables / name).write_bytes(content)

    return change


_DAMAGED = {
    "an index cut short": _cut("variables.index", -1),
    "a changed index": _flip("variables.index", 20),
    "data cut short": _cut(_DATA, 10),
    "changed data": _flip(_DATA, 0),
    "absent data": lambda variables: (variables / _DATA).unlink(),
}


@pytest.mark.parametrize("name", _DAMAGED)
def test_damaged_files_are_refused(tmp_path, writer, name):
    _DAMAGED[name](tmp_path / "variables")
    with pytest.raises(checkpoints.CheckpointError, match="must be whole"):
        saved_model.read_variables(str(tmp_path), writer.variables)


def test_a_storage_that_fails_is_no_fault_of_a_version(
    tmp_path, writer, monkeypatch
):
    def fail(self, path):
        raise OSError(5, "the storage fails", path)

    _DAMAGED["data cut short"](tmp_path / "variables")
    with monkeypatch.context() as patch:
        patch.setattr(filesystem.LocalFileSystem, "blocks", fail)
        with pytest.raises(OSError, match="the storage fails"):
            saved_model.read_variables(str(tmp_path), writer.variables)
    pathlib.Path(tmp_path, "variables", "variables.index").unlink()
    with pytest.raises(FileNotFoundError):
        saved_model.read_variables(str(tmp_path), writer.variables)


def test_variables_that_no_student_has_are_refused(tmp_path, writer):
    fewer = dict(list(writer.variables.items())[:1])
    with pytest.raises(ValueError, match="1 variables of the student and no"):
        saved_model.read_variables(str(tmp_path), fewer)


def test_some_variables_are_read_and_all_are_checked(tmp_path, writer):
    first, second = writer.variables
    (value,) = saved_model.read_variables(
        str(tmp_path), writer.variables, only=[second]
    )
    assert value.shape == writer.variables[second]["shape"]
    others = {**writer.variables, first: {"shape": [9, 9], "dtype": "float32"}}
    with pytest.raises(ValueError, match=r"float32 \[9, 9\]; received"):
        saved_model.read_variables(str(tmp_path), others, only=[second])
