"""vLLM 0.5.5's OpenAI layer: the parts of this package joined to one `Dialect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic.json_schema import models_json_schema

from candor import errors
from gateway.catalog import Catalog, ModelCard
from gateway.dialects import Encoded, Options, Prompt, Refusal, Renderer
from gateway.dialects.vllm05 import (
    embeddings,
    messages,
    models,
    reference,
    requests,
    sampling,
    schema,
    tokenize,
)
from gateway.dialects.vllm05.answer import Assembly, PromptFacts
from gateway.dialects.vllm05.chat import ChatBody, ChatStream, ChatStyle
from gateway.dialects.vllm05.completions import (
    CompletionBody,
    CompletionEvent,
    CompletionStream,
    CompletionStyle,
)
from gateway.dialects.vllm05.errors import (
    ERROR_SCHEMA,
    DialectError,
    embedding_disabled,
    from_candor,
    model_not_found,
)
from gateway.dialects.vllm05.heading import Heading, UsageRule, new_id
from gateway.dialects.vllm05.shapes import NamedToolChoice
from gateway.spec import GenerationSpec
from gateway.sse import DONE


class Vllm05:
    """The dialect. Holds settings only."""

    name = reference.NAME
    error_type: type[Exception] = DialectError

    def __init__(self, options: Options) -> None:
        self._options = options

    def chat(self, raw: bytes, content_type: str | None) -> _ChatCall:
        """Parse a chat request."""
        return _ChatCall(schema.parse_chat(raw, content_type), self._options)

    def completion(self, raw: bytes, content_type: str | None) -> _CompletionCall:
        """Parse a completion request."""
        return _CompletionCall(schema.parse_completion(raw, content_type), self._options)

    def embedding(self, raw: bytes, content_type: str | None) -> _EmbeddingCall:
        """Parse an embedding request."""
        return _EmbeddingCall(schema.parse_embedding(raw, content_type), self._options)

    def tokenize(self, raw: bytes, content_type: str | None) -> _TokenizeCall:
        """Parse a tokenize request."""
        return _TokenizeCall(schema.parse_tokenize(raw, content_type), self._options)

    def detokenize(self, raw: bytes, content_type: str | None) -> _DetokenizeCall:
        """Parse a detokenize request."""
        return _DetokenizeCall(schema.parse_detokenize(raw, content_type))

    def find(self, name: str, catalog: Catalog, *, embedding: bool = False) -> ModelCard:
        """The model of this name; on a server without embedding models that is told before the name."""
        model = catalog.find(name)
        if embedding and not (catalog.has_embedding if model is None else model.is_embedding):
            raise embedding_disabled()
        if model is None:
            raise model_not_found(name)
        return model

    def models(self, catalog: Catalog, created: int) -> bytes:
        """The list of models."""
        return models.body(catalog.models, created=created)

    def compat(self) -> bytes:
        """Every field of every endpoint: status, rule, proof."""
        return orjson.dumps(reference.compat())

    def refusal(self, error: Exception) -> Refusal:
        """The error response; what is no error of ours is a bare 500."""
        told = _dialect_error(error)
        retry_after_s = told.retry_after_s
        if retry_after_s is None and told.status == 429:
            retry_after_s = 1.0
        return Refusal(told.status, told.body(), retry_after_s)

    def stream_error(self, error: Exception) -> bytes:
        """The error as an event, and the end of the stream."""
        return _dialect_error(error).stream_event() + DONE

    def is_in_band(self, error: Exception) -> bool:
        """The engine's own refusals are told inside the stream by this server, though nothing came yet."""
        return isinstance(error, DialectError) and error.in_band

    def request_schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Name → JSON schema: request bodies and what they refer to, and the error object."""
        forms = (requests.TokenizeCompletionRequest, requests.TokenizeChatRequest)
        bodies = (
            requests.ChatRequest,
            requests.CompletionRequest,
            requests.EmbeddingRequest,
            requests.DetokenizeRequest,
            *forms,
        )
        where = "#/components/schemas/{model}"
        _, document = models_json_schema([(b, "validation") for b in bodies], ref_template=where)
        found: dict[str, Mapping[str, Any]] = dict(document["$defs"])
        any_of = [{"$ref": where.format(model=form.__name__)} for form in forms]
        return {**found, "TokenizeRequest": {"anyOf": any_of}, "ErrorResponse": ERROR_SCHEMA}


def _dialect_error(error: Exception) -> DialectError:
    if isinstance(error, DialectError):
        return error
    if not isinstance(error, errors.CandorError):
        error = errors.Internal("internal error")
    return from_candor(error)


def _limits(model: ModelCard, options: Options) -> sampling.Limits:
    tokenizer = model.tokenizer
    return sampling.Limits(
        max_model_len=model.max_model_len,
        vocab_size=tokenizer.vocab_size if tokenizer else model.vocab_size,
        base_vocab_size=model.base_vocab_size,
        max_logprobs=options.max_logprobs,
    )


def _facts(prompts: Sequence[Encoded]) -> list[PromptFacts]:
    return [
        PromptFacts(
            num_tokens=len(p.token_ids),
            text=p.text,
            token_ids=p.token_ids,
            first_token=p.first_token,
        )
        for p in prompts
    ]


class _ChatCall:
    """A chat request."""

    wants_prompt_text = wants_first_token = False

    def __init__(self, request: requests.ChatRequest, options: Options) -> None:
        self._request, self._options = request, options
        self.model = request.model
        self.is_stream = bool(request.stream)

    def prompts(self) -> Sequence[Prompt]:
        return [messages.conversation(self._request, self._options.chat_template)]

    def specs(self, prompts: Sequence[Encoded], model: ModelCard) -> Sequence[GenerationSpec]:
        limits = _limits(model, self._options)
        return [sampling.chat_spec(self._request, len(prompts[0].token_ids), limits)]

    def renderer(
        self,
        prompts: Sequence[Encoded],
        specs: Sequence[GenerationSpec],
        model: ModelCard,
        created: int,
    ) -> Renderer:
        assembly = Assembly(specs[0], _facts(prompts))
        heading = Heading(new_id("chat-"), created, model.name)
        style = self._style(specs[0])
        if not self.is_stream:
            return ChatBody(heading, assembly, style)
        rule = UsageRule.of(self._request.stream_options, always_shown=False)
        return ChatStream(heading, assembly, style, rule)

    def _style(self, spec: GenerationSpec) -> ChatStyle:
        request = self._request
        turns = messages.turns(request.messages)
        role = self._options.response_role
        if not request.add_generation_prompt and turns:
            role = turns[-1][0]
        choice = request.tool_choice
        return ChatStyle(
            role=role,
            echo=turns[-1][1] if request.echo and turns and turns[-1][0] == role else "",
            tool_name=choice.function.name if isinstance(choice, NamedToolChoice) else None,
            top_logprobs=spec.logprobs,
            as_token_ids=self._options.return_tokens_as_token_ids,
        )


class _CompletionCall:
    """A completion request."""

    def __init__(self, request: requests.CompletionRequest, options: Options) -> None:
        self._request, self._options = request, options
        self.model = request.model
        self.is_stream = bool(request.stream)
        self.wants_prompt_text = bool(request.echo)
        self.wants_first_token = bool(request.echo) and request.logprobs is not None

    def prompts(self) -> Sequence[Prompt]:
        return messages.prompts(self._request)

    def specs(self, prompts: Sequence[Encoded], model: ModelCard) -> Sequence[GenerationSpec]:
        lengths = [len(p.token_ids) for p in prompts]
        return sampling.completion_specs(self._request, lengths, _limits(model, self._options))

    def renderer(
        self,
        prompts: Sequence[Encoded],
        specs: Sequence[GenerationSpec],
        model: ModelCard,
        created: int,
    ) -> Renderer:
        request = self._request
        assembly = Assembly(specs[0], _facts(prompts))
        heading = Heading(new_id("cmpl-"), created, model.name)
        style = CompletionStyle(
            echo=bool(request.echo),
            is_prompt_only=bool(request.echo) and request.max_tokens == 0,
            logprobs=specs[0].logprobs,
            as_token_ids=self._options.return_tokens_as_token_ids,
        )
        if not self.is_stream:
            return CompletionBody(heading, assembly, style)
        if request.use_beam_search or request.best_of not in (None, request.n):
            return CompletionEvent(heading, assembly, style)
        rule = UsageRule.of(request.stream_options, always_shown=True)
        return CompletionStream(heading, assembly, style, rule)


class _EmbeddingCall:
    """An embedding request."""

    def __init__(self, request: requests.EmbeddingRequest, options: Options) -> None:
        self._request, self._options = request, options
        self.model = request.model

    def prompts(self) -> Sequence[Prompt]:
        return messages.embedding_prompts(self._request)

    def check(self, prompts: Sequence[Encoded], model: ModelCard) -> None:
        limits = _limits(model, self._options)
        sampling.check_embedding_lengths([len(p.token_ids) for p in prompts], limits)
        sampling.check_token_ids(self._request.input, "input", limits)

    def body(
        self, vectors: Sequence[Sequence[float]], prompts: Sequence[Encoded], created: int
    ) -> bytes:
        return embeddings.body(
            vectors,
            model=self.model,
            created=created,
            num_prompt_tokens=sum(len(p.token_ids) for p in prompts),
            as_base64=self._request.encoding_format == "base64",
        )


class _TokenizeCall:
    """A tokenize request."""

    def __init__(self, request: requests.TokenizeRequest, options: Options) -> None:
        self._request, self._options = request, options
        self.model = request.model

    def prompt(self) -> Prompt:
        return messages.tokenize_prompt(self._request, self._options.chat_template)

    def body(self, token_ids: Sequence[int], model: ModelCard) -> bytes:
        return tokenize.tokenize_body(token_ids, model.max_model_len)


class _DetokenizeCall:
    """A detokenize request."""

    def __init__(self, request: requests.DetokenizeRequest) -> None:
        self._request = request
        self.model = request.model

    @property
    def token_ids(self) -> Sequence[int]:
        return messages.detokenize_ids(self._request)

    def body(self, text: str) -> bytes:
        return tokenize.detokenize_body(text)
