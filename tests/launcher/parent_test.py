"""Tests that a fork of a parent is what `python` would have started.

The parents here import two small modules, but for the last tests, which import
TensorFlow.
"""

import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.cases import tasks
from tfdistill.launcher import parent as parent_lib
from tfdistill.launcher import task_process

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout_secs(60),
    pytest.mark.usefixtures("no_process_left"),
]
PRELOAD = ("shown", "colorsys")
# What the parents import, and the user's command perhaps.
SHOWN = (
    "import os\nprint('shown is imported')\nSEEN = os.environ.get('TF_SEEN')\n"
)
# Prints what a program can find out of its start.
DUMP = """
import atexit, ctypes, faulthandler, json, os, resource, signal, sys, tempfile
import threading, warnings
def text(name):
    with open(f"/proc/self/{name}", errors="surrogateescape") as file:
        return file.read()
def option(number):
    value = ctypes.c_int()
    ctypes.CDLL(None).prctl(number, ctypes.byref(value))
    return value.value
frame, depth = sys._getframe(), 0
while frame := frame.f_back:
    depth += 1
status = dict(line.split(":", 1) for line in text("status").splitlines())
main = sys.modules["__main__"]
found = {
    "argv": [sys.argv, sys.orig_argv, sys.executable, text("cmdline")],
    "main": [str(getattr(main, name, None)) for name in (
        "__name__", "__file__", "__package__", "__doc__", "__cached__")],
    "spec": getattr(main.__spec__, "name", None),
    "names": sorted(vars(main).keys() - {"__warningregistry__"}),
    "path": sys.path, "flags": [sys.flags, sys.warnoptions, sys._xoptions],
    "environ": [list(os.environ.items()), text("environ"), os.getcwd()],
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
    "depth": depth, "filters": [str(one) for one in warnings.filters],
    "faulthandler": faulthandler.is_enabled(),
    "threads": [len(os.listdir("/proc/self/task")),
                threading.main_thread().native_id == os.getpid()],
    "cores": [os.nice(0), sorted(os.sched_getaffinity(0))],
    "name": text("comm"), "dies with": option(2), "reaps": option(37),
    "hidden": ["shown" in sys.modules, atexit._ncallbacks(), tempfile.tempdir],
}
json.dump(found, open("found.json", "w"))
atexit.register(print, "printed at exit")
print("out"); print("error", file=sys.stderr)
"""


class Start:
    """Starts commands in a directory of their own, as forks or programs."""

    def __init__(self, directory):
        self.directory = directory
        self.parents = parent_lib.Parents()
        self.started = []

    def __call__(
        self, *command, method="fork", preload=PRELOAD, ready=False, **env
    ):
        env = {k: v for k, v in (os.environ | env).items() if v is not None}
        chosen = None
        if method == "fork":
            chosen = self.parents.of(command, env, preload=preload)
        if ready:
            tasks.until(lambda: chosen.read() or chosen.is_ready)
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
            assert process.method == method, self.news()
            found.append((code, process.log.read_text()))
        return found

    def write(self, name, text):
        path = self.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return name

    def news(self):
        return [text for text, _ in self.parents.news()]

    def close(self):
        parents = {p.chosen for p in self.started} - {None}
        for process in self.started:
            process.hang_up()
        for process in self.started:
            process.kill()
        self.parents.close()
        assert not any(tasks.alive(one.pid) for one in parents)


def finish(process):
    def closed():
        if process.fileno() >= 0:
            select.select([process], [], [], 0.05)
        process.read()
        return process.closed

    tasks.until(closed)
    return process.exit_code


def running(process):
    """Waits until the task runs; returns its pid."""
    tasks.until(lambda: process.read() or process.pid)
    return process.pid


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Start(tmp_path)
    made.write("shown.py", SHOWN)
    yield made
    made.close()


def code(text, *arguments):
    return sys.executable, "-c", text, *arguments


