"""The way of one request through the gateway, from parsed call to last byte.

Knows the order (find the model, encode, resolve, submit, render) and that the status line waits for the
first delta or the refusal. Knows neither routes nor any dialect's rules.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from candor import errors, telemetry
from gateway import sse, translate
from gateway.catalog import Catalog, ModelCard
from gateway.clients import SchedulerClient, TokenizerClient
from gateway.config import Config
from gateway.dialects import (
    Chat,
    DetokenizeCall,
    Dialect,
    EmbeddingCall,
    Encoded,
    GenerationCall,
    Ids,
    Prompt,
    Text,
    TokenizeCall,
)
from gateway.directory import Directory
from gateway.events import Delta, Started, Tagged
from gateway.metrics import Metrics, ModelMetrics
from gateway.replies import Outlet
from gateway.spec import GenerationSpec

log = logging.getLogger("gateway.flow")

JSON_HEADERS = [(b"content-type", b"application/json")]
_SSE_HEADERS = [(b"content-type", sse.MEDIA_TYPE.encode())]


class Flow:
    """What the routes of one dialect do."""

    def __init__(
        self,
        config: Config,
        dialect: Dialect,
        tokenizer: TokenizerClient,
        scheduler: SchedulerClient,
        directory: Directory,
        metrics: Metrics,
    ) -> None:
        self._config, self.dialect, self._metrics = config, dialect, metrics
        self._tokenizer, self._scheduler, self._directory = tokenizer, scheduler, directory

    async def generate(self, call: GenerationCall, outlet: Outlet) -> None:
        """Answer a chat or completion request. Raises while nothing has been sent."""
        began_at = time.perf_counter()
        try:
            model = await self._find(call.model)
            if model.is_embedding:
                raise errors.InvalidArgument(
                    f"The model `{call.model}` embeds and does not generate.", field="model"
                )
            prompts, fingerprint = await self._encode_for(call, model)
            specs = call.specs(prompts, model)
        except Exception as error:
            if not (call.is_stream and self.dialect.is_in_band(error)):
                raise
            await outlet.start(200, _SSE_HEADERS)
            await outlet.end(self.dialect.stream_error(error))
            return
        requests = [
            translate.generate_to_pb(
                spec,
                prompt.token_ids,
                model=model.name,
                request_id=request_id,
                fingerprint=fingerprint,
                deadline_unix_ms=int((time.time() + self._config.request_timeout_s) * 1000),
            )
            for spec, prompt, request_id in zip(specs, prompts, _ids(len(prompts)), strict=True)
        ]
        record = _Record(self._metrics.of(model), began_at, specs[0], prompts)
        renderer = call.renderer(prompts, specs, model, int(time.time()))
        self._metrics.open_streams += 1
        data = b""
        try:
            timeout_s = self._config.request_timeout_s
            with self._scheduler.generate(requests, timeout_s=timeout_s) as generation:
                generation.on_overflow = lambda: self._abandon(outlet)
                async for events in generation:
                    record.see(events)
                    data += renderer.feed(events)
                    if generation.is_complete:
                        break  # the last bytes and the end of the stream go out together
                    if data:
                        if not outlet.has_started:
                            await outlet.start(200, record.headers(_SSE_HEADERS))
                        await outlet.write(data)
                        data = b""
                data += renderer.finish()
        except asyncio.CancelledError:
            self._metrics.client_disconnects += 1
            record.end(is_aborted=True)
            raise
        except Exception as error:
            record.end(is_aborted=True)
            if not outlet.has_started:
                raise
            _note(error)
            await outlet.end(self.dialect.stream_error(error))
            return
        finally:
            self._metrics.open_streams -= 1
        record.end()
        if not call.is_stream:
            await outlet.whole(200, record.headers(JSON_HEADERS), data)
            return
        if not outlet.has_started:
            await outlet.start(200, record.headers(_SSE_HEADERS))
        await outlet.end(data)

    async def embed(self, call: EmbeddingCall) -> bytes:
        """Answer an embedding request."""
        model = await self._find(call.model, embedding=True)
        encoded, fingerprint = await self._encode(model, call.prompts())
        call.check(encoded, model)
        vectors = await self._scheduler.embed(
            model,
            [e.token_ids for e in encoded],
            request_id=_ids(1)[0],
            fingerprint=fingerprint,
            timeout_s=self._config.embed_timeout_s,
        )
        return call.body(vectors, encoded, int(time.time()))

    async def tokenize(self, call: TokenizeCall) -> bytes:
        """Answer a tokenize request."""
        model = await self._find(call.model)
        encoded, _ = await self._encode(model, [call.prompt()])
        return call.body(encoded[0].token_ids, model)

    async def detokenize(self, call: DetokenizeCall) -> bytes:
        """Answer a detokenize request."""
        model = await self._find(call.model)
        return call.body((await self._decode(model, [call.token_ids]))[0])

    async def models(self) -> bytes:
        """The list of models."""
        return self.dialect.models(await self._directory.get(), int(time.time()))

    # --- steps ---------------------------------------------------------------------------------------

    async def _find(self, name: str, *, embedding: bool = False) -> ModelCard:
        known = await self._directory.find(name)
        catalog: Catalog = await self._directory.get()
        if known is None and not catalog.models:
            raise errors.Unavailable("no model is served yet", reason="NO_MODEL", retry_after_s=1.0)
        return self.dialect.find(name, catalog, embedding=embedding)

    async def _encode_for(
        self, call: GenerationCall, model: ModelCard
    ) -> tuple[list[Encoded], str]:
        prompts = call.prompts()
        encoded, fingerprint = await self._encode(model, prompts)
        if call.wants_prompt_text:
            brought = [i for i, p in enumerate(prompts) if isinstance(p, Ids)]
            shown = await self._decode(model, [encoded[i].token_ids for i in brought])
            texts = dict(zip(brought, shown, strict=True))
            texts |= {i: p.text for i, p in enumerate(prompts) if isinstance(p, Text)}
            encoded = [replace(e, text=texts.get(i, "")) for i, e in enumerate(encoded)]
        if call.wants_first_token:
            firsts = await self._decode(model, [e.token_ids[:1] for e in encoded])
            encoded = [replace(e, first_token=f) for e, f in zip(encoded, firsts, strict=True)]
        return encoded, fingerprint

    async def _encode(
        self, model: ModelCard, prompts: Sequence[Prompt]
    ) -> tuple[list[Encoded], str]:
        """Token ids of every prompt, and the fingerprint of the tokenizer where it made any."""
        fingerprint = ""
        rows: list[Sequence[int]] = [()] * len(prompts)
        texts: dict[tuple[bool, int | None], list[int]] = {}
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, Ids):
                rows[i] = prompt.token_ids
            elif isinstance(prompt, Text):
                texts.setdefault((prompt.add_special_tokens, prompt.truncate_to), []).append(i)
            else:
                rows[i], fingerprint = await self._encode_chat(model, prompt)
        for (add_special_tokens, truncate_to), indexes in texts.items():
            ids, fingerprint = await self._tokenizer.encode(
                model.name,
                [p.text for p in (prompts[i] for i in indexes) if isinstance(p, Text)],
                add_special_tokens=add_special_tokens,
                truncate_to=truncate_to,
            )
            for i, row in zip(indexes, ids, strict=True):
                rows[i] = row
        return [Encoded(row) for row in rows], fingerprint

    async def _encode_chat(self, model: ModelCard, prompt: Chat) -> tuple[list[int], str]:
        return await self._tokenizer.encode_chat(
            model.name,
            translate.chat_to_pb(prompt),
            add_special_tokens=prompt.add_special_tokens,
            truncate_to=prompt.truncate_to,
        )

    async def _decode(self, model: ModelCard, rows: Sequence[Sequence[int]]) -> list[str]:
        """Texts of ids; ids that the vocabulary does not have are silent."""
        if not rows:
            return []
        size = model.tokenizer.vocab_size if model.tokenizer else model.vocab_size
        return await self._tokenizer.decode(model.name, [[i for i in r if i < size] for r in rows])

    def _abandon(self, outlet: Outlet) -> None:
        self._metrics.slow_clients += 1
        log.warning(
            "a client reads too slowly; its request is cancelled",
            extra={"buffer": self._config.stream_buffer},
        )
        outlet.abandon()


def _ids(count: int) -> list[str]:
    """Ids for the scheduler: the request's own in front, unique even when a client repeats it."""
    stem = f"{telemetry.request_id.get()}.{secrets.token_hex(4)}"
    return [f"{stem}.{i}" for i in range(count)]


