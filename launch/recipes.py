"""Named configurations, and the changes that a command line makes to them.

A recipe is a function without arguments that returns a valid `Config`.
Imports neither TensorFlow nor Keras.
"""

import dataclasses
import difflib
import json
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from launch.config import config
from launch.config import fields
from launch.config import sections
from tfdistill.system import programs

Config = config.Config

_NUM_IMAGES, _BATCH_SIZE = 1_281_167, 16_384


def imagenet() -> Config:
    """Returns a run of ResNet-50 on ImageNet at batch 16,384, for clusters.

    The large-batch setting of Anil et al. 2018 (arXiv:1804.03235), by the
    recipe of Goyal et al. 2017 (arXiv:1706.02677): 78 steps are a pass over
    the 1,281,167 images, and the run has 90 of them; two groups that share
    the images out see each their half twice as often. The rate rises to
    0.1 x batch / 256 in 5 passes and drops after 30, 60 and 80. A group that
    learns from others drops later, and its weight decay falls with the rate,
    as Sodhani et al. 2020 (arXiv:2010.02838) found needful: 36, 76 and 88
    passes are their schedule at twice its length. Keras keeps the rate in the
    momentum and does not correct it at a drop (Goyal et al., remark 2). On
    hardware for it override dtype_policy=mixed_bfloat16.
    """
    pass_steps = _NUM_IMAGES // _BATCH_SIZE
    return Config(
        recipe="imagenet",
        model=sections.Model(name="imagenet"),
        data=sections.Data(name="imagenet", global_batch_size=_BATCH_SIZE),
        optimizer=sections.Optimizer(
            name="sgd",
            learning_rate=0.1 * _BATCH_SIZE / 256,
            schedule="steps",
            boundaries=tuple(pass_steps * drop for drop in (30, 60, 80)),
            warmup_steps=5 * pass_steps,
            warmup_from=0.1,
            weight_decay=1e-4,
            arguments={"momentum": 0.9, "nesterov": True},
        ),
        codistillation=sections.Codistillation(
            canary_examples=32,
            burn_in_steps=3000,
            boundaries=tuple(pass_steps * drop for drop in (36, 76, 88)),
            weight_decay_factors=(0.1, 0.0, 0.0),
        ),
        exchange=sections.Exchange(every_steps=50, refresh_every_steps=10),
        num_steps=90 * pass_steps,
        evaluate_every_steps=5 * pass_steps,
        checkpoints="best",
    )


def language_model() -> Config:
    """Returns a run of the paper's language model on reviews, for clusters.

    The sizes of Anil et al. 2018 (arXiv:1804.03235), section 3.1: an embedding
    of 256, two layer-normalized LSTMs of 1024 units, 24,000 sub-words, Adam,
    an exchange every 50 steps, and 128 sequences of 32 tokens for each worker:
    set data.global_batch_size to 128 times the workers of a group. For more
    text set data.path, to `tfds:c4/en` say, and how much of it by
    data.arguments.num_train_tokens and num_validation_tokens.
    """
    return Config(
        recipe="language_model",
        model=sections.Model(name="language_model"),
        data=sections.Data(
            name="language_model",
            global_batch_size=128,
            arguments={
                "vocabulary_size": 24_000,
                "sequence_length": 32,
                "validation_fraction": 0.01,
            },
        ),
        optimizer=sections.Optimizer(
            learning_rate=1e-3,
            schedule="cosine",
            warmup_steps=500,
            global_clipnorm=1.0,
        ),
        codistillation=sections.Codistillation(
            canary_examples=32, burn_in_steps=2000, ramp_steps=1000
        ),
        exchange=sections.Exchange(every_steps=50, refresh_every_steps=10),
        num_steps=20_000,
        evaluate_every_steps=1000,
        checkpoints="best",
    )


