"""Quasi-global momentum, and data that differ between groups to try it on.

Lin et al. 2021, arXiv:2102.04761: momentum of what a mix left of the steps.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill import data
from tfdistill import optimizers
from tfdistill.cluster import identity
from tfdistill.system import keras_internals

# Draws of proportions among which each group's part of the data is balanced.
_MOST_DRAWS = 100
# What Keras' optimizers do before and after `update_step`.
_AROUND_UPDATES = (
    "weight_decay",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)


@keras.saving.register_keras_serializable("tfdistill")
class QuasiGlobalMomentum(keras.optimizers.Optimizer):
    """Momentum of what a mix left of the steps (Lin et al. 2021).

    Local momentum follows the gradients of one group's data. If groups mix
    their weights and their data differ, it leads each
    group away from the others. Here the buffer m follows the weights x
    themselves, over a step and the mix after it, as in algorithm 1 (QG-DSGDm)
    of arXiv:2102.04761. A step at the rate r with the gradient g is::

        x' = x - r (momentum m + g)
        x_next = x' if nothing was mixed, else the mix of x' with the peers'
        m = buffer_decay m + (1 - buffer_decay) (x - x_next) / r

    Whoever mixes only assigns to the variables between two steps: so the
    optimizer keeps the x of its last step, and updates m at the start of the
    next one. Nothing is sent but the weights. With mixes every k steps, pass
    `every_steps=k`: m then stays as it is for k steps and follows their mean
    step, (x - x after k steps and the mix) / (sum of the k rates), as the
    authors' code has it at a constant rate.

    The buffer and the kept weights are two variables of the size of the model.
    `inner` does everything else: its learning rate, clipping, weight decay
    and average of weights are kept. Weight decay is part of the difference, as
    in the authors' code. Models with `ShardedEmbedding` or on parameter servers
    refuse this optimizer: a table's rows move only if a batch has their ids,
    and the weights of the last step would be a second table.

    Args:
        inner: A `keras.optimizers.SGD` without momentum, or one that
            `with_kernel_decay(SGD, coupled=True)` made.
        momentum: In [0, 1). Default 0.9, as in the authors' experiments.
        buffer_decay: In [0, 1); how much of the buffer an update keeps.
            Default None: `momentum`.
        nesterov: Whether to look ahead, as QG-DSGDm-N does:
            x' = x - r (g + momentum (momentum m + g)). Default False.
        every_steps: Steps over which a difference is taken, >= 1. Default 1.
            Give the mixer's number.
        name: Name of the optimizer.

    Raises:
        ValueError: If a number is out of range, or `inner` is another optimizer
            or has momentum of its own.

    Example:
        >>> sgd = keras.optimizers.SGD(0.1, clipnorm=1.0)
        >>> optimizer = QuasiGlobalMomentum(sgd, nesterov=True)
    """

    def __init__(
        self,
        inner: keras.optimizers.SGD,
        *,
        momentum: float = 0.9,
        buffer_decay: float | None = None,
        nesterov: bool = False,
        every_steps: int = 1,
        name: str = "quasi_global_momentum",
    ) -> None:
        _check_inner(inner)
        decay = momentum if buffer_decay is None else buffer_decay
        for key, value in {
            "momentum": momentum,
            "buffer_decay": decay,
        }.items():
            if not 0 <= value < 1:
                raise ValueError(
                    f"`{key}` must be in [0, 1); received {value}."
                )
        if every_steps < 1:
            raise ValueError(
                f"`every_steps` must be >= 1; received {every_steps}."
            )
        config = inner.get_config()
        # Itself: in a copy, nothing would move the factor of a `ScaledRate`.
        rate = keras_internals.schedule_of(inner) or config["learning_rate"]
        around = {key: config[key] for key in _AROUND_UPDATES}
        if isinstance(inner, optimizers.CoupledKernelDecay):
            around["weight_decay"] = None  # Part of its `update_step`.
        super().__init__(learning_rate=rate, name=name, **around)
        keras_internals.share_steps(self, inner)
        self.inner = inner
        self.momentum = momentum
        self.buffer_decay = decay
        self.nesterov = nesterov
        self.every_steps = every_steps

    def build(self, variables: Sequence[Any]) -> None:
        """Makes a buffer for each variable, and room for the last weights."""
        if self.built:
            return
        super().build(variables)
        self.inner.build(variables)
        self._buffers = self.add_optimizer_variables(variables, "buffer")
        self._lasts = self.add_optimizer_variables(variables, "last")
        # Sums of the rates of the steps since; 0 before the first step.
        self._rates = [
            self.add_variable((), dtype="float32", name=f"rates_{number}")
            for number in range(len(variables))
        ]

    def update_step(
        self, gradient: Any, variable: Any, learning_rate: Any
    ) -> None:
        """Updates one variable on one replica."""
        index = keras_internals.variable_index(self, variable)
        dtype = variable.dtype
        weights = tf.convert_to_tensor(variable)
        rate = tf.cast(learning_rate, dtype)
        momentum = tf.cast(self.momentum, dtype)
        ahead = momentum * self._followed(index, weights, learning_rate)
        self.inner.update_step(gradient, variable, learning_rate)
        change = rate * ahead
        if self.nesterov:
            plain = weights - tf.convert_to_tensor(variable)
            change = momentum * (change + plain)
        self.assign_sub(variable, change)

    def _followed(
        self, index: int, weights: tf.Tensor, learning_rate: Any
    ) -> tf.Tensor:
        """Returns the buffer, moved by the steps that are now complete."""
        buffer, last = self._buffers[index], self._lasts[index]
        rates = self._rates[index]
        decay = tf.cast(self.buffer_decay, weights.dtype)
        before = tf.convert_to_tensor(buffer)
        # No step yet, or only steps at rate 0: nothing that a rate scales.
        step = tf.math.divide_no_nan(
            tf.convert_to_tensor(last) - weights,
            tf.cast(tf.convert_to_tensor(rates), weights.dtype),
        )
        moved = decay * before + (1 - decay) * step
        rate = tf.cast(learning_rate, tf.float32)
        if self.every_steps == 1:
            self.assign(last, weights)
            self.assign(rates, rate)
        else:
            steps = tf.convert_to_tensor(self.iterations)
            is_due = tf.equal(steps % self.every_steps, 0)
            moved = tf.where(is_due, moved, before)
            self.assign(last, tf.where(is_due, weights, last))
            self.assign(rates, tf.where(is_due, 0.0, rates) + rate)
        self.assign(buffer, moved)
        return moved

    def get_config(self) -> dict[str, Any]:
        """Returns what makes an equal optimizer; for `from_config`."""
        inner = keras.saving.serialize_keras_object(self.inner)
        # Callbacks may have changed it here.
        rate = super().get_config()["learning_rate"]
        inner["config"]["learning_rate"] = rate
        return {
            "inner": inner,
            "momentum": self.momentum,
            "buffer_decay": self.buffer_decay,
            "nesterov": self.nesterov,
            "every_steps": self.every_steps,
            "name": self.name,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> Any:
        """Returns the optimizer that `get_config` has described."""
        inner = keras.saving.deserialize_keras_object(
            config["inner"], custom_objects=custom_objects
        )
        return cls(**{**config, "inner": inner})


def _check_inner(inner: Any) -> None:
    is_sgd = isinstance(inner, keras.optimizers.SGD)
    apart = isinstance(inner, optimizers.KernelDecay) and not isinstance(
        inner, optimizers.CoupledKernelDecay
    )
    if not is_sgd or apart:
        raise ValueError(
            "`inner` must be a keras.optimizers.SGD, or one made by "
            "with_kernel_decay(SGD, coupled=True); received "
            f"{type(inner).__name__}. A step of another optimizer is no "
            "gradient times the learning rate."
        )
    if inner.momentum:
        raise ValueError(
            "`inner` must have no momentum, which would follow this group's "
            f"gradients; received momentum={inner.momentum}. Pass `momentum` "
            "and `nesterov` to QuasiGlobalMomentum."
        )


def dirichlet_shard(
    dataset: tf.data.Dataset,
    cluster: identity.Cluster | None = None,
    *,
    alpha: float,
    seed: int,
    label: Callable[..., tf.Tensor] | None = None,
    num_classes: int | None = None,
) -> tf.data.Dataset:
    """Returns a part of a data set in which some labels are rare.

    For each label, the groups' proportions are drawn from a Dirichlet
    distribution whose parameters are all `alpha` (Hsu et al. 2019,
    arXiv:1909.06335, by label as in Yurochkin et al. 2019, arXiv:1905.12022).
    With `alpha=0.1` most examples of a label are one group's; with 100 the
    parts are nearly alike. Parts are disjoint and cover all of the data. At any
    point of the stream, a group has had its proportion of each label to within
    about one example. The proportions are drawn anew, up to 100 times, until
    each group's part is half of an equal part or more, as Lin et al. 2021
    (arXiv:2102.04761) do in their code; else the most even draw counts.

    Elements are filtered as they are read; every group reads them all.

    Args:
        dataset: In the same order in every group, not yet batched, repeated or
            shuffled. Elements `(x, y)` or `(x, y, sample_weight)`.
        cluster: Says which group this is. Default: `Cluster.from_env()`.
        alpha: > 0.
        seed: Seed of the proportions, the same in all groups.
        label: Called with an element as a function in `dataset.map` is; returns
            its label, an integer scalar >= 0. Default None: y. For one-hot
            targets: `lambda x, y: tf.argmax(y)`.
        num_classes: Number of labels, taken to be equally frequent. Default
            None: the labels are counted in a first pass over the data.

    Returns:
        The group's data set.

    Raises:
        ValueError: If a number is out of range, labels are not integers, or the
            data never end and `num_classes` is not given.
        DataError: If a group would have no element.

    Example:
        >>> cluster = identity.Cluster(group=1, num_groups=2)
        >>> examples = tf.data.Dataset.range(8).map(lambda i: (i, i % 2))
        >>> part = dirichlet_shard(examples, cluster, alpha=0.5, seed=3)
        >>> [int(x) for x, _ in part]
        [0, 3, 4, 6]
    """
    if not alpha > 0:
        raise ValueError(f"`alpha` must be > 0; received {alpha}.")
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"`num_classes` must be >= 1; received {num_classes}.")
    label_of = _checked_label(dataset, label)
    cluster = cluster or identity.Cluster.from_env()
    if cluster.num_groups == 1:
        return dataset
    counts = np.ones(num_classes or 0)
    if num_classes is None:
        counts = _label_counts(dataset.map(label_of))
    shares = _dirichlet_shares(
        counts, cluster.num_groups, alpha=alpha, seed=seed
    )
    # A label is dealt out in whole elements, the first to its largest share.
    whole = np.floor(counts[:, np.newaxis] * shares)
    whole[counts > 0, shares[counts > 0].argmax(axis=1)] += 1
    if num_classes is None and not whole.sum(axis=0).min() >= 1:
        raise data.DataError(
            "Each group must get at least one element; received "
            f"{counts.sum():.0f} elements of {len(counts)} labels for "
            f"{cluster.num_groups} groups and alpha={alpha}. Use fewer groups, "
            "or a larger `alpha`."
        )
    table, group = tf.constant(shares), cluster.group

    def deal(dealt: tf.Tensor, element: Any) -> tuple[tf.Tensor, Any]:
        # To whoever is furthest behind its proportion of this label.
        index = label_of(*_as_arguments(element))
        in_range = tf.debugging.assert_less(
            index,
            tf.cast(len(shares), index.dtype),
            message=f"Labels must be < num_classes, which is {len(shares)}.",
        )
        with tf.control_dependencies([in_range]):
            index = tf.identity(index)
        had = tf.gather(dealt, index)
        due = tf.gather(table, index) * (tf.reduce_sum(had) + 1.0)
        taker = tf.argmax(due - had)
        dealt = tf.tensor_scatter_nd_add(dealt, [[index, taker]], [1.0])
        return dealt, (taker, element)

    start = tf.zeros(table.shape, table.dtype)
    return (
        dataset.scan(start, deal)
        .filter(lambda taker, _: tf.equal(taker, group))
        .map(lambda _, element: element)
    )


def _as_arguments(element: Any) -> tuple[Any, ...]:
    """An element as `Dataset.map` passes it to a function."""
    return element if isinstance(element, tuple) else (element,)


def _checked_label(
    dataset: tf.data.Dataset, label: Callable[..., tf.Tensor] | None
) -> Callable[..., tf.Tensor]:
    """What takes an element's parts and returns its label, int64."""

    def of_pair(x: Any, y: Any, sample_weight: Any = None) -> tf.Tensor:
        del x, sample_weight
        return y

    spec = dataset.element_spec
    found: Any = None
    if label is not None:
        found = dataset.map(label).element_spec
    elif isinstance(spec, tuple) and len(spec) in (2, 3):
        label, found = of_pair, spec[1]
    is_label = isinstance(found, tf.TensorSpec) and found.dtype.is_integer
    if label is None or not is_label or found.shape.rank != 0:
        raise ValueError(
            "A label must be an integer scalar, one for each element; received "
            f"{found if found is not None else spec}. Shard before batching, "
            "and pass `label`, which finds the label of an element, as in "
            "label=lambda x, y: tf.argmax(y)."
        )
    chosen = label
    return lambda *parts: tf.cast(chosen(*parts), tf.int64)


