"""TokenizerService: protobuf in, protobuf out, limits kept, large texts out of the event loop's way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import grpc
import orjson

from candor.errors import InvalidArgument, ResourceExhausted
from candor.v1 import inference_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from tokenizer_svc.catalog import Catalog, LoadedModel
from tokenizer_svc.chat_template import Conversation
from tokenizer_svc.config import Config
from tokenizer_svc.markers import Rendered
from tokenizer_svc.template_pool import TemplatePool

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]


class TokenizerService(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """The gRPC face of the loaded tokenizers."""

    def __init__(self, catalog: Catalog, config: Config) -> None:
        self._catalog = catalog
        self._config = config
        self._templates = TemplatePool(config.pool_limits())
        self._threads = _Threads(config.tokenizer_threads, config.max_waiting_texts)

    async def close(self) -> None:
        """End threads and template processes; no call runs any more."""
        self._threads.close()
        await self._templates.close()

    async def Encode(
        self, request: tokenizer_pb2.EncodeRequest, context: Context
    ) -> tokenizer_pb2.EncodeResponse:
        """Texts → ids."""
        model = self._catalog.get(request.model)
        add_special = _or(request, "add_special_tokens", True)
        texts = [Rendered(text) for text in request.texts]
        sequences = await self._encode(model, texts, add_special, "texts", _cut(request))
        return tokenizer_pb2.EncodeResponse(
            sequences=[inference_pb2.TokenIds(ids=ids) for ids in sequences],
            fingerprint=model.codec.fingerprint,
        )

    async def EncodeChat(
        self, request: tokenizer_pb2.EncodeChatRequest, context: Context
    ) -> tokenizer_pb2.EncodeChatResponse:
        """Conversations → ids, by the model's template or the conversation's own."""
        model = self._catalog.get(request.model)
        texts = await self._render(model, request.conversations)
        add_special = _or(request, "add_special_tokens", False)
        sequences = await self._encode(model, texts, add_special, "messages", _cut(request))
        return tokenizer_pb2.EncodeChatResponse(
            sequences=[inference_pb2.TokenIds(ids=ids) for ids in sequences],
            fingerprint=model.codec.fingerprint,
            texts=[text.shown for text in texts] if request.return_texts else (),
        )

    async def Decode(
        self, request: tokenizer_pb2.DecodeRequest, context: Context
    ) -> tokenizer_pb2.DecodeResponse:
        """Ids → texts. Ids that do not exist vanish."""
        model = self._catalog.get(request.model)
        self._check_batch(len(request.sequences), "sequences")
        skip = request.skip_special_tokens

        def work() -> list[str]:
            return [model.codec.decode(s.ids, skip) for s in request.sequences]

        size = sum(len(s.ids) for s in request.sequences)
        texts = await self._run(size, work)
        return tokenizer_pb2.DecodeResponse(texts=texts, fingerprint=model.codec.fingerprint)

    async def Count(
        self, request: tokenizer_pb2.CountRequest, context: Context
    ) -> tokenizer_pb2.CountResponse:
        """How many ids texts and conversations become; special tokens as in Encode and EncodeChat."""
        model = self._catalog.get(request.model)
        rendered = await self._render(model, request.conversations)
        texts = [Rendered(text) for text in request.texts]
        sequences = [
            *await self._encode(
                model, texts, _or(request, "add_special_tokens", True), "texts", None
            ),
            *await self._encode(
                model, rendered, _or(request, "add_special_tokens", False), "messages", None
            ),
        ]
        return tokenizer_pb2.CountResponse(
            counts=[len(ids) for ids in sequences], fingerprint=model.codec.fingerprint
        )

    async def Describe(
        self, request: tokenizer_pb2.DescribeRequest, context: Context
    ) -> tokenizer_pb2.DescribeResponse:
        """What is loaded."""
        one = request.HasField("model")
        models = [self._catalog.get(request.model)] if one else list(self._catalog)
        return tokenizer_pb2.DescribeResponse(tokenizers=[_describe(m) for m in models])

    # --- steps -----------------------------------------------------------------------------------------

    async def _render(
        self, model: LoadedModel, chats: Sequence[inference_pb2.ChatPrompt]
    ) -> list[Rendered]:
        self._check_batch(len(chats), "conversations")
        texts = []
        for chat in chats:
            size = chat.ByteSize()
            self._check_size(size, "messages")
            hide = partial(model.markers.hide, _conversation(chat))
            conversation, spelled = await self._run(size, hide)
            if chat.chat_template:
                tokens = model.codec.special_tokens
                text = await self._templates.render(chat.chat_template, tokens, conversation)
            else:
                text = await self._run(size, partial(model.template().render, conversation))
            texts.append(Rendered(text, spelled))
        return texts

    async def _encode(
        self,
        model: LoadedModel,
        texts: Sequence[Rendered],
        add_special_tokens: bool,
        field: str,
        truncate_to: int | None,
    ) -> list[list[int]]:
        self._check_batch(len(texts), field)
        sizes = [len(text.shown.encode()) for text in texts]
        self._check_size(max(sizes, default=0), field)
        codec = model.codec

        def work() -> list[list[int]]:
            sequences = [model.markers.encode(text, add_special_tokens) for text in texts]
            if truncate_to is None:
                return sequences
            return [
                codec.keep_last(ids, truncate_to, has_special_tokens=add_special_tokens)
                for ids in sequences
            ]

        return await self._run(sum(sizes), work)

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= self._config.encode_inline_bytes:
            return work()
        return await self._threads.run(work)

    def _check_batch(self, items: int, field: str) -> None:
        if items > self._config.max_encode_batch:
            raise InvalidArgument(
                f"{items} {field} in one call; at most {self._config.max_encode_batch} are allowed",
                reason="BATCH_TOO_LARGE",
                field=field,
            )

    def _check_size(self, size: int, field: str) -> None:
        if size > self._config.max_text_bytes:
            raise InvalidArgument(
                f"text of {size} bytes; at most {self._config.max_text_bytes} are allowed",
                reason="TEXT_TOO_LARGE",
                field=field,
            )


class _Threads:
    """A pool whose line has an end."""

    def __init__(self, threads: int, max_waiting: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "tokenize")
        self._limit = threads + max_waiting
        self._inside = 0
        self._lock = threading.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Run in a thread. Raises ResourceExhausted when too many wait already."""
        with self._lock:
            if self._inside >= self._limit:
                raise ResourceExhausted(
                    f"{self._inside} calls with large texts wait; {self._limit} may",
                    reason="QUEUE_FULL",
                    retry_after_s=1.0,
                )
            self._inside += 1
        future = self._pool.submit(work)
        # Not in a `finally` here: a caller that goes away does not stop a thread.
        future.add_done_callback(self._leave)
        return await asyncio.wrap_future(future)

    def _leave(self, _future: Future[Any]) -> None:
        with self._lock:
            self._inside -= 1

    def close(self) -> None:
        """Let running work end, drop what waits."""
        self._pool.shutdown(wait=True, cancel_futures=True)