@pytest.mark.parametrize(
    "words",
    [
        ("dump.py", "-a", "b c"),
        ("-u", "-B", "-Werror::UserWarning", "-X", "faulthandler", "./dump.py"),
        ("-m", "package.dump", "x"),
        ("-O", "-W", "ignore", "package", "-m"),
        ("-c", DUMP, "-c", "x"),
    ],
    ids=["script", "options", "module", "directory", "code"],
)
def test_a_program_finds_the_same(start, words):
    start.write("dump.py", DUMP)
    start.write("package/__init__.py", "")
    start.write("package/__main__.py", DUMP)
    start.write("package/dump.py", DUMP)
    found = []
    for method in parent_lib.METHODS:
        odd = os.fsdecode(b"\xff")  # No text in any encoding.
        process = start(sys.executable, *words, method=method, ODD=odd)
        assert finish(process) == 0, process.log.read_text()
        assert process.method == method
        log = process.log.read_text()
        assert sorted(log.split("\n")) == [
            "",
            "error",
            "out",
            "printed at exit",
        ]
        text = pathlib.Path("found.json").read_text()
        found.append(json.loads(text.replace(str(process.log), "LOG")))
    forked, spawned = found
    for name, expected in spawned.items():
        assert forked[name] == expected, name


@pytest.mark.parametrize(
    "text, exit_code",
    [
        (None, 2),
        ("print(1)\nx = = 2\n", 1),
        ("def f():\n    raise ValueError('x')\nprint(1)\nf()\n", 1),
        ("raise SystemExit('told')", 1),
        ("import shown, sys; sys.exit(75)", 75),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os, shown; os.abort()", -6),
        ("import atexit, os\natexit.register(print, 1)\nos._exit(3)", 3),
    ],
)
def test_a_program_ends_the_same(start, text, exit_code):
    if text is not None:
        start.write("script.py", text)
    forked, spawned = start.both(sys.executable, "script.py")
    assert forked == spawned
    assert forked[0] == exit_code


def test_limits_and_umask_are_those_of_the_launcher_at_the_start(start):
    text = "import os, resource as r; print(os.umask(0), r.getrlimit(4))"
    finish(start(*code(text)))
    before = os.umask(0o027)
    try:
        (_, forked), (_, spawned) = start.both(*code(text))
    finally:
        os.umask(before)
    assert forked == spawned
    assert forked.startswith("23 ")


def test_tasks_draw_different_random_numbers_but_share_their_environment(start):
    text = (
        "import random, multiprocessing as m\n"
        "print(random.random(), m.current_process().authkey.hex())"
    )
    processes = [start(*code(text)) for _ in range(3)]
    assert [finish(process) for process in processes] == [0] * 3
    logs = [process.log.read_text().split(" ") for process in processes]
    assert all(len(set(column)) == 3 for column in zip(*logs, strict=True))
    assert len({process.chosen for process in processes}) == 1


def test_output_of_imports_is_in_each_log_when_they_are_imported(start):
    text = "print(1, flush=True); import shown; print(shown.__spec__.name)"
    expected = [(0, "1\nshown is imported\nshown\n")] * 2
    assert start.both(*code(text)) == expected
    assert start.both(*code(text)) == expected


def test_a_variable_set_before_an_import_has_its_effect(start):
    # Neither is a plain assignment, which the parent would read in advance.
    start.write(
        "script.py",
        "import os, sys\nprint('first', sys.argv, flush=True)\n"
        "os.environ.update(TF_SEEN='7')\nos.chdir('/')\n"
        "import shown\nprint(shown.SEEN, os.environ['TF_SEEN'])\n",
    )
    forked, spawned = start.both(sys.executable, "script.py", "a")
    assert forked == spawned
    assert forked[1].endswith("\n7 7\n")


def test_what_a_script_plainly_sets_the_parent_sets_as_well(start):
    start.write(
        "script.py",
        "import os\nos.environ['TF_SEEN'] = '7'\nopen('runs', 'a').write('x')\n"
        "import tensorflow\nimport shown\nprint(shown.SEEN)\n",
    )
    start.write("tensorflow.py", "")
    options = {"preload": ("shown", "tensorflow")}
    forked, spawned = start.both(sys.executable, "script.py", **options)
    assert forked == spawned
    assert pathlib.Path("runs").read_text() == "xx"  # Not started over.


