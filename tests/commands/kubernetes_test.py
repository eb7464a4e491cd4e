"""Manifests: against the published schemas, and against our own reader."""

import json
import re

import pytest

from launch import kubernetes as __main__
from launch import recipes
from tests.cases import kubernetes as manifest_cases
from tfdistill.cluster import identity
from tfdistill.launcher import restarts as restarts_lib

VOLUME = "--volume_claim=runs"
GROUPS = ("--num_groups=2", VOLUME)
# Every option at once, apart from what excludes each other.
FULL = (
    *GROUPS,
    "--workers_per_group=3",
    "--mount_path=/mnt",
    "--key_secret=run1-key",
    "--service_account=trainer",
    "--cpus_per_worker=4",
    "--memory_per_worker=8Gi",
    "--gpus_per_worker=1",
    "--shm_size=2Gi",
    "--run_as_user=1000",
    "--node_selector=disktype=ssd",
    "--toleration=nvidia.com/gpu:NoSchedule",
    "--toleration=spot=true:NoExecute",
    "--env=TF_CPP_MIN_LOG_LEVEL=1",
    "--max_restarts=3",
)
SERVERS = ("--ps_per_group=2", "--cpus_per_ps=2", "--memory_per_ps=32Gi")
TOPOLOGIES = {
    "one": (VOLUME,),
    "full": FULL,
    "servers": (*FULL, *SERVERS),
}


@pytest.fixture(params=TOPOLOGIES)
def topology(request):
    return TOPOLOGIES[request.param]


# --- The published schemas ---------------------------------------------------


_VERSIONS = pytest.mark.parametrize(
    "version", [pytest.param("1.29", marks=pytest.mark.deep), "newest"]
)


@_VERSIONS
def test_objects_are_those_of_kubernetes(capsys, topology, version):
    validate = pytest.importorskip("kubernetes_validate")
    if version == "newest":
        version = validate.latest_version()
    objects = manifest_cases.write(capsys, *topology)
    for found in objects:
        if found["kind"] == "JobSet":
            continue  # Of an operator; below.
        assert validate.validate(found, version, strict=True)


