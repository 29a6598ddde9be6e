from candor.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EncodeRequest(_message.Message):
    __slots__ = ("model", "texts", "add_special_tokens", "truncate_to")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_TO_FIELD_NUMBER: _ClassVar[int]
    model: str
    texts: _containers.RepeatedScalarFieldContainer[str]
    add_special_tokens: bool
    truncate_to: int
    def __init__(self, model: _Optional[str] = ..., texts: _Optional[_Iterable[str]] = ..., add_special_tokens: bool = ..., truncate_to: _Optional[int] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("sequences", "fingerprint")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenIds]
    fingerprint: str
    def __init__(self, sequences: _Optional[_Iterable[_Union[_inference_pb2.TokenIds, _Mapping]]] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class EncodeChatRequest(_message.Message):
    __slots__ = ("model", "conversations", "add_special_tokens", "truncate_to", "return_texts")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_TO_FIELD_NUMBER: _ClassVar[int]
    RETURN_TEXTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    conversations: _containers.RepeatedCompositeFieldContainer[_inference_pb2.ChatPrompt]
    add_special_tokens: bool
    truncate_to: int
    return_texts: bool
    def __init__(self, model: _Optional[str] = ..., conversations: _Optional[_Iterable[_Union[_inference_pb2.ChatPrompt, _Mapping]]] = ..., add_special_tokens: bool = ..., truncate_to: _Optional[int] = ..., return_texts: bool = ...) -> None: ...

class EncodeChatResponse(_message.Message):
    __slots__ = ("sequences", "fingerprint", "texts")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenIds]
    fingerprint: str
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sequences: _Optional[_Iterable[_Union[_inference_pb2.TokenIds, _Mapping]]] = ..., fingerprint: _Optional[str] = ..., texts: _Optional[_Iterable[str]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("model", "sequences", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    sequences: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenIds]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., sequences: _Optional[_Iterable[_Union[_inference_pb2.TokenIds, _Mapping]]] = ..., skip_special_tokens: bool = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("texts", "fingerprint")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    fingerprint: str
    def __init__(self, texts: _Optional[_Iterable[str]] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class CountRequest(_message.Message):
    __slots__ = ("model", "texts", "conversations", "add_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    texts: _containers.RepeatedScalarFieldContainer[str]
    conversations: _containers.RepeatedCompositeFieldContainer[_inference_pb2.ChatPrompt]
    add_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., texts: _Optional[_Iterable[str]] = ..., conversations: _Optional[_Iterable[_Union[_inference_pb2.ChatPrompt, _Mapping]]] = ..., add_special_tokens: bool = ...) -> None: ...

class CountResponse(_message.Message):
    __slots__ = ("counts", "fingerprint")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    fingerprint: str
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class TokenizerInfo(_message.Message):
    __slots__ = ("model", "fingerprint", "vocab_size", "base_vocab_size", "special_token_ids", "eos_token_ids", "bos_token_id", "has_chat_template")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BASE_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    model: str
    fingerprint: str
    vocab_size: int
    base_vocab_size: int
    special_token_ids: _containers.RepeatedScalarFieldContainer[int]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    has_chat_template: bool
    def __init__(self, model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., base_vocab_size: _Optional[int] = ..., special_token_ids: _Optional[_Iterable[int]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., has_chat_template: bool = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("tokenizers",)
    TOKENIZERS_FIELD_NUMBER: _ClassVar[int]
    tokenizers: _containers.RepeatedCompositeFieldContainer[TokenizerInfo]
    def __init__(self, tokenizers: _Optional[_Iterable[_Union[TokenizerInfo, _Mapping]]] = ...) -> None: ...
