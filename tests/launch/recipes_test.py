"""Tests of recipes and their configuration, without TensorFlow."""

import dataclasses
import json
import subprocess
import sys

import pytest

from launch import recipes
from launch.config import config as config_lib
from launch.config import sections

NAMES = sorted(recipes.RECIPES)


def _changed(*changes):
    return recipes.override(recipes.digits(), changes)


def _refusal(*changes):
    with pytest.raises(ValueError) as caught:
        _changed(*changes)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_json_gives_back_an_equal_configuration_and_text(name):
    config = recipes.get(name)
    text = config.to_json()
    again = config_lib.Config.from_json(text)
    assert again == config
    assert again.to_json() == text
    assert config.recipe == name
    assert recipes.describe(name)


def test_groups_that_mix_begin_alike_and_export_for_it():
    mixed = ("mixing.rule=model_averaging", "seed_groups_alike=true")
    config = _changed(*mixed, "mixing.quorum=all", "mixing.topology=[[1], [0]]")
    assert config_lib.Config.from_json(config.to_json()) == config
    assert config.mixing.topology == ((1,), (0,))
    with pytest.raises(ValueError, match="`mixing.topology` must have one"):
        config.check_num_groups(3)
    assert "Override seed_groups_alike=true" in _refusal(mixed[0])
    assert "multiple of `exchange.every_steps`" in _refusal(
        *mixed, "mixing.every_steps=30"
    )
    assert "with mixing.rule=none" in _refusal("mixing.arguments.alpha=0.5")
    margin = "mixing.barrier_margin=0"
    assert "with mixing.rule=none" in _refusal(margin)
    assert "canary_examples=0. Override them" in _refusal(
        *mixed, margin, "codistillation.canary_examples=0"
    )
    assert "others that it mixes with" in _refusal("mixing.topology=[[0]]")
    assert "received [1] for group 0 and [2] for group 1" in _refusal(
        *mixed, "mixing.topology=[[1], [2], [0]]"
    )
    for field in ("offset_steps=3", "weights=ema"):
        assert f"exchange.{field}" in _refusal(*mixed, f"exchange.{field}")
    assert "received mixing.rule with" in _refusal(
        *mixed, "codistillation.num_students=2"
    )


def test_json_keeps_what_overrides_have_changed():
    config = _changed(
        "exchange.topology=[[1, 2], [0], []]",
        'model.group_arguments=[{}, {"hidden_sizes": [8]}, {"dropout": 0.5}]',
        "exchange.allow_other_graphs=true",
        "exchange.max_staleness_steps=100",
        "exchange.variables_dtype=bfloat16",
        "optimizer.clipnorm=1",
        "optimizer.arguments.beta_1=0.5",
        "optimizer.name=adamw",
        "codistillation.ramp_steps=7",
    )
    assert config.exchange.topology == ((1, 2), (0,), ())
    assert config.optimizer.clipnorm == 1.0
    assert type(config.optimizer.clipnorm) is float
    assert config.optimizer.arguments == {"beta_1": 0.5}
    assert config.model.arguments_of(1) == {"hidden_sizes": [8]}
    assert config.model.arguments_of(2) == {
        "hidden_sizes": [128, 64],
        "dropout": 0.5,
    }
    text = config.to_json()
    assert config_lib.Config.from_json(text) == config
    assert config_lib.Config.from_json(text).to_json() == text


def test_configurations_cannot_be_changed_in_place():
    config = recipes.digits()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_steps = 3
    with pytest.raises(TypeError):
        sections.Data("digits", "disjoint", 64)
    arguments = {"hidden_sizes": [8]}
    model = sections.Model(name="digits", arguments=arguments)
    arguments["hidden_sizes"].append(9)
    assert model.arguments == {"hidden_sizes": [8]}


@pytest.mark.parametrize(
    "change, words",
    [
        (
            "optimizer.learning_rat=1",
            "`optimizer.learning_rat` is not a field of the configuration. "
            "Did you mean learning_rate?",
        ),
        ("optimzer.learning_rate=1", "Did you mean optimizer?"),
        ("zzz=1", "Fields: recipe, model, data"),
        ("optimizer.learning_rate.x=1", "has no fields"),
        ("optimizer.learning_rate", "must be FIELD=VALUE"),
        ("=1", "must be FIELD=VALUE"),
        ("model=3", "`model` must be a JSON object; received 3"),
        ("model={}", "`model.name` is missing"),
        ('model={"name": "digits", "size": 3}', "`model.size` is not a field"),
    ],
)
def test_overrides_of_fields_that_do_not_exist_are_refused(change, words):
    assert words in _refusal(change)


