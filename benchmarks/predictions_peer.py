"""A peer without a model: it answers each message with the same predictions.

What it costs is not measured, so it needs no TensorFlow.
"""

import queue
from typing import Any

from tfdistill.exchange import publisher
from tfdistill.predictions import mailbox
from tfdistill.predictions import message as message_lib

KEY = b"a key of benchmarks, not of a run"
_LONGEST_WAIT_SECS = 600.0


class Echo(mailbox.Mailbox):
    """Says of each batch of group 0 what group 0 says."""

    todo: queue.SimpleQueue[message_lib.Message]

    def _take(self, data: bytes) -> bool:
        taken = super()._take(data)
        if taken:
            self.todo.put(message_lib.decode(data, self._exchange.signer))
        return taken

    def answer(self) -> None:
        """Answers for as long as there is something to answer."""
        while True:
            message = self.todo.get(timeout=_LONGEST_WAIT_SECS)
            self.post(
                message._replace(
                    group=self._group, incarnation=self._incarnation
                )
            )


def run(root: str, group: int, **options: Any) -> None:
    """Answers as a group, in this process, until it is ended."""
    echo = Echo(
        publisher.Exchange(root, key=KEY),
        group=group,
        worker=0,
        replicas=(0,),
        host="127.0.0.1",
        peers=[0],
        wait_secs=0.0,
        **options,
    )
    echo.todo = queue.SimpleQueue()
    echo.start()
    echo.answer()
