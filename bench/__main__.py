"""`make bench`: our stack beside llama.cpp's server, and what gateway and scheduler cost per chunk.

Both sides run at the same time in one call, on the same file with the same threads and slots, and take
turns, so that a noisy machine disturbs both. The best of the rounds counts for each side.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import platform
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import engine, loop
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
    parser.add_argument(
        "--only", choices=["peer", "shapes", "cost", "engine", "loop"], help="one part of it"
    )
    parser.add_argument("--flips", type=int, default=0, help="requests for the last table of loop")
    a = parser.parse_args()
    path = models.ensure(a.model) if a.model in models.KNOWN else models.resolve(a.model)
    console.print(
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {a.threads} threads,"
        f" {a.slots} slots, {path.name}; chat prompts of about 80 tokens, {a.max_tokens} new"
        " tokens, greedy, streamed",
        highlight=False,
    )
    if a.only == "loop":
        runner = "native" if a.runner == "auto" else a.runner
        loop.Bench(path, a.threads, console).run(runner, a.flips)
    if a.only in (None, "engine"):
        engine.measure(path, a.threads, console)
    if a.only in (None, "peer", "shapes"):
        beside_llamacpp(path, a)
    if a.only in (None, "cost"):
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
        if a.only in (None, "shapes"):
            _shapes(ours, peer, a)
        if a.only == "shapes":
            return
        table = Table("streams", "tokens/s candor", "llama.cpp", "ratio")
        for column in ("TTFT p50 ms candor", "llama.cpp", "ratio"):
            table.add_column(column)
        for concurrency in (int(c) for c in a.concurrency.split(",")):
            load = generator.Load(
                concurrency, max(2, concurrency), max_tokens=a.max_tokens, seed=1 + concurrency
            )
            mine, theirs = _take_turns(ours, peer, load, a.rounds)
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


def _shapes(ours: Running, peer: Running, a: argparse.Namespace) -> None:
    """Prompts of a shape of their own: many that begin alike, and long ones."""
    table = Table("load", "candor", "llama.cpp", "ratio")
    shared = generator.Load(16, 16, prompt_tokens=24, shared_tokens=400, max_tokens=24)
    mine, theirs = _take_turns(ours, peer, shared, a.rounds)
    table.add_row(
        "16 cold requests behind 400 shared tokens, tokens/s",
        f"{mine.tokens_per_s:.1f}",
        f"{theirs.tokens_per_s:.1f}",
        f"{mine.tokens_per_s / theirs.tokens_per_s:.2f}",
    )
    for streams in (1, 4):
        long = generator.Load(streams, max(2, streams), prompt_tokens=480, max_tokens=8)
        mine, theirs = _take_turns(ours, peer, long, a.rounds)
        table.add_row(
            f"512-token prompts, {streams} at a time, TTFT p50 ms",
            f"{mine.ttft_p50_ms:.0f}",
            f"{theirs.ttft_p50_ms:.0f}",
            f"{mine.ttft_p50_ms / theirs.ttft_p50_ms:.2f}",
        )
    console.print(table)


def _take_turns(
    ours: Running, peer: Running, load: generator.Load, rounds: int
) -> tuple[generator.Result, generator.Result]:
    best: list[generator.Result | None] = [None, None]
    for _ in range(rounds):
        # Every round has prompts that neither side has seen.
        load = dataclasses.replace(load, seed=load.seed + 97)
        for side, server in enumerate((ours, peer)):
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
