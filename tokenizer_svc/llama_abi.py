"""llama.cpp's C interface, reached through the shared library inside the `xllamacpp` wheel.

Knows declarations, struct layouts and how to load a model file safely; knows nothing about tokens, prompts
or batches. The layouts belong to one build: `lib()` refuses any other, because a struct that moved by one
field would not fail, it would answer nonsense.

Two rules for callers. Errors are checked before the call: a C++ exception that leaves the library ends the
process, so ids are range-checked here in Python. And pointers are plain: whoever loads a model frees it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any

from cffi import FFI

log = logging.getLogger("llama.cpp")

WHEEL_VERSION = "2026.10.11549"
"""The xllamacpp release whose layouts are declared below."""

ffi = FFI()
ffi.cdef("""
typedef int32_t llama_token;
typedef int32_t llama_pos;
typedef int32_t llama_seq_id;

typedef struct {
    int32_t n_tokens;
    llama_token *token;
    float *embd;
    llama_pos *pos;
    int32_t *n_seq_id;
    llama_seq_id **seq_id;      /* one pointer per token, each its own allocation */
    int8_t *logits;             /* nonzero: this token's logits are wanted */
} llama_batch;

typedef struct {
    void *devices;
    void *tensor_buft_overrides;
    int32_t n_gpu_layers;
    int split_mode;
    int load_mode;
    int lazy_mode;
    int32_t main_gpu;
    float *tensor_split;
    void *progress_callback;
    void *progress_callback_user_data;
    void *kv_overrides;
    bool vocab_only;
    bool check_tensors;
    bool use_extra_bufts;
    bool no_host;
    bool no_alloc;
    bool load_mtp;
} llama_model_params;

typedef struct {
    uint32_t n_ctx;
    uint32_t n_batch;
    uint32_t n_ubatch;
    uint32_t n_seq_max;
    uint32_t n_rs_seq;
    uint32_t n_outputs_max;
    uint32_t n_outputs_max_per_seq;
    int32_t n_threads;
    int32_t n_threads_batch;
    int ctx_type;
    int rope_scaling_type;
    int pooling_type;
    int attention_type;
    int flash_attn_type;
    float rope_freq_base;
    float rope_freq_scale;
    float yarn_ext_factor;
    float yarn_attn_factor;
    float yarn_beta_fast;
    float yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    float defrag_thold;
    void *cb_eval;
    void *cb_eval_user_data;
    int type_k;
    int type_v;
    size_t moe_cache_size;
    void *abort_callback;
    void *abort_callback_data;
    bool embeddings;
    bool offload_kqv;
    bool no_perf;
    bool op_offload;
    bool swa_full;
    bool kv_unified;
    void *samplers;
    size_t n_samplers;
    void *ctx_other;
} llama_context_params;

/* process */
void llama_log_set(void (*callback)(int level, const char *text, void *user_data), void *user_data);
void llama_backend_init(void);
const char *llama_print_system_info(void);

/* model */
llama_model_params llama_model_default_params(void);
void *llama_model_load_from_file(const char *path, llama_model_params params);
void llama_model_free(void *model);
const void *llama_model_get_vocab(const void *model);
const char *llama_model_chat_template(const void *model, const char *name);
int32_t llama_model_n_ctx_train(const void *model);
int32_t llama_model_n_embd(const void *model);
int32_t llama_model_n_layer(const void *model);
int32_t llama_model_n_head(const void *model);
int32_t llama_model_n_head_kv(const void *model);
uint64_t llama_model_n_params(const void *model);
uint64_t llama_model_size(const void *model);
bool llama_model_has_encoder(const void *model);
bool llama_model_is_recurrent(const void *model);
int32_t llama_model_desc(const void *model, char *buf, size_t buf_size);
int32_t llama_model_meta_count(const void *model);
int32_t llama_model_meta_val_str(const void *model, const char *key, char *buf, size_t buf_size);
int32_t llama_model_meta_key_by_index(const void *model, int32_t i, char *buf, size_t buf_size);
int32_t llama_model_meta_val_str_by_index(const void *model, int32_t i, char *buf, size_t buf_size);

