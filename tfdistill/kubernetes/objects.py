"""A run as objects of Kubernetes: policies and JobSets."""

import json
from typing import Any

from tfdistill.exchange import signing
from tfdistill.kubernetes import run as run_lib

# A task ends within 5 s of SIGTERM, after a backup if it can make one.
_GRACE_SECS = 30
_KEY_DIR, _KEY_FILE = "/etc/tfdistill", "exchange.key"
_CONTAINER = "tensorflow"
_LABEL = "tfdistill"
_INDEX = "batch.kubernetes.io/job-completion-index"
_QUEUE = "kueue.x-k8s.io/queue-name"
# Failures retried without counting, or not at all; all others are counted.
_RULES = [
    {
        "action": "FailJob",
        "onExitCodes": {
            "containerName": _CONTAINER,
            "operator": "In",
            # Wrong options, wrong data, a command that cannot be run or does
            # not exist.
            "values": [2, 65, 126, 127],
        },
    },
    {
        # Preempted, drained or evicted: no fault of the task.
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    },
]


def objects(run: run_lib.Run) -> list[dict[str, Any]]:
    """Returns the objects of Kubernetes that make up a run, in order."""
    found = []
    for group in range(run.num_groups):
        if run.num_tasks > 1:
            found.append(_policy(run, group))
        found.append(_jobset(run, group))
    return found


def _object(
    kind: str,
    version: str,
    run: run_lib.Run,
    group: int,
    name: str,
    spec: object,
) -> dict[str, Any]:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "labels": _labels(run, group)},
        "spec": spec,
    }


def _labels(run: run_lib.Run, group: int) -> dict[str, str]:
    """Returns the labels by which the objects of one group are known."""
    return {
        "app.kubernetes.io/name": _LABEL,
        "app.kubernetes.io/instance": run.name,
        f"{_LABEL}/group": str(group),
    }


def _given(**fields: object) -> dict[str, Any]:
    """Returns the fields that are not None."""
    return {name: v for name, v in fields.items() if v is not None}


def _policy(run: run_lib.Run, group: int) -> dict[str, Any]:
    """Returns the rule that only a group's own pods may connect to them.

    TensorFlow's servers don't authenticate clients, and run what they are sent.
    """
    own = {"matchLabels": _labels(run, group)}
    spec = {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": own}]}],
    }
    version, name = "networking.k8s.io/v1", run.group_name(group)
    return _object("NetworkPolicy", version, run, group, name, spec)


def _job_spec(run: run_lib.Run, group: int, task_type: str) -> dict[str, Any]:
    """Returns an Indexed Job: all tasks of one type of a group."""
    size = run.sizes[task_type]
    own = {**_labels(run, group), f"{_LABEL}/task-type": task_type}
    pod = _pod(run, group, task_type)
    return {
        "completionMode": "Indexed",
        "completions": size,
        "parallelism": size,
        # One lost task is enough to restart the group.
        "backoffLimit": 0,
        # A task's successor waits for its end, not only for its SIGTERM. With
        # a failure policy Kubernetes allows nothing else.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": _RULES},
        "template": {"metadata": {"labels": own}, "spec": pod},
    }


