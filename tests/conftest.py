"""Fixtures every test may use: the default model's file, free ports."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's GGUF, fetched when it is not there yet."""
    from candor.cli.models import ensure

    return ensure("smollm2-135m")


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Gives a loopback port that nobody listens on."""

    def pick() -> int:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            return int(s.getsockname()[1])

    return pick