def _note(error: Exception) -> None:
    if not isinstance(error, errors.CandorError):
        log.error("unhandled error in a stream", exc_info=error)
    elif error.http_status >= 500:
        level = logging.ERROR if error.http_status == 500 else logging.WARNING
        log.log(level, "a stream failed: %s", error.message, extra={"reason": error.reason})


class _Record:
    """What one request adds to the metrics."""

    def __init__(
        self,
        counts: ModelMetrics,
        began_at: float,
        spec: GenerationSpec,
        prompts: Sequence[Encoded],
    ) -> None:
        self._counts, self._began_at = counts, began_at
        self._last_at = 0.0
        self._num_open = max(spec.n, spec.best_of) * len(prompts)
        self._num_tokens: dict[tuple[int, int], int] = {}
        self._queue_us = 0
        counts.n.observe(spec.n)
        counts.best_of.observe(spec.best_of)
        for prompt in prompts:
            counts.prompt_tokens += len(prompt.token_ids)
            counts.request_prompt_tokens.observe(len(prompt.token_ids))

    def see(self, events: Sequence[Tagged]) -> None:
        """Count what these events bring. The hot path: one clock reading per batch."""
        tokens, most = self._num_tokens, 0
        counts = self._counts
        for prompt, event in events:
            if type(event) is Delta:
                key = (prompt, event.choice)
                size = len(event.token_ids)
                tokens[key] = tokens.get(key, 0) + size
                counts.generation_tokens += size
                most += size
                if event.end is not None:
                    self._num_open -= 1
                    counts.successes[event.end.finish_reason] += 1
                    counts.request_generation_tokens.observe(tokens[key])
            elif type(event) is Started:
                self._queue_us = max(self._queue_us, event.queue_us)
        if most:
            now = time.perf_counter()
            if self._last_at:
                counts.per_token_s.observe(now - self._last_at)
            else:
                counts.first_token_s.observe(now - self._began_at)
            self._last_at = now

    def end(self, *, is_aborted: bool = False) -> None:
        """Count the end; once."""
        self._counts.latency_s.observe(time.perf_counter() - self._began_at)
        if is_aborted:
            self._counts.successes["abort"] += self._num_open

    def headers(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """These headers, and how long the request waited for a worker."""
        return [*headers, (b"x-candor-queue-ms", b"%d" % (self._queue_us // 1000))]
