"""What a recipe returns: one training, ready to run by any launch program.

Imports neither TensorFlow nor Keras.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from tfdistill.cluster import identity

MODES = ("disjoint", "shared", "coordinated")
DTYPE_POLICIES = ("float32", "mixed_bfloat16", "bfloat16", "float64")
CHECKPOINTS = ("none", "best", "all")


def peers() -> Any:
    """All other groups, by their exports."""
    from tfdistill.teachers import peers as peers_lib

    return peers_lib.Peers()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One training: its model, its data, and how groups learn from each other.

    A recipe is a function whose keyword arguments all have plain defaults and
    that returns a workload. `--override=NAME=VALUE` changes one of its
    arguments, or one of the fields below that hold a number or a string.

    Attributes:
        model: Called in the strategy's scope; returns the student.
        data: `((x, y), (x, y))`, arrays for training and for validation. Or a
            function `data(cluster, *, batch_size, mode, seed)` that returns
            two `tf.data.Dataset`: the group's training data, endless and in
            batches of the whole group, and the validation data. Both must be
            the same on every worker of a group.
        batch_size: Examples per step of the whole group.
        num_steps: Training steps of each group.
        optimizer: Returns a new optimizer.
        loss: `SparseCategoricalCrossentropy` or `BinaryCrossentropy`, or a
            loss derived from one. Or a function of the training data that
            returns it. Or a dict of losses by output; a run is judged by the
            first output.
        metrics: Returns what `compile` takes; with a dict of losses, a dict of
            lists. `log_loss` is added.
        loss_weights: As `CodistillModel.compile` takes it.
        schema: Returns what inputs and outputs mean, to compare between
            groups. Default: nothing is compared.
        evaluate_every_steps: Steps between two evaluations. Default: ten
            evaluations, or one if `num_steps` isn't a multiple of ten.
        steps_per_execution: As `compile` takes it. Default: as there.
        dtype_policy: Dtype policy of the student.
        seed: Seed for initial weights, dropout and the order of the examples.
            Each group derives its own.
        mode: Which examples a group trains on; see `tfdistill.data`.
        checkpoints: `"best"` keeps the student with the lowest validation loss
            as `best.keras`, `"all"` the student at each evaluation. Default
            `"none"`.
        backup_every_steps: Steps between backups. Default: the default of
            `callbacks.Backup`.
        teachers: Returns the teachers. Default: all other groups, by their
            exports. None: there are none.
        optimizer_alone: Returns the optimizer of a group without teachers.
            Default: `optimizer`.
        optimizer_name: Name in Keras, such as `"muon"` or
            `"schedule_free_adamw"`, in place of `optimizer`, whose learning
            rate and clipping it takes.
        distillation_loss: Default: `SoftTargetCrossEntropy` of logits.
        distillation_output_weights: As `CodistillModel.compile` takes it.
        auxiliary_heads, agree_on: As `CodistillModel` takes them.
        distillation_weight: As `CodistillModel.compile` takes it.
        every_steps: Steps between two exports.
        refresh_every_steps: Steps between two looks for newer versions.
        exporter: Further arguments of `StudentExporter`.
        mixer: Returns a `mixing.WeightMixer`. All groups then begin with the
            same weights.
        callbacks: Returns further callbacks for `fit`.
        start_together_secs: How long a group waits after its first step for
            the first step of the others. For runs that are short compared to
            the time that a start takes.
        warm_start: Directory of another training's backups, whose weights and
            slots training begins with; see `callbacks.Backup`.
        line: For `tfdistill line`: a `contrib.line.LineSettings`, with the
            churn budget of a retrain, the gate and its slices. Default: its
            own defaults.

    Example:
        >>> workload = Workload(
        ...     model=lambda: keras.Sequential([keras.layers.Dense(10)]),
        ...     data=(([[0.0]], [1]), ([[0.0]], [1])),
        ...     batch_size=1,
        ...     num_steps=20,
        ...     optimizer=lambda: keras.optimizers.SGD(0.1),
        ...     loss=None,
        ... )
        >>> workload.epoch_steps
        2
    """

    model: Callable[[], Any]
    data: Any
    batch_size: int
    num_steps: int
    optimizer: Callable[[], Any]
    loss: Any
    metrics: Callable[[], Any] = list
    loss_weights: Any = None
    schema: Callable[[], Mapping[str, Any]] | None = None
    evaluate_every_steps: int | None = None
    steps_per_execution: int | None = None
    dtype_policy: str = "float32"
    seed: int = 0
    mode: str = "disjoint"
    checkpoints: str = "none"
    backup_every_steps: int | None = None
    teachers: Callable[[], Any] | None = peers
    optimizer_alone: Callable[[], Any] | None = None
    optimizer_name: str = ""
    distillation_loss: Any = None
    distillation_output_weights: Any = None
    auxiliary_heads: Mapping[str, str] | None = None
    agree_on: str = "batch"
    distillation_weight: Any = "auto"
    every_steps: int = 50
    refresh_every_steps: int = 10
    exporter: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mixer: Callable[[], Any] | None = None
    callbacks: Callable[[], list[Any]] = list
    start_together_secs: float = 0.0
    warm_start: str = ""
    line: Any = None

    def __post_init__(self) -> None:
        """Checks what can be checked without making anything."""
        for name in (
            *("batch_size", "num_steps", "epoch_steps", "every_steps"),
            *("refresh_every_steps", "steps_per_execution"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be >= 1; received {value}.")
        for name, known in (
            ("mode", MODES),
            ("dtype_policy", DTYPE_POLICIES),
            ("checkpoints", CHECKPOINTS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"`{name}` must be one of {', '.join(known)}; received "
                    f"{getattr(self, name)!r}."
                )
        for part, whole in (
            (self.epoch_steps, self.num_steps),
            (self.steps_per_execution or 1, self.epoch_steps),
        ):
            if whole % part:
                raise ValueError(
                    "`evaluate_every_steps` must divide `num_steps`, and "
                    "`steps_per_execution` must divide `evaluate_every_steps`; "
                    f"received {self.epoch_steps}, {self.num_steps} and "
                    f"{self.steps_per_execution}. Override one of them."
                )

    @property
    def epoch_steps(self) -> int:
        """Steps between two evaluations."""
        if self.evaluate_every_steps is not None:
            return self.evaluate_every_steps
        return self.num_steps // (1 if self.num_steps % 10 else 10)

    def datasets(self, cluster: "identity.Cluster") -> tuple[Any, Any]:
        """Returns the training data of a group and the validation data.

        Args:
            cluster: Says which group this is.
        """
        mode = self.mode
        if mode == "coordinated":
            # All groups read what the first one would.
            cluster, mode = dataclasses.replace(cluster, group=0), "shared"
        opened = self.data if callable(self.data) else _in_memory(*self.data)
        return opened(
            cluster, batch_size=self.batch_size, mode=mode, seed=self.seed
        )


# Fields that an override may change whatever the recipe: numbers, strings, and
# what an exporter takes.
SETTINGS = tuple(
    sorted(
        field.name
        for field in dataclasses.fields(Workload)
        if field.type in (int, int | None, float, str, Mapping[str, Any])
    )
)


def _in_memory(
    train: object, validation: object
) -> Callable[..., tuple[Any, Any]]:
    """Returns a function that makes batches of arrays."""

    def open_data(
        cluster: "identity.Cluster", *, batch_size: int, mode: str, seed: int
    ) -> tuple[Any, Any]:
        import tensorflow as tf

        from tfdistill import data

        own = data.group_shard(train, cluster, mode=mode)
        leaves = tf.nest.flatten(own)
        # Made once, outside the traced function: not constants of its graph.
        own = tf.nest.map_structure(tf.constant, own)

        @tf.autograph.experimental.do_not_convert  # A tenth of a start.
        def read(rows: object) -> Any:
            return tf.nest.map_structure(lambda x: tf.gather(x, rows), own)

        batches = data.shuffled_batches(
            len(leaves[0]),
            batch_size=batch_size,
            seed=seed,
            group=cluster.group,
            read=lambda rows, _: rows.map(read),
        )
        held_out = tf.data.Dataset.from_tensor_slices(validation)
        return batches, held_out.batch(batch_size)

    return open_data
