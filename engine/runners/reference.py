"""The Llama family in plain numpy: slow, and readable in one sitting. The oracle for every other runner.

One row at a time, one layer after another, float32 throughout. RMSNorm, rotary embedding, grouped-query
attention, SwiGLU; Qwen2's biases. Sources: Touvron et al. 2023, Su et al. 2021 (rotary), Ainslie et al. 2023
(grouped queries). Knows nothing about speed beyond not computing logits that nobody wants.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from engine.runners import StepInput
from engine.runners.kv_books import KvBooks
from engine.runners.weights import LlamaConfig, load_llama

Array = NDArray[np.float32]


class ReferenceRunner:
    """See `engine.runners.Runner`.

    `is_batch_invariant` holds because rows are computed apart from each other: what else is in the batch
    is never in the same product. (How a prompt is cut into prefill chunks does change the last bits.)
    """

    name = "reference"
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
        """Load a GGUF file or a safetensors folder. `threads` is up to numpy's BLAS library."""
        if min(max_batch_tokens, threads) < 1:
            raise ValueError(f"max_batch_tokens={max_batch_tokens}, threads={threads}: at least 1")
        config, self._tensors = load_llama(model_path)
        self.max_model_len = max_model_len or config.max_model_len
        if self.max_model_len > config.max_model_len:
            raise ValueError(
                f"max_model_len={max_model_len}, but the model has {config.max_model_len}"
            )
        self.vocab_size = config.vocab_size
        self.max_rows, self.kv_tokens = max_rows, kv_tokens
        self.max_batch_tokens = max_batch_tokens
        self.books = KvBooks(max_rows, kv_tokens, self.max_model_len)
        self._config = config
        self._layers = [_Layer(config, self._tensors, i) for i in range(config.num_layers)]
        self._head = self._tensors.get("lm_head", self._tensors["embed"])
        self._kv = [_Kv(config) for _ in range(max_rows)]

    def forward(self, step: StepInput) -> Array:
        """See `engine.runners.Runner.forward`."""
        runs = self.books.check(step, self.vocab_size, self.max_batch_tokens)
        logits = [np.empty((0, self.vocab_size), np.float32)]
        for run in runs:
            span = slice(run.start, run.start + run.size)
            hidden = self._decode(self._kv[run.row], step.token_ids[span], run.position)
            hidden = hidden[step.wants_logits[span]]
            final = _rms_norm(hidden, self._tensors["final_norm"], self._config.rms_eps)
            logits.append(final @ self._head.T)
        self.books.append(runs)
        return np.concatenate(logits)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """See `engine.runners.Runner.copy`."""
        self.books.copy(source, target, num_tokens)
        self._kv[target].keys = self._kv[source].keys[:, :num_tokens].copy()
        self._kv[target].values = self._kv[source].values[:, :num_tokens].copy()

    def trim(self, row: int, num_tokens: int) -> None:
        """See `engine.runners.Runner.trim`."""
        self.books.trim(row, num_tokens)
        self._kv[row].keys = self._kv[row].keys[:, :num_tokens]
        self._kv[row].values = self._kv[row].values[:, :num_tokens]

    def close(self) -> None:
        """See `engine.runners.Runner.close`."""
        self._tensors, self._layers, self._kv = {}, [], []

    def _decode(self, kv: _Kv, token_ids: NDArray[np.int32], position: int) -> Array:
        """Hidden states [T, hidden] behind the last layer; appends the tokens' keys and values to `kv`."""
        x = self._tensors["embed"][token_ids]
        rotation = _Rotation(self._config, position, len(token_ids))
        new = []
        for i, layer in enumerate(self._layers):
            mixed, keys, values = layer.attend(x, rotation, kv.keys[i], kv.values[i])
            x = x + mixed
            x = x + layer.feed_forward(x)
            new.append((keys, values))
        kv.keys, kv.values = np.stack([k for k, _ in new]), np.stack([v for _, v in new])
        return x


class _Kv:
    """Keys and values of one row: [layers, positions, kv heads, head_dim]."""

    def __init__(self, config: LlamaConfig) -> None:
        shape = (config.num_layers, 0, config.num_kv_heads, config.head_dim)
        self.keys: Array = np.empty(shape, np.float32)
        self.values: Array = np.empty(shape, np.float32)


class _Rotation:
    """Rotary embedding: each pair (i, i + head_dim / 2) is a plane, turned by position × theta^(-2i / d)."""

    def __init__(self, config: LlamaConfig, position: int, count: int) -> None:
        half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
        angles = np.outer(np.arange(position, position + count), config.rope_theta**-half)
        self._cos = np.cos(angles).astype(np.float32)[:, None]  # [T, 1, head_dim / 2]
        self._sin = np.sin(angles).astype(np.float32)[:, None]

    def __call__(self, heads: Array) -> Array:
        a, b = np.split(heads, 2, axis=-1)
        turned = (a * self._cos - b * self._sin, b * self._cos + a * self._sin)
        return np.concatenate(turned, axis=-1)


class _Layer:
    """One decoder layer."""

    def __init__(self, config: LlamaConfig, tensors: Mapping[str, Array], index: int) -> None:
        self._c = config
        self._t = {
            name.removeprefix(f"layers.{index}."): array
            for name, array in tensors.items()
            if name.startswith(f"layers.{index}.")
        }

    def attend(
        self, x: Array, rotate: _Rotation, old_keys: Array, old_values: Array
    ) -> tuple[Array, Array, Array]:
        """Causal attention of T new tokens over all positions; also all keys and values so far."""
        c, count = self._c, len(x)
        normed = _rms_norm(x, self._t["attn_norm"], c.rms_eps)
        q = rotate(self._project(normed, "q").reshape(count, c.num_heads, c.head_dim))
        k = rotate(self._project(normed, "k").reshape(count, c.num_kv_heads, c.head_dim))
        v = self._project(normed, "v").reshape(count, c.num_kv_heads, c.head_dim)
        keys, values = np.concatenate([old_keys, k]), np.concatenate([old_values, v])

        # Each kv head serves a group of neighbouring query heads: [kv heads, group, T, positions].
        grouped = q.reshape(count, c.num_kv_heads, -1, c.head_dim).transpose(1, 2, 0, 3)
        scores = grouped @ keys.transpose(1, 2, 0)[:, None] / np.float32(np.sqrt(c.head_dim))
        future = np.arange(len(keys)) > len(old_keys) + np.arange(count)[:, None]
        scores[..., future] = -np.inf
        mixed = _softmax(scores) @ values.transpose(1, 0, 2)[:, None]
        mixed = mixed.transpose(2, 0, 1, 3).reshape(count, c.num_heads * c.head_dim)
        return mixed @ self._t["o"].T, keys, values

    def feed_forward(self, x: Array) -> Array:
        """SwiGLU."""
        normed = _rms_norm(x, self._t["ffn_norm"], self._c.rms_eps)
        gate = normed @ self._t["gate"].T
        # silu(g) = g × sigmoid(g), with the sigmoid written as tanh because that cannot overflow.
        silu = gate * (np.float32(0.5) + np.float32(0.5) * np.tanh(gate / 2))
        return np.asarray((silu * (normed @ self._t["up"].T)) @ self._t["down"].T, np.float32)

    def _project(self, x: Array, name: str) -> Array:
        out = x @ self._t[name].T
        bias = self._t.get(f"{name}_bias")
        return np.asarray(out if bias is None else out + bias, np.float32)


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean + np.float32(eps)) * weight, np.float32)


def _softmax(scores: Array) -> Array:
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=-1, keepdims=True), np.float32)
