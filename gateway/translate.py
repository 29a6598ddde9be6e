"""Generation specs to protobuf, events from protobuf.

Beside `clients` the only module of the gateway that sees candor.v1. Decides nothing: every default was
resolved by the dialect, every value goes over as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from candor.v1 import engine_pb2, scheduler_pb2, tokenizer_pb2
from candor.v1 import inference_pb2 as pb
from gateway.catalog import ModelCard, Stats, TokenizerCard, WorkerCard
from gateway.dialects import Chat
from gateway.events import (
    ChoiceEnd,
    Delta,
    Event,
    Finished,
    Moved,
    PromptLogprobs,
    Queued,
    Started,
    TokenLogprobs,
)
from gateway.spec import ConstraintSpec, GenerationSpec

_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CANCELLED: "cancelled",
    pb.FINISH_REASON_ERROR: "error",
}


def generate_to_pb(
    spec: GenerationSpec,
    token_ids: Sequence[int],
    *,
    model: str,
    request_id: str,
    fingerprint: str,
    deadline_unix_ms: int,
) -> pb.GenerateRequest:
    """One prompt's request. An empty fingerprint (ids that the client brought) is not sent."""
    request = pb.GenerateRequest(
        request_id=request_id,
        model=model,
        prompt=pb.Prompt(token_ids=pb.TokenIds(ids=token_ids)),
        sampling=_sampling(spec),
        stopping=pb.StoppingParams(
            max_tokens=spec.max_tokens,
            min_tokens=spec.min_tokens,
            stop=spec.stop,
            stop_token_ids=spec.stop_token_ids,
            ignore_eos=spec.ignore_eos,
            include_stop_str_in_output=spec.include_stop_str_in_output,
            hold_back_longest_stop=spec.hold_back_longest_stop,
        ),
        output=_output(spec),
        deadline_unix_ms=deadline_unix_ms,
    )
    if fingerprint:
        request.tokenizer_fingerprint = fingerprint
    if spec.constraint is not None:
        request.constraint.CopyFrom(_constraint(spec.constraint))
    return request


def _sampling(spec: GenerationSpec) -> pb.SamplingParams:
    sampling = pb.SamplingParams(
        n=spec.n,
        best_of=spec.best_of,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        repetition_penalty=spec.repetition_penalty,
        seed=spec.seed,
        logit_bias=[pb.LogitBias(token_id=t, bias=b) for t, b in spec.logit_bias],
        use_beam_search=spec.use_beam_search,
        length_penalty=spec.length_penalty,
        early_stopping=spec.early_stopping,
    )
    if spec.allowed_token_ids is not None:
        sampling.allowed_token_ids.CopyFrom(pb.TokenIds(ids=spec.allowed_token_ids))
    return sampling


def _output(spec: GenerationSpec) -> pb.OutputOptions:
    mode = pb.LOGPROBS_MODE_RAW if spec.raw_logprobs else pb.LOGPROBS_MODE_PROCESSED
    return pb.OutputOptions(
        logprobs=spec.logprobs,
        prompt_logprobs=spec.prompt_logprobs,
        logprobs_mode=mode,
        skip_special_tokens=spec.skip_special_tokens,
        spaces_between_special_tokens=spec.spaces_between_special_tokens,
    )


def _constraint(spec: ConstraintSpec) -> pb.Constraint:
    constraint = pb.Constraint(whitespace_pattern=spec.whitespace_pattern)
    match spec.kind:
        case "json_schema":
            constraint.json_schema = spec.value
        case "regex":
            constraint.regex = spec.value
        case "grammar":
            constraint.grammar = spec.value
        case "choice":
            constraint.choice.values.extend(spec.choices)
        case "json_object":
            constraint.json_object = True
    return constraint


def chat_to_pb(chat: Chat) -> pb.ChatPrompt:
    """A conversation as the tokenizer service takes it."""
    return pb.ChatPrompt(
        messages=[pb.ChatMessage(role=role, content=content) for role, content in chat.messages],
        tools_json=chat.tools_json,
        documents_json=chat.documents_json,
        add_generation_prompt=chat.add_generation_prompt,
        chat_template=chat.chat_template,
        chat_template_kwargs_json=chat.template_kwargs_json,
    )


