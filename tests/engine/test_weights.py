"""Weights: dequantised as the `gguf` package does it, and the same from GGUF and safetensors."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from engine.runners import open_runner
from engine.runners.gguf_file import GgufFile
from engine.runners.weights import load_llama, load_safetensors
from tests.fakes.runners import (
    CONTEXT,
    HEADS,
    VOCAB,
    step,
    tiny_tensors,
    write_safetensors,
    write_tiny_folder,
    write_tiny_gguf,
)


def write_one(path: Path, data: np.ndarray, kind: Kind) -> Path:
    w = gguf.GGUFWriter(path, "llama")
    w.add_array("some.words", ["a", "\u0120b", ""])
    w.add_array("some.numbers", [1, -2, 3])
    w.add_bool("some.flag", True)
    w.add_tensor("first", np.arange(5, dtype=np.float32))  # so that the next one needs its padding
    w.add_tensor("w", data, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_dequantises_like_the_gguf_package(tmp_path: Path, name: str) -> None:
    kind = Kind[name]
    weights = np.random.default_rng(3).standard_normal((6, 96)).astype(np.float32)
    packed = gguf.quants.quantize(weights, kind)
    file = GgufFile(write_one(tmp_path / "w.gguf", packed, kind))
    expected = gguf.quants.dequantize(packed, kind)
    got = file.tensor("w")
    assert got.dtype == np.float32 and got.shape == (6, 96)
    np.testing.assert_array_equal(got, expected)
    assert np.abs(got - weights).max() < 0.5
    np.testing.assert_array_equal(file.tensor("first"), np.arange(5))


def test_reads_metadata(tmp_path: Path) -> None:
    file = GgufFile(write_one(tmp_path / "w.gguf", np.zeros((1, 32), np.float32), Kind.F32))
    assert file.meta["some.words"] == ["a", "\u0120b", ""]
    assert file.meta["some.numbers"] == [1, -2, 3]
    assert file.meta["some.flag"] is True
    assert file.names == ["first", "w"]


def test_refuses_a_k_quant_by_name(tmp_path: Path) -> None:
    block = np.zeros((1, gguf.constants.GGML_QUANT_SIZES[Kind.Q4_K][1]), np.uint8)
    file = GgufFile(write_one(tmp_path / "w.gguf", block, Kind.Q4_K))
    with pytest.raises(ValueError, match="tensor w has type Q4_K; this reader knows F32, F16"):
        file.tensor("w")


def test_refuses_damaged_files(tmp_path: Path) -> None:
    whole = write_one(tmp_path / "w.gguf", np.zeros((4, 32), np.float32), Kind.F32).read_bytes()
    for name, content in {
        "text": b"no model here, only text",
        "head": whole[:60],
        "version": whole[:4] + b"\x09" + whole[5:],
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="GGUF"):
            GgufFile(tmp_path / name)
    (tmp_path / "tail").write_bytes(whole[:-200])
    with pytest.raises(ValueError, match="ends within tensor w"):
        GgufFile(tmp_path / "tail").tensor("w")


def test_reads_every_safetensors_type(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0], [0.25, 3.0]], np.float32)
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    write_safetensors(
        tmp_path / "t.safetensors",
        {
            "f64": ("F64", values.astype(np.float64)),
            "f32": ("F32", values),
            "f16": ("F16", values.astype(np.float16)),
            "bf16": ("BF16", bf16),
            "i64": ("I64", np.arange(3)),
        },
    )
    tensors = load_safetensors(tmp_path / "t.safetensors")
    for name in ("f64", "f32", "f16", "bf16"):
        assert tensors[name].dtype == np.float32
        np.testing.assert_array_equal(tensors[name], values)
    assert tensors["i64"].dtype == np.int64 and tensors["i64"].tolist() == [0, 1, 2]


def test_refuses_damaged_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    for content in (b"", b"\xff" * 20, (5).to_bytes(8, "little") + b"[1,2]"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"t\.safetensors"):
            load_safetensors(path)
    write_safetensors(path, {"w": ("F32", np.zeros(4, np.float32))})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="12 bytes for F32"):
        load_safetensors(path)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_and_folder_give_the_same_arrays(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    tensors = tiny_tensors(architecture, tied=tied)
    from_gguf = load_llama(write_tiny_gguf(tmp_path / "m.gguf", architecture, tensors))
    from_folder = load_llama(write_tiny_folder(tmp_path / "m", architecture, tensors))
    for (config, arrays), eps in ((from_gguf, np.float32(1e-5)), (from_folder, 1e-5)):
        assert (config.vocab_size, config.num_heads, config.max_model_len) == (
            VOCAB,
            HEADS,
            CONTEXT,
        )
        assert config.rms_eps == float(eps) and config.rope_theta == 5000.0
        assert ("lm_head" in arrays) is not tied
        assert ("layers.0.q_bias" in arrays) is (architecture == "qwen2")
    assert from_gguf[1].keys() == from_folder[1].keys()
    for name, array in from_folder[1].items():
        np.testing.assert_array_equal(from_gguf[1][name], array)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_reference_agrees_with_llamacpp_on_float_weights(tmp_path: Path, architecture: str) -> None:
    """On float32 weights only llama.cpp's float16 KV is between them: a wrong name, bias or rotation shows."""
    path = str(write_tiny_gguf(tmp_path / "m.gguf", architecture, tiny_tensors(architecture)))
    ids = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
    logits = []
    for name in ("reference", "llamacpp"):
        runner = open_runner(
            name,
            path,
            max_rows=1,
            kv_tokens=64,
            max_batch_tokens=64,
            max_model_len=None,
            threads=1,
        )
        logits.append(runner.forward(step((0, 0, ids), wants="all")).copy())
        runner.close()
    assert (
        np.abs(logits[0] - logits[1]).max() < 0.03
    )  # seen: 0.009; logits have a deviation of 0.94


def test_refuses_what_it_would_compute_wrongly(tmp_path: Path) -> None:
    tensors = tiny_tensors("llama")
    cases = {
        "scales its rotary": write_tiny_gguf(
            tmp_path / "a.gguf", "llama", tensors, rope__scaling__factor=4.0
        ),
        "none of": write_tiny_folder(tmp_path / "b", "mixtral", tensors),
        "scales": write_tiny_folder(
            tmp_path / "c", "llama", tensors, rope_scaling={"rope_type": "llama3"}
        ),
        "sliding window": write_tiny_folder(
            tmp_path / "d", "llama", tensors, use_sliding_window=True
        ),
        "model.extra that no model": write_tiny_folder(
            tmp_path / "e", "llama", tensors | {"model.extra": np.zeros(1, np.float32)}
        ),
        "layers.1.q_bias is": write_tiny_folder(
            tmp_path / "f",
            "llama",
            tensors | {"model.layers.1.self_attn.q_proj.bias": tensors["model.norm.weight"]},
        ),
        "layers.1.down is None": write_tiny_folder(
            tmp_path / "g",
            "llama",
            {n: a for n, a in tensors.items() if n != "model.layers.1.mlp.down_proj.weight"},
        ),
    }
    for message, path in cases.items():
        with pytest.raises(ValueError, match=message):
            load_llama(path)
