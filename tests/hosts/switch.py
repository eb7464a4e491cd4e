"""A switch between the hosts of a test: each is at the far end of a tap device.

python switch.py TAP[=NETWORK] ...

Hosts reach each other in the same network, by default 0.
Reads a JSON object in each line of its input, and prints one for each: how
many bytes have passed between the hosts. It ends with its input, and the
devices with it. Frames are Ethernet's; what a host sends goes to the one host
that has its destination, or to all.

| key | what frames meet from then on | default |
|---|---|---|
| `delay_secs` | the time from host to host | 0 |
| `loss` | the share of them that is lost | 0 |
| `mbit_per_s` | the speed at which a host receives, 0 for any | 0 |
| `cut` | pairs `[from, to]` of hosts, between which all are lost | [] |
"""

import dataclasses
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import sys
import time
from collections import Counter

# linux/if_tun.h
_SET_INTERFACE, _TAP, _BARE_FRAMES = 0x400454CA, 0x0002, 0x1000
_MOST_BYTES = 70_000
# Frames that are read from a host before others have their turn.
_TURN = 64
# A switch drops what it cannot keep.
_MOST_WAITING_SECS = 0.25


def _open_tap(name: str) -> int:
    """Creates a network device; returns the file that has its frames."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH", name.encode(), _TAP | _BARE_FRAMES)
    fcntl.ioctl(tap, _SET_INTERFACE, request)
    return tap


@dataclasses.dataclass
class _Link:
    delay_secs: float = 0.0
    loss: float = 0.0
    mbit_per_s: float = 0.0
    cut: list[list[int]] = dataclasses.field(default_factory=list)


class _Switch:
    def __init__(self, taps: list[int], networks: list[str]) -> None:
        self.link = _Link()
        self.num_bytes: Counter[tuple[int, int]] = Counter()
        self._taps, self._networks = taps, networks
        self._homes: dict[bytes, int] = {}
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, int, bytes]] = []
        # When each host has received what was sent to it so far.
        self._free = [0.0] * len(taps)

    def receive(self, source: int) -> None:
        """Takes in what a host has sent."""
        for _ in range(_TURN):
            try:
                frame = os.read(self._taps[source], _MOST_BYTES)
            except OSError:
                return  # No more of them; or the device is not up.
            self._homes[frame[6:12]] = source
            home = self._homes.get(frame[:6])
            everyone = range(len(self._taps))
            for target in everyone if home is None else [home]:
                is_joined = self._networks[source] == self._networks[target]
                if is_joined and target != source:
                    self._send(source, target, frame)

    def _send(self, source: int, target: int, frame: bytes) -> None:
        link, now = self.link, time.monotonic()
        if [source, target] in link.cut or random.random() < link.loss:
            return
        begin = max(now, self._free[target])
        if begin - now > _MOST_WAITING_SECS:
            return
        if link.mbit_per_s:
            begin += len(frame) * 8e-6 / link.mbit_per_s
            self._free[target] = begin
        self.num_bytes[source, target] += len(frame)
        due = begin + link.delay_secs
        heapq.heappush(self._waiting, (due, next(self._order), target, frame))

    def deliver(self) -> float:
        """Hands over what is due; returns the seconds until more is."""
        while self._waiting:
            left = self._waiting[0][0] - time.monotonic()
            if left > 0:
                return left
            _, _, target, frame = heapq.heappop(self._waiting)
            try:
                os.write(self._taps[target], frame)
            except OSError:
                pass  # Its host is gone, or cannot take more: it is lost.
        return 1.0


def main() -> None:
    names = [name.partition("=") for name in sys.argv[1:]]
    taps = [_open_tap(name) for name, _, _ in names]
    sources = {tap: source for source, tap in enumerate(taps)}
    switch = _Switch(taps, [network or "0" for _, _, network in names])
    commands = sys.stdin.fileno()
    poll = select.poll()
    for file in (commands, *taps):
        poll.register(file, select.POLLIN)
    print("{}", flush=True)
    while True:
        left = switch.deliver()
        for file, _ in poll.poll(left * 1000):
            if file in sources:
                switch.receive(sources[file])
                continue
            if not (line := sys.stdin.readline()):
                return
            switch.link = _Link(**json.loads(line))
            passed = [[*pair, n] for pair, n in switch.num_bytes.items()]
            print(json.dumps(passed), flush=True)


if __name__ == "__main__":
    main()
