"""Claims a group and publishes versions; what happens is told line by line.

Usage: python -m tests.programs.claim ROOT RUN

The exit code is 2 for a group of another run, 3 for one that was lost.
"""

import json
import os
import pathlib
import sys
import time

from tfdistill.exchange import claim as group_claim
from tfdistill.exchange import publisher


def _tell(event, **fields):
    print(
        json.dumps({"event": event, "pid": os.getpid(), **fields}), flush=True
    )


def _write(directory):
    pathlib.Path(directory, "x").write_text("y")


def main(root, run):
    os.fsync = lambda descriptor: None
    hub = publisher.Exchange(root, max_to_keep=100)
    _tell("start", incarnation=hub.incarnation)
    try:
        hub.claim(0, run=run)
        while True:
            latest = hub.latest(0)
            step = latest.step + 1 if latest else 0
            hub.publish(_write, group=0, step=step)
            _tell("published", step=step)
            time.sleep(0.05)
    except group_claim.GroupClaimedError as error:
        _tell("refused", message=str(error))
        return 2
    except group_claim.ClaimLostError as error:
        _tell("lost", message=str(error))
        return 3


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