@_VERSIONS
def test_jobsets_are_those_of_the_published_models(capsys, topology, version):
    validate = pytest.importorskip("kubernetes_validate")
    models = pytest.importorskip("kubeflow_trainer_api.models")
    if version == "newest":
        version = validate.latest_version()
    queue = "--queue=research"
    objects = manifest_cases.write(capsys, queue, *topology)
    jobsets = manifest_cases.of_kind(objects, "JobSet").values()

    def unknown(found):
        # What the models do not know is not in what they return.
        known = models.JobsetV1alpha2JobSet.from_dict(found).to_dict()
        return manifest_cases.lost(found, known, found["kind"])

    for found in jobsets:
        assert found["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        assert unknown(found) == []
        # An unknown field would be noticed.
        found["spec"]["failurePolicy"]["restarts"] = 3
        assert unknown(found) == ["JobSet.spec.failurePolicy.restarts"]
    for name, job in manifest_cases.jobs(objects).items():
        named = {**job, "metadata": {**job["metadata"], "name": name}}
        assert validate.validate(named, version, strict=True)


# --- Indexed Jobs ------------------------------------------------------------


def test_each_pod_of_a_job_is_one_task(capsys):
    objects = manifest_cases.write(capsys, *FULL, *SERVERS)
    jobsets = manifest_cases.of_kind(objects, "JobSet")
    jobs = manifest_cases.jobs(objects)
    assert len(jobs) == 6
    names, addresses = set(), set()
    for job_name, job in jobs.items():
        pod = job["spec"]["template"]
        group_name = job_name.rpartition(f"-{job_name[8:]}")[0]
        # JobSet makes the service, and sets the subdomain of its pods.
        assert "subdomain" not in pod["spec"]
        service = jobsets[group_name]["spec"]["network"]
        assert service["subdomain"] == group_name
        assert service["enableDNSHostnames"] is True
        assert service["publishNotReadyAddresses"] is True
        for index, (env, command) in enumerate(manifest_cases.tasks(job)):
            del env["TASK_INDEX"]
            cluster = identity.Cluster.from_env(env)
            names.add((cluster.group, cluster.task_name))
            host = f"{job_name}-{index}.{group_name}"
            assert cluster.address == f"{host}:2222"
            addresses |= {a for hosts in cluster.spec.values() for a in hosts}
            assert (cluster.workdir, cluster.exchange) == (
                "/mnt/run1",
                "/mnt/run1/exchange",
            )
            assert cluster.num_groups == 2
            assert command == ["python", "my_train.py"]
    tasks = {"chief:0", "worker:0", "worker:1", "worker:2", "ps:0", "ps:1"}
    assert names == {(group, task) for group in (0, 1) for task in tasks}
    assert len(addresses) == len(names)


# --- JobSets -----------------------------------------------------------------


@pytest.mark.parametrize("servers", [(), SERVERS], ids=["workers", "servers"])
def test_a_group_restarts_whole_and_is_queued_whole(capsys, servers):
    options = ("--queue=research", *FULL, *servers)
    objects = manifest_cases.write(capsys, *options)
    jobsets = manifest_cases.of_kind(objects, "JobSet")
    assert list(jobsets) == ["run1-g0", "run1-g1"]
    for jobset in jobsets.values():
        labels = jobset["metadata"]["labels"]
        assert labels["kueue.x-k8s.io/queue-name"] == "research"
        spec = jobset["spec"]
        kinds = [found["name"] for found in spec["replicatedJobs"]]
        assert kinds == (["chief", "worker", "ps"] if servers else ["worker"])
        # Workers of a chief wait for it for ever.
        success = {"operator": "All", "targetReplicatedJobs": ["chief"]}
        assert spec.get("successPolicy") == (success if servers else None)
        policy = spec["failurePolicy"]
        assert policy["maxRestarts"] == 3
        assert policy["restartStrategy"] == "BlockingRecreate"
        (rule,) = policy["rules"]
        assert rule["action"] == "FailJobSet"
        assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    for job in manifest_cases.jobs(objects).values():
        # One lost pod ends its Job, and by that the attempt of its group.
        assert job["spec"]["backoffLimit"] == 0
        hopeless, disrupted = job["spec"]["podFailurePolicy"]["rules"]
        # Only what no restart mends has the reason of the rule above.
        assert hopeless["action"] == "FailJob"
        codes = hopeless["onExitCodes"]
        name = manifest_cases.container(job["spec"]["template"])["name"]
        assert codes["containerName"] == name
        assert disrupted["action"] == "Ignore"
        # The launcher of one machine thinks the same of each code.
        for code in (1, 2, 65, 75, 126, 127, 137):
            restarts = restarts_lib.Restarts(limit=1)
            delay, _ = restarts.plan_after(code, port_taken=False)
            assert (delay is None) == (code in codes["values"])
        spec = job["spec"]["template"]["spec"]
        assert spec["restartPolicy"] == "Never"
        assert job["spec"]["podReplacementPolicy"] == "Failed"


# --- Pods --------------------------------------------------------------------


def test_no_evaluator_and_no_way_in_for_others(capsys):
    objects = manifest_cases.write(capsys, *FULL, *SERVERS)
    assert "evaluator" not in json.dumps(objects).lower()
    policies = manifest_cases.of_kind(objects, "NetworkPolicy")
    assert len(policies) == 2
    for policy in policies.values():
        (rule,) = policy["spec"]["ingress"]
        assert rule == {
            "from": [{"podSelector": policy["spec"]["podSelector"]}]
        }


def _pods(objects):
    for job in manifest_cases.jobs(objects).values():
        yield job["spec"]["template"]


def test_pods_have_what_the_options_say(capsys):
    objects = manifest_cases.write(capsys, *FULL, *SERVERS)
    for pod in _pods(objects):
        spec = pod["spec"]
        found = manifest_cases.container(pod)
        kind = pod["metadata"]["labels"]["tfdistill/task-type"]
        env = manifest_cases.environment(
            found, {"batch.kubernetes.io/job-completion-index": "0"}
        )
        memory = "32Gi" if kind == "ps" else "8Gi"
        assert found["resources"]["limits"]["memory"] == memory
        has_gpu = "nvidia.com/gpu" in found["resources"]["limits"]
        assert has_gpu is (kind == "worker")
        assert ("CUDA_VISIBLE_DEVICES" in env) is not has_gpu
        assert env["TFDISTILL_START_TIMEOUT_SECS"] == "1800"
        assert env["TFDISTILL_CHIEF_RETURN_SECS"] == "1800"
        assert env["TF_CPP_MIN_LOG_LEVEL"] == "1"
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounts = {m["name"]: m["mountPath"] for m in found["volumeMounts"]}
        assert volumes.keys() == mounts.keys() == {"workdir", "shm", "key"}
        assert mounts["workdir"] == "/mnt"
        claim = volumes["workdir"]["persistentVolumeClaim"]
        assert claim == {"claimName": "runs"}
        secret = volumes["key"]["secret"]
        assert secret["secretName"] == "run1-key"
        path = f"{mounts['key']}/{secret['items'][0]['path']}"
        assert env["TFDISTILL_EXCHANGE_KEY_FILE"] == path
        assert spec["shareProcessNamespace"] is True
        assert spec["terminationGracePeriodSeconds"] > 5
        assert spec["serviceAccountName"] == "trainer"
        assert spec["securityContext"]["fsGroup"] == 1000
        assert spec["nodeSelector"] == {"disktype": "ssd"}
        assert [t["operator"] for t in spec["tolerations"]] == [
            "Exists",
            "Equal",
        ]


@pytest.mark.parametrize("text", ["$(HOME)", "$$(HOME)", "$"])
def test_the_kubelet_leaves_commands_and_variables_as_they_are(capsys, text):
    objects = manifest_cases.write(
        capsys,
        VOLUME,
        "--env=HOME=/root",
        f"--env=NOTE={text}",
        command=("sh", "-c", text),
    )
    (job,) = manifest_cases.jobs(objects).values()
    ((env, command),) = manifest_cases.tasks(job)
    assert (env["NOTE"], command) == (text, ["sh", "-c", text])


def test_a_recipe_is_checked_before_it_is_sent(capsys, refused):
    options = (VOLUME, "--recipe=digits")
    objects = manifest_cases.write(capsys, *options, "--override=seed=7")
    (job,) = manifest_cases.jobs(objects).values()
    ((_, command),) = manifest_cases.tasks(job)
    assert command == [
        *("python", "-m", "launch.train", "--recipe=digits"),
        *("--workdir=/mnt/run1", "--override=seed=7"),
    ]
    given = [*manifest_cases.REQUIRED, "--workdir=/mnt/run1", *options]
    wrong = "--override=num_stepz=7"
    assert "num_stepz" in refused(__main__.main, *given, wrong)
    given[-1] = "--recipe=config.json"
    assert "`recipe` must be " in refused(__main__.main, *given)
    assert all(re.fullmatch(r"\w+", name) for name in recipes.RECIPES)


# --- Files and options -------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--name=Run_1", "`name` must be a DNS label"),
        ("--workdir=run", "`workdir` must be an absolute path"),
        ("--env=TF_CONFIG={}", "`env` must not set TF_CONFIG"),
        ("--ps_per_group=1", "`volume_claim` must name a volume"),
    ],
)
def test_what_kubernetes_would_refuse_late_is_refused_at_once(
    refused, option, said
):
    given = [*manifest_cases.REQUIRED, "--workdir=/mnt/run1", option]
    command = ["--", "python", "my_train.py"]
    assert said in refused(__main__.main, *given, *command)
