"""The compiled student of one group, with its teachers."""

import importlib
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from launch.config import config
from launch.config import sections
from launch.task import cohort
from launch.task import objectives
from launch.task import optimizers
from models import cifar10
from models import criteo
from models import digits
from models import imagenet
from models import language_model
from models import shakespeare
from tfdistill.system import run_files


def make_canary(
    config: config.Config, validation: tf.data.Dataset
) -> tfdistill.Canary | None:
    """Returns what teachers must predict; None if the run asks for nothing.

    The first validation examples, the same on all workers of a group.
    """
    learn = config.codistillation
    if not learn.canary_examples:
        return None
    return tfdistill.Canary.from_dataset(
        validation,
        num_examples=learn.canary_examples,
        from_logits=True,
        margin=learn.canary_margin,
        student_margin=learn.canary_student_margin,
    )


def schema(config: config.Config) -> dict[str, Any]:
    """Returns what a student's inputs and outputs mean in this group.

    The data must have been opened before.
    """
    source = importlib.import_module(f"models.{config.data.name}")
    return source.make_schema(**config.data.source)


BUILDERS: Mapping[str, Callable[..., keras.Model]] = {
    "cifar10": cifar10.build_model,
    "cifar10_small": cifar10.build_small_model,
    "criteo": criteo.build_model,
    "criteo_dlrm": criteo.build_dlrm,
    "digits": digits.build_model,
    "imagenet": imagenet.build_model,
    "language_model": language_model.build_model,
    "shakespeare": shakespeare.build_model,
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
    canary: tfdistill.Canary | None = None,
    barrier: Any = None,
) -> tfdistill.CodistillModel:
    """Returns the compiled model; call it in the strategy's scope.

    `label_counts` says how often each label comes, if the configuration
    smooths labels by that; `barrier` replaces the schedule of the weight, if
    groups mix their weights first. Raises OptionsError if arguments do not fit.
    """
    learn = config.codistillation
    student = _build(config, cluster.group)
    peers = peers_of(config, cluster)
    # Nothing of a peer that sends its predictions is loaded or compared.
    by_versions = learn.by == "versions" and learn.num_students == 1
    labels = ["labels"] if learn.enabled and learn.labels_from else []
    # Saved models and bad batches; staleness, other graphs, polling.
    options = {
        **learn.taken_by(tfdistill.TeacherSet),
        # Its `weights` are those of teachers, not of the student.
        **config.exchange.taken_by(tfdistill.TeacherSet, but=["weights"]),
    }
    if learn.by == "served":
        # To the step, their labels are part of the data.
        labels = [*map(run_files.group_name, peers), *labels]
        peers, options["by"] = (), "versions"
    teachers = tfdistill.TeacherSet(
        exchange,
        peers,
        canary=canary if by_versions else None,
        schema=schema(config) if by_versions else None,
        labels=labels,
        cohort=learn.num_students if learn.num_students > 1 else None,
        **options,
    )
    model = tfdistill.CodistillModel(student, teachers=teachers)

    def task_loss(student: keras.Model) -> keras.losses.Loss:
        return _make_task_loss(config, student, label_counts)

    def metrics(student: keras.Model) -> list[Any]:
        return objectives.of(config.data.name).metrics()

    is_cohort = isinstance(student, cohort.Cohort)
    model.compile(
        _make_optimizer(config, cluster, student),
        student.by_student(task_loss) if is_cohort else task_loss(student),
        metrics=student.by_student(metrics) if is_cohort else metrics(student),
        distillation_loss=make_loss(learn),
        distillation_weight=barrier or make_weight(learn),
        steps_per_execution=config.steps_per_execution,
    )
    return model


def builder_arguments(config: config.Config, group: int) -> dict[str, Any]:
    """Returns what a group's student is built with."""
    arguments = config.model.arguments_of(group)
    # The tables must have the sizes that the rows were hashed for.
    for name in _SHARED_ARGUMENTS & config.data.arguments.keys():
        arguments[name] = config.data.arguments[name]
    return arguments


def build_student(config: config.Config, group: int) -> keras.Model:
    """Returns a group's student, without teachers.

    Raises OptionsError if arguments in the configuration do not fit.
    """
    try:
        return BUILDERS[config.model.name](**builder_arguments(config, group))
    except (TypeError, ValueError) as cause:
        raise OptionsError(f"`model.arguments` do not fit: {cause}") from cause


def initial_seed(config: config.Config, group: int) -> int:
    """Returns the seed of a group's initial weights."""
    return seed_of(config.seed, 0 if config.seed_groups_alike else group)


