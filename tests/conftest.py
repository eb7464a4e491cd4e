"""What every test relies on: a clean environment, limits and clean-up."""

import contextlib
import faulthandler
import gc
import os
import pathlib
import random
import re
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

import hypothesis
import psutil
import pytest
from _pytest import faulthandler as faulthandler_plugin

import launch as launch  # It registers the recipes of models/.
from tests.cases import waits

# A script, which trains when it is imported.
collect_ignore = ["programs/ordinary.py"]

# Before anything imports TensorFlow. What a shell or a launcher left behind
# must not decide what a test sees; only the place of the data is kept.
for _name in list(os.environ):
    if _name == "TF_CONFIG" or _name.startswith("TFDISTILL_"):
        if _name != "TFDISTILL_DATA":
            del os.environ[_name]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("MPLBACKEND", "agg")

# A busy machine draws slowly, which is no fault of what is drawn.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")

_TESTS = pathlib.Path(__file__).resolve().parent
_ROOT = _TESTS.parent
# Processes that tests start find this checkout, and the sitecustomize.py that
# shortens their start.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [
        str(_TESTS / "bare"),
        str(_ROOT),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
)
_LIBRARY = "tfdistill"
# Of tests that launch something: others do not depend on it.
_PARENT = f"{_LIBRARY}.launcher.parent"
# How long a process may take to end after its test.
END_WAIT_SECS = 60.0
# What makes progress may take as long as on the slowest machine.
_MOST_SECS = 2400.0
_LOOK_SECS = 30.0


