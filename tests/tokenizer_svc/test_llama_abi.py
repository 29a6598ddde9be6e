"""The binding to llama.cpp: what it loads, what it refuses, and how quietly."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenizer_svc import llama_abi


def test_loads_a_vocabulary_without_weights(model_path: Path) -> None:
    model = llama_abi.load_model(model_path, vocab_only=True)
    try:
        library = llama_abi.lib()
        vocab = library.llama_model_get_vocab(model)
        assert library.llama_vocab_n_tokens(vocab) == 49152
        assert llama_abi.meta(model, "general.architecture") == "llama"
        assert llama_abi.meta(model, "no.such.key") is None
    finally:
        llama_abi.lib().llama_model_free(model)


def test_a_file_that_is_no_model_is_refused_with_its_reason(tmp_path: Path) -> None:
    stray = tmp_path / "stray.gguf"
    stray.write_bytes(b"hello, this is text")
    with pytest.raises(ValueError, match=r"stray\.gguf is not a GGUF file: it starts with b'hell'"):
        llama_abi.load_model(stray)
    with pytest.raises(ValueError, match="is not a file"):
        llama_abi.load_model(tmp_path / "missing.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match="is not a GGUF file"):
        llama_abi.load_model(tmp_path / "empty.gguf")
    (tmp_path / "old.gguf").write_bytes(b"GGUF\x01\0\0\0" + bytes(64))
    with pytest.raises(ValueError, match="version 1; versions 2 and 3"):
        llama_abi.load_model(tmp_path / "old.gguf")


@pytest.mark.parametrize("kept", [24, 3000, 3_000_000])
def test_a_cut_off_model_is_refused_not_crashed_on(
    kept: int, model_path: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    with model_path.open("rb") as file:
        cut.write_bytes(file.read(kept))
    with pytest.raises(
        ValueError, match=r"cut\.gguf is not a model that llama\.cpp can load: .*fail"
    ):
        llama_abi.load_model(cut, vocab_only=True)


def test_another_build_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_abi, "_library", None)
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "2027.1.1")
    with pytest.raises(RuntimeError, match=r"xllamacpp 2027\.1\.1 is installed.*2026\.10\.11549"):
        llama_abi.lib()


def test_a_moved_struct_field_is_noticed() -> None:
    class Moved:
        """The library, but for one default that reads as its neighbour would."""

        def __getattr__(self, name: str) -> object:
            return getattr(llama_abi.lib(), name)

        def llama_context_default_params(self) -> object:
            params = llama_abi.lib().llama_context_default_params()
            params.n_batch, params.n_ubatch = params.n_ubatch, params.n_batch
            return params

    with pytest.raises(RuntimeError, match="memory layout"):
        llama_abi._check_layout(Moved())


def test_what_the_library_says_goes_to_logging_not_to_the_terminal(
    model_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, logger="llama.cpp"):
        llama_abi.lib().llama_model_free(llama_abi.load_model(model_path, vocab_only=True))
    assert any("general.architecture" in record.message for record in caplog.records)
    assert {r.levelno for r in caplog.records if "general" in r.message} == {logging.DEBUG}
    out = capfd.readouterr()
    assert out.out == "" and out.err == ""


@pytest.mark.parametrize(("given", "seen"), [(None, "passive"), ("active", "active")])
def test_openmp_threads_wait_without_spinning_unless_told_otherwise(
    given: str | None, seen: str
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    if given:
        environment["OMP_WAIT_POLICY"] = given
    # The C library's own view, from a process in which nothing is loaded yet.
    code = (
        "import ctypes, tokenizer_svc.llama_abi as a; a.lib();"
        "g = ctypes.CDLL(None).getenv; g.restype = ctypes.c_char_p; print(g(b'OMP_WAIT_POLICY').decode())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == seen
