"""Weights of the Llama family as named float32 arrays, whatever file they come from.

Reads a GGUF file or a folder with config.json and safetensors. Knows the names both use and that GGUF stores
the rows of q and k in another order; knows nothing about computing. One vocabulary of names comes out:

    embed [vocab, hidden] · final_norm [hidden] · lm_head [vocab, hidden] unless tied to embed
    layers.N.attn_norm, ffn_norm [hidden] · q, k, v, o, gate, up, down [out, in]
    layers.N.q_bias, k_bias, v_bias [out] (Qwen2)

A tensor or a configuration that is not understood is refused, never ignored: the numbers would be wrong.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.runners.gguf_file import Blocks, GgufFile, bfloat16

Array = NDArray[np.float32]

ARCHITECTURES = ("llama", "qwen2")
_MOST_HEADER_BYTES = 100 << 20

_FOLDER_NAMES = {
    "model.embed_tokens.weight": "embed",
    "model.norm.weight": "final_norm",
    "lm_head.weight": "lm_head",
}
_FOLDER_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_FOLDER_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "ffn_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.bias": "k_bias",
    "self_attn.v_proj.bias": "v_bias",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}
_GGUF_NAMES = {
    "token_embd.weight": "embed",
    "output_norm.weight": "final_norm",
    "output.weight": "lm_head",
}
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_GGUF_LAYER_NAMES = {
    "attn_norm.weight": "attn_norm",
    "ffn_norm.weight": "ffn_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_output.weight": "o",
    "attn_q.bias": "q_bias",
    "attn_k.bias": "k_bias",
    "attn_v.bias": "v_bias",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
}


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers that define a decoder of the family."""

    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    max_model_len: int


def load_llama(path: str | Path) -> tuple[LlamaConfig, dict[str, Array]]:
    """Read a GGUF file or a safetensors folder. Raises ValueError for another family or damage."""
    path = Path(path)
    config, tensors = _from_folder(path) if path.is_dir() else _from_gguf(path)
    _check_shapes(config, tensors, path)
    return config, tensors