def test_filters_of_warnings_stand_as_after_an_import(start):
    start.write(
        "shown.py",
        "import warnings as w\nw.simplefilter('always', UserWarning)\n"
        "w.simplefilter('always', BytesWarning, append=True)\n",
    )
    text = (
        "import warnings as w; w.simplefilter('error')\n"
        "import shown; print(*w.filters, sep='\\n')"
    )
    forked, spawned = start.both(*code(text))
    assert forked == spawned


def test_what_the_command_has_not_imported_it_does_not_see(start):
    """Of packages that need each other, and of what one loads later."""
    start.write("base.py", "import os\nprint('base')\nos.environ['BASE'] = '1'")
    start.write(
        "late/__init__.py",
        "__all__ = ['part']\ndef __getattr__(name):\n"
        "    import importlib\n"
        "    return importlib.import_module('late.' + name)\n",
    )
    start.write("late/part.py", "import base, shown\nprint('part')\n")
    start.write("above.py", "import late\nprint('above')\n")
    text = """
import importlib.util, os, sys
def look():
    names = "base", "late", "late.part", "shown", "above"
    print(*(name in sys.modules for name in names), os.environ.get("BASE"))
print(importlib.util.find_spec("base").origin)
import above; look()
print("part" in vars(above.late)); above.late.part; look()
import base; del sys.modules["base"]; import base
print(base.__spec__.name, above.late.part is sys.modules["late.part"])
"""
    preload = ("base", "shown", "late", "above", "colorsys")
    forked, spawned = start.both(*code(text), preload=preload)
    assert forked == spawned


def test_processes_and_threads_of_a_task(start):
    start.write(
        "script.py",
        "import multiprocessing as m, shown, subprocess, sys, threading\n"
        "thread = threading.Thread(target=print, args=['thread'])\n"
        "thread.start(); thread.join()\n"
        "if __name__ == '__main__':\n"
        "    for method in ('fork', 'spawn', 'forkserver'):\n"
        "        sys.stdout.flush()\n"
        "        made = m.get_context(method).Process(target=print, args=[1])\n"
        "        made.start(); made.join()\n"
        "    subprocess.run([sys.executable, '-c', 'import shown'])\n",
    )
    (forked, log), (spawned, expected) = start.both(sys.executable, "script.py")
    assert forked == spawned == 0
    assert sorted(log.split("\n")) == sorted(expected.split("\n"))


@pytest.mark.parametrize("path", [None, "", "site", ":site", "site:"])
def test_the_users_own_sitecustomize_and_path(start, path):
    start.write(
        "site/sitecustomize.py",
        "import os\nprint('site', os.environ.pop('GONE'))\n"
        "os.environ['TF_SEEN'] = 'site'\n",
    )
    text = (
        "import os, sys; print(sys.path, sys.modules.get('sitecustomize'))\n"
        "import shown; print(shown.SEEN, list(os.environ.items()))"
    )
    env = {"PYTHONPATH": path, "GONE": "1"}
    forked, spawned = start.both(*code(text), **env)
    assert forked == spawned


def test_coverage_of_a_task(start):
    """As a package does that traces from the start, if a variable says so."""
    start.write(
        "site/sitecustomize.py",
        "import atexit, os, sys, threading\nlines = []\n"
        "def trace(frame, event, arg):\n"
        "    if frame.f_code.co_filename.endswith('script.py'):\n"
        "        lines.append(frame.f_lineno)\n"
        "    return trace\n"
        "def save():\n"
        "    with open(f'lines.{os.getpid()}', 'w') as file:\n"
        "        print(*lines, file=file)\n"
        "if 'COVERAGE_PROCESS_START' in os.environ:\n"
        "    atexit.register(save); sys.settrace(trace)\n",
    )
    start.write("script.py", "def f():\n    return 1\nf()\nimport shown\n")
    env = {"PYTHONPATH": "site", "COVERAGE_PROCESS_START": "x"}
    start.both(sys.executable, "script.py", **env)
    found = [path.read_text() for path in pathlib.Path().glob("lines.*")]
    assert len(found) == 2 and found[0] == found[1] != "\n"