def event_from_pb(event: pb.GenerateEvent, kind: str | None) -> Event | None:
    """The plain form of an event of this kind; None for a kind that this build does not know.

    A failed request is not an event here: the client raises it.
    """
    if kind == "delta":
        return _delta(event.delta)
    if kind == "finished":
        return Finished(event.finished.usage.cached_tokens)
    if kind == "started":
        started = event.started
        return Started(started.worker_id, started.num_cached_tokens, started.queue_us)
    if kind == "queued":
        queued = event.queued
        return Queued(queued.position, queued.eta_ms if queued.HasField("eta_ms") else None)
    if kind == "prompt_logprobs":
        positions = event.prompt_logprobs.positions
        return PromptLogprobs(tuple(_logprobs(p) if p.token_ids else None for p in positions))
    if kind == "moved":
        return Moved(event.moved.to_worker_id)
    return None


def _delta(delta: pb.Delta) -> Delta:
    # The hot path: one call per token and choice, so a plain token costs five reads and nothing else.
    return Delta(
        delta.choice,
        tuple(delta.token_ids),
        delta.text,
        [_logprobs(p) for p in delta.logprobs] if delta.logprobs else (),
        _end(delta.end) if delta.HasField("end") else None,
    )


def _end(end: pb.ChoiceEnd) -> ChoiceEnd:
    cause = end.WhichOneof("stop_cause")
    score = end.cumulative_logprob if end.HasField("cumulative_logprob") else -math.inf
    return ChoiceEnd(
        _REASONS.get(end.reason, "error"), getattr(end, cause) if cause else None, score
    )


def _logprobs(entry: pb.TokenLogprobs) -> TokenLogprobs:
    # Copies: what is kept must not hold on to the frame it came in.
    return TokenLogprobs(
        tuple(entry.token_ids), tuple(entry.logprobs), tuple(entry.ranks), tuple(entry.texts)
    )


def model_from_pb(model: pb.ModelInfo) -> ModelCard:
    """A served model, before its tokenizer is known."""
    return ModelCard(
        name=model.name,
        aliases=tuple(model.aliases),
        is_embedding=model.kind == pb.MODEL_KIND_EMBEDDING,
        max_model_len=model.max_model_len,
        fingerprint=model.tokenizer_fingerprint,
        vocab_size=model.vocab_size,
    )


def tokenizer_from_pb(info: tokenizer_pb2.TokenizerInfo) -> TokenizerCard:
    """A tokenizer that the tokenizer service holds."""
    return TokenizerCard(
        model=info.model,
        fingerprint=info.fingerprint,
        vocab_size=info.vocab_size,
        base_vocab_size=info.base_vocab_size or info.vocab_size,
        has_chat_template=info.has_chat_template,
    )


def stats_from_pb(stats: scheduler_pb2.GetStatsResponse) -> Stats:
    """The scheduler's numbers."""
    return Stats(
        num_queued=stats.num_queued,
        num_queued_tokens=stats.num_queued_tokens,
        num_running=stats.num_running,
        max_queued=stats.max_queued,
        num_refused=stats.num_refused,
        num_cancelled=stats.num_cancelled,
        workers=tuple(_worker(w) for w in stats.workers),
    )


def _worker(status: scheduler_pb2.WorkerStatus) -> WorkerCard:
    info, load = status.info, status.load
    state = engine_pb2.WorkerState.Name(status.state)
    return WorkerCard(
        worker_id=info.worker_id,
        card=info.card,
        model=info.model.name,
        state=state.removeprefix("WORKER_STATE_").lower(),
        slots=info.slots,
        num_assigned=status.num_assigned,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        kv_used_tokens=load.kv_used_tokens,
        kv_total_tokens=load.kv_total_tokens or info.kv_tokens,
        prefill_rate=load.prefill_rate,
        decode_rate=load.decode_rate,
        cached_tokens=load.cached_tokens,
        prompt_tokens=load.prompt_tokens,
        num_preemptions=load.num_preemptions,
    )
