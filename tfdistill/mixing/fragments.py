"""FragmentMixer: groups mix parts of their weights in turn, while they train.

With a the weights that all groups have in common, w one group's weights, and c
what it sends of the outer gradient g = a - w of a fragment,

    a <- optimizer(a, mean of all groups' c),   w <- w + (new a - old a) + c

one mix later, when it is the next fragment's turn to be sent. So no group waits
for what travels meanwhile. What a chooser leaves out, and what a group learns
in the meantime, stays in its own weights, and is in its next outer gradient:
w - a is all that was never sent. That is the error feedback, and needs no
memory. With one fragment of all numbers, and no delay, it would be DiLoCo.

Douillard et al. 2025, arXiv:2501.18512 (fragments, in turn, during training);
Sarfi et al. 2025, arXiv:2508.15706 (chosen numbers of few bits). Both were read
only in summaries by others. Their groups continue from the common weights,
mixed with their own, and keep what they did not send separately.
"""

import functools
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent import futures
from typing import Any
from typing import cast

import keras
import numpy as np
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.embedding import tables
from tfdistill.exchange import claim
from tfdistill.exchange import deltas
from tfdistill.exchange import versions
from tfdistill.exports import student_graph
from tfdistill.follow import follower
from tfdistill.follow import screen as screen_lib
from tfdistill.mixing import mixer
from tfdistill.mixing import outer_gradients
from tfdistill.mixing import peers as peers_lib
from tfdistill.mixing import rules
from tfdistill.mixing import weights
from tfdistill.system import background
from tfdistill.training import steps

_log = logging.getLogger(__name__)
# In a manifest's `extras`: the SHA-256 of the fragment's common weights, as of
# when the outer gradient was taken.
_ANCHOR_FIELD = "anchor"
# How many outer gradients may wait for a storage that hangs.
_MOST_UNPUBLISHED = 64