def _jobset(run: run_lib.Run, group: int) -> dict[str, Any]:
    name = run.group_name(group)
    network: dict[str, Any] = {"enableDNSHostnames": run.num_tasks > 1}
    if run.num_tasks > 1:
        # The service that JobSet makes for the hosts of TF_CONFIG.
        network |= {"subdomain": name, "publishNotReadyAddresses": True}
    # Workers and servers of a chief never end by themselves.
    chief = {"operator": "All", "targetReplicatedJobs": ["chief"]}
    hopeless = {
        "name": "hopeless",
        "action": "FailJobSet",
        # Why Kubernetes ends a Job by a rule for its exit code.
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    failures = {
        "maxRestarts": run.max_restarts,
        # No task of the last attempt meets one of the next.
        "restartStrategy": "BlockingRecreate",
        # Other failures restart the group.
        "rules": [hopeless],
    }
    jobs = [
        {
            "name": task_type,
            "replicas": 1,
            "template": {
                "metadata": {"labels": _labels(run, group)},
                "spec": _job_spec(run, group, task_type),
            },
        }
        for task_type in run.sizes
    ]
    spec = _given(
        network=network,
        failurePolicy=failures,
        replicatedJobs=jobs,
        successPolicy=chief if run.ps_per_group else None,
    )
    version = "jobset.x-k8s.io/v1alpha2"
    found = _object("JobSet", version, run, group, name, spec)
    if run.queue is not None:
        found["metadata"]["labels"][_QUEUE] = run.queue
    return found


def _pod(run: run_lib.Run, group: int, task_type: str) -> dict[str, Any]:
    """Returns what the pods of one type of task are."""
    user, claim, secret = run.run_as_user, run.volume_claim, run.key_secret
    mounts: list[dict[str, Any]] = [
        {"name": "workdir", "mountPath": run.mount_path or run.workdir},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    kept = {"persistentVolumeClaim": {"claimName": claim}}
    volumes: list[dict[str, Any]] = [
        {"name": "workdir", **(kept if claim else {"emptyDir": {}})},
        # What containers get otherwise, 64 MiB, is too little for NCCL.
        {
            "name": "shm",
            "emptyDir": {"medium": "Memory", "sizeLimit": run.shm_size},
        },
    ]
    if secret is not None:
        mounts.append({"name": "key", "mountPath": _KEY_DIR, "readOnly": True})
        found = {
            "secretName": secret,
            "defaultMode": 0o400,
            "items": [{"key": "key", "path": _KEY_FILE}],
        }
        volumes.append({"name": "key", "secret": found})
    ports = [{"name": "grpc", "containerPort": run_lib.PORT}]
    container = _given(
        name=_CONTAINER,
        image=run.image,
        command=[run_lib.literal(part) for part in run.command],
        env=_env(run, group, task_type),
        ports=ports if run.num_tasks > 1 else None,
        resources=_resources(run, task_type),
        volumeMounts=mounts,
        # The last lines of a failed task are then its pod's message.
        terminationMessagePolicy="FallbackToLogsOnError",
    )
    return _given(
        restartPolicy="Never",
        # Then no process of ours is number 1, whose SIGTERM the kernel drops
        # if it has no handler: in imports, and in servers.
        shareProcessNamespace=True,
        terminationGracePeriodSeconds=_GRACE_SECS,
        enableServiceLinks=False,
        containers=[container],
        volumes=volumes,
        serviceAccountName=run.service_account,
        # No task talks to Kubernetes by itself.
        automountServiceAccountToken=None if run.service_account else False,
        securityContext=user
        and {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
        },
        nodeSelector=run.node_labels or None,
        tolerations=run.tolerations or None,
    )


def _resources(run: run_lib.Run, task_type: str) -> dict[str, Any] | None:
    cpus, memory = run.cpus_per_worker, run.memory_per_worker
    if task_type == "ps":
        cpus = run.cpus_per_ps or cpus
        memory = run.memory_per_ps or memory
    limits = _given(memory=memory)
    if task_type == "worker" and run.gpus_per_worker:
        limits["nvidia.com/gpu"] = str(run.gpus_per_worker)
    # No limit of processors: throttled tasks are slow without need.
    requests = _given(cpu=cpus, memory=memory)
    return _given(requests=requests or None, limits=limits or None) or None


def _env(run: run_lib.Run, group: int, task_type: str) -> list[dict[str, Any]]:
    values = run.task_env(group, task_type)
    if run.key_secret is not None:
        values[signing.FILE_VARIABLE] = f"{_KEY_DIR}/{_KEY_FILE}"
    if task_type != "worker" and run.gpus_per_worker:
        values["CUDA_VISIBLE_DEVICES"] = "-1"
    env = [
        {"name": name, "value": run_lib.literal(value)}
        for name, value in values.items()
    ]
    if run.num_tasks == 1:
        return env
    cluster = {
        name: [
            f"{run.host(group, name, index)}.{run.group_name(group)}"
            f":{run_lib.PORT}"
            for index in range(size)
        ]
        for name, size in run.sizes.items()
    }
    # The kubelet puts the task's index into the text of TF_CONFIG, so that all
    # pods have one template: a number, not a text, once it is in its place.
    task = {"type": task_type, "index": "$(TASK_INDEX)"}
    text = json.dumps({"cluster": cluster, "task": task})
    text = text.replace('"$(TASK_INDEX)"', "$(TASK_INDEX)")
    field = {"fieldPath": f"metadata.annotations['{_INDEX}']"}
    return [
        {"name": "TASK_INDEX", "valueFrom": {"fieldRef": field}},
        {"name": "TF_CONFIG", "value": text},
        *env,
    ]