def load_blocks(path: str | Path) -> dict[str, Blocks]:
    """The quantised matrices of a GGUF file, under the same names and in the same order of rows.

    Empty for a folder, and without the tensors that are not quantised in blocks of 32.
    """
    path = Path(path)
    if path.is_dir():
        return {}
    file = GgufFile(path)
    kind = file.meta.get("general.architecture")
    heads = int(file.meta.get(f"{kind}.attention.head_count", 1))
    hidden = int(file.meta.get(f"{kind}.embedding_length", 0))
    head_dim = int(file.meta.get(f"{kind}.attention.key_length", hidden // heads))
    found = {}
    for name in file.names:
        blocks = file.blocks(name)
        if blocks is None:
            continue
        ours = _rename(name, _GGUF_NAMES, _GGUF_LAYER, _GGUF_LAYER_NAMES, path)
        if kind == "llama" and ours.endswith((".q", ".k")):
            blocks = Blocks(
                _halves_apart(blocks.levels, head_dim),
                _halves_apart(blocks.scales, head_dim),
                _halves_apart(blocks.leasts, head_dim),
            )
        found[ours] = blocks
    return found


def load_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """All tensors of one safetensors file; every float type becomes float32, integers stay."""
    size = path.stat().st_size
    data = np.memmap(path, np.uint8, mode="r") if size >= 8 else np.zeros(0, np.uint8)
    header_size = int.from_bytes(bytes(data[:8]), "little") if size >= 8 else size
    if header_size > min(size - 8, _MOST_HEADER_BYTES):
        raise ValueError(f"{path} is not a safetensors file: no header of {header_size} bytes")
    try:
        header = json.loads(bytes(data[8 : 8 + header_size]))
        header.pop("__metadata__", None)
        return {n: _decode(path, n, e, data[8 + header_size :]) for n, e in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has a damaged safetensors header: {error!r}") from error


_INTEGERS: Mapping[str, type[np.generic]] = {
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_FLOATS: Mapping[str, type[np.generic]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
}


def _decode(
    path: Path, name: str, entry: Mapping[str, Any], data: NDArray[np.uint8]
) -> NDArray[Any]:
    first, last = entry["data_offsets"]
    shape, kind = tuple(entry["shape"]), entry["dtype"]
    raw = data[first:last].copy()
    item = 2 if kind == "BF16" else np.dtype({**_INTEGERS, **_FLOATS}[kind]).itemsize
    if len(raw) != math.prod(shape) * item:
        raise ValueError(f"{name}: {len(raw)} bytes for {kind} {list(shape)}")
    if kind == "BF16":
        return bfloat16(raw).reshape(shape)
    if kind in _FLOATS:
        return raw.view(_FLOATS[kind]).astype(np.float32, copy=False).reshape(shape)
    return raw.view(_INTEGERS[kind]).reshape(shape)


def _from_folder(folder: Path) -> tuple[LlamaConfig, dict[str, Array]]:
    try:
        raw = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{folder} has no config.json") from None
    _check_folder_config(raw, folder)
    heads = int(raw["num_attention_heads"])
    config = LlamaConfig(
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        ffn_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        rms_eps=float(raw["rms_norm_eps"]),
        rope_theta=float(raw.get("rope_theta", 10_000.0)),
        max_model_len=int(raw["max_position_embeddings"]),
    )
    tensors = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no safetensors file")
    for file in files:
        for name, array in load_safetensors(file).items():
            if not name.endswith("rotary_emb.inv_freq"):  # old exports store what theta says
                ours = _rename(name, _FOLDER_NAMES, _FOLDER_LAYER, _FOLDER_LAYER_NAMES, folder)
                tensors[ours] = np.asarray(array, np.float32)
    if raw.get("tie_word_embeddings", False):
        tensors.pop("lm_head", None)
    return config, tensors


def _check_folder_config(raw: Mapping[str, Any], folder: Path) -> None:
    if raw.get("model_type") not in ARCHITECTURES:
        raise ValueError(f"{folder} is a {raw.get('model_type')!r} model, none of {ARCHITECTURES}")
    scaling = raw.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise ValueError(f"{folder} scales its rotary embedding ({scaling}), which is not known")
    if raw.get("use_sliding_window") or raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{folder} has a sliding window or an activation other than silu")


def _from_gguf(path: Path) -> tuple[LlamaConfig, dict[str, Array]]:
    file = GgufFile(path)
    kind = file.meta.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(f"{path} is a {kind!r} model, none of {ARCHITECTURES}")

    def number(key: str, default: float | str | None = None) -> Any:
        value = file.meta.get(f"{kind}.{key}", default)
        if value is None:
            raise ValueError(f"{path} does not state {kind}.{key}")
        return value

    if number("rope.scaling.factor", 1.0) != 1.0 or number("rope.scaling.type", "none") != "none":
        raise ValueError(f"{path} scales its rotary embedding, which is not known")
    heads, hidden = int(number("attention.head_count")), int(number("embedding_length"))
    head_dim = int(number("attention.key_length", hidden // heads))
    if number("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{path} rotates a part of each head only, which is not known")
    names = {
        name: _rename(name, _GGUF_NAMES, _GGUF_LAYER, _GGUF_LAYER_NAMES, path)
        for name in file.names
    }
    tensors = {ours: file.tensor(name) for name, ours in names.items()}
    if "embed" not in tensors:
        raise ValueError(f"{path} has no token embedding")
    config = LlamaConfig(
        vocab_size=len(tensors["embed"]),
        hidden_size=hidden,
        ffn_size=int(number("feed_forward_length")),
        num_layers=int(number("block_count")),
        num_heads=heads,
        num_kv_heads=int(number("attention.head_count_kv", heads)),
        head_dim=head_dim,
        rms_eps=float(number("attention.layer_norm_rms_epsilon")),
        rope_theta=float(number("rope.freq_base", 10_000.0)),
        max_model_len=int(number("context_length")),
    )
    if kind == "llama":
        for name in tensors:
            if name.startswith("layers.") and name.endswith((".q", ".k")):
                tensors[name] = _halves_apart(tensors[name], head_dim)
    return config, tensors


_T = TypeVar("_T", bound=np.generic)


def _halves_apart(weight: NDArray[_T], head_dim: int) -> NDArray[_T]:
    """Undo GGUF's order of rows in llama's q and k.

    There, the two rows that rotary embedding turns into each other are neighbours; here (and in safetensors)
    they are half a head apart.
    """
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _rename(
    name: str,
    whole: Mapping[str, str],
    layer: re.Pattern[str],
    in_layer: Mapping[str, str],
    path: Path,
) -> str:
    if name in whole:
        return whole[name]
    match = layer.fullmatch(name)
    if match is None or match[2] not in in_layer:
        raise ValueError(f"{path} has a tensor {name} that no model of the family has")
    return f"layers.{int(match[1])}.{in_layer[match[2]]}"


def _check_shapes(config: LlamaConfig, tensors: Mapping[str, Array], path: Path) -> None:
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    per_layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (c.hidden_size,),
        "ffn_norm": (c.hidden_size,),
        "q": (q, c.hidden_size),
        "k": (kv, c.hidden_size),
        "v": (kv, c.hidden_size),
        "o": (c.hidden_size, q),
        "gate": (c.ffn_size, c.hidden_size),
        "up": (c.ffn_size, c.hidden_size),
        "down": (c.hidden_size, c.ffn_size),
    }
    biases = {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    expected: dict[str, tuple[int, ...]] = {
        "embed": (c.vocab_size, c.hidden_size),
        "final_norm": (c.hidden_size,),
    }
    if "lm_head" in tensors:
        expected["lm_head"] = expected["embed"]
    if "layers.0.q_bias" in tensors:
        per_layer |= biases
    for i in range(c.num_layers):
        expected |= {f"layers.{i}.{name}": shape for name, shape in per_layer.items()}
    for name in sorted(expected.keys() | tensors.keys()):
        found = tensors[name].shape if name in tensors else None
        if found != expected.get(name):
            raise ValueError(f"{path}: {name} is {found}, expected {expected.get(name)}")
