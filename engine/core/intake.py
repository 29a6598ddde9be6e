"""From a request to its working state: the rules it sets, its choices, what was generated elsewhere.

Knows the tokenizer (end of sequence, special tokens, text) and the limits; not who runs when.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from engine.core.beam import BeamSearch
from engine.core.prompt_scores import PromptScores
from engine.core.sampler import Penalties, Rules
from engine.core.sequence import Matcher, RequestState, Sequence
from engine.core.stops import Stopper, StopRules, Text, Verdict
from engine.core.types import Request
from engine.core.validate import Limits, check
from tokenizer_svc.codec import Codec
from tokenizer_svc.text_stream import TextStream


class Intake:
    """Makes request states."""

    def __init__(self, codec: Codec, limits: Limits) -> None:
        self._codec = codec
        self._limits = limits
        self._special_tokens = {
            codec.pieces[i].decode(errors="replace"): i for i in codec.special_ids
        }

    def open(self, request: Request, matcher: Matcher | None, now: float) -> RequestState:
        """The state of a new request, without choices. Raises candor.errors for one that cannot be served."""
        check(request, self._limits)
        params, stopping, output = request.sampling, request.stopping, request.output
        eos_ids = self._codec.eos_ids
        stop_rules = StopRules.of(
            stopping,
            eos_ids=eos_ids,
            special_tokens=self._special_tokens,
            skip_special_tokens=output.skip_special_tokens,
            room=self._limits.max_model_len - len(request.prompt),
        )
        stop_ids = {*stop_rules.stop_ids, *eos_ids[:1]}
        rules = Rules.of(
            params,
            stop_ids=[i for i in stop_ids if 0 <= i < self._limits.vocab_size],
            min_tokens=stopping.min_tokens,
            num_logprobs=output.logprobs,
            raw_logprobs=output.raw_logprobs,
        )
        resolved = replace(request, stopping=replace(stopping, max_tokens=stop_rules.max_tokens))
        state = RequestState(resolved, rules, stop_rules, matcher=matcher, submitted_at=now)
        if params.use_beam_search:
            state.beam = BeamSearch(state, self._grow_beam)
        # A request that was resumed with tokens has had its prompt's scores before the first of them.
        if output.prompt_logprobs is not None and not any(r.token_ids for r in request.resumed):
            state.prompt_scores = PromptScores(request.prompt, rules, output.prompt_logprobs)
        return state

    def choices(self, state: RequestState) -> list[tuple[Sequence, list[Verdict]]]:
        """The choices to generate, each with the verdicts on what it has already."""
        num_choices = 1 if state.beam else state.request.sampling.best_of
        resumed = {r.choice: r for r in state.request.resumed}
        found = []
        for choice in range(num_choices):
            before = resumed.get(choice)
            if before is None:
                found.append(self._sequence(state, choice, ()))
            elif not before.is_finished:
                sequence, verdicts = self._sequence(state, choice, before.token_ids)
                sequence.cumulative_logprob = before.cumulative_logprob
                found.append((sequence, verdicts))
        return found

    def text(self, state: RequestState) -> Text:
        """A stream of text as the request wants it."""
        return TextStream(self._codec, state.request.output.skip_special_tokens)

    def _sequence(
        self, state: RequestState, choice: int, output: Seq[int]
    ) -> tuple[Sequence, list[Verdict]]:
        request = state.request
        are_wanted = Penalties.are_wanted(request.sampling)
        sequence = Sequence(
            state=state,
            choice=choice,
            token_ids=list(request.prompt),
            stopper=Stopper(state.stop_rules, self.text(state)),
            penalties=Penalties(request.sampling, request.prompt) if are_wanted else None,
            matcher=state.matcher.fork() if state.matcher else None,
        )
        return sequence, sequence.replay(output)

    def _grow_beam(self, parent: Sequence, token: int) -> tuple[Sequence, list[Verdict]]:
        output = [*parent.token_ids[parent.num_prompt :], token]
        return self._sequence(parent.state, parent.choice, output)
