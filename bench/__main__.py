"""`make bench`: our stack beside llama.cpp's server, and what gateway and scheduler cost per chunk.

Both sides run at the same time in one call, on the same file with the same threads and slots, and take
turns, so that a noisy machine disturbs both. The best of the rounds counts for each side.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import load as generator
from bench.stack import Running, candor_stack, cpu_seconds, llamacpp_server, wait_quiet
from candor.cli import models

console = Console(width=110)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--model", default=models.DEFAULT, help="known model or GGUF file")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--slots", type=int, default=16, help="sequences at a time, both sides")
    parser.add_argument("--concurrency", default="1,4,8,16")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--runner", default="auto", help="runner of our workers")
    parser.add_argument("--only", choices=["peer", "cost"], help="one half of the benchmark")
    a = parser.parse_args()
    path = models.ensure(a.model) if a.model in models.KNOWN else models.resolve(a.model)
    console.print(
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {a.threads} threads,"
        f" {a.slots} slots, {path.name}; chat prompts of about 80 tokens, {a.max_tokens} new"
        " tokens, greedy, streamed",
        highlight=False,
    )
    if a.only != "cost":
        beside_llamacpp(path, a)
    if a.only != "peer":
        cost_per_chunk(path)


def beside_llamacpp(path: Path, a: argparse.Namespace) -> None:
    """Tokens per second and time to first token, ours over theirs."""
    serve = ["--slots", str(a.slots), "--threads", str(a.threads), "--runner", a.runner]
    serve += ["--served-model-name", "bench"]
    context = 8192
    with (
        llamacpp_server(path, slots=a.slots, threads=a.threads, context=context) as peer,
        candor_stack(path, arguments=serve) as ours,
    ):
        table = Table("streams", "tokens/s candor", "llama.cpp", "ratio")
        for column in ("TTFT p50 ms candor", "llama.cpp", "ratio"):
            table.add_column(column)
        for concurrency in (int(c) for c in a.concurrency.split(",")):
            mine, theirs = _take_turns(ours, peer, concurrency, a)
            table.add_row(
                str(concurrency),
                f"{mine.tokens_per_s:.1f}",
                f"{theirs.tokens_per_s:.1f}",
                f"{mine.tokens_per_s / theirs.tokens_per_s:.2f}",
                f"{mine.ttft_p50_ms:.0f}",
                f"{theirs.ttft_p50_ms:.0f}",
                f"{mine.ttft_p50_ms / theirs.ttft_p50_ms:.2f}",
            )
        console.print(table)


def _take_turns(
    ours: Running, peer: Running, concurrency: int, a: argparse.Namespace
) -> tuple[generator.Result, generator.Result]:
    best: list[generator.Result | None] = [None, None]
    for turn in range(a.rounds):
        for side, server in enumerate((ours, peer)):
            load = generator.Load(
                concurrency=concurrency,
                requests=max(2, concurrency),
                max_tokens=a.max_tokens,
                seed=1 + turn * 97 + concurrency,
            )
            result = asyncio.run(generator.run(server.url, "bench", load))
            if result.errors:
                raise SystemExit(f"{server.url}: {result.errors}")
            now = best[side]
            if now is None or result.tokens_per_s > now.tokens_per_s:
                best[side] = result
    assert best[0] is not None and best[1] is not None
    return best[0], best[1]


def cost_per_chunk(path: Path) -> None:
    """CPU time per streamed chunk in gateway and scheduler, with an engine that costs them nothing."""
    table = Table("engine", "streams", "chunks", "gateway us/chunk", "scheduler us/chunk")
    table.add_column("chunks/s")
    for name, step_ms, streams, tokens in (
        ("instant", 0, 1, 256),
        ("instant", 0, 32, 128),
        ("20 ms a step", 20, 32, 128),
    ):
        serve = ["--runner", "synthetic", "--slots", "64", "--served-model-name", "bench"]
        environ = {"CANDOR_SYNTHETIC_STEP_MS": str(step_ms)}
        with candor_stack(path, arguments=serve, environ=environ) as ours:
            gateway, scheduler = ours.pid_of("gateway"), ours.pid_of("scheduler")
            warm = generator.Load(streams, streams, max_tokens=16)
            asyncio.run(generator.run(ours.url, "bench", warm))
            wait_quiet([gateway, scheduler], timeout_s=2)
            before = cpu_seconds(gateway), cpu_seconds(scheduler)
            load = generator.Load(streams, streams * 3, max_tokens=tokens, seed=2)
            result = asyncio.run(generator.run(ours.url, "bench", load))
            after = cpu_seconds(gateway), cpu_seconds(scheduler)
        if result.errors:
            raise SystemExit(str(result.errors))
        costs = [(y - x) * 1e6 / result.events for x, y in zip(before, after, strict=True)]
        table.add_row(
            name,
            str(streams),
            str(result.events),
            f"{costs[0]:.1f}",
            f"{costs[1]:.1f}",
            f"{result.events_per_s:.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
