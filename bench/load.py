"""A closed loop of streaming chat requests: raw HTTP/1.1, events counted without parsing JSON.

Loopback only, bounded in requests and time. The generator's own cost per event is a byte scan, so that it
does not hide the server's.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_POOL = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book
"""
WORDS = _POOL.split()


@dataclass(frozen=True)
class Load:
    """What to send. Prompts are about `prompt_tokens` long and differ behind the shared part."""

    concurrency: int
    requests: int
    prompt_tokens: int = 48
    shared_tokens: int = 0
    max_tokens: int = 48
    seed: int = 1
    time_limit_s: float = 120.0


@dataclass
class Result:
    """What came back. Times in seconds."""

    wall_s: float = 0.0
    ok: int = 0
    events: int = 0
    tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of wall time: end-of-sequence is ignored, so each answer is full."""
        return self.tokens / self.wall_s if self.wall_s else 0.0

    @property
    def events_per_s(self) -> float:
        """Streamed events with a JSON body per second of wall time."""
        return self.events / self.wall_s if self.wall_s else 0.0

    @property
    def ttft_p50_ms(self) -> float:
        """Median time to the second event in milliseconds: the first may be a bare role."""
        return statistics.median(self.ttft_s) * 1000 if self.ttft_s else float("nan")


def words(count: int, seed: int) -> str:
    """`count` plain English words: about one token each for most vocabularies."""
    pick = random.Random(seed)
    return " ".join(pick.choice(WORDS) for _ in range(count))


def request_body(load: Load, model: str, index: int) -> dict[str, object]:
    """The chat request number `index` of a load."""
    messages = [{"role": "user", "content": words(load.prompt_tokens, load.seed * 100_003 + index)}]
    if load.shared_tokens:
        messages.insert(0, {"role": "system", "content": words(load.shared_tokens, load.seed)})
    return {
        "model": model,
        "messages": messages,
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


async def run(url: str, model: str, load: Load) -> Result:
    """Send the load to `url` (scheme and authority) and wait for all answers."""
    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise ValueError(f"{url}: loopback only")
    result, started_at = Result(), time.perf_counter()
    numbers = iter(range(load.requests))
    deadline = started_at + load.time_limit_s

    async def client() -> None:
        for index in numbers:
            left_s = deadline - time.perf_counter()
            if left_s <= 0:
                return
            body = json.dumps(request_body(load, model, index)).encode()
            try:
                async with asyncio.timeout(left_s):
                    await _one(str(parts.hostname), parts.port or 80, body, result)
            except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
                name = f"{type(error).__name__}: {error}"[:200]
                result.errors[name] = result.errors.get(name, 0) + 1

    await asyncio.gather(*(client() for _ in range(load.concurrency)))
    result.wall_s = time.perf_counter() - started_at
    result.tokens = result.ok * load.max_tokens
    return result


async def _one(host: str, port: int, body: bytes, result: Result) -> None:
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    try:
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        sent_at = time.perf_counter()
        writer.write(head.encode() + body)
        status = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1]
        if status != b"200":
            raise ValueError(f"HTTP {status.decode()}: {(await reader.read(200)).decode()}")
        await _stream(reader, sent_at, result)
    finally:
        writer.close()


async def _stream(reader: asyncio.StreamReader, sent_at: float, result: Result) -> None:
    # An event begins with "data: {"; the tail carries a marker split over two reads, never a whole one.
    marker, tail, events, last_at, first_at = b"data: {", b"", 0, 0.0, None
    ending = b""
    while chunk := await reader.read(1 << 16):
        now = time.perf_counter()
        data = tail + chunk
        count = data.count(marker)
        tail = data[-(len(marker) - 1) :]
        ending = (ending + chunk)[-64:]  # [DONE] and the end of the body may come in several reads
        if not count:
            continue
        if events >= 1:
            result.gaps_s += [(now - last_at) / count] * count
        events += count
        last_at = now
        if first_at is None and events >= 2:
            first_at = now
            result.ttft_s.append(now - sent_at)
    if b"[DONE]" not in ending:
        raise ValueError("stream ended without [DONE]")
    result.ok += 1
    result.events += events
