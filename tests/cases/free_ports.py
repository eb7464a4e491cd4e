"""Ports of this machine that nobody listens on."""

import socket


def find(count: int) -> list[int]:
    # On all addresses, as TensorFlow's servers listen.
    servers = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def addresses(count: int, *, host: str = "127.0.0.1") -> list[str]:
    return [f"{host}:{port}" for port in find(count)]
