"""Ways to train a workload: each returns a changed one.

Imports neither TensorFlow nor Keras before a method is called.
"""

import dataclasses
import difflib
import inspect
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from typing import Any

import tfdistill
from tfdistill import workload as workload_lib
from tfdistill.system import run_files

Workload = workload_lib.Workload
# Name of the teacher that is the version promoted last.
PROMOTED = "promoted"
# For the first step of the other groups, and for their versions to mix.
_WAIT_SECS = 300.0
# The outer optimizer of Douillard et al. 2023 (arXiv:2311.08105), except for
# its momentum of 0.9, which needs hundreds of mixes: recipes have 10 to 50.
# Final losses with 0.9, 0.6 and 0.3 were 0.448, 0.095 and 0.075 on digits (20
# mixes); 4.104 and 4.167 with 0.6 and 0.3 on language_model_small (30 mixes).
_OUTER = {"learning_rate": 0.7, "momentum": 0.6, "nesterov": True}


def independent(workload: Workload) -> Workload:
    """Groups without teachers; a comparison trains one, on all the data."""
    optimizer = workload.optimizer_alone or workload.optimizer
    apart = dataclasses.replace(
        workload, teachers=None, mixer=None, optimizer=optimizer
    )
    return _exported_once(apart)


def large_group(
    workload: Workload, *, parts: int = 2, learning_rate_scale: float = 1.0
) -> Workload:
    """One group with the workers, and the summed batch, of all groups."""
    from tfdistill.recipes import optimizers

    alone = independent(workload)
    return dataclasses.replace(
        alone,
        batch_size=parts * workload.batch_size,
        optimizer=lambda: optimizers.rescaled(
            alone.optimizer(), learning_rate_scale
        ),
    )


def label_smoothing(workload: Workload, *, weight: float = 0.1) -> Workload:
    """Independent, with labels smoothed uniformly."""
    from tfdistill.held_out import objectives

    loss = objectives.smoothed(workload.loss, weight=weight)
    return dataclasses.replace(independent(workload), loss=loss)


def unigram_smoothing(workload: Workload, *, weight: float = 0.1) -> Workload:
    """Independent, with labels smoothed by their frequencies."""
    from tfdistill.held_out import objectives

    def loss(train: object) -> Any:
        counts = objectives.label_counts(train)
        return objectives.smoothed(workload.loss, weight=weight, counts=counts)

    return dataclasses.replace(independent(workload), loss=loss)


def weight_decay(workload: Workload, *, decay: float = 0.1) -> Workload:
    """Independent, with this weight decay."""
    from tfdistill.recipes import optimizers

    alone = independent(workload)
    return dataclasses.replace(
        alone, optimizer=lambda: optimizers.decayed(alone.optimizer(), decay)
    )


def offline_distillation(
    workload: Workload, *, saved_model: str = ""
) -> Workload:
    """Taught by an independent group that was trained before."""
    if not saved_model:
        raise ValueError(
            "offline_distillation needs the SavedModel of a trained group; "
            "received none. Run it with `tfdistill compare`."
        )
    taught = dataclasses.replace(
        workload,
        teachers=lambda: tfdistill.teachers.FixedTeacher(saved_model),
        # A finished teacher is worth hearing from the first step on.
        distillation_weight=_last_weight(workload),
    )
    return _exported_once(taught)


