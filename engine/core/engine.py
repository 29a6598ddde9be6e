"""The loop: plan → forward → sample → advance → emit, one step at a time.

Knows requests, their choices and who is told what. The batcher decides who is computed, the runner computes,
the sampler chooses, a sequence knows what its next token means. Not thread-safe: one thread owns an engine.

A request ends with exactly one Finished or Failed event, unless it was aborted. What fails one request (its
deadline, a constraint that cannot go on) leaves the others alone; a forward pass that fails takes the requests
of its batch with it, and the loop goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from candor import errors
from engine.core.batcher import Batcher
from engine.core.beam import BeamSearch
from engine.core.intake import Intake
from engine.core.kv.slots import SlotKv
from engine.core.sampler import Row, Sampled, candidates, sample
from engine.core.sequence import Matcher, RequestState, Sequence
from engine.core.speculation import Speculator
from engine.core.stops import Verdict
from engine.core.types import (
    ChoiceEnd,
    Delta,
    EngineLoad,
    Event,
    Failed,
    Finished,
    Logits,
    PlanItem,
    PromptScored,
    Request,
    Started,
    StepPlan,
    StepStats,
    Totals,
)
from engine.core.validate import Limits
from engine.runners import KvExhausted, Runner, StepInput
from tokenizer_svc.codec import Codec

log = logging.getLogger("engine.core")


class Engine:
    """Generates for many requests at once on one runner."""

    def __init__(
        self,
        runner: Runner,
        codec: Codec,
        *,
        slots: int,
        token_budget: int,
        mixed_budget: int,
        clock: Callable[[], float],
        max_choices: int = 128,
        max_logprobs: int = 100,
        speculator: Speculator | None = None,
    ) -> None:
        """`slots`: sequences that run at the same time. `clock`: seconds, monotonic."""
        budget = min(token_budget, runner.max_batch_tokens)
        assert slots <= budget, f"{slots} decodes do not fit a step of {budget} tokens"
        assert slots <= runner.max_rows, f"{slots} slots, {runner.max_rows} rows"
        self.limits = Limits(
            vocab_size=runner.vocab_size,
            max_model_len=min(runner.max_model_len, runner.kv_tokens),
            kv_tokens=runner.kv_tokens,
            slots=slots,
            max_choices=max_choices,
            max_logprobs=max_logprobs,
        )
        self.kv = SlotKv(runner, num_rows=runner.max_rows, num_tokens=runner.kv_tokens)
        self.totals = Totals()
        self._runner = runner
        self._intake = Intake(codec, self.limits)
        self._clock = clock
        self._batcher = Batcher(
            self.kv,
            max_running=slots,
            token_budget=budget,
            mixed_budget=mixed_budget,
            speculator=speculator,
        )
        self._requests: dict[int, RequestState] = {}
        self._events: list[Event] = []
        self._step_seq = 0

    # --- the front ---

    def submit(
        self, request: Request, matcher: Matcher | None = None, *, submitted_at: float | None = None
    ) -> None:
        """Take a request; its key must be free. Raises candor.errors for one that cannot be served.

        `matcher`: its constraint, compiled and untouched. `submitted_at`: when it came, on the engine's
        clock, if that was not just now.
        """
        assert request.key not in self._requests, f"key {request.key} is in use"
        came_at = self._clock() if submitted_at is None else submitted_at
        state = self._intake.open(request, matcher, came_at)
        self._requests[request.key] = state
        self.totals.prompt_tokens += len(request.prompt)
        self._enqueue(state)

    def abort(self, key: int) -> None:
        """Forget a request; nothing more is said about it. Unknown keys are ignored."""
        state = self._requests.get(key)
        if state is not None:
            self._close(state)

    def fail_all(self, error: Exception) -> None:
        """End every request with an error: the last resort when a step itself failed."""
        for state in list(self._requests.values()):
            self._fail(state, error)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._events)

    @property
    def load(self) -> EngineLoad:
        """How busy it is."""
        used = self.kv.num_used
        return EngineLoad(
            num_running=len(self._batcher.running),
            num_waiting=len(self._batcher.waiting),
            kv_used_tokens=used,
            kv_cached_tokens=self.kv.num_resident - used,
            kv_total_tokens=self.kv.num_total,
            totals=replace(self.totals, num_preemptions=self._batcher.num_preemptions),
        )

    # --- the step ---

    def step(self) -> tuple[list[Event], StepStats]:
        """One trip through the loop."""
        started = self._clock()
        self._expire(started)
        plan = self._batcher.plan()
        stats = self._stats(plan)
        planned = self._clock()
        logits = self._forward(plan)
        computed = self._clock()
        if logits is not None:
            self._advance(plan, logits, stats)
        sampled = self._clock()
        events = self._emit()
        stats.plan_s, stats.forward_s = planned - started, computed - planned
        stats.sample_s, stats.emit_s = sampled - computed, self._clock() - sampled
        return events, stats

    def _forward(self, plan: StepPlan) -> Logits | None:
        """The logits of the plan; None when there is nothing to compute or it failed."""
        if not plan.items:
            return None
        for item in plan.items:
            self._start(item.sequence.state)
        try:
            return self._runner.forward(_batch(plan))
        except KvExhausted as full:
            # The books say it fits, so the store is fragmented: make real room and plan again.
            if not (self._drop_cache() or self._batcher.preempt_newest()):
                self._fail_batch(plan, errors.Internal(f"no KV left for one sequence: {full}"))
        except Exception as error:
            log.exception("forward failed", extra={"num_tokens": plan.num_tokens})
            self._fail_batch(plan, error)
        return None

    def _advance(self, plan: StepPlan, logits: Logits, stats: StepStats) -> None:
        """Book what was computed and let every sequence that is up to date take its next tokens."""
        turns: list[_Turn] = []
        at = 0
        for item in plan.items:
            sequence = item.sequence
            self._book(item)
            if sequence.scores_prompt:
                self._score_prompt(item, logits[at : at + item.num_logits])
            at += item.num_logits
            if item.is_last:
                turns.append(_Turn(sequence, at - 1 - len(item.drafts), item.drafts))
        said: dict[Sequence, int] = {}
        while turns:
            turns = self._choose(turns, logits, said)
            # Whoever goes on does so because a draft was right.
            stats.num_accepted_tokens += len(turns)
        self.totals.accepted_tokens += stats.num_accepted_tokens

    def _choose(self, turns: list[_Turn], logits: Logits, said: dict[Sequence, int]) -> list[_Turn]:
        """One more token for each; returns the turns of those whose draft was right about it."""
        chosen: list[_Turn] = []
        rows: list[Row] = []
        for turn in turns:
            sequence = turn.sequence
            if sequence.state.is_ended:
                continue
            if sequence.state.beam is not None:
                self._report_beam(sequence, logits[turn.at])
            elif sequence.state.stop_rules.max_tokens == 0:
                self._end_choice(sequence, sequence.stopper.end())
            elif (row := self._sampling_row(sequence)) is not None:
                chosen.append(turn)
                rows.append(row)
        found = sample([logits[turn.at] for turn in chosen], rows)
        going_on: list[_Turn] = []
        for turn, sampled in zip(chosen, found, strict=True):
            # A sibling may have failed the request a moment ago.
            if not turn.sequence.state.is_ended and self._take(turn, sampled, said):
                going_on.append(replace(turn, num_right=turn.num_right + 1))
        return going_on

    def _sampling_row(self, sequence: Sequence) -> Row | None:
        try:
            return sequence.sampling_row()
        except errors.CandorError as error:
            self._fail(sequence.state, error)
            return None

    def _take(self, turn: _Turn, sampled: Sampled | Exception, said: dict[Sequence, int]) -> bool:
        """Give a sequence its next token; whether the draft was right, so that another one is known."""
        sequence, state = turn.sequence, turn.sequence.state
        if isinstance(sampled, Exception):
            self._fail(state, sampled)
            return False
        try:
            delta = sequence.take(sampled)
        except errors.CandorError as error:
            self._fail(state, error)
            return False
        self._count(state, 1)
        if sequence in said:  # what a step adds to a sequence is one delta
            self._events[said[sequence]] = _joined(self._events[said[sequence]], delta)
        else:
            said[sequence] = len(self._events)
            self._events.append(delta)
        if turn.draft == sampled.token and delta.end is None:
            sequence.num_computed += 1
            return True
        if turn.drafts:
            self._settle(turn, was_refused=turn.draft is not None and delta.end is None)
        if delta.end is not None:
            self._leave(sequence)
        return False

    def _settle(self, turn: _Turn, *, was_refused: bool) -> None:
        """The draft is used up: forget what was computed for nothing."""
        sequence, num_drafts = turn.sequence, len(turn.drafts)
        assert sequence.row is not None, "it has not left yet"
        self.kv.retract(sequence.row, num_drafts - turn.num_right)
        sequence.state.acceptance.note(num_drafts, turn.num_right, was_refused=was_refused)

    def _emit(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _stats(self, plan: StepPlan) -> StepStats:
        if plan.items:
            self._step_seq += 1
        stats = StepStats(step_seq=self._step_seq)
        for item in plan.items:
            if item.num_known == 1 and item.start >= item.sequence.num_prompt:
                stats.num_decode_tokens += 1
            else:
                stats.num_prefill_tokens += item.num_known
            stats.num_draft_tokens += len(item.drafts)
        self.totals.draft_tokens += stats.num_draft_tokens
        return stats

    # --- requests ---

    def _enqueue(self, state: RequestState) -> None:
        choices = self._intake.choices(state)
        state.sequences = [sequence for sequence, _ in choices]
        state.num_open = len(choices)
        for i, (sequence, verdicts) in enumerate(choices):
            sequence.scores_prompt = i == 0 and state.prompt_scores is not None
            if verdicts and verdicts[-1].reason is not None:
                # Its tokens are out, but not its end: only the rest of the text follows.
                self._start(state)
                self._end_choice(sequence, verdicts[-1])
            else:
                self._batcher.add(sequence)
        if state.beam:
            state.beam.start(state.sequences[0])
        if not choices:
            self._start(state)
            self._finish(state)

    def _start(self, state: RequestState) -> None:
        """Say once that the request has a seat."""
        if state.started_at is not None:
            return
        state.started_at = self._clock()
        leader = state.sequences[0] if state.sequences else None
        state.num_cached = min(leader.num_computed, leader.num_prompt) if leader else 0
        self.totals.cached_tokens += state.num_cached
        self._events.append(
            Started(state.key, len(state.request.prompt), state.num_cached, state.request)
        )

    def _end_choice(self, sequence: Sequence, verdict: Verdict) -> None:
        """A last delta without a token of its own."""
        self._events.append(
            Delta(
                key=sequence.state.key,
                choice=sequence.choice,
                token_offset=sequence.num_generated,
                token_ids=(),
                text=verdict.text,
                end=sequence.end_of(verdict),
            )
        )
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """The choice has ended: its row goes back, and the request with its last choice."""
        self._batcher.remove(sequence)
        sequence.state.num_open -= 1
        if sequence.state.num_open == 0 and sequence.state.key in self._requests:
            self._finish(sequence.state)

    def _finish(self, state: RequestState) -> None:
        now = self._clock()
        started = state.submitted_at if state.started_at is None else state.started_at
        first = now if state.first_token_at is None else state.first_token_at
        self._events.append(
            Finished(
                key=state.key,
                num_prompt_tokens=len(state.request.prompt),
                num_generated_tokens=state.num_generated
                + sum(len(r.token_ids) for r in state.request.resumed),
                num_cached_tokens=state.num_cached,
                num_draft_tokens=state.acceptance.num_drafted,
                num_accepted_tokens=state.acceptance.num_accepted,
                queue_s=started - state.submitted_at,
                prefill_s=first - started,
                decode_s=now - first,
                total_s=now - state.submitted_at,
            )
        )
        self._close(state)

    def _close(self, state: RequestState) -> None:
        """Take the request out of every book."""
        state.is_ended = True
        for sequence in state.sequences:
            self._batcher.remove(sequence)
        del self._requests[state.key]

    def _fail(self, state: RequestState, error: Exception) -> None:
        if not state.is_ended:
            self._close(state)
            self._events.append(Failed(state.key, error))

    def _fail_batch(self, plan: StepPlan, error: Exception) -> None:
        """A forward pass failed: nobody knows what the rows of its batch hold, so they are given up."""
        self.totals.num_failed_steps += 1
        for item in plan.items:
            self._batcher.remove(item.sequence, keep=False)
        for item in plan.items:
            self._fail(item.sequence.state, error)

    def _expire(self, now: float) -> None:
        for state in list(self._requests.values()):
            deadline = state.request.deadline_at
            if deadline is not None and now >= deadline:
                late = errors.DeadlineExceeded("the request's deadline passed while it was running")
                self._fail(state, late)

    # --- parts of a step ---

    def _book(self, item: PlanItem) -> None:
        sequence = item.sequence
        assert sequence.row is not None, "what was computed has a row"
        ids = sequence.token_ids[item.start : item.start + item.num_known]
        self.kv.extend(sequence.row, [*ids, *item.drafts])
        sequence.num_computed += item.num_known

    def _count(self, state: RequestState, num_tokens: int) -> None:
        if state.first_token_at is None:
            state.first_token_at = self._clock()
        state.num_generated += num_tokens
        self.totals.generated_tokens += num_tokens

    def _drop_cache(self) -> bool:
        """Give up every cached prefix; False when there was none."""
        had = self.kv.num_cached > 0
        self.kv.reserve(self.kv.room())
        return had

    def _score_prompt(self, item: PlanItem, logits: Logits) -> None:
        state, scores = item.sequence.state, item.sequence.state.prompt_scores
        assert scores is not None, "scored without being asked"
        try:
            is_done = scores.add(item.start, logits)
        except errors.CandorError as error:
            self._fail(state, error)
            return
        if is_done:
            item.sequence.scores_prompt = False
            state.prompt_scores = None
            positions = scores.with_texts(self._intake.text(state))
            self._events.append(PromptScored(state.key, positions))

    # --- beams ---

    def _report_beam(self, sequence: Sequence, logits: Logits) -> None:
        state, beam = sequence.state, sequence.state.beam
        assert beam is not None, "not a beam"
        try:
            found = candidates(logits, sequence.sampling_row(), beam.num_candidates)
            beam.report(sequence, found)
            if beam.is_ready:
                self._expand(state, beam)
        except errors.CandorError as error:
            self._fail(state, error)
        except ArithmeticError as error:
            # One request's numbers; the others of the batch have no part in it.
            log.exception("beam failed", extra={"request": state.request.request_id})
            self._fail(state, error)

    def _expand(self, state: RequestState, beam: BeamSearch) -> None:
        """Let the best candidates go on, each in its parent's row or in a copy of it."""
        children = beam.expand()
        if children:
            self._batcher.branch(state.sequences, children)
            state.sequences = [child.sequence for child in children]
        else:
            self._finish_beam(state, beam)

    def _finish_beam(self, state: RequestState, beam: BeamSearch) -> None:
        best, wanted = beam.best(), state.request.sampling.n
        if len(best) < wanted:
            # Beams differ from each other, and a constraint may leave fewer answers than were asked for.
            raise errors.InvalidArgument(
                f"beam search found {len(best)} of n={wanted} answers; what is allowed leaves no more",
                reason="TOO_FEW_ANSWERS",
                field="n",
            )
        for choice, found in enumerate(best):
            reason = found.verdict.reason
            assert reason is not None, "a hypothesis has ended"
            end = ChoiceEnd(reason, found.verdict.cause, found.cumulative_logprob)
            self._events.append(
                Delta(state.key, choice, 0, found.token_ids, found.text, found.scores, end)
            )
            self._count(state, len(found.token_ids))
        self._finish(state)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A sequence that gets tokens from its rows of logits: `num_right` of them are known already."""

    sequence: Sequence
    first: int
    """The row of its last known token; each draft has the next one."""
    drafts: tuple[int, ...]
    num_right: int = 0

    @property
    def at(self) -> int:
        """The row that the next token comes from."""
        return self.first + self.num_right

    @property
    def draft(self) -> int | None:
        """What the next token was expected to be."""
        return self.drafts[self.num_right] if self.num_right < len(self.drafts) else None


def _joined(first: Event, more: Delta) -> Delta:
    """Two neighbouring deltas of a choice as one."""
    assert (
        isinstance(first, Delta) and first.token_offset + len(first.token_ids) == more.token_offset
    )
    return replace(
        first,
        token_ids=first.token_ids + more.token_ids,
        text=first.text + more.text,
        scores=first.scores + more.scores,
        end=more.end,
    )


def _batch(plan: StepPlan) -> StepInput:
    """The flat arrays that the runner takes."""
    total = plan.num_tokens
    token_ids, positions = np.empty(total, np.int32), np.empty(total, np.int32)
    rows, wants = np.empty(total, np.int32), np.zeros(total, np.bool_)
    at = 0
    for item in plan.items:
        until = at + item.num_tokens
        end = item.start + item.num_tokens
        token_ids[at : at + item.num_known] = item.sequence.token_ids[item.start : end]
        token_ids[at + item.num_known : until] = item.drafts
        positions[at:until] = np.arange(item.start, end)
        row = item.sequence.row
        assert row is not None, "what is planned has a row"
        rows[at:until] = row
        if item.wants_all_logits:
            wants[at:until] = True
        else:
            wants[until - item.num_logits : until] = True
        at = until
    return StepInput(token_ids, positions, rows, wants)
