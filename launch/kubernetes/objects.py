"""A run as objects of Kubernetes: services, policies, Jobs and JobSets."""

import json
from typing import Any

from launch.kubernetes import run as run_lib
from tfdistill.exchange import signing

# A task ends within 5 s of SIGTERM, after a backup if it can make one.
_GRACE_SECS = 30
_KEY_DIR = "/etc/tfdistill"
_KEY_FILE = "exchange.key"
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
    own = labels(run, group)
    return _given(name=name, labels=own, namespace=run.namespace)


def _given(**fields: Any) -> dict[str, Any]:
    """Returns the fields that are not None."""
    return {name: v for name, v in fields.items() if v is not None}


def template(
    run: run_lib.Run,
    group: int,
    task_type: str,
    *,
    extra_env: list[dict[str, Any]],
    subdomain: str | None,
) -> dict[str, Any]:
    """Returns the template of the pods of one type of task.

    `extra_env` comes before all other variables.
    """
    user = run.run_as_user
    pod = _given(
        restartPolicy="Never",
        subdomain=subdomain,
        # Then no process of ours is number 1, whose SIGTERM the kernel drops
        # if it has no handler: in imports, and in servers.
        shareProcessNamespace=True,
        terminationGracePeriodSeconds=_GRACE_SECS,
        enableServiceLinks=False,
        containers=[_container(run, group, task_type, extra_env)],
        volumes=_volumes(run),
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
    own = {**labels(run, group), f"{_LABEL}/task-type": task_type}
    return {"metadata": {"labels": own}, "spec": pod}


def _container(
    run: run_lib.Run,
    group: int,
    task_type: str,
    extra_env: list[dict[str, Any]],
) -> dict[str, Any]:
    values = run.task_env(group, task_type)
    if run.key_secret is not None:
        values[signing.FILE_VARIABLE] = f"{_KEY_DIR}/{_KEY_FILE}"
    if task_type != "worker" and run.gpus_per_worker:
        values["CUDA_VISIBLE_DEVICES"] = "-1"
    env = [
        {"name": name, "value": run_lib.literal(value)}
        for name, value in values.items()
    ]
    ports = [{"name": "grpc", "containerPort": run_lib.PORT}]
    return _given(
        name=CONTAINER,
        image=run.image,
        command=[run_lib.literal(part) for part in run.command],
        env=extra_env + env,
        ports=ports if run.num_tasks > 1 else None,
        resources=_resources(run, task_type),
        volumeMounts=_mounts(run),
        # The last lines of a failed task are then its pod's message.
        terminationMessagePolicy="FallbackToLogsOnError",
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


def _volumes(run: run_lib.Run) -> list[dict[str, Any]]:
    claim, secret = run.volume_claim, run.key_secret
    kept = {"persistentVolumeClaim": {"claimName": claim}}
    # What containers get otherwise, 64 MiB, is too little for NCCL.
    memory = {"medium": "Memory", "sizeLimit": run.shm_size}
    volumes: list[dict[str, Any]] = [
        {"name": "workdir", **(kept if claim else {"emptyDir": {}})},
        {"name": "shm", "emptyDir": memory},
    ]
    if secret is not None:
        found = {
            "secretName": secret,
            "defaultMode": 0o400,
            "items": [{"key": "key", "path": _KEY_FILE}],
        }
        volumes.append({"name": "key", "secret": found})
    return volumes


def _mounts(run: run_lib.Run) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": "workdir", "mountPath": run.mount_path or run.workdir},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if run.key_secret is not None:
        mounts.append({"name": "key", "mountPath": _KEY_DIR, "readOnly": True})
    return mounts


def service(run: run_lib.Run, group: int) -> dict[str, Any]:
    """Returns the headless service that gives each pod of a group its name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(run, group, run.group_name(group)),
        "spec": {
            "clusterIP": "None",
            # Tasks look for each other before any of them is ready.
            "publishNotReadyAddresses": True,
            "selector": labels(run, group),
            "ports": [{"name": "grpc", "port": run_lib.PORT}],
        },
    }


def policy(run: run_lib.Run, group: int) -> dict[str, Any]:
    """Returns the rule that only a group's own pods may connect to them.

    TensorFlow's servers authenticate nobody, and run what they are sent.
    """
    own = {"matchLabels": labels(run, group)}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(run, group, run.group_name(group)),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": own}]}],
        },
    }


_INDEX = "batch.kubernetes.io/job-completion-index"
# Wrong options, wrong data, a command that cannot be run or does not exist.
_HOPELESS = [2, 65, 126, 127]


def job_objects(run: run_lib.Run) -> list[dict[str, Any]]:
    """Returns all objects of a run."""
    found = []
    for group in range(run.num_groups):
        if run.num_tasks > 1:
            found.append(service(run, group))
            found.append(policy(run, group))
        found += [_job(run, group, task_type) for task_type in run.sizes]
    return found


def _job(run: run_lib.Run, group: int, task_type: str) -> dict[str, Any]:
    # The others of a group end with the first that is lost, so that one
    # restart of the group may count for each of them.
    retries = run.max_restarts * run.num_tasks
    subdomain = run.group_name(group) if run.num_tasks > 1 else None
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(run, group, run.job_name(group, task_type)),
        "spec": _job_spec(run, group, task_type, retries, subdomain=subdomain)
        | _given(ttlSecondsAfterFinished=run.keep_secs),
    }


def _job_spec(
    run: run_lib.Run,
    group: int,
    task_type: str,
    retries: int,
    *,
    subdomain: str | None = None,
) -> dict[str, Any]:
    size = run.sizes[task_type]
    return {
        "completionMode": "Indexed",
        "completions": size,
        "parallelism": size,
        "backoffLimit": retries,
        # A task's successor waits for its end, not only for its SIGTERM. With
        # a failure policy Kubernetes allows nothing else.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": _rules()},
        "template": template(
            run,
            group,
            task_type,
            extra_env=_identity(run, group, task_type),
            subdomain=subdomain,
        ),
    }


def _rules() -> list[dict[str, Any]]:
    """What is retried for nothing or not at all; all else is counted."""
    return [
        {
            "action": "FailJob",
            "onExitCodes": {
                "containerName": CONTAINER,
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


_QUEUE = "kueue.x-k8s.io/queue-name"
# Why Kubernetes ends a Job whose failure policy has a rule for its exit code.
_BY_RULE = "PodFailurePolicy"


def jobset_objects(run: run_lib.Run) -> list[dict[str, Any]]:
    """Returns all objects of a run."""
    found = []
    for group in range(run.num_groups):
        if run.num_tasks > 1:
            found.append(policy(run, group))
        found.append(_jobset(run, group))
    return found


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
        "onJobFailureReasons": [_BY_RULE],
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
                "metadata": {"labels": labels(run, group)},
                # One lost task is enough to restart the group.
                "spec": _job_spec(run, group, task_type, 0),
            },
        }
        for task_type in run.sizes
    ]
    found = metadata(run, group, name)
    if run.queue is not None:
        found["labels"][_QUEUE] = run.queue
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": found,
        "spec": _given(
            network=network,
            failurePolicy=failures,
            replicatedJobs=jobs,
            successPolicy=chief if run.ps_per_group else None,
            ttlSecondsAfterFinished=run.keep_secs,
        ),
    }
