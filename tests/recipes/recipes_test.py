"""Tests of recipes: read from their source, changed, kept as JSON."""

import json

import keras
import numpy as np
import pytest

from launch import recipes
from tfdistill.comparison import trials
from tfdistill.recipes import optimizers

NAMES = sorted(recipes.RECIPES)
_OWN = '''
def workload(rate=0.5, sizes=(8, 4), path=None, *, name="x"):
    """Returns a run of mine.

    More of it.
    """


def other(steps):
    pass


def computed(rate=2 * 3):
    pass


def any_(rate=1.0, **others):
    return [rate]
'''


@pytest.fixture(name="own")
def _own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(_OWN)
    return str(path)


def _changed(*changes, recipe="digits"):
    return recipes.override(recipes.get(recipe), changes)


def _refusal(*changes, recipe="digits"):
    with pytest.raises(ValueError) as caught:
        _changed(*changes, recipe=recipe)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_gives_back_an_equal_recipe(name, tmp_path):
    recipe = _changed("seed=3", "num_steps=77", recipe=name)
    recipe = recipe.by_method("label_smoothing", weight=0.2)
    path = tmp_path / "config.json"
    path.write_text(recipe.to_json())
    assert recipes.changed_names(recipes.read(path), recipe) == []
    assert recipes.get(str(path)).to_json() == recipe.to_json()
    assert recipes.describe(name)


def test_overrides_are_arguments_or_settings_of_every_workload():
    recipe = _changed("learning_rate=1", "seed=7", "mode=shared", "seed=8")
    assert recipe.arguments["learning_rate"] == 1.0
    assert recipe.settings == {"seed": 8, "mode": "shared"}
    # As in the contract: the name of a part may stand before it.
    assert _changed("optimizer.learning_rate=1", "seed=8", "mode=shared") == (
        recipe
    )
    assert recipes.changed_names(recipe, _changed("seed=8")) == [
        "mode",
        "learning_rate",
    ]


@pytest.mark.parametrize(
    "change, words",
    [
        ("learning_rat=1", "Did you mean learning_rate"),
        ("anything.learning_rate=1", "received `anything.`"),
        ("learning_rate=fast", "must be a number, such as the default 0.002"),
        ("method.weight=1", "not an argument of the method None"),
    ],
)
def test_wrong_overrides_are_refused_with_what_is_right(change, words):
    assert words in _refusal(change)


def test_a_file_or_a_module_is_a_recipe(own):
    recipe = _changed("rate=2", "path=a", recipe=own)
    assert recipe.recipe == own
    assert dict(recipe.arguments) == {
        "rate": 2.0,
        "sizes": (8, 4),
        "path": "a",
        "name": "x",
    }
    assert recipes.get("models.digits").arguments == (
        recipes.get("digits").arguments
    )
    assert _changed("z=1", recipe=f"{own}:any_").arguments["z"] == 1


def test_what_is_no_recipe_says_what_one_is(own, tmp_path):
    for name, words in (
        ("digit", "Did you mean 'digits'"),
        (str(tmp_path / "none.py"), "No such file"),
        (f"{own}:none", "function 'none'"),
        (f"{own}:other", "`steps` of the recipe"),
        (f"{own}:computed", "must have a default"),
        (str(tmp_path / "none.json"), "No such file"),
    ):
        with pytest.raises(ValueError, match="(?s)" + words):
            recipes.get(name)
    tree = json.loads(recipes.get("digits").to_json())
    for broken, words in (
        ("{", "must be JSON"),
        ("[]", "must be a JSON object with recipe, arguments"),
        (json.dumps({**tree, "settings": {"sed": 1}}), "Did you mean seed"),
        (json.dumps({**tree, "method": "none"}), "There is no method"),
    ):
        path = tmp_path / "config.json"
        path.write_text(broken)
        with pytest.raises(ValueError, match=words):
            recipes.get(str(path))


def test_a_function_that_returns_no_workload_is_refused(own):
    recipe = recipes.get(f"{own}:any_")
    with pytest.raises(
        recipes.OptionsError, match=r"return a tfdistill.Workload.*\[1.0\]"
    ):
        recipe.workload()


def test_a_shorter_run_has_all_of_its_schedule():
    names = ("num_steps", "evaluate_every_steps", "burn_in_steps")
    # Whole executions between evaluations.
    for by, expected in ((2, [150, 25, 30]), (3, [90, 15, 18])):
        found = recipes.get("criteo_small").shortened(by).arguments
        assert [found[name] for name in names] == expected
    drops = recipes.get("imagenet").shortened(2).arguments["boundaries"]
    assert drops == [1170, 2340, 3120]
    with pytest.raises(ValueError, match="less than one step"):
        recipes.get("criteo_small").shortened(100)


def test_methods_share_the_runs_that_train_the_same():
    setup = trials.Setup(recipe=recipes.get("digits"))
    (one,) = trials.Variant(method="independent").trial(setup, 3).runs
    ensemble = trials.Variant(method="ensemble").trial(setup, 3)
    assert ensemble.runs[0].key == one.key != ensemble.runs[1].key
    offline = trials.Variant(method="offline_distillation").trial(setup, 3)
    assert offline.runs[1].teacher == offline.runs[0]


@pytest.mark.parametrize(
    "clipping, expected",
    [
        ({"clipnorm": 1.0}, [1.0, 1.0]),
        ({"clipvalue": 2.0}, [2.0, 2.0]),
        ({"global_clipnorm": 1.0}, [0.6, 0.8]),
    ],
)
def test_an_optimizer_by_name_takes_over_rate_and_clipping(clipping, expected):
    given = keras.optimizers.Adam(0.5, **clipping)
    made = optimizers.named(given, "sgd")
    variables = [keras.Variable([0.0]) for _ in range(2)]
    made.apply([np.float32([3.0]), np.float32([4.0])], variables)
    found = [-float(each[0]) / 0.5 for each in variables]
    assert found == pytest.approx(expected)
