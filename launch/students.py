"""The compiled student of one group, with its teachers."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import keras

import tfdistill
from launch import config as config_lib
from launch import config_sections as sections
from launch import objectives
from models import cifar10
from models import criteo
from models import digits

_BUILDERS: Mapping[str, Callable[..., keras.Model]] = {
    "cifar10": cifar10.build_model,
    "cifar10_small": cifar10.build_small_model,
    "criteo": criteo.build_model,
    "digits": digits.build_model,
}
# Arguments that a model takes over from its data.
_SHARED_ARGUMENTS = frozenset({"field_sizes"})


class OptionsError(ValueError):
    """A model or an optimizer does not take the arguments it was given."""


def make_model(
    config: config_lib.Config,
    cluster: tfdistill.Cluster,
    exchange: tfdistill.Exchange,
) -> tfdistill.CodistillModel:
    """Returns the compiled model; call it in the strategy's scope.

    Raises:
        OptionsError: If arguments in the configuration do not fit.
    """
    learn = config.codistillation
    objective = objectives.of(config.data.name)
    arguments = config.model.arguments_of(cluster.group)
    # The tables must have the sizes that the rows were hashed for.
    for name in _SHARED_ARGUMENTS & config.data.arguments.keys():
        arguments[name] = config.data.arguments[name]
    try:
        student = _BUILDERS[config.model.name](**arguments)
    except (TypeError, ValueError) as cause:
        raise OptionsError(f"`model.arguments` do not fit: {cause}") from cause
    model = tfdistill.CodistillModel(
        student,
        teachers=tfdistill.TeacherSet(
            exchange,
            peers_of(config, cluster),
            max_staleness_steps=config.exchange.max_staleness_steps,
            allow_other_graphs=config.exchange.allow_other_graphs,
            poll_secs=config.exchange.poll_secs,
        ),
    )
    model.compile(
        _make_optimizer(config),
        objective.loss(),
        metrics=objective.metrics(),
        distillation_loss=_make_loss(learn),
        distillation_weight=_make_weight(learn),
        steps_per_execution=config.steps_per_execution,
    )
    return model


def peers_of(
    config: config_lib.Config, cluster: tfdistill.Cluster
) -> tuple[int, ...]:
    """Returns the groups that this one learns from."""
    topology = config.exchange.topology
    if not config.codistillation.enabled:
        return ()
    if not isinstance(topology, str):
        return topology[cluster.group]
    return cluster.peers if topology == "all" else cluster.ring_peers()


def _make_optimizer(config: config_lib.Config) -> keras.optimizers.Optimizer:
    options, num_steps = config.optimizer, config.num_steps
    schedules = keras.optimizers.schedules
    rate: Any = options.learning_rate
    if options.schedule == "linear":
        rate = schedules.PolynomialDecay(rate, num_steps, 0.0)
    elif options.schedule == "cosine" and options.warmup_steps:
        rate = schedules.CosineDecay(
            0.0,
            num_steps - options.warmup_steps,
            warmup_target=rate,
            warmup_steps=options.warmup_steps,
        )
    elif options.schedule == "cosine":
        rate = schedules.CosineDecay(rate, num_steps)
    settings = {
        **options.arguments,
        "learning_rate": rate,
        "clipnorm": options.clipnorm,
        "global_clipnorm": options.global_clipnorm,
        "clipvalue": options.clipvalue,
    }
    kind = type(keras.optimizers.get(options.name))
    try:
        return kind(**settings)
    except (TypeError, ValueError) as cause:
        raise OptionsError(
            f"`optimizer.arguments` do not fit {options.name}: {cause}"
        ) from cause


def _make_loss(
    learn: sections.Codistillation,
) -> tfdistill.losses.DistillationLoss:
    kind = getattr(tfdistill.losses, learn.loss)
    if kind is tfdistill.losses.LogitsMeanSquaredError:
        return kind(from_logits=True)
    return kind(
        temperature=learn.temperature,
        aggregation=learn.aggregation,
        from_logits=True,
    )


def _make_weight(
    learn: sections.Codistillation,
) -> tfdistill.schedules.Schedule:
    start, weight = learn.burn_in_steps, learn.weight
    if not learn.ramp_steps:
        return tfdistill.schedules.BurnIn(steps=start, weight=weight)
    ramps = {
        "cosine": tfdistill.schedules.CosineRamp,
        "linear": tfdistill.schedules.LinearRamp,
    }
    return ramps[learn.ramp](
        start_step=start, end_step=start + learn.ramp_steps, weight=weight
    )
