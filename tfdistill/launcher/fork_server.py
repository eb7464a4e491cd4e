"""The parent of a launcher's tasks: imports once, then forks for each task.

python fork_server.py FD MODULE,... COMMAND

It is run by the interpreter of the tasks' command, with the options and the
variables that they share; parent.py is the other end. A fork becomes what
Python would have started: `__main__`, `sys.argv`, `sys.path[0]` and its own
variables. Some things are otherwise: modules that were imported are in
`sys.modules`, a traceback begins with two lines of this file, and `ps` shows
this program before the command.

A task may have set variables that imports read by the time it imports one of
the modules: if any variable has changed it starts over, as a new program. So it
gets the values it needs, whatever reads them.

Needs the standard library only, in any environment that has the modules.
"""

import _thread
import builtins
import gc
import importlib
import json
import os
import pathlib
import re
import runpy
import signal
import socket
import sys
import types
import warnings
from collections.abc import Mapping
from collections.abc import Sequence
from types import ModuleType
from types import TracebackType
from typing import Any

# tfdistill itself may be missing where this runs.
_KEEPER = pathlib.Path(__file__).with_name("keeper.py")
_LATE_IMPORTS = _KEEPER.with_name("late_imports.py")
_LOSSY_OUTPUT = _KEEPER.parents[1] / "system" / "lossy_output.py"
keeper, late_imports, lossy_output = (
    types.SimpleNamespace(**runpy.run_path(str(path)))
    for path in (_KEEPER, _LATE_IMPORTS, _LOSSY_OUTPUT)
)
# Public names of tfdistill that load no TensorFlow: a script may use them and
# then set a variable.
_FREE = ("Cluster", "Exchange")
# Name of the threads that TensorFlow starts once it has opened a device.
_DEVICE_THREAD = "tf_"


def _watch_imports(
    modules: set[str], *, set_by_imports: dict[str, str], own: str
) -> None:
    """Looks at the variables when this task first imports a module.

    Those that match `own` may change.
    """
    environ, cwd, pid = dict(os.environ), os.getcwd(), os.getpid()
    of_statement, of_call = builtins.__import__, importlib.import_module

    def look(names: set[str]) -> None:
        if modules.isdisjoint(names):
            return
        builtins.__import__ = of_statement
        importlib.import_module = of_call
        now, after = dict(os.environ), environ | set_by_imports
        changed = sorted(
            name
            for name in now.keys() | environ.keys()
            if now.get(name) not in (environ.get(name), after.get(name))
            and not re.fullmatch(own, name)
        )
        os.environ.update(set_by_imports)
        if changed:
            start_over(", ".join(changed))

    def start_over(changed: str) -> None:
        # A process that a task forks runs a function, not the whole command.
        is_task = os.getpid() == pid
        what = "the command starts again as a new program"
        if not is_task:
            what = "too late in a process that a task has forked"
        print(
            f"tfdistill: {changed} changed before an import: {what}. Set it "
            "for the launcher.",
            file=sys.stderr,
            flush=True,
        )
        if is_task:
            os.chdir(cwd)
            os.execve(sys.executable, sys.orig_argv, environ)

    def import_(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        if not level:
            look({name, *(f"{name}.{one}" for one in fromlist or ())})
        return of_statement(name, globals, locals, fromlist, level)

    def import_module(name: str, package: str | None = None) -> ModuleType:
        look({name})
        return of_call(name, package)

    builtins.__import__ = import_
    importlib.import_module = import_module


class _Server:
    """What the parent does, from its imports to the fork of a task."""

    def __init__(self, fd: int, preload: Sequence[str]) -> None:
        """Imports; exits with a message if no task can be forked then."""
        self._control = socket.socket(fileno=fd)
        self._control.set_inheritable(False)
        self._environ = dict(os.environ)
        self._finder = late_imports.Finder()
        sys.meta_path.insert(0, self._finder)
        gc.disable()  # It would look through a million objects, for nothing.
        if "tfdistill" in preload:
            _load("tfdistill", _FREE)
        visible = set(sys.modules)
        for name in preload:
            _load(name)
        self._modules = {
            name
            for name in sys.modules.keys() - visible
            if name.partition(".")[0] in preload
        }
        self._set = {
            name: value
            for name, value in os.environ.items()
            if self._environ.get(name) != value
        }
        gc.freeze()  # Pages of what is never collected stay shared.
        gc.enable()
        sys.stdout.flush()  # Or each task would print it, too.
        _check_fit()

    def serve(self) -> dict[str, Any]:
        """Forks for each request; returns it in the task, and only there."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Reaps the keepers.
        # Other threads: OpenBLAS and jemalloc, which expect a fork.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            while True:
                request, fds, _, _ = socket.recv_fds(self._control, 1 << 18, 2)
                if not request:
                    os._exit(0)
                if os.fork() == 0:
                    self._start_task(*fds)
                    return json.loads(request)
                for fd in fds:
                    os.close(fd)

    def _start_task(self, fd: int, log_fd: int) -> None:
        """Becomes a keeper, then its task; returns in the task."""
        self._control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.close(log_fd)
        if keeper.Keeper(fd).start() == "keeper":
            os._exit(0)

    def become(self, request: dict[str, Any]) -> None:
        """Makes this process what a new program would be."""
        os.environ.clear()
        os.environ.update(self._environ | request["environ"])
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.seed()  # Python seeds its own after a fork.
        num_options = len(sys.orig_argv) - len(sys.argv)
        sys.orig_argv[num_options:] = sys.argv[:] = request["argv"]
        self._finder.in_task()
        lossy_output.install()  # It is a log in the workdir.
        _watch_imports(
            self._modules, set_by_imports=self._set, own=request["own"]
        )


def _load(name: str, public: Sequence[str] = ()) -> None:
    """Imports a module, and what it loads on the first use of a name."""
    module = importlib.import_module(name)
    if {"__all__", "__getattr__"} <= vars(module).keys():
        for one in public or module.__all__:
            getattr(module, one)


def _check_fit() -> None:
    """Ends this process, with a message, if no task can be forked from it."""
    if _thread._count():
        sys.exit("a preloaded module has started a thread")
    for path in pathlib.Path("/proc/self/task").glob("*/comm"):
        if path.read_text().startswith(_DEVICE_THREAD):
            sys.exit("a preloaded module has run an operation of TensorFlow")


def _report(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Prints what ended the command as its own Python would have."""
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _run() -> None:
    sys.excepthook = _report
    main = sys.modules["__main__"] = ModuleType("__main__")
    what = sys.argv[0]
    if what == "-m":
        module = sys.argv.pop(1)
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
        return
    if what == "-c":
        name, text = "<string>", os.fsencode(sys.argv.pop(1))
        if not sys.flags.safe_path:
            sys.path[0] = ""
    else:
        name = main.__file__ = os.path.join(os.getcwd(), what)
        text = pathlib.Path(what).read_bytes()
    vars(main).update(__builtins__=__builtins__, __spec__=None)
    exec(compile(text, name, "exec", dont_inherit=True), vars(main))


if __name__ == "__main__":
    keeper.die_with(os.getppid())
    _fd, _names, _what = sys.argv[1:4]
    if not sys.flags.safe_path:
        # As imports of the command have it.
        sys.path[0] = os.path.dirname(os.path.realpath(_what))
        if _what in ("-m", "-c"):
            sys.path[0] = os.getcwd()
    _server = _Server(int(_fd), _names.split(","))
    _server.become(_server.serve())
    _run()
