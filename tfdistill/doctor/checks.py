"""The checks of the doctor: variables, network, storage, TensorFlow.

Each yields results, and the first that is wrong says what to do.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import threading
import uuid
import warnings
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping

from tfdistill.cluster import identity
from tfdistill.cluster import rendezvous
from tfdistill.exchange import filesystem
from tfdistill.exchange import signing
from tfdistill.system import processes
from tfdistill.system import run_files
from tfdistill.system import untrusted

ENVIRONMENT = "environment"
KEY = "key"
TENSORFLOW = "tensorflow"
ADDRESS = "address"
REACH = "reach"
EXCHANGE = "exchange"
WORKDIR = "workdir"
TEACHERS = "teachers"
WORKERS = "workers"
_CONTENT = b"written by tfdistill doctor, and may be removed\n"
_REMEDY = (
    "Give the user that runs the tasks a directory and write permission there "
    "(mkdir -p, chown), and check for a full disk or quota (df -h, df -i). If "
    "the storage doesn't show new files, mount it without name caching (on "
    "NFS: lookupcache=positive), or use another."
)
OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
EXIT_FAILED = 1


@dataclasses.dataclass(frozen=True)
class Result:
    """What a check found; `remedy` is empty unless something is wrong."""

    status: str
    name: str
    seen: str
    remedy: str = ""


ok = functools.partial(Result, OK)
warning = functools.partial(Result, WARNING)
failed = functools.partial(Result, FAILED)
skipped = functools.partial(Result, SKIPPED)


@dataclasses.dataclass(frozen=True)
class Check:
    """A check to be made; `make` yields a result for each thing it looks at."""

    name: str
    make: Callable[[], Iterable[Result]]
    limit_secs: float
    remedy: str = "If this machine is just slow, raise --limit-secs."


def run(check: Check) -> Iterator[Result]:
    """Yields the results of a check.

    A storage that hangs cannot be interrupted: a check that does not end in
    time is reported, and ends the process.
    """
    timer = threading.Timer(check.limit_secs, _give_up, [check])
    timer.daemon = True
    timer.start()
    try:
        yield from check.make()
    except Exception as error:  # A doctor that breaks has found a fault.
        yield failed(
            check.name, f"{type(error).__name__}: {error}", check.remedy
        )
    finally:
        timer.cancel()


def _give_up(check: Check) -> None:
    seen = f"did not finish within {check.limit_secs:g} s"
    show(failed(check.name, seen, check.remedy))
    sys.stdout.flush()
    os._exit(EXIT_FAILED)


def show(result: Result) -> None:
    """Prints one result: its status, what was seen, and the remedy."""
    seen, remedy = (
        untrusted.one_line(text, max_chars=2000)
        for text in (result.seen, result.remedy)
    )
    print(f"{result.status:<7}  {result.name}: {seen}", flush=True)
    if remedy:
        print(f"         remedy: {remedy}", flush=True)


def cluster_of(
    environ: Mapping[str, str],
) -> tuple[identity.Cluster | None, list[Result]]:
    """Reads the environment of this task; None if it describes no task."""
    try:
        cluster = identity.Cluster.from_env(environ)
    except ValueError as error:
        # "... must ...; received ...": the rest is the remedy.
        seen, _, remedy = str(error).partition(". ")
        remedy = remedy or "Correct that variable and start again."
        return None, [failed(ENVIRONMENT, seen, remedy)]
    results = [ok(ENVIRONMENT, _describe(cluster))]
    if cluster.num_groups > 1 and (
        cluster.exchange is None or "TFDISTILL_GROUP" not in environ
    ):
        results.append(
            failed(
                ENVIRONMENT,
                f"a run of {cluster.num_groups} groups needs an exchange, and "
                "each group needs TFDISTILL_GROUP; without it, every group is "
                "group 0",
                "export TFDISTILL_EXCHANGE (or TFDISTILL_WORKDIR), a "
                "directory or URL that all groups can reach, and "
                "TFDISTILL_GROUP, numbered from 0.",
            )
        )
    return cluster, [*results, _key(environ, cluster.num_groups)]


def _describe(cluster: identity.Cluster) -> str:
    sizes = ", ".join(
        f"{len(hosts)} {name}" for name, hosts in cluster.spec.items()
    )
    where = f" at {cluster.address}" if cluster.address else ""
    peers = ", ".join(f"group {peer}" for peer in cluster.peers) or "none"
    return (
        f"group {cluster.group} of {cluster.num_groups}, {cluster.task_name}"
        f"{where}; its tasks: {sizes or 'this one'}; peers: {peers}; exchange: "
        f"{cluster.exchange or 'none'}"
    )


def _key(environ: Mapping[str, str], num_groups: int) -> Result:
    try:
        signer = signing.signer_for("environment", environ)
    except ValueError as error:
        return failed(
            KEY,
            str(error),
            "openssl rand -hex 32 > key; chmod 600 key; then export "
            f"{signing.FILE_VARIABLE}=/path/to/key for every task of every "
            "group.",
        )
    if signer is not None:
        return ok(KEY, "a key is set: versions are signed and checked")
    if num_groups == 1:
        return skipped(KEY, "a single group needs no key")
    return warning(
        KEY,
        "no key is set: versions are neither signed nor checked, and anyone "
        "who can write to the exchange can teach this group",
        f"export {signing.FILE_VARIABLE} with the same key for every task of "
        "every group; tfdistill run creates one for you.",
    )


def of_tensorflow() -> Iterator[Result]:
    """Imports TensorFlow and Keras, and looks at the devices."""
    import tensorflow as tf

    from tfdistill.system import keras_internals

    remedy = "Install the versions named above."
    try:
        with warnings.catch_warnings(action="error"):
            keras_internals.check_keras()
    except RuntimeError as error:
        yield failed(TENSORFLOW, str(error), remedy)
        return
    except UserWarning as newer:
        yield warning(TENSORFLOW, str(newer), remedy)
    gpus = tf.config.list_physical_devices("GPU")
    seen = (
        f"TensorFlow {tf.__version__} sees {len(gpus)} GPUs and "
        f"{os.cpu_count()} cores"
    )
    if gpus or not os.path.exists("/dev/nvidia0"):
        yield ok(TENSORFLOW, seen)
        return
    yield warning(
        TENSORFLOW,
        f"{seen}, and this machine has an NVIDIA device",
        "pip install 'tensorflow[and-cuda]', and check CUDA_VISIBLE_DEVICES "
        "and nvidia-smi. Ignore this to train on the CPU.",
    )


# TensorFlow's own words for two swapped addresses are a start that never ends,
# so all tasks meet at each one's address, as workers do at the chief's.
def of_group(
    cluster: identity.Cluster, *, wait_secs: float
) -> Iterator[Result]:
    """Checks this task's own address and its group's addresses."""
    if cluster.address is None:
        yield skipped(ADDRESS, "one task, without TF_CONFIG")
        return
    port = int(cluster.address.rpartition(":")[2])
    try:
        processes.listener(port).close()
    except OSError as error:
        yield failed(
            ADDRESS,
            f"{cluster.task_name} cannot listen on port {port}: "
            f"{error.strerror}",
            f"Find the process that uses it with `ss -ltnp 'sport = :{port}'` "
            "and stop it, such as a task of an earlier run; or choose another "
            "port, 1024 or higher, in every task's TF_CONFIG. Run the doctor "
            "before the tasks, not at the same time.",
        )
        return
    yield ok(ADDRESS, f"port {port} is free")
    if len(cluster.addresses) == 1:
        yield skipped(REACH, "a single task: no others to reach")
    else:
        yield from _meet_at_each_address(cluster, wait_secs)


def _meet_at_each_address(
    cluster: identity.Cluster, wait_secs: float
) -> Iterator[Result]:
    addresses = cluster.addresses
    good = []
    with concurrent.futures.ThreadPoolExecutor(len(addresses)) as pool:
        meetings = {
            host: pool.submit(
                rendezvous.meet,
                cluster,
                host=host,
                together=False,
                limit_secs=wait_secs,
            )
            for host in addresses
        }
        for host, meeting in meetings.items():
            try:
                meeting.result()
                good.append(host)
            except rendezvous.MissingWorkersError as error:
                yield failed(
                    REACH,
                    str(error),
                    "Run the doctor there at the same time (--wait-secs sets "
                    "how long this one waits). If it's running there, open "
                    f"its port in the firewall, or correct {addresses[host]} "
                    "in TF_CONFIG.",
                )
            except rendezvous.RefusedError as error:
                yield failed(
                    REACH,
                    str(error),
                    "Give all tasks of a group the same cluster in TF_CONFIG, "
                    "in the same order, the same TFDISTILL_GROUP and "
                    "TFDISTILL_NUM_GROUPS, and each its own index.",
                )
    if good:
        yield ok(REACH, f"connections work at {', '.join(good)}")


def of_storage(cluster: identity.Cluster) -> Iterator[Result]:
    """Checks exchange and workdir."""
    for name, root in (
        (EXCHANGE, cluster.exchange),
        (WORKDIR, cluster.workdir),
    ):
        if root is None:
            yield skipped(name, f"no {name} is set")
        else:
            yield of_root(root, name=name)


def of_workers(cluster: identity.Cluster) -> Iterator[Result]:
    """Yields what the group's log has of slow workers."""
    path = pathlib.Path(cluster.group_dir or os.curdir, run_files.METRICS)
    if cluster.group_dir is None or not path.is_file():
        return
    for line in untrusted.last_records(path)[-1:]:
        for text in line.get("slow_workers", ()):
            yield warning(
                WORKERS, text, "Check its host, its data and its callbacks."
            )