/* vocabulary */
int llama_vocab_type(const void *vocab);
int32_t llama_vocab_n_tokens(const void *vocab);
const char *llama_vocab_get_text(const void *vocab, llama_token token);
float llama_vocab_get_score(const void *vocab, llama_token token);
int llama_vocab_get_attr(const void *vocab, llama_token token);
bool llama_vocab_is_eog(const void *vocab, llama_token token);
bool llama_vocab_is_control(const void *vocab, llama_token token);
llama_token llama_vocab_bos(const void *vocab);
llama_token llama_vocab_eos(const void *vocab);
llama_token llama_vocab_eot(const void *vocab);
llama_token llama_vocab_sep(const void *vocab);
llama_token llama_vocab_pad(const void *vocab);
bool llama_vocab_get_add_bos(const void *vocab);
bool llama_vocab_get_add_eos(const void *vocab);
bool llama_vocab_get_add_sep(const void *vocab);
int32_t llama_tokenize(const void *vocab, const char *text, int32_t text_len, llama_token *tokens,
                       int32_t n_tokens_max, bool add_special, bool parse_special);
int32_t llama_token_to_piece(const void *vocab, llama_token token, char *buf, int32_t length,
                             int32_t lstrip, bool special);
int32_t llama_detokenize(const void *vocab, const llama_token *tokens, int32_t n_tokens, char *text,
                         int32_t text_len_max, bool remove_special, bool unparse_special);

/* context and decoding */
llama_context_params llama_context_default_params(void);
void *llama_init_from_model(void *model, llama_context_params params);
void llama_free(void *ctx);
uint32_t llama_n_ctx(const void *ctx);
uint32_t llama_n_ctx_seq(const void *ctx);
uint32_t llama_n_batch(const void *ctx);
uint32_t llama_n_ubatch(const void *ctx);
uint32_t llama_n_seq_max(const void *ctx);
void llama_set_n_threads(void *ctx, int32_t n_threads, int32_t n_threads_batch);
void llama_set_abort_callback(void *ctx, bool (*callback)(void *data), void *data);
void llama_set_embeddings(void *ctx, bool embeddings);
void llama_set_causal_attn(void *ctx, bool causal_attn);
llama_batch llama_batch_init(int32_t n_tokens, int32_t embd, int32_t n_seq_max);
void llama_batch_free(llama_batch batch);
int32_t llama_decode(void *ctx, llama_batch batch);
float *llama_get_logits(void *ctx);
float *llama_get_logits_ith(void *ctx, int32_t i);
float *llama_get_embeddings(void *ctx);
float *llama_get_embeddings_seq(void *ctx, llama_seq_id seq_id);

