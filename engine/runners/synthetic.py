"""A runner without a model: for tests, and for measuring everything around the forward pass.

The logits of a position are a pure function of the row's token ids up to it, so they depend on no batch, no
step and no process; a KV mistake (a wrong prefix, a forgotten trim) changes the text. The KV books are kept
as a real runner keeps them. The vocabulary is that of the GGUF file, and the likely tokens are plain English
word pieces; about one position in 256 wants to end the text.

`CANDOR_SYNTHETIC_STEP_MS` (milliseconds, 0 by default) makes every forward pass last at least that long.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.runners import StepInput
from engine.runners.kv_books import KvBooks, wanted
from tokenizer_svc import llama_abi

STEP_MS_VARIABLE = "CANDOR_SYNTHETIC_STEP_MS"

PEAKS = 8
"""Tokens with a fair chance at one position."""
WORDS = 2048
"""How many plain tokens take part: a vocabulary's first ones are its most frequent."""
END_ONE_IN = 256
"""Positions per end of text, on average."""
_MASK = (1 << 64) - 1
_PLAIN = re.compile(rb" [A-Za-z]{2,12}|[.,]")
_CONTROL = 8
"""llama.cpp's attribute bit of tokens that are not text."""


class SyntheticRunner:
    """Deterministic and batch invariant by construction; needs the vocabulary of a model only."""

    name = "synthetic"
    is_batch_invariant = True

    def __init__(
        self,
        model_path: str,
        *,
        max_rows: int,
        kv_tokens: int,
        max_batch_tokens: int,
        max_model_len: int | None,
        threads: int,
    ) -> None:
        vocabulary = _Vocabulary(model_path)
        self.vocab_size = vocabulary.size
        self.max_model_len = max_model_len or vocabulary.context_length
        if self.max_model_len > vocabulary.context_length:
            raise ValueError(
                f"max_model_len={max_model_len}, but the model has {vocabulary.context_length}"
            )
        self.max_rows = max_rows
        self.kv_tokens = kv_tokens
        self.max_batch_tokens = max_batch_tokens
        self.threads = threads
        self.books = KvBooks(max_rows, kv_tokens, self.max_model_len)
        self._step_s = _step_seconds()
        self._plain = vocabulary.plain
        self._end = vocabulary.end
        # The unlikely tokens differ a little, so that no two logits of a row are equal.
        self._floor = np.linspace(-8.0, -9.0, self.vocab_size, dtype=np.float32)
        self._logits = np.empty((0, self.vocab_size), np.float32)
        # Per row, the digest of its tokens up to each position: what stands for keys and values.
        self._digests: list[list[int]] = [[] for _ in range(max_rows)]

    def forward(self, step: StepInput) -> NDArray[np.float32]:
        """Logits of the wanted positions, see the protocol."""
        started = time.monotonic()
        runs = self.books.check(step, self.vocab_size, self.max_batch_tokens)
        digests: list[int] = []
        ids = step.token_ids.tolist()
        for run in runs:
            row = self._digests[run.row]
            last = row[-1] if row else 0
            for token in ids[run.start : run.start + run.size]:
                last = _mix(last + token + 1)
                row.append(last)
            digests += row[run.position :]
        self.books.append(runs)
        logits = self._room(wanted(step))
        np.copyto(logits, self._floor)
        for out, i in enumerate(np.flatnonzero(step.wants_logits).tolist()):
            self._draw_peaks(digests[i], logits[out])
        if self._step_s:
            time.sleep(max(0.0, started + self._step_s - time.monotonic()))
        return logits

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Share a prefix, see the protocol."""
        self.books.copy(source, target, num_tokens)
        self._digests[target] = self._digests[source][:num_tokens]

    def trim(self, row: int, num_tokens: int) -> None:
        """Forget a row's end, see the protocol."""
        self.books.trim(row, num_tokens)
        del self._digests[row][num_tokens:]

    def close(self) -> None:
        """Nothing to release but memory."""
        self._logits = np.empty((0, self.vocab_size), np.float32)

    def _room(self, count: int) -> NDArray[np.float32]:
        if count > len(self._logits):
            self._logits = np.empty((count, self.vocab_size), np.float32)
        return self._logits[:count]

    def _draw_peaks(self, digest: int, out: NDArray[np.float32]) -> None:
        """Raise a few tokens; the lowest of them first, so that the best wins where two coincide."""
        for rank in range(PEAKS - 1, -1, -1):
            digest = _mix(digest + rank)
            token = self._plain[(digest >> 16) % len(self._plain)]
            out[token] = 6.0 - 0.75 * rank + (digest & 0xFFFF) / 0x20000
        if _mix(digest) % END_ONE_IN == 0:
            out[self._end] = 8.0


def _mix(value: int) -> int:
    """SplitMix64's finaliser: neighbouring inputs give unrelated outputs."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _step_seconds() -> float:
    text = os.environ.get(STEP_MS_VARIABLE, "0")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 60_000:
        raise ValueError(f"{STEP_MS_VARIABLE}={text!r} is no number of milliseconds up to 60000")
    return value / 1000


class _Vocabulary:
    """What is needed of a GGUF file: its size, its end of text, ids of plain words, the context length."""

    def __init__(self, model_path: str) -> None:
        library = llama_abi.lib()
        model = llama_abi.load_model(model_path, vocab_only=True)
        try:
            vocab = library.llama_model_get_vocab(model)
            self.size = int(library.llama_vocab_n_tokens(vocab))
            self.end = int(library.llama_vocab_eos(vocab))
            architecture = llama_abi.meta(model, "general.architecture")
            length = llama_abi.meta(model, f"{architecture}.context_length")
            if length is None or not self.size:
                raise ValueError(f"{model_path} states no context length or no vocabulary")
            self.context_length = int(length)
            plain = (i for i in range(self.size) if _PLAIN.fullmatch(_piece(vocab, i)))
            self.plain = list(itertools.islice(plain, WORDS))
        finally:
            library.llama_model_free(model)
        if len(self.plain) < PEAKS:
            raise ValueError(f"{model_path} has a vocabulary without English words")


def _piece(vocab: Any, token: int) -> bytes:
    library = llama_abi.lib()
    if library.llama_vocab_get_attr(vocab, token) & _CONTROL:
        return b""
    size = library.llama_token_to_piece(vocab, token, _BUFFER, len(_BUFFER), 0, False)
    return bytes(llama_abi.ffi.buffer(_BUFFER, max(size, 0))[:])


_BUFFER = llama_abi.ffi.new("char[]", 64)
"""Longer pieces report a negative size and are no plain words."""
