"""Tests that a fork of a parent is what `python` would have started.

The parents here import two small modules, but for the last tests, which import
TensorFlow.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.cases import starts
from tests.cases import tasks
from tfdistill.launcher import parent as parent_lib

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout_secs(60),
    pytest.mark.usefixtures("no_process_left"),
]
PRELOAD = ("shown", "colorsys")
# What the parents import, and the user's command perhaps.
SHOWN = """
import os, warnings
print("shown is imported")
SEEN = os.environ.get("TF_SEEN")
warnings.simplefilter("always", UserWarning)
warnings.simplefilter("always", BytesWarning, append=True)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = starts.Start(tmp_path, preload=PRELOAD)
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
        ("-c", starts.DUMP, "-c", "x"),
    ],
    ids=["script", "options", "module", "code"],
)
def test_a_program_finds_the_same(start, words):
    start.write("dump.py", starts.DUMP)
    start.write("package/__init__.py", "")
    start.write("package/dump.py", starts.DUMP)
    found = []
    for method in parent_lib.METHODS:
        odd = os.fsdecode(b"\xff")  # No text in any encoding.
        process = start(sys.executable, *words, method=method, ODD=odd)
        assert starts.finish(process) == 0, process.log.read_text()
        assert process.method == method
        lines = sorted(process.log.read_text().splitlines())
        assert lines == ["error", "out", "printed at exit"]
        text = pathlib.Path("found.json").read_text()
        found.append(json.loads(text.replace(str(process.log), "LOG")))
    forked, spawned = found
    for name, expected in spawned.items():
        assert forked[name] == expected, name


@pytest.mark.parametrize(
    "text, exit_code",
    [
        ("print(1)\nx = = 2\n", 1),
        ("import shown, sys; sys.exit(75)", 75),
        ("import os, shown; os.abort()", -6),
        ("import atexit, os\natexit.register(print, 1)\nos._exit(3)", 3),
    ],
)
def test_a_program_ends_the_same(start, text, exit_code):
    start.write("script.py", text)
    forked, spawned = start.both(sys.executable, "script.py")
    assert forked == spawned
    assert forked[0] == exit_code


def test_tasks_draw_different_random_numbers_but_share_their_environment(start):
    text = (
        "import random, multiprocessing as m\n"
        "print(random.random(), m.current_process().authkey.hex())"
    )
    processes = [start(*code(text)) for _ in range(3)]
    assert [starts.finish(process) for process in processes] == [0] * 3
    logs = [process.log.read_text().split(" ") for process in processes]
    assert all(len(set(column)) == 3 for column in zip(*logs, strict=True))
    assert len({process.chosen for process in processes}) == 1


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


@pytest.mark.parametrize("path", [None, "site", ":site"])
def test_the_users_own_sitecustomize_and_path(start, path):
    """Also one that traces all lines, as for a report of coverage."""
    start.write(
        "site/sitecustomize.py",
        """
import atexit, os, sys
print("site", os.environ.pop("GONE"))
os.environ["TF_SEEN"] = "site"
lines = []
def trace(frame, event, arg):
    if frame.f_code.co_filename.endswith("script.py"):
        lines.append(frame.f_lineno)
    return trace
sys.settrace(trace)
atexit.register(lambda: print(lines))
""",
    )
    start.write(
        "script.py",
        "import os, sys\nprint(sys.path, sys.modules.get('sitecustomize'))\n"
        "import shown\nprint(shown.SEEN, list(os.environ.items()))\n",
    )
    env = {"PYTHONPATH": path, "GONE": "1"}
    forked, spawned = start.both(sys.executable, "script.py", **env)
    assert forked == spawned


UNFIT = {
    "thread": (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=[99], daemon=True).start()\n"
    ),
    "exits": "import os; os._exit(5)\n",
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_a_parent_cannot_import_a_task_still_can(start, name):
    start.write(f"{name}.py", UNFIT[name])
    for _ in range(4):
        process = start(*code("print('ran')"), preload=("json", name))
        assert starts.finish(process) == 0
        assert process.method == "spawn"
        assert process.log.read_text() == "ran\n"
    assert process.chosen is None  # It was tried twice.
    assert any("forks no more tasks" in text for text in start.news())


