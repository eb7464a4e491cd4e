"""Named configurations, and the changes that a command line makes to them.

A recipe is a function without arguments that returns a whole, valid `Config`.
Imports neither TensorFlow nor Keras.
"""

import dataclasses
import difflib
import json
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from launch import config as config_lib
from launch import config_fields
from launch import config_sections as sections
from launch import imagenet_recipes
from launch import language_model_recipes

Config = config_lib.Config


def digits() -> Config:
    """Returns a run on scikit-learn's digits, under a minute on 2 cores.

    Two groups share out 1,297 images of 8 x 8 pixels; 500 more are for
    validation. Measured over several seeds in docs/quickstart.md.
    """
    return Config(
        recipe="digits",
        model=sections.Model(
            name="digits", arguments={"hidden_sizes": [128, 64]}
        ),
        data=sections.Data(name="digits", global_batch_size=64),
        optimizer=sections.Optimizer(learning_rate=2e-3, schedule="cosine"),
        codistillation=sections.Codistillation(burn_in_steps=100),
        exchange=sections.Exchange(
            every_steps=25, refresh_every_steps=5, poll_secs=0.1
        ),
        num_steps=1000,
        evaluate_every_steps=100,
    )


def cifar10() -> Config:
    """Returns a run of ResNet-20 on CIFAR-10: 64 epochs of a group's half.

    For GPUs, or patience: on two cores a step takes seconds.
    """
    return Config(
        recipe="cifar10",
        model=sections.Model(name="cifar10"),
        data=sections.Data(name="cifar10", global_batch_size=128),
        optimizer=sections.Optimizer(
            name="sgd",
            learning_rate=0.1,
            schedule="cosine",
            warmup_steps=400,
            global_clipnorm=5.0,
            arguments={"momentum": 0.9, "nesterov": True},
        ),
        codistillation=sections.Codistillation(
            burn_in_steps=2000, ramp_steps=1000
        ),
        exchange=sections.Exchange(every_steps=100, refresh_every_steps=20),
        num_steps=12_500,
        evaluate_every_steps=500,
        checkpoints="best",
    )


def cifar10_small() -> Config:
    """Returns a short run on 10,000 images of CIFAR-10: minutes on 2 cores."""
    return Config(
        recipe="cifar10_small",
        model=sections.Model(name="cifar10_small"),
        data=sections.Data(
            name="cifar10",
            global_batch_size=64,
            arguments={"num_train": 10_000, "num_test": 1_000},
        ),
        optimizer=sections.Optimizer(
            learning_rate=2e-3, schedule="cosine", global_clipnorm=5.0
        ),
        codistillation=sections.Codistillation(
            burn_in_steps=200, ramp_steps=100
        ),
        exchange=sections.Exchange(every_steps=25, refresh_every_steps=5),
        num_steps=800,
        evaluate_every_steps=100,
    )


def criteo() -> Config:
    """Returns a run on Criteo's clicks with the paper's layers, for clusters.

    The network of Anil et al. 2018 (arXiv:1804.03235): 2560, 1024 and 256
    units, Adagrad. For the 45.8 million rows of the whole log: about one
    epoch of a group's half, on parameter servers.
    """
    return Config(
        recipe="criteo",
        model=sections.Model(
            name="criteo",
            arguments={
                "embedding_dim": 16,
                "hidden_units": [2560, 1024, 256],
            },
        ),
        data=sections.Data(
            name="criteo",
            global_batch_size=512,
            arguments={"field_sizes": 200_000, "min_count": 10},
        ),
        optimizer=sections.Optimizer(name="adagrad", learning_rate=1e-3),
        codistillation=sections.Codistillation(
            loss="BinarySoftTargetCrossEntropy",
            burn_in_steps=4000,
            ramp_steps=2000,
        ),
        exchange=sections.Exchange(every_steps=500, refresh_every_steps=100),
        num_steps=36_000,
        evaluate_every_steps=2000,
        steps_per_execution=10,
    )