/* the KV store */
void *llama_get_memory(const void *ctx);
void llama_memory_clear(void *mem, bool data);
bool llama_memory_seq_rm(void *mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1);
void llama_memory_seq_cp(void *mem, llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1);
void llama_memory_seq_keep(void *mem, llama_seq_id seq_id);
void llama_memory_seq_add(void *mem, llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos delta);
llama_pos llama_memory_seq_pos_min(void *mem, llama_seq_id seq_id);
llama_pos llama_memory_seq_pos_max(void *mem, llama_seq_id seq_id);
bool llama_memory_can_shift(void *mem);
size_t llama_state_seq_get_size(void *ctx, llama_seq_id seq_id);
size_t llama_state_seq_get_data(void *ctx, uint8_t *dst, size_t size, llama_seq_id seq_id);
size_t llama_state_seq_set_data(void *ctx, const uint8_t *src, size_t size, llama_seq_id seq_id);
""")

_lock = threading.Lock()
_library: Any = None
_recent_errors: deque[str] = deque(maxlen=4)
"""What llama.cpp last complained about: the only place where a failed load says why."""

# llama.cpp counts debug, info, warning, error from 1; its "info" is a page per model, so it is our debug.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.WARNING}


@ffi.callback("void(int, const char *, void *)")  # type: ignore[untyped-decorator]
def _on_log(level: int, text: Any, _user_data: Any) -> None:
    line = ffi.string(text).decode(errors="replace").strip()
    if not line:
        return
    if level == 4:
        _recent_errors.append(line)
    log.log(_LEVELS.get(level, logging.DEBUG), "%s", line)


def lib() -> Any:
    """The library, loaded at the first call. Raises RuntimeError for any build but the declared one."""
    global _library
    with _lock:
        if _library is None:
            _library = _open()
        return _library


def _open() -> Any:
    try:
        version = importlib.metadata.version("xllamacpp")
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(
            f"llama.cpp is not installed: pip install xllamacpp=={WHEEL_VERSION}"
        ) from None
    if version != WHEEL_VERSION:
        raise RuntimeError(
            f"xllamacpp {version} is installed, but this build knows the memory layout of "
            f"{WHEEL_VERSION} only: pip install xllamacpp=={WHEEL_VERSION}"
        )
    # Found without importing the package, whose own start-up we do not need.
    spec = importlib.util.find_spec("xllamacpp")
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "xllamacpp.abi3.so"
    # Spinning OpenMP threads burn a whole core while they wait, and slow a shared machine ten times.
    # The OpenMP runtime reads this when it is loaded, so it has to be set before.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        library = ffi.dlopen(str(path))
    except OSError as error:
        raise RuntimeError(
            f"llama.cpp cannot be loaded ({error}); it needs the system package libgomp1"
        ) from error
    _check_layout(library)
    library.llama_log_set(_on_log, ffi.NULL)
    library.llama_backend_init()
    return library


def _check_layout(library: Any) -> None:
    """Compare the defaults, field by field, with those of the declared build: moved fields show here."""
    m, c = library.llama_model_default_params(), library.llama_context_default_params()
    got = {
        "context": (c.n_ctx, c.n_batch, c.n_ubatch, c.n_seq_max),
        "types": (c.rope_scaling_type, c.pooling_type, c.attention_type, c.flash_attn_type),
        "yarn": (c.yarn_ext_factor, c.yarn_orig_ctx),
        "kv": (c.type_k, c.type_v, c.offload_kqv),
        "model": (m.vocab_only, m.check_tensors, m.use_extra_bufts),
    }
    expected = {
        "context": (512, 2048, 512, 1),
        "types": (-1, -1, -1, -1),
        "yarn": (-1.0, 0),
        "kv": (1, 1, True),
        "model": (False, False, True),
    }
    if got != expected:
        raise RuntimeError(
            f"llama.cpp in xllamacpp {WHEEL_VERSION} does not have the memory layout it should: "
            f"defaults {got}, expected {expected}"
        )


def load_model(path: str | Path, vocab_only: bool = False, n_gpu_layers: int | None = None) -> Any:
    """Load a GGUF file; the caller frees the pointer with `llama_model_free`.

    `vocab_only` reads the vocabulary and metadata, no weights. `n_gpu_layers` None is the library's choice.
    Raises ValueError when the file is no GGUF model that llama.cpp can read.
    """
    _check_file(Path(path))
    library = lib()
    params = library.llama_model_default_params()
    params.vocab_only = vocab_only
    if n_gpu_layers is not None:
        params.n_gpu_layers = n_gpu_layers
    with _load_lock:
        _recent_errors.clear()
        model = library.llama_model_load_from_file(os.fsencode(path), params)
        why = "; ".join(_recent_errors)
    if model == ffi.NULL:
        raise ValueError(
            f"{path} is not a model that llama.cpp can load: {why or 'no reason given'}"
        )
    return model


_load_lock = threading.Lock()
"""One load at a time, so that the collected complaints belong to it."""


def _check_file(path: Path) -> None:
    # Checked here because llama.cpp's answer to a stray file is a page of log and no reason.
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    with path.open("rb") as file:
        head = file.read(24)
    if head[:4] != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file: it starts with {head[:4]!r}, not b'GGUF'")
    version = int.from_bytes(head[4:8], "little")
    if len(head) < 24 or version not in (2, 3):
        raise ValueError(
            f"{path} is a GGUF file of version {version}; versions 2 and 3 can be read"
        )


def meta(model: Any, key: str) -> str | None:
    """One metadata value as text, or None. Arrays are not available this way."""
    library, name = lib(), key.encode()
    size = library.llama_model_meta_val_str(model, name, ffi.NULL, 0)
    if size < 0:
        return None
    buf = ffi.new("char[]", size + 1)
    library.llama_model_meta_val_str(model, name, buf, size + 1)
    return str(ffi.buffer(buf, size)[:].decode(errors="replace"))
