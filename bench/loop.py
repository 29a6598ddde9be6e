"""The engine alone, in this process: what its loop costs beside the forward pass, and what drafts save.

`python -m bench --only loop` prints loop, masks and drafts, in about a minute on two quiet cores; with
`--flips 2000` also how often a greedy token of llama.cpp depends on the batch, which takes some minutes more.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from engine.core.engine import Engine
from engine.core.guided import Grammars, TokenMatcher
from engine.core.speculation import Speculator, StepCosts
from engine.core.types import (
    Constraint,
    Delta,
    Failed,
    OutputOptions,
    Request,
    SamplingParams,
    StepStats,
    StoppingParams,
)
from engine.runners import Runner, open_runner
from engine.runners.timing import pass_times
from tokenizer_svc.codec import Codec, open_codec

STREAMS = 8
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SUBJECTS = ("a river", "the moon", "bread", "a lighthouse", "chess", "rain", "a violin", "honey")
ARTICLE = (
    "The harbour of {0} was built in {1} by a company of traders from the north. It has a long wall of grey "
    "stone, two lighthouses, and a market where {2} boats unload every morning before the sun is up. "
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 24},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["rot", "grün", "blau"]}, "maxItems": 4},
        "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2,4}$"},
        "next": {"$ref": "#/$defs/node"},
    },
    "required": ["name", "born", "tags", "code", "next"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": ["integer", "string"]},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
}


@dataclass
class Run:
    """What came of a set of requests served together."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    steps: list[StepStats] = field(default_factory=list)
    seconds: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def num_tokens(self) -> int:
        """All that was generated."""
        return sum(map(len, self.tokens.values()))

    @property
    def decoding(self) -> list[StepStats]:
        """The steps in which nothing was prefilled."""
        return [s for s in self.steps if s.num_decode_tokens and not s.num_prefill_tokens]

    @property
    def decode_rate(self) -> float:
        """Tokens per second of those steps."""
        tokens = sum(s.num_decode_tokens + s.num_accepted_tokens for s in self.decoding)
        return tokens / sum(s.total_s for s in self.decoding)


