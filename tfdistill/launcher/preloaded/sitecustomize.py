"""The parent of a launcher's tasks: imports once, then forks for each task.

Python imports a file of this name right before it runs the command it was
started for. In the parent that import never returns. In a task it does, and
Python goes on to run the command as if nothing had happened: `__main__`, -m,
-c, `sys.path[0]` and tracebacks are Python's own doing.

What a task would have found out by importing, it must still find out. So what
was imported is hidden until the task imports it, too; what the imports have
printed is printed then; and a task that has by then changed a variable which
the imports have read starts over, as a new program (`_Imported`).

Needs the standard library only, in any environment that has the modules; see
launcher/parent.py for the other end.
"""

import contextlib
import ctypes
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import re
import resource
import signal
import socket
import sys
import threading
import traceback
import warnings
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(__file__)
# Holds, as JSON, what parent.py says to the parent.
_VARIABLE = "TFDISTILL_PARENT"
# Read when TensorFlow, Keras, NumPy and what they load are imported; all but
# the variables that name a task.
_READ_BY_IMPORTS = re.compile(
    r"(?!TF_CONFIG$)(TF|KERAS|XLA|JAX|OMP|KMP|GOMP|MKL|OPENBLAS|NPY|CUDA|HDF5"
    r"|NVIDIA|GRPC|PROTOCOL_BUFFERS|ABSL)_\w+|MPL\w+|HOME"
)
_ASSIGNED = re.compile(
    r"""os\.environ(?:\[|\.setdefault\()["'](\w+)["'](?:\]\s*=|,)\s*["']([^"'\\]*)["']"""
)
_IMPORTS_MODULE = re.compile(
    r"^\s*(?:import|from) (?:tensorflow|keras|tfdistill)", re.MULTILINE
)
# Name of the threads that TensorFlow starts once it has opened a device.
_DEVICE_THREAD = "tf_"
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14


