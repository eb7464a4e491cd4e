"""What a student learns from: each kind of teacher is one class.

`CodistillModel(student, teachers=...)` takes one of them or a list.
"""

import typing

from tfdistill.system import lazy

if typing.TYPE_CHECKING:
    from tfdistill.teachers.fixed import FixedTeacher as FixedTeacher
    from tfdistill.teachers.labels import LabelTeacher as LabelTeacher
    from tfdistill.teachers.own_past import OwnPast as OwnPast
    from tfdistill.teachers.peers import Peers as Peers
    from tfdistill.teachers.predictions import (
        PeerPredictions as PeerPredictions,
    )
    from tfdistill.teachers.teacher import Batch as Batch
    from tfdistill.teachers.teacher import Standing as Standing
    from tfdistill.teachers.teacher import Teacher as Teacher

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    {
        "fixed": ["FixedTeacher"],
        "labels": ["LabelTeacher"],
        "own_past": ["OwnPast"],
        "peers": ["Peers"],
        "predictions": ["PeerPredictions"],
        "teacher": ["Batch", "Standing", "Teacher"],
    },
)
