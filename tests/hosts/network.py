"""Hosts of a test: network namespaces, joined by a switch that can fail.

Each has its own addresses, ports, loopback, routes and host name, but the
files and processors of this machine. Nothing that is sent leaves it.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import pytest

_SWITCH = pathlib.Path(__file__).with_name("switch.py")
_NAMES = pathlib.Path("/etc/netns")
# Numbers of the networks that one process makes.
_numbers = itertools.count()


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def skip_without_namespaces() -> None:
    """Skips a test where this user or kernel has no hosts to give."""
    if not shutil.which("ip") or not os.path.exists("/dev/net/tun"):
        pytest.skip("hosts need Linux, `ip` (iproute2) and /dev/net/tun")
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True)
    if tried.returncode or not os.access("/dev/net/tun", os.W_OK):
        pytest.skip("hosts need a user who may create network namespaces")


@dataclasses.dataclass(frozen=True)
class Host:
    """A network namespace with one address of each kind."""

    namespace: str
    name: str
    ipv4: str
    ipv6: str

    def start(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        log: pathlib.Path | None = None,
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Starts a program on this host, which prints to `log`."""
        words = [
            *("ip", "netns", "exec", self.namespace),
            *("unshare", "--uts", "sh", "-c"),
            'hostname "$0"; exec "$@"',
            *(self.name, *command),
        ]
        with contextlib.ExitStack() as stack:
            if log is not None:
                file = stack.enter_context(log.open("ab"))
                options = {"stdout": file, "stderr": file} | options
            return subprocess.Popen(
                words, env={**os.environ, **(environ or {})}, **options
            )

    def run(self, *command: str) -> str:
        """Returns what a short program prints on this host."""
        with self.start(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            printed, _ = process.communicate()
        assert process.returncode == 0, printed.decode()
        return printed.decode()


class Network:
    """Hosts, and the switch between them."""

    def __init__(self, hosts: list[Host], switch: subprocess.Popen[str]):
        self.hosts = hosts
        self._switch = switch
        self._link: dict[str, Any] = {}
        self._cut: set[tuple[int, int]] = set()

    def link(
        self,
        *,
        delay_secs: float = 0.0,
        loss: float = 0.0,
        mbit_per_s: float = 0.0,
    ) -> None:
        """Sets what all frames meet from now on; see switch.py."""
        self._link = {
            "delay_secs": delay_secs,
            "loss": loss,
            "mbit_per_s": mbit_per_s,
        }
        self.num_bytes()

    def cut(self, one: Host, other: Host, *, one_way: bool = False) -> None:
        """Loses all that one host sends to another, and back."""
        pair = self.hosts.index(one), self.hosts.index(other)
        self._cut |= {pair} if one_way else {pair, pair[::-1]}
        self.num_bytes()

    def heal(self) -> None:
        """Ends all cuts."""
        self._cut.clear()
        self.num_bytes()

    def num_bytes(self) -> dict[tuple[int, int], int]:
        """Returns the bytes that passed so far, by index of both hosts."""
        assert self._switch.stdin and self._switch.stdout
        cut = [list(pair) for pair in sorted(self._cut)]
        self._switch.stdin.write(json.dumps({**self._link, "cut": cut}) + "\n")
        self._switch.stdin.flush()
        answer = json.loads(self._switch.stdout.readline())
        return {(source, target): n for source, target, n in answer}


@contextlib.contextmanager
def joined(
    num_hosts: int,
    *,
    host_names: Sequence[str] = (),
    networks: Sequence[Sequence[int]] = (),
) -> Iterator[Network]:
    """Creates hosts for the time of a test.

    They find each other by address and by name: `alpha`, `beta` and so on. A
    name has an address of IPv4 and one of IPv6.

    Args:
        num_hosts: Up to eight.
        host_names: What each host takes for its own name, which only that host
            finds, and at its loopback. Default: the names by which others find
            it.
        networks: For each host the networks that it is in, of which the first
            has the addresses that others know. Default: all are in one.
    """
    skip_without_namespaces()
    names = "alpha beta gamma delta epsilon zeta eta theta".split()[:num_hosts]
    own = list(host_names) or names
    key = f"{os.getpid()}n{next(_numbers)}"
    networks = networks or [[0]] * num_hosts
    # Hosts' first devices are before all others: their index is the host's.
    places = sorted(
        (j, i) for i, its in enumerate(networks) for j in range(len(its))
    )
    taps = {(i, networks[i][j]): f"t{key}h{i}n{j}" for j, i in places}
    hosts = [
        Host(
            namespace=f"tfdistill-{key}-{name}",
            name=own[i],
            ipv4=f"10.78.{networks[i][0]}.{i + 1}",
            ipv6=f"fd78:{networks[i][0]}::{i + 1}",
        )
        for i, name in enumerate(names)
    ]
    known = "127.0.0.1 localhost\n::1 localhost\n" + "".join(
        f"{host.ipv4} {name}\n{host.ipv6} {name}\n"
        for name, host in zip(names, hosts, strict=True)
    )
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(
            subprocess.Popen(
                [
                    *(sys.executable, str(_SWITCH)),
                    *(f"{tap}={network}" for (_, network), tap in taps.items()),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        # Before the process is waited for: the switch ends with its input.
        stack.callback(switch.stdin.close)
        assert switch.stdout.readline() == "{}\n", "the switch has no devices"
        for host in hosts:
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "delete", host.namespace)
            directory = _NAMES / host.namespace
            directory.mkdir(parents=True)
            stack.callback(shutil.rmtree, directory)
            own_line = f"127.0.1.1 {host.name}\n" if host_names else ""
            (directory / "hosts").write_text(known + own_line)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        for (i, network), tap in taps.items():
            on = "-n", hosts[i].namespace
            _ip("link", "set", tap, "netns", hosts[i].namespace)
            ipv4, ipv6 = f"10.78.{network}.{i + 1}", f"fd78:{network}::{i + 1}"
            _ip(*on, "addr", "add", f"{ipv4}/24", "dev", tap)
            _ip(*on, "addr", "add", f"{ipv6}/64", "dev", tap, "nodad")
            _ip(*on, "link", "set", tap, "up")
        yield Network(hosts, switch)
