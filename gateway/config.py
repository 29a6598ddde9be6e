"""The gateway's settings. What each means is said once, in its help text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from candor.settings import SettingError, host_port, setting

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Config:
    """The HTTP door: OpenAI-compatible requests in, JSON and SSE out."""

    http: str = setting("127.0.0.1:8000", "address of the HTTP door", unit="host:port")
    scheduler: str = setting("127.0.0.1:50051", "address of the scheduler", unit="host:port")
    tokenizer: str = setting(
        "127.0.0.1:50052", "address of the tokenizer service", unit="host:port"
    )
    dialect: str = setting("vllm-0.5", "the dialect at /v1", choices=("vllm-0.5",))
    api_key: tuple[str, ...] = setting((), "keys that may use /v1, with commas", secret=True)
    root_path: str = setting("", "prefix under which a proxy publishes the routes")
    allowed_origins: tuple[str, ...] = setting(
        ("*",), "origins that browsers may call from, with commas"
    )
    allowed_methods: tuple[str, ...] = setting(("*",), "methods that browsers may use, with commas")
    allowed_headers: tuple[str, ...] = setting(
        ("*",), "headers that browsers may send, with commas"
    )
    allow_credentials: bool = setting(False, "whether browsers may send credentials")
    response_role: str = setting("assistant", "role of generated messages")
    chat_template: str | None = setting(
        None, "chat template that replaces the model's own: a file, or the template in one line"
    )
    max_logprobs: int = setting(20, "most alternatives a request may ask for", minimum=0)
    return_tokens_as_token_ids: bool = setting(
        False, "whether logprobs name tokens as token_id:N instead of by their text"
    )
    request_id_headers: tuple[str, ...] = setting(
        ("x-candor-request-id",),
        "response headers that carry the request id, with commas; the vllm-0.5 layer has no"
        " X-Request-Id, so that name is not among them by default",
    )
    max_body_bytes: int = setting(
        32 * 1024 * 1024, "largest request body; above: 413", unit="bytes", minimum=1024
    )
    max_header_bytes: int = setting(
        64 * 1024,
        "largest request line and headers together; above: 431",
        unit="bytes",
        minimum=1024,
    )
    max_connections: int = setting(
        4096, "open connections; above: 503 at once", unit="connections", minimum=1
    )
    head_timeout_s: float = setting(
        30.0, "longest time a request line and headers may take", unit="seconds", minimum=0.01
    )
    body_timeout_s: float = setting(
        60.0, "longest wait for the next part of a request body", unit="seconds", minimum=0.01
    )
    stream_buffer: int = setting(
        4096,
        "events held for a client that reads slowly; above: its request is cancelled",
        unit="events",
        minimum=1,
    )
    submit_buffer: int = setting(
        8192, "commands waiting to go to the scheduler; above: 503", unit="commands", minimum=1
    )
    request_timeout_s: float = setting(
        3600.0, "longest life of one request; above: 504", unit="seconds", minimum=0.01
    )
    rpc_timeout_s: float = setting(
        10.0,
        "deadline of a call to the tokenizer or the scheduler",
        unit="seconds",
        minimum=0.01,
    )
    embed_timeout_s: float = setting(
        120.0, "deadline of an embedding request", unit="seconds", minimum=0.01
    )
    probe_timeout_s: float = setting(
        1.0,
        "deadline of the calls behind /health/ready and /metrics",
        unit="seconds",
        minimum=0.01,
    )
    models_ttl_s: float = setting(
        1.0, "age at which the list of models is asked for again", unit="seconds", minimum=0.0
    )
    keep_alive_s: int = setting(
        5, "idle time after which a connection is closed", unit="seconds", minimum=1
    )
    drain_s: int = setting(
        30, "time that running requests get after SIGTERM", unit="seconds", minimum=0
    )
    log_level: str = setting("info", "least level that is logged", choices=LOG_LEVELS)

    def __post_init__(self) -> None:
        for address in (self.http, self.scheduler, self.tokenizer):
            host_port(address)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise SettingError(
                f"root path {self.root_path!r} must begin with a slash and not end in one"
            )
        if not self.response_role:
            raise SettingError("the response role must not be empty")
        for name in self.request_id_headers:
            if not name.replace("-", "").isalnum() or not name.isascii():
                raise SettingError(f"{name!r} is no header name")


def template_text(value: str | None) -> str | None:
    """The template behind the `chat_template` setting: a file's content, or the value itself.

    Vendors write one-line templates with JSON escapes (`\\n`), so these are undone in the second form.
    Raises SettingError for something that is neither a file nor a template.
    """
    if value is None:
        return None
    try:
        if Path(value).is_file():
            return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if "{" not in value:
            raise SettingError(f"chat template {value!r} cannot be read: {error}") from None
    if "{" not in value:
        raise SettingError(f"chat template {value!r} is neither a file nor a template")
    try:
        return str(json.loads('"' + value.replace('"', '\\"').replace("\n", "\\n") + '"'))
    except ValueError:
        return value