def _label_counts(labels: tf.data.Dataset) -> np.ndarray:
    """How often each label comes, float64 `[labels]`; one pass."""
    if labels.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "`num_classes` must be given for data that never end; received "
            "None. Pass it, or call dirichlet_shard() before repeat()."
        )
    counts = np.zeros(0, np.int64)
    for batch in labels.batch(8192).as_numpy_iterator():
        if batch.min() < 0:
            raise ValueError(f"Labels must be >= 0; received {batch.min()}.")
        counts = np.bincount(batch, minlength=len(counts)) + np.pad(
            counts, (0, max(0, batch.max() + 1 - len(counts)))
        )
    return counts.astype("float64")


def _dirichlet_shares(
    counts: np.ndarray, num_groups: int, *, alpha: float, seed: int
) -> np.ndarray:
    """Each label's proportions, float64 `[labels, groups]`; rows sum to 1."""
    best, most = np.zeros([len(counts), num_groups]), 0.0
    for draw in range(_MOST_DRAWS):
        generator = np.random.default_rng([seed, draw])
        shares = generator.dirichlet([alpha] * num_groups, size=len(counts))
        smallest = (counts @ shares).min()
        if smallest > most:
            best, most = shares, smallest
        if most >= 0.5 * counts.sum() / num_groups:
            break
    return best