class FragmentMixer(mixer.ScheduledMixer):
    """Mixes as a `WeightMixer`, but small parts of the progress, one at a time.

    The trained weights are cut into fragments of about the same size, by
    variables. A mix takes the fragment that was sent at the mix before, which
    the peers' have had time to arrive since, and sends the next fragment: of
    its outer gradient, a few numbers in few bits, published by a thread. So
    each fragment is mixed every `every_steps * num_fragments` steps.

    Groups must have the same weights in common, so a mix waits until all peers'
    have arrived, which they have `every_steps` steps of time for. Batch
    statistics stay each group's own, and so do the last steps.

    Versions of the student are not mixed: the `StudentExporter` before it may
    publish as it likes, such as for teachers.

    Example:
        >>> from tfdistill import mixing
        >>> outer = keras.optimizers.SGD(0.7, momentum=0.6, nesterov=True)
        >>> found = mixing.FragmentMixer(
        ...     mixing.OuterOptimizer(outer),
        ...     every_steps=10,
        ...     num_fragments=5,
        ...     choose=mixing.AboveRms(),
        ...     bits=1,
        ... )
    """

    mixes_versions = False

    def __init__(
        self,
        rule: rules.OuterOptimizer,
        *,
        every_steps: int,
        num_fragments: int,
        choose: deltas.Chooser | None = None,
        bits: int = 8,
        wait_secs: float = 60.0,
        **kwargs: Any,
    ) -> None:
        """Reads nothing yet.

        Args:
            rule: The optimizer for the common weights.
            every_steps: Steps between mixes, >= 1.
            num_fragments: Number of parts into which the weights are cut, >= 1,
                and at most the number of trained variables.
            choose: Picks which numbers of kernels and tables are sent, such as
                `AboveRms()`. Default: all.
            bits: Bits per number: 8, or 1 for its sign and a scale shared by
                256 numbers. Default 8.
            wait_secs: The longest wait of a mix for its peers, > 0. It should
                exceed the time that a group takes to restart; otherwise the
                groups' weights diverge, with a warning.
            **kwargs: As for `WeightMixer`.

        Raises:
            ValueError: An argument is not as above.
        """
        super().__init__(
            rule, every_steps=every_steps, wait_secs=wait_secs, **kwargs
        )
        if not isinstance(rule, rules.OuterOptimizer):
            raise ValueError(
                "`rule` must be a tfdistill.mixing.OuterOptimizer; received "
                f"{rule!r}. WeightMixer takes any rule."
            )
        if type(num_fragments) is not int or num_fragments < 1:
            raise ValueError(
                "`num_fragments` must be a whole number >= 1; received "
                f"{num_fragments!r}."
            )
        if bits not in outer_gradients.BITS:
            raise ValueError(f"`bits` must be 8 or 1; received {bits!r}.")
        if not wait_secs:
            raise ValueError(
                "`wait_secs` must be > 0, because all groups must mix the same "
                "versions; received 0."
            )
        self._num_fragments = num_fragments
        self._choose, self._bits = choose, bits
        # It looks several times between two mixes for what has arrived.
        self._ahead = steps.EverySteps(max(1, every_steps // 4))

    def forget(self) -> None:
        """Forgets an earlier training: this one is at step 0."""
        super().forget()
        self._outbox = Outbox()
        self._is_apart = False

    # ---- before the first step ----

    def on_train_begin(self, logs: steps.Logs | None = None) -> None:
        """Starts the threads that send and read."""
        super().on_train_begin(logs)
        exporter, publish = self._exporter, None
        strategy = self.codistilled.distribute_strategy
        if replicas.is_chief(strategy) and exporter.exchange.enabled:
            publish = functools.partial(
                exporter.exchange.outer_gradients.publish_file,
                group=exporter.group,
                graph_fingerprint=self._weights.fingerprint,
            )
        self._outbox.open(publish, wait_secs=self._wait_secs)

    def on_train_end(self, logs: steps.Logs | None = None) -> None:
        """Stops the threads."""
        super().on_train_end(logs)
        self._outbox.close()

    def _make_weights(self) -> Any:
        model = self.codistilled
        return Fragments(
            model.student,
            model.graph,
            model.distribute_strategy,
            cast(rules.OuterOptimizer, self._rule),
            self._num_fragments,
        )

    def _source(self) -> peers_lib.Source:
        ours = self._weights

        def read(version: versions.Version) -> Any:
            index = self._fragment_of(version.step)
            return outer_gradients.decode(version.content, ours.sizes[index])

        def screen(version: versions.Version) -> None:
            if version.manifest.graph_fingerprint != ours.fingerprint:
                raise screen_lib.Refused(
                    "its graph differs from the student's. Train the same "
                    "model in each group that mixes."
                )
            peers_lib.check_origin(version, self.described)
            if version.num_bytes > ours.most_bytes:
                raise screen_lib.Refused(
                    f"it must have {ours.most_bytes} bytes at most; received "
                    f"{version.num_bytes}."
                )

        store = self._exporter.exchange.outer_gradients
        return peers_lib.Source(store, read, screen)

    @property
    def _described_rule(self) -> str:
        every, num = self._schedule.every_steps, self._num_fragments
        return (
            f"{self._rule.description}, one of {num} fragments every {every} "
            "steps"
        )

    def _fragment_of(self, step: int) -> int:
        return step // self._schedule.every_steps % self._num_fragments

    # ---- between steps ----

    @property
    def _looks_ahead(self) -> bool:
        # A gradient that was just sent has had no time to arrive.
        return self._outbox.step not in (None, self.step)

    def _when_due(self) -> None:
        if self._outbox.step is not None:
            self._mix(self._outbox.step)
            # It has what was taken before; also if there was no mix.
            self._outbox.wait()
        if not self.is_over:
            self._made.take_fragment(self._fragment_of(self.step))
            self._send(self.step)

    def _send(self, step: int) -> None:
        """Sends what was taken at a step.

        When a training resumes, the backup holds what was taken.
        """
        self._rounds.want(step)
        index, ours = self._fragment_of(step), self._made

        def encode() -> tuple[list[bytes], list[np.ndarray], str]:
            gradients, anchor = ours.taken(index)
            blocks = outer_gradients.encode(
                gradients, self._choose, bits=self._bits
            )
            content = b"".join(blocks)
            sent = outer_gradients.decode(content, ours.sizes[index])
            return blocks, sent, anchor

        self._outbox.send(step, encode, self.described)

    def _take(self, staged: Sequence[follower.Staged]) -> None:
        super()._take(staged)
        self._check_together([each.version for each in staged])

    def in_background(self) -> None:
        """Finds the mean before a mix needs it, once what is sent is known."""
        if self._outbox.is_idle:
            super().in_background()

    def _find_mean(self, staged: Sequence[follower.Staged]) -> Any:
        """Returns what the mean over all groups, this one included, changes.

        In the order of the groups: they all must find the same bits.
        """
        step = staged[0].version.step if staged else self._outbox.step
        found = {each.version.group: each.values for each in staged}
        own, _ = self._outbox.sent(step)
        found[self._exporter.group] = own
        values = [found[group] for group in sorted(found)]
        with tf.device("CPU:0"):
            mean = [
                weights.mean_of(list(map(tf.constant, each)))
                for each in zip(*values, strict=True)
            ]
        return self._made.changes(self._fragment_of(step), mean, own)

    def _put_in(self, others: list[Any], *, num: int) -> None:
        del num  # It is in the mean.
        self._made.mix(self._fragment_of(self._outbox.step), others)

    def _check_together(self, mixed: Sequence[versions.Version]) -> None:
        _, anchor = self._outbox.sent(self._outbox.step)
        apart = [
            version.group
            for version in mixed
            if version.manifest.extras.get(_ANCHOR_FIELD) != anchor
        ]
        if apart and not self._is_apart:
            _log.warning(
                "Step %d: this group and the groups %s no longer have equal "
                "weights: one mixed without another, which was away longer "
                "than wait_secs, %g. They continue mixing from different "
                "weights. Set `wait_secs` longer than a group takes to "
                "restart.",
                self.step,
                apart,
                self._wait_secs,
            )
        self._is_apart = bool(apart)

    # ---- for a backup ----

    def state(self) -> dict[str, Any]:
        """Returns what else a resumed training continues with."""
        sent_step = self._outbox.step
        if sent_step is not None:
            # The gradient on its way is in its variable then.
            self._outbox.sent(sent_step)
        return {**super().state(), "sent_step": sent_step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned, and sends again what was on its way."""
        super().restore(state)
        if state["sent_step"] is not None and not self.is_over:
            self._send(state["sent_step"])


class Outbox:
    """This group's outer gradients on their way, encoded and published.

    A thread encodes, which takes no storage, so that no worker waits for the
    chief's; another publishes what is encoded.

    Attributes:
        step: The step of the last outer gradient; None before.
    """

    def __init__(self) -> None:
        """Holds nothing."""
        self.step: Any = None
        # By step, of the last gradient and the one before: what is sent, and
        # the anchor's SHA-256.
        self._sent: dict[int, futures.Future[Any]] = {}
        self._encoder: Any = None
        self._publisher: Any = None

    def open(
        self, publish: Callable[..., Any] | None, *, wait_secs: float
    ) -> None:
        """Starts the threads; without `publish` nothing is published.

        `publish` takes blocks, `step` and `extras`. It is tried for `wait_secs`
        at least, and as long as a mix may need the gradient.
        """
        self._put: Any = publish
        self._wait_secs = wait_secs
        self._encoder = futures.ThreadPoolExecutor(1, "tfdistill-encoding")
        self._publisher = background.OneJobThread(
            "tfdistill-mixing", job="outer gradient", most=_MOST_UNPUBLISHED
        )

    def close(self) -> None:
        """Stops the threads."""
        if self._publisher is not None:
            self._encoder.shutdown()
            self._publisher.close(self._wait_secs)
        self._encoder = self._publisher = self._put = None

    def send(
        self,
        step: int,
        encode: Callable[[], tuple[list[bytes], list[np.ndarray], str]],
        described: Mapping[str, Any],
    ) -> None:
        """Encodes a gradient, and publishes it, in the background.

        `encode` returns blocks, what they decode to, and the anchor's SHA-256.
        """

        def run() -> tuple[list[np.ndarray], str]:
            blocks, decoded, anchor = encode()
            self._publish(blocks, step, {**described, _ANCHOR_FIELD: anchor})
            return decoded, anchor

        self.step, last = step, [*self._sent.items()][-1:]
        self._sent = dict([*last, (step, self._encoder.submit(run))])

    def sent(self, step: int) -> tuple[list[np.ndarray], str]:
        """Waits for what is sent at a step, as decoded, and for the anchor."""
        found: tuple[list[np.ndarray], str] = self._sent[step].result()
        return found

    def wait(self) -> None:
        """Waits until the last gradient is encoded, or has failed."""
        futures.wait([*self._sent.values()][-1:])

    @property
    def is_idle(self) -> bool:
        """Whether all gradients have been encoded."""
        sent = self._sent.values()
        return all(each.done() and not each.exception() for each in sent)

    def _publish(
        self, blocks: list[bytes], step: int, extras: Mapping[str, Any]
    ) -> None:
        put, publisher = self._put, self._publisher
        until = time.monotonic() + self._wait_secs

        def run() -> None:
            pause = background.Backoff(first_secs=0.1, longest_secs=5.0)
            while self._publisher is publisher:  # Else it was given up.
                try:
                    put(blocks, step=step, extras=extras)
                except versions.VersionExistsError:
                    return  # This training has been here before.
                except claim.ERRORS:
                    raise
                except versions.ExportError as error:
                    if self.step != step and time.monotonic() >= until:
                        raise  # Nothing waits for it now.
                    _log.warning("%s It will be tried again.", error)
                    time.sleep(pause.failed())
                else:
                    return

        if put and not publisher.submit(run, wait_secs=0.0):
            _log.warning(
                "The outer gradient of step %d isn't published: %d earlier "
                "gradients are still waiting. Check that their storage is "
                "reachable.",
                step,
                _MOST_UNPUBLISHED,
            )


class Fragments(weights.Floats):
    """The trained weights of a student in parts, and the rule's state of each.

    Attributes:
        fingerprint: Fingerprint of the student's graph.
        sizes: By part, the numbers of each of its variables.
        most_bytes: What an outer gradient can take, and more.
        variables: All state.
    """

    def __init__(
        self,
        student: keras.Model,
        graph: student_graph.StudentGraph,
        strategy: tf.distribute.Strategy,
        rule: rules.OuterOptimizer,
        num_parts: int,
    ) -> None:
        """Takes the student's present weights for the common ones."""
        super().__init__(student, graph, strategy)
        trained = self._floats[: self._num_trained]
        if num_parts > len(trained):
            raise ValueError(
                "`num_fragments` must be at most the number of trained "
                f"variables, {len(trained)}; received {num_parts}."
            )
        self._rule, self.fingerprint = rule, graph.fingerprint
        self._parts = _cut(trained, num_parts)
        self.sizes = [[_size(v) for _, v in part] for part in self._parts]
        self._state = [
            [
                tf.Variable(value, trainable=False)
                for value in rule.start(self._take(part))
            ]
            for part in self._parts
        ]
        largest = max(map(sum, self.sizes))
        self.most_bytes = 2**16 + 8 * largest
        self._sent = tf.Variable(tf.zeros([largest]), trainable=False)
        self.variables = [*itertools.chain(*self._state), self._sent]
        # Weights at the last mix, until their outer gradient is computed.
        self._taken: list[tf.Tensor] = []
        # The rule's places to work in are shared by fragments.
        self._lock = threading.Lock()
        # Traced here: the first mixes shall not wait for it.
        self._reads, self._moves, self._adds = zip(
            *map(self._traced, range(num_parts)), strict=True
        )

    def start(self) -> None:
        """Begins again, at the present weights."""
        for part, state in zip(self._parts, self._state, strict=True):
            values = self._rule.start(self._take(part))
            for variable, value in zip(state, values, strict=True):
                variable.assign(value)

    def take_fragment(self, index: int) -> None:
        """Holds a part's weights: the next step copies what it changes."""
        self._taken = self._reads[index]()

    def taken(self, index: int) -> tuple[list[np.ndarray], str]:
        """Returns the outer gradient, flat, and the SHA-256 of the anchor.

        Computed from what `take` holds, or else read from the variable. In any
        thread, until the part is mixed or another is taken.
        """
        common = self._state[index][: len(self._parts[index])]
        ends = list(itertools.accumulate(self.sizes[index]))
        if self._taken:
            flat = np.zeros(self._sent.shape, np.float32)
            places = np.split(flat, ends)[:-1]
            for a, w, place in zip(common, self._taken, places, strict=True):
                np.subtract(np.ravel(a), np.ravel(w), out=place)
            self._sent.assign(flat)
            self._taken = []
        values = self._sent.numpy()
        return np.split(values[: ends[-1]], ends[:-1]), weights.digest(common)

    def changes(
        self, index: int, mean: Sequence[Any], sent: Sequence[Any]
    ) -> Any:
        """Returns how the mean moves a part, and its new state; in any thread.

        Both flat; `sent` is this group's own share of the mean.
        """
        with self._lock:
            return self._moves[index](list(mean), list(map(tf.constant, sent)))

    def mix(self, index: int, changes: tuple[Any, Any]) -> None:
        """Moves a part's weights, and takes over its new state."""
        moves, state = changes
        self._adds[index](moves)
        for variable, value in zip(self._state[index], state, strict=True):
            variable.assign(value)

    def _traced(self, index: int) -> tuple[Any, Any, Any]:
        part, state = self._parts[index], self._state[index]
        common = state[: len(part)]

        def move(mean: list[tf.Tensor], sent: list[tf.Tensor]) -> Any:
            gradients, own = (
                [
                    tf.cast(tf.reshape(v, a.shape), a.dtype)
                    for v, a in zip(values, common, strict=True)
                ]
                for values in (mean, sent)
            )
            before = list(map(tf.convert_to_tensor, state))
            after = self._rule.moved(gradients, before)
            moves = [
                new - old + c
                for new, old, c in zip(after, before, own, strict=False)
            ]
            return moves, after

        def add(moves: list[tf.Tensor]) -> None:
            for (_, variable), change in zip(part, moves, strict=True):
                for piece, rows in tables.by_part(variable, change):
                    for copy in self._copies(piece):
                        with tf.device(copy.device):
                            copy.assign_add(rows)

        flat = [tf.TensorSpec([size]) for size in self.sizes[index]]
        whole = [tf.TensorSpec(a.shape, a.dtype) for a in common]

        def traced(function: Callable[..., Any], *like: object) -> Any:
            made = tf.function(function, autograph=False)
            return made.get_concrete_function(*like)

        return (
            traced(lambda: self._take(part)),
            traced(move, flat, flat),
            traced(add, whole),
        )


def _size(variable: keras.Variable) -> int:
    return math.prod(variable.shape)


def _cut(floats: Sequence[Any], num_parts: int) -> list[list[Any]]:
    """Deals variables out to parts, the largest first, each to the smallest."""
    parts: list[list[Any]] = [[] for _ in range(num_parts)]
    for pair in sorted(floats, key=lambda pair: -_size(pair[1])):
        min(parts, key=lambda part: sum(_size(v) for _, v in part)).append(pair)
    return parts


class AboveRms:
    """Picks what is larger than the root mean square of its bin.

    Of normally distributed numbers a third is picked with a ratio of 1. These
    have 80% of the sum of squares, and their signs alone give 74%: so in one
    bit each (`FragmentMixer(bits=1)`) they convey more than fewer in eight.

    Args:
        ratio: What the root mean square is multiplied with, > 0. Default 1.
        bin_size: Elements a bin, >= 1; the last is filled up with zeros.
            Default 256.

    Example:
        >>> AboveRms(bin_size=4)(np.array([0.0, 2, -3, 1]), np.zeros(4))
        array([1, 2])
    """

    def __init__(self, *, ratio: float = 1.0, bin_size: int = 256) -> None:
        if ratio <= 0 or bin_size < 1:
            raise ValueError(
                "`ratio` must be > 0 and `bin_size` >= 1; received "
                f"{ratio} and {bin_size}."
            )
        self._ratio, self._bin_size = ratio, bin_size

    def __call__(self, values: np.ndarray, residue: np.ndarray) -> np.ndarray:
        """Returns the indices to send."""
        owed = values + residue
        padding = 0, -len(owed) % self._bin_size
        squares = np.pad(owed**2, padding).reshape(-1, self._bin_size)
        least = self._ratio**2 * squares.mean(axis=1, keepdims=True)
        is_more = (squares > least) | ((squares == least) & (squares > 0))
        return np.flatnonzero(is_more.reshape(-1)[: len(owed)])
