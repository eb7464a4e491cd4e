"""What is read of the peers, and of which: those that began as this group."""

from collections.abc import Collection
from collections.abc import Sequence
from typing import Any

from tfdistill.exchange import versions
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.follow import follower
from tfdistill.follow import screen as screen_lib
from tfdistill.mixing import weights

# Of a manifest's `extras`: the SHA-256 of the weights at step 0.
INITIAL_FIELD = "initial_weights"
# And the rule by which the group mixes.
RULE_FIELD = "mixing_rule"


class Origin:
    """The weights that a group began with, and peers that began with others.

    Attributes:
        rule: What this group mixes by.
        weights: The SHA-256 of this group's weights at step 0, if known.
        strangers: By group, that of those which began with others.
    """

    def __init__(self, rule: str) -> None:
        """Knows of nothing else yet."""
        self.rule = rule
        self.weights: str | None = None
        self.strangers: dict[int, str] = {}

    def check(self, version: versions.Version) -> None:
        """Raises `Refused` for versions of another origin."""
        theirs = version.manifest.extras.get(INITIAL_FIELD)
        if not isinstance(theirs, str):
            raise screen_lib.Refused(
                "its manifest does not say which weights its group began "
                "with. Give each group's `fit` a tfdistill.mixing.WeightMixer."
            )
        if theirs != self.weights:
            self.strangers[version.group] = theirs
            raise screen_lib.Refused("its group began with other weights.")
        rule = version.manifest.extras.get(RULE_FIELD, self.rule)
        if rule != self.rule:
            raise screen_lib.Refused(
                f"its group mixes by {rule!s:.200}, and this one by "
                f"{self.rule}. Give the WeightMixers of all groups one rule."
            )

    def refuse(self, groups: Collection[int]) -> None:
        """Ends training if any worker found that these groups are strangers."""
        if not groups:
            return
        theirs = [
            f"{self.strangers.get(group, 'another')} in group {group}"
            for group in groups
        ]
        raise RuntimeError(
            "All groups that mix their weights must begin with equal ones; "
            f"received {self.weights} in this group and {', '.join(theirs)}. "
            "Set seed_groups_alike in the configuration, or in a script call "
            "keras.utils.set_random_seed with the same number in all groups "
            "before the model is built; and use a new exchange directory for a "
            "new run."
        )


def of_peers(
    exporter: Any,
    groups: Sequence[int],
    graph: student_graph.StudentGraph,
    mixed: weights.MixedWeights,
    origin: Origin,
    *,
    on_servers: bool,
) -> dict[int, follower.Follower]:
    """Returns followers of the weights that are mixed, by group.

    They read where the `exporter` of this group publishes.
    """
    expected = saved_model.SavedModelWriter(graph).variables
    keys = [list(expected)[index] for index in mixed.indices]
    same_graph = screen_lib.refuse_other_graphs(
        graph,
        "Its weights mean something else. Train the same model in each group "
        "that mixes.",
    )

    def check(version: versions.Version) -> None:
        same_graph(version)
        origin.check(version)

    def read(version: versions.Version) -> Any:
        if not on_servers:
            return saved_model.read_variables(version.path, expected)
        # A table may not fit into this process.
        values = saved_model.read_variables(version.path, expected, only=keys)
        return dict(zip(mixed.indices, values, strict=True))

    screen = screen_lib.Screen(graph, schema=exporter.schema, also=check)
    return {
        group: follower.Follower(
            exporter.exchange, group, read=read, screen=screen, alone=False
        )
        for group in groups
    }
