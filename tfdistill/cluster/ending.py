"""How a task ends when it gets SIGTERM, whatever it is at.

TensorFlow swallows the signal if several workers train, and while Python
waits in C++ no handler of Python's runs. So the signal's number goes into a
socket, as `signal.set_wakeup_fd` does at once, and a thread that reads there
ends the process with exit code 75, worth a retry:

- at once, if there is nothing to save;
- within a `deferred()` block as soon as the block says `finish()`, at a step's
  end, after which the training resumes from a backup of that step; but no later
  than `GRACE_SECS` after the signal.

Only code that holds Python's lock for as long, such as another library's C,
defers it; a launcher that sends SIGKILL after SIGTERM ends that, too.

A handler that the program has installed itself is left in charge, and put back
if TensorFlow has replaced it.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Iterator
from collections.abc import Mapping
from typing import NoReturn

from tfdistill.cluster import signs

# Less than what launchers give: our own waits 5 s before SIGKILL.
GRACE_SECS = 4.0

_requested = threading.Event()
_finished = threading.Event()
_num_deferring = 0
# The descriptor that signals are written to. No socket object, which Python
# would close, and warn of, while the process ends: until then it must hear.
_listening: list[int] = []


class _Fork(threading.local):
    mask: set[int] | None = None


_fork = _Fork()


def lost_task(error: BaseException) -> str:
    """Returns what TensorFlow knows of a task that is gone, else nothing.

    Args:
        error: What has ended a training.
    """
    # Else nothing has imported it.
    if not type(error).__module__.startswith("tensorflow."):
        return ""
    import tensorflow as tf

    lost = (
        tf.errors.AbortedError,
        tf.errors.DeadlineExceededError,
        tf.errors.UnavailableError,
    )
    if not isinstance(error, lost):
        return ""
    return str(error.message.splitlines()[0])


def requested() -> bool:
    """Whether the task has been asked to end, and is about to.

    True only within `deferred()`: everywhere else it has ended by then.
    """
    return _requested.is_set()


def install(
    environ: Mapping[str, str] | None = None, *, always: bool = False
) -> bool:
    """Makes SIGTERM end this task, if a launcher has started it.

    Call it again after TensorFlow has set up several workers, which installs a
    handler in C that Python does not see. Returns whether it does: not outside
    the main thread, not if the program has its own handler, and not without
    `TF_CONFIG` or `TFDISTILL_GROUP`, as in a notebook, unless `always`.
    """
    environ = os.environ if environ is None else environ
    is_launched = environ.get("TF_CONFIG") or environ.get("TFDISTILL_GROUP")
    if not (is_launched or always):
        return False
    if threading.current_thread() is not threading.main_thread():
        return False
    found = signal.getsignal(signal.SIGTERM)
    if found not in (signal.SIG_DFL, None, _do_nothing):
        signal.signal(signal.SIGTERM, found)
        return False
    if not _listening and not _listen():
        return False
    signal.signal(signal.SIGTERM, _do_nothing)
    return True


def _before_fork() -> None:
    # A signal to the child must not reach its parent by the socket they share.
    if _listening:
        block = signal.SIG_BLOCK
        _fork.mask = signal.pthread_sigmask(block, {signal.SIGTERM})


def _unblock() -> None:
    if _fork.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)
        _fork.mask = None


def _leave_child_alone() -> None:
    """A forked process has no such thread, and ends as ever."""
    if _listening:
        signal.set_wakeup_fd(-1)
        os.close(_listening.pop())
        if signal.getsignal(signal.SIGTERM) is _do_nothing:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_unblock,
    after_in_child=_leave_child_alone,
)


def _do_nothing(number: int, frame: types.FrameType | None) -> None:
    """Only with a handler in Python is the signal's number passed on."""


def _listen() -> bool:
    """Starts the thread that hears of the signal; False if another does."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    earlier = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if earlier != -1:  # An event loop's, say.
        signal.set_wakeup_fd(earlier)
        reader.close()
        writer.close()
        return False
    _listening.append(writer.detach())
    threading.Thread(
        target=_wait, args=[reader], name="tfdistill-preemption", daemon=True
    ).start()
    return True


def _wait(reader: socket.socket) -> None:
    while (
        signal.SIGTERM not in reader.recv(4096)
        # The program may have its own handler for a while.
        or signal.getsignal(signal.SIGTERM) is not _do_nothing
    ):
        pass
    _requested.set()
    if _num_deferring:
        _finished.wait(GRACE_SECS)
    _end()


def _end() -> NoReturn:
    done = "at the end of a step" if _finished.is_set() else "at once"
    leave(signs.EXIT_RETRY, f"SIGTERM: this task ends {done}.")


def leave(code: int, message: str) -> NoReturn:
    """Ends this process, which a normal exit would leave waiting for others."""
    print(f"tfdistill: {message}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Lets what is in progress come to a good end when SIGTERM arrives.

    The block asks `requested()` now and then, and says `finish()`.
    """
    global _num_deferring
    _num_deferring += 1
    try:
        yield
    finally:
        _num_deferring -= 1
        if requested():
            finish()


def finish() -> NoReturn:
    """Ends this task, as all is saved that can be."""
    _finished.set()
    _end()


def limit_from_env(name: str, default: float) -> float:
    """Reads a limit in seconds from the environment; 0 means no limit."""
    text = os.environ.get(name, "")
    try:
        secs = float(text) if text else default
    except ValueError:
        secs = -1.0
    if not 0 <= secs < float("inf"):
        raise ValueError(
            f"{name} must be a number of seconds >= 0 (0: no limit); received "
            f"{text!r}."
        )
    return secs
