"""Claims a group and publishes versions; what happens is told line by line.

Usage: python -m tests.programs.claim ROOT LEASE_SECS [MACHINE]

MACHINE makes the process one of another machine, in its own eyes and others'.
The exit code is 2 for a group that another process has, 3 for one that was
lost to it.
"""

import json
import logging
import os
import pathlib
import sys
import time

from tfdistill.exchange import claim as group_claim
from tfdistill.exchange import publisher
from tfdistill.system import processes


def _tell(event, **fields):
    line = json.dumps({"event": event, "pid": os.getpid(), **fields})
    # At once: the thread that renews the claim tells as well, and `print`
    # writes the end of a line by itself.
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class _Log(logging.Handler):
    def emit(self, record):
        _tell("log", message=record.getMessage())


def main(root, lease_secs, machine=None):
    if machine is not None:
        processes.machine = lambda: machine
    os.fsync = lambda descriptor: None
    logging.getLogger().addHandler(_Log())
    hub = publisher.Exchange(root, max_to_keep=100)
    _tell("start", incarnation=hub.incarnation)
    try:
        claim = hub.claim(0, lease_secs=float(lease_secs), renew_secs=0.2)
    except group_claim.GroupClaimedError as error:
        _tell("refused", message=str(error))
        return 2
    _tell("claimed")
    try:
        while True:
            latest = hub.latest(0)
            step = latest.step + 1 if latest else 0
            hub.publish(
                lambda directory: pathlib.Path(directory, "x").write_text("y"),
                group=0,
                step=step,
            )
            _tell("published", step=step)
            time.sleep(0.2)
            claim.check()
    except group_claim.ClaimLostError as error:
        _tell("lost", message=str(error))
        return 3


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