class _Imported(importlib.abc.Loader):
    """Finds what the parent has imported, once a task imports it."""

    def __init__(
        self,
        packages: list[str],
        *,
        read: dict[str, str],
        set_: dict[str, str],
        filters: list[Any],
        printed: bytes,
    ) -> None:
        """Hides packages, which are in the order of their imports.

        `read` are the variables as the imports have read them, `set_` those
        that they have set, `filters` those of warnings before them, and
        `printed` is what they have written.
        """
        self._packages = packages
        self._read = read
        self._set = set_
        self._printed = printed
        self._cwd = os.getcwd()
        self._log_bytes = os.fstat(1).st_size
        self._argv, self._environ = list(sys.orig_argv), dict(os.environ)
        self._modules = {
            name: module
            for name, module in sys.modules.items()
            if name.partition(".")[0] in packages
        }
        self._specs = {n: self._modules[n].__spec__ for n in packages}
        for name in self._modules:
            del sys.modules[name]
        # Each filter stands before those that were there already.
        added = len(warnings.filters) - len(filters)
        self._filters = warnings.filters[: max(0, added)]
        _filter_warnings(filters)
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds one of the modules, for Python's import."""
        if name not in self._packages:
            return None
        if _read_by_imports(os.environ, but=self._set) != self._read:
            self._start_over()
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: Any) -> ModuleType:
        """Returns the module that was found."""
        if self._printed:
            os.write(2, self._printed)
            self._printed = b""
        os.environ.update(self._set)
        _filter_warnings([*self._filters, *warnings.filters])
        self._filters = []
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Shows the package, and those that may have been needed for it."""
        spec: Any = module.__spec__
        number = self._packages.index(spec.name) + 1
        # Python has just written its own over it.
        module.__spec__ = self._specs[spec.name]
        shown, self._packages = self._packages[:number], self._packages[number:]
        for name, found in self._modules.items():
            if name.partition(".")[0] in shown:
                sys.modules.setdefault(name, found)
        if not self._packages:
            sys.meta_path.remove(self)

    def _start_over(self) -> None:
        """Runs the command again, in this process, without the parent's help.

        It has not done much so far. What it has written to its log is taken
        back, as it will be written again.
        """
        with contextlib.suppress(OSError):
            os.ftruncate(1, self._log_bytes)
        with contextlib.suppress(OSError):
            os.chdir(self._cwd)
        os.execve(sys.executable, self._argv, self._environ)


def _filter_warnings(filters: list[Any]) -> None:
    with warnings.catch_warnings():
        pass  # Has Python look at the filters again, also below.
    warnings.filters[:] = filters  # type: ignore[index]


def _read_by_imports(environ: Any, *, but: Any = ()) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if _READ_BY_IMPORTS.fullmatch(name) and name not in but
    }


class _Parent:
    """What the parent does, from its plan to the fork of a task."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._control = socket.socket(fileno=plan["fd"])
        self._control.set_inheritable(False)
        self._packages: list[str] = []
        self._filters: list[Any] = []
        self._read: dict[str, str] = {}
        self._set: dict[str, str] = {}
        self._printed = b""
        keeper = pathlib.Path(_HERE).with_name("keeper.py")
        spec = importlib.util.spec_from_file_location("keeper", keeper)
        if spec is None or spec.loader is None:
            raise ImportError(f"{keeper} is missing")
        self._keeper = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._keeper)

    def import_all(self) -> None:
        """Imports what the plan names, and tells the launcher how it went."""
        if self._plan["dies_with"]:
            self._keeper.die_with(self._plan["dies_with"])
        # As the command's own imports will find them.
        sys.path.insert(0, self._plan["path"])
        os.environ.update(self._assigned())
        before = dict(os.environ)
        self._filters = list(warnings.filters)
        gc.disable()  # It would look through a million objects, for nothing.
        failed = []
        for name in self._plan["preload"]:
            try:
                module = importlib.import_module(name)
                # A package may load what is behind its names on first use.
                if "__getattr__" in vars(module):
                    for public in module.__all__:
                        getattr(module, public)
            except Exception as error:
                failed.append(f"{name}: {error!r}")
                continue
            head = name.partition(".")[0]
            if head not in self._packages:
                self._packages.append(head)
        sys.path.remove(self._plan["path"])
        self._set = {
            name: value
            for name, value in os.environ.items()
            if before.get(name) != value
        }
        self._read = _read_by_imports(before, but=self._set)
        sys.stdout.flush()
        sys.stderr.flush()
        self._printed = os.pread(1, os.fstat(1).st_size, 0)
        gc.enable()
        gc.collect()
        gc.freeze()  # Pages of what is never collected stay shared.
        hello = {"failed": failed, "unfit": _unfit()}
        self._control.send(json.dumps(hello).encode())

    def _assigned(self) -> dict[str, str]:
        """Variables that the script sets before it imports, if that is plain.

        A guess that spares a task from starting over. What the script has
        really set is compared once it imports.
        """
        try:
            text = pathlib.Path(self._plan["script"] or "").read_text()
        except (OSError, ValueError):
            return {}
        first_import = _IMPORTS_MODULE.search(text)
        head = text[: first_import.start()] if first_import else ""
        return _read_by_imports(dict(_ASSIGNED.findall(head)))

    def serve(self) -> None:
        """Forks for each request; returns in the tasks, and only there."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Reaps the keepers.
        while True:
            word, fds, _, _ = socket.recv_fds(self._control, 16, 3)
            if not word:
                os._exit(0)
            with warnings.catch_warnings():
                # Other threads: OpenBLAS and jemalloc, which expect a fork.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                self._control.close()
                self._start_task(*fds)
                return
            for fd in fds:
                os.close(fd)

    def _start_task(self, request_fd: int, fd: int, log_fd: int) -> None:
        """Becomes a keeper, then its task; returns in the task."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.close(log_fd)
        with open(request_fd, encoding="utf-8") as file:
            request = json.load(file)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                _title(
                    ["tfdistill-keeper", *request["command"]],
                    request["environ"],
                )
                who = self._keeper.Keeper(fd).fork()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        if who == "keeper":
            os._exit(0)
        self._make_fresh(request)

    def _make_fresh(self, request: dict[str, Any]) -> None:
        """Makes this process what a new program would be."""
        command, environ = request["command"], request["environ"]
        os.umask(request["umask"])
        for number, limits in request["limits"]:
            resource.setrlimit(number, tuple(limits))
        os.sched_setaffinity(0, request["cores"])
        signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
        os.environ.clear()
        os.environ.update(environ)
        sys.orig_argv[:] = command
        sys.argv[1:] = command[len(command) - request["num_arguments"] :]
        _title(command, environ)
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.seed()
        if processes := sys.modules.get("multiprocessing.process"):
            processes.current_process().authkey = os.urandom(32)
        with contextlib.suppress(AttributeError):
            threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
        _Imported(
            self._packages,
            read=self._read,
            set_=self._set,
            filters=self._filters,
            printed=self._printed,
        )


