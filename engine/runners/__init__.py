"""What computes logits: the only part of the engine that knows a framework.

A runner owns a KV store of sequences. Each sequence has a row id (0 <= row < max_rows) and a length; the
engine decides what is computed, copied and freed, and keeps the books.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# Waiting passively puts a thread to sleep at every barrier, of which a step has hundreds. 500 turns of
# spinning first make one row of llama.cpp twice as fast on two idle cores and cost a third when another
# process wants one of them; 2000 turns then cost more than half. Here, because the OpenMP library reads it
# when it is loaded, and a tokenizer may load that before any runner is chosen.
os.environ.setdefault("GOMP_SPINCOUNT", "500")


@dataclass(frozen=True)
class StepInput:
    """One forward pass over a flat batch of T tokens. All arrays have length T.

    Tokens of one row are contiguous in the batch and their positions ascend from the row's length.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    rows: NDArray[np.int32]
    wants_logits: NDArray[np.bool_]


class Runner(Protocol):
    """A loaded model. Not thread-safe: one thread at a time calls it."""

    name: str
    vocab_size: int
    max_model_len: int
    """Most tokens of one sequence, prompt and output together."""
    max_rows: int
    """Sequences whose KV may exist at the same time, running and cached."""
    kv_tokens: int
    """Token positions the KV store holds over all rows; a prefix shared by `copy` counts once."""
    max_batch_tokens: int
    """Most tokens in one forward pass."""
    is_batch_invariant: bool
    """Whether a row's logits are the same to the bit whatever else is in the batch."""

    def forward(self, step: StepInput) -> NDArray[np.float32]:
        """Append KV for every token and return logits [wants_logits.sum(), vocab_size], in batch order.

        The array is a view that the next forward overwrites. Raises KvExhausted when the KV store is
        full; then nothing was appended.
        """
        ...

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Make the empty row `target` start with the first `num_tokens` of `source`. Cheap."""
        ...

    def trim(self, row: int, num_tokens: int) -> None:
        """Forget everything of `row` behind its first `num_tokens`; 0 frees it."""
        ...

    def close(self) -> None:
        """Release the model. The runner is not used afterwards."""
        ...


class KvExhausted(Exception):
    """No room in the KV store for this step."""


RUNNERS = {
    "llamacpp": ("engine.runners.llamacpp", "LlamaCppRunner"),
    "native": ("engine.runners.native", "NativeRunner"),
    "reference": ("engine.runners.reference", "ReferenceRunner"),
    "synthetic": ("engine.runners.synthetic", "SyntheticRunner"),
}
"""Name → module and class, imported when chosen."""


def open_runner(
    name: str,
    model_path: str,
    *,
    max_rows: int,
    kv_tokens: int,
    max_batch_tokens: int,
    max_model_len: int | None,
    threads: int,
    slots: int | None = None,
    batch_invariant: bool = False,
) -> Runner:
    """Load `model_path` with one of RUNNERS, or with the one that "auto" finds best for `slots` rows.

    `max_model_len` None means the model's own context length. `batch_invariant`: only a runner whose
    numbers do not depend on the batch will do. Imports the framework lazily. Raises ValueError for an
    unknown name, a file that is no model, sizes the model cannot have, or a runner that is not invariant.
    """

    def load(chosen: str) -> Runner:
        module, cls = RUNNERS[chosen]
        factory: Any = getattr(importlib.import_module(module), cls)
        if batch_invariant and not factory.is_batch_invariant:
            raise ValueError(
                f"batch_invariant is on, but the numbers of runner {chosen} depend on the batch; "
                "native, reference and synthetic would do"
            )
        runner: Runner = factory(
            model_path,
            max_rows=max_rows,
            kv_tokens=kv_tokens,
            max_batch_tokens=max_batch_tokens,
            max_model_len=max_model_len,
            threads=threads,
        )
        return runner

    if name == "auto":
        from engine.runners.auto import choose

        return choose(model_path, slots or max_rows, load, batch_invariant=batch_invariant)
    if name not in RUNNERS:
        raise ValueError(f"unknown runner {name!r}, none of auto, {', '.join(RUNNERS)}")
    return load(name)