@contextlib.contextmanager
def _limit(item: pytest.Item, phase: str) -> Iterator[None]:
    """Fails the phase of a test in which nothing happens any more."""
    watch = waits.Watch(
        f"{phase} of {item.nodeid}", most_secs=_MOST_SECS, own=True
    )
    in_c_secs = float(item.config.getini("faulthandler_timeout"))
    stderr = item.config.stash[faulthandler_plugin.fault_handler_stderr_fd_key]

    def look(signum: int, frame: Any) -> None:
        # Where Python has a turn, no C call has gone on for so long.
        faulthandler.dump_traceback_later(in_c_secs, file=stderr, exit=True)
        # pytest's own exception is no Exception: code under test that catches
        # those cannot swallow it.
        watch.look()

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_SECS, _LOOK_SECS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with _limit(item, "set-up"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with _limit(item, "call"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with _limit(item, "clean-up"):
        yield
    _note_cost(item)


_BEGAN: dict[str, tuple[float, float]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[bool | None]:
    _BEGAN[item.nodeid] = time.monotonic(), time.process_time()
    try:
        return (yield)
    finally:
        del _BEGAN[item.nodeid]


def _note_cost(item: pytest.Item) -> None:
    """Leaves in the junit what report.py needs to know of a test."""
    clock, processor = _BEGAN[item.nodeid]
    secs = time.monotonic() - clock
    if item.get_closest_marker("multiprocess") is None:
        # On a busy machine it waits for its turns, too.
        secs = min(secs, time.process_time() - processor)
    item.user_properties.append(("own_secs", f"{secs:.3f}"))
    for marker in map(item.get_closest_marker, ("deep", "slow")):
        if marker is not None:
            item.user_properties.append(("may_be_slow", str(marker.args)))


def _make_logical_devices() -> None:
    """Splits the CPU in two, which only works before TensorFlow's first op."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    if not tf.config.get_logical_device_configuration(cpu):
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2
        )


def _leave_data_as_written() -> None:
    """Keeps tf.data from tuning and rewriting pipelines in this process.

    Iterators of trainings that a test stopped go when garbage is collected,
    each after up to a minute; `data.without_autotune` says why. To rewrite a
    pipeline takes longer than most pipelines of tests run.
    """
    import tensorflow as tf
    from tensorflow.python.data.ops import dataset_ops

    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    # What each iterator passes its data set through.
    dataset_ops.DatasetV2._apply_debug_options = lambda dataset: (
        dataset.with_options(options)
    )


def _leave_graphs_as_written() -> None:
    """Keeps TensorFlow from rewriting the graphs of short trainings.

    That takes a quarter of their time.
    """
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": True}
    )


def _forget_garbage() -> None:
    """Collects garbage, and never looks through what is left again.

    What was imported, and what TensorFlow keeps of the tests so far, is none.
    """
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(
    collection_path: pathlib.Path, config: pytest.Config
) -> bool | None:
    """Spares `-m multiprocess` the imports of files without such a test."""
    if not config.option.markexpr.startswith("multiprocess"):
        return None
    if collection_path.suffix != ".py":
        return None
    return "mark.multiprocess" not in collection_path.read_text("utf-8") or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files with slow tests first: no core waits for one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    # Here no test has run yet, but every test module has been imported: without
    # TensorFlow among them, nothing is worth its import time.
    if session.items and "tensorflow" in sys.modules:
        _make_logical_devices()
        _leave_data_as_written()
        if not any(i.get_closest_marker("multiprocess") for i in session.items):
            # There, numbers are also those of tasks, which do rewrite them.
            _leave_graphs_as_written()
    _forget_garbage()


@pytest.fixture(scope="session")
def two_replicas() -> Any:
    """The one MirroredStrategy, over two logical CPU devices.

    One for the session: a second one's collectives take the instance keys of
    the first one's, and TensorFlow aborts both.
    """
    import tensorflow as tf

    _make_logical_devices()
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Any:
    """Returns the message with which a program refuses arguments, by code 2."""

    def message(main: Any, *arguments: object) -> str:
        with pytest.raises(SystemExit) as caught:
            main(list(map(str, arguments)))
        assert caught.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    return message


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets scripts of this process train on one of its two devices.

    Strategies of one process share the keys of their collectives: a second
    run with a model of another size would fail.
    """
    import tensorflow as tf

    import tfdistill

    monkeypatch.setattr(
        tfdistill, "make_strategy", lambda *_: tf.distribute.get_strategy()
    )


@pytest.fixture(autouse=True, scope="session")
def _kept_parents() -> Iterator[None]:
    """Lets the tasks of all tests be forks of the same few parents."""
    parent = sys.modules.get(_PARENT)
    if parent is None:  # No module of tests starts tasks.
        yield
        return
    # What names a test may differ, as what names a task may.
    pattern = f"{parent._OF_A_TASK.pattern}|{waits.TOKEN_NAME}"
    with pytest.MonkeyPatch.context() as patch, parent.keep():
        patch.setattr(parent, "_OF_A_TASK", re.compile(pattern))
        yield


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> Iterator[None]:
    """Keeps the collector's work for a test from growing with those before."""
    yield
    _forget_garbage()


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Gives each test the same seeds and Keras' own defaults."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "keras" in sys.modules:
        import keras

        keras.utils.set_random_seed(0)
    if absl_logging := sys.modules.get("absl.logging"):
        # While TensorFlow saves it shows fatal messages only. Of two threads
        # that save, the later one takes that for what it has to put back.
        absl_logging.set_verbosity(absl_logging.WARNING)
    yield
    if "keras" in sys.modules:
        import keras
        import tensorflow as tf

        keras.config.set_dtype_policy("float32")
        keras.config.set_floatx("float32")
        tf.config.run_functions_eagerly(False)
        if strategy := sys.modules.get("tfdistill.cluster.strategy"):
            # The default strategy is the same object in every test.
            strategy._CLUSTERS.clear()
        # Its full collection took a second and more late in a long run.
        keras.utils.clear_session(free_memory=False)


@pytest.fixture
def exchange(tmp_path: pathlib.Path) -> Any:
    """An empty exchange."""
    import tfdistill

    return tfdistill.Exchange(tmp_path / "exchange")


@pytest.fixture
def run_dir(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> pathlib.Path:
    """The directory of a launched run that this process is a task of."""
    monkeypatch.setenv("TFDISTILL_WORKDIR", str(tmp_path))
    monkeypatch.setenv("TFDISTILL_EXCHANGE", str(tmp_path / "exchange"))
    return tmp_path


@pytest.fixture
def start_again() -> Any:
    """What makes this process one that was started again.

    To it, the next `fit` with a directory is the first one.
    """
    from tfdistill.system import fits

    def forget() -> None:
        for known in (fits._ended, fits._failed, fits._trained, fits._known):
            known.clear()

    return forget


class _Clock:
    """Shows the time that it is set to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    """A clock that stands still until a test sets its `now`."""
    return _Clock()


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """The directory of the real data sets; skips where there is none."""
    given = os.environ.get("TFDISTILL_DATA")
    path = pathlib.Path(given) if given else _ROOT.parent / "shared" / "data"
    if not path.is_dir():
        if given:
            raise ValueError(
                f"TFDISTILL_DATA must be a directory; received {given!r}. "
                "Unset it to skip the tests that need data."
            )
        pytest.skip(f"needs the data sets: no {path}, TFDISTILL_DATA is unset")
    return path


def _forks() -> list[psutil.Process]:
    """Descendants of the kept parents, whose environment is these parents'."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any(word.endswith("fork_server.py") for word in child.cmdline()):
                found += child.children(recursive=True)
    return found


@pytest.fixture
def no_process_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that leaves a process behind, and ends that process.

    Processes are known by an environment variable which they inherit, so that
    those whose parent has died are found too.
    """
    token = uuid.uuid4().hex
    monkeypatch.setenv(waits.TOKEN_NAME, token)
    before = set(_forks())

    def started() -> list[psutil.Process]:
        return [*waits.marked(token), *(set(_forks()) - before)]

    yield
    _, left = psutil.wait_procs(started(), timeout=END_WAIT_SECS)
    left = started() if left else left
    names = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            names.append(f"{process.pid}: {' '.join(process.cmdline())}")
            process.kill()
    if names:
        pytest.fail("processes left behind:\n" + "\n".join(names))
