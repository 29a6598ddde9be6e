"""Between protobuf and the core's types. Checks what only the wire form can get wrong."""

from __future__ import annotations

from candor import errors
from candor.v1 import engine_pb2, inference_pb2, scheduler_pb2
from scheduler.core import types
from scheduler.core.pool import Worker
from scheduler.core.prefixes import MAX_REPORTED_BLOCKS, block_digests
from scheduler.core.record import Record

API_MAJOR = 1
"""Contract level of this scheduler: workers of another major number are refused."""

_FEATURES = {
    engine_pb2.ENGINE_FEATURE_CONSTRAINT: types.Feature.CONSTRAINT,
    engine_pb2.ENGINE_FEATURE_PROMPT_LOGPROBS: types.Feature.PROMPT_LOGPROBS,
    engine_pb2.ENGINE_FEATURE_BEAM_SEARCH: types.Feature.BEAM_SEARCH,
    engine_pb2.ENGINE_FEATURE_RESUME: types.Feature.RESUME,
    engine_pb2.ENGINE_FEATURE_SEED: types.Feature.SEED,
}
_KINDS = {
    inference_pb2.MODEL_KIND_GENERATIVE: types.ModelKind.GENERATIVE,
    inference_pb2.MODEL_KIND_EMBEDDING: types.ModelKind.EMBEDDING,
}
_STATES = {
    engine_pb2.WORKER_STATE_STARTING: types.WorkerState.STARTING,
    engine_pb2.WORKER_STATE_READY: types.WorkerState.READY,
    engine_pb2.WORKER_STATE_DRAINING: types.WorkerState.DRAINING,
    engine_pb2.WORKER_STATE_LOST: types.WorkerState.LOST,
}
_STATES_TO_PB = {state: number for number, state in _STATES.items()}


# --- workers -----------------------------------------------------------------------------------------


def worker_spec(info: engine_pb2.WorkerInfo, payload: object) -> types.WorkerSpec:
    """Who attaches. Raises what is wrong with it."""
    for field in ("worker_id", "instance_id", "address"):
        if not getattr(info, field):
            raise errors.InvalidArgument(f"{field} is missing", field=field)
    if info.api_major != API_MAJOR:
        raise errors.FailedPrecondition(
            f"worker {info.worker_id} speaks contract {info.api_major}.{info.api_minor}, "
            f"this scheduler {API_MAJOR}.x",
            reason="API_MISMATCH",
            field="api_major",
        )
    if info.slots < 1:
        raise errors.InvalidArgument("a worker has at least one slot", field="slots")
    model = info.model
    if not model.name:
        raise errors.InvalidArgument("model.name is missing", field="model.name")
    if model.max_model_len < 1 or model.vocab_size < 1:
        raise errors.InvalidArgument(
            f"model `{model.name}` has max_model_len {model.max_model_len} "
            f"and vocab_size {model.vocab_size}; both must be positive",
            field="model",
        )
    # An unset kind is an older worker's: it generates. Features this build does not know ask for nothing.
    return types.WorkerSpec(
        worker_id=info.worker_id,
        instance_id=info.instance_id,
        model=types.Model(
            name=model.name,
            aliases=tuple(model.aliases),
            kind=_KINDS.get(model.kind, types.ModelKind.GENERATIVE),
            max_model_len=model.max_model_len,
            fingerprint=model.tokenizer_fingerprint,
            vocab_size=model.vocab_size,
        ),
        slots=info.slots,
        features=frozenset(_FEATURES[f] for f in info.features if f in _FEATURES),
        payload=payload,
    )


def load(pb: engine_pb2.Load) -> types.Load:
    """The part of a load that decisions need."""
    return types.Load(
        kv_used_tokens=pb.kv_used_tokens,
        kv_total_tokens=pb.kv_total_tokens,
        prefill_rate=pb.prefill_rate if pb.prefill_rate > 0 else None,
    )


def report(pb: engine_pb2.Report) -> types.Report:
    """A worker's report. A state it does not name means that it works."""
    return types.Report(
        state=_STATES.get(pb.state, types.WorkerState.READY),
        last_step_seq=pb.last_step_seq,
        is_idle=pb.idle,
        load=load(pb.load) if pb.HasField("load") else None,
        cached_prefixes=tuple(pb.cached_prefixes[:MAX_REPORTED_BLOCKS]),
    )


