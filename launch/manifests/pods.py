"""The pods of a run: one container each, the same in both forms."""

from collections.abc import Mapping
from typing import Any

from launch.manifests import run as run_lib
from launch.manifests import syntax
from tfdistill import signing

# A task ends within 5 s of SIGTERM, after a backup where it can make one.
_GRACE_SECS = 30
_KEY_DIR = "/etc/tfdistill"
_KEY_FILE = "exchange.key"
# The training operator looks for a container of this name.
CONTAINER = "tensorflow"
_LABEL = "tfdistill"


def labels(run: run_lib.Run, group: int) -> dict[str, str]:
    """Returns the labels by which the objects of one group are known."""
    return {
        "app.kubernetes.io/name": _LABEL,
        "app.kubernetes.io/instance": run.name,
        f"{_LABEL}/group": str(group),
    }


def metadata(run: run_lib.Run, group: int, name: str) -> dict[str, Any]:
    """Returns the metadata of an object of one group."""
    found: dict[str, Any] = {"name": name, "labels": labels(run, group)}
    if run.namespace is not None:
        found["namespace"] = run.namespace
    return found


def template(
    run: run_lib.Run,
    group: int,
    task_type: str,
    *,
    extra_env: list[dict[str, Any]] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """Returns the template of the pods of one type of task.

    Args:
        run: What to run.
        group: Index of the group.
        task_type: `"chief"`, `"worker"` or `"ps"`.
        extra_env: Variables in front of all others. Default none.
        **spec: Fields of the pod that differ between the forms.
    """
    pod: dict[str, Any] = {
        **spec,
        # Then no process of ours is number 1, whose SIGTERM the kernel drops
        # where it has no handler: in imports, and in servers.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": _GRACE_SECS,
        "enableServiceLinks": False,
        "containers": [_container(run, group, task_type, extra_env or [])],
        "volumes": _volumes(run),
    }
    if run.service_account is not None:
        pod["serviceAccountName"] = run.service_account
    else:
        # No task talks to Kubernetes.
        pod["automountServiceAccountToken"] = False
    if run.run_as_user is not None:
        user = run.run_as_user
        pod["securityContext"] = {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
        }
    if run.node_selector:
        pod["nodeSelector"] = dict(run.node_selector)
    if run.tolerations:
        pod["tolerations"] = [dict(found) for found in run.tolerations]
    return {
        "metadata": {
            "labels": {
                **labels(run, group),
                f"{_LABEL}/task-type": task_type,
            }
        },
        "spec": pod,
    }


def _container(
    run: run_lib.Run,
    group: int,
    task_type: str,
    extra_env: list[dict[str, Any]],
) -> dict[str, Any]:
    values = run.task_env(group)
    if run.key_secret is not None:
        values[signing.FILE_VARIABLE] = f"{_KEY_DIR}/{_KEY_FILE}"
    if task_type != "worker" and run.gpus_per_worker:
        values["CUDA_VISIBLE_DEVICES"] = "-1"
    env = [
        {"name": name, "value": syntax.literal(value)}
        for name, value in values.items()
    ]
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": run.image,
        "command": [syntax.literal(part) for part in run.command],
        "env": extra_env + env,
        "volumeMounts": _mounts(run),
        # The last lines of a failed task are then its pod's message.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if run.num_tasks > 1:
        # The operator would add it itself; elsewhere it tells the reader.
        container["ports"] = [
            {"name": "tfjob-port", "containerPort": run_lib.PORT}
        ]
    if resources := _resources(run, task_type):
        container["resources"] = resources
    return container


def _resources(run: run_lib.Run, task_type: str) -> Mapping[str, Any]:
    cpus, memory = run.cpus_per_worker, run.memory_per_worker
    if task_type == "ps":
        cpus = run.cpus_per_ps or cpus
        memory = run.memory_per_ps or memory
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    if cpus is not None:
        # No limit: throttled tasks are slow without need.
        requests["cpu"] = cpus
    if memory is not None:
        requests["memory"] = limits["memory"] = memory
    if task_type == "worker" and run.gpus_per_worker:
        limits["nvidia.com/gpu"] = str(run.gpus_per_worker)
    found = {"requests": requests, "limits": limits}
    return {name: amounts for name, amounts in found.items() if amounts}


def _volumes(run: run_lib.Run) -> list[dict[str, Any]]:
    workdir: dict[str, Any] = {"name": "workdir"}
    if run.volume_claim is not None:
        workdir["persistentVolumeClaim"] = {"claimName": run.volume_claim}
    else:
        workdir["emptyDir"] = {}
    # What containers get otherwise, 64 MiB, is too little for NCCL.
    memory = {"medium": "Memory", "sizeLimit": run.shm_size}
    volumes = [workdir, {"name": "shm", "emptyDir": memory}]
    if run.key_secret is not None:
        volumes.append(
            {
                "name": "key",
                "secret": {
                    "secretName": run.key_secret,
                    "defaultMode": 0o400,
                    "items": [{"key": "key", "path": _KEY_FILE}],
                },
            }
        )
    return volumes


def _mounts(run: run_lib.Run) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": "workdir", "mountPath": run.mount_path or run.workdir},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if run.key_secret is not None:
        mounts.append({"name": "key", "mountPath": _KEY_DIR, "readOnly": True})
    return mounts
