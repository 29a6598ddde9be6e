"""Logits from llama.cpp: every GGUF architecture it knows, on every device it was built for.

Knows the C batch, the unified KV cache and its failure codes; knows nothing about requests. Rows are
llama.cpp's sequences, so a copied prefix shares its cells. Numbers depend slightly on what else is in a
batch: kernels for few and for many rows add up in different orders.

`CANDOR_LLAMACPP_GPU_LAYERS` says how many layers go to the device the library was built for (-1, the
default: all that fit; the CPU build ignores it).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.runners import KvExhausted, StepInput
from engine.runners.kv_books import KvBooks, Run, wanted
from tokenizer_svc import llama_abi
from tokenizer_svc.llama_abi import ffi

GPU_LAYERS_VARIABLE = "CANDOR_LLAMACPP_GPU_LAYERS"

MAX_ROWS = 256
"""LLAMA_MAX_SEQ of the build: more sequences end the process instead of failing."""
UBATCH_TOKENS = 512
"""Tokens that llama.cpp computes in one graph; smaller ones slow prefill down and gain nothing in decode."""
_CELL_GRANULE = 256
"""llama.cpp rounds its context up to a multiple of this."""


class LlamaCppRunner:
    """See `engine.runners.Runner`."""

    name = "llamacpp"
    is_batch_invariant = False

    def __init__(
        self,
        model_path: str,
        *,
        max_rows: int,
        kv_tokens: int,
        max_batch_tokens: int,
        max_model_len: int | None,
        threads: int,
        gpu_layers: int | None = None,
    ) -> None:
        """Load a GGUF file. Raises ValueError for a file or sizes that cannot work."""
        if max_rows > MAX_ROWS:
            raise ValueError(f"max_rows={max_rows}, but llama.cpp has at most {MAX_ROWS} sequences")
        if min(max_batch_tokens, threads) < 1:
            raise ValueError(f"max_batch_tokens={max_batch_tokens}, threads={threads}: at least 1")
        self._lib = llama_abi.lib()
        self._context = self._model = ffi.NULL
        self._model = llama_abi.load_model(
            model_path, n_gpu_layers=_gpu_layers() if gpu_layers is None else gpu_layers
        )
        try:
            trained = int(self._lib.llama_model_n_ctx_train(self._model))
            self.max_model_len = max_model_len or trained
            if self.max_model_len > trained:
                raise ValueError(f"max_model_len={max_model_len}, but the model has {trained}")
            self.max_rows, self.kv_tokens = max_rows, kv_tokens
            self.max_batch_tokens = max_batch_tokens
            self.books = KvBooks(max_rows, kv_tokens, self.max_model_len)
            vocab = self._lib.llama_model_get_vocab(self._model)
            self.vocab_size = int(self._lib.llama_vocab_n_tokens(vocab))
            self._batch = _Batch(max_batch_tokens)
            self._context = self._open_context(model_path, threads)
            self._memory = self._lib.llama_get_memory(self._context)
            self._refuse_what_cannot_be_trimmed(model_path)
        except BaseException:
            self.close()
            raise

    def forward(self, step: StepInput) -> NDArray[np.float32]:
        """See `engine.runners.Runner.forward`."""
        runs = self.books.check(step, self.vocab_size, self.max_batch_tokens)
        status = self._lib.llama_decode(self._context, self._batch.fill(step))
        if status != 0:
            self._roll_back(runs)
            if status == 1:
                raise KvExhausted(f"llama.cpp finds no room for {len(step.rows)} tokens")
            raise RuntimeError(f"llama_decode failed with {status} on {len(step.rows)} tokens")
        self.books.append(runs)
        return self._logits(wanted(step))

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """See `engine.runners.Runner.copy`: the cells get a second owner, nothing moves."""
        self.books.copy(source, target, num_tokens)
        if num_tokens:
            self._lib.llama_memory_seq_cp(self._memory, source, target, 0, num_tokens)

    def trim(self, row: int, num_tokens: int) -> None:
        """See `engine.runners.Runner.trim`."""
        self.books.trim(row, num_tokens)
        self._remove(row, num_tokens)

    def close(self) -> None:
        """See `engine.runners.Runner.close`. May be called twice."""
        if self._context != ffi.NULL:
            self._lib.llama_free(self._context)
        if self._model != ffi.NULL:
            self._lib.llama_model_free(self._model)
        self._context = self._model = ffi.NULL

    def _open_context(self, model_path: str, threads: int) -> Any:
        if self._lib.llama_model_has_encoder(self._model):
            raise ValueError(f"{model_path} has an encoder; only decoders can be served")
        params = self._lib.llama_context_default_params()
        params.n_ctx = -(-self.kv_tokens // _CELL_GRANULE) * _CELL_GRANULE
        params.n_seq_max = self.max_rows
        params.n_batch = self.max_batch_tokens
        params.n_ubatch = min(UBATCH_TOKENS, self.max_batch_tokens)
        # Any token may want its logits (prompt logprobs); memory nobody writes to costs nothing.
        params.n_outputs_max = self.max_batch_tokens
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = (
            True  # without it, copying a prefix moves data and rows have fixed shares
        )
        params.swa_full = True  # a sliding window must still hold what a copied prefix needs
        params.no_perf = True
        context = self._lib.llama_init_from_model(self._model, params)
        if context == ffi.NULL:
            raise ValueError(
                f"llama.cpp cannot open {model_path} with kv_tokens={self.kv_tokens}, "
                f"max_rows={self.max_rows}, max_batch_tokens={self.max_batch_tokens}"
            )
        assert self._lib.llama_n_ctx(context) >= self.kv_tokens
        return context

    def _refuse_what_cannot_be_trimmed(self, model_path: str) -> None:
        """Recurrent state cannot be cut back, so prefix reuse and recompute would be wrong with it."""
        size = min(2, self.max_batch_tokens, self.kv_tokens, self.max_model_len)
        index = np.arange(size, dtype=np.int32)
        zero, none = np.zeros(size, np.int32), np.zeros(size, np.bool_)
        self.forward(StepInput(zero, index, zero, none))
        self.books.trim(0, 0)
        partly = size == 1 or self._lib.llama_memory_seq_rm(self._memory, 0, 1, -1)
        wholly = self._lib.llama_memory_seq_rm(self._memory, 0, 0, -1)
        if self._lib.llama_model_is_recurrent(self._model) or not (partly and wholly):
            raise ValueError(f"{model_path} keeps recurrent state, which no prefix can be cut from")

    def _roll_back(self, runs: Sequence[Run]) -> None:
        # A batch is computed in parts; those before the failing one may have been stored.
        for run in runs:
            self._remove(run.row, run.position)

    def _remove(self, row: int, start: int) -> None:
        if not self._lib.llama_memory_seq_rm(self._memory, row, start, -1):
            raise RuntimeError(f"llama.cpp cannot cut row {row} back to {start} tokens")

    def _logits(self, count: int) -> NDArray[np.float32]:
        if not count:
            return np.empty((0, self.vocab_size), np.float32)
        pointer = self._lib.llama_get_logits(self._context)
        view = np.frombuffer(ffi.buffer(pointer, count * self.vocab_size * 4), np.float32)
        return view.reshape(count, self.vocab_size)


class _Batch:
    """A `llama_batch` over numpy arrays, so that filling it is a few array assignments."""

    def __init__(self, capacity: int) -> None:
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._rows = np.zeros(capacity, np.int32)
        self._wants_logits = np.zeros(capacity, np.int8)
        # The C struct has a list of sequences per token: here always the one at the same index of _rows.
        self._ones = np.ones(capacity, np.int32)
        self._row_pointers = self._rows.ctypes.data + 4 * np.arange(capacity, dtype=np.uintp)
        self._struct = ffi.new("llama_batch *")
        self._struct.token = self._pointer("llama_token *", self._tokens)
        self._struct.pos = self._pointer("llama_pos *", self._positions)
        self._struct.n_seq_id = self._pointer("int32_t *", self._ones)
        self._struct.seq_id = self._pointer("llama_seq_id **", self._row_pointers)
        self._struct.logits = self._pointer("int8_t *", self._wants_logits)

    @staticmethod
    def _pointer(kind: str, array: NDArray[Any]) -> Any:
        return ffi.cast(kind, array.ctypes.data)

    def fill(self, step: StepInput) -> Any:
        """The struct with this step in it; overwritten by the next."""
        size = len(step.token_ids)
        self._tokens[:size] = step.token_ids
        self._positions[:size] = step.positions
        self._rows[:size] = step.rows
        self._wants_logits[:size] = step.wants_logits
        self._struct.n_tokens = size
        return self._struct[0]


def _gpu_layers() -> int:
    text = os.environ.get(GPU_LAYERS_VARIABLE, "-1")
    if text != "-1" and not text.isdigit():
        raise ValueError(f"{GPU_LAYERS_VARIABLE}={text!r} is no number of layers and not -1")
    return int(text)
