"""Whether a request may wait at all: every refusal there is, in the order in which it is looked for.

Raises `candor.errors`; changes nothing.
"""

from __future__ import annotations

from candor import errors
from scheduler.core.pool import Pool, Worker
from scheduler.core.queue import RequestQueue
from scheduler.core.types import Feature, Limits, Model, ModelKind, Request

_DOUBT = 0.2
"""Part of an estimated wait by which it may well be wrong: whoever is let in should be in time."""


def check_model(pool: Pool, name: str, kind: ModelKind) -> Model:
    """The model it names, provided that somebody serves it."""
    if not any(worker.lost_at is None for worker in pool.workers.values()):
        raise errors.Unavailable("no worker is attached", reason="NO_CAPACITY")
    model = pool.find_model(name)
    if model is None:
        raise errors.NotFound(
            f"The model `{name}` does not exist.", reason="MODEL_NOT_FOUND", field="model"
        )
    if model.kind is not kind:
        raise errors.InvalidArgument(
            f"The model `{name}` is {model.kind}; this call needs one that is {kind}.",
            reason="WRONG_MODEL_KIND",
            field="model",
        )
    if not pool.serving(model.name).workers:
        raise errors.Unavailable(
            f"no worker that serves `{name}` takes requests now", reason="NO_CAPACITY"
        )
    return model


def check_prompt(pool: Pool, model: Model, request: Request) -> None:
    """The prompt is one of this model, and fits."""
    if request.fingerprint is not None and request.fingerprint != model.fingerprint:
        raise errors.FailedPrecondition(
            f"the token ids were made by tokenizer {request.fingerprint}, "
            f"`{model.name}` has {model.fingerprint}",
            reason="TOKENIZER_MISMATCH",
            field="tokenizer_fingerprint",
        )
    if request.num_prompt_tokens == 0:
        raise errors.InvalidArgument("the prompt is empty", reason="EMPTY_PROMPT", field="prompt")
    if request.max_token_id >= model.vocab_size:
        raise errors.InvalidArgument(
            f"token id {request.max_token_id} is outside the vocabulary of {model.vocab_size}",
            reason="TOKEN_OUT_OF_VOCABULARY",
            field="prompt",
        )
    longest = pool.serving(model.name).max_model_len
    if request.context_tokens > longest:
        raise errors.InvalidArgument(
            f"the prompt needs {request.context_tokens} positions "
            f"({request.num_prompt_tokens} prompt tokens), the context length is {longest}",
            reason="CONTEXT_LENGTH",
            field="prompt",
        )


def check_features(workers: list[Worker], request: Request) -> frozenset[Feature]:
    """What it needs, provided that one worker has it all."""
    needs = frozenset(feature for feature, _ in request.needs)
    if not any(worker.can(needs) for worker in workers):
        # Name the field that nobody can do; if each alone is possible, the combination is not.
        fields = sorted(
            field
            for feature, field in request.needs
            if not any(worker.can(frozenset((feature,))) for worker in workers)
        ) or sorted(field for _, field in request.needs)
        raise errors.Unimplemented(
            f"no worker of `{request.model}` supports {' with '.join(fields)}", field=fields[0]
        )
    return needs


def check_time(now: float, request: Request, eta_s: float | None, prefill_s: float) -> None:
    """It can still be in time.

    `eta_s`: estimated wait before it starts, None while not measured; `prefill_s`: least time from there to
    its first token.
    """
    if request.deadline_at is not None and request.deadline_at <= now:
        raise errors.DeadlineExceeded(
            f"the deadline passed {1000 * (now - request.deadline_at):.0f} ms ago",
            reason="DEADLINE_INFEASIBLE",
            field="deadline_unix_ms",
        )
    wait_s = (eta_s or 0.0) + prefill_s
    margin_s = _DOUBT * (eta_s or 0.0)
    if eta_s is None and not prefill_s:
        return
    for field, at in (
        ("deadline_unix_ms", request.deadline_at),
        ("ttft_budget_ms", request.first_token_by),
    ):
        if at is not None and now + wait_s + margin_s > at:
            raise errors.ResourceExhausted(
                f"the first token is about {1000 * wait_s:.0f} ms away, "
                f"{field} leaves {1000 * (at - now):.0f} ms",
                reason="DEADLINE_INFEASIBLE",
                field=field,
                retry_after_s=max(wait_s - (at - now), margin_s),
            )


def check_bounds(
    queue: RequestQueue, limits: Limits, request: Request, retry_after_s: float
) -> None:
    """There is room to wait."""
    tokens = queue.num_tokens + request.num_prompt_tokens
    if queue.num_requests >= limits.max_queued_requests:
        full = f"{queue.num_requests} requests wait, the limit is {limits.max_queued_requests}"
    # One prompt may be longer than the bound: alone in the queue it is let in.
    elif queue.num_requests and tokens > limits.max_queued_tokens:
        full = f"{tokens} prompt tokens would wait, the limit is {limits.max_queued_tokens}"
    else:
        return
    raise errors.ResourceExhausted(f"the queue is full: {full}", retry_after_s=retry_after_s)
