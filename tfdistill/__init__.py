"""Codistillation for Keras 3: copies of a model that learn from each other.

Names resolve on first use, so that the launcher and the exchange can be
imported where TensorFlow is slow to load or not installed at all.
"""

import typing

from tfdistill._version import __version__ as __version__
from tfdistill.system import lazy

if typing.TYPE_CHECKING:
    from tfdistill import callbacks as callbacks
    from tfdistill import contrib as contrib
    from tfdistill import data as data
    from tfdistill import labels as labels
    from tfdistill import layers as layers
    from tfdistill import losses as losses
    from tfdistill import metrics as metrics
    from tfdistill import mixing as mixing
    from tfdistill import optimizers as optimizers
    from tfdistill import schedules as schedules
    from tfdistill import teachers as teachers
    from tfdistill.cluster.identity import Cluster as Cluster
    from tfdistill.cluster.strategy import make_strategy as make_strategy
    from tfdistill.exchange.publisher import Exchange as Exchange
    from tfdistill.launcher.local_run import launch as launch
    from tfdistill.model import CodistillModel as CodistillModel
    from tfdistill.model import DistributedModel as DistributedModel
    from tfdistill.patch import patch_keras as patch_keras
    from tfdistill.workload import Workload as Workload

_MODULES = (
    *("callbacks", "contrib", "data", "labels", "layers", "losses"),
    *("metrics", "mixing", "optimizers", "schedules", "teachers"),
)

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    {
        **dict.fromkeys(_MODULES, ()),
        "_version": ["__version__"],
        "cluster.identity": ["Cluster"],
        "cluster.strategy": ["make_strategy"],
        "exchange.publisher": ["Exchange"],
        "launcher.local_run": ["launch"],
        "model": ["CodistillModel", "DistributedModel"],
        "patch": ["patch_keras"],
        "workload": ["Workload"],
    },
)
