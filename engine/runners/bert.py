"""Sentence embeddings by a BERT encoder in numpy: token ids in, one unit vector per sequence out.

Source: Devlin et al. 2019 (the encoder); the pooling (mean over tokens, then L2 norm) is what the model's own
`1_Pooling` and `2_Normalize` folders say. Knows nothing about text or batching over requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.runners.weights import load_safetensors

Array = NDArray[np.float32]

MAX_BATCH_TOKENS = 4096
"""Most tokens in one pass through the matrices; longer batches are cut into several passes."""


def is_encoder(path: str | Path) -> bool:
    """Whether a path is a folder whose config says BERT: such a model embeds and does not generate."""
    config = Path(path) / "config.json"
    try:
        return bool(json.loads(config.read_bytes()).get("model_type") == "bert")
    except (OSError, ValueError, AttributeError):
        return False


class BertEncoder:
    """A sentence-transformers folder: config.json, model.safetensors, 1_Pooling, sentence_bert_config.json."""

    name = "bert"

    def __init__(self, folder: Path) -> None:
        """Load the weights. Raises ValueError when the folder holds something else."""
        config = _json(folder / "config.json")
        if config.get("model_type") != "bert" or config.get("hidden_act") != "gelu":
            raise ValueError(f"{folder} is no BERT encoder with GELU")
        pooling = _json(folder / "1_Pooling" / "config.json")
        if not pooling.get("pooling_mode_mean_tokens"):
            raise ValueError(f"{folder} wants a pooling other than the mean over tokens")
        limits = _json(folder / "sentence_bert_config.json")
        self.embedding_size = int(config["hidden_size"])
        self.vocab_size = int(config["vocab_size"])
        self.max_model_len = int(limits.get("max_seq_length", config["max_position_embeddings"]))
        self._heads = int(config["num_attention_heads"])
        self._eps = float(config["layer_norm_eps"])
        weights = {
            name.removeprefix("bert."): np.asarray(array, np.float32)
            for name, array in load_safetensors(folder / "model.safetensors").items()
        }
        self._words = weights["embeddings.word_embeddings.weight"]
        # Every sequence is a first segment, so its segment embedding is part of each position's.
        self._places: Array = (
            weights["embeddings.position_embeddings.weight"]
            + weights["embeddings.token_type_embeddings.weight"][0]
        )
        self._norm = _pair(weights, "embeddings.LayerNorm")
        self._layers = [
            _Layer(weights, f"encoder.layer.{i}.") for i in range(config["num_hidden_layers"])
        ]

    def embed(self, sequences: Sequence[Sequence[int]]) -> Array:
        """Unit vectors [len(sequences), embedding_size].

        Each sequence has between 1 and `max_model_len` ids below `vocab_size`, special tokens included;
        the caller has checked that.
        """
        out = np.empty((len(sequences), self.embedding_size), np.float32)
        start, tokens = 0, 0
        for end, ids in enumerate(sequences):
            if tokens and tokens + len(ids) > MAX_BATCH_TOKENS:
                out[start:end] = self._pass(sequences[start:end])
                start, tokens = end, 0
            tokens += len(ids)
        if start < len(sequences):
            out[start:] = self._pass(sequences[start:])
        return out

    def _pass(self, sequences: Sequence[Sequence[int]]) -> Array:
        lengths = [len(ids) for ids in sequences]
        ends = np.cumsum(lengths)
        spans = [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]
        ids = np.concatenate([np.asarray(s, np.int64) for s in sequences])
        places = np.concatenate([np.arange(n) for n in lengths])
        x = _layer_norm(self._words[ids] + self._places[places], *self._norm, self._eps)
        for layer in self._layers:
            x = layer(x, spans, self._heads, self._eps)
        pooled = np.stack([x[span].mean(axis=0) for span in spans])
        return np.asarray(pooled / np.linalg.norm(pooled, axis=1, keepdims=True), np.float32)


class _Layer:
    """Self-attention and feed-forward, each with a residual and a layer norm behind it."""

    def __init__(self, weights: Mapping[str, Array], prefix: str) -> None:
        attention = prefix + "attention."
        qkv = [_pair(weights, f"{attention}self.{name}") for name in ("query", "key", "value")]
        self._qkv_weight = np.concatenate([w for w, _ in qkv])
        self._qkv_bias = np.concatenate([b for _, b in qkv])
        self._out = _pair(weights, attention + "output.dense")
        self._out_norm = _pair(weights, attention + "output.LayerNorm")
        self._up = _pair(weights, prefix + "intermediate.dense")
        self._down = _pair(weights, prefix + "output.dense")
        self._down_norm = _pair(weights, prefix + "output.LayerNorm")

    def __call__(self, x: Array, spans: Sequence[slice], heads: int, eps: float) -> Array:
        q, k, v = np.split(x @ self._qkv_weight.T + self._qkv_bias, 3, axis=1)
        mixed = np.concatenate([_attend(q[s], k[s], v[s], heads) for s in spans])
        x = _layer_norm(x + _linear(mixed, self._out), *self._out_norm, eps)
        hidden = _linear(_gelu(_linear(x, self._up)), self._down)
        return _layer_norm(x + hidden, *self._down_norm, eps)


def _attend(q: Array, k: Array, v: Array, heads: int) -> Array:
    """Attention of one sequence [T, D] over itself, both ways."""
    length, width = q.shape
    q, k, v = (a.reshape(length, heads, width // heads).swapaxes(0, 1) for a in (q, k, v))
    scores = q @ k.swapaxes(1, 2) / np.float32(np.sqrt(width // heads))
    scores = np.exp(scores - scores.max(axis=2, keepdims=True))
    scores /= scores.sum(axis=2, keepdims=True)
    return np.asarray((scores @ v).swapaxes(0, 1).reshape(length, width))


def _linear(x: Array, weight_and_bias: tuple[Array, Array]) -> Array:
    weight, bias = weight_and_bias
    return np.asarray(x @ weight.T + bias)


def _layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    centred = x - x.mean(axis=1, keepdims=True)
    variance = np.square(centred).mean(axis=1, keepdims=True)
    return np.asarray(centred / np.sqrt(variance + np.float32(eps)) * weight + bias)


def _gelu(x: Array) -> Array:
    return np.asarray(x * np.float32(0.5) * (1 + _erf(x * np.float32(1 / np.sqrt(2)))))


def _erf(x: Array) -> Array:
    """The error function to 1.5e-7 (Abramowitz and Stegun 7.1.26): numpy has none."""
    t = 1 / (1 + np.float32(0.3275911) * np.abs(x))
    poly: Any = np.float32(1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        poly = poly * t + np.float32(coefficient)
    return np.asarray(np.sign(x) * (1 - poly * t * np.exp(-x * x)))


def _pair(weights: Mapping[str, Array], name: str) -> tuple[Array, Array]:
    try:
        return weights[name + ".weight"], weights[name + ".bias"]
    except KeyError as error:
        raise ValueError(f"weight {error} is missing") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds no JSON object")
    return loaded
