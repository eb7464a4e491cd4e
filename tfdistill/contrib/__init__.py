"""Neighbors of codistillation, each in a file of its own.

They stand on the library's own names, nothing in the library knows of them,
and they may change, or leave, with any release.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from tfdistill.contrib.batch_scaler import BatchScaler as BatchScaler
    from tfdistill.contrib.merge_barrier import MergeBarrier as MergeBarrier
    from tfdistill.contrib.mutual_learning import OtherStudents as OtherStudents
    from tfdistill.contrib.quasi_global import (
        QuasiGlobalMomentum as QuasiGlobalMomentum,
    )
    from tfdistill.contrib.quasi_global import (
        dirichlet_shard as dirichlet_shard,
    )
    from tfdistill.contrib.sampled import SampledOutput as SampledOutput
    from tfdistill.contrib.sampled import (
        SampledSoftTargetCrossEntropy as SampledSoftTargetCrossEntropy,
    )

_HOMES = {
    "BatchScaler": "batch_scaler",
    "MergeBarrier": "merge_barrier",
    "OtherStudents": "mutual_learning",
    "QuasiGlobalMomentum": "quasi_global",
    "SampledOutput": "sampled",
    "SampledSoftTargetCrossEntropy": "sampled",
    "dirichlet_shard": "quasi_global",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"tfdistill.contrib.{_HOMES[name]}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return list(__all__)
