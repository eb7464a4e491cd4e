"""Groups that write by one name."""

import keras
import numpy as np
import pytest

import tfdistill
from tests.cases import codistillation as cases
from tfdistill.cluster import outputs


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Two groups of one run, as each finds itself in the environment."""
    monkeypatch.chdir(tmp_path)
    for module in (keras.models, keras.saving):
        monkeypatch.setattr(module, "load_model", module.load_model)

    def become(group, **changes):
        known = tfdistill.Cluster(
            group=group,
            **{"num_groups": 2, "workdir": str(tmp_path / "run"), **changes},
        )
        monkeypatch.setattr(
            tfdistill.Cluster, "from_env", classmethod(lambda cls: known)
        )
        outputs._of_directory.cache_clear()
        return known

    return become


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
        model.fit(x, (1 + group) * y[:, None], verbose=0, callbacks=callbacks)
        model.save("last.keras")
        loaded = keras.models.load_model("last.keras")
        expected = model.get_weights()
        model.load_weights("1.weights.h5")
        for found in (loaded.get_weights(), model.get_weights()):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)
        if group == 0:
            assert "writes" not in caplog.text
    own = tmp_path / "run/group_1/files"
    names = {"log.csv", "1.weights.h5", "curves", "last.keras"}
    assert {path.name for path in own.iterdir()} == names
    assert names < {path.name for path in tmp_path.iterdir()}
    # Which keep groups apart by themselves.
    assert (tmp_path / "backups" / "fit_2").is_dir()
    assert f"This group writes last.keras to {own}/last.keras" in caplog.text
