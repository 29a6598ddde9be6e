"""What the runner tests share: steps written as rows of ids, and tiny models written to disk."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from engine.runners import StepInput

Array = NDArray[np.float32]


def step(*parts: tuple[int, int, Sequence[int]], wants: str | Sequence[bool] = "last") -> StepInput:
    """A batch of (row, first position, token ids); logits for the "last" token of each, for "all" or "none"."""
    sizes = [len(ids) for _, _, ids in parts]
    total = sum(sizes)
    mask = np.full(total, wants == "all")
    if wants == "last":
        mask[np.cumsum(sizes) - 1] = True
    elif not isinstance(wants, str):
        mask = np.array(wants, np.bool_)
    return StepInput(
        token_ids=np.array([i for _, _, ids in parts for i in ids], np.int32),
        positions=np.concatenate([np.arange(at, at + len(ids)) for _, at, ids in parts]).astype(
            np.int32
        ),
        rows=np.repeat([row for row, _, _ in parts], sizes).astype(np.int32),
        wants_logits=mask,
    )


VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, CONTEXT = 300, 64, 96, 2, 4, 2, 256
HEAD = HIDDEN // HEADS


def tiny_tensors(architecture: str, *, tied: bool = False) -> dict[str, Array]:
    """Random weights of a tiny decoder under their safetensors names."""
    rng = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        kv = KV_HEADS * HEAD
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
            "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            "self_attn.k_proj.weight": (kv, HIDDEN),
            "self_attn.v_proj.weight": (kv, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            "mlp.gate_proj.weight": (FFN, HIDDEN),
            "mlp.up_proj.weight": (FFN, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, FFN),
        }
        if architecture == "qwen2":
            sizes = (("q", HIDDEN), ("k", kv), ("v", kv))
            layer |= {f"self_attn.{n}_proj.bias": (size,) for n, size in sizes}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {
        name: (rng.standard_normal(shape) * (0.125 if len(shape) > 1 else 1.0)).astype(np.float32)
        for name, shape in shapes.items()
    }


_GGUF_NAMES = (
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers", "blk"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
)


def write_tiny_gguf(
    path: Path, architecture: str, tensors: Mapping[str, Array], **meta: float
) -> Path:
    """The weights as a float32 GGUF without a vocabulary, which llama.cpp loads too."""
    w = gguf.GGUFWriter(path, architecture)
    w.add_vocab_size(VOCAB)
    w.add_tokenizer_model("no_vocab")
    w.add_context_length(CONTEXT)
    w.add_embedding_length(HIDDEN)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(FFN)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(5000.0)
    for key, value in meta.items():
        w.add_float32(f"{architecture}.{key.replace('__', '.')}", value)
    for name, array in tensors.items():
        stored = array
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            halves = array.reshape(-1, 2, HEAD // 2, HIDDEN)
            stored = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        for theirs, ours in _GGUF_NAMES:
            name = name.replace(theirs, ours)
        w.add_tensor(name, stored)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def write_tiny_folder(
    folder: Path, architecture: str, tensors: Mapping[str, Array], **config: Any
) -> Path:
    """The weights as a safetensors folder, cut into two files."""
    folder.mkdir()
    values = {
        "model_type": architecture,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": CONTEXT,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(values | config))
    names = list(tensors)
    for part, some in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        write_safetensors(
            folder / f"model-{part}.safetensors", {n: ("F32", tensors[n]) for n in some}
        )
    return folder


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, NDArray[Any]]]) -> None:
    """Arrays with the dtype name to declare; the bytes are taken as they are."""
    header: dict[str, Any] = {"__metadata__": {"format": "np"}}
    at = 0
    for name, (kind, array) in tensors.items():
        header[name] = {
            "dtype": kind,
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    head = json.dumps(header).encode()
    body = b"".join(array.tobytes() for _, array in tensors.values())
    path.write_bytes(len(head).to_bytes(8, "little") + head + body)
