"""Makes the places of a student's teachers, peers first, then fixed ones."""

from collections.abc import Callable

from tfdistill import exchange as exchange_lib
from tfdistill import student_graph
from tfdistill import teacher_options
from tfdistill import teacher_slot
from tfdistill import version_screen


def make(
    options: teacher_options.TeacherOptions,
    exchange: exchange_lib.Exchange,
    graph: student_graph.StudentGraph,
    *,
    alone: bool,
    make_slot: Callable[..., teacher_slot.TeacherSlot] | None = None,
) -> list[teacher_slot.TeacherSlot]:
    """Makes a place for each teacher. Call it in the strategy's scope.

    Args:
        options: Of the teachers.
        exchange: Where peers publish.
        graph: The student's traced inference.
        alone: Whether this task decides for itself.
        make_slot: From a name and `graph`. Default: `TeacherSlot`.

    Returns:
        The places, in the order of the weights.

    Raises:
        ValueError: A fixed teacher cannot be used.
    """
    make_slot = make_slot or teacher_slot.TeacherSlot
    screen = version_screen.VersionScreen(graph, schema=options.schema)
    slots = []
    for group, name in options.names_of_peers.items():
        slot = make_slot(name, graph)
        slot.follow(
            exchange,
            group,
            alone=alone,
            allow_other_graphs=options.allow_other_graphs,
            screen=screen,
            canary=options.canary,
            bounds=options.bounds,
        )
        slots.append(slot)
    for path in options.saved_models:
        slot = teacher_slot.TeacherSlot(path, graph)
        slot.load(path, trust=options.trust_saved_models, canary=options.canary)
        slots.append(slot)
    return slots
