"""From a typed request and the length of its prompt to what the engine is asked for.

The order of checks is the contract: guides, context length, logit_bias and allowed_token_ids, the sampling
rules (first failure wins), and last what the original calls the engine's own refusals, which a stream
tells in band. Knows the served model only as `Limits`; encodes nothing and sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.dialects.vllm05.errors import DialectError
from gateway.dialects.vllm05.guided import constraint
from gateway.dialects.vllm05.requests import ChatRequest, CompletionRequest, GenerationRequest
from gateway.spec import ConstraintSpec, GenerationSpec

_EPSILON = 1e-5
_LEAST_TEMPERATURE = 0.01
_DEFAULT_COMPLETION_TOKENS = 16
_MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the served model and the server's settings allow."""

    max_model_len: int
    vocab_size: int
    """All token ids are below this."""
    base_vocab_size: int
    """logit_bias and allowed_token_ids reach ids below this that are not added tokens."""
    added_token_ids: frozenset[int] = frozenset()
    max_logprobs: int = 20
    max_sequences: int = 1024
    """Most sequences of one request, over all prompts; the original has no bound."""


def chat_spec(request: ChatRequest, prompt_len: int, limits: Limits) -> GenerationSpec:
    """What a chat request asks for. Comes after the template, before the engine."""
    guide = constraint(request)
    max_tokens = request.max_tokens
    _check_length(prompt_len, max_tokens, limits)
    if max_tokens is None:
        max_tokens = limits.max_model_len - prompt_len
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    prompt_logprobs = request.prompt_logprobs
    if prompt_logprobs is None and request.echo and not request.stream:
        prompt_logprobs = request.top_logprobs or 0  # a stream has no place for them
    spec = _spec(
        request,
        1 if request.n is None else request.n,
        max_tokens,
        logprobs,
        prompt_logprobs,
        guide,
        limits,
    )
    _check_engine_limits(request, spec, [prompt_len], limits)
    return spec


def completion_specs(
    request: CompletionRequest, prompt_lens: Sequence[int], limits: Limits
) -> list[GenerationSpec]:
    """What a completion asks for, one spec per prompt; every length is checked before anything else."""
    guide = constraint(request)
    wanted = _DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    for prompt_len in prompt_lens:
        _check_length(prompt_len, wanted, limits)
    prompt_logprobs = request.prompt_logprobs
    if prompt_logprobs is None and request.echo:
        prompt_logprobs = request.logprobs
    # The engine generates at least one token, also when only the prompt is to be echoed.
    max_tokens = 1 if request.echo and wanted == 0 else wanted
    spec = _spec(request, request.n, max_tokens, request.logprobs, prompt_logprobs, guide, limits)
    check_token_ids(request.prompt, "prompt", limits)
    _check_engine_limits(request, spec, prompt_lens, limits)
    return [spec] * len(prompt_lens)


def completion_spec(request: CompletionRequest, prompt_len: int, limits: Limits) -> GenerationSpec:
    """The same for a completion with one prompt."""
    return completion_specs(request, [prompt_len], limits)[0]


def check_embedding_lengths(prompt_lens: Sequence[int], limits: Limits) -> None:
    """Refuse inputs of an embedding request that do not fit; one as long as the context fits."""
    for prompt_len in prompt_lens:
        if prompt_len > limits.max_model_len:
            raise DialectError(
                f"This model's maximum context length is {limits.max_model_len} tokens. However, you"
                f" requested {prompt_len} tokens in the input for embedding generation. Please reduce"
                " the length of the input.",
                field="input",
            )
        if prompt_len == 0:
            raise DialectError("Prompt cannot be empty", field="input")


def check_token_ids(value: object, field: str, limits: Limits) -> None:
    """Refuse ids above the vocabulary in a prompt of ids; the original lets them through to the model."""
    if not isinstance(value, list) or not value:
        return
    if isinstance(value[0], int):
        _check_ids(value, field, limits)
    elif isinstance(value[0], list):
        for index, ids in enumerate(value):
            _check_ids(ids, f"{field}[{index}]", limits)


def _check_ids(ids: Sequence[int], field: str, limits: Limits) -> None:
    if ids and max(ids) >= limits.vocab_size:
        raise DialectError(
            f"{field} contains the token id {max(ids)}; the vocabulary has {limits.vocab_size}",
            field=field,
        )


