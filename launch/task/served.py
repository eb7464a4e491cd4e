"""Labels of the other groups' students, from a server of each group."""

import os
from typing import Any

import keras
import tensorflow as tf

import tfdistill
from launch import group_servers
from launch.config import config as config_lib
from launch.task import students
from tfdistill import labels
from tfdistill.system import run_files

# Batches that are asked about at once, and answers that may wait for the step:
# enough to hide an answer's way behind a step, and few enough to stay fresh.
_NUM_AT_ONCE = 2


class ServedPeers:
    """The servers of the groups that this one learns from; perhaps none."""

    def __init__(
        self,
        config: config_lib.Config,
        cluster: tfdistill.Cluster,
        student: keras.Model,
    ) -> None:
        """Connects; no server needs to answer yet.

        Raises OptionsError if nobody knows the servers' addresses.
        """
        peers = students.peers_of(config, cluster)
        is_served = config.codistillation.by == "served" and peers
        found = _addresses(config, cluster) if is_served else ()
        most = config.exchange.max_staleness_steps
        self._peers = [
            labels.Teachers(
                [found[peer]],
                name=run_files.group_name(peer),
                outputs={"outputs": student.output_shape[1:]},
                max_age_steps=most if isinstance(most, int) else None,
                seed=config.data.seed,
            )
            for peer in (peers if is_served else ())
        ]

    def label(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Adds what the servers predict of each batch."""
        for peer in self._peers:
            dataset = dataset.map(peer, num_parallel_calls=_NUM_AT_ONCE)
        return dataset.prefetch(_NUM_AT_ONCE) if self._peers else dataset

    def described(self, status: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Adds what went over the network to the status of each teacher."""
        found = {peer.name: peer.status() for peer in self._peers}
        return [
            {**teacher, **_traffic(found[teacher["name"]])}
            if teacher["name"] in found
            else teacher
            for teacher in status
        ]

    def close(self) -> None:
        """Ends all connections."""
        for peer in self._peers:
            peer.close()


def _traffic(status: dict[str, Any]) -> dict[str, int]:
    """The same fields as of peers that send predictions."""
    (server,) = status["servers"]
    return {
        "bytes": server["received_bytes"],
        "sent_bytes": server["sent_bytes"],
        "num_answers": server["answers"],
        "num_missed": status["batches"] - server["answers"],
    }


def _addresses(
    config: config_lib.Config, cluster: tfdistill.Cluster
) -> tuple[str, ...]:
    if cluster.uses_parameter_servers:
        raise students.OptionsError(
            "Recipes with parameter servers cannot ask servers for labels; "
            'received codistillation.by="served". Override '
            "codistillation.by=versions, or train without parameter servers."
        )
    if config.codistillation.addresses:
        return config.codistillation.addresses
    workdir = os.fspath(cluster.workdir or "")
    found = group_servers.addresses(workdir)
    if found is None:
        raise students.OptionsError(
            'codistillation.by="served" needs a server of each group; received '
            f"no codistillation.addresses, and no launcher has started servers "
            f"for {workdir}. Run it with launch.local or launch.compare, which "
            "start them; or start launch.teach for each group and override "
            'codistillation.addresses=["HOST:PORT", ...], in the order of the '
            "groups."
        )
    if len(found) != cluster.num_groups:
        raise students.OptionsError(
            f"There must be a server for each of {cluster.num_groups} groups; "
            f"received addresses of {len(found)} from {workdir}."
        )
    return found
