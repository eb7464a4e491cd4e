"""What experiment trackers read from a task's environment: one run a group.

docs/monitoring.md says what each tracker makes of it.
"""

import json
import os

from tfdistill.cluster import identity
from tfdistill.system import run_files


def defaults(cluster: identity.Cluster) -> dict[str, str]:
    """Returns the group as a tag, for users who have not chosen tags."""
    group = run_files.group_name(cluster.group)
    found = {
        "COMET_START_EXPERIMENT_TAGS": group,
        "MLFLOW_RUN_CONTEXT": json.dumps({"tfdistill.group": group}),
        "WANDB_TAGS": group,
    }
    if cluster.workdir is not None:
        found["WANDB_RUN_GROUP"] = os.path.basename(cluster.workdir)
    return found


def silence(*, is_chief: bool) -> dict[str, str]:
    """Returns what keeps a task from reporting beside its group's chief.

    It replaces what the task inherits, such as `WANDB_MODE=offline`, which says
    where the chief reports to.
    """
    if is_chief:
        return {}
    return {"COMET_AUTO_LOG_DISABLE": "true", "WANDB_MODE": "disabled"}