UNFIT = {
    "thread": (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=[99], daemon=True).start()\n"
    ),
    "raises": "raise OSError('no such thing')\n",
    "exits": "import os; os._exit(5)\n",
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_a_parent_cannot_import_a_task_still_can(start, name):
    start.write(f"{name}.py", UNFIT[name])
    for _ in range(4):
        process = start(*code("print('ran')"), preload=("json", name))
        assert finish(process) == 0
        assert process.method == "spawn"
        assert process.log.read_text() == "ran\n"
    assert process.chosen is None  # It was tried twice.
    assert any("forks no more tasks" in text for text in start.news())


def test_a_module_that_does_not_exist_is_left_out(start):
    preload = ("no_such_module", "json", "json.no_such_module")
    forked, _ = start.both(*code("import json, sys"), preload=preload)
    assert forked == (0, "")
    (text,) = start.news()
    assert "has imported json in" in text and "no no_such_module" in text


def test_a_file_beside_the_script_stands_in_for_pythons_own(start):
    start.write("resource.py", "print('mine')")
    start.write("script.py", "import resource")
    process = start(sys.executable, "script.py")
    assert finish(process) == 0
    assert process.log.read_text() == "mine\n"


@pytest.mark.parametrize(
    "head, words",
    [
        ('exec {python} "$@"', ["-I"]),
        ('exec {python} "$@"', ["-E"]),
        ('exec {python} "$@"', ["-S"]),
        ('unset PYTHONPATH; exec {python} "$@"', []),
        ('exec {python} -I "$@"', []),
        ('{python} "$@"', []),
        ("exit 4", []),
    ],
)
def test_an_interpreter_that_does_not_load_the_hook(start, head, words):
    start.write(
        "bin/python", f"#!/bin/sh\n{head.format(python=sys.executable)}\n"
    )
    pathlib.Path("bin/python").chmod(0o755)
    command = ("bin/python", *words, "-c", "open('runs', 'a').write('x')")
    process = start(*command)
    finish(process)
    assert process.method == "spawn"
    if head != "exit 4":
        assert pathlib.Path("runs").read_text() == "x"


@pytest.mark.parametrize("command", [["/no/python", "-c", "1"], None])
def test_a_parent_that_cannot_be_started(start, command):
    process = start(*(command or code("1#" + '"' * 70_000)))
    assert finish(process) == (127 if command else 0)
    assert "no process can be made" in start.news()[0]


WAIT = "import time; print('runs', flush=True); time.sleep({})"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_parent_lost_before_it_is_ready(start, number):
    start.write("slow.py", "import time; time.sleep(60)")
    processes = [start(*code(WAIT.format(0)), preload=("slow",)) for _ in "ab"]
    time.sleep(0.3)
    assert all(process.pid is None for process in processes)
    os.kill(processes[0].chosen.pid, number)
    assert [finish(process) for process in processes] == [0, 0]
    assert all(process.method == "spawn" for process in processes)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_parent_lost_while_tasks_run(start, number):
    first = start(*code(WAIT.format(600)))
    pid = running(first)
    psutil.Process(first.chosen.pid).send_signal(number)
    second = start(*code(WAIT.format(600)))
    running(second)
    time.sleep(0.2)
    first.read()
    assert first.exit_code is None and tasks.alive(pid)
    assert first.method == "fork"
    third = start(*code(WAIT.format(600)))
    running(third)
    assert third.method == "fork" and third.chosen is not first.chosen
    assert any("forks no more tasks" in text for text in start.news())


