"""Tests that a fork of a parent does what a new program would do.

The parents here import a small module, but for the last tests, which import
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
from tests.cases import tiers
from tests.cases import waits
from tfdistill.launcher import parent as parent_lib

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]
PRELOAD = ("shown",)
# What the parents import, and the user's command perhaps.
SHOWN = """
import os
SEEN = os.environ.get("SEEN")
os.environ["SET_BY_SHOWN"] = "1"
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
        ("-u", "-B", "./dump.py"),
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
        ("x = = 2\n", 1),
        ("import shown, sys; sys.exit(75)", 75),
        ("def f():\n    raise ValueError(7)\nf()", 1),
        ("import os, shown; os.abort()", -6),
        ("raise KeyboardInterrupt", -2),
    ],
)
def test_a_program_ends_the_same(start, text, exit_code):
    start.write("script.py", text)
    (forked, log), (spawned, expected) = start.both(sys.executable, "script.py")
    assert forked == spawned == exit_code
    assert log == expected  # No line of the parent's own code.


def test_a_script_that_is_not_there_is_reported_by_python(start):
    process = start(sys.executable, "absent.py")
    assert (starts.finish(process), process.method) == (2, "spawn")


@pytest.mark.parametrize(
    "change",
    ["update(SEEN='7')", "update(WANDB_X='7')", "pop('HOME')", "get('')"],
)
@pytest.mark.parametrize("how", ["import shown", "shown = load('shown')"])
def test_a_variable_set_before_an_import_has_its_effect(start, change, how):
    start.write(
        "script.py",
        "import os, sys\nfrom importlib import import_module as load\n"
        "print('first', sys.argv, flush=True)\n"
        f"os.environ.{change}\nos.chdir('/')\n"
        f"{how}\n"
        "print(shown.SEEN, os.environ['SET_BY_SHOWN'], shown.__spec__.name)\n",
    )
    (code, log), expected = start.both(sys.executable, "script.py", "a")
    starts_over = "changed before an import" in log
    assert starts_over == ("SEEN" in change or "HOME" in change)
    lines = log.splitlines()
    if starts_over:  # What was printed before stands there twice.
        assert lines.pop(0) == lines[1]
        del lines[0]
    assert (code, lines) == (expected[0], expected[1].splitlines())


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


def test_a_child_of_a_task_and_what_the_parent_prints(start):
    start.write("said.py", SHOWN + "print('by the import')\n")
    start.write(
        "script.py",
        "import multiprocessing as m, os\n"
        "print('runs', flush=True)\n"
        "def child():\n"
        "    os.environ['SEEN'] = '7'\n"
        "    import said\n"
        "    print('child', said.SEEN)\n"
        "made = m.get_context('fork').Process(target=child)\n"
        "made.start(); made.join()\n",
    )
    buffered = {"PYTHONUNBUFFERED": None}
    process = start(sys.executable, "script.py", preload=("said",), **buffered)
    assert starts.finish(process) == 0 and process.method == "fork"
    first, warning, last = process.log.read_text().splitlines()
    assert (first, last) == ("runs", "child None") and "too late" in warning


