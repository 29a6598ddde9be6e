from candor.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineFeature(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_FEATURE_UNSPECIFIED: _ClassVar[EngineFeature]
    ENGINE_FEATURE_CONSTRAINT: _ClassVar[EngineFeature]
    ENGINE_FEATURE_PROMPT_LOGPROBS: _ClassVar[EngineFeature]
    ENGINE_FEATURE_BEAM_SEARCH: _ClassVar[EngineFeature]
    ENGINE_FEATURE_RESUME: _ClassVar[EngineFeature]
    ENGINE_FEATURE_SEED: _ClassVar[EngineFeature]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_LOST: _ClassVar[WorkerState]
ENGINE_FEATURE_UNSPECIFIED: EngineFeature
ENGINE_FEATURE_CONSTRAINT: EngineFeature
ENGINE_FEATURE_PROMPT_LOGPROBS: EngineFeature
ENGINE_FEATURE_BEAM_SEARCH: EngineFeature
ENGINE_FEATURE_RESUME: EngineFeature
ENGINE_FEATURE_SEED: EngineFeature
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_LOST: WorkerState

class EngineServiceEmbedRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: _inference_pb2.EmbedRequest
    def __init__(self, request: _Optional[_Union[_inference_pb2.EmbedRequest, _Mapping]] = ...) -> None: ...

class EngineServiceEmbedResponse(_message.Message):
    __slots__ = ("response",)
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    response: _inference_pb2.EmbedResponse
    def __init__(self, response: _Optional[_Union[_inference_pb2.EmbedResponse, _Mapping]] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "instance_id", "address", "pid", "card", "model", "slots", "kv_tokens", "backend", "runner", "api_major", "api_minor", "features")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    API_MAJOR_FIELD_NUMBER: _ClassVar[int]
    API_MINOR_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    instance_id: str
    address: str
    pid: int
    card: str
    model: _inference_pb2.ModelInfo
    slots: int
    kv_tokens: int
    backend: str
    runner: str
    api_major: int
    api_minor: int
    features: _containers.RepeatedScalarFieldContainer[EngineFeature]
    def __init__(self, worker_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., card: _Optional[str] = ..., model: _Optional[_Union[_inference_pb2.ModelInfo, _Mapping]] = ..., slots: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., backend: _Optional[str] = ..., runner: _Optional[str] = ..., api_major: _Optional[int] = ..., api_minor: _Optional[int] = ..., features: _Optional[_Iterable[_Union[EngineFeature, str]]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "kv_used_tokens", "kv_total_tokens", "prefill_rate", "decode_rate", "prompt_tokens", "generated_tokens", "cached_tokens", "num_preemptions")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RATE_FIELD_NUMBER: _ClassVar[int]
    DECODE_RATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    kv_used_tokens: int
    kv_total_tokens: int
    prefill_rate: float
    decode_rate: float
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    num_preemptions: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., kv_used_tokens: _Optional[int] = ..., kv_total_tokens: _Optional[int] = ..., prefill_rate: _Optional[float] = ..., decode_rate: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("state", "last_step_seq", "last_step_unix_ms", "idle", "load", "cached_prefixes")
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CACHED_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    last_step_seq: int
    last_step_unix_ms: int
    idle: bool
    load: Load
    cached_prefixes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, state: _Optional[_Union[WorkerState, str]] = ..., last_step_seq: _Optional[int] = ..., last_step_unix_ms: _Optional[int] = ..., idle: bool = ..., load: _Optional[_Union[Load, _Mapping]] = ..., cached_prefixes: _Optional[_Iterable[int]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("register", "report")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    register: WorkerInfo
    report: Report
    def __init__(self, register: _Optional[_Union[WorkerInfo, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("lease_ms",)
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    def __init__(self, lease_ms: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("accepted", "drain")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    drain: Drain
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "request")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request: _inference_pb2.GenerateRequest
    def __init__(self, handle: _Optional[int] = ..., request: _Optional[_Union[_inference_pb2.GenerateRequest, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class EngineCommand(_message.Message):
    __slots__ = ("submit", "cancel")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[EngineCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[EngineCommand, _Mapping]]] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("step_seq", "step_us", "num_prefill_tokens", "num_decode_tokens", "events", "load")
    STEP_SEQ_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    step_seq: int
    step_us: int
    num_prefill_tokens: int
    num_decode_tokens: int
    events: _containers.RepeatedCompositeFieldContainer[_inference_pb2.GenerateEvent]
    load: Load
    def __init__(self, step_seq: _Optional[int] = ..., step_us: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., num_decode_tokens: _Optional[int] = ..., events: _Optional[_Iterable[_Union[_inference_pb2.GenerateEvent, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("info", "report")
    INFO_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    report: Report
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ...) -> None: ...
