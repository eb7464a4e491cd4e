"""The gates that a recipe sets before its teachers."""

import dataclasses
import inspect

import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from launch import recipes
from launch.config import sections
from launch.task import students
from models import criteo
from models import imagenet
from models import language_model
from tests.cases import language_model as language_model_cases
from tfdistill.teachers import gates


def _config(name="digits", *overrides):
    return recipes.override(recipes.get(name), overrides)


def _digits(num=4):
    x = np.zeros([num, 8, 8], "float32")
    return tf.data.Dataset.from_tensor_slices((x, np.arange(num))).batch(num)


def test_the_first_validation_examples_are_the_canary():
    batch = students.make_canary(
        _config("digits", "codistillation.canary_examples=3"), _digits()
    )
    assert batch.inputs.shape == [3, 8, 8]
    spec = tf.TensorSpec([None, 10])
    right = 9.0 * np.eye(10)[:3]
    batch.check(lambda x: [right], spec)
    # Wrong by more than `codistillation.canary_margin`.
    with pytest.raises(ValueError, match="at most 2.803.*received about 9"):
        batch.check(lambda x: [np.roll(right, 1, axis=1)], spec)


def test_there_may_be_none():
    config = _config("digits", "codistillation.canary_examples=0")
    assert students.make_canary(config, _digits()) is None


def test_labels_of_clicks_and_of_tokens():
    clicks = tf.data.Dataset.from_tensors(
        ({"a": tf.zeros([4, 2])}, tf.constant([[0.0], [1.0], [1.0], [0.0]]))
    )
    batch = students.make_canary(_config("criteo_small"), clicks)
    batch.check(lambda x: [tf.zeros([4, 1])], tf.TensorSpec([None, 1]))
    tokens = tf.data.Dataset.from_tensors(
        (tf.zeros([2, 5], tf.int32), tf.ones([2, 5], tf.int32))
    )
    batch = students.make_canary(_config("language_model_small"), tokens)
    batch.check(lambda x: [tf.zeros([2, 5, 7])], tf.TensorSpec([None, 5, 7]))


@pytest.mark.parametrize("name", sections.MIXING_RULES[1:])
def test_every_rule_of_a_recipe_is_one_of_the_library(name):
    arguments = {
        "elastic_averaging": ["mixing.arguments.alpha=0.3"],
        "outer_optimizer": ["mixing.arguments.learning_rate=0.7"],
    }.get(name, ["mixing.arguments.alpha=0.3"])
    config = _config(
        "digits", f"mixing.rule={name}", "seed_groups_alike=true", *arguments
    )
    rule = students.make_rule(config.mixing)
    assert type(rule).__name__.lower() == name.replace("_", "")
    if name == "outer_optimizer":
        assert float(rule.optimizer.learning_rate) == pytest.approx(0.7)
    else:
        assert 0.3 in dataclasses.astuple(rule)
    wrong = recipes.override(config, ["mixing.arguments.size=1"])
    with pytest.raises(students.OptionsError, match="`mixing.arguments` do"):
        students.make_rule(wrong.mixing)


def test_a_recipe_s_mixer_has_its_options(tmp_path):
    config = _config(
        "digits",
        "mixing.rule=model_averaging",
        "seed_groups_alike=true",
        "mixing.quorum=all",
        "mixing.grace_secs=7",
        "mixing.weigh_by=examples",
        "mixing.topology=[[1], [0], []]",
    )
    cluster = tfdistill.Cluster(group=1, num_groups=3)
    mixer = students.make_mixer(config, cluster)
    assert mixer._peers == (0,) and mixer._weigh_by == "examples"
    selection = mixer._selection
    assert (selection.quorum, selection.grace_secs) == ("all", 7.0)
    seeds = {students.initial_seed(config, group) for group in range(3)}
    assert len(seeds) == 1
    assert students.make_mixer(_config(), cluster) is None
    assert students.initial_seed(_config(), 1) not in seeds


def test_options_reach_the_teachers(tmp_path):
    config = _config(
        "digits",
        "exchange.max_staleness_steps=30",
        "exchange.staleness_ramp_steps=10",
        "exchange.max_staleness_secs=60",
        "exchange.staleness_ramp_secs=5",
        "exchange.allow_other_schemas=true",
        "codistillation.max_bad_batches=7",
    )
    cluster = tfdistill.Cluster(group=0, num_groups=2)
    batch = students.make_canary(config, _digits())
    exchange = tfdistill.Exchange(tmp_path)
    model = students.make_model(config, cluster, exchange, canary=batch)
    options = model.teachers._options
    assert options.bounds == (
        "max_staleness_steps=30, staleness_ramp_steps=10, "
        "max_staleness_secs=60.0, staleness_ramp_secs=5.0"
    )
    assert options.max_bad_batches == 7 and options.canary is batch
    exporter = students.make_exporter(config, cluster, exchange)
    assert options.schema == exporter._schema
    assert set(exporter._schema) == {"labels", "preprocessing"}
    assert options.allow_other_schemas