def worker_status(
    now: float, worker: Worker, info: engine_pb2.WorkerInfo, last_load: engine_pb2.Load
) -> scheduler_pb2.WorkerStatus:
    """A worker as consoles see it."""
    left_s = max(0.0, worker.lease_until - now) if worker.lost_at is None else 0.0
    return scheduler_pb2.WorkerStatus(
        info=info,
        state=_STATES_TO_PB[worker.state],
        load=last_load,
        num_assigned=len(worker.assigned),
        lease_left_ms=round(1000 * left_s),
    )


# --- requests ----------------------------------------------------------------------------------------


def generation(
    pb: inference_pb2.GenerateRequest, now: float, unix_now: float, payload: object
) -> types.Request:
    """A request whose prompt is token ids and whose request_id is set."""
    sampling, stopping = pb.sampling, pb.stopping
    n = sampling.n if sampling.HasField("n") else 1
    best_of = sampling.best_of if sampling.HasField("best_of") else n
    if n < 1:
        raise errors.InvalidArgument(f"n must be at least 1, got {n}", field="n")
    if best_of < n:
        raise errors.InvalidArgument(
            f"best_of must be at least n, got {best_of} < {n}", field="best_of"
        )
    ids = pb.prompt.token_ids.ids
    resumed = tuple(
        types.Resumed(
            r.choice,
            tuple(r.token_ids),
            r.finished,
            r.cumulative_logprob if r.HasField("cumulative_logprob") else None,
        )
        for r in pb.resume
    )
    if any(r.index >= best_of for r in resumed):
        raise errors.InvalidArgument(
            f"resume names a choice beyond the {best_of} of the request", field="resume"
        )
    generated = max((len(r.token_ids) for r in resumed), default=0)
    wants_none = stopping.HasField("max_tokens") and stopping.max_tokens == 0
    return types.Request(
        request_id=pb.request_id,
        model=pb.model,
        num_prompt_tokens=len(ids),
        context_tokens=len(ids) + generated + (0 if wants_none else 1),
        max_token_id=max(ids, default=0),
        fingerprint=pb.tokenizer_fingerprint if pb.HasField("tokenizer_fingerprint") else None,
        num_sequences=best_of,
        needs=_needs(pb),
        resumed=resumed,
        priority=pb.priority,
        tenant=pb.tenant,
        session_id=pb.session_id if pb.HasField("session_id") else None,
        prefix_digests=block_digests(ids, pb.cache_salt),
        is_salted=bool(pb.cache_salt),
        deadline_at=(
            now + pb.deadline_unix_ms / 1000 - unix_now if pb.HasField("deadline_unix_ms") else None
        ),
        first_token_by=(now + pb.ttft_budget_ms / 1000 if pb.HasField("ttft_budget_ms") else None),
        payload=payload,
    )


def _needs(pb: inference_pb2.GenerateRequest) -> frozenset[tuple[types.Feature, str]]:
    wanted = {
        (types.Feature.CONSTRAINT, "constraint"): pb.HasField("constraint"),
        (types.Feature.PROMPT_LOGPROBS, "prompt_logprobs"): pb.output.HasField("prompt_logprobs"),
        (types.Feature.BEAM_SEARCH, "use_beam_search"): pb.sampling.use_beam_search,
        (types.Feature.SEED, "seed"): pb.sampling.HasField("seed"),
        (types.Feature.RESUME, "resume"): len(pb.resume) > 0,
    }
    return frozenset(need for need, is_wanted in wanted.items() if is_wanted)


def embedding(pb: inference_pb2.EmbedRequest, payload: object) -> types.Request:
    """A request for embeddings whose request_id is set."""
    if not pb.inputs:
        raise errors.InvalidArgument("there is nothing to embed", field="inputs")
    lengths = [len(sequence.ids) for sequence in pb.inputs]
    if 0 in lengths:
        raise errors.InvalidArgument(f"input {lengths.index(0)} is empty", field="inputs")
    return types.Request(
        request_id=pb.request_id,
        model=pb.model,
        kind=types.ModelKind.EMBEDDING,
        num_prompt_tokens=sum(lengths),
        context_tokens=max(lengths),
        max_token_id=max(max(sequence.ids) for sequence in pb.inputs),
        fingerprint=pb.tokenizer_fingerprint if pb.HasField("tokenizer_fingerprint") else None,
        tenant=pb.tenant,
        payload=payload,
    )


def set_progress(pb: inference_pb2.GenerateRequest, record: Record) -> None:
    """Make the request continue behind what was relayed."""
    pb.ClearField("resume")
    for index, choice in record.progress():
        pb.resume.add(
            choice=index,
            token_ids=choice.token_ids,
            finished=choice.is_finished,
            cumulative_logprob=choice.cumulative_logprob,
        )