def seed_of(seed: int, group: int) -> int:
    """Returns a group's own seed; no two runs and groups share one."""
    return int(np.random.SeedSequence([seed, group]).generate_state(1)[0])


def _build(config: config.Config, group: int) -> keras.Model:
    """Returns the group's student, or its several students as one model."""
    num_students = config.codistillation.num_students
    if num_students == 1:
        return build_student(config, group)
    found = []
    for number in range(num_students):
        # As in a group of its own.
        keras.utils.set_random_seed(seed_of(config.seed, number))
        found.append(build_student(config, number))
    return cohort.Cohort(found)


def make_exporter(
    config: config.Config,
    cluster: tfdistill.Cluster,
    exchange: tfdistill.Exchange,
) -> tfdistill.StudentExporter:
    """Returns the callback that publishes the group's student."""
    return tfdistill.StudentExporter(
        exchange,
        group=cluster.group,
        schema=schema(config),
        **config.exchange.taken_by(tfdistill.StudentExporter),
    )


def make_mixer(
    config: config.Config,
    cluster: tfdistill.Cluster,
    canary: tfdistill.teachers.Canary | None = None,
) -> tfdistill.mixing.WeightMixer | None:
    """Returns the callback that mixes weights, if the recipe asks for it.

    Raises OptionsError if the rule does not take its arguments.
    """
    mixing = config.mixing
    if not mixing.enabled:
        return None
    peers: Any = mixing.topology
    if not isinstance(peers, str):
        peers = peers[cluster.group]
    options = mixing.taken_by(tfdistill.mixing.WeightMixer, but=["rule"])
    options |= {"peers": peers, "seed": config.seed}
    rule = make_rule(mixing)
    if mixing.barrier_margin is None or canary is None:
        return tfdistill.mixing.WeightMixer(rule, **options)
    return tfdistill.contrib.MergeBarrier(
        rule,
        held_out=(canary.inputs, tf.constant(canary.labels)),
        margin=mixing.barrier_margin,
        weight=make_weight(config.codistillation),
        **options,
    )


def make_rule(mixing: sections.Mixing) -> tfdistill.mixing.Rule:
    """Returns the rule by which weights are mixed."""
    name = "".join(part.title() for part in mixing.rule.split("_"))
    kind = getattr(tfdistill.mixing, name)
    try:
        if mixing.rule == "outer_optimizer":
            return kind(keras.optimizers.SGD(**mixing.arguments))
        return kind(**mixing.arguments)
    except (TypeError, ValueError) as cause:
        raise OptionsError(
            f"`mixing.arguments` do not fit {mixing.rule}: {cause}"
        ) from cause


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
    own = learn.saved_models or learn.labels_from or learn.num_students > 1
    own = own or learn.include_past is not False
    fixed = learn.enabled and bool(own)
    return fixed or bool(peers_of(config, cluster))


def _make_optimizer(
    config: config.Config,
    cluster: tfdistill.Cluster,
    student: keras.Model,
) -> keras.optimizers.Optimizer:
    options = config.optimizer_of(learns=learns(config, cluster))
    try:
        optimizer = optimizers.make(options, num_steps=config.num_steps)
        table = tfdistill.ShardedEmbedding
        has_tables = any(
            isinstance(layer, table)
            for one in cohort.students_of(student)
            for layer in one.layers
        )
        if cluster.uses_parameter_servers or has_tables:
            table.check_optimizer(optimizer)
    except ValueError as cause:
        raise OptionsError(str(cause)) from cause
    notice = sections.constant_decay_notice(options, config.codistillation)
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
    if config.smoothing.kind == "confidence_penalty":
        return objectives.ConfidencePenalty(
            objective.loss(), weight=config.smoothing.weight
        )
    return objective.smoothed_loss(
        config.smoothing.weight,
        counts=label_counts,
        num_outputs=int(student.output_shape[-1]),
    )


def make_loss(
    learn: sections.Codistillation,
) -> tfdistill.losses.DistillationLoss:
    """Returns the distillation loss, of logits."""
    drawn = learn.loss.startswith("Sampled")
    losses = tfdistill.contrib if drawn else tfdistill.losses
    kind = getattr(losses, learn.loss)
    return kind(from_logits=True, **learn.taken_by(kind))


def make_weight(
    learn: sections.Codistillation,
) -> tfdistill.schedules.Schedule:
    """Returns the weight of the distillation loss, by the global step."""
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
