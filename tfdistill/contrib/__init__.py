"""Neighbors of codistillation, each in its own file or folder.

They stand on the library's own names, nothing in the library knows of them,
and they may change, or leave, with any release.
"""

import typing

from tfdistill.system import lazy

if typing.TYPE_CHECKING:
    from tfdistill.contrib import line as line
    from tfdistill.contrib.batch_scaler import BatchScaler as BatchScaler
    from tfdistill.contrib.choosers import LocalMaximum as LocalMaximum
    from tfdistill.contrib.choosers import TopOfChunks as TopOfChunks
    from tfdistill.contrib.merge_barrier import MergeBarrier as MergeBarrier
    from tfdistill.contrib.mutual_learning import OtherStudents as OtherStudents
    from tfdistill.contrib.quasi_global import (
        QuasiGlobalMomentum as QuasiGlobalMomentum,
    )
    from tfdistill.contrib.rows_ahead import RowsAhead as RowsAhead
    from tfdistill.contrib.sampled import SampledOutput as SampledOutput

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    {
        "batch_scaler": ["BatchScaler"],
        "choosers": ["LocalMaximum", "TopOfChunks"],
        "line": (),
        "merge_barrier": ["MergeBarrier"],
        "mutual_learning": ["OtherStudents"],
        "quasi_global": ["QuasiGlobalMomentum"],
        "rows_ahead": ["RowsAhead"],
        "sampled": ["SampledOutput"],
    },
)
