"""A run as TFJobs of Kubeflow's training operator, one for each group.

The operator writes TF_CONFIG, makes a service for each task, and ends what is
left once the group is done.
"""

from typing import Any

from launch.manifests import network
from launch.manifests import pods
from launch.manifests import run as run_lib

_REPLICAS = {"chief": "Chief", "worker": "Worker", "ps": "PS"}


def objects(run: run_lib.Run) -> list[dict[str, Any]]:
    """Returns all objects of a run.

    Args:
        run: Of the form `"tfjob"`.
    """
    found = []
    for group in range(run.num_groups):
        if run.num_tasks > 1:
            found.append(network.policy(run, group))
        found.append(_tfjob(run, group))
    return found


def _tfjob(run: run_lib.Run, group: int) -> dict[str, Any]:
    policy: dict[str, Any] = {
        "cleanPodPolicy": "Running",
        # Restarts of containers, which the operator adds up.
        "backoffLimit": run.max_restarts * run.num_tasks,
    }
    if run.keep_secs is not None:
        policy["ttlSecondsAfterFinished"] = run.keep_secs
    spec: dict[str, Any] = {
        "runPolicy": policy,
        "tfReplicaSpecs": {
            _REPLICAS[task_type]: {
                "replicas": size,
                # ExitCode would take our 75, worth a retry, for permanent, as
                # it does all codes below 128.
                "restartPolicy": "OnFailure",
                "template": pods.template(run, group, task_type),
            }
            for task_type, size in run.sizes.items()
        },
    }
    if not run.ps_per_group:
        # Else the first worker's end would be the end of the others.
        spec["successPolicy"] = "AllWorkers"
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": pods.metadata(run, group, run.group_name(group)),
        "spec": spec,
    }
