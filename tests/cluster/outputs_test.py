"""Groups that write by one name."""

import csv
import os
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill.cluster import outputs


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Two groups of one run, as each finds itself in the environment."""
    monkeypatch.chdir(tmp_path)
    found = []

    def become(group, **changes):
        known = tfdistill.Cluster(
            group=group,
            **{"num_groups": 2, "workdir": str(tmp_path / "run"), **changes},
        )
        monkeypatch.setattr(
            tfdistill.Cluster, "from_env", classmethod(lambda cls: known)
        )
        outputs._of_directory.cache_clear()
        found.append(outputs.of(known))
        return known

    yield become
    for files in found:
        files.leave()


@pytest.mark.parametrize(
    "path, moved",
    [
        ("best.keras", "best.keras"),
        ("./out/../out/best.keras", "out/best.keras"),
        ("/data/best.keras", "data/best.keras"),
        ("gs://bucket/best.keras", "gs/bucket/best.keras"),
        ("group_1/best.keras", None),
        ("run/group_1/best.keras", None),
        ("", None),
    ],
)
def test_a_later_group_has_the_same_name_below_its_directory(
    groups, tmp_path, path, moved
):
    files = outputs.of(groups(1))
    own = f"{tmp_path}/run/group_1/files/{moved}" if moved else path
    assert files.written(path) == own
    assert files.read(path) == own
    assert files.written(own) == own
    for alone in (groups(0), groups(0, num_groups=1), groups(1, workdir=None)):
        assert outputs.of(alone).written(path) == path


def test_what_a_group_wrote_is_what_it_loads(groups, tmp_path, caplog):
    x, y = cases.data()
    for group in (0, 1):
        groups(group)
        model = tfdistill.DistributedModel(cases.linear(0))
        model.compile("sgd", "mse", metrics=["mae"])
        callbacks = [
            keras.callbacks.CSVLogger("log.csv"),
            keras.callbacks.ModelCheckpoint(
                "{epoch}.weights.h5", save_weights_only=True
            ),
            keras.callbacks.TensorBoard("curves"),
            tfdistill.callbacks.Backup("backups", every_steps=10),
        ]
        history = model.fit(
            x, (1 + group) * y[:, None], verbose=0, callbacks=callbacks
        )
        model.save("last.keras")
        model.export("exported")
        loaded = keras.models.load_model("last.keras")
        expected = model.get_weights()
        model.load_weights("1.weights.h5")
        inner = cases.linear(1)
        inner.load_weights("1.weights.h5")
        exported = tf.saved_model.load("exported").variables
        for found in (
            *(loaded.get_weights(), model.get_weights(), inner.get_weights()),
            [variable.numpy() for variable in exported],
        ):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)
        with open("log.csv") as file:
            logged = [float(row["mae"]) for row in csv.DictReader(file)]
        np.testing.assert_allclose(logged, history.history["mae"], rtol=1e-6)
        if group == 0:
            assert "writes" not in caplog.text
    own = tmp_path / "run/group_1/files"
    names = {"log.csv", "1.weights.h5", "curves", "last.keras", "exported"}
    assert {path.name for path in own.iterdir()} == names
    assert names < {path.name for path in tmp_path.iterdir()}
    # Which keep groups apart by themselves.
    assert (tmp_path / "backups" / "fit_2").is_dir()
    assert f"This group writes last.keras to {own}/last.keras" in caplog.text


def test_what_python_writes_is_shared_and_warned_of_once(
    groups, tmp_path, caplog
):
    pathlib.Path("data.csv").write_text("1")
    files = outputs.of(groups(1))
    files.find()
    files.find()
    assert pathlib.Path("data.csv").read_text() == "1"
    assert "writes" not in caplog.text
    # What the run writes for itself is nobody's concern.
    pathlib.Path("run").mkdir()
    pathlib.Path("run", "signs").write_text("")
    assert "writes" not in caplog.text
    for name in ("a.npy", "b.npy"):
        np.save(name, np.arange(3))
        assert (tmp_path / name).exists()
    assert caplog.text.count("This group writes") == 1
    assert "writes a.npy to the place where other groups" in caplog.text
    # One name is one file, whoever writes it.
    moved = files.written("c.npy")
    np.save("c.npy", np.arange(3))
    assert moved == f"{tmp_path}/run/group_1/files/c.npy"
    np.testing.assert_array_equal(np.load("c.npy"), np.arange(3))
    files.leave()
    with pytest.raises(FileNotFoundError):
        np.load("c.npy")


def test_only_the_chief_says_where_a_group_writes(groups, tmp_path, caplog):
    spec = {"worker": ("a:1", "b:1")}
    for index in (1, 0):
        files = outputs.of(groups(1, spec=spec, task_index=index))
        assert files.written("best.keras") != "best.keras"
        assert ("writes" in caplog.text) == (index == 0)


def test_a_directory_that_the_run_has_made_may_be_made_again(groups, tmp_path):
    """By another task, or before a restart; but not twice by one task."""
    for name in ("run", "old", "theirs"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "launch.json").touch()
    os.utime("old", (1, 1))
    undo = outputs.share_directories(groups(1))
    try:
        os.makedirs("theirs")
        pathlib.Path("own/deeper").mkdir(parents=True)
        for name in ("theirs", "own/deeper", "old", "run/launch.json"):
            with pytest.raises(FileExistsError):
                os.mkdir(name)
    finally:
        undo()
    with pytest.raises(FileExistsError):
        os.mkdir("theirs")
