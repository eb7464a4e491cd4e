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

import sys

# What Python itself has loaded by now, it has loaded for every command.
_LOADED = frozenset(sys.modules)

# ruff: noqa: E402
import _thread
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
import tempfile
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
    r"(?!TF_CONFIG$)(TF|KERAS|XLA|JAX|OMP|KMP|GOMP|MKL|OPENBLAS|NPY|NUMPY|CUDA"
    r"|HDF5|NVIDIA|TPU|GRPC|PROTOCOL_BUFFERS|ABSL|SCIPY|SKLEARN|JOBLIB|LOKY"
    r"|NUMEXPR|NUMBA|PANDAS|PILLOW|FSSPEC)_\w+|(MPL|MATPLOTLIB)\w+|HOME"
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


class _Part:
    """What one import of the parent's has brought.

    Attributes:
        modules: Those that it has loaded, by name.
        needed: Earlier parts of which it has used a module.
        set: Variables that it has set.
        printed: What it has written.
    """

    def __init__(self, earlier: "list[_Part]", packages: set[str]) -> None:
        """Begins the import; `packages` are those that it may be about."""
        self._earlier, self._packages = earlier, packages
        self._loaded = set(sys.modules)
        self._environ = dict(os.environ)
        self._filters = list(warnings.filters)
        self._printed = len(_written())

    def end(self) -> None:
        """Takes in what there is now that was not there before."""
        self.modules = {
            name: module
            for name, module in sys.modules.items()
            if name not in self._loaded
            and name.partition(".")[0] in self._packages
        }
        used = {
            id(value)
            for module in self.modules.values()
            for value in list(getattr(module, "__dict__", {}).values())
            if type(value) is ModuleType
        }
        self.needed: list[_Part] = []
        for part in self._earlier:
            if any(id(module) in used for module in part.modules.values()):
                self.needed += [*part.needed, part]
        self.set = {
            name: value
            for name, value in os.environ.items()
            if self._environ.get(name) != value
        }
        found = list(warnings.filters)
        old = [n for n, one in enumerate(found) if one in self._filters] or [0]
        self._first, self._last = found[: old[0]], found[old[-1] + 1 :]
        self.printed = _written()[self._printed :]

    def repeat_effects(self) -> None:
        """Does what the import has done besides loading modules."""
        os.write(2, self.printed)
        os.environ.update(self.set)
        _filter_warnings([*self._first, *warnings.filters, *self._last])


