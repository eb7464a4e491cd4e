"""Workers that meet, come late, twice, or not at all; no TensorFlow."""

import concurrent.futures
import errno
import functools
import json
import socket
import threading
import time

import pytest

from tests.cases import waits
from tfdistill.cluster import identity
from tfdistill.cluster import rendezvous
from tfdistill.system import processes

NAMES = ("worker:0", "worker:1", "worker:2")


def _address(host="127.0.0.1"):
    with processes.listener(0) as server:
        return f"{host}:{server.getsockname()[1]}"


@functools.cache
def _others(address):
    del address
    return _address(), _address()


# A cache may let two threads find different addresses for one chief's.
_ONE_AT_A_TIME = threading.Lock()


def _cluster(name, address, group=0):
    with _ONE_AT_A_TIME:
        others = _others(address)
    return identity.Cluster(
        task_index=int(name[-1]),
        spec={"worker": (address, *others)},
        group=group,
        num_groups=2,
    )


def _meet(name, address, *, group=0, delay=0.0, limit_secs=60.0):
    time.sleep(delay)
    rendezvous.meet(_cluster(name, address, group), limit_secs=limit_secs)
    return time.monotonic()


def _await(address):
    """Waits until a task listens there."""
    waits.until(lambda: processes.ask(address) is processes.Answer.OPEN)


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(8) as executor:
        yield executor


@pytest.mark.parametrize("late", [0, 2])
def test_nobody_goes_before_the_last_has_come(pool, late):
    address, start = _address(), time.monotonic()
    futures = [
        pool.submit(_meet, name, address, delay=0.3 * (index == late))
        for index, name in enumerate(NAMES)
    ]
    assert all(f.result() >= start + 0.3 for f in futures)
    # The address is free again for TensorFlow.
    port = int(address.rpartition(":")[2])
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("host", ["[::1]", "localhost", "127.0.0.1"])
def test_they_meet_at_an_address_of_each_form(pool, host):
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("without IPv6")
    address = _address(host)
    for future in [pool.submit(_meet, name, address) for name in NAMES]:
        future.result()


def test_a_name_that_is_not_known_is_told_of_soon(monkeypatch, capsys):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(rendezvous, "_WORD_SECS", 0.1)
    monkeypatch.setattr(rendezvous, "AGAIN_SECS", 0.1)
    address = _address("chief.invalid")
    with pytest.raises(
        rendezvous.MissingWorkersError, match="can't resolve: use an address"
    ):
        _meet(NAMES[1], address, limit_secs=1.4)
    word = (
        f"tfdistill: worker:1 still waits for worker:0 at {address}: it has a "
        "name that this machine can't resolve"
    )
    assert capsys.readouterr().err.count(word) > 2


def test_a_worker_whose_own_port_is_taken_says_so_before_it_meets(pool):
    """TensorFlow would find it out when the others no longer count time."""
    address = _address()
    port = int(_others(address)[0].rpartition(":")[2])
    with processes.listener(port), pytest.raises(OSError) as caught:
        _meet(NAMES[1], address)
    assert caught.value.errno == errno.EADDRINUSE


def test_the_chief_names_who_is_missing(pool):
    address = _address()
    chief = pool.submit(_meet, NAMES[0], address, limit_secs=1.4)
    other = pool.submit(_meet, NAMES[1], address, limit_secs=1.4)
    with pytest.raises(
        rendezvous.MissingWorkersError, match="waited 1 s for worker:2, which"
    ):
        chief.result()
    with pytest.raises(rendezvous.MissingWorkersError, match="worker:1 waited"):
        other.result()


def test_a_worker_names_the_chief_that_is_missing():
    address = _address()
    with pytest.raises(
        rendezvous.MissingWorkersError,
        match=f"worker:1 waited 1 s for worker:0 at {address}: no task",
    ):
        _meet(NAMES[1], address, limit_secs=1.4)


def test_an_impostor_is_refused_and_the_group_is_not_harmed(pool, monkeypatch):
    address, judged, judge = _address(), [], rendezvous._judge

    def noted(*arguments):
        judged.append(judge(*arguments))
        return judged[-1]

    monkeypatch.setattr(rendezvous, "_judge", noted)
    futures = [pool.submit(_meet, name, address) for name in NAMES[:2]]
    waits.until(lambda: (NAMES[1], "") in judged)
    with pytest.raises(rendezvous.RefusedError, match="another worker:1"):
        _meet(NAMES[1], address)
    with pytest.raises(rendezvous.RefusedError, match="another cluster"):
        _meet(NAMES[2], address, group=1)
    futures.append(pool.submit(_meet, NAMES[2], address))
    for future in futures:
        future.result()


def test_noise_and_a_worker_that_died_before_are_no_harm(pool):
    address = _address()
    host, _, port = address.rpartition(":")
    text = rendezvous._text(_cluster("worker:1", address))
    hello = {"cluster": text, "host": "worker:0", "task": "worker:1"}
    chief = pool.submit(_meet, NAMES[0], address)
    time.sleep(0.2)
    for said in (
        b"GET / HTTP/1.0\r\n\r\n",
        b"[" * 4095 + b"\n",
        b"\xff\n",
        json.dumps(hello).encode() + b"\n",
    ):
        with socket.create_connection((host, int(port)), timeout=5) as peer:
            peer.sendall(said)
            time.sleep(0.1)
    others = [pool.submit(_meet, name, address) for name in NAMES[1:]]
    for future in (chief, *others):
        future.result()


def test_a_coordinator_waits_for_its_servers_and_names_the_missing(pool):
    with socket.create_server(("127.0.0.1", 0)) as there:
        ps = f"127.0.0.1:{there.getsockname()[1]}"
        worker = _address()
        cluster = identity.Cluster(
            task_type="chief",
            spec={"chief": ["other:1"], "worker": [worker], "ps": [ps]},
        )
        with pytest.raises(
            rendezvous.MissingWorkersError,
            match=r"chief:0 waited 1 s for worker:0 \(127.* refuses connect",
        ) as caught:
            rendezvous.await_servers(cluster, limit_secs=1.4)
        assert "ps:0" not in str(caught.value)
        waiting = pool.submit(rendezvous.await_servers, cluster, limit_secs=60)
        time.sleep(0.4)
        assert not waiting.done()
        port = int(worker.rpartition(":")[2])
        with socket.create_server(("127.0.0.1", port)):
            waiting.result()


def test_a_peer_that_drips_bytes_holds_up_a_connection_for_the_limit_only():
    ours, theirs = socket.socketpair()
    is_over = threading.Event()

    def drip():
        while not is_over.wait(0.02):
            theirs.sendall(b" ")

    thread = threading.Thread(target=drip)
    thread.start()
    # Or it would have no end.
    assert rendezvous.receive(ours, limit_secs=0.2) is None
    is_over.set()
    thread.join()
    ours.close()
    theirs.close()
