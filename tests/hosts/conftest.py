"""Hosts, for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.hosts import network


@pytest.fixture
def hosts(no_process_left: None) -> Iterator[network.Network]:
    """Five hosts, which find each other as alpha, beta, gamma and so on."""
    with network.joined(5) as joined:
        yield joined
