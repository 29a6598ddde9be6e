"""A worker's settings."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from candor.settings import SettingError, host_port, setting
from engine.runners import RUNNERS

MIB = 1024 * 1024
_FIRST_PORT = 50100


@dataclass(frozen=True)
class Config:
    """An engine worker: one model on one card, many sequences at a time."""

    model: str = setting(
        "",
        "the model's weights: a GGUF file, or the folder of a BERT sentence encoder (such a worker embeds)",
        unit="path",
    )
    model_name: str = setting(
        "", "the name answers carry; the name of the file or folder when empty"
    )
    served_aliases: tuple[str, ...] = setting((), "further names requests may use", unit="name,...")
    model_kind: str = setting(
        "auto",
        "what the model is for: generative, embedding, or auto (what lies at its path tells)",
        choices=("auto", "generative", "embedding"),
    )
    runner: str = setting(
        "auto",
        "what computes logits: auto (the faster of the next two, timed at the start), native (CPU, small "
        "models of the Llama family), llamacpp (every GGUF), reference (plain numpy), synthetic (no "
        "model, for tests)",
        choices=("auto", *RUNNERS),
    )
    batch_invariant: bool = setting(
        False,
        "require a runner whose numbers do not depend on who else is in the batch: auto then takes native "
        "or fails, and llamacpp is refused",
    )
    speculation: str = setting(
        "auto",
        "drafts from the text so far, verified in the same step, with the same tokens as a result: off, "
        "lookup, or auto (lookup with the native runner, where it was measured to help)",
        choices=("auto", "off", "lookup"),
    )
    scheduler: str = setting(
        "127.0.0.1:50051", "scheduler this worker attaches to", unit="host:port"
    )
    engine: str | None = setting(
        None,
        "address of the gRPC door; 127.0.0.1, port 50100 + card index when unset",
        unit="host:port",
    )
    engine_metrics: str | None = setting(
        None,
        "address of this worker's own Prometheus endpoint, or of the first free port behind it; nothing "
        "listens when unset",
        unit="host:port",
    )
    advertise: str | None = setting(
        None,
        "address at which the scheduler reaches this worker; the door's own when unset",
        unit="host:port",
    )
    card: str = setting("cpu", "what the worker computes on, as people name it")
    card_index: int = setting(0, "number of the card on this host", minimum=0, maximum=4095)
    worker_id: str | None = setting(
        None, "name of the seat, the same over restarts; host and port when unset"
    )
    slots: int = setting(
        8,
        "sequences that run at the same time, or requests that are embedded together",
        unit="sequences",
        minimum=1,
        maximum=1024,
    )
    cached_rows: int | None = setting(
        None,
        "finished sequences whose prefixes may stay for reuse; as many as slots when unset",
        unit="sequences",
        minimum=0,
        maximum=1024,
    )
    max_model_len: int | None = setting(
        None,
        "longest prompt and answer together, or longest text to embed; the model's own, as far as "
        "kv-tokens go, when unset",
        unit="tokens",
        minimum=2,
    )
    kv_tokens: int | None = setting(
        None,
        "token positions of the KV store; the longer of 8192, max-model-len and 1024 a slot when unset",
        unit="tokens",
        minimum=2,
    )
    token_budget: int = setting(
        256,
        "most tokens a step computes, or a pass of texts to embed",
        unit="tokens",
        minimum=1,
        maximum=65536,
    )
    mixed_token_budget: int = setting(
        64,
        "the same while any sequence is decoding: small values keep streams smooth when a long "
        "prompt enters, large ones prefill it sooner",
        unit="tokens",
        minimum=1,
        maximum=65536,
    )
    threads: int | None = setting(
        None,
        "threads of the forward pass, or passes of texts to embed at the same time; all processors when unset",
        unit="threads",
        minimum=1,
    )
    max_requests: int = setting(
        256, "requests the worker holds; more are refused", unit="requests", minimum=1
    )
    max_embed_inputs: int = setting(
        2048, "most texts of a request for embeddings", unit="texts", minimum=1
    )
    max_embed_tokens: int = setting(
        1_000_000,
        "tokens of such texts that the worker holds; more are refused",
        unit="tokens",
        minimum=1,
    )
    max_logprobs: int = setting(
        100, "most alternatives a request may ask for per token", unit="tokens", minimum=0
    )
    max_choices: int = setting(
        128, "most choices a request may generate", unit="choices", minimum=1
    )
    stream_buffer_frames: int = setting(
        4096, "frames a scheduler may leave unread before its stream ends", unit="frames", minimum=1
    )
    stream_buffer_bytes: int = setting(
        64 * MIB, "bytes it may leave unread", unit="bytes", minimum=1024
    )
    drain_grace_s: float = setting(
        30.0, "time that running requests get when the worker leaves", unit="s", minimum=0.0
    )
    log_level: str = setting(
        "info", "least level that is logged", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        if not self.model:
            raise SettingError(
                "--model is missing: the path of a GGUF file or of an encoder's folder"
            )
        if not Path(self.model).expanduser().exists():
            raise SettingError(f"--model={self.model!r} does not exist")
        for address in (self.scheduler, self.address, self.advertise or self.address):
            host_port(address)
        if self.engine_metrics is not None:
            host_port(self.engine_metrics)
        if self.slots > self.token_budget:
            raise SettingError(
                f"--slots={self.slots} is above --token-budget={self.token_budget}: a step must have "
                "room for a token of each"
            )
        if self.kv_tokens is not None and self.kv_tokens < (self.max_model_len or 0):
            raise SettingError(
                f"--kv-tokens={self.kv_tokens} is below --max-model-len={self.max_model_len}"
            )

    @property
    def model_path(self) -> str:
        """The weights."""
        return str(Path(self.model).expanduser())

    @property
    def name(self) -> str:
        """The model's name."""
        path = Path(self.model)
        return self.model_name or (path.name if Path(self.model_path).is_dir() else path.stem)

    @property
    def address(self) -> str:
        """Where the door is."""
        return self.engine or f"127.0.0.1:{_FIRST_PORT + self.card_index}"

    @property
    def num_rows(self) -> int:
        """Rows of the runner: running and cached sequences."""
        return self.slots + (self.slots if self.cached_rows is None else self.cached_rows)

    @property
    def num_kv_tokens(self) -> int:
        """Size of the KV store."""
        return self.kv_tokens or max(8192, self.max_model_len or 0, 1024 * self.slots)

    @property
    def num_threads(self) -> int:
        """Threads of the forward pass."""
        return self.threads or len(os.sched_getaffinity(0))

    @property
    def seat(self) -> str:
        """The worker's stable name."""
        _, port = host_port(self.address)
        return self.worker_id or f"{socket.gethostname()}-{port}"

    def reachable_at(self, port: int) -> str:
        """The address the scheduler is told, once the port is known."""
        if self.advertise:
            return self.advertise
        host, _ = host_port(self.address)
        if host in ("", "0.0.0.0", "::"):
            host = socket.gethostname()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
