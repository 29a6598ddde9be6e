"""Between protobuf and the engine's plain types. Resolves defaults; judges nothing but presence.

Not read here, because they are decided before a worker is asked: tenant, priority, session, the budget until
the first token. `spaces_between_special_tokens` concerns tokenizers that join words; ours join bytes, so no
space is ever put or left out between tokens and both values mean the same text.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from candor import errors, rpc
from candor.v1 import engine_pb2, inference_pb2
from engine.backends import Frame, Load, Progress
from engine.core.types import (
    ChoiceEnd,
    Constraint,
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    OutputOptions,
    PromptScored,
    Request,
    Resumed,
    SamplingParams,
    Started,
    StoppingParams,
    TokenScores,
)

Piece = Callable[[int], bytes]
"""The bytes of a token id."""

_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


# --- requests ----------------------------------------------------------------------------------------


def request_from_pb(
    pb: inference_pb2.GenerateRequest, key: int, *, now: float, unix_ms: int
) -> Request:
    """The request with every default resolved; a missing seed is drawn. Raises InvalidArgument."""
    if pb.prompt.WhichOneof("kind") != "token_ids":
        raise errors.InvalidArgument("a worker takes a prompt of token ids only", field="prompt")
    deadline = None
    if pb.HasField("deadline_unix_ms"):
        deadline = now + (pb.deadline_unix_ms - unix_ms) / 1000
    return Request(
        key=key,
        prompt=tuple(pb.prompt.token_ids.ids),
        request_id=pb.request_id,
        sampling=_sampling(pb.sampling),
        stopping=_stopping(pb.stopping),
        output=_output(pb.output),
        constraint=_constraint(pb.constraint) if pb.HasField("constraint") else None,
        cache_salt=pb.cache_salt,
        deadline_at=deadline,
        resumed=tuple(
            Resumed(r.choice, tuple(r.token_ids), r.finished, r.cumulative_logprob)
            for r in pb.resume
        ),
    )


def _sampling(pb: inference_pb2.SamplingParams) -> SamplingParams:
    n = pb.n if pb.HasField("n") else 1
    allowed = tuple(pb.allowed_token_ids.ids) if pb.HasField("allowed_token_ids") else None
    return SamplingParams(
        n=n,
        best_of=pb.best_of if pb.HasField("best_of") else n,
        temperature=pb.temperature if pb.HasField("temperature") else 1.0,
        top_p=pb.top_p if pb.HasField("top_p") else 1.0,
        top_k=pb.top_k if pb.HasField("top_k") else -1,
        min_p=pb.min_p,
        presence_penalty=pb.presence_penalty,
        frequency_penalty=pb.frequency_penalty,
        repetition_penalty=pb.repetition_penalty if pb.HasField("repetition_penalty") else 1.0,
        seed=pb.seed if pb.HasField("seed") else secrets.randbits(63),
        logit_bias=tuple((entry.token_id, entry.bias) for entry in pb.logit_bias),
        allowed_token_ids=allowed,
        use_beam_search=pb.use_beam_search,
        length_penalty=pb.length_penalty if pb.HasField("length_penalty") else 1.0,
        early_stopping=pb.early_stopping,
    )


def _stopping(pb: inference_pb2.StoppingParams) -> StoppingParams:
    return StoppingParams(
        max_tokens=pb.max_tokens if pb.HasField("max_tokens") else None,
        min_tokens=pb.min_tokens,
        stop=tuple(pb.stop),
        stop_token_ids=tuple(pb.stop_token_ids),
        ignore_eos=pb.ignore_eos,
        include_stop_str_in_output=pb.include_stop_str_in_output,
        hold_back_longest_stop=pb.hold_back_longest_stop,
    )


def _output(pb: inference_pb2.OutputOptions) -> OutputOptions:
    skip = pb.skip_special_tokens if pb.HasField("skip_special_tokens") else True
    return OutputOptions(
        logprobs=pb.logprobs if pb.HasField("logprobs") else None,
        prompt_logprobs=pb.prompt_logprobs if pb.HasField("prompt_logprobs") else None,
        raw_logprobs=pb.logprobs_mode == inference_pb2.LOGPROBS_MODE_RAW,
        skip_special_tokens=skip,
    )


def _constraint(pb: inference_pb2.Constraint) -> Constraint | None:
    kind = pb.WhichOneof("kind")
    if kind is None:
        raise errors.InvalidArgument("the constraint says nothing", field="constraint")
    if pb.HasField("whitespace_pattern") and kind != "json_schema":
        raise errors.InvalidArgument(
            "whitespace_pattern goes with json_schema only", field="constraint.whitespace_pattern"
        )
    if kind == "json_object":
        # "Any object" wished for with false is no wish.
        return Constraint(kind) if pb.json_object else None
    if kind == "choice":
        return Constraint(kind, choices=tuple(pb.choice.values))
    space = pb.whitespace_pattern if pb.HasField("whitespace_pattern") else None
    return Constraint(kind, getattr(pb, kind), whitespace_pattern=space)


# --- events ------------------------------------------------------------------------------------------


def event_to_pb(event: Event, handle: int, piece: Piece) -> inference_pb2.GenerateEvent:
    """The wire form of an event."""
    if isinstance(event, Delta):
        return inference_pb2.GenerateEvent(handle=handle, delta=_delta(event, piece))
    if isinstance(event, Started):
        return inference_pb2.GenerateEvent(handle=handle, started=_started(event))
    if isinstance(event, PromptScored):
        positions = [
            inference_pb2.TokenLogprobs() if p is None else _scores(p, piece)
            for p in event.positions
        ]
        scored = inference_pb2.PromptLogprobs(positions=positions)
        return inference_pb2.GenerateEvent(handle=handle, prompt_logprobs=scored)
    if isinstance(event, Finished):
        return inference_pb2.GenerateEvent(handle=handle, finished=_finished(event))
    return inference_pb2.GenerateEvent(handle=handle, failed=_failed(event))


def _delta(event: Delta, piece: Piece) -> inference_pb2.Delta:
    return inference_pb2.Delta(
        choice=event.choice,
        token_offset=event.token_offset,
        token_ids=event.token_ids,
        text=event.text,
        logprobs=[_scores(s, piece) for s in event.scores],
        end=None if event.end is None else _end(event.end),
    )


def _end(end: ChoiceEnd) -> inference_pb2.ChoiceEnd:
    return inference_pb2.ChoiceEnd(
        reason=_REASONS[end.reason],
        stop_token_id=end.cause if isinstance(end.cause, int) else None,
        stop_string=end.cause if isinstance(end.cause, str) else None,
        cumulative_logprob=end.cumulative_logprob,
    )


def _scores(scores: TokenScores, piece: Piece) -> inference_pb2.TokenLogprobs:
    return inference_pb2.TokenLogprobs(
        token_ids=scores.token_ids,
        logprobs=scores.logprobs,
        ranks=scores.ranks,
        texts=scores.texts,
        pieces=[piece(t) for t in scores.token_ids],
    )


def _started(event: Started) -> inference_pb2.Started:
    return inference_pb2.Started(
        num_prompt_tokens=event.num_prompt_tokens,
        num_cached_tokens=event.num_cached_tokens,
        sampling=_sampling_to_pb(event.request.sampling),
        stopping=_stopping_to_pb(event.request.stopping),
    )


def _sampling_to_pb(p: SamplingParams) -> inference_pb2.SamplingParams:
    allowed = p.allowed_token_ids
    return inference_pb2.SamplingParams(
        n=p.n,
        best_of=p.best_of,
        temperature=p.temperature,
        top_p=p.top_p,
        top_k=p.top_k,
        min_p=p.min_p,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        repetition_penalty=p.repetition_penalty,
        seed=p.seed,
        logit_bias=[inference_pb2.LogitBias(token_id=t, bias=b) for t, b in p.logit_bias],
        allowed_token_ids=None if allowed is None else inference_pb2.TokenIds(ids=allowed),
        use_beam_search=p.use_beam_search,
        length_penalty=p.length_penalty,
        early_stopping=p.early_stopping,
    )


def _stopping_to_pb(p: StoppingParams) -> inference_pb2.StoppingParams:
    return inference_pb2.StoppingParams(
        max_tokens=p.max_tokens,
        min_tokens=p.min_tokens,
        stop=p.stop,
        stop_token_ids=p.stop_token_ids,
        ignore_eos=p.ignore_eos,
        include_stop_str_in_output=p.include_stop_str_in_output,
        hold_back_longest_stop=p.hold_back_longest_stop,
    )


def _finished(event: Finished) -> inference_pb2.Finished:
    return inference_pb2.Finished(
        usage=inference_pb2.Usage(
            prompt_tokens=event.num_prompt_tokens,
            completion_tokens=event.num_generated_tokens,
            cached_tokens=event.num_cached_tokens,
            accepted_draft_tokens=event.num_accepted_tokens,
        ),
        timings=inference_pb2.Timings(
            queue_us=_us(event.queue_s),
            prefill_us=_us(event.prefill_s),
            decode_us=_us(event.decode_s),
            total_us=_us(event.total_s),
        ),
    )


def _failed(event: Failed) -> object:
    return rpc.to_status(event.error)


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))


# --- reports -----------------------------------------------------------------------------------------


def frame_to_pb(frame: Frame, events: list[inference_pb2.GenerateEvent]) -> engine_pb2.RunResponse:
    """One step's message."""
    return engine_pb2.RunResponse(
        step_seq=frame.stats.step_seq,
        step_us=_us(frame.stats.total_s),
        num_prefill_tokens=frame.stats.num_prefill_tokens,
        num_decode_tokens=frame.stats.num_decode_tokens,
        events=events,
        load=load_to_pb(frame.load),
    )


def load_to_pb(load: Load) -> engine_pb2.Load:
    """How busy a worker is."""
    engine, totals = load.engine, load.engine.totals
    return engine_pb2.Load(
        num_running=engine.num_running,
        num_waiting=engine.num_waiting,
        kv_used_tokens=engine.kv_used_tokens,
        kv_total_tokens=engine.kv_total_tokens,
        prefill_rate=load.prefill_rate,
        decode_rate=load.decode_rate,
        prompt_tokens=totals.prompt_tokens,
        generated_tokens=totals.generated_tokens,
        cached_tokens=totals.cached_tokens,
        num_preemptions=totals.num_preemptions,
    )


def report_to_pb(progress: Progress, state: engine_pb2.WorkerState) -> engine_pb2.Report:
    """A worker's report."""
    return engine_pb2.Report(
        state=state,
        last_step_seq=progress.step_seq,
        last_step_unix_ms=progress.step_unix_ms,
        idle=progress.is_idle,
        load=load_to_pb(progress.load),
        cached_prefixes=progress.digests,
    )
