"""Which texts are embedded together next: a text of each open request in turn, up to a budget of tokens.

So short requests share a pass, a long one does not hold up those behind it, and no pass takes long: between
two of them a request that was given up is dropped. Knows neither what an embedding is nor who waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from candor import errors


@dataclass(frozen=True, slots=True)
class TextLimits:
    """What a request for embeddings may bring."""

    max_inputs: int
    max_input_tokens: int
    vocab_size: int


def check_inputs(inputs: Sequence[Sequence[int]], limits: TextLimits) -> None:
    """Raise InvalidArgument that names the input at fault, or `inputs` when all of them are."""
    if not inputs:
        raise errors.InvalidArgument("there is nothing to embed", field="inputs")
    if len(inputs) > limits.max_inputs:
        raise errors.InvalidArgument(
            f"the request has {len(inputs)} inputs, at most {limits.max_inputs} are embedded at once",
            field="inputs",
        )
    for index, ids in enumerate(inputs):
        where = f"inputs[{index}]"
        if not ids:
            raise errors.InvalidArgument(f"{where} has no tokens", field=where)
        if len(ids) > limits.max_input_tokens:
            raise errors.InvalidArgument(
                f"{where} has {len(ids)} tokens, the model takes {limits.max_input_tokens}",
                field=where,
            )
        if max(ids) >= limits.vocab_size:
            raise errors.InvalidArgument(
                f"{where} has token {max(ids)}, the vocabulary has {limits.vocab_size}", field=where
            )


@dataclass(slots=True, eq=False)
class Job:
    """One request: its texts as ids, and the vectors that are there already."""

    inputs: Sequence[Sequence[int]]
    vectors: NDArray[np.float32]
    num_tokens: int = field(init=False)
    num_planned: int = 0
    num_done: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = sum(map(len, self.inputs))

    @property
    def is_complete(self) -> bool:
        """Whether every vector is there."""
        return self.num_done == len(self.inputs)


Pick = tuple[Job, int]
"""A text: the request and its index there."""


class Passes:
    """The open requests, and whose turn it is."""

    def __init__(self, token_budget: int) -> None:
        """`token_budget`: most tokens of a pass; a longer text has a pass of its own."""
        self._budget = token_budget
        self._open: set[Job] = set()
        self._turns: deque[Job] = deque()
        """Jobs with texts that are in no pass yet; the first one is next."""

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def num_tokens(self) -> int:
        """Of all texts that they brought."""
        return sum(job.num_tokens for job in self._open)

    def add(self, job: Job) -> None:
        """A new request; behind those that wait already."""
        self._open.add(job)
        self._turns.append(job)

    def drop(self, job: Job) -> None:
        """It has ended, or nobody wants it any more. Idempotent."""
        self._open.discard(job)
        if job in self._turns:
            self._turns.remove(job)

    def plan(self) -> list[Pick]:
        """The texts of the next pass; none when all are in one."""
        picks: list[Pick] = []
        num_tokens = 0
        while self._turns:
            job = self._turns[0]
            num_tokens += len(job.inputs[job.num_planned])
            if picks and num_tokens > self._budget:
                break
            picks.append((job, job.num_planned))
            job.num_planned += 1
            self._turns.popleft()
            if job.num_planned < len(job.inputs):
                self._turns.append(job)
        return picks

    def deliver(self, picks: Sequence[Pick], vectors: NDArray[np.float32]) -> list[Job]:
        """Take what a pass gave; the requests that are complete by it, and are no longer open."""
        for (job, index), vector in zip(picks, vectors, strict=True):
            job.vectors[index] = vector
            job.num_done += 1
        complete = [job for job in dict.fromkeys(job for job, _ in picks) if job.is_complete]
        for job in complete:
            self.drop(job)
        return complete