def retrain(
    workload: Workload,
    *,
    promoted: str = "",
    warm_start: bool = True,
    teacher_weight: float | None = None,
    with_peers: bool = False,
    with_own_past: bool = False,
) -> Workload:
    """Continues from a promoted version, and is taught by it.

    `promoted` is its directory in a line. With a churn budget, the weight of
    the distillation follows the churn, from 1 or less; else it stays at
    `teacher_weight`, by default the workload's own. 0 is a warm start alone.
    """
    if teacher_weight is None:
        teacher_weight = _last_weight(workload)
    begins = dataclasses.replace(
        workload,
        warm_start=f"{promoted}/{run_files.TRAINING}" if warm_start else "",
        start_together_secs=_WAIT_SECS if with_peers else 0.0,
    )
    if not teacher_weight and not with_peers:
        return _exported_once(dataclasses.replace(begins, teachers=None))

    on_servers = tfdistill.Cluster.from_env().uses_parameter_servers

    def teachers() -> list[Any]:
        kinds = tfdistill.teachers
        found: list[Any] = [kinds.Peers()] if with_peers else []
        found += [kinds.OwnPast()] if with_own_past else []
        if teacher_weight:
            path = f"{promoted}/{run_files.STUDENT}" if on_servers else promoted
            found.append(kinds.FixedTeacher(path, name=PROMOTED))
        return found

    weight: Any = teacher_weight
    budget = workload.line.churn_budget if workload.line else 0.0
    if budget and teacher_weight:
        weight = tfdistill.callbacks.ChurnBudget(
            budget,
            teacher=PROMOTED,
            initial_weight=min(1.0, teacher_weight),
        )
    taught = dataclasses.replace(
        begins, teachers=teachers, distillation_weight=weight
    )
    return taught if with_peers or with_own_past else _exported_once(taught)


def ema_teacher(workload: Workload, *, decay: float = 0.9) -> Workload:
    """Taught by a running mean of its own weights."""
    return dataclasses.replace(
        workload,
        teachers=lambda: tfdistill.teachers.OwnPast(decay),
        # The mean moves at each version, as often as others would look.
        every_steps=workload.refresh_every_steps,
    )


def own_past(workload: Workload) -> Workload:
    """Taught by its own last version."""
    return dataclasses.replace(
        workload, teachers=lambda: tfdistill.teachers.OwnPast()
    )


def codistill(workload: Workload, *, mode: str = "disjoint") -> Workload:
    """Groups that teach each other, each on its own part of the data."""
    return dataclasses.replace(
        workload,
        mode=mode,
        teachers=workload.teachers or workload_lib.peers,
        start_together_secs=_WAIT_SECS,
    )


def codistill_shared(workload: Workload) -> Workload:
    """Groups that teach each other, each on all of the data."""
    return codistill(workload, mode="shared")


def codistill_coordinated(workload: Workload) -> Workload:
    """Groups that teach each other, and all see the same batches."""
    return codistill(workload, mode="coordinated")


def predictions(workload: Workload, *, wait_secs: float = 0.05) -> Workload:
    """Groups that send each other their predictions for the same batches."""
    sending = dataclasses.replace(
        codistill(workload, mode="coordinated"),
        teachers=lambda: tfdistill.teachers.PeerPredictions(
            wait_secs=wait_secs
        ),
    )
    return _exported_once(sending)


def labels(workload: Workload, *, directory: str = "") -> Workload:
    """Taught by what `tfdistill label` wrote; {group} is its number."""

    def data(cluster: tfdistill.Cluster, **options: object) -> tuple[Any, Any]:
        train, validation = workload.datasets(cluster)
        path = directory.replace("{group}", str(cluster.group))
        return train.apply(tfdistill.labels.read(path)), validation

    return dataclasses.replace(
        workload,
        data=data,
        teachers=lambda: tfdistill.teachers.LabelTeacher("labels"),
    )


def averaging(workload: Workload, *, every_steps: int = 50) -> Workload:
    """Groups that average their weights, each on its own part of the data."""
    return _mixed(
        workload,
        lambda: tfdistill.mixing.ModelAveraging(),
        every_steps=every_steps,
    )


def diloco(workload: Workload, *, every_steps: int = 50) -> Workload:
    """Groups whose progress moves common weights by Nesterov momentum."""
    return _diloco(workload, every_steps)


