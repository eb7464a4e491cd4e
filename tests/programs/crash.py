"""Ends a publisher at each file operation in turn, and looks at what is left.

Usage: python -m tests.programs.crash DIRECTORY STORAGE SCENARIO

STORAGE is `rename` or `manifest_last`, SCENARIO `prune` or `replace`. Each
crash is an `os._exit` in a child process. One line of JSON tells the names of
the operations and every promise that was broken. It imports no TensorFlow, so
that it may fork.
"""

import json
import logging
import os
import pathlib
import shutil
import sys

from tests.cases import storage as storage_cases
from tfdistill.exchange import filesystem
from tfdistill.exchange import manifest
from tfdistill.exchange import publisher
from tfdistill.exchange import versions

_FILES = ("saved_model.pb", "variables/index", "variables/data")
_CRASHED = 9


class _Crash(storage_cases.Faults):
    """Counts the calls of the publishing thread; the k-th ends the process."""

    def check(self, name, path):
        self.calls.append(name)
        if len(self.calls) == self.fail_at:
            os._exit(_CRASHED)


def _write(directory):
    for name in _FILES:
        path = pathlib.Path(directory, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)


def _hub(root, storage):
    return publisher.Exchange(
        root, key=None, file_system=storage, max_to_keep=2, min_keep_secs=0
    )


def _publish(hub, step):
    return hub.publish(_write, group=0, step=step)


def _prepare(root, scenario):
    hub = _hub(root, filesystem.LocalFileSystem())
    with hub.claim(0):
        for step in (1, 2):
            _publish(hub, step)
        if scenario == "replace":
            path = _publish(hub, 3).path
            pathlib.Path(path, _FILES[0]).write_text("damaged")


def _publisher(root, storage, fail_at):
    """What is ended: one run of a publisher, with one export."""
    crash = _Crash(storage, fail_at=fail_at)
    hub = _hub(root, crash)
    with hub.claim(0):
        _publish(hub, 3)
    return crash.calls


def _run(root, storage, fail_at):
    pid = os.fork()
    if not pid:
        code = 1
        try:
            _publisher(root, storage, fail_at)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _leftovers(root):
    return [
        name
        for name in os.listdir(f"{root}/group_0")
        if not name.isdigit() and name != "owner.json"
    ]


def _problems(root, storage, scenario):
    reader = _hub(root, filesystem.LocalFileSystem())
    damaged = False
    for step in reader.steps(0):
        try:
            reader.verify(reader.open(0, step))
        except versions.CorruptVersionError:
            damaged = True
            if scenario != "replace" or step != 3:
                yield f"step {step} is not whole"
    latest = reader.latest(0)
    if latest is None or latest.step not in (2, 3):
        yield f"the newest version is {latest}"
    if 2 not in reader.steps(0):
        yield "the version before is gone"
    successor = _hub(root, storage)
    step = 4 if not damaged else 3
    with successor.claim(0):
        successor.verify(_publish(successor, step))
        if _leftovers(root):
            yield f"left behind: {_leftovers(root)}"
        successor.verify(_publish(successor, 5))
    if reader.latest(0).step != 5:
        yield "the newest version went backwards"


def main(directory, kind, scenario):
    os.fsync = lambda descriptor: None
    logging.disable(logging.CRITICAL)
    manifest.installed_versions()
    storage = {
        "rename": filesystem.LocalFileSystem,
        "manifest_last": storage_cases.NoDirectoryRename,
    }[kind]()
    prepared = f"{directory}/prepared"
    _prepare(prepared, scenario)
    root = f"{directory}/calls"
    shutil.copytree(prepared, root)
    calls = _publisher(root, storage, None)
    problems = []
    for fail_at in range(1, len(calls) + 1):
        where = f"call {fail_at} ({calls[fail_at - 1]})"
        root = f"{directory}/{fail_at}"
        shutil.copytree(prepared, root)
        code = _run(root, storage, fail_at)
        if code != _CRASHED:
            problems.append(f"{where}: the publisher ended with {code}")
        found = _problems(root, storage, scenario)
        problems += [f"{where}: {problem}" for problem in found]
    print(json.dumps({"calls": calls, "problems": problems}))


if __name__ == "__main__":
    main(*sys.argv[1:])