UNFIT = {
    "thread": (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=[99], daemon=True).start()\n",
        "has started a thread",
    ),
    "exits": ("import os; os._exit(5)\n", "it ended with 5: no message"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_a_parent_cannot_import_a_task_still_can(start, name):
    text, why = UNFIT[name]
    start.write(f"{name}.py", text)
    first = start(*code("print('ran')"), preload=("json", name))
    second = start(*code("print('ran')"), preload=("json", name))
    for process in (first, second):
        assert starts.finish(process) == 0
        assert process.method == "spawn"
        assert process.log.read_text() == "ran\n"
    assert why in waits.until(lambda: first.chosen.failure)
    third = start(*code("print('ran')"), preload=("json", name))
    assert third.chosen is None  # It is not tried again.
    assert starts.finish(third) == 0


WAIT = code("import signal; signal.pause()")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_parent_lost_before_it_is_ready(start, number, monkeypatch):
    if number == signal.SIGSTOP:
        monkeypatch.setattr(parent_lib, "LIMIT_SECS", 1.0)
    start.write("slow.py", "import time; time.sleep(60)")
    processes = [start(*code("1"), preload=("slow",)) for _ in "ab"]
    time.sleep(0.3)
    assert all(process.pid is None for process in processes)
    os.kill(processes[0].chosen.pid, number)
    assert [starts.finish(process) for process in processes] == [0, 0]
    assert all(process.method == "spawn" for process in processes)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_parent_lost_while_tasks_run(start, number, monkeypatch):
    first = start(*WAIT)
    pid = starts.running(first)
    monkeypatch.setattr(parent_lib, "LIMIT_SECS", 1.0)
    psutil.Process(first.chosen.pid).send_signal(number)
    second = start(*WAIT)
    starts.running(second)
    time.sleep(0.2)
    first.read()
    assert first.exit_code is None and tasks.alive(pid)
    assert (first.method, second.method) == ("fork", "spawn")
    third = start(*WAIT)
    starts.running(third)
    assert third.chosen is None and third.method == "spawn"
    assert first.chosen.failure


@pytest.mark.parametrize("act", ["request_stop", "kill"])
@pytest.mark.parametrize("when", ["imports", "asked"])
def test_a_task_that_is_ended_before_it_was_started(start, act, when):
    if when == "asked":
        starts.running(start(*WAIT))
    process = start(*WAIT)
    getattr(process, act)()
    expected = -signal.SIGTERM if act == "request_stop" else -signal.SIGKILL
    assert starts.finish(process) == expected


def test_killed_keeper_takes_a_forked_task_along(start):
    process = start(*WAIT)
    pid = starts.running(process)
    psutil.Process(pid).parent().kill()
    assert starts.finish(process) == -signal.SIGKILL
    waits.until(lambda: not tasks.alive(pid))


@pytest.mark.parametrize("number", [0, int(signal.SIGSTOP)])
def test_launcher_killed_by_sigkill(start, number):
    launcher = f"""
import os, signal
from tfdistill.launcher import parent, task_process
command, started = {WAIT!r}, []
with parent.keep(), open("log", "ab") as file:
    for _ in "ab":
        chosen = parent.get(command, os.environ, preload=("json",))
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
    waits.until(lambda: not any(tasks.alive(pid) for pid in pids))


# Of one script, as one that sets a variable, and one of LATE.
REAL = """
import os, sys
if sys.argv[1] == "late":
    exec(sys.argv[2])
    sys.exit()
import numpy
import tfdistill
tfdistill.Cluster.from_env()
print("begins", flush=True)
if sys.argv[1] == "setting":
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
import tensorflow as tf
import keras
model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
data = tf.data.Dataset.range(9).shuffle(9).map(
    lambda x: x, num_parallel_calls=2).batch(9)
print(float(model.weights[0][0, 0]), float(tf.random.normal([])),
      numpy.random.rand(), *(str(b.numpy()) for b in data), sep=";")
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    made = starts.Start(
        tmp_path_factory.mktemp("real"), preload=parent_lib.PRELOAD
    )
    script = str(made.directory / made.write("real.py", REAL))
    # The same for all tests, so that one parent serves them.
    env = {"TF_CPP_MIN_LOG_LEVEL": "0", "PYTEST_CURRENT_TEST": None}
    yield lambda *arguments: made(sys.executable, script, *arguments, **env)
    made.close()


@pytest.mark.slow("tasks that import TensorFlow")
def test_tasks_with_tensorflow(real):
    """They draw different numbers, and a setting of the script counts."""
    processes = [real(what) for what in ("a", "b", "setting")]
    logs = []
    for process in processes:
        assert starts.finish(process) == 0, process.log.read_text()
        assert process.method == "fork"
        logs.append(process.log.read_text())
    drawn = [log.splitlines()[-1].split(";") for log in logs]
    assert all(len(set(one)) == 3 for one in zip(*drawn, strict=True))
    assert [log.count("begins") for log in logs] == [1, 1, 2]
    assert "oneDNN custom" not in logs[2]


# Keras finds packages that its parent has not imported. In the first program
# nobody has used one; the others fail where Keras does not find its own.
LATE = {
    "none": "import inspect; inspect.getmodule(keras.Model)\n"
    "assert found() == set(), found()",
    "pandas": "import pandas\nx = pandas.DataFrame({'a': [0.0, 1.0]})\n"
    "model.fit(x, x['a'], validation_split=0.5)\n"
    "assert model.predict(x).shape == (2, 1)\n"
    "from keras.src.trainers.data_adapters import array_slicing as cut\n"
    "assert pandas.DataFrame in cut.ARRAY_TYPES and cut.pandas is pandas",
    "sklearn": "made = keras.wrappers.SKLearnRegressor(model)\n"
    "assert made.fit(x, x).predict(x).shape == (2,)\n"
    "import sklearn\nassert isinstance(made, sklearn.base.BaseEstimator)",
    "matplotlib": "from keras import visualization\n"
    "images = np.zeros([2, 4, 4, 3])\n"
    "plot = visualization.plot_image_gallery\n"
    "plot(images, value_range=(0, 1), path=sys.argv[3])\n"
    "assert {'plot_image_gallery', '__name__'} <= set(dir(visualization))",
    "IPython": "import IPython\nfrom keras.src.saving import file_editor\n"
    "assert file_editor.ipython is IPython",
    "scipy": "import scipy.sparse\n"
    "from tensorflow.python.keras.engine import training_v1\n"
    "assert training_v1.issparse is scipy.sparse.issparse",
}
LATE_HEAD = f"""
import sys
def found():
    return {set(LATE)} & set(sys.modules)
import keras
import numpy as np
import tfdistill
model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones([2, 1])
assert found() == set(), found()
"""


@pytest.mark.parametrize("package", tiers.but_for(("none", "sklearn"), LATE))
@pytest.mark.slow("a task that imports scikit-learn after its start")
def test_a_task_finds_what_its_parent_has_left_out(real, tmp_path, package):
    text = LATE_HEAD + LATE[package]
    process = real("late", text, str(tmp_path / "shown.png"))
    assert starts.finish(process) == 0, process.log.read_text()
    assert process.method == "fork"


@pytest.mark.deep
def test_an_operation_of_tensorflow_makes_a_parent_unfit(start):
    start.write("operation.py", "import tensorflow as tf\ntf.ones([2]) + 1\n")
    process = start(*code("print('ran')"), preload=("operation",))
    assert starts.finish(process) == 0
    assert process.method == "spawn"
    failure = waits.until(lambda: process.chosen.failure)
    assert "has run an operation" in failure
