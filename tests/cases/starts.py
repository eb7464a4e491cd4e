"""Commands that are started as forks of a parent, or as new programs."""

import contextlib
import os
import select

import pytest

from tests.cases import tasks
from tests.cases import waits
from tfdistill.launcher import parent as parent_lib
from tfdistill.launcher import task_process

# Prints what a program can find out of its start.
DUMP = """
import faulthandler, json, os, resource, signal, sys, tempfile
with open("/proc/self/status") as file:
    status = dict(line.split(":", 1) for line in file)
main = sys.modules["__main__"]
found = {
    "argv": [sys.argv, sys.orig_argv, sys.executable],
    "main": [str(getattr(main, name, None)) for name in (
        "__name__", "__file__", "__package__", "__doc__")],
    "spec": getattr(main.__spec__, "name", None),
    "code": sys._getframe().f_code.co_filename,
    "path": sys.path, "flags": [sys.flags, sys.warnoptions, sys._xoptions],
    "environ": [sorted(os.environ.items()), os.getcwd()],
    "descriptors": [
        (n, os.readlink(f"/proc/self/fd/{n}"), os.get_inheritable(int(n)))
        for n in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{n}")
    ],
    "streams": [(str(stream), stream.line_buffering, stream.isatty())
                for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "signals": [str(signal.getsignal(n)) for n in signal.Signals],
    "masks": [status[n] for n in ("SigBlk", "SigIgn", "SigPnd", "Umask")],
    "limits": [resource.getrlimit(getattr(resource, n))
               for n in dir(resource) if n.startswith("RLIMIT_")],
    "session": os.getsid(0) == os.getpgrp() == os.getpid(),
    "faulthandler": faulthandler.is_enabled(),
    "cores": [os.nice(0), sorted(os.sched_getaffinity(0))],
}
json.dump(found, open("found.json", "w"))
import atexit
atexit.register(print, "printed at exit")
print("out"); print("error", file=sys.stderr)
"""


class Start:
    """Starts commands in a directory of their own, as forks or programs."""

    def __init__(self, directory, *, preload):
        self.directory, self.preload = directory, preload
        self.until_closed = contextlib.ExitStack()
        # Apart from the parent that all tests share.
        patch = self.until_closed.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(parent_lib, "_kept", parent_lib._Kept())
        self.until_closed.enter_context(parent_lib.keep())
        self.started = []

    def __call__(self, *command, method="fork", preload=None, **env):
        env = {k: v for k, v in (os.environ | env).items() if v is not None}
        chosen = None
        if method == "fork":
            preload = preload or self.preload
            chosen = parent_lib.get(command, env, preload=preload)
        log = self.directory / f"{len(self.started)}.log"
        with log.open("ab") as file:
            process = task_process.TaskProcess(
                command, env=env, log_file=file, parent=chosen
            )
        process.log, process.chosen = log, chosen
        self.started.append(process)
        return process

    def both(self, *command, **options):
        """Returns what became of it as a fork, and as a program."""
        found = []
        for method in parent_lib.METHODS:
            process = self(*command, method=method, **options)
            code = finish(process)
            assert process.method == method
            found.append((code, process.log.read_text()))
        return found

    def write(self, name, text):
        path = self.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return name

    def close(self):
        parents = {p.chosen for p in self.started} - {None}
        for process in self.started:
            process.hang_up()
        for process in self.started:
            process.kill()
        self.until_closed.close()
        assert not any(tasks.alive(one.pid) for one in parents)


def finish(process):
    def closed():
        if not process.closed:
            select.select([process], [], [], 0.05)
        process.read()
        return process.closed

    waits.until(closed)
    return process.exit_code


def running(process):
    waits.until(lambda: process.read() or process.pid)
    return process.pid
