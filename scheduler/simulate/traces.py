"""Traffic for the twin: requests with arrival times, made from a seed or read from a JSONL file.

A prompt is a list of named runs of tokens; equal names at equal places are equal text. Knows nothing about
cards or the scheduler.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from scheduler.core.prefixes import BLOCK_TOKENS, MAX_PROMPT_BLOCKS

Prompt = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    at_s: float
    prompt: Prompt
    output_tokens: int
    tenant: str = ""
    priority: int = 0
    session: str | None = None
    ttft_budget_s: float | None = None
    """What its user calls in time; the scheduler is told it when the twin says so."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(length for _, length in self.prompt)

    def digests(self) -> tuple[int, ...]:
        """A chained hash per whole block, as `core.prefixes` makes them from token ids."""
        digests: list[int] = []
        chain, filled = hashlib.blake2b(digest_size=8), 0
        for name, length in self.prompt:
            at = 0
            while at < length and len(digests) < MAX_PROMPT_BLOCKS:
                size = min(BLOCK_TOKENS - filled, length - at)
                chain.update(f"{name}:{at}:{size};".encode())
                at, filled = at + size, filled + size
                if filled == BLOCK_TOKENS:
                    digest = chain.digest()
                    digests.append(int.from_bytes(digest, "little"))
                    chain, filled = hashlib.blake2b(digest, digest_size=8), 0
        return tuple(digests)


# --- files -----------------------------------------------------------------------------------------------