@pytest.mark.parametrize("act", ["request_stop", "hang_up", "kill"])
@pytest.mark.parametrize("when", ["imports", "asked"])
def test_a_task_that_is_ended_before_it_was_started(start, act, when):
    process = start(
        *code("open('runs', 'a').write('x'); import signal; signal.pause()"),
        ready=when == "asked",
    )
    getattr(process, act)()
    expected = -signal.SIGTERM if act == "request_stop" else -signal.SIGKILL
    assert finish(process) == expected
    if act != "request_stop":
        assert not pathlib.Path("runs").exists()


def test_killed_keeper_takes_a_forked_task_along(start):
    process = start(*code(WAIT.format(600)))
    pid = running(process)
    psutil.Process(pid).parent().kill()
    assert finish(process) == -signal.SIGKILL
    tasks.until(lambda: not tasks.alive(pid))


@pytest.mark.parametrize("stopped", [False, True])
def test_launcher_killed_by_sigkill(start, stopped):
    launcher = f"""
import os, sys, time
from tfdistill.launcher import parent, task_process
command, started = {code(WAIT.format(600))!r}, []
with parent.keep() as parents, open("log", "ab") as file:
    for _ in "ab":
        chosen = parents.of(command, os.environ, preload=("json",))
        process = task_process.TaskProcess(
            command, env=os.environ, log_file=file, parent=chosen)
        while not process.pid:
            process.read()
        assert process.method == "fork"
        started.append(process)
    if {stopped}:
        os.kill(chosen.pid, 19)
    print(chosen.pid, *(p.pid for p in started), flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen(code(launcher), stdout=subprocess.PIPE)
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 3 and all(tasks.alive(pid) for pid in pids)
    process.kill()
    process.communicate()
    tasks.until(lambda: not any(tasks.alive(pid) for pid in pids))


def test_the_parent_holds_nothing_of_its_tasks(start):
    def held(process):
        here = psutil.Process(process.chosen.pid)
        return here.num_fds(), here.num_threads(), here.children()

    process = start(*code("import shown"), ready=True)
    before = held(process)
    for _ in range(3):
        last = start(*code("import shown"))
        finish(last)
    finish(process)
    tasks.until(lambda: not held(process)[2])
    assert held(last) == before and last.chosen is process.chosen


def test_many_tasks_at_once_do_not_look_like_a_hang(start, monkeypatch):
    monkeypatch.setattr(parent_lib, "ANSWER_SECS", 1.0)
    text = "import time\nend = time.time() + 4\nwhile time.time() < end: pass"
    start(*code(text), ready=True)
    for _ in range(40):
        start(*code(text))
    tasks.until(lambda: all(p.read() or p.pid for p in start.started))
    assert {process.method for process in start.started} == {"fork"}


# One script, hence one parent, for all that needs TensorFlow.
REAL = """
import os, sys
print("begins", flush=True)
what = sys.argv[1]
if what == "setting":
    os.environ.update(TF_ENABLE_ONEDNN_OPTS="0")
import keras
import tensorflow as tf
if what == "random":
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    data = tf.data.Dataset.range(9).shuffle(9).map(
        lambda x: x, num_parallel_calls=2).batch(9)
    print(float(model.weights[0][0, 0]), float(tf.random.normal([])),
          *(str(b.numpy()) for b in data), sep=";")
else:
    print(tf.reduce_sum(tf.ones([2])).numpy(), keras.config.backend())
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    made = Start(tmp_path_factory.mktemp("real"))
    made.script = str(made.directory / made.write("real.py", REAL))
    yield made
    made.close()


def _run_real(real, what):
    command = sys.executable, real.script, what
    process = real(*command, preload=parent_lib.PRELOAD)
    assert finish(process) == 0, process.log.read_text()
    assert process.method == "fork"
    return process.log.read_text()


def test_tensorflow_of_two_tasks_draws_different_numbers(real):
    first, second = (
        _run_real(real, "random").splitlines()[-1].split(";") for _ in "ab"
    )
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_a_setting_of_tensorflow_made_first_thing_by_the_script(real):
    log = _run_real(real, "setting")
    assert "oneDNN custom" not in log and log.count("begins") == 1
    assert "oneDNN custom" in _run_real(real, "nothing")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
