"""One task that a launcher starts: who it is, and where its files go."""

import dataclasses
import pathlib
from collections.abc import Mapping

from tfdistill import cluster as cluster_lib
from tfdistill import signing

# What the launcher says of each task; nobody else may.
IDENTITY_VARIABLES = frozenset(
    {
        "TF_CONFIG",
        "TFDISTILL_EXCHANGE",
        "TFDISTILL_GROUP",
        "TFDISTILL_NUM_GROUPS",
        "TFDISTILL_READY_FILE",
        "TFDISTILL_WORKDIR",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One process to be: who it is and where its files go.

    Attributes:
        cluster: Its place in its group.
        env: Variables to set on top of the inherited ones.
        log_path: File for its stdout and stderr.
        ready_path: File it creates once its group is connected.
    """

    cluster: cluster_lib.Cluster
    env: Mapping[str, str]
    log_path: pathlib.Path
    ready_path: pathlib.Path

    @property
    def name(self) -> str:
        """A name unique in the run, such as `group_0_worker_1`."""
        return self.log_path.stem

    def environ(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Returns the whole environment of the process.

        Args:
            inherited: The launcher's own; its identity variables are dropped.

        Raises:
            ValueError: If a TFDISTILL_ variable of it is unknown.
        """
        result = {
            name: value
            for name, value in inherited.items()
            if name not in IDENTITY_VARIABLES
        }
        result.setdefault("PYTHONUNBUFFERED", "1")  # Logs are read live.
        if self.cluster.uses_parameter_servers:
            # As TensorFlow's guide to parameter servers asks of each server.
            result.setdefault("GRPC_FAIL_FAST", "use_caller")
        result.update(self.env)
        if signing.has_key(inherited):  # The user's key, not one of our own.
            result.pop(signing.FILE_VARIABLE, None)
            result.update(
                {k: v for k, v in inherited.items() if k in signing.VARIABLES}
            )
        cluster_lib.Cluster.from_env(result)
        return result