def _unfit() -> str:
    """Returns why no task can be forked from this process; empty if it can."""
    if threading.active_count() > 1:
        names = ", ".join(t.name for t in threading.enumerate()[1:])
        return f"a preloaded module has started a thread ({names})"
    for path in pathlib.Path("/proc/self/task").glob("*/comm"):
        if path.read_text().startswith(_DEVICE_THREAD):
            return "a preloaded module has run an operation of TensorFlow"
    return ""


# Kept for good: the kernel reads it whenever somebody looks at the process.
_titles: list[Any] = []


def _title(command: list[str], environ: dict[str, str]) -> None:
    """Shows, in /proc and so in `ps`, a command and environment as started.

    A kernel without CONFIG_CHECKPOINT_RESTORE goes on to show the parent's.
    """
    parts = [os.fsencode(part) + b"\0" for part in command]
    pairs = [os.fsencode(f"{k}={v}") + b"\0" for k, v in environ.items()]
    text = b"".join(parts + pairs)
    buffer = ctypes.create_string_buffer(text, len(text))
    begin = ctypes.addressof(buffer)
    middle = begin + len(b"".join(parts))
    fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2]
    stat = ["", "", "", *fields.split()]  # Numbered as in proc(5).
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    places = [
        *(int(stat[number]) for number in (26, 27, 45, 46, 47)),
        libc.sbrk(0),
        int(stat[28]),
        *(begin, middle, middle, begin + len(text)),
        0,
    ]
    # struct prctl_mm_map; no new auxiliary vector, the same executable.
    prctl_mm_map = b"".join(n.to_bytes(8, sys.byteorder) for n in places)
    prctl_mm_map += b"\0\0\0\0\xff\xff\xff\xff"
    done = libc.prctl(
        _PR_SET_MM,
        _PR_SET_MM_MAP,
        ctypes.c_char_p(prctl_mm_map),
        ctypes.c_ulong(len(prctl_mm_map)),
        ctypes.c_ulong(0),
    )
    if done == 0:
        _titles[:] = [buffer]


def _run(plan: dict[str, Any]) -> None:
    """Becomes a parent; returns in its tasks, and only there."""
    if not plan["checked"]:
        # It is certain now that this file is loaded, so that the command
        # itself can be started without being run.
        plan["checked"] = True
        os.environ[_VARIABLE] = json.dumps(plan)
        os.set_inheritable(plan["fd"], True)
        os.execvp(plan["command"][0], plan["command"])
    if plan["pythonpath"] is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = plan["pythonpath"]
    try:
        own = _Parent(plan)
        absent = _import_others()
        own.import_all()
        own.serve()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if absent is not None:
        raise absent


def _import_others() -> ImportError | None:
    """Imports the file of this name that Python would have found instead.

    Returns what says that there is none, which Python does not mind.
    """
    sys.path.remove(_HERE)
    sys.path_importer_cache.pop(_HERE, None)
    del sys.modules["sitecustomize"]
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        error.__traceback__ = None
        return error
    return None


if _VARIABLE in os.environ:
    _run(json.loads(os.environ.pop(_VARIABLE)))