def _check_length(prompt_len: int, max_tokens: int | None, limits: Limits) -> None:
    limit = limits.max_model_len
    if max_tokens is None:
        if prompt_len >= limit:
            raise DialectError(
                f"This model's maximum context length is {limit} tokens. However, you requested"
                f" {prompt_len} tokens in the messages, Please reduce the length of the messages.",
                field="messages",
            )
    elif prompt_len + max_tokens > limit:
        raise DialectError(
            f"This model's maximum context length is {limit} tokens. However, you requested"
            f" {prompt_len + max_tokens} tokens ({prompt_len} in the messages, {max_tokens} in the"
            " completion). Please reduce the length of the messages or completion.",
            field="max_tokens",
        )


# --- logit_bias, allowed_token_ids --------------------------------------------------------------------


def _bias(wanted: Mapping[str, float] | None, limits: Limits) -> tuple[tuple[int, float], ...]:
    if not wanted:
        return ()
    try:
        by_id = {int(key): min(_MAX_BIAS, max(-_MAX_BIAS, v)) for key, v in wanted.items()}
    except ValueError:
        raise DialectError(
            "Found token_id in logit_bias that is not an integer or string representing an integer",
            field="logit_bias",
        ) from None
    for token_id in by_id:
        if not _is_base(token_id, limits):
            raise DialectError(
                f"token_id {token_id} in logit_bias contains out-of-vocab token id",
                field="logit_bias",
            )
    return tuple(by_id.items())


def _allowed(wanted: Sequence[int] | None, limits: Limits) -> tuple[int, ...] | None:
    if wanted is None:
        return None
    if not wanted:
        raise DialectError("Empty allowed_token_ids provided", field="allowed_token_ids")
    if not all(_is_base(token_id, limits) for token_id in wanted):
        raise DialectError(
            "allowed_token_ids contains out-of-vocab token id", field="allowed_token_ids"
        )
    return tuple(dict.fromkeys(wanted))


def _is_base(token_id: int, limits: Limits) -> bool:
    return 0 <= token_id < limits.base_vocab_size and token_id not in limits.added_token_ids


# --- normalisation and rules --------------------------------------------------------------------------


