"""Codistillation for Keras 3: copies of a model that learn from each other.

Names resolve on first use, so that the launcher and the exchange can be
imported where TensorFlow is slow to load or not installed at all.
"""

import importlib
import typing

__version__ = "0.1.0"

if typing.TYPE_CHECKING:
    from tfdistill import data as data
    from tfdistill import data_checks as data_checks
    from tfdistill import losses as losses
    from tfdistill import metrics as metrics
    from tfdistill import schedules as schedules
    from tfdistill.backup import Backup as Backup
    from tfdistill.best_effort import BestEffort as BestEffort
    from tfdistill.callbacks import StudentExporter as StudentExporter
    from tfdistill.callbacks import TeacherLoader as TeacherLoader
    from tfdistill.canary import Canary as Canary
    from tfdistill.cluster import Cluster as Cluster
    from tfdistill.embedding import ShardedEmbedding as ShardedEmbedding
    from tfdistill.exchange import Exchange as Exchange
    from tfdistill.lars import LARS as LARS
    from tfdistill.model import CodistillModel as CodistillModel
    from tfdistill.multiworker import MultiWorkerTraining as MultiWorkerTraining
    from tfdistill.run_log import RunLog as RunLog
    from tfdistill.strategy import make_strategy as make_strategy
    from tfdistill.summaries import Summaries as Summaries
    from tfdistill.teacher import TeacherSet as TeacherSet
    from tfdistill.training_watch import FiniteLoss as FiniteLoss

_MODULES = ("data", "data_checks", "losses", "metrics", "schedules")
_HOMES = {
    "Backup": "backup",
    "BestEffort": "best_effort",
    "Canary": "canary",
    "Cluster": "cluster",
    "CodistillModel": "model",
    "Exchange": "exchange",
    "FiniteLoss": "training_watch",
    "LARS": "lars",
    "MultiWorkerTraining": "multiworker",
    "RunLog": "run_log",
    "ShardedEmbedding": "embedding",
    "StudentExporter": "callbacks",
    "Summaries": "summaries",
    "TeacherLoader": "callbacks",
    "TeacherSet": "teacher",
    "make_strategy": "strategy",
}

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
