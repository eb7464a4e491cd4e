"""Tests of the identity of a task: environment to Cluster and back."""

import dataclasses
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from tfdistill.cluster import identity
from tfdistill.cluster import method

Cluster = identity.Cluster
TWO = {"worker": ["a:1", "b:2"]}


def _config(cluster=None, task=None, **more):
    config = {
        "cluster": TWO if cluster is None else cluster,
        "task": {"type": "worker", "index": 0} if task is None else task,
    }
    return {"TF_CONFIG": json.dumps(config | more)}


@pytest.mark.parametrize(
    "environ",
    [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": " {} "}, {"TFDISTILL_GROUP": ""}],
)
def test_nothing_set_is_one_task_of_one_group(environ):
    cluster = Cluster.from_env(environ | {"UNRELATED": "x"})
    assert cluster == Cluster()
    assert cluster.is_chief
    assert cluster.num_workers == 1
    assert not cluster.uses_parameter_servers
    assert cluster.task_name == "worker:0"
    assert cluster.address is None
    assert cluster.peers == ()
    assert cluster.exchange is cluster.workdir is cluster.group_dir is None
    assert "TF_CONFIG" not in cluster.to_env()


def test_whole_environment():
    environ = _config(task={"type": "worker", "index": "1"})
    environ |= {
        "TFDISTILL_GROUP": "2",
        "TFDISTILL_NUM_GROUPS": "4",
        "TFDISTILL_WORKDIR": "/runs/x",
        "TFDISTILL_DATA": "/data",
    }
    cluster = Cluster.from_env(environ)
    assert (cluster.task_type, cluster.task_index) == ("worker", 1)
    assert cluster.spec == {"worker": ("a:1", "b:2")}
    assert cluster.address == "b:2"
    assert not cluster.is_chief
    assert cluster.peers == (0, 1, 3)
    assert cluster.exchange == "/runs/x/exchange"
    assert cluster.group_dir == "/runs/x/group_2"


def test_urls_survive():
    cluster = Cluster(workdir="gs://bucket/run/")
    assert cluster.exchange == "gs://bucket/run/exchange"
    assert cluster.group_dir == "gs://bucket/run/group_0"
    cluster = Cluster(workdir="/local", exchange="gs://bucket//x")
    assert Cluster.from_env(cluster.to_env()).exchange == "gs://bucket//x"


BAD_CONFIGS = {
    "{": "TF_CONFIG must be valid JSON",
    "null": "TF_CONFIG must be a JSON object",
    "[" * 100_000: "TF_CONFIG must be valid JSON",
    '{"cluster": {"worker": ["a:1"]}}': "with cluster and task",
}


@pytest.mark.parametrize("text", BAD_CONFIGS, ids=lambda text: text[:20])
def test_malformed_text(text):
    with pytest.raises(ValueError) as error:
        Cluster.from_env({"TF_CONFIG": text})
    assert BAD_CONFIGS[text] in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "task",
    [
        {"index": 0},
        {"type": "evaluator", "index": 0},
        *({"type": "worker", "index": index} for index in (2, -1, True, "01")),
    ],
)
def test_malformed_task(task):
    with pytest.raises(ValueError, match=r"TF_CONFIG.task.* must .*received"):
        Cluster.from_env(_config(task=task))


@pytest.mark.parametrize(
    "cluster, must",
    [
        *(
            ({"worker": ["b:1", host]}, "lists of host:port")
            for host in ("a", "grpc://a:1")
        ),
        ({"worker": ["a:1", "a:1"]}, "have each address once"),
        ({"worker": ["a:1"], "evaluator": ["a:2"]}, "waits for an evaluator"),
        ({"worker": ["a:1"], "boss": ["a:2"]}, "for chief, worker, ps"),
        ({"worker": ["a:1"], "ps": ["a:2"]}, "name a chief and a worker"),
    ],
)
def test_malformed_cluster(cluster, must):
    with pytest.raises(ValueError, match="TF_CONFIG.cluster.*received") as e:
        Cluster.from_env(_config(cluster))
    assert must in str(e.value)


