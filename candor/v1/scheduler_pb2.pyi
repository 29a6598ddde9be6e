from candor.v1 import engine_pb2 as _engine_pb2
from candor.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _inference_pb2.GenerateEvent
    def __init__(self, event: _Optional[_Union[_inference_pb2.GenerateEvent, _Mapping]] = ...) -> None: ...

class ClientCommand(_message.Message):
    __slots__ = ("submit", "cancel")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    submit: _engine_pb2.Submit
    cancel: _engine_pb2.Cancel
    def __init__(self, submit: _Optional[_Union[_engine_pb2.Submit, _Mapping]] = ..., cancel: _Optional[_Union[_engine_pb2.Cancel, _Mapping]] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[ClientCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[ClientCommand, _Mapping]]] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[_inference_pb2.GenerateEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[_inference_pb2.GenerateEvent, _Mapping]]] = ...) -> None: ...

class SchedulerServiceEmbedRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: _inference_pb2.EmbedRequest
    def __init__(self, request: _Optional[_Union[_inference_pb2.EmbedRequest, _Mapping]] = ...) -> None: ...

class SchedulerServiceEmbedResponse(_message.Message):
    __slots__ = ("response",)
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    response: _inference_pb2.EmbedResponse
    def __init__(self, response: _Optional[_Union[_inference_pb2.EmbedResponse, _Mapping]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[_inference_pb2.ModelInfo]
    def __init__(self, models: _Optional[_Iterable[_Union[_inference_pb2.ModelInfo, _Mapping]]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("info", "state", "load", "num_assigned", "lease_left_ms")
    INFO_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    NUM_ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    info: _engine_pb2.WorkerInfo
    state: _engine_pb2.WorkerState
    load: _engine_pb2.Load
    num_assigned: int
    lease_left_ms: int
    def __init__(self, info: _Optional[_Union[_engine_pb2.WorkerInfo, _Mapping]] = ..., state: _Optional[_Union[_engine_pb2.WorkerState, str]] = ..., load: _Optional[_Union[_engine_pb2.Load, _Mapping]] = ..., num_assigned: _Optional[int] = ..., lease_left_ms: _Optional[int] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("num_queued", "num_queued_tokens", "num_running", "max_queued", "workers", "num_submitted", "num_finished", "num_failed", "num_cancelled", "num_refused")
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    num_queued: int
    num_queued_tokens: int
    num_running: int
    max_queued: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    num_submitted: int
    num_finished: int
    num_failed: int
    num_cancelled: int
    num_refused: int
    def __init__(self, num_queued: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ..., num_running: _Optional[int] = ..., max_queued: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., num_submitted: _Optional[int] = ..., num_finished: _Optional[int] = ..., num_failed: _Optional[int] = ..., num_cancelled: _Optional[int] = ..., num_refused: _Optional[int] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("num_running",)
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    def __init__(self, num_running: _Optional[int] = ...) -> None: ...
