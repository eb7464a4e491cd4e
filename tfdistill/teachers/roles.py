"""Roles of callbacks: they must fit each other, the teachers, and the run."""

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from tfdistill.cluster import identity
from tfdistill.cluster import method
from tfdistill.exchange import publisher
from tfdistill.follow import follower
from tfdistill.system import fits
from tfdistill.system import run_files
from tfdistill.teachers import peers as peers_lib
from tfdistill.teachers import teacher_list
from tfdistill.training import steps


def check(
    callbacks: Sequence[keras.callbacks.Callback],
    teachers: teacher_list.TeacherList,
    cluster: identity.Cluster,
) -> None:
    """Refuses doubles and one's own group; warns of what nobody follows.

    Refuses a comparison's run without the predictions that it compares, too.
    """
    method.check_predicted(cluster.method)
    for role in (steps.Exporter, steps.Loader, steps.Mixer):
        kinds = [type(c).__name__ for c in callbacks if isinstance(c, role)]
        if len(kinds) > 1:
            raise ValueError(
                f"`callbacks` must hold at most one {role.__name__}; received "
                f"{', '.join(kinds)}. Keep only one."
            )
    exporter: Any = steps.first(callbacks, steps.Exporter)
    if exporter:
        exporter.find_place(cluster)
        here = run_files.real(exporter.exchange.base)
    for each in teachers if exporter else ():
        if not isinstance(each, peers_lib.Peer):
            continue
        if run_files.real(each.exchange.base) == here:
            follower.checked_groups(each.places.groups, own=exporter.group)
        else:
            warnings.warn(
                f"The StudentExporter publishes to {exporter.exchange.base}, "
                f"and {each.name} reads from {each.exchange.base}. Give both "
                "the same exchange.",
                stacklevel=4,
            )
    moves = teachers.follows_peers or teachers.past_moves_at_refreshes
    if moves and not steps.first(callbacks, steps.Loader):
        warnings.warn(
            "The model learns from other groups or from its own past, but "
            "`fit` got no TeacherLoader, so its teachers are never loaded or "
            "never change. Add "
            "tfdistill.callbacks.TeacherLoader(every_steps=...) to "
            "`callbacks`.",
            stacklevel=4,
        )
    is_heard = cluster.num_groups == 1 or exporter
    if teachers.peers and not is_heard:
        warnings.warn(
            f"This is group {cluster.group} of {cluster.num_groups}, but "
            "`fit` got no StudentExporter, so the other groups can't learn "
            "from it. Add tfdistill.callbacks.StudentExporter(exchange, "
            "every_steps=...) to `callbacks`.",
            stacklevel=4,
        )


def turn_exchanges(
    callbacks: Sequence[keras.callbacks.Callback],
    teachers: teacher_list.TeacherList,
    cluster: identity.Cluster,
    *,
    of: keras.Optimizer,
) -> None:
    """Keeps apart what groups publish in this training and in others.

    A training goes by the optimizer that it is `of`.
    """
    exporter: Any = steps.first(callbacks, steps.Exporter)
    group = exporter.group if exporter else cluster.group
    # Not one in which only others publish, such as another run's.
    places = [exporter.exchange.base] if exporter else []
    places += [cluster.exchange] if cluster.exchange else []
    ours = {run_files.real(place) for place in places if place}
    exchanges = [
        *(
            c.exchange
            for c in callbacks
            if isinstance(c, steps.SteppedCallback)
        ),
        *(each.exchange for each in teachers),
    ]
    for found in exchanges:
        if isinstance(found, publisher.Exchange) and (
            run_files.real(found.base) in ours
        ):
            before, place = found.root, f"{found.base}/group_{group}"
            found.turn_to(fits.number(place, of=of))
            if found.root != before:
                teachers.forget()
