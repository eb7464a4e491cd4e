"""Runs with an exchange in an object store, moto's S3 server; and kills."""

import json
import pathlib
import subprocess
import sys
import time

import pytest

import tfdistill
from tests.cases import object_store
from tests.cases import tasks
from tests.programs import codistill as codistill_program
from tests.programs import commands
from tfdistill.exchange import versions
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# More than a run takes: it goes on until it is told to stop.
_MOST_STEPS = 100_000
_OUTAGE_SECS = 2.0


@pytest.fixture(scope="module")
def s3():
    with object_store.serve() as server:
        yield server


def _taught_by(directory, group):
    """The newest version that has taught a group, or -1."""
    names = [path.name for path in directory.glob(f"taught_{group}_0_*")]
    return max((int(name.split("_")[-1]) for name in names), default=-1)


def _wait_until_taught(run, directory, *, after):
    """Waits until a version newer than `after` has taught each group."""
    tasks.poll_until(
        run, lambda: min(_taught_by(directory, g) for g in range(2)) > after
    )


@pytest.mark.multiprocess
@pytest.mark.deep
def test_groups_teach_each_other_through_a_store_that_fails_for_a_while(
    tmp_path, s3, no_process_left
):
    url = f"{s3.url}/run"
    topology = local_cluster.LocalCluster(
        command=commands.of(codistill_program, _MOST_STEPS, 0.05),
        workdir=str(tmp_path),
        exchange=url,
        num_groups=2,
    )
    with local_run.LocalRun(topology) as run:
        key = topology.key_path.read_bytes().strip()
        exchange = tfdistill.Exchange(url, key=key)
        _wait_until_taught(run, tmp_path, after=-1)
        with s3.stopped():
            deadline = time.monotonic() + _OUTAGE_SECS
            while time.monotonic() < deadline:
                run.poll()
                time.sleep(0.05)
            before = max(_taught_by(tmp_path, group) for group in range(2))
        # The groups go on to newer versions, however long exports paused.
        _wait_until_taught(run, tmp_path, after=before)
        (tmp_path / "stop").touch()
        result = tasks.end(run)
    assert result.exit_code == 0, result.groups
    for group in range(2):
        notes = json.loads((tmp_path / f"notes_{group}_0.json").read_text())
        used = [version for (version,) in notes["versions"]]
        assert used == sorted(used)
        newest = exchange.latest(group)
        exchange.verify(newest)
        assert newest.step == notes["steps"]
        # An outage is many failed looks, and none of them an unknown error.
        log = topology.logs_dir / f"group_{group}_worker_0.log"
        assert "Looking for group" not in log.read_text()
    with pytest.raises(versions.CorruptVersionError, match="signed"):
        tfdistill.Exchange(url, key=b"another key of a run").open(
            0, exchange.latest(0).step
        )


@pytest.mark.deep
@pytest.mark.multiprocess
@pytest.mark.parametrize("place", ["disk", "store"])
def test_writers_killed_at_random_show_no_bad_version(
    place, request, no_process_left
):
    """`benchmarks.exchange_kills` has the full number."""
    kills = {"disk": 60, "store": 4}[place]
    command = [sys.executable, "-m", "benchmarks.exchange_kills", "--seed=7"]
    command.append(f"--kills={kills}")
    if place == "store":
        command.append(f"--exchange={request.getfixturevalue('s3').url}")
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["kills"], found["bad"]) == (kills, 0), found
    assert found["versions"] > 0 and found["reads"] > 0, found
    assert place == "store" or found["interrupted"] > 5, found
