"""Neighbors of codistillation, each in its own file.

They stand on the library's own names, nothing in the library knows of them,
and they may change, or leave, with any release.
"""

from tfdistill.contrib.batch_scaler import BatchScaler
from tfdistill.contrib.choosers import AboveRms
from tfdistill.contrib.choosers import LocalMaximum
from tfdistill.contrib.choosers import TopOfChunks
from tfdistill.contrib.merge_barrier import MergeBarrier
from tfdistill.contrib.mutual_learning import OtherStudents
from tfdistill.contrib.quasi_global import QuasiGlobalMomentum
from tfdistill.contrib.quasi_global import dirichlet_shard
from tfdistill.contrib.sampled import SampledOutput

__all__ = [
    "AboveRms",
    "BatchScaler",
    "LocalMaximum",
    "MergeBarrier",
    "OtherStudents",
    "QuasiGlobalMomentum",
    "SampledOutput",
    "TopOfChunks",
    "dirichlet_shard",
]