class Bench:
    """One model, its runners one after the other."""

    def __init__(self, path: Path, threads: int, console: Console) -> None:
        self._path, self._threads, self._console = path, threads, console
        self._codec: Codec = open_codec(path)
        self._grammars = Grammars(self._codec, self._codec.vocab_size)

    def run(self, runner: str, flips: int) -> None:
        """Measure and print."""
        loaded = self._open(runner)
        costs = StepCosts(pass_times(loaded))
        self._print_loop(loaded)
        self._print_masks()
        self._print_drafts(loaded, costs)
        loaded.close()
        if flips:
            self._print_flips("two tokens behind four", list(self._short(flips)))
            self._print_flips("24 tokens of chat", self._longer(flips // 10))

    # --- the loop beside the forward pass ---

    def _print_loop(self, runner: Runner) -> None:
        table = Table(
            f"{STREAMS} streams, {runner.name}", "step ms", "forward ms", "loop us", "share"
        )
        for column in ("plan us", "sample us", "emit us"):
            table.add_column(column)
        kinds = {
            "greedy": SamplingParams(temperature=0),
            "temperature 0.8": SamplingParams(temperature=0.8),
            "+ 5 logprobs": SamplingParams(temperature=0.8),
            "+ top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
            "+ JSON schema": SamplingParams(temperature=0.8),
        }
        for name, sampling in kinds.items():
            made = [
                replace(
                    self._chat(key, f"Write about {subject}.", sampling, 40),
                    output=OutputOptions(logprobs=5 if "logprobs" in name else None),
                    constraint=Constraint("json_schema", json.dumps(SCHEMA))
                    if "JSON" in name
                    else None,
                )
                for key, subject in enumerate(SUBJECTS)
            ]
            ran = self._serve(self._engine(runner), made)
            steps = [s for s in ran.decoding if s.num_decode_tokens == STREAMS]
            forward = np.median([s.forward_s for s in steps]) * 1e6
            parts = {
                part: np.median([getattr(s, f"{part}_s") for s in steps]) * 1e6
                for part in ("plan", "sample", "emit")
            }
            loop = sum(parts.values())
            table.add_row(
                name,
                f"{(forward + loop) / 1e3:.1f}",
                f"{forward / 1e3:.1f}",
                f"{loop:.0f}",
                f"{100 * loop / (forward + loop):.1f} %",
                *(f"{value:.0f}" for value in parts.values()),
            )
        self._console.print(table)

    # --- masks ---

    def _print_masks(self) -> None:
        """Random walks through a schema, STREAMS at a time: the hardest texts a mask is asked about."""
        rng = random.Random(1)
        wall, cpu = [], []
        compiled = self._grammars.compile(Constraint("json_schema", json.dumps(SCHEMA)))
        for _ in range(20):
            matchers: list[TokenMatcher] = [compiled.fork() for _ in range(STREAMS)]
            for _ in range(60):
                going_on = []
                for matcher in matchers:
                    began, cpu_began = time.perf_counter(), time.thread_time()
                    mask = matcher.mask()
                    wall.append(time.perf_counter() - began)
                    cpu.append(time.thread_time() - cpu_began)
                    token = rng.choice(np.flatnonzero(mask).tolist())
                    if not matcher.accept(token):
                        going_on.append(matcher)
                matchers = going_on
        table = Table("masks", "p50 us", "p99 us", "most us", title="")
        for name, times in (
            (f"{len(wall)} at batch {STREAMS}, wall", wall),
            ("the same, CPU", cpu),
        ):
            table.add_row(name, *(f"{1e6 * np.percentile(times, q):.0f}" for q in (50, 99, 100)))
        self._console.print(table)

    # --- drafts ---

    def _print_drafts(self, runner: Runner, costs: StepCosts) -> None:
        table = Table(
            f"drafts, {runner.name}", "streams", "tokens/s off", "lookup", "ratio", "accepted"
        )
        for name, prompts in (("copies its prompt", self._copies()), ("chat", self._chats())):
            for streams in (1, 2, 4, 8):
                off, on = self._both(runner, costs, prompts[:streams])
                if off.tokens != on.tokens:
                    raise SystemExit(f"{name}: drafts changed what was said")
                rates = [run.decode_rate for run in (off, on)]
                table.add_row(
                    name,
                    str(streams),
                    f"{rates[0]:.0f}",
                    f"{rates[1]:.0f}",
                    f"{rates[1] / rates[0]:.2f}",
                    f"{on.num_accepted} of {on.num_drafted}",
                )
        self._console.print(table)

    def _both(
        self, runner: Runner, costs: StepCosts, requests: Sequence[Request]
    ) -> tuple[Run, Run]:
        """Without and with, in turns, so that a noisy machine disturbs both; the best turn of each."""
        turns: list[list[Run]] = [[], []]
        for _ in range(4):
            for side, speculator in enumerate((None, Speculator(costs))):
                turns[side].append(self._serve(self._engine(runner, speculator), requests))
        off, on = (max(runs, key=lambda run: run.decode_rate) for runs in turns)
        return off, on

    def _copies(self) -> list[Request]:
        made = []
        for key in range(STREAMS):
            article = ARTICLE.format(SUBJECTS[key].title(), 1700 + 13 * key, 20 + key)
            tokens = tuple(self._codec.encode(article * 2, add_special_tokens=False))
            stopping = StoppingParams(len(tokens) // 2, ignore_eos=True)
            made.append(
                Request(key, tokens, sampling=SamplingParams(temperature=0), stopping=stopping)
            )
        return made

    def _chats(self) -> list[Request]:
        sampling = SamplingParams(temperature=0.7, seed=1)
        return [self._chat(k, f"Tell me about {s}.", sampling, 60) for k, s in enumerate(SUBJECTS)]

    # --- what the batch does to llama.cpp's numbers ---

    def _print_flips(self, name: str, requests: Sequence[Request]) -> None:
        """The same greedy requests alone and eight at a time: how many tokens differ."""
        runner = self._open("llamacpp")
        count = len(requests)
        began = time.perf_counter()
        alone = self._serve(self._engine(runner, slots=1), requests)
        together = self._serve(self._engine(runner), requests)
        runner.close()
        flipped, compared = 0, 0
        for key, tokens in alone.tokens.items():
            pairs = zip(tokens, together.tokens[key], strict=True)
            at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
            # Behind the first other token the two texts have nothing to do with each other.
            flipped += at is not None
            compared += len(tokens) if at is None else at + 1
        table = Table("llamacpp, alone and in a batch of 8", name, title="")
        table.add_row("requests", str(count))
        table.add_row("of them answered otherwise", f"{flipped} ({100 * flipped / count:.2f} %)")
        table.add_row("greedy tokens compared, up to the first other one", str(compared))
        table.add_row("of them flipped", f"{flipped} ({100 * flipped / compared:.3f} %)")
        table.add_row("tokens/s alone", f"{alone.num_tokens / alone.seconds:.0f}")
        table.add_row("tokens/s in the batch", f"{together.num_tokens / together.seconds:.0f}")
        table.add_row("seconds", f"{time.perf_counter() - began:.0f}")
        self._console.print(table)

    def _short(self, count: int) -> Iterator[Request]:
        rng = random.Random(2)
        words = [
            i
            for i in range(300, 9000)
            if self._codec.pieces[i].decode(errors="replace").strip().isalpha()
        ]
        for key in range(count):
            yield Request(
                key,
                (*self._codec.encode("The word", add_special_tokens=False), *rng.sample(words, 2)),
                sampling=SamplingParams(temperature=0),
                stopping=StoppingParams(2, ignore_eos=True),
            )

    def _longer(self, count: int) -> list[Request]:
        greedy = SamplingParams(temperature=0)
        words = [f"Write {k + 5} words about {SUBJECTS[k % len(SUBJECTS)]}." for k in range(count)]
        return [self._chat(key, text, greedy, 24) for key, text in enumerate(words)]

    # --- parts ---

    def _open(self, name: str) -> Runner:
        return open_runner(
            name,
            str(self._path),
            max_rows=2 * STREAMS,
            kv_tokens=8192,
            max_batch_tokens=256,
            max_model_len=1024,
            threads=self._threads,
            slots=STREAMS,
        )

    def _engine(
        self, runner: Runner, speculator: Speculator | None = None, *, slots: int = STREAMS
    ) -> Engine:
        for row in range(runner.max_rows):
            runner.trim(row, 0)
        return Engine(
            runner,
            self._codec,
            slots=slots,
            token_budget=256,
            mixed_budget=64,
            clock=time.perf_counter,
            speculator=speculator,
        )

    def _chat(self, key: int, words: str, sampling: SamplingParams, max_tokens: int) -> Request:
        tokens = self._codec.encode(CHAT.format(words), add_special_tokens=False)
        stopping = StoppingParams(max_tokens, ignore_eos=True)
        return Request(key, tuple(tokens), sampling=replace(sampling, seed=key), stopping=stopping)

    def _serve(self, engine: Engine, requests: Sequence[Request]) -> Run:
        ran = Run(tokens={request.key: [] for request in requests})
        before = engine.load.totals
        for request in requests:
            matcher = self._grammars.compile(request.constraint) if request.constraint else None
            engine.submit(request, matcher)
        began = time.perf_counter()
        while engine.has_work:
            events, stats = engine.step()
            ran.steps.append(stats)
            for event in events:
                if isinstance(event, Delta):
                    ran.tokens[event.key] += event.token_ids
                elif isinstance(event, Failed):
                    raise SystemExit(f"request {event.key} failed: {event.error}")
        ran.seconds = time.perf_counter() - began
        after = engine.load.totals
        ran.num_drafted = after.draft_tokens - before.draft_tokens
        ran.num_accepted = after.accepted_tokens - before.accepted_tokens
        return ran
