"""Tells who launches tasks that TensorFlow's servers are open to the network.

TensorFlow listens on every interface, whatever address `TF_CONFIG` names, and
asks nobody who they are; docs/security.md says what to do about it.
"""

import pathlib
import socket

_INTERFACES = pathlib.Path("/sys/class/net")


def reachable_interfaces(
    interfaces: pathlib.Path = _INTERFACES,
) -> list[str]:
    """Returns the network interfaces by which others may reach this machine.

    Args:
        interfaces: Where Linux describes them. Where it does not, all but the
            loopback interface count.
    """
    names = {name for _, name in socket.if_nameindex()}
    found = []
    for name in sorted(names):
        if name in ("lo", "lo0"):
            continue
        try:
            state = (interfaces / name / "operstate").read_text().strip()
        except OSError:
            state = "unknown"
        if state != "down":
            found.append(name)
    return found


def warning(num_ports: int) -> str | None:
    """Returns what to tell the user, or None where there is nothing to fear.

    Args:
        num_ports: Ports that the tasks will listen on.
    """
    interfaces = reachable_interfaces() if num_ports else []
    if not interfaces:
        return None
    return (
        f"warning: the tasks' TensorFlow servers ({num_ports} ports) listen on "
        f"every network interface ({', '.join(interfaces)}) and ask for no "
        "password: whoever reaches them can run code as you. Keep this "
        "machine behind a firewall; see docs/security.md."
    )