@pytest.mark.parametrize(
    ("section", "function", "names"),
    [
        (
            sections.Codistillation,
            tfdistill.TeacherSet,
            {
                "by",
                "max_bad_batches",
                "wait_secs",
                "include_past",
                "saved_models",
                "trust_saved_models",
            },
        ),
        (
            sections.Exchange,
            tfdistill.TeacherSet,
            {
                "allow_other_graphs",
                "allow_other_schemas",
                "max_staleness_examples",
                "max_staleness_secs",
                "max_staleness_steps",
                "poll_secs",
                "staleness_ramp_examples",
                "staleness_ramp_secs",
                "staleness_ramp_steps",
            },
        ),
        (
            sections.Exchange,
            tfdistill.StudentExporter,
            {
                "ema_decay",
                "every_steps",
                "offset_steps",
                "variables_dtype",
                "weights",
            },
        ),
        (sections.Exchange, tfdistill.Exchange, {"max_to_keep"}),
        (
            sections.Codistillation,
            tfdistill.losses.SoftTargetCrossEntropy,
            {"aggregation", "temperature"},
        ),
        (
            sections.Codistillation,
            tfdistill.contrib.SampledSoftTargetCrossEntropy,
            {"aggregation", "num_samples", "power", "proposal", "temperature"},
        ),
        (
            sections.Codistillation,
            tfdistill.losses.TopKSoftTargetCrossEntropy,
            {"aggregation", "k", "tail", "temperature"},
        ),
        (
            sections.Codistillation,
            tfdistill.losses.LogitsMeanSquaredError,
            set(),
        ),
    ],
)
def test_fields_of_the_librarys_names_have_its_defaults(
    section, function, names
):
    config = recipes.digits()
    sections_by_type = {
        type(part): part for part in (config.codistillation, config.exchange)
    }
    # Of teachers, what versions hold being of the exporter.
    but = ["weights"] if function is tfdistill.TeacherSet else []
    found = sections_by_type[section].taken_by(function, but=but)
    assert set(found) == names
    arguments = inspect.signature(function).parameters
    fields = {field.name: field for field in dataclasses.fields(section)}
    for name in names - {"every_steps"}:
        assert fields[name].default == arguments[name].default, name


def test_what_an_exporter_cannot_do_is_refused():
    with pytest.raises(ValueError, match="Override exchange.weights=ema"):
        _config("digits", "exchange.ema_decay=0.9")
    with pytest.raises(ValueError, match="`exchange.offset_steps` must be <"):
        _config("digits", "exchange.offset_steps=1000")
    config = _config("digits", "exchange.ema_decay=0.9", "exchange.weights=ema")
    cluster = tfdistill.Cluster()
    exchange = tfdistill.Exchange(None)
    exporter = students.make_exporter(config, cluster, exchange)
    assert exporter._ema_decay == 0.9


def test_the_canarys_margin_is_the_librarys():
    margin = inspect.signature(tfdistill.Canary).parameters["margin"].default
    assert recipes.digits().codistillation.canary_margin == margin


@pytest.mark.parametrize("unit", ["steps", "secs"])
def test_a_ramp_needs_a_beginning(unit):
    exchange = _config().exchange
    name = f"staleness_ramp_{unit}"
    with pytest.raises(ValueError, match=f"exchange.max_staleness_{unit}"):
        dataclasses.replace(exchange, **{name: 3})
    assert isinstance(exchange, sections.Exchange)


# ---- what data mean ----


def _folders(root, names):
    for split in ("train", "val"):
        for name in names:
            (root / split / name).mkdir(parents=True)
    return root


def test_other_classes_of_images_are_another_schema(tmp_path):
    found = [
        gates.digests(
            imagenet.make_schema(path=_folders(tmp_path / place, names))
        )
        for place, names in (
            ("a", ["cat", "dog"]),
            ("b", ["cat", "dog"]),
            ("c", ["cat", "emu"]),
        )
    ]
    assert found[0] == found[1]
    assert found[0]["labels"] != found[2]["labels"]
    assert found[0]["preprocessing"] == found[2]["preprocessing"]


def test_other_tables_of_clicks_are_another_schema():
    found = [
        gates.digests(criteo.make_schema(field_sizes=sizes))
        for sizes in (1000, [1000] * 26, 2000)
    ]
    assert found[0] == found[1]
    assert found[0]["features"] != found[2]["features"]


def test_another_vocabulary_is_another_schema(tmp_path):
    found = []
    for place, first in (("a", 0), ("b", 0), ("c", 1000)):
        (tmp_path / place).mkdir()
        text = language_model_cases.write(
            tmp_path / place / "text.txt",
            language_model_cases.documents(200, first=first),
        )
        schema = language_model.make_schema(
            path=text,
            vocabulary_size=300,
            cache_dir=tmp_path / place / "cache",
        )
        found.append(gates.digests(schema))
    assert found[0] == found[1] != found[2]