def diloco_alone(workload: Workload, *, every_steps: int = 50) -> Workload:
    """One group with the two optimizers of diloco: what these do by themselves.

    A control: the groups of `diloco` also share what they learn.
    """
    alone = _diloco(workload, every_steps, peers=[])
    return dataclasses.replace(alone, start_together_secs=0.0)


def diloco_fragments(
    workload: Workload,
    *,
    every_steps: int = 50,
    num_fragments: int = 5,
    bits: int = 1,
) -> Workload:
    """As diloco, a few numbers of a part of the weights at a time."""

    def mixer() -> Any:
        return tfdistill.mixing.FragmentMixer(
            _outer_rule(),
            every_steps=max(1, every_steps // num_fragments),
            num_fragments=num_fragments,
            choose=tfdistill.mixing.AboveRms(),
            bits=bits,
        )

    mixed = _diloco(workload, every_steps)
    return _exported_once(dataclasses.replace(mixed, mixer=mixer))


def _outer_rule() -> Any:
    import keras

    return tfdistill.mixing.OuterOptimizer(keras.optimizers.SGD(**_OUTER))


def _diloco(
    workload: Workload, every_steps: int, peers: list[int] | None = None
) -> Workload:
    def optimizer() -> Any:
        from tfdistill.recipes import optimizers

        return optimizers.as_adamw(mixed.optimizer())

    mixed = _mixed(workload, _outer_rule, every_steps=every_steps, peers=peers)
    return dataclasses.replace(mixed, optimizer=optimizer)


METHODS: Mapping[str, Callable[..., Workload]] = {
    method.__name__: method
    for method in (
        *(independent, large_group, label_smoothing, unigram_smoothing),
        *(weight_decay, offline_distillation, retrain),
        *(ema_teacher, own_past),
        *(codistill, codistill_shared, codistill_coordinated, predictions),
        *(averaging, diloco, diloco_alone, diloco_fragments, labels),
    )
}
NAMES = ", ".join(METHODS)


def describe(name: str) -> str:
    """Returns what a method is, in a line."""
    text = (METHODS[name].__doc__ or "").partition("\n")[0].removesuffix(".")
    return text[0].lower() + text[1:]


def check(name: str, known: Collection[str] = METHODS) -> str:
    """Returns the name of a method; a ValueError if there is no such method."""
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"There is no method {name!r}.{hint} Methods: {', '.join(known)}."
    )


def check_argument(method: str | None, name: str) -> str:
    """Returns the name of a method's argument; a ValueError if it has none."""
    known: list[str] = []
    if method is not None:
        known = list(inspect.signature(METHODS[method]).parameters)[1:]
    if name in known:
        return name
    raise ValueError(
        f"`{name}` is not an argument of the method {method}; it has "
        f"{', '.join(known) or 'none'}."
    )


def _exported_once(workload: Workload) -> Workload:
    """Writes only the last export, for students whose exports aren't read."""
    return dataclasses.replace(
        workload,
        every_steps=workload.num_steps,
        exporter={**workload.exporter, "offset_steps": 0},
    )


def _last_weight(workload: Workload) -> float:
    weight = workload.distillation_weight
    if weight == "auto":
        return 1.0
    return float(weight(workload.num_steps) if callable(weight) else weight)


def _mixed(
    workload: Workload,
    rule: Callable[[], Any],
    *,
    every_steps: int,
    peers: list[int] | None = None,
) -> Workload:
    def mixer() -> Any:
        return tfdistill.mixing.WeightMixer(
            rule(),
            every_steps=every_steps,
            peers=peers,
            wait_secs=_WAIT_SECS,
        )

    return dataclasses.replace(
        workload,
        teachers=None,
        optimizer=workload.optimizer_alone or workload.optimizer,
        mixer=mixer,
        every_steps=every_steps,
        exporter={},
        refresh_every_steps=min(every_steps, workload.refresh_every_steps),
        start_together_secs=_WAIT_SECS,
    )
