"""Whether a request can be served here at all: ranges, ids, sizes.

The gateway's dialects check too, in their own words; but anyone may call a worker, so nothing is taken on
trust. Errors name the field as the contract spells it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from candor.errors import FailedPrecondition, InvalidArgument
from engine.core.types import Request, SamplingParams, StoppingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can hold, and how much of it one request may ask for."""

    vocab_size: int
    max_model_len: int
    kv_tokens: int
    slots: int
    max_choices: int
    max_logprobs: int
    max_stop_strings: int = 1024
    max_stop_characters: int = 65536


def check(request: Request, limits: Limits) -> None:
    """Raise InvalidArgument (or FailedPrecondition for what only this worker lacks) for the first fault."""
    _prompt(request, limits)
    _sampling(request.sampling, limits)
    if request.sampling.use_beam_search:
        _beam(request, limits)
    else:
        _no_beam(request.sampling)
    _stopping(request.stopping, limits)
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(request.output, name)
        if wanted is not None:
            _in_range(name, wanted, 0, limits.max_logprobs)
    _resumed(request, limits)


def _prompt(request: Request, limits: Limits) -> None:
    prompt = request.prompt
    if not prompt:
        raise InvalidArgument("the prompt has no tokens", field="prompt")
    _ids("prompt", prompt, limits)
    room = limits.max_model_len - (0 if request.stopping.max_tokens == 0 else 1)
    if len(prompt) > room:
        raise InvalidArgument(
            f"the prompt has {len(prompt)} tokens; the context holds {limits.max_model_len}, and an "
            "answer needs at least one",
            reason="CONTEXT_LENGTH_EXCEEDED",
            field="prompt",
        )


def _sampling(p: SamplingParams, limits: Limits) -> None:
    _in_range("n", p.n, 1, limits.max_choices)
    if p.best_of < p.n:
        raise InvalidArgument(f"best_of={p.best_of} is below n={p.n}", field="best_of")
    _in_range("best_of", p.best_of, 1, limits.max_choices)
    _in_range("temperature", p.temperature, 0, None)
    _in_range("top_p", p.top_p, 0, 1, above=True)
    if p.top_k != -1:
        _in_range("top_k", p.top_k, 1, None)
    _in_range("min_p", p.min_p, 0, 1)
    _in_range("presence_penalty", p.presence_penalty, -2, 2)
    _in_range("frequency_penalty", p.frequency_penalty, -2, 2)
    _in_range("repetition_penalty", p.repetition_penalty, 0, 2, above=True)
    # Beyond this, length to its power leaves the range of floats.
    _in_range("length_penalty", p.length_penalty, -10, 10)
    _ids("logit_bias", (token for token, _ in p.logit_bias), limits)
    for token, bias in p.logit_bias:
        if not math.isfinite(bias):
            raise InvalidArgument(f"logit_bias of token {token} is {bias}", field="logit_bias")
    if p.allowed_token_ids is not None:
        if not p.allowed_token_ids:
            raise InvalidArgument("allowed_token_ids is empty", field="allowed_token_ids")
        _ids("allowed_token_ids", p.allowed_token_ids, limits)


def _beam(request: Request, limits: Limits) -> None:
    p = request.sampling
    if p.best_of < 2:
        raise InvalidArgument(
            f"beam search needs best_of above 1, got {p.best_of}", field="best_of"
        )
    if not p.is_greedy:
        raise InvalidArgument(
            f"beam search needs temperature 0, got {p.temperature}", field="temperature"
        )
    if p.top_p < 1:
        raise InvalidArgument(f"beam search needs top_p 1, got {p.top_p}", field="top_p")
    if p.top_k != -1:
        raise InvalidArgument(f"beam search needs top_k -1, got {p.top_k}", field="top_k")
    if p.best_of > limits.slots:
        raise FailedPrecondition(
            f"a beam of {p.best_of} needs as many slots; this worker has {limits.slots}",
            field="best_of",
        )
    longest = limits.max_model_len - len(request.prompt)
    wanted = request.stopping.max_tokens
    each = longest if wanted is None else min(wanted, longest)
    if len(request.prompt) + p.best_of * each > limits.kv_tokens:
        raise InvalidArgument(
            f"{p.best_of} beams of {each} tokens and a prompt of {len(request.prompt)} need "
            f"{len(request.prompt) + p.best_of * each} KV positions; this worker has {limits.kv_tokens}",
            field="max_tokens",
        )


def _no_beam(p: SamplingParams) -> None:
    if p.early_stopping:
        raise InvalidArgument("early_stopping needs use_beam_search", field="early_stopping")
    if abs(p.length_penalty - 1) >= 1e-5:
        raise InvalidArgument("length_penalty needs use_beam_search", field="length_penalty")


def _stopping(p: StoppingParams, limits: Limits) -> None:
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise InvalidArgument(
            f"min_tokens={p.min_tokens} is above max_tokens={p.max_tokens}", field="min_tokens"
        )
    if "" in p.stop:
        raise InvalidArgument("a stop string is empty", field="stop")
    _in_range("stop", len(p.stop), 0, limits.max_stop_strings, of="the number of strings in ")
    _in_range("stop", sum(map(len, p.stop)), 0, limits.max_stop_characters, of="the characters in ")


def _resumed(request: Request, limits: Limits) -> None:
    seen = set()
    for resumed in request.resumed:
        if request.sampling.use_beam_search:
            raise InvalidArgument("a beam search cannot be resumed", field="resume")
        if not 0 <= resumed.choice < request.sampling.best_of or resumed.choice in seen:
            raise InvalidArgument(
                f"resume names choice {resumed.choice} twice, or beyond best_of="
                f"{request.sampling.best_of}",
                field="resume",
            )
        seen.add(resumed.choice)
        _ids("resume", resumed.token_ids, limits)
        if not math.isfinite(resumed.cumulative_logprob):
            raise InvalidArgument("a resumed cumulative_logprob is not finite", field="resume")
        if len(request.prompt) + len(resumed.token_ids) > limits.max_model_len:
            raise InvalidArgument(
                f"prompt and resumed tokens are {len(request.prompt) + len(resumed.token_ids)}; "
                f"the context holds {limits.max_model_len}",
                reason="CONTEXT_LENGTH_EXCEEDED",
                field="resume",
            )


def _in_range(
    field: str,
    value: float,
    low: float | None,
    high: float | None,
    *,
    above: bool = False,
    of: str = "",
) -> None:
    if not math.isfinite(value):
        raise InvalidArgument(f"{field}={value} is not a finite number", field=field)
    if low is not None and (value <= low if above else value < low):
        word = "above" if above else "at least"
        raise InvalidArgument(f"{of}{field} must be {word} {low}, got {value}", field=field)
    if high is not None and value > high:
        raise InvalidArgument(f"{of}{field} must be at most {high}, got {value}", field=field)


def _ids(field: str, ids: Iterable[int], limits: Limits) -> None:
    for token in ids:
        if not 0 <= token < limits.vocab_size:
            raise InvalidArgument(
                f"{field} has token id {token}; the vocabulary ends at {limits.vocab_size - 1}",
                reason="TOKEN_OUT_OF_VOCABULARY",
                field=field,
            )
