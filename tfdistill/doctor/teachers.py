"""Would the newest version of each peer become a teacher of this group?

Its files and what its manifest says are checked; its graph is not run.
"""

from collections.abc import Iterator
from collections.abc import Sequence

from tfdistill.doctor import checks
from tfdistill.exchange import manifest
from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.follow import screen

_SAME_STUDENT = (
    "Give every group the same student, the same inputs (recipe, overrides, "
    "vocabulary sizes) and the same key (TFDISTILL_EXCHANGE_KEY_FILE), or "
    "remove an older run from the exchange. Remove a damaged version by hand; "
    "if the damage comes back, check the storage and that group's log."
)


def examine(
    reader: publisher.Exchange, *, group: int, peers: Sequence[int]
) -> Iterator[checks.Result]:
    """Examines the newest version of each peer, as a teacher of a group.

    The group's own newest version says what teachers must agree with.
    """
    own = reader.latest(group)
    student = own.manifest if own else None
    if not peers:
        yield checks.skipped(
            checks.TEACHERS, "there is no other group to learn from"
        )
    for peer in peers:
        who = f"group {peer}"
        try:
            steps = reader.steps(peer)
            if not steps:
                yield checks.skipped(
                    checks.TEACHERS,
                    f"{who} has published nothing yet in "
                    f"{reader.group_path(peer)}: its first version comes "
                    "after its first every_steps of StudentExporter",
                )
                continue
            who += f", version {steps[-1]}"
            version = reader.open(peer, steps[-1])
            reader.verify(version)
            yield _judge(who, version, student)
        except OSError as error:
            seen = f"{who}: the exchange cannot be read: {error}"
            yield checks.failed(
                checks.TEACHERS, seen, "See the check of the exchange."
            )
        except (ValueError, RuntimeError) as error:
            yield checks.failed(
                checks.TEACHERS, f"{who}: {error}", _SAME_STUDENT
            )


def _judge(
    who: str, version: versions.Version, student: manifest.Manifest | None
) -> checks.Result:
    if student is None:
        return checks.ok(
            checks.TEACHERS,
            f"{who}: complete; this group has no version to compare it with",
        )
    found = version.manifest
    screen.check_spec("inputs", student.inputs, found.inputs)
    screen.check_spec("outputs", student.outputs, found.outputs)
    if found.graph_fingerprint != student.graph_fingerprint:
        return checks.warning(
            checks.TEACHERS,
            f"{who}: complete, but its graph differs from this group's",
            "If groups have different architectures, set "
            "teachers.Peers(allow_other_graphs=True). Otherwise: "
            f"{_SAME_STUDENT}",
        )
    return checks.ok(
        checks.TEACHERS, f"{who}: complete, with the same graph as this group's"
    )
