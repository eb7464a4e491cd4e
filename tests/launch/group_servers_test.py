"""Servers beside the groups of a run: found, paid for, never left behind."""

import socket
import sys
import time

import pytest

from launch import group_servers
from tfdistill.launcher import local_cluster

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout_secs(60)]


def _servers(workdir, script, said):
    """Runs a script in the place of each server."""
    cluster = local_cluster.LocalCluster(
        command=["true"], workdir=str(workdir), num_groups=2
    )
    return group_servers.running(
        cluster,
        say=said.append,
        command=lambda _, group, port: [
            *(sys.executable, "-c", script, str(port)),
        ],
    )


_LISTEN = """
import json, socket, sys
with socket.socket() as s:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("127.0.0.1", int(sys.argv[1])))
    s.listen()
    print(json.dumps({"process_seconds": 1.5}), flush=True)
    s.accept()
    s.accept()
"""


def _connect(address):
    host, _, port = address.rpartition(":")
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=30)
        except ConnectionRefusedError:
            time.sleep(0.01)  # It has not begun to listen.


def test_servers_are_found_and_end_with_the_run(tmp_path, no_process_left):
    said = []
    assert group_servers.addresses(tmp_path) is None
    with _servers(tmp_path, _LISTEN, said):
        addresses = group_servers.addresses(tmp_path)
        assert len(set(addresses)) == 2
        for address in addresses:
            _connect(address).close()
    assert group_servers.addresses(tmp_path) is None
    assert group_servers.usage(tmp_path, 2) == 2 * [{"process_seconds": 1.5}]
    assert not said


def test_a_server_that_ends_early_is_told(tmp_path, no_process_left):
    said = []
    with _servers(tmp_path, "raise SystemExit(3)", said):
        while len(said) < 2:
            time.sleep(0.01)
    assert ["exit code 3" in line for line in said] == [True, True]
    assert str(tmp_path / "servers" / "group_1.log") in " ".join(said)
