"""What a training is, as text and as hyperparameters."""

from tensorboard.plugins.hparams import plugin_data_pb2

from tests.cases import codistillation as cases
from tfdistill.observe import run_description


def test_a_model_is_described_before_and_after_it_is_built():
    model = cases.codistill(cases.linear(0), optimizer="adam")
    found = run_description.of_model(model)
    assert found["optimizer"]["class"] == "Adam"
    assert found["student"]["num_parameters"] == 15
    assert found["distillation_weight"]["class"] == "Constant"


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


def test_columns_that_matter_come_first():
    values = {"a": 1.0, "group": 0.0}
    summary = run_description.experiment(values, ["validation/loss", "x"])
    found = plugin_data_pb2.HParamsPluginData.FromString(
        summary.value[0].metadata.plugin_data.content
    ).experiment
    assert [c.name for c in found.hparam_infos] == ["group", "a"]
    assert [m.name.tag for m in found.metric_infos] == ["validation/loss"]