# What services set, as these sources write it: training.py of
# aws/sagemaker-tensorflow-training-toolkit, and "Distributed training" of
# Vertex AI's documentation. Those of kubeflow/training-operator,
# train/tensorflow/config.py of ray-project/ray and mirrored_strategy_runner.py
# of tensorflow/ecosystem have less beside the standard form. The text, and the
# task's name, its address, whether it is the chief, workers, servers.
_FORMS = {
    "SageMaker, master": (
        {
            "cluster": {
                "master": ["algo-1:2222"],
                "ps": ["algo-1:2223", "algo-2:2223"],
                "worker": ["algo-2:2222"],
            },
            "environment": "cloud",
            "task": {"index": 0, "type": "master"},
        },
        ("chief:0", "algo-1:2222", True, 1, 2),
    ),
    "Vertex AI, first pool": (
        {
            "cluster": {
                "chief": ["cmle-training-workerpool0-ab-0:2222"],
                "worker": [
                    "cmle-training-workerpool1-ab-0:2222",
                    "cmle-training-workerpool1-ab-1:2222",
                ],
            },
            "environment": "cloud",
            "job": {"workerPoolSpecs": []},
            "task": {"type": "chief", "index": 0, "cloud": "a-1", "trial": "1"},
        },
        (*("chief:0", "cmle-training-workerpool0-ab-0:2222"), *(True, 3, 0)),
    ),
}


@pytest.mark.parametrize("form", _FORMS)
def test_forms_of_services(form):
    config, expected = _FORMS[form]
    environ = {"TF_CONFIG": json.dumps(config)}
    groups = {"TFDISTILL_GROUP": "1", "TFDISTILL_NUM_GROUPS": "2"}
    cluster = Cluster.from_env(environ | groups)
    assert expected == (
        cluster.task_name,
        cluster.address,
        cluster.is_chief,
        cluster.num_workers,
        len(cluster.spec.get("ps", ())),
    )
    assert cluster.peers == (0,)
    assert Cluster.from_env(cluster.to_env()) == cluster


@pytest.mark.parametrize(
    "environ, field",
    [
        ({"TFDISTILL_GROUP": "1"}, "TFDISTILL_GROUP"),
        ({"TFDISTILL_GROUP": "one"}, "TFDISTILL_GROUP"),
        ({"TFDISTILL_NUM_GRUOPS": "2"}, "TFDISTILL_NUM_GROUPS"),
    ],
)
def test_malformed_variables(environ, field):
    with pytest.raises(ValueError, match="received") as error:
        Cluster.from_env(environ)
    assert field in str(error.value)


def test_a_mistyped_key_is_not_shown():
    with pytest.raises(ValueError, match="received a value") as caught:
        Cluster.from_env({"TFDISTILL_EXCHANGE_KEYS": "secret"})
    assert "secret" not in str(caught.value)


_paths = st.none() | st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]),
    min_size=1,
)


@st.composite
def _clusters(draw):
    num_groups = draw(st.integers(1, 5))
    fields = {
        "num_groups": num_groups,
        "group": draw(st.integers(0, num_groups - 1)),
        "exchange": draw(_paths),
        "workdir": draw(_paths),
    }
    kinds = draw(
        st.sampled_from(
            [(), ("worker",), ("chief", "worker"), ("chief", "worker", "ps")]
        )
    )
    ports = iter(draw(st.lists(st.integers(1, 65535), min_size=9, unique=True)))
    spec = {}
    for kind in kinds:
        size = 1 if kind == "chief" else draw(st.integers(1, 4))
        spec[kind] = tuple(f"host:{next(ports)}" for _ in range(size))
    if spec:
        fields["task_type"] = draw(st.sampled_from(kinds))
        last = len(spec[fields["task_type"]]) - 1
        fields["task_index"] = draw(st.integers(0, last))
    if draw(st.booleans()):
        fields["method"] = dataclasses.replace(
            draw(st.sampled_from(list(method.METHODS.values()))),
            seed=draw(st.none() | st.integers(0, 9)),
            every_steps=draw(st.none() | st.integers(1, 9)),
            held_out=draw(st.none() | st.just("day")),
        )
    return Cluster(spec=spec, **fields)


@hypothesis.given(_clusters())
def test_environment_round_trip(cluster):
    assert Cluster.from_env(cluster.to_env()) == cluster
