"""The compiled student of one group, with its teachers."""

import importlib
import inspect
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from launch.config import config
from launch.config import sections
from launch.task import objectives
from launch.task import optimizers
from models import cifar10
from models import criteo
from models import digits
from models import imagenet
from models import language_model
from tfdistill.embedding import layer
from tfdistill.embedding import rules
from tfdistill.teachers import gates


def make_canary(
    config: config.Config, validation: tf.data.Dataset
) -> gates.Canary | None:
    """Returns the first validation examples, with their labels.

    Args:
        config: The run.
        validation: Of this group, in the same order on all workers.

    Returns:
        What teachers must predict; None where the configuration has none.
    """
    learn = config.codistillation
    if not learn.canary_examples:
        return None
    x, y = next(iter(validation.take(1)))
    inputs = keras.tree.map_structure(
        lambda tensor: tensor[: learn.canary_examples], x
    )
    labels = np.asarray(y)[: learn.canary_examples].astype(np.int64)
    return gates.Canary(
        inputs, labels=labels, from_logits=True, margin=learn.canary_margin
    )


def schema(config: config.Config) -> dict[str, Any]:
    """Returns what a student's inputs and outputs mean in this group.

    Args:
        config: The run; its data must have been opened before.

    Returns:
        As `tfdistill.TeacherSet(schema=...)` takes it.
    """
    arguments = dict(config.data.arguments)
    if config.data.path:
        arguments["path"] = config.data.path
    source = importlib.import_module(f"models.{config.data.name}")
    # Of the data's arguments only some change what they mean.
    known = inspect.signature(source.make_schema).parameters
    return source.make_schema(
        **{k: v for k, v in arguments.items() if k in known}
    )


_BUILDERS: Mapping[str, Callable[..., keras.Model]] = {
    "cifar10": cifar10.build_model,
    "cifar10_small": cifar10.build_small_model,
    "criteo": criteo.build_model,
    "digits": digits.build_model,
    "imagenet": imagenet.build_model,
    "language_model": language_model.build_model,
}
# Arguments that a model takes over from its data.
_SHARED_ARGUMENTS = frozenset(
    {
        "field_sizes",
        "image_size",
        "num_classes",
        "sequence_length",
        "vocabulary_size",
    }
)


class OptionsError(ValueError):
    """A model or an optimizer does not take the arguments it was given."""


def make_model(
    config: config.Config,
    cluster: tfdistill.Cluster,
    exchange: tfdistill.Exchange,
    *,
    label_counts: np.ndarray | None = None,
    canary: gates.Canary | None = None,
) -> tfdistill.CodistillModel:
    """Returns the compiled model; call it in the strategy's scope.

    Args:
        config: The run.
        cluster: This task.
        exchange: Where peers publish.
        label_counts: How often each label comes, where the configuration
            smooths labels by that.
        canary: What teachers must predict. Default: nothing.

    Raises:
        OptionsError: If arguments in the configuration do not fit.
    """
    learn = config.codistillation
    objective = objectives.of(config.data.name)
    student = build_student(config, cluster.group)
    model = tfdistill.CodistillModel(
        student,
        teachers=_make_teachers(config, cluster, exchange, canary),
    )
    model.compile(
        _make_optimizer(config, cluster, student),
        _make_task_loss(config, student, label_counts),
        metrics=objective.metrics(),
        distillation_loss=_make_loss(learn),
        distillation_weight=_make_weight(learn),
        steps_per_execution=config.steps_per_execution,
    )
    return model


def build_student(config: config.Config, group: int) -> keras.Model:
    """Returns a group's student, without teachers.

    Args:
        config: The run.
        group: Index of the group.

    Raises:
        OptionsError: If arguments in the configuration do not fit.
    """
    arguments = config.model.arguments_of(group)
    # The tables must have the sizes that the rows were hashed for.
    for name in _SHARED_ARGUMENTS & config.data.arguments.keys():
        arguments[name] = config.data.arguments[name]
    try:
        return _BUILDERS[config.model.name](**arguments)
    except (TypeError, ValueError) as cause:
        raise OptionsError(f"`model.arguments` do not fit: {cause}") from cause


def _make_teachers(
    config: config.Config,
    cluster: tfdistill.Cluster,
    exchange: tfdistill.Exchange,
    canary: gates.Canary | None,
) -> tfdistill.TeacherSet:
    learn, options = config.codistillation, config.exchange
    return tfdistill.TeacherSet(
        exchange,
        peers_of(config, cluster),
        saved_models=learn.saved_models,
        trust_saved_models=learn.trust_saved_models,
        canary=canary,
        max_bad_batches=learn.max_bad_batches,
        max_staleness_steps=options.max_staleness_steps,
        max_staleness_secs=options.max_staleness_secs,
        staleness_ramp_steps=options.staleness_ramp_steps,
        staleness_ramp_secs=options.staleness_ramp_secs,
        allow_other_graphs=options.allow_other_graphs,
        schema=schema(config),
        allow_other_schemas=options.allow_other_schemas,
        poll_secs=options.poll_secs,
    )


def make_exporter(
    config: config.Config,
    cluster: tfdistill.Cluster,
    exchange: tfdistill.Exchange,
) -> tfdistill.StudentExporter:
    """Returns the callback that publishes the group's student."""
    return tfdistill.StudentExporter(
        exchange,
        every_steps=config.exchange.every_steps,
        group=cluster.group,
        variables_dtype=config.exchange.variables_dtype,
        schema=schema(config),
    )


def peers_of(
    config: config.Config, cluster: tfdistill.Cluster
) -> tuple[int, ...]:
    """Returns the groups that this one learns from."""
    topology = config.exchange.topology
    if not config.codistillation.enabled:
        return ()
    if not isinstance(topology, str):
        return topology[cluster.group]
    return cluster.peers if topology == "all" else cluster.ring_peers()


def learns(config: config.Config, cluster: tfdistill.Cluster) -> bool:
    """Whether a group has teachers: other groups, or fixed ones."""
    learn = config.codistillation
    fixed = learn.enabled and bool(learn.saved_models)
    return fixed or bool(peers_of(config, cluster))


def _make_optimizer(
    config: config.Config,
    cluster: tfdistill.Cluster,
    student: keras.Model,
) -> keras.optimizers.Optimizer:
    options = config.optimizer_of(learns=learns(config, cluster))
    try:
        optimizer = optimizers.make(options, num_steps=config.num_steps)
        if cluster.uses_parameter_servers or layer.layers_of(student):
            # Refuses those without a fused form, before the data are read.
            rules.rule_for(optimizer)
    except ValueError as cause:
        raise OptionsError(str(cause)) from cause
    notice = sections.constant_decay_notice(options)
    if notice and learns(config, cluster) and cluster.is_chief:
        print(notice, flush=True)
    return optimizer


def _make_task_loss(
    config: config.Config,
    student: keras.Model,
    label_counts: np.ndarray | None,
) -> keras.losses.Loss:
    objective = objectives.of(config.data.name)
    if config.smoothing.kind == "none":
        return objective.loss()
    return objective.smoothed_loss(
        config.smoothing.weight,
        counts=label_counts,
        num_outputs=int(student.output_shape[-1]),
    )


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