@pytest.mark.parametrize(
    "change, words",
    [
        ("optimizer.learning_rate=fast", "a finite number; received 'fast'"),
        ("optimizer.learning_rate=true", "a finite number; received True"),
        ("optimizer.learning_rate=NaN", "a finite number; received nan"),
        ("optimizer.learning_rate=0", "must be > 0; received 0.0"),
        ("num_steps=10.5", "`num_steps` must be a whole number; received 10.5"),
        ("num_steps=true", "a whole number; received True"),
        ("num_steps=0", "must be >= 1; received 0"),
        ("codistillation.enabled=1", "true or false; received 1"),
        ("codistillation.enabled=False", "true or false; received 'False'"),
        ("codistillation.by=predictions", "Override data.mode=coordinated"),
        ("data.mode=3", "`data.mode` must be a string; received 3"),
        ("exchange.max_to_keep=1", "must be >= 2"),
        ("exchange.max_staleness_steps=x", "a number or one of auto"),
        ("exchange.max_staleness_secs=x", "a finite number or null"),
        ("exchange.topology=[[1], [1]]", "received [1] for group 1 of 2"),
        ("exchange.topology=[[1, 1], []]", "each once"),
        ("exchange.topology=[1, 0]", "must be a string or a list"),
        ("model.arguments=[1]", "must be a JSON object"),
        ("data.arguments.seed=1", "a field of its own; received ['seed']"),
        ("optimizer.arguments.clipnorm=1", "received ['clipnorm']"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(change, words):
    assert words in _refusal(change)


@pytest.mark.parametrize(
    "change, near",
    [
        ("optimizer.name=adm", "adam"),
        ("optimizer.schedule=cosin", "cosine"),
        ("model.name=digit", "digits"),
        ("data.mode=disjont", "disjoint"),
        (
            "codistillation.loss=SoftTargetCrossentropy",
            "SoftTargetCrossEntropy",
        ),
        ("exchange.topology=rng", "ring"),
        ("dtype_policy=mixed_float16", "mixed_bfloat16"),
    ],
)
def test_unknown_choices_name_the_nearest(change, near):
    message = _refusal(change)
    assert f"Did you mean '{near}'?" in message
    assert "must be one of" in message


@pytest.mark.parametrize(
    "changes, words",
    [
        (("num_steps=50",), "`evaluate_every_steps` must divide `num_steps`"),
        (("steps_per_execution=3",), "`steps_per_execution` must divide"),
        (("data.name=cifar10",), "Override model.name and data.name together"),
        (("optimizer.warmup_steps=1000",), "must be < `num_steps`"),
        (
            ("optimizer.clipnorm=1", "optimizer.clipvalue=1"),
            "received clipnorm, clipvalue",
        ),
        (
            ('model.group_arguments=[{}, {"dropout": 0.1}]',),
            "Override exchange.allow_other_graphs=true",
        ),
        (
            ("codistillation.loss=LogitsMeanSquaredError",),
            'Set codistillation.aggregation="logits"',
        ),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(changes, words):
    assert words in _refusal(*changes)


@pytest.mark.parametrize(
    "recipe, changes, words",
    [
        ("digits", ["data.tfds=mnist"], "received 'mnist' for 'digits'"),
        (
            "criteo",
            ["data.tfds=criteo_display_ads", "data.path=x"],
            "At most one of `data.path` and `data.tfds`",
        ),
        ("criteo", ["data.tfds=tfds:x"], "must be NAME or NAME[SPLIT]"),
        ("criteo", ["data.tfds=3"], "`data.tfds` must be a string or null"),
        ("criteo", ["data.arguments.tfds=x"], "Set data.tfds"),
    ],
)
def test_prepared_data_sets_are_for_rows_and_text(recipe, changes, words):
    with pytest.raises(ValueError) as caught:
        recipes.override(recipes.get(recipe), changes)
    assert words in str(caught.value)


def test_a_prepared_data_set_is_a_path_of_its_own_kind():
    for recipe in ("criteo_small", "language_model"):
        config = recipes.override(recipes.get(recipe), ["data.tfds=a/b[test]"])
        assert config.data.source["path"] == "tfds:a/b[test]"
    assert "path" not in recipes.digits().data.source


def test_overrides_are_made_together_and_the_last_one_wins():
    config = _changed("num_steps=30", "evaluate_every_steps=15", "num_steps=45")
    assert (config.num_steps, config.evaluate_every_steps) == (45, 15)
    assert _changed() == recipes.digits()


def test_values_are_json_or_bare_strings():
    config = _changed(
        "data.mode=shared", 'optimizer.name="sgd"', "recipe=a=b", "seed=7"
    )
    assert config.data.mode == "shared"
    assert config.optimizer.name == "sgd"
    assert (config.recipe, config.seed) == ("a=b", 7)


def test_lists_by_group_must_fit_the_number_of_groups():
    ring = _changed("exchange.topology=[[1], [0]]")
    ring.check_num_groups(2)
    with pytest.raises(ValueError, match="one entry for each of 3 groups"):
        ring.check_num_groups(3)
    recipes.digits().check_num_groups(5)


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'digits'") as caught:
        recipes.get("digit")
    for name in NAMES:
        assert name in str(caught.value)


def test_the_file_of_an_earlier_run_is_a_recipe(tmp_path):
    path = tmp_path / "config.json"
    config = _changed("seed=9")
    path.write_text(config.to_json())
    assert recipes.get(str(path)) == config
    path.write_text(config.to_json()[:-5])
    with pytest.raises(ValueError, match=r"config\.json: .* must be JSON"):
        recipes.get(str(path))
    tree = json.loads(config.to_json()) | {"num_stepz": 3}
    path.write_text(json.dumps(tree))
    with pytest.raises(ValueError, match="Did you mean num_steps"):
        recipes.get(str(path))
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        recipes.get(str(tmp_path / "none.json"))


def test_changed_fields_are_named():
    config = _changed("seed=9", "optimizer.arguments.beta_1=0.5")
    names = recipes.changed_fields(recipes.digits(), config)
    assert sorted(names) == [
        "optimizer.arguments",
        "optimizer.arguments.beta_1",
        "seed",
    ]
    assert recipes.changed_fields(config, config) == []


def test_recipes_need_neither_tensorflow_nor_keras():
    code = (
        "import sys; from launch import recipes; recipes.digits(); "
        "print([m for m in ('tensorflow', 'keras') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.strip() == "[]"
