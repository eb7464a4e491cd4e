"""Groups that write one path."""

import dataclasses
import logging
import os

import keras
import pytest

import tfdistill
from tests.cases import codistillation as cases
from tfdistill.cluster import outputs


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Two groups of one run, as each finds itself in the environment."""
    monkeypatch.chdir(tmp_path)

    def become(group):
        known = tfdistill.Cluster(
            group=group, num_groups=2, workdir=str(tmp_path / "run")
        )
        monkeypatch.setattr(
            tfdistill.Cluster, "from_env", classmethod(lambda cls: known)
        )
        return known

    return become


def test_a_path_of_two_groups_is_named_with_both(groups, caplog):
    first, second = groups(0), groups(1)
    with caplog.at_level(logging.WARNING):
        outputs.take("best.keras", "ModelCheckpoint", first)
        outputs.take("best.keras", "ModelCheckpoint", first)  # Started again.
        outputs.take("group_1/best.keras", "ModelCheckpoint", second)
        alone = dataclasses.replace(second, num_groups=1, group=0)
        outputs.take("best.keras", "ModelCheckpoint", alone)
        assert not caplog.text
        outputs.take("./best.keras", "ModelCheckpoint", second)
    assert "group_1 writes to ./best.keras, as group_0 does" in caplog.text


def test_callbacks_and_models_say_where_they_write(groups, tmp_path, caplog):
    x, y = cases.data()
    for group in (0, 1):
        groups(group)
        model = tfdistill.DistributedModel(cases.linear(0))
        model.compile("sgd", "mse", metrics=["mae"])
        callbacks = [
            keras.callbacks.CSVLogger("log.csv"),
            tfdistill.callbacks.Backup("backups", every_steps=10),
            keras.callbacks.ModelCheckpoint(f"group_{group}.keras"),
        ]
        with caplog.at_level(logging.WARNING):
            model.fit(x, y[:, None], verbose=0, callbacks=callbacks)
            model.save("last.keras")
        if group == 0:
            assert "writes to" not in caplog.text
    said = [
        os.path.basename(record.args[2])
        for record in caplog.records
        if "writes to" in record.message
    ]
    assert said == ["log.csv", "backups", "last.keras"]
