"""Codistillation for Keras 3: copies of a model that learn from each other.

Names resolve on first use, so that the launcher and the exchange can be
imported where TensorFlow is slow to load or not installed at all.
"""

import importlib
import typing

from tfdistill._version import __version__ as __version__
from tfdistill.system import registration

if typing.TYPE_CHECKING:
    from tfdistill import contrib as contrib
    from tfdistill import data as data
    from tfdistill import data_checks as data_checks
    from tfdistill import labels as labels
    from tfdistill import losses as losses
    from tfdistill import metrics as metrics
    from tfdistill import mixing as mixing
    from tfdistill import optimizers as optimizers
    from tfdistill import schedules as schedules
    from tfdistill import teachers as teachers
    from tfdistill.backup.callback import Backup as Backup
    from tfdistill.cluster.identity import Cluster as Cluster
    from tfdistill.cluster.strategy import make_strategy as make_strategy
    from tfdistill.embedding.features import (
        FeatureEmbedding as FeatureEmbedding,
    )
    from tfdistill.embedding.layer import ShardedEmbedding as ShardedEmbedding
    from tfdistill.exchange.publisher import Exchange as Exchange
    from tfdistill.launcher.launch import LaunchError as LaunchError
    from tfdistill.launcher.launch import launch as launch
    from tfdistill.model import CodistillModel as CodistillModel
    from tfdistill.model import DistributedModel as DistributedModel
    from tfdistill.observe.best_effort import BestEffort as BestEffort
    from tfdistill.observe.run_log import RunLog as RunLog
    from tfdistill.observe.summaries import Summaries as Summaries
    from tfdistill.optimizers import LARS as LARS
    from tfdistill.sharing.callbacks import StartTogether as StartTogether
    from tfdistill.sharing.callbacks import StudentExporter as StudentExporter
    from tfdistill.sharing.callbacks import TeacherLoader as TeacherLoader
    from tfdistill.sharing.callbacks import callbacks as callbacks
    from tfdistill.training.guards import FiniteLoss as FiniteLoss

_MODULES = (
    *("contrib", "data", "data_checks", "labels", "losses", "metrics"),
    "mixing",
    "optimizers",
    "schedules",
    "teachers",
)
_HOMES = {
    "Backup": "backup.callback",
    "BestEffort": "observe.best_effort",
    "Cluster": "cluster.identity",
    "CodistillModel": "model",
    "DistributedModel": "model",
    "Exchange": "exchange.publisher",
    "FeatureEmbedding": "embedding.features",
    "FiniteLoss": "training.guards",
    "LARS": "optimizers",
    "LaunchError": "launcher.launch",
    "RunLog": "observe.run_log",
    "ShardedEmbedding": "embedding.layer",
    "StartTogether": "sharing.callbacks",
    "StudentExporter": "sharing.callbacks",
    "Summaries": "observe.summaries",
    "TeacherLoader": "sharing.callbacks",
    "callbacks": "sharing.callbacks",
    "launch": "launcher.launch",
    "make_strategy": "cluster.strategy",
}

# What files of Keras may name. `with_kernel_decay` makes other classes.
registration.register(
    {
        "BinarySoftTargetCrossEntropy": "tfdistill.losses",
        "BurnIn": "tfdistill.schedules",
        "CodistillModel": "tfdistill.model",
        "Constant": "tfdistill.schedules",
        "CosineRamp": "tfdistill.schedules",
        "DistillationLoss": "tfdistill.losses",
        "DistributedModel": "tfdistill.model",
        "FeatureEmbedding": "tfdistill.embedding.features",
        "ForwardKL": "tfdistill.losses",
        "LARS": "tfdistill.optimizers",
        "LinearRamp": "tfdistill.schedules",
        "LogitsMeanSquaredError": "tfdistill.losses",
        "QuasiGlobalMomentum": "tfdistill.contrib.quasi_global",
        "ReverseKL": "tfdistill.losses",
        "SampledOutput": "tfdistill.contrib.sampled",
        "SampledSoftTargetCrossEntropy": "tfdistill.contrib.sampled",
        "ScaledRate": "tfdistill.contrib.batch_scaler",
        "ShardedEmbedding": "tfdistill.embedding.layer",
        "SoftTargetCrossEntropy": "tfdistill.losses",
        "TopKSoftTargetCrossEntropy": "tfdistill.losses",
    }
)

__all__ = sorted([*_MODULES, *_HOMES, "__version__"])  # noqa: PLE0605


def __getattr__(name: str) -> typing.Any:
    if name in _MODULES:
        return importlib.import_module(f"tfdistill.{name}")
    if name in _HOMES:
        home = importlib.import_module(f"tfdistill.{_HOMES[name]}")
        return getattr(home, name)
    raise AttributeError(f"module 'tfdistill' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
