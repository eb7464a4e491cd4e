"""The containers of Jobs as real processes, as the kubelet would run them."""

import json
import secrets

import pytest

from tests.cases import kubernetes as manifest_cases
from tests.cases import runs
from tests.cases import waits
from tests.programs import commands
from tfdistill.launcher import local_cluster

pytestmark = [
    pytest.mark.deep,
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]


@pytest.fixture
def start(tmp_path):
    """Starts each pod of a Job; hosts become ports of this machine."""

    def act(job):
        tasks = list(manifest_cases.tasks(job))
        cluster = json.loads(tasks[0][0]["TF_CONFIG"])["cluster"]
        addresses = [address for hosts in cluster.values() for address in hosts]
        holders = local_cluster.reserve_ports(len(addresses))
        places = [f"127.0.0.1:{h.getsockname()[1]}" for h in holders]
        key = tmp_path / "exchange.key"  # What the secret would hold.
        if not key.exists():
            key.write_text(secrets.token_hex(32))
            key.chmod(0o400)
        processes = []
        for env, command in tasks:
            for address, place in zip(addresses, places, strict=True):
                env["TF_CONFIG"] = env["TF_CONFIG"].replace(address, place)
            env["TFDISTILL_EXCHANGE_KEY_FILE"] = str(key)
            python, option, *words = command
            assert (python, option) == ("python", "-m")
            processes.append(starter(*words, **env))
        for holder in holders:
            holder.close()
        return processes

    with commands.starting(tmp_path) as starter:
        yield act


def test_a_group_trains_and_goes_on_after_the_loss_of_a_pod(
    tmp_path, capsys, start
):
    workdir = tmp_path / "run"
    changes = ("num_steps=300", "backup_every_steps=20")

    objects = manifest_cases.write(
        capsys,
        "--workers_per_group=2",
        "--volume_claim=runs",
        "--key_secret=run1-key",
        f"--workdir={workdir}",
        "--recipe=digits",
        *(f"--override={change}" for change in changes),
    )
    (job,) = manifest_cases.jobs(objects).values()
    first, second = start(job)
    backup = workdir / "group_0" / "backup"

    def is_written():
        assert first.poll() is second.poll() is None, first.text()
        return list(backup.rglob("manifest.json"))

    waits.until(is_written, "a backup")
    second.kill()
    # The other ends too, by what the Job's failure policy lets it retry.
    rules = job["spec"]["podFailurePolicy"]["rules"]
    code = first.wait()
    assert code == 75, first.text()[-2000:]
    assert code not in rules[0]["onExitCodes"]["values"]
    # Both pods are replaced, at other addresses.
    again = start(job)
    for process in again:
        assert process.wait() == 0, process.text()[-2000:]
    result = json.loads((workdir / "results.json").read_text())
    assert result["groups"][0]["steps"] == 300
    assert runs.records(workdir / "group_0", "start")[-1]["step"] > 0
    assert (workdir / "group_0" / "student.keras").exists()
