"""Do TF_CONFIG and the TFDISTILL_ variables describe a task that can run?"""

import os
from collections.abc import Iterator
from collections.abc import Mapping

from tfdistill.cluster import identity
from tfdistill.doctor import check
from tfdistill.exchange import signing

ENVIRONMENT = "environment"
KEY = "key"
TENSORFLOW = "tensorflow"


def cluster_of(
    environ: Mapping[str, str],
) -> tuple[identity.Cluster | None, list[check.Result]]:
    """Reads the environment of this task; None if it describes no task."""
    try:
        cluster = identity.Cluster.from_env(environ)
    except ValueError as error:
        # "... must ...; received ...": the rest is the remedy.
        seen, _, remedy = str(error).partition(". ")
        remedy = remedy or "Correct that variable and start again."
        return None, [check.failed(ENVIRONMENT, seen, remedy)]
    results = [check.ok(ENVIRONMENT, _describe(cluster))]
    if cluster.num_groups > 1 and (
        cluster.exchange is None or "TFDISTILL_GROUP" not in environ
    ):
        results.append(
            check.failed(
                ENVIRONMENT,
                f"a run of {cluster.num_groups} groups needs an exchange to "
                "meet in, and TFDISTILL_GROUP, or every group would be group 0",
                "export TFDISTILL_EXCHANGE (or TFDISTILL_WORKDIR), a directory "
                "or URL that all groups reach, and TFDISTILL_GROUP, from 0 up.",
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


def _key(environ: Mapping[str, str], num_groups: int) -> check.Result:
    """Checks the key that versions are signed with; one group needs none."""
    try:
        signer = signing.signer_for("environment", environ)
    except ValueError as error:
        return check.failed(
            KEY,
            str(error),
            "openssl rand -hex 32 > key; chmod 600 key; then export "
            f"{signing.FILE_VARIABLE}=/path/to/key for every task of every "
            "group.",
        )
    if signer is not None:
        return check.ok(KEY, "a key is set: versions are signed and checked")
    if num_groups == 1:
        return check.skipped(KEY, "one group alone needs no key")
    return check.warning(
        KEY,
        "no key is set: versions are neither signed nor checked, and whoever "
        "can write to the exchange can teach this group",
        f"export {signing.FILE_VARIABLE} with the same key for every task of "
        "every group; launch.local makes one by itself.",
    )


def of_tensorflow() -> Iterator[check.Result]:
    """Imports TensorFlow and Keras, and looks at the devices."""
    import tensorflow as tf

    from tfdistill.system import keras_internals

    try:
        keras_internals.check_keras()
    except RuntimeError as error:
        yield check.failed(
            TENSORFLOW, str(error), "Install the versions named above."
        )
        return
    gpus = tf.config.list_physical_devices("GPU")
    seen = (
        f"TensorFlow {tf.__version__} sees {len(gpus)} GPUs and "
        f"{os.cpu_count()} cores"
    )
    if gpus or not os.path.exists("/dev/nvidia0"):
        yield check.ok(TENSORFLOW, seen)
        return
    yield check.warning(
        TENSORFLOW,
        f"{seen}, and this machine has an NVIDIA device",
        "pip install 'tensorflow[and-cuda]', and look at CUDA_VISIBLE_DEVICES "
        "and nvidia-smi; or ignore it to train on the CPU.",
    )