def language_model_small() -> Config:
    """Returns a short run on a million tokens of reviews: minutes on a core.

    A group sees its half three times: a constant learning rate, so that runs
    can be compared at any step. Set data.arguments.num_train_tokens for more
    or less text.
    """
    return Config(
        recipe="language_model_small",
        model=sections.Model(
            name="language_model",
            arguments={"embedding_dim": 128, "units": 128, "num_layers": 1},
        ),
        data=sections.Data(
            name="language_model",
            global_batch_size=32,
            arguments={
                "vocabulary_size": 2000,
                "sequence_length": 32,
                "num_train_tokens": 1_000_000,
                "num_validation_tokens": 40_000,
            },
        ),
        optimizer=sections.Optimizer(
            learning_rate=3e-3,
            global_clipnorm=1.0,
        ),
        codistillation=sections.Codistillation(
            canary_examples=32, burn_in_steps=300, ramp_steps=150
        ),
        exchange=sections.Exchange(
            every_steps=50, refresh_every_steps=10, poll_secs=0.1
        ),
        num_steps=1500,
        evaluate_every_steps=150,
        steps_per_execution=5,
    )


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
            # As in cifar10_small.
            canary_student_margin=0.5,
            burn_in_steps=2000,
            ramp_steps=1000,
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
            # Versions of honest peers are up to .33 nats worse for a moment;
            # the loss of one that knows nothing is 2.3.
            canary_student_margin=0.5,
            burn_in_steps=200,
            ramp_steps=100,
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
            # A model that knows the base rates only is .1 nats worse.
            canary_examples=1024,
            canary_student_margin=0.03,
            burn_in_steps=4000,
            ramp_steps=2000,
        ),
        exchange=sections.Exchange(every_steps=500, refresh_every_steps=100),
        num_steps=36_000,
        evaluate_every_steps=2000,
        steps_per_execution=10,
    )


def criteo_dlrm() -> Config:
    """Returns the run of `criteo` with a DLRM in the place of its network.

    The network of Naumov et al. 2019 (arXiv:1906.00091), of keras-rs' layers:
    `pip install tfdistill[recommenders]`.
    """
    return dataclasses.replace(
        criteo(), recipe="criteo_dlrm", model=sections.Model(name="criteo_dlrm")
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
            # A model that knows the base rates only is .1 nats worse; at .01,
            # groups of unequal speed took each other for worse.
            canary_examples=1024,
            canary_student_margin=0.03,
            burn_in_steps=60,
            ramp_steps=30,
        ),
        # So often that ten intervals, after which a silent peer fades, are a
        # small part of the run.
        exchange=sections.Exchange(
            every_steps=5, refresh_every_steps=5, poll_secs=0.1
        ),
        num_steps=300,
        evaluate_every_steps=50,
        steps_per_execution=5,
    )


def shakespeare() -> Config:
    """Returns a run on 200,000 characters of Shakespeare: seconds on 2 cores.

    A doubled batch does not help here any more: training is limited by
    overfitting. Set data.path for any other text. docs/results.md has the
    comparison.
    """
    return Config(
        recipe="shakespeare",
        model=sections.Model(name="shakespeare"),
        data=sections.Data(name="shakespeare", global_batch_size=4096),
        optimizer=sections.Optimizer(
            learning_rate=0.02, schedule="cosine", arguments={"beta_2": 0.99}
        ),
        codistillation=sections.Codistillation(
            # Versions of honest peers are up to .2 nats worse for a moment;
            # the loss of one that knows nothing is 4.2.
            canary_student_margin=0.5,
            burn_in_steps=50,
        ),
        # At the steps 50, 150 and 250, in all groups. A step takes
        # milliseconds: versions must be seen soon.
        exchange=sections.Exchange(
            every_steps=100,
            offset_steps=50,
            refresh_every_steps=5,
            poll_secs=0.02,
        ),
        num_steps=300,
        evaluate_every_steps=20,
        # A backup would take longer than the steps between evaluations.
        backup_every_steps=300,
    )


def shakespeare_decayed() -> Config:
    """Returns the run of `shakespeare` with a tuned weight decay.

    A group that learns from others decays its weights a third as much.
    """
    config = shakespeare()
    return dataclasses.replace(
        config,
        recipe="shakespeare_decayed",
        optimizer=dataclasses.replace(config.optimizer, weight_decay=0.3),
        codistillation=dataclasses.replace(
            config.codistillation, weight_decay=0.1
        ),
    )


RECIPES: Mapping[str, Callable[[], Config]] = {
    recipe.__name__: recipe
    for recipe in (
        cifar10,
        cifar10_small,
        criteo,
        criteo_dlrm,
        criteo_small,
        digits,
        imagenet,
        language_model,
        language_model_small,
        shakespeare,
        shakespeare_decayed,
    )
}


def get(name: str) -> Config:
    """Returns the configuration of a recipe, or the one in a `.json` file."""
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
    """Returns a configuration with some fields changed by `FIELD=VALUE`.

    A field is a dotted name, a value JSON or a bare string. All changes are
    made before the result is validated. Below an `arguments` field, names may
    be new.

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


def add_override(options: programs.Flags, of: str) -> None:
    """Adds the option --override, whose values `override` takes."""
    options.add("override", f"<FIELD=VALUE>: change one field of {of}", [])


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
            fields.check_name(name, tuple(place), prefix=prefix)
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
        fields.check_name(last, tuple(place), prefix=prefix)
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
