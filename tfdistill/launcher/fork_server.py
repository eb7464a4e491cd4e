"""The parent of a launcher's tasks: imports once, then forks for each task.

python fork_server.py FD [COMMAND, for `ps`]

It is run by the interpreter of the tasks' command, with the options and the
variables that they share; parent.py is the other end. A fork becomes what
Python would have started: `__main__`, `sys.argv`, `sys.path[0]` and what the
request says. Two things are otherwise: a traceback begins with two lines of
this file, and `ps` shows this program before the command.

What was imported is hidden from a task until it imports a part of it:
TensorFlow, Keras and tfdistill, or one of the others, such as NumPy. By then it
may have set variables that imports read: if any variable has changed it starts
over, as a new program. So it gets what it asked for, whatever reads it.

Needs the standard library only, in any environment that has the modules.
"""

import _thread
import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import pathlib
import re
import resource
import runpy
import signal
import socket
import sys
import types
import warnings
from collections.abc import Collection
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# tfdistill itself may be missing where this runs.
_KEEPER = pathlib.Path(__file__).with_name("keeper.py")
keeper = types.SimpleNamespace(**runpy.run_path(str(_KEEPER)))
# Hidden until one of them is imported, whatever else was.
_LAST = ("tensorflow", "keras", "tfdistill")
# Public names of tfdistill that load no TensorFlow: they are not hidden, as a
# script may use them and then set a variable.
_FREE = ("Cluster", "Exchange")
# Name of the threads that TensorFlow starts once it has opened a device.
_DEVICE_THREAD = "tf_"