def read(path: Path) -> list[TraceRequest]:
    """A trace from a JSONL file. Raises ValueError that names the line."""
    requests = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            requests.append(_parse(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}") from None
    return sorted(requests, key=lambda request: request.at_s)


def _parse(entry: dict[str, object]) -> TraceRequest:
    known = {"at_s", "prompt", "output_tokens", "tenant", "priority", "session", "ttft_budget_ms"}
    if unknown := set(entry) - known:
        raise ValueError(f"unknown fields {', '.join(sorted(unknown))}")
    pieces = entry["prompt"]
    if not isinstance(pieces, list) or not pieces:
        raise ValueError("prompt is not a list of [name, tokens]")
    budget_ms = entry.get("ttft_budget_ms")
    session = entry.get("session")
    request = TraceRequest(
        at_s=float(str(entry["at_s"])),
        prompt=tuple((str(name), int(length)) for name, length in pieces),
        output_tokens=int(str(entry["output_tokens"])),
        tenant=str(entry.get("tenant", "")),
        priority=int(str(entry.get("priority", 0))),
        session=None if session is None else str(session),
        ttft_budget_s=None if budget_ms is None else float(str(budget_ms)) / 1000,
    )
    if request.at_s < 0 or request.output_tokens < 1 or any(n < 1 for _, n in request.prompt):
        raise ValueError("times must not be negative, lengths must be positive")
    return request


def write(path: Path, requests: Iterable[TraceRequest]) -> None:
    """The same file that `read` reads."""
    with path.open("w") as file:
        for request in requests:
            entry: dict[str, object] = {
                "at_s": request.at_s,
                "prompt": request.prompt,
                "output_tokens": request.output_tokens,
                "tenant": request.tenant,
                "priority": request.priority,
            }
            if request.session is not None:
                entry["session"] = request.session
            if request.ttft_budget_s is not None:
                entry["ttft_budget_ms"] = request.ttft_budget_s * 1000
            file.write(json.dumps(entry) + "\n")


# --- generators ------------------------------------------------------------------------------------------


def _arrivals(rng: random.Random, rate_per_s: float, duration_s: float) -> Iterator[float]:
    at = rng.expovariate(rate_per_s)
    while at < duration_s:
        yield at
        at += rng.expovariate(rate_per_s)


def _length(rng: random.Random, mean: int) -> int:
    """Around the mean, from a half to twice of it."""
    return max(1, round(mean * 2 ** rng.uniform(-1, 1)))


def zipf_prefixes(
    seed: int,
    duration_s: float,
    rate_per_s: float,
    *,
    num_prefixes: int = 64,
    prefix_tokens: int = 2000,
    own_tokens: int = 100,
    output_tokens: int = 64,
) -> list[TraceRequest]:
    """Requests behind one of many shared prefixes, the n-th of which is used 1/n as often as the first."""
    rng = random.Random(seed)
    weights = list(accumulate(1 / (n + 1) for n in range(num_prefixes)))
    requests = []
    for n, at in enumerate(_arrivals(rng, rate_per_s, duration_s)):
        prefix = rng.choices(range(num_prefixes), cum_weights=weights)[0]
        prompt = ((f"p{prefix}", prefix_tokens), (f"u{n}", _length(rng, own_tokens)))
        requests.append(TraceRequest(at, prompt, _length(rng, output_tokens)))
    return requests


def hot_prefix(seed: int, duration_s: float, rate_per_s: float) -> list[TraceRequest]:
    """Sixty per cent of the requests share one prefix of 2,000 tokens; the others' prompts are their own."""
    rng = random.Random(seed)
    requests = []
    for n, at in enumerate(_arrivals(rng, rate_per_s, duration_s)):
        prefix = "hot" if rng.random() < 0.6 else f"own{n}"
        prompt = ((prefix, 2000 if prefix == "hot" else 800), (f"u{n}", _length(rng, 100)))
        requests.append(TraceRequest(at, prompt, _length(rng, 64)))
    return requests


def long_prompts(seed: int, duration_s: float, rate_per_s: float) -> list[TraceRequest]:
    """Fifteen per cent of the prompts have 6,000 tokens, the others about 300; nothing is shared."""
    rng = random.Random(seed)
    requests = []
    for n, at in enumerate(_arrivals(rng, rate_per_s, duration_s)):
        length = 6000 if rng.random() < 0.15 else _length(rng, 300)
        requests.append(TraceRequest(at, ((f"u{n}", length),), _length(rng, 64)))
    return requests


def flood(seed: int, duration_s: float, rate_per_s: float, times: int) -> list[TraceRequest]:
    """Two tenants of the same kind of requests, of which one sends so many times as much as the other."""
    rng = random.Random(seed)
    requests = []
    for n, at in enumerate(_arrivals(rng, rate_per_s, duration_s)):
        tenant = "polite" if rng.random() < 1 / (times + 1) else "flood"
        prompt = ((f"u{n}", _length(rng, 300)),)
        requests.append(TraceRequest(at, prompt, _length(rng, 100), tenant))
    return requests


def overload(
    seed: int, duration_s: float, rate_per_s: float, ttft_budget_s: float
) -> list[TraceRequest]:
    """More than there is capacity for, each with a budget for its first token."""
    return [
        TraceRequest(r.at_s, r.prompt, r.output_tokens, r.tenant, ttft_budget_s=ttft_budget_s)
        for r in flood(seed, duration_s, rate_per_s, 1)
    ]


def shared_prefix_tenants(
    seed: int, num_requests: int, *, num_tenants: int = 4, num_prefixes: int = 30
) -> list[TraceRequest]:
    """Tenants with prefixes of 3,000 tokens each, all of it waiting from the start: everybody is backlogged."""
    rng = random.Random(seed)
    requests = []
    for n in range(num_requests):
        tenant = n % num_tenants
        prompt = (
            (f"t{tenant}p{rng.randrange(num_prefixes)}", 3000),
            (f"u{n}", _length(rng, 100)),
        )
        requests.append(TraceRequest(0.0, prompt, _length(rng, 64), f"t{tenant}"))
    rng.shuffle(requests)
    return requests


def conversations(
    seed: int, duration_s: float, rate_per_s: float, *, turns: int = 6, think_s: float = 5.0
) -> list[TraceRequest]:
    """Chats: each turn's prompt is everything said before it and a new question."""
    rng = random.Random(seed)
    requests = []
    for n, start in enumerate(_arrivals(rng, rate_per_s / turns, duration_s)):
        at, said = start, [("system", 200)]
        for turn in range(turns):
            said.append((f"c{n}q{turn}", _length(rng, 80)))
            output = _length(rng, 100)
            requests.append(TraceRequest(at, tuple(said), output, session=f"c{n}"))
            said.append((f"c{n}a{turn}", output))
            at += output * 0.02 + rng.expovariate(1 / think_s)
    return sorted(requests, key=lambda request: request.at_s)
