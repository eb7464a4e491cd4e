"""Whom a student learns from: each kind of teacher is one class.

`CodistillModel(student, teachers=...)` takes one of them or a list.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from tfdistill.teachers.canary import Canary as Canary
    from tfdistill.teachers.fixed import FixedTeacher as FixedTeacher
    from tfdistill.teachers.labels import LabelTeacher as LabelTeacher
    from tfdistill.teachers.own_past import OwnPast as OwnPast
    from tfdistill.teachers.peers import Peers as Peers
    from tfdistill.teachers.predictions import (
        PeerPredictions as PeerPredictions,
    )
    from tfdistill.teachers.teacher import Batch as Batch
    from tfdistill.teachers.teacher import Teacher as Teacher

_HOMES = {
    "Batch": "teacher",
    "Canary": "canary",
    "FixedTeacher": "fixed",
    "LabelTeacher": "labels",
    "OwnPast": "own_past",
    "PeerPredictions": "predictions",
    "Peers": "peers",
    "Teacher": "teacher",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    return getattr(home, name)
