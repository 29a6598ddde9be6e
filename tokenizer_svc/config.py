"""The tokenizer service's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from candor.settings import SettingError, setting
from tokenizer_svc.chat_template import TemplateLimits
from tokenizer_svc.template_pool import PoolLimits

MIB = 1024 * 1024


@dataclass(frozen=True)
class Config:
    """The tokenizer service: text and conversations to token ids, and back."""

    tokenizer: str = setting("127.0.0.1:50052", "address of the gRPC door", unit="host:port")
    # CANDOR_MODELS is the folder of fetched models. As a flag, --models is enough.
    models_served: tuple[str, ...] = setting(
        (),
        "models and where they are: a GGUF file or a folder with tokenizer.json",
        unit="name=path,...",
    )
    max_text_bytes: int = setting(
        4 * MIB, "largest text or conversation; larger ones are refused", unit="bytes", minimum=1
    )
    max_encode_batch: int = setting(
        1024, "most texts, conversations or id lists in one call", unit="items", minimum=1
    )
    # Larger ones would also be too deep for the main thread's stack, see `gguf_codec`.
    encode_inline_bytes: int = setting(
        4096,
        "a call with at most this much text is worked on the spot, others in a thread",
        unit="bytes",
        minimum=0,
        maximum=8192,
    )
    tokenizer_threads: int = setting(2, "threads for large texts", unit="threads", minimum=1)
    max_waiting_texts: int = setting(
        256,
        "calls with large texts that may wait for a thread; more are refused",
        unit="calls",
        minimum=1,
    )
    template_processes: int = setting(
        1, "processes that render templates of requests", unit="processes", minimum=1
    )
    template_timeout_s: float = setting(
        2.0, "longest time a template of a request may take", unit="s", minimum=0.001
    )
    template_memory_mib: int = setting(
        512, "memory of a process that renders templates of requests", unit="MiB", minimum=128
    )
    template_max_waiting: int = setting(
        64, "templates of requests that may wait; more are refused", unit="calls", minimum=1
    )
    template_cache: int = setting(
        64, "compiled templates that each such process remembers", unit="templates", minimum=1
    )
    max_template_characters: int = setting(
        100_000, "largest chat template", unit="characters", minimum=1
    )
    drain_grace_s: float = setting(
        5.0, "at a stop signal, time for running calls to end", unit="s", minimum=0.0
    )
    log_level: str = setting(
        "info", "least level that is logged", choices=("debug", "info", "warning", "error")
    )

    def model_paths(self) -> dict[str, Path]:
        """Name → path. Raises SettingError for an entry that is not name=path, or a name given twice."""
        paths: dict[str, Path] = {}
        for entry in self.models_served:
            name, equals, path = entry.partition("=")
            if not (name and equals and path):
                raise SettingError(f"models-served entry {entry!r} is not name=path")
            if name in paths:
                raise SettingError(f"models-served names {name!r} twice")
            paths[name] = Path(path).expanduser()
        if not paths:
            raise SettingError("models-served is empty: give at least one name=path")
        return paths

    def pool_limits(self) -> PoolLimits:
        """The settings that concern templates of requests."""
        return PoolLimits(
            processes=self.template_processes,
            max_waiting=self.template_max_waiting,
            timeout_s=self.template_timeout_s,
            memory_bytes=self.template_memory_mib * MIB,
            templates=self.template_cache,
            sizes=self.template_limits(),
        )

    def template_limits(self) -> TemplateLimits:
        """Sizes that any template keeps to. A character takes one byte at least."""
        return TemplateLimits(self.max_template_characters, self.max_text_bytes)