@pytest.mark.parametrize(
    "words",
    [
        "exec {} -I",
        "unset PYTHONPATH; exec {}",
        "{}",  # The program is a child of what was started.
    ],
)
def test_an_interpreter_that_does_not_load_the_hook(start, words):
    script = f'#!/bin/sh\n{words.format(sys.executable)} "$@"\n'
    start.write("bin/python", script)
    pathlib.Path("bin/python").chmod(0o755)
    process = start("bin/python", "-c", "open('runs', 'a').write('x')")
    assert starts.finish(process) == 0
    assert process.method == "spawn"
    assert pathlib.Path("runs").read_text() == "x"  # Once.


WAIT = code("import signal; signal.pause()")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_parent_lost_before_it_is_ready(start, number):
    start.write("slow.py", "import time; time.sleep(60)")
    processes = [start(*code("1"), preload=("slow",)) for _ in "ab"]
    time.sleep(0.3)
    assert all(process.pid is None for process in processes)
    os.kill(processes[0].chosen.pid, number)
    assert [starts.finish(process) for process in processes] == [0, 0]
    assert all(process.method == "spawn" for process in processes)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_parent_lost_while_tasks_run(start, number):
    first = start(*WAIT)
    pid = starts.running(first)
    psutil.Process(first.chosen.pid).send_signal(number)
    second = start(*WAIT)
    starts.running(second)
    time.sleep(0.2)
    first.read()
    assert first.exit_code is None and tasks.alive(pid)
    assert first.method == "fork"
    third = start(*WAIT)
    starts.running(third)
    assert third.method == "fork" and third.chosen is not first.chosen
    assert any("forks no more tasks" in text for text in start.news())


@pytest.mark.parametrize("act", ["request_stop", "kill"])
@pytest.mark.parametrize("when", ["imports", "asked"])
def test_a_task_that_is_ended_before_it_was_started(start, act, when):
    process = start(*WAIT, ready=when == "asked")
    getattr(process, act)()
    expected = -signal.SIGTERM if act == "request_stop" else -signal.SIGKILL
    assert starts.finish(process) == expected


def test_killed_keeper_takes_a_forked_task_along(start):
    process = start(*WAIT)
    pid = starts.running(process)
    psutil.Process(pid).parent().kill()
    assert starts.finish(process) == -signal.SIGKILL
    tasks.until(lambda: not tasks.alive(pid))


@pytest.mark.parametrize("number", [0, int(signal.SIGSTOP)])
def test_launcher_killed_by_sigkill(start, number):
    launcher = f"""
import os, signal
from tfdistill.launcher import parent, task_process
command, started = {WAIT!r}, []
with parent.keep() as parents, open("log", "ab") as file:
    for _ in "ab":
        chosen = parents.of(command, os.environ, preload=("json",))
        process = task_process.TaskProcess(
            command, env=os.environ, log_file=file, parent=chosen)
        while not process.pid:
            process.read()
        assert process.method == "fork"
        started.append(process)
    os.kill(chosen.pid, {number})
    print(chosen.pid, *(p.pid for p in started), flush=True)
    signal.pause()
"""
    process = subprocess.Popen(code(launcher), stdout=subprocess.PIPE)
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 3 and all(tasks.alive(pid) for pid in pids)
    process.kill()
    process.communicate()
    tasks.until(lambda: not any(tasks.alive(pid) for pid in pids))


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
    made = starts.Start(
        tmp_path_factory.mktemp("real"), preload=parent_lib.PRELOAD
    )
    made.script = str(made.directory / made.write("real.py", REAL))
    yield made
    made.close()


def _run_real(real, what):
    command = sys.executable, real.script, what
    process = real(*command)
    assert starts.finish(process) == 0, process.log.read_text()
    assert process.method == "fork"
    return process.log.read_text()


def test_tensorflow_of_two_tasks_draws_different_numbers(real):
    first, second = (
        _run_real(real, "random").splitlines()[-1].split(";") for _ in "ab"
    )
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_an_operation_of_tensorflow_makes_a_parent_unfit(real):
    real.write("operation.py", "import tensorflow as tf\ntf.ones([2]) + 1\n")
    script = str(real.directory / real.write("plain.py", "print('ran')"))
    process = real(sys.executable, script, preload=("operation",))
    assert starts.finish(process) == 0
    assert process.method == "spawn"
    assert any("has run an operation" in text for text in real.news())


def test_a_setting_of_tensorflow_made_first_thing_by_the_script(real):
    if "oneDNN custom" not in _run_real(real, "nothing"):
        pytest.skip("TensorFlow does not name oneDNN on this processor")
    log = _run_real(real, "setting")
    assert "oneDNN custom" not in log and log.count("begins") == 1
