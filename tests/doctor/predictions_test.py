"""What the doctor says of a run whose groups learn from predictions.

The files of the run are written here; other tests hold what groups log.
"""

import json
import os

import pytest

from launch import doctor
from launch import recipes
from tfdistill.cluster import identity
from tfdistill.doctor import check
from tfdistill.doctor import predictions
from tfdistill.exchange import reader
from tfdistill.system import processes


def _peer(**changes):
    return {
        "name": "group_1",
        "step": 900,
        "health": "good",
        "reason": "",
        "num_answers": 990,
        "num_missed": 10,
        "num_forged": 0,
        "refused": {},
        "quarantined": {},
    } | changes


def _group(workdir, group, *teachers, step=1000):
    directory = workdir / f"group_{group}"
    directory.mkdir(parents=True)
    line = {"time": 1e9, "step": step, "teachers": list(teachers)}
    (directory / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def _mailbox(workdir, group, worker=0, *, replicas=(0,), port=4000):
    root = workdir / "exchange"
    os.makedirs(root / f"group_{group}", exist_ok=True)
    reader.VersionReader(root, key=None).notes(group).write(
        f"mailbox-{worker}",
        {
            "host": "there",
            "port": port + group,
            "replicas": list(replicas),
            "machine": processes.machine() if worker else "another",
        },
    )


def _examine(workdir, **kwargs):
    asked = []
    kwargs.setdefault("connect", asked.append)
    return list(predictions.examine(workdir, **kwargs)), asked


def test_a_good_run_is_told_in_figures_and_connected_to(tmp_path):
    _group(tmp_path, 0, _peer())
    _group(tmp_path, 1, _peer(name="group_0"))
    for group in range(2):
        for worker in range(2):
            _mailbox(tmp_path, group, worker, replicas=[worker])
    found, asked = _examine(tmp_path)
    assert {result.status for result in found} == {check.OK}
    assert "group_1 answered 990 of 1000 batches" in found[0].seen
    assert asked == [
        *[("there", 4000), ("127.0.0.1", 4000)],
        *[("there", 4001), ("127.0.0.1", 4001)],
    ]
    found, _ = _examine(tmp_path, groups=[1])
    assert "group 1" in found[0].seen and len(found) == 2


_FAULTS = {
    "never": (
        _peer(num_answers=0, num_missed=500, reason="its address is not known"),
        check.FAILED,
        "of group_1 in 500 batches, at steps 1000 and 0: its address is not",
        "Start all groups",
    ),
    "behind": (
        _peer(
            num_answers=0,
            num_missed=500,
            reason="its last answer was of step -1",
        ),
        check.FAILED,
        "no predictions",
        "Raise wait_secs",
    ),
    "sizes": (
        _peer(num_answers=0, num_missed=500, reason="Use equally many workers"),
        check.FAILED,
        "equally many",
        "equally many",
    ),
    "firewall": (
        _peer(
            num_answers=0,
            num_missed=500,
            reason="it does not take messages: UNAVAILABLE",
        ),
        check.FAILED,
        "UNAVAILABLE",
        "at any port",
    ),
    "missed": (
        _peer(num_answers=800, num_missed=200),
        check.WARNING,
        "200 of 1000 batches (20%)",
        "Raise wait_secs",
    ),
    "forged": (
        _peer(num_forged=7),
        check.WARNING,
        "7 messages",
        "TFDISTILL_EXCHANGE_KEY_FILE",
    ),
} | {
    kind: (
        _peer(refused={kind: 3}, quarantined={"5": "why it was"}),
        check.WARNING,
        f"refused 3 messages of group_1 ({kind}); the last: why it was",
        remedy,
    )
    for kind, remedy in {
        "batch": "data.mode=coordinated",
        "classes": "same classes",
        "dtype": "dtype policy",
        "shape": "`form`",
        "finite": "learning rate",
        "replica": "equally many",
        "step": "the run's key",
    }.items()
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_fault_has_its_remedy(tmp_path, fault):
    peer, status, seen, remedy = _FAULTS[fault]
    _group(tmp_path, 0, peer)
    ((result,), _) = _examine(tmp_path)
    assert (result.status, result.name) == (status, "predictions")
    assert seen in result.seen and remedy in result.remedy


def test_groups_of_other_sizes_and_closed_ports(tmp_path):
    def refuse(address):
        raise ConnectionRefusedError("Connection refused")

    _group(tmp_path, 0, _peer())
    _group(tmp_path, 1, _peer(name="group_0"))
    _mailbox(tmp_path, 0)
    _mailbox(tmp_path, 1)
    _mailbox(tmp_path, 1, 1, replicas=[1])
    found, _ = _examine(tmp_path, connect=refuse)
    size, *ports = [r for r in found if r.status == check.FAILED]
    assert "group 1: 2 workers with the replicas [0] [1]" in size.seen
    assert len(ports) == 3
    assert "worker 0 of group 0" in ports[0].seen
    assert "there:4000" in ports[0].seen and "any port" in ports[0].remedy


@pytest.mark.parametrize(
    ("jobs", "status"),
    [(["worker"], check.SKIPPED), (["chief", "worker", "ps"], check.FAILED)],
)
def test_a_recipe_is_told_before_its_start(jobs, status):
    spec = {
        "cluster": {job: [f"{job}:1"] for job in jobs},
        "task": {"type": "worker", "index": 0},
    }
    cluster = identity.Cluster.from_env({"TF_CONFIG": json.dumps(spec)})
    config = recipes.override(
        recipes.get("digits"),
        ["data.mode=coordinated", "codistillation.by=predictions"],
    )
    *_, last = doctor.RecipeChecks(config)(cluster)
    (result,), _ = check.run(last)
    assert (result.status, result.name) == (status, "predictions")


def test_other_runs_are_none_of_its_business(tmp_path):
    assert _examine(tmp_path / "absent") == ([], [])
    versions = {"name": "group_1", "step": 4, "health": "good"}
    _group(tmp_path, 0, versions)
    _mailbox(tmp_path, 0)
    assert _examine(tmp_path) == ([], [])