# --- protobuf ----------------------------------------------------------------------------------------


def _or(request: Any, name: str, default: bool) -> bool:
    return bool(getattr(request, name)) if request.HasField(name) else default


def _cut(request: tokenizer_pb2.EncodeRequest | tokenizer_pb2.EncodeChatRequest) -> int | None:
    return request.truncate_to if request.HasField("truncate_to") else None


def _conversation(chat: inference_pb2.ChatPrompt) -> Conversation:
    messages = [_message(message, n) for n, message in enumerate(chat.messages)]
    kwargs: dict[str, Any] = {}
    if chat.HasField("chat_template_kwargs_json"):
        kwargs = _object(chat.chat_template_kwargs_json, "chat_template_kwargs")
    return Conversation(
        messages=messages,
        tools=[_object(t, f"tools[{n}]") for n, t in enumerate(chat.tools_json)] or None,
        documents=[_object(d, f"documents[{n}]") for n, d in enumerate(chat.documents_json)]
        or None,
        add_generation_prompt=_or(chat, "add_generation_prompt", True),
        kwargs=kwargs,
    )


def _message(message: inference_pb2.ChatMessage, number: int) -> dict[str, Any]:
    """As a template sees it: a part that is unset is a key that is not there."""
    names = ("role", "content", "name", "tool_call_id")
    seen: dict[str, Any] = {n: getattr(message, n) for n in names if message.HasField(n)}
    if message.tool_calls_json:
        at = f"messages[{number}].tool_calls"
        seen["tool_calls"] = [
            _object(c, f"{at}[{n}]") for n, c in enumerate(message.tool_calls_json)
        ]
    return seen


def _object(text: str, field: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"{field} is not JSON: {error}", field=field) from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{field} is not a JSON object", field=field)
    return value


def _describe(model: LoadedModel) -> tokenizer_pb2.TokenizerInfo:
    codec = model.codec
    return tokenizer_pb2.TokenizerInfo(
        model=model.name,
        fingerprint=codec.fingerprint,
        vocab_size=codec.vocab_size,
        base_vocab_size=codec.base_vocab_size,
        special_token_ids=sorted(codec.special_ids),
        eos_token_ids=codec.eos_ids,
        bos_token_id=codec.bos_id,
        has_chat_template=codec.chat_template is not None,
    )
