"""Options of gRPC that all its connections have in common."""

# How often a lost connection is tried again; gRPC itself would wait for up to
# two minutes.
RECONNECTING = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long it may take to connect.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
# A port of another server is taken, not shared.
OWN_PORT = ("grpc.so_reuseport", 0)


def limits(max_bytes: int) -> tuple[tuple[str, int], ...]:
    """Returns the limit of a message, either way, in bytes."""
    return (
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", max_bytes),
    )