class _Imported(importlib.abc.Loader):
    """Finds what the parent has imported, once a task imports it."""

    def __init__(
        self, parts: list[_Part], *, read: dict[str, str], filters: list[Any]
    ) -> None:
        """Hides parts, which are in the order of their imports.

        `read` are the variables as the imports have read them, `filters` those
        of warnings before them.
        """
        self._set = {name for part in parts for name in part.set}
        self._read = read
        self._cwd = os.getcwd()
        self._log = os.fstat(1)
        self._argv, self._environ = list(sys.orig_argv), dict(os.environ)
        # What is hidden still; what a hidden module is to its package; and the
        # specs that Python writes its own over.
        self._parts = {name: part for part in parts for name in part.modules}
        self._attributes: list[tuple[_Part, Any, str, ModuleType]] = []
        self._specs: dict[str, Any] = {}
        for name, part in self._parts.items():
            self._hide(name, part)
        _filter_warnings(filters)
        sys.meta_path.insert(0, self)

    def _hide(self, name: str, part: _Part) -> None:
        module = part.modules[name]
        self._specs[name] = getattr(module, "__spec__", None)
        sys.modules.pop(name, None)
        package, _, child = name.rpartition(".")
        other = self._parts.get(package, part)
        if other is not part:
            owner = other.modules[package]
            if vars(owner).get(child) is module:
                delattr(owner, child)
                self._attributes.append((part, owner, child, module))

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds one of the modules, for Python's import."""
        if name not in self._parts:
            return None
        if _read_by_imports(os.environ, but=self._set) != self._read:
            self._start_over()
        spec = importlib.machinery.ModuleSpec(name, self)
        if real := self._specs[name]:
            spec.origin, spec.has_location = real.origin, real.has_location
            spec.submodule_search_locations = real.submodule_search_locations
        return spec

    def create_module(self, spec: Any) -> ModuleType:
        """Returns the module that was found."""
        return self._parts[spec.name].modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Shows all that was imported with it, and what that needs."""
        spec: Any = module.__spec__
        # Python has just written its own over it.
        module.__spec__ = self._specs[spec.name]
        part = self._parts[spec.name]
        for shown in (*part.needed, part):
            if any(self._parts.get(name) is shown for name in shown.modules):
                shown.repeat_effects()
                self._show(shown)
        if not self._parts:
            sys.meta_path.remove(self)

    def _show(self, part: _Part) -> None:
        for name, module in part.modules.items():
            sys.modules.setdefault(name, module)
            del self._parts[name]
        for owned, owner, child, module in self._attributes:
            if owned is part:
                setattr(owner, child, module)

    def _start_over(self) -> None:
        """Runs the command again, in this process, without the parent's help.

        It has not done much so far. What it has written to its log is taken
        back, as it will be written again.
        """
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(1), self._log):
                os.ftruncate(1, self._log.st_size)
                os.lseek(1, self._log.st_size, os.SEEK_SET)
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
        self._parts: list[_Part] = []
        self._filters: list[Any] = []
        self._read: dict[str, str] = {}
        # What was changed, and printed, before the command's own start.
        self._site: dict[str, str | None] = {}
        self._greeting = b""
        keeper = pathlib.Path(_HERE).with_name("keeper.py")
        spec = importlib.util.spec_from_file_location("keeper", keeper)
        if spec is None or spec.loader is None:
            raise ImportError(f"{keeper} is missing")
        self._keeper = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._keeper)
        self._own = {n.partition(".")[0] for n in sys.modules.keys() - _LOADED}

    def note_site(self) -> None:
        """Notes what .pth files and the user's sitecustomize.py have done."""
        given = _given()
        for name in given.keys() | os.environ.keys():
            if name not in ("PYTHONPATH", _VARIABLE):
                if os.environ.get(name) != given.get(name):
                    self._site[name] = os.environ.get(name)
        self._greeting = _written()

    def import_all(self) -> None:
        """Imports what the plan names, and tells the launcher how it went."""
        if self._plan["dies_with"]:
            self._keeper.die_with(self._plan["dies_with"])
        # As the command's own imports will find them.
        path = [] if sys.flags.safe_path else [self._plan["path"]]
        sys.path[:0] = path
        os.environ.update(self._assigned())
        before = dict(os.environ)
        self._filters = list(warnings.filters)
        collects = gc.isenabled()
        gc.disable()  # It would look through a million objects, for nothing.
        missing: list[str] = []
        unfit = self._shadowed() if path else ""
        if not unfit:
            missing, unfit = self._import(self._plan["preload"])
        if path:
            sys.path.remove(*path)
        names = {name for part in self._parts for name in part.set}
        self._read = _read_by_imports(before, but=names)
        if collects:
            gc.enable()
        gc.collect()
        gc.freeze()  # Pages of what is never collected stay shared.
        hello = {"missing": missing, "unfit": unfit or _unfit()}
        self._control.send(json.dumps(hello).encode())
        if hello["unfit"]:
            os._exit(0)

    def _import(self, names: list[str]) -> tuple[list[str], str]:
        """Returns what there is none of, and why this process is unfit."""
        heads = {name.partition(".")[0] for name in names}
        missing: list[str] = []
        # What packages load on the first use of a name comes after all else.
        for act in (importlib.import_module, _load_rest):
            for name in [one for one in names if one not in missing]:
                part = _Part(self._parts, heads)
                try:
                    act(name)
                except Exception as error:
                    absent = getattr(error, "name", None) or "."
                    if not f"{name}.".startswith(f"{absent}."):
                        # What it has left half done a task would find so.
                        return [], f"{name} cannot be imported: {error!r}"
                    missing.append(name)
                    continue
                part.end()
                self._parts = [*self._parts, part]
        return missing, ""

    def _shadowed(self) -> str:
        """Returns why the command's own imports would find others.

        This file has imported modules of Python's library, before files of the
        same names beside the script could stand in for them.
        """
        beside = {name.partition(".")[0] for name in _files(self._plan["path"])}
        found = sorted((self._own & beside) - set(sys.builtin_module_names))
        return f"the command has its own {', '.join(found)}" if found else ""

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
        for name, value in self._site.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        sys.orig_argv[:] = command
        sys.argv[1:] = command[len(self._plan["command"]) :]
        _title(command, environ)
        tempfile.tempdir = None  # It was found by the parent's variables.
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.seed()
        if processes := sys.modules.get("multiprocessing.process"):
            processes.current_process().authkey = os.urandom(32)
        with contextlib.suppress(AttributeError):
            threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
        os.write(2, self._greeting)
        _Imported(self._parts, read=self._read, filters=self._filters)


def _load_rest(name: str) -> None:
    """Loads what a module loads on the first use of a name."""
    module = sys.modules[name]
    if "__getattr__" in vars(module):
        for public in getattr(module, "__all__", ()):
            getattr(module, public)


def _given() -> dict[str, str]:
    """Returns the environment that this process was started with."""
    text = pathlib.Path("/proc/self/environ").read_bytes()
    pairs = [part.partition(b"=") for part in text.split(b"\0") if part]
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _written() -> bytes:
    """Returns all that this process has written so far."""
    sys.stdout.flush()
    sys.stderr.flush()
    return os.pread(1, os.fstat(1).st_size, 0)


def _files(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _unfit() -> str:
    """Returns why no task can be forked from this process; empty if it can."""
    if _thread._count():
        names = ", ".join(t.name for t in threading.enumerate()[1:])
        return f"a preloaded module has started a thread ({names or '?'})"
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
        environ = {**_given(), _VARIABLE: json.dumps(plan)}
        os.set_inheritable(plan["fd"], True)
        with contextlib.suppress(OSError):  # What .pth files have printed.
            os.ftruncate(1, os.lseek(1, 0, os.SEEK_SET))
        os.execvpe(plan["command"][0], plan["command"], environ)
    try:
        if plan["pythonpath"] is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = plan["pythonpath"]
        own = _Parent(plan)
        absent = _import_others()
        own.note_site()
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