def criteo_small() -> Config:
    """Returns a run on some thousand rows of clicks: a minute on 2 cores."""
    return Config(
        recipe="criteo_small",
        model=sections.Model(
            name="criteo",
            arguments={"embedding_dim": 16, "hidden_units": [256, 128, 64]},
        ),
        data=sections.Data(
            name="criteo",
            global_batch_size=128,
            arguments={"field_sizes": 2000, "min_count": 5},
        ),
        # Rows of few examples see tiny gradients: with Keras' 0.1 to start
        # from, the tables hardly learn in so few steps (log loss .496).
        optimizer=sections.Optimizer(
            name="adagrad",
            learning_rate=3e-3,
            arguments={"initial_accumulator_value": 1e-6},
        ),
        codistillation=sections.Codistillation(
            loss="BinarySoftTargetCrossEntropy",
            burn_in_steps=60,
            ramp_steps=30,
        ),
        exchange=sections.Exchange(
            every_steps=20, refresh_every_steps=5, poll_secs=0.1
        ),
        num_steps=300,
        evaluate_every_steps=50,
        steps_per_execution=5,
    )


RECIPES: Mapping[str, Callable[[], Config]] = {
    recipe.__name__: recipe
    for recipe in (
        cifar10,
        cifar10_small,
        criteo,
        criteo_small,
        digits,
        imagenet_recipes.imagenet,
        language_model_recipes.language_model,
        language_model_recipes.language_model_small,
    )
}


def get(name: str) -> Config:
    """Returns the configuration of a recipe, or the one in a file.

    Args:
        name: Name of a recipe, or the path of a `.json` file: the config.json
            of an earlier run repeats it.

    Raises:
        ValueError: If there is no such recipe or file, or it is not valid.
    """
    if name in RECIPES:
        return RECIPES[name]()
    if name.endswith(".json"):
        return Config.read(name)
    near = difflib.get_close_matches(name, RECIPES, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"There is no recipe {name!r}.{hint} Recipes: {', '.join(RECIPES)}; "
        "or the path of a config.json."
    )


def override(config: Config, changes: Sequence[str]) -> Config:
    """Returns a configuration with some fields changed.

    Args:
        config: What to begin with.
        changes: `FIELD=VALUE`: the dotted name of a field, and JSON or a bare
            string. All are made before the result is validated. Below an
            `arguments` field, names may be new.

    Raises:
        ValueError: If a field does not exist or the result is not valid.

    Example:
        >>> changed = override(digits(), ["optimizer.learning_rate=0.1"])
        >>> changed.optimizer.learning_rate
        0.1
    """
    tree = json.loads(config.to_json())
    for change in changes:
        field, equals, text = change.partition("=")
        if not equals or not field:
            raise ValueError(
                "An override must be FIELD=VALUE, such as "
                f"optimizer.learning_rate=0.1; received {change!r}."
            )
        _set(tree, field, _value(text))
    return Config.from_tree(tree)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _set(tree: dict[str, Any], field: str, value: Any) -> None:
    *path, last = field.split(".")
    prefix, place, is_free = "", tree, False
    for name in path:
        if not is_free:
            config_fields.check_name(name, tuple(place), prefix=prefix)
        elif name not in place:
            place[name] = {}
        is_free = is_free or name == "arguments"
        prefix += f"{name}."
        place = place[name]
        if not isinstance(place, dict):
            raise ValueError(
                f"`{prefix[:-1]}` has no fields; received the override of "
                f"`{field}`. Override {prefix[:-1]} as a whole."
            )
    if not is_free:
        config_fields.check_name(last, tuple(place), prefix=prefix)
    place[last] = value


def describe(name: str) -> str:
    """Returns the first line of what a recipe's function says of itself."""
    text = (RECIPES[name].__doc__ or "").splitlines()[0]
    return text.removeprefix("Returns ")


def changed_fields(config: Config, other: Config) -> list[str]:
    """Returns the dotted names of the fields in which two differ."""
    first, second = (
        dict(_leaves(dataclasses.asdict(one))) for one in (config, other)
    )
    missing = object()
    names = [*first, *(name for name in second if name not in first)]
    return [
        name
        for name in names
        if first.get(name, missing) != second.get(name, missing)
    ]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Any:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
