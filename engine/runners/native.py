"""The fast CPU runner for small models at several streams: small weights, compiled kernels, paged KV.

Llama family (Qwen2's biases included). Weights stay as they are quantised, or become half floats; activations,
KV and sums are float32. Results do not depend on the batch, to the bit (see kernels.py). Keeps the KV books;
the arithmetic is elsewhere.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from engine.runners import KvExhausted, StepInput, kernels
from engine.runners.gguf_file import Blocks
from engine.runners.kernels import NB
from engine.runners.kv_books import KvBooks
from engine.runners.weights import LlamaConfig, load_blocks, load_llama

Array = NDArray[np.float32]


class NativeRunner:
    """See `engine.runners.Runner`. KV lives in blocks of NB positions that rows share by reference."""

    name = "native"
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
        """Load and pack the weights. Raises ValueError for a model of another family."""
        config, tensors = load_llama(model_path)
        self.vocab_size = config.vocab_size
        self.max_model_len = max_model_len or config.max_model_len
        if self.max_model_len > config.max_model_len:
            raise ValueError(
                f"max_model_len={max_model_len}, but the model has {config.max_model_len}"
            )
        self.max_rows, self.kv_tokens = max_rows, kv_tokens
        self.max_batch_tokens = max_batch_tokens
        self.books = KvBooks(max_rows, kv_tokens, self.max_model_len)
        self._threads = max(1, min(threads, numba.get_num_threads()))
        self._weights = _Packed(config, tensors, load_blocks(model_path), self.max_model_len)
        self._kv = _BlockTable(max_rows, kv_tokens, self.max_model_len)
        blocks, parts = self._kv.num_blocks, -(-config.head_dim // NB)
        shape = (config.num_layers, config.num_kv_heads, blocks)
        self._keys: Array = np.zeros((*shape, config.head_dim, NB), np.float32)
        self._values: Array = np.zeros((*shape, parts, NB, NB), np.float32)
        self._logits: Array = np.empty((0, 0), np.float32)
        self._warm_up()

    def forward(self, step: StepInput) -> Array:
        """See `engine.runners.Runner.forward`."""
        runs = self.books.check(step, self.vocab_size, self.max_batch_tokens)
        copies = self._kv.extend(step.rows, step.positions)
        for source, target in copies:
            self._copy_block(source, target)
        # The number of threads belongs to the calling thread.
        numba.set_num_threads(self._threads)
        w = self._weights
        x = w.embed(step.token_ids)
        kernels.step(
            x,
            step.positions.astype(np.int64),
            step.rows.astype(np.int64),
            self._kv.table,
            self._keys,
            self._values,
            w.norms,
            w.qkv,
            w.qkv_bias,
            w.out,
            w.gate_up,
            w.down,
            w.cos,
            w.sin,
            w.heads,
            w.ffn,
            w.eps,
        )
        self.books.append(runs)
        wanted = x[step.wants_logits]
        if len(self._logits) < len(wanted):
            self._logits = np.empty((len(wanted), w.head.shape[0] * NB), np.float32)
        logits = self._logits[: len(wanted)]
        if len(wanted):
            kernels.product(w.normed(wanted), w.head, logits)
        return logits[:, : self.vocab_size]

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """See `engine.runners.Runner.copy`: whole blocks are shared, the last one is copied."""
        self.books.copy(source, target, num_tokens)
        for old, new in self._kv.copy(source, target, num_tokens):
            self._copy_block(old, new)

    def trim(self, row: int, num_tokens: int) -> None:
        """See `engine.runners.Runner.trim`."""
        self.books.trim(row, num_tokens)
        self._kv.trim(row, num_tokens)

    def close(self) -> None:
        """See `engine.runners.Runner.close`."""
        del self._weights, self._keys, self._values, self._logits

    def _copy_block(self, source: int, target: int) -> None:
        self._keys[:, :, target] = self._keys[:, :, source]
        self._values[:, :, target] = self._values[:, :, source]

    def _warm_up(self) -> None:
        # Compiled code is cached on disk; the first start on a machine pays for it here, not in a request.
        one = np.zeros(1, np.int32)
        self.forward(StepInput(one, one, one, np.ones(1, np.bool_)))
        self.trim(0, 0)


class _Packed:
    """The weights in the kernels' layout."""

    def __init__(
        self,
        config: LlamaConfig,
        tensors: dict[str, Array],
        blocks: dict[str, Blocks],
        max_model_len: int,
    ) -> None:
        layers = range(config.num_layers)
        self.heads, self.ffn, self.eps = config.num_heads, config.ffn_size, config.rms_eps

        def layer(i: int, name: str) -> Array:
            return tensors[f"layers.{i}.{name}"]

        def stacked(*names: str) -> kernels.Packed:
            """Some matrices of every layer, one above the other: as they are quantised, if all are."""
            wanted = [[f"layers.{i}.{name}" for name in names] for i in layers]
            if all(name in blocks for row in wanted for name in row):
                return np.stack([_pack_quantised([blocks[n] for n in row]) for row in wanted])
            return np.stack(
                [kernels.pack(np.concatenate([tensors[n] for n in row])) for row in wanted]
            )

        self.norms = np.stack(
            [np.stack([layer(i, "attn_norm"), layer(i, "ffn_norm")]) for i in layers]
        )
        self.qkv = stacked("q", "k", "v")
        self.qkv_bias = np.zeros((config.num_layers, self.qkv.shape[1] * NB), np.float32)
        for i in layers:
            if f"layers.{i}.q_bias" in tensors:
                bias = np.concatenate([layer(i, f"{name}_bias") for name in "qkv"])
                self.qkv_bias[i, : len(bias)] = bias
        self.out, self.down = stacked("o"), stacked("down")
        gate, up = stacked("gate"), stacked("up")
        if gate.shape != up.shape:  # one is quantised, the other is not
            gate, up = (
                np.stack([kernels.pack(layer(i, n)) for i in layers]) for n in ("gate", "up")
            )
        self.gate_up = np.concatenate([gate, up], axis=2)
        del gate, up
        head = "lm_head" if "lm_head" in tensors else "embed"
        self.head = (
            kernels.pack_blocks(blocks[head]) if head in blocks else kernels.pack(tensors[head])
        )
        # A tied embedding is read back out of the panels: a second copy would cost as much as the layers.
        self._embed = None if "lm_head" not in tensors else tensors["embed"]
        self._final_norm = tensors["final_norm"]
        frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        angles = np.outer(np.arange(max_model_len), frequencies)
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def embed(self, token_ids: NDArray[np.int32]) -> Array:
        """The embedding rows [T, D] of tokens, a fresh array."""
        if self._embed is not None:
            return np.ascontiguousarray(self._embed[token_ids])
        return kernels.unpack_rows(self.head, len(self._final_norm), token_ids)

    def normed(self, x: Array) -> Array:
        """Hidden states behind the final norm, as the vocabulary projection takes them."""
        # One row at a time in float32: numpy sums a row the same way whatever stands beside it.
        mean = np.array([row.dot(row) for row in x], np.float32) / np.float32(x.shape[1])
        scaled = x / np.sqrt(mean + np.float32(self.eps))[:, None] * self._final_norm
        return np.ascontiguousarray(scaled, np.float32)


