import os

import codistillation_cases as cases
import pytest

from tfdistill import graph_check
from tfdistill import saved_model_files
from tfdistill import savedmodel
from tfdistill import student_graph

WHOLE = [
    "saved_model.pb",
    "fingerprint.pb",
    "variables/variables.index",
    "variables/variables.data-00000-of-00001",
]


@pytest.fixture(scope="module")
def graph():
    return student_graph.StudentGraph(cases.linear(1), cases.input_spec())


def _write(graph, directory):
    directory.mkdir()
    writer = savedmodel.SavedModelWriter(graph)
    writer.write(str(directory), writer.snapshot())


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["assets/vocabulary.txt"],
        ["assets/words"],
        ["assets/words.1.tsv"],
        ["variables/variables.data-00001-of-00002"],
    ],
)
def test_the_files_of_a_saved_model_pass(more):
    saved_model_files.check_names([*WHOLE, *more])


@pytest.mark.parametrize(
    "name",
    [
        "saved_model.pbtxt",
        "saved_model.cpb",
        "saved_model.pb.bak",
        "student.keras",
        "weights.h5",
        "weights.pkl",
        "keras_metadata.pb",
        "assets/weights.pickle",
        "assets/model.keras",
        "assets/model.h5",
        "assets/code.py",
        "assets/library.so",
        "assets/deeper/vocabulary.txt",
        "assets/.hidden",
        "assets/../x.txt",
        "../saved_model.pb",
        "/saved_model.pb",
        "saved_model.pb\n",
        "variables/variables.data-00000-of-00001\0",
        "variables/checkpoint",
        "variables/variables.data-\u0660\u0660\u0660\u0660\u0660-of-00001",
        "saved_m\u043edel.pb",
    ],
)
def test_other_files_are_refused(name):
    with pytest.raises(graph_check.GraphError, match="files must be those of"):
        saved_model_files.check_names([*WHOLE, name])


def test_a_graph_is_needed():
    with pytest.raises(
        graph_check.GraphError, match="must include saved_model"
    ):
        saved_model_files.check_names(WHOLE[1:])


def test_sizes_are_limited_by_what_the_student_needs(graph):
    own = 2 * 15 * 4 + saved_model_files._SPARE_BYTES
    saved_model_files.check_size(own, graph, own_graph=True)
    with pytest.raises(
        graph_check.GraphError, match="for a student of 60; its"
    ):
        saved_model_files.check_size(own + 1, graph, own_graph=True)
    most = saved_model_files.MAX_OTHER_BYTES
    saved_model_files.check_size(most, graph, own_graph=False)
    with pytest.raises(graph_check.GraphError, match="names 1099511627776"):
        saved_model_files.check_size(2**40, graph, own_graph=False)


def test_a_directory_and_a_link_to_it_pass(graph, tmp_path):
    _write(graph, tmp_path / "7")
    (tmp_path / "7" / "manifest.json").touch()
    (tmp_path / "7" / "keras_metadata.pb").touch()
    (tmp_path / "latest").symlink_to(tmp_path / "7")
    saved_model_files.check_directory(str(tmp_path / "7"))
    saved_model_files.check_directory(str(tmp_path / "latest"))


def _link_file(directory):
    (directory / "fingerprint.pb").unlink()
    (directory / "fingerprint.pb").symlink_to("/etc/passwd")


def _link_directory(directory):
    (directory / "variables").rename(directory.parent / "elsewhere")
    (directory / "variables").symlink_to(directory.parent / "elsewhere")


def _pipe(directory):
    (directory / "fingerprint.pb").unlink()
    os.mkfifo(directory / "fingerprint.pb")


def _pipe_for_graph(directory):
    (directory / "saved_model.pb").unlink()
    os.mkfifo(directory / "saved_model.pb")


def _text(directory):
    (directory / "saved_model.pbtxt").touch()


@pytest.mark.parametrize(
    "change", [_link_file, _link_directory, _pipe, _pipe_for_graph, _text]
)
def test_a_changed_directory_is_refused(graph, tmp_path, change):
    _write(graph, tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(graph_check.GraphError, match="its files must be"):
        saved_model_files.check_directory(str(tmp_path / "model"))


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match="absent"):
        saved_model_files.check_directory(str(tmp_path / "absent"))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