def _spec(
    request: GenerationRequest,
    n: int,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    guide: ConstraintSpec | None,
    limits: Limits,
) -> GenerationSpec:
    logit_bias = _bias(request.logit_bias, limits)
    allowed = (
        _allowed(request.allowed_token_ids, limits)
        if isinstance(request, CompletionRequest)
        else None
    )
    temperature = _or(request.temperature, 1.0)
    if 0 < temperature < _LEAST_TEMPERATURE:
        temperature = _LEAST_TEMPERATURE
    top_p, top_k, min_p = _or(request.top_p, 1.0), request.top_k, request.min_p
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    drafted = _Drafted(
        n=n,
        best_of=request.best_of or n,
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        stop=stop,
    )
    _check_rules(request, drafted)
    if request.use_beam_search:
        _check_beam_rules(request, drafted)
    else:
        _check_other_rules(request)
        if temperature < _EPSILON:
            top_p, top_k, min_p = 1.0, -1, 0.0
            if drafted.best_of > 1:
                raise DialectError(
                    f"best_of must be 1 when using greedy sampling.Got {drafted.best_of}.",
                    field="best_of",
                )
    return GenerationSpec(
        n=n,
        best_of=drafted.best_of,
        temperature=temperature,
        top_p=top_p,
        top_k=-1 if top_k >= limits.vocab_size else top_k,
        min_p=min_p,
        presence_penalty=drafted.presence_penalty,
        frequency_penalty=drafted.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        seed=None if request.seed == -1 else request.seed,
        logit_bias=logit_bias,
        allowed_token_ids=allowed,
        use_beam_search=request.use_beam_search,
        length_penalty=request.length_penalty,
        early_stopping=request.early_stopping,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        stop=stop,
        # An id that no token has can never be generated, so leaving it out changes nothing.
        stop_token_ids=tuple(i for i in request.stop_token_ids or () if 0 <= i < limits.vocab_size),
        ignore_eos=request.ignore_eos,
        include_stop_str_in_output=request.include_stop_str_in_output,
        hold_back_longest_stop=bool(stop) and not request.include_stop_str_in_output,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=request.skip_special_tokens,
        spaces_between_special_tokens=request.spaces_between_special_tokens,
        constraint=guide,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


class _Drafted(NamedTuple):
    """The values that nulls and defaults came to, not yet checked."""

    n: int
    best_of: int
    presence_penalty: float
    frequency_penalty: float
    temperature: float
    top_p: float
    max_tokens: int
    stop: tuple[str, ...]


def _check_rules(request: GenerationRequest, d: _Drafted) -> None:
    rep, top_k, min_p, min_tokens = (
        request.repetition_penalty,
        request.top_k,
        request.min_p,
        request.min_tokens,
    )
    if d.n < 1:
        _refuse("n", f"n must be at least 1, got {d.n}.")
    if d.best_of < d.n:
        _refuse(
            "best_of",
            f"best_of must be greater than or equal to n, got n={d.n} and best_of={d.best_of}.",
        )
    for name, value in (
        ("presence_penalty", d.presence_penalty),
        ("frequency_penalty", d.frequency_penalty),
    ):
        if not -2.0 <= value <= 2.0:
            _refuse(name, f"{name} must be in [-2, 2], got {value}.")
    if not 0.0 < rep <= 2.0:
        _refuse("repetition_penalty", f"repetition_penalty must be in (0, 2], got {rep}.")
    if d.temperature < 0.0:
        _refuse("temperature", f"temperature must be non-negative, got {d.temperature}.")
    if not 0.0 < d.top_p <= 1.0:
        _refuse("top_p", f"top_p must be in (0, 1], got {d.top_p}.")
    if top_k < -1 or top_k == 0:
        _refuse("top_k", f"top_k must be -1 (disable), or at least 1, got {top_k}.")
    if not 0.0 <= min_p <= 1.0:
        _refuse("min_p", f"min_p must be in [0, 1], got {min_p}.")
    if d.max_tokens < 1:
        _refuse("max_tokens", f"max_tokens must be at least 1, got {d.max_tokens}.")
    if min_tokens < 0:
        _refuse("min_tokens", f"min_tokens must be greater than or equal to 0, got {min_tokens}.")
    if min_tokens > d.max_tokens:
        _refuse(
            "min_tokens",
            f"min_tokens must be less than or equal to max_tokens={d.max_tokens},"
            f" got {min_tokens}.",
        )
    if "" in d.stop:
        _refuse("stop", "stop cannot contain an empty string.")


def _check_beam_rules(request: GenerationRequest, d: _Drafted) -> None:
    if d.best_of == 1:
        _refuse(
            "best_of",
            f"best_of must be greater than 1 when using beam search. Got {d.best_of}.",
        )
    if d.temperature > _EPSILON:
        _refuse("temperature", "temperature must be 0 when using beam search.")
    if d.top_p < 1.0 - _EPSILON:
        _refuse("top_p", "top_p must be 1 when using beam search.")
    if request.top_k != -1:
        _refuse("top_k", "top_k must be -1 when using beam search.")


def _check_other_rules(request: GenerationRequest) -> None:
    if request.early_stopping:
        _refuse(
            "early_stopping",
            "early_stopping is not effective and must be False when not using beam search.",
        )
    if abs(request.length_penalty - 1.0) > _EPSILON:
        _refuse(
            "length_penalty",
            "length_penalty is not effective and must be the default value of 1.0 when not using"
            " beam search.",
        )


def _check_engine_limits(
    request: GenerationRequest, spec: GenerationSpec, prompt_lens: Sequence[int], limits: Limits
) -> None:
    if not all(prompt_lens):
        field = "messages" if isinstance(request, ChatRequest) else "prompt"
        raise DialectError("Prompt cannot be empty", field=field, in_band=True)
    for name, value in (("logprobs", spec.logprobs), ("prompt_logprobs", spec.prompt_logprobs)):
        if value is not None and value > limits.max_logprobs:
            raise DialectError(
                f"Cannot request more than {limits.max_logprobs} logprobs.",
                field=name,
                in_band=True,
            )
    num_sequences = spec.best_of * len(prompt_lens)
    if num_sequences > limits.max_sequences:
        raise DialectError(
            f"A request may have at most {limits.max_sequences} sequences, got {len(prompt_lens)}"
            f" prompts with {spec.best_of} each.",
            field="best_of" if request.best_of else "n",
        )


def _refuse(field: str, message: str) -> None:
    raise DialectError(message, field=field)