def _pack_quantised(parts: list[Blocks]) -> kernels.Packed:
    return kernels.pack_blocks(
        Blocks(
            np.concatenate([part.levels for part in parts]),
            np.concatenate([part.scales for part in parts]),
            np.concatenate([part.leasts for part in parts]),
        )
    )


class _BlockTable:
    """Which block holds which positions of which row; blocks are counted by the rows that use them.

    The engine counts tokens and a prefix shared by `copy` once. A row's last block may be partly empty and
    may repeat part of the block it was copied from, so there are two blocks a row more than the tokens need.
    """

    def __init__(self, max_rows: int, kv_tokens: int, max_model_len: int) -> None:
        self.num_blocks = -(-kv_tokens // NB) + 2 * max_rows
        self.table = np.zeros((max_rows, -(-max_model_len // NB)), np.int32)
        self.lengths = np.zeros(max_rows, np.int64)
        self._users = np.zeros(self.num_blocks, np.int32)
        self._free = list(range(self.num_blocks - 1, -1, -1))

    def extend(
        self, rows: NDArray[np.int32], positions: NDArray[np.int32]
    ) -> list[tuple[int, int]]:
        """Make room for a batch; returns the (old, new) blocks to copy first. Raises KvExhausted."""
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        counts = np.diff(starts, append=len(rows))
        plan = []
        needed = 0
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            row, length = int(rows[start]), int(positions[start])
            assert length == self.lengths[row], f"row {row} has {self.lengths[row]} tokens"
            held, wanted = -(-length // NB), -(-(length + count) // NB)
            assert wanted <= self.table.shape[1], f"row {row} grows past the context"
            shared = bool(length % NB) and self._users[self.table[row, held - 1]] > 1
            plan.append((row, length + count, held, wanted, shared))
            needed += wanted - held + shared
        if needed > len(self._free):
            raise KvExhausted(f"{needed} blocks needed, {len(self._free)} free")
        copies = []
        for row, length, held, wanted, shared in plan:
            if shared:
                old = int(self.table[row, held - 1])
                self._users[old] -= 1
                copies.append((old, self._take(row, held - 1)))
            for index in range(held, wanted):
                self._take(row, index)
            self.lengths[row] = length
        return copies

    def copy(self, source: int, target: int, num_tokens: int) -> list[tuple[int, int]]:
        """Let the empty row `target` begin like `source`; returns the (old, new) block to copy."""
        assert self.lengths[target] == 0 and num_tokens <= self.lengths[source]
        whole = num_tokens // NB
        shared = self.table[source, :whole]
        self.table[target, :whole] = shared
        self._users[shared] += 1
        self.lengths[target] = num_tokens
        if num_tokens % NB == 0:
            return []
        return [(int(self.table[source, whole]), self._take(target, whole))]

    def trim(self, row: int, num_tokens: int) -> None:
        """Give up the row's blocks behind its first `num_tokens`."""
        assert num_tokens <= self.lengths[row]
        kept = -(-num_tokens // NB)
        for block in self.table[row, kept : -(-int(self.lengths[row]) // NB)].tolist():
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free.append(block)
        self.lengths[row] = num_tokens

    def _take(self, row: int, index: int) -> int:
        block = self._free.pop()
        self._users[block] = 1
        self.table[row, index] = block
        return block
