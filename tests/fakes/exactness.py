"""What the exactness tests share: their size, a synthetic runner that can be emptied, engines on it.

CANDOR_TEST_SCALE multiplies how much those tests do (1 by default, which takes seconds); each says which
value gives its full size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from engine.core.engine import Engine
from engine.core.guided import Grammars
from engine.core.types import Request
from engine.runners import Runner
from engine.runners.synthetic import SyntheticRunner
from tests.fakes.engine import Outcome, Ticks, drive
from tokenizer_svc.codec import Codec

SCALE = float(os.environ.get("CANDOR_TEST_SCALE", "1"))


def scaled(count: int) -> int:
    """So many, at the size that is asked for."""
    return max(1, round(count * SCALE))


def synthetic(
    model_path: Path, *, kv_tokens: int = 4096, max_model_len: int = 512, max_rows: int = 24
) -> SyntheticRunner:
    """The default model's vocabulary without the model."""
    return SyntheticRunner(
        str(model_path),
        max_rows=max_rows,
        kv_tokens=kv_tokens,
        max_batch_tokens=128,
        max_model_len=max_model_len,
        threads=1,
    )


def fresh(runner: Runner, codec: Codec, *, slots: int = 8, token_budget: int = 128) -> Engine:
    """A new engine on a runner that is emptied first, so nothing is left of what it did before."""
    for row in range(runner.max_rows):
        runner.trim(row, 0)
    return Engine(
        runner,
        codec,
        slots=slots,
        token_budget=token_budget,
        mixed_budget=token_budget // 2,
        clock=Ticks(),
    )


def serve(
    engine: Engine, requests: Sequence[Request], grammars: Grammars | None = None
) -> dict[int, Outcome]:
    """Submit all, step until nothing is left to do, check the books."""
    for request in requests:
        constraint = request.constraint
        assert constraint is None or grammars is not None
        engine.submit(request, grammars.compile(constraint) if constraint and grammars else None)
    return drive(engine, max_steps=20_000)
