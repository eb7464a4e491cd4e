"""Puts each task of a cluster behind a link that delays, and counts bytes.

TensorFlow's chief tells all tasks where the others are. So a chief that names
the links' addresses in place of the tasks' own has all that they say to each
other go through them. The links are a process of their own, which ends with the
chief.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

_HOST = "127.0.0.1"
_CHUNK_BYTES = 1 << 18


class Links:
    """The links of one cluster.

    Attributes:
        spec: The cluster's spec, with the links' addresses.
    """

    def __init__(self, spec: Mapping[str, Sequence[str]], process: Any) -> None:
        """Reads from the process where its links listen."""
        self._process = process
        addresses = iter(self._read())
        self.spec = {
            job: tuple(next(addresses) for _ in tasks)
            for job, tasks in spec.items()
        }

    def num_bytes(self) -> int:
        """Returns how many bytes went through the links so far, both ways."""
        print(file=self._process.stdin, flush=True)
        return int(self._read())

    def _read(self) -> Any:
        return json.loads(self._process.stdout.readline())


@contextlib.contextmanager
def before(
    spec: Mapping[str, Sequence[str]], *, delay_secs: float
) -> Iterator[Links]:
    """Puts a link before each task.

    Args:
        spec: By job the tasks' addresses, `host:port`.
        delay_secs: What it takes a byte each way.
    """
    tasks = [address for job in spec.values() for address in job]
    with subprocess.Popen(
        [sys.executable, __file__, str(delay_secs), *tasks],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Links(spec, process)
        finally:
            process.kill()


class _Relay:
    """The process: listens, forwards what is due, and counts it."""

    def __init__(self, delay_secs: float) -> None:
        self._delay_secs = delay_secs
        self._num_bytes = 0

    async def run(self, targets: Sequence[str]) -> None:
        addresses = []
        for target in targets:
            host, _, port = target.rpartition(":")
            server = await asyncio.start_server(
                lambda *ends, to=(host, int(port)): self._connect(*to, *ends),
                _HOST,
                limit=_CHUNK_BYTES,
            )
            number = server.sockets[0].getsockname()[1]
            addresses.append(f"{_HOST}:{number}")
        print(json.dumps(addresses), flush=True)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, sys.stdin.readline):
            print(self._num_bytes, flush=True)

    async def _connect(
        self,
        host: str,
        port: int,
        near_reader: asyncio.StreamReader,
        near_writer: asyncio.StreamWriter,
    ) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            near_writer.close()  # As if nobody listened here, either.
            return
        await asyncio.gather(
            self._forward(near_reader, far_writer),
            self._forward(far_reader, near_writer),
        )

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while chunk := await reader.read(_CHUNK_BYTES):
                self._num_bytes += len(chunk)
                loop.call_later(self._delay_secs, writer.write, chunk)
        loop.call_later(self._delay_secs, writer.close)


if __name__ == "__main__":
    asyncio.run(_Relay(float(sys.argv[1])).run(sys.argv[2:]))
