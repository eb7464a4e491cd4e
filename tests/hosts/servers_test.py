"""Parameter servers whose chief is on another host."""

import pytest

from tests.hosts import tasks

pytestmark = [pytest.mark.deep, pytest.mark.multiprocess]
_SCRIPT = """
import json, os, sys

if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "chief":
    sys.exit(2)  # As for wrong options.
import tfdistill

tfdistill.make_strategy()
"""


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("alpha", "refuses connections"),
        ("nowhere.invalid", "has a name that this machine can't resolve"),
    ],
)
def test_servers_name_the_chief_that_never_comes_and_end(
    hosts, tmp_path, address, why
):
    alpha, beta, gamma = hosts.hosts[:3]
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    places = {
        "chief": [(alpha, address)],
        "worker": [(beta, "beta")],
        "ps": [(gamma, "gamma")],
    }
    chief, *servers = tasks.start(
        script, places, tmp_path / "run", TFDISTILL_START_TIMEOUT_SECS="5"
    )
    assert chief.wait() == 2
    for server in servers:
        assert server.wait() == 75
        said = server.log.read_text()
        place = f"for chief:0 at {address}:5000"
        assert f"{place}, 5 s at most. It {why}" in said
        assert f"waited 5 s {place}, which {why}" in said
