"""Labels of the other groups' students, from a server of each group."""

import os
from collections.abc import Sequence

import tensorflow as tf

import tfdistill
from launch import group_servers
from launch import recipes
from tfdistill import labels
from tfdistill import workload as workload_lib
from tfdistill.system import run_files

# Batches that are asked about at once, and answers that may wait for the step:
# enough to hide an answer's way behind a step, and few enough to stay fresh.
_NUM_AT_ONCE = 2


def clients(
    workload: workload_lib.Workload,
    cluster: tfdistill.Cluster,
    addresses: Sequence[str],
) -> list[labels.Teachers]:
    """Returns what asks each other group's server; none need answer yet.

    Raises OptionsError if nobody knows the servers' addresses.
    """
    if not cluster.peers:
        return []
    found = _addresses(cluster, addresses)
    # A server has no version, and no signature, until its group has exported.
    outputs = {"outputs": workload.model().output_shape[1:]}
    return [
        labels.Teachers(
            [found[peer]],
            name=run_files.group_name(peer),
            outputs=outputs,
            seed=workload.seed,
        )
        for peer in cluster.peers
    ]


def label(
    dataset: tf.data.Dataset, found: Sequence[labels.Teachers]
) -> tf.data.Dataset:
    """Adds what the servers predict of each batch."""
    for client in found:
        dataset = dataset.map(client, num_parallel_calls=_NUM_AT_ONCE)
    return dataset.prefetch(_NUM_AT_ONCE) if found else dataset


def _addresses(
    cluster: tfdistill.Cluster, addresses: Sequence[str]
) -> Sequence[str]:
    if cluster.uses_parameter_servers:
        raise recipes.OptionsError(
            "Recipes with parameter servers cannot ask servers for labels; "
            "received the method served. Use --method=codistill_shared, or "
            "train without parameter servers."
        )
    workdir = os.fspath(cluster.workdir or "")
    found = addresses or group_servers.addresses(workdir)
    if found is None:
        raise recipes.OptionsError(
            "The method served needs a server of each group; no launcher has "
            f"started servers for {workdir}. Run it with launch.local or "
            "launch.compare, which start them; or start launch.teach for each "
            "group and override "
            'method.addresses=["HOST:PORT", ...], in the order of the groups.'
        )
    if len(found) != cluster.num_groups:
        raise recipes.OptionsError(
            f"There must be a server for each of {cluster.num_groups} groups; "
            f"received addresses of {len(found)}."
        )
    return found
