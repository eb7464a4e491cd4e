"""What a training is, as text and as hyperparameters."""

import keras
import pytest
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.plugins.hparams import summary_v2

from tests.cases import codistillation as cases
from tfdistill.observe import run_description


class _Secretive(keras.optimizers.SGD):
    def get_config(self):
        raise NotImplementedError("a user's own")


def test_a_model_is_described_before_and_after_it_is_built():
    model = cases.codistill(cases.linear(0), optimizer="adam")
    found = run_description.of_model(model)
    assert found["optimizer"]["class"] == "Adam"
    assert found["student"]["num_parameters"] == 15
    assert found["distillation_weight"]["class"] == "Constant"


def test_what_cannot_be_described_is_named():
    model = cases.codistill(cases.linear(0), optimizer=_Secretive(0.1))
    assert run_description.of_model(model)["optimizer"] == "_Secretive"


def test_hyperparameters_are_flat_and_plain():
    found = run_description.hyperparameters(
        {
            "seed": 3,
            "none": None,
            "nan": float("nan"),
            "inner": {"flag": True, "list": [1, {"a": 2}], "empty": {}},
        }
    )
    assert found == {
        "seed": 3.0,
        "inner.flag": True,
        "inner.list": '[1, {"a": 2}]',
    }
    assert type(found["inner.flag"]) is bool


def _experiment(values, tags):
    summary = summary_v2.hparams_config_pb([], [])
    summary.ParseFromString(run_description.experiment(values, tags))
    return plugin_data_pb2.HParamsPluginData.FromString(
        summary.value[0].metadata.plugin_data.content
    ).experiment


def test_columns_that_matter_come_first():
    found = _experiment({"a": 1.0, "group": 0.0}, ["validation/loss", "x"])
    assert [c.name for c in found.hparam_infos if c.differs] == ["group"]
    assert [m.name.tag for m in found.metric_infos] == ["validation/loss"]


@pytest.mark.parametrize("tags", [["training/loss"], []])
def test_without_validation_the_training_counts(tags):
    found = _experiment({"a": 1.0}, tags)
    assert [m.name.tag for m in found.metric_infos] == tags


def test_markdown_is_code():
    text = run_description.markdown({"a": "<script>"})
    assert all(line.startswith("    ") for line in text.splitlines())
