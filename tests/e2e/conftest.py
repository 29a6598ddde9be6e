"""Whole stacks as a user starts them: `candor serve`, real processes, loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.stack import Running, candor_stack
from tests.fakes.door import Door

MAX_MODEL_LEN = 1024
"""Small, so that requests near the context limit stay cheap on the real model."""


@pytest.fixture(scope="session")
def real(model_path: Path) -> Iterator[Running]:
    """Two workers with the default model; `smollm2-135m-ALIAS` is its alias."""
    arguments = ["--served-model-name", "smollm2-135m,smollm2-135m-ALIAS", "--threads", "1"]
    arguments += ["--max-model-len", str(MAX_MODEL_LEN)]
    with candor_stack(model_path, workers=2, arguments=arguments) as stack:
        yield stack


@pytest.fixture(scope="session")
def scripted(model_path: Path) -> Iterator[Running]:
    """Two workers whose tokens depend on the tokens before them and on nothing else."""
    arguments = ["--served-model-name", "synthetic", "--runner", "synthetic", "--slots", "8"]
    with candor_stack(model_path, workers=2, arguments=arguments) as stack:
        yield stack


@pytest.fixture(scope="session")
def exact(model_path: Path) -> Iterator[Running]:
    """The default model, computed by the runner whose numbers do not depend on what else is in the batch."""
    arguments = ["--served-model-name", "smollm2-135m", "--runner", "native", "--threads", "1"]
    arguments += ["--max-model-len", str(MAX_MODEL_LEN)]
    with candor_stack(model_path, arguments=arguments) as stack:
        yield stack


@pytest.fixture
def door(exact: Running) -> Iterator[Door]:
    """A client of `exact`."""
    client = Door(exact)
    yield client
    client.close()