class _Hidden(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what the parent has imported, once a task imports some of it."""

    def __init__(
        self,
        names: Collection[str],
        *,
        set_by_imports: dict[str, str],
        own: str,
        shows: "_Hidden | None" = None,
    ) -> None:
        """Hides modules; variables that match `own` may change.

        Shows, with them, those that `shows` hides.
        """
        self._shows = shows
        self._modules = {name: sys.modules.pop(name) for name in names}
        self._specs = {n: m.__spec__ for n, m in self._modules.items()}
        self._set, self._own = set_by_imports, re.compile(own)
        self._environ, self._cwd = dict(os.environ), os.getcwd()
        self._pid = os.getpid()
        # What hidden modules are to packages that are not hidden.
        self._attributes: list[tuple[ModuleType, str, ModuleType]] = []
        for name, module in self._modules.items():
            package, _, child = name.rpartition(".")
            owner = sys.modules.get(package)
            if owner is not None and vars(owner).get(child) is module:
                delattr(owner, child)
                self._attributes.append((owner, child, module))
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds one of the modules, for Python's import."""
        if name not in self._modules:
            return None
        if changed := self._changed():
            self._start_over(changed)
        spec = importlib.machinery.ModuleSpec(name, self)
        if real := self._specs[name]:
            spec.origin = real.origin
            spec.submodule_search_locations = real.submodule_search_locations
        return spec

    def create_module(self, spec: Any) -> ModuleType:
        """Returns the module that was found."""
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Shows all modules, and what their imports have set."""
        name = module.__spec__.name if module.__spec__ else ""
        module.__spec__ = self._specs[name]  # Python has written its own.
        if self._shows is not None:
            self._shows._show()
        self._show()

    def _show(self) -> None:
        for name, shown in self._modules.items():
            sys.modules.setdefault(name, shown)
        for owner, child, shown in self._attributes:
            setattr(owner, child, shown)
        os.environ.update(self._set)
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _changed(self) -> list[str]:
        return sorted(
            name
            for name in self._environ.keys() | os.environ.keys()
            if os.environ.get(name) != self._environ.get(name)
            and os.environ.get(name) != self._set.get(name)
            and not self._own.fullmatch(name)
        )

    def _start_over(self, changed: list[str]) -> None:
        # What a task has forked is to run a function, not the whole command.
        is_task = os.getpid() == self._pid
        what = "the command starts over, as a new program"
        if not is_task:
            what = "too late in a process that a task has forked"
        print(
            f"tfdistill: {', '.join(changed)} changed before an import: {what}."
            " Set it for the launcher.",
            file=sys.stderr,
            flush=True,
        )
        if is_task:
            os.chdir(self._cwd)
            os.execve(sys.executable, sys.orig_argv, self._environ)


class _Server:
    """What the parent does, from its plan to the fork of a task."""

    def __init__(self, fd: int) -> None:
        self._control = socket.socket(fileno=fd)
        self._control.set_inheritable(False)
        self._plan = plan = json.loads(self._control.recv(65536))
        keeper.die_with(plan["dies_with"])
        self._environ = dict(os.environ)
        if not sys.flags.safe_path:
            sys.path[0] = plan["path"]  # As imports of the command have it.

    def import_all(self) -> None:
        """Imports what the plan names, and tells the launcher how it went."""
        names = self._plan["preload"]
        gc.disable()  # It would look through a million objects, for nothing.
        visible = set(sys.modules)
        if "tfdistill" in names:
            self._load("tfdistill", _FREE)
            visible = set(sys.modules)
        for name in names:
            self._load(name)
        self._hidden = {
            name
            for name in sys.modules.keys() - visible
            if name.partition(".")[0] not in sys.stdlib_module_names
            and sys.modules[name] is not sys.modules["__main__"]
        }
        self._set = {
            name: value
            for name, value in os.environ.items()
            if self._environ.get(name) != value
        }
        gc.enable()
        gc.collect()
        gc.freeze()  # Pages of what is never collected stay shared.
        sys.stdout.flush()  # Or each task would print it, too.
        _check_fit()
        self._control.send(b"ready")

    def _load(self, name: str, public: Sequence[str] = ()) -> None:
        """Imports a module, and what it loads on the first use of a name."""
        module = importlib.import_module(name)
        if {"__all__", "__getattr__"} <= vars(module).keys():
            for one in public or module.__all__:
                getattr(module, one)

    def serve(self) -> dict[str, Any]:
        """Forks for each request; returns it in the task, and only there."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Reaps the keepers.
        # Other threads: OpenBLAS and jemalloc, which expect a fork.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            while True:
                word, fds, _, _ = socket.recv_fds(self._control, 16, 3)
                if not word:
                    os._exit(0)
                if os.fork() == 0:
                    return self._start_task(*fds)
                for fd in fds:
                    os.close(fd)

    def _start_task(self, request_fd: int, fd: int, log_fd: int) -> Any:
        """Becomes a keeper, then its task; returns in the task."""
        self._control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.close(log_fd)
        with open(request_fd, encoding="utf-8") as file:
            request = json.load(file)
        if keeper.Keeper(fd).fork() == "keeper":
            os._exit(0)
        return request

    def become(self, request: dict[str, Any]) -> None:
        """Makes this process what a new program would be."""
        os.umask(request["umask"])
        for number, limits in request["limits"]:
            resource.setrlimit(number, tuple(limits))
        os.sched_setaffinity(0, request["cores"])
        os.environ.clear()
        os.environ.update(self._environ | request["environ"])
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.seed()  # Python seeds its own after a fork.
        sys.orig_argv[:] = request["command"]
        sys.argv[:] = request["command"][self._plan["num_options"] :]
        last = {n for n in self._hidden if n.partition(".")[0] in _LAST}
        rules = {"set_by_imports": self._set, "own": self._plan["own"]}
        others = _Hidden(self._hidden - last, **rules)
        _Hidden(last, **rules, shows=others)
        signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def _check_fit() -> None:
    """Ends this process, with a message, if no task can be forked from it."""
    if _thread._count():
        sys.exit("a preloaded module has started a thread")
    for path in pathlib.Path("/proc/self/task").glob("*/comm"):
        if path.read_text().startswith(_DEVICE_THREAD):
            sys.exit("a preloaded module has run an operation of TensorFlow")


def _run() -> None:
    """Runs what `sys.argv` says as Python itself would."""
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
    _server = _Server(int(sys.argv[1]))
    _server.import_all()
    _server.become(_server.serve())
    _run()
