"""What all tests of the exchange share."""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here cuts the power, and waiting for a busy disk is slow."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
