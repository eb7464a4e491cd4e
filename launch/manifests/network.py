"""How the tasks of a group find each other, and who else may reach them."""

from typing import Any

from launch.manifests import pods
from launch.manifests import run as run_lib


def service(run: run_lib.Run, group: int) -> dict[str, Any]:
    """Returns the headless service that gives each pod of a group its name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": pods.metadata(run, group, run.group_name(group)),
        "spec": {
            "clusterIP": "None",
            # Tasks look for each other before any of them is ready.
            "publishNotReadyAddresses": True,
            "selector": pods.labels(run, group),
            "ports": [{"name": "grpc", "port": run_lib.PORT}],
        },
    }


def policy(run: run_lib.Run, group: int) -> dict[str, Any]:
    """Returns the rule that only a group's own pods may connect to them.

    TensorFlow's servers ask nobody who they are, and run what they are sent.
    """
    own = {"matchLabels": pods.labels(run, group)}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": pods.metadata(run, group, run.group_name(group)),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": own}]}],
        },
    }
