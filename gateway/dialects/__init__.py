"""The dialects: what a server of some kind accepts, and how it answers.

A dialect is pure: bytes in, parsed calls out; events in, bytes out. The routes know this protocol and
nothing of any dialect; a dialect knows nothing of HTTP servers, gRPC or time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from candor.errors import CandorError
from gateway.catalog import Catalog, ModelCard
from gateway.events import Tagged
from gateway.spec import GenerationSpec

PREFIX = "/v1"


@dataclass(frozen=True, slots=True)
class Options:
    """Server settings that show in a dialect's answers."""

    response_role: str = "assistant"
    chat_template: str | None = None
    """Replaces the model's own template, where the request brings none."""
    max_logprobs: int = 20
    return_tokens_as_token_ids: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt to be encoded."""

    text: str
    add_special_tokens: bool = True
    truncate_to: int | None = None


@dataclass(frozen=True, slots=True)
class Ids:
    """A prompt that the client encoded itself; already truncated."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be rendered and encoded. The JSON texts are what the template gets as objects."""

    messages: tuple[tuple[str, str], ...]
    """(role, content) pairs."""
    tools_json: tuple[str, ...] = ()
    documents_json: tuple[str, ...] = ()
    add_generation_prompt: bool = True
    chat_template: str | None = None
    template_kwargs_json: str | None = None
    add_special_tokens: bool = False
    truncate_to: int | None = None


Prompt = Text | Ids | Chat


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as token ids, with what an echo needs where the call wants it."""

    token_ids: Sequence[int]
    text: str = ""
    first_token: str = ""


class Renderer(Protocol):
    """Makes the bytes of one answer. Raises a CandorError from `feed` when a choice has failed."""

    def feed(self, events: Iterable[Tagged]) -> bytes:
        """Take events; returns what can be sent now. The first bytes decide the status line."""
        ...

    def finish(self) -> bytes:
        """The rest, when the events have ended."""
        ...


class GenerationCall(Protocol):
    """A parsed request for generation."""

    @property
    def model(self) -> str:
        """The name asked for."""
        ...

    @property
    def is_stream(self) -> bool:
        """Whether the answer is an event stream."""
        ...

    @property
    def wants_prompt_text(self) -> bool:
        """Whether `Encoded.text` is needed."""
        ...

    @property
    def wants_first_token(self) -> bool:
        """Whether `Encoded.first_token` is needed."""
        ...

    def prompts(self) -> Sequence[Prompt]:
        """What generation starts from. May raise."""
        ...

    def specs(self, prompts: Sequence[Encoded], model: ModelCard) -> Sequence[GenerationSpec]:
        """One spec per prompt. May raise; an error that this dialect tells inside the stream is InBand."""
        ...

    def renderer(
        self,
        prompts: Sequence[Encoded],
        specs: Sequence[GenerationSpec],
        model: ModelCard,
        created: int,
    ) -> Renderer:
        """How the answer is made."""
        ...


class EmbeddingCall(Protocol):
    """A parsed request for embeddings."""

    @property
    def model(self) -> str:
        """The name asked for."""
        ...

    def prompts(self) -> Sequence[Prompt]:
        """What is embedded. May raise."""
        ...

    def check(self, prompts: Sequence[Encoded], model: ModelCard) -> None:
        """Raise when an input does not fit."""
        ...

    def body(
        self, vectors: Sequence[Sequence[float]], prompts: Sequence[Encoded], created: int
    ) -> bytes:
        """The response."""
        ...


class TokenizeCall(Protocol):
    """A parsed request for token ids."""

    @property
    def model(self) -> str:
        """The name asked for."""
        ...

    def prompt(self) -> Prompt:
        """What is encoded. May raise."""
        ...

    def body(self, token_ids: Sequence[int], model: ModelCard) -> bytes:
        """The response."""
        ...


class DetokenizeCall(Protocol):
    """A parsed request for text."""

    @property
    def model(self) -> str:
        """The name asked for."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """The ids."""
        ...

    def body(self, text: str) -> bytes:
        """The response."""
        ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error response."""

    status: int
    body: bytes
    retry_after_s: float | None = None


class Dialect(Protocol):
    """One kind of server."""

    name: str
    error_type: type[Exception]
    """What parsing and resolving raise."""

    def chat(self, raw: bytes, content_type: str | None) -> GenerationCall:
        """Parse a chat request. Raises for what the dialect does not accept; so do the others."""
        ...

    def completion(self, raw: bytes, content_type: str | None) -> GenerationCall:
        """Parse a completion request."""
        ...

    def embedding(self, raw: bytes, content_type: str | None) -> EmbeddingCall:
        """Parse an embedding request."""
        ...

    def tokenize(self, raw: bytes, content_type: str | None) -> TokenizeCall:
        """Parse a tokenize request."""
        ...

    def detokenize(self, raw: bytes, content_type: str | None) -> DetokenizeCall:
        """Parse a detokenize request."""
        ...

    def find(self, name: str, catalog: Catalog, *, embedding: bool = False) -> ModelCard:
        """The model of this name. Raises in the dialect's words."""
        ...

    def models(self, catalog: Catalog, created: int) -> bytes:
        """The list of models."""
        ...

    def compat(self) -> bytes:
        """Every field of every endpoint: status, rule, proof."""
        ...

    def refusal(self, error: Exception) -> Refusal:
        """The error response for a dialect's own error or a CandorError; anything else is a bare 500."""
        ...

    def stream_error(self, error: Exception) -> bytes:
        """The same inside a stream that has begun, with what ends the stream."""
        ...

    def is_in_band(self, error: Exception) -> bool:
        """Whether this dialect tells the error inside the stream even before anything was generated."""
        ...

    def request_schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Name → JSON schema for the OpenAPI document: ChatRequest, CompletionRequest, EmbeddingRequest,
        TokenizeRequest and DetokenizeRequest are the bodies, ErrorResponse is every refusal's."""
        ...


def open_dialect(name: str, options: Options) -> Dialect:
    """The dialect of this name. Raises KeyError for an unknown one."""
    from gateway.dialects.vllm05.dialect import Vllm05

    table = {"vllm-0.5": Vllm05}
    return table[name](options)


__all__ = [
    "PREFIX",
    "CandorError",
    "Chat",
    "Dialect",
    "EmbeddingCall",
    "Encoded",
    "GenerationCall",
    "Ids",
    "Options",
    "Prompt",
    "Refusal",
    "Renderer",
    "Text",
    "TokenizeCall",
    "open_dialect",
]