def of_root(
    root: str,
    *,
    name: str = EXCHANGE,
    file_system: filesystem.FileSystem | None = None,
) -> Result:
    """Writes, lists, renames, reads and removes a small directory.

    A `file_system` is used with `root` as it is.
    """
    try:
        if file_system is None:
            file_system, root = filesystem.for_root(root)
    except (ImportError, ValueError) as error:
        return failed(
            name,
            str(error),
            "Correct TFDISTILL_EXCHANGE, or install what its scheme needs.",
        )
    here, seen = root, root
    if isinstance(file_system, filesystem.LocalFileSystem):
        # The run creates missing directories; created here, they would stay.
        while not os.path.lexists(here):
            here = os.path.dirname(here)
            seen = f"{root}, which a run will create in {here}"
    path = f"{here}/.doctor-{uuid.uuid4().hex}"
    step = ""
    try:
        for next_step in _use(file_system, path):
            step = next_step
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            file_system.remove_tree(path)
        return failed(name, f"{seen}: could not {step}: {error}", _REMEDY)
    return ok(name, f"{seen}: wrote, renamed, read back and removed")


def _use(storage: filesystem.FileSystem, path: str) -> Iterator[str]:
    yield "make a directory"
    storage.make_dirs(f"{path}/a")
    yield "write"
    storage.write(f"{path}/a/file", [_CONTENT])
    final = f"{path}/a"
    if storage.renames_atomically:
        yield "rename"
        # If it cannot be, versions come file by file, the manifest last.
        if storage.move(final, f"{path}/b"):
            final = f"{path}/b"
    yield "list"
    names = storage.list_dir(final)
    if names != ["file"]:
        raise ValueError(f"it lists {names} after ['file'] was written")
    yield "read back"
    found = filesystem.read(storage, f"{final}/file", max_bytes=len(_CONTENT))
    if found != _CONTENT:
        raise ValueError(f"{len(found)} different bytes came back")
    yield "remove"
    storage.remove_tree(path)
