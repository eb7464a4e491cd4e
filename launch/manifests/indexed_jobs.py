"""A run as Indexed Jobs: nothing but Kubernetes itself is needed."""

import json
from typing import Any

from launch.manifests import network
from launch.manifests import pods
from launch.manifests import run as run_lib

_INDEX = "batch.kubernetes.io/job-completion-index"
# Wrong options, wrong data, a command that cannot be run or does not exist.
_HOPELESS = [2, 65, 126, 127]


def objects(run: run_lib.Run) -> list[dict[str, Any]]:
    """Returns all objects of a run.

    Args:
        run: Of the form `"job"`.
    """
    found = []
    for group in range(run.num_groups):
        if run.num_tasks > 1:
            found.append(network.service(run, group))
            found.append(network.policy(run, group))
        found += [_job(run, group, task_type) for task_type in run.sizes]
    return found


def _job(run: run_lib.Run, group: int, task_type: str) -> dict[str, Any]:
    size = run.sizes[task_type]
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": size,
        "parallelism": size,
        # The others of a group end with the first that is lost, so that one
        # restart of the group may count for each of them.
        "backoffLimit": run.max_restarts * run.num_tasks,
        # A task's successor waits for its end, not only for its SIGTERM. With
        # a failure policy Kubernetes allows nothing else.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": _rules()},
        "template": pods.template(
            run,
            group,
            task_type,
            extra_env=_identity(run, group, task_type),
            restartPolicy="Never",
            **_subdomain(run, group),
        ),
    }
    if run.keep_secs is not None:
        spec["ttlSecondsAfterFinished"] = run.keep_secs
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": pods.metadata(run, group, run.job_name(group, task_type)),
        "spec": spec,
    }


def _rules() -> list[dict[str, Any]]:
    """What is retried for nothing or not at all; all else is counted."""
    return [
        {
            "action": "FailJob",
            "onExitCodes": {
                "containerName": pods.CONTAINER,
                "operator": "In",
                "values": _HOPELESS,
            },
        },
        {
            # Preempted, drained or evicted: no fault of the task.
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
    ]


def _subdomain(run: run_lib.Run, group: int) -> dict[str, str]:
    if run.num_tasks == 1:
        return {}
    return {"subdomain": run.group_name(group)}


def _identity(
    run: run_lib.Run, group: int, task_type: str
) -> list[dict[str, Any]]:
    """Returns the variables that differ from task to task of one Job.

    The kubelet puts the task's index into the text of TF_CONFIG, so that all
    pods have one template.
    """
    if run.num_tasks == 1:
        return []
    spec = {
        name: [
            f"{run.host(group, name, index)}.{run.group_name(group)}"
            f":{run_lib.PORT}"
            for index in range(size)
        ]
        for name, size in run.sizes.items()
    }
    text = json.dumps(
        {"cluster": spec, "task": {"type": task_type, "index": "$(TASK_INDEX)"}}
    )
    field = {"fieldPath": f"metadata.annotations['{_INDEX}']"}
    return [
        {"name": "TASK_INDEX", "valueFrom": {"fieldRef": field}},
        # A number, not a text, once the index is in its place.
        {
            "name": "TF_CONFIG",
            "value": text.replace('"$(TASK_INDEX)"', "$(TASK_INDEX)"),
        },
    ]
