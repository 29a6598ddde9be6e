"""The loop driven by hand: one ending each, nobody's batch matters, forks, preemption, resume, faults."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from candor import errors
from engine.core.types import (
    Delta,
    Failed,
    Finished,
    OutputOptions,
    Request,
    Resumed,
    SamplingParams,
    Started,
    StoppingParams,
)
from engine.runners import KvExhausted, StepInput
from tests.fakes.engine import (
    EOS,
    MARKER,
    Outcome,
    ScriptedRunner,
    drive,
    make_engine,
    peak,
    run,
    says,
)

GREEDY = SamplingParams(temperature=0)


def request(key: int = 1, prompt: bytes = b"hi", **fields: Any) -> Request:
    """A request over bytes; fields of its parts may be named directly."""
    parts: dict[str, dict[str, Any]] = {"sampling": {}, "stopping": {}, "output": {}, "": {}}
    kinds = {"sampling": SamplingParams, "stopping": StoppingParams, "output": OutputOptions}
    names = {p: {f.name for f in dataclasses.fields(k)} for p, k in kinds.items()}
    for name, value in fields.items():
        part = next((p for p in kinds if name in names[p]), "")
        parts[part][name] = value
    parts["sampling"].setdefault("best_of", parts["sampling"].get("n", 1))
    parts["stopping"].setdefault("max_tokens", 20)
    made = {p: kind(**parts[p]) for p, kind in kinds.items()}
    return Request(key=key, prompt=tuple(prompt), **made, **parts[""])


def answer(made: Request, **engine: Any) -> Outcome:
    """A request served alone."""
    return run(make_engine(**engine), made)[made.key]


def test_an_answer_is_started_told_and_finished() -> None:
    runner = ScriptedRunner(says({b"hi": b"yes"}))
    got = answer(request(temperature=0), runner=runner)
    assert isinstance(got.events[0], Started)
    assert got.text() == "yes" and got.tokens() == [*b"yes", EOS]
    assert got.reason() == ("stop", None)
    assert got.finished.num_generated_tokens == 4 and got.finished.num_prompt_tokens == 2


def test_the_defaults_in_force_are_reported() -> None:
    started = answer(request(max_tokens=None, temperature=0)).events[0]
    assert isinstance(started, Started)
    assert started.request.stopping.max_tokens == 512 - 2


def test_a_request_joins_a_running_batch_at_the_next_step() -> None:
    runner = ScriptedRunner(says({b"a": b"1" * 9, b"b": b"2" * 9}))
    engine = make_engine(runner)
    engine.submit(request(1, b"a", temperature=0))
    engine.step()
    engine.submit(request(2, b"b", temperature=0))
    keys = {e.key for e in engine.step()[0] if isinstance(e, Delta)}
    assert keys == {1, 2} and runner.computed[-1] == 2
    drive(engine)


@pytest.mark.parametrize("seed", range(3))
def test_batch_and_order_change_nothing(seed: int) -> None:
    rng = random.Random(seed)
    made = [
        request(
            key,
            bytes(rng.choices(b"abcd", k=rng.randint(1, 90))),
            temperature=rng.choice([0, 0.7, 1.5]),
            top_p=rng.choice([1, 0.8]),
            presence_penalty=rng.choice([0, 1]),
            repetition_penalty=rng.choice([1, 1.3]),
            seed=rng.randint(-9, 9),
            n=1,
            max_tokens=rng.randint(1, 30),
            stop=rng.choice([(), ("ab",), ("q",)]),
            logprobs=rng.choice([None, 3]),
        )
        for key in range(12)
    ]
    alone = {m.key: answer(m) for m in made}
    together = run(make_engine(slots=5, token_budget=17, mixed_budget=9), *made)
    tight = run(make_engine(ScriptedRunner(kv_tokens=160, max_rows=6, max_model_len=150)), *made)
    for other in (together, tight):
        for key, got in other.items():
            assert got.tokens() == alone[key].tokens()
            assert got.text() == alone[key].text()
            assert got.reason() == alone[key].reason()
            assert got.scores() == alone[key].scores()


def test_equal_seeds_are_equal_and_choices_differ() -> None:
    first = answer(request(n=3, seed=5, ignore_eos=True))
    again = answer(request(9, n=3, seed=5, ignore_eos=True), slots=1)
    other = answer(request(n=3, seed=6, ignore_eos=True))
    assert [first.tokens(c) for c in range(3)] == [again.tokens(c) for c in range(3)]
    assert len({first.text(c) for c in range(3)}) == 3
    assert first.text(0) != other.text(0)
    assert first.finished.num_generated_tokens == 60 and first.finished.num_prompt_tokens == 2


def test_choices_fork_after_one_prefill() -> None:
    runner = ScriptedRunner()
    got = answer(request(prompt=b"x" * 60, n=4, ignore_eos=True, max_tokens=5), runner=runner)
    assert sum(runner.computed) == 60 + 3 + 4 * 4
    assert got.finished.num_cached_tokens == 0


def test_cold_requests_with_one_prefix_compute_it_once() -> None:
    runner = ScriptedRunner()
    made = [request(k, b"y" * 100 + bytes([97 + k]), max_tokens=1) for k in range(4)]
    got = run(make_engine(runner, token_budget=40), *made)
    assert sum(runner.computed) == 100 + 4
    assert [got[k].finished.num_cached_tokens for k in range(4)] == [0, 100, 100, 100]


def test_a_salt_keeps_prefixes_apart() -> None:
    runner = ScriptedRunner()
    made = [request(k, b"y" * 50, max_tokens=1, cache_salt=str(k % 2)) for k in range(4)]
    run(make_engine(runner), *made)
    assert sum(runner.computed) == 2 * 50 + 2


def test_a_repeated_prompt_is_cached_and_answers_the_same() -> None:
    engine = make_engine()
    first = run(engine, request(1, b"again and again", seed=3, logprobs=2))[1]
    second = run(engine, request(2, b"again and again", seed=3, logprobs=2))[2]
    assert second.finished.num_cached_tokens == len(b"again and again") - 1
    assert first.tokens() == second.tokens() and first.scores() == second.scores()


def test_a_long_prompt_does_not_stall_those_who_decode() -> None:
    runner = ScriptedRunner()
    engine = make_engine(runner, token_budget=32, mixed_budget=8)
    engine.submit(request(1, b"a", ignore_eos=True, max_tokens=40))
    engine.step()
    engine.submit(request(2, b"b" * 200, ignore_eos=True, max_tokens=3))
    for _ in range(20):
        events, stats = engine.step()
        assert [e.key for e in events if isinstance(e, Delta)] == [1]
        assert stats.num_decode_tokens == 1 and stats.num_prefill_tokens == 7
    drive(engine)


def test_preempted_requests_finish_as_if_nothing_had_happened() -> None:
    small = ScriptedRunner(kv_tokens=64, max_model_len=60)
    engine = make_engine(small)
    made = [
        request(k, b"p" * 5 + bytes([97 + k]), seed=k, ignore_eos=True, max_tokens=40)
        for k in range(4)
    ]
    got = run(engine, *made)
    assert engine.load.totals.num_preemptions > 0
    for m in made:
        assert got[m.key].tokens() == answer(m).tokens()


def test_prompts_that_fill_the_store_half_way_each_get_through() -> None:
    runner = ScriptedRunner(kv_tokens=100, max_model_len=100, max_batch_tokens=16)
    made = [request(k, bytes([97 + k]) * 90, max_tokens=5, ignore_eos=True) for k in range(4)]
    got = run(make_engine(runner, token_budget=16), *made)
    assert all(got[k].reason() == ("length", None) for k in range(4))


def test_a_store_that_is_full_by_surprise_costs_time_only() -> None:
    calls = 0

    def sometimes(step: StepInput) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise KvExhausted("fragmented")

    made = [request(k, bytes([97 + k]) * 9, seed=k) for k in range(3)]
    got = run(make_engine(ScriptedRunner(before_forward=sometimes)), *made)
    for m in made:
        assert got[m.key].tokens() == answer(m).tokens()


def test_a_failed_forward_fails_its_batch_and_nothing_else() -> None:
    def breaks(step: StepInput) -> None:
        if 122 in step.token_ids:
            raise RuntimeError("no such kernel")

    engine = make_engine(ScriptedRunner(says({}), before_forward=breaks), slots=1)
    got = run(engine, request(1, b"a"), request(2, b"z"), request(3, b"b"))
    assert got[1].finished and got[3].finished
    assert isinstance(got[2].error, RuntimeError)
    assert engine.totals.num_failed_steps == 1


def test_a_row_that_is_no_number_fails_its_request() -> None:
    def voice(token_ids: Sequence[int]) -> Any:
        return np.full(259, np.nan, np.float32) if token_ids[0] == 122 else peak(97)

    made = [request(1, b"z", temperature=0), request(2, b"a", temperature=0)]
    got = run(make_engine(ScriptedRunner(voice)), *made)
    assert isinstance(got[1].error, errors.Internal)
    assert got[2].text() == "a" * 20


def test_abort_frees_at_once_and_says_nothing() -> None:
    engine = make_engine()
    for key in range(6):
        engine.submit(request(key, b"abcdef", ignore_eos=True, n=2))
    engine.step()
    for key in range(6):
        engine.abort(key)
    engine.abort(99)
    assert not any(isinstance(e, Finished | Failed) for e in engine.step()[0])
    assert engine.load.num_running == engine.load.num_waiting == engine.load.kv_used_tokens == 0
    engine.kv.check()


def test_a_deadline_ends_a_running_request() -> None:
    engine = make_engine()
    got = run(engine, request(1, max_tokens=400, ignore_eos=True, deadline_at=0.2), request(2))
    assert isinstance(got[1].error, errors.DeadlineExceeded) and got[1].deltas
    assert got[2].finished


def test_random_lives_leave_the_books_exact() -> None:
    rng = random.Random(4)
    engine = make_engine(ScriptedRunner(kv_tokens=300, max_rows=7, max_model_len=200), slots=4)
    alive: set[int] = set()
    endings: dict[int, int] = {}
    for key in range(400):
        engine.submit(
            request(
                key,
                bytes(rng.choices(b"ab", k=rng.randint(1, 40))),
                n=rng.choice([1, 1, 3]),
                seed=key,
                max_tokens=rng.randint(1, 40),
                cache_salt=rng.choice(["", "", "x"]),
            )
        )
        alive.add(key)
        for _ in range(rng.randint(0, 4)):
            for event in engine.step()[0]:
                if isinstance(event, Finished | Failed):
                    assert isinstance(event, Finished)
                    endings[event.key] = endings.get(event.key, 0) + 1
                    alive.discard(event.key)
        if alive and rng.random() < 0.3:
            gone = rng.choice(sorted(alive))
            alive.remove(gone)
            engine.abort(gone)
        engine.kv.check()
    rest = drive(engine)
    for key in alive:
        assert rest[key].finished
    assert all(count == 1 for count in endings.values())
    assert engine.kv.num_free + engine.kv.num_cached == engine.kv.num_total


# --- stops and text, through the loop ---


def test_special_tokens_that_are_named_as_stop_strings_stop() -> None:
    runner = ScriptedRunner(says({b"hi": [*b"ok", MARKER, *b"next turn"]}))
    got = answer(request(temperature=0, stop=("<|marker|>",)), runner=runner)
    assert got.text() == "ok" and got.reason() == ("stop", "<|marker|>")


def test_ignore_eos_goes_on_to_the_limit() -> None:
    got = answer(
        request(ignore_eos=True, temperature=0, max_tokens=20), runner=ScriptedRunner(says({}))
    )
    assert got.tokens() == [EOS] * 20 and got.reason() == ("length", None)


def test_logit_bias_bans_and_forces() -> None:
    def said(*bias: tuple[int, float]) -> str:
        runner = ScriptedRunner(says({b"hi": b"yes"}))
        return answer(request(temperature=0, max_tokens=1, logit_bias=bias), runner=runner).text()

    assert said() == "y"
    assert said((ord("y"), -100.0)) != "y" and said((ord("q"), 100.0)) == "q"


def test_penalties_change_repetition() -> None:
    def voice(token_ids: Sequence[int]) -> Any:
        logits = peak(97, 3.0)
        logits[98] = 2.5
        return logits

    def said(**fields: Any) -> str:
        return answer(
            request(temperature=0, max_tokens=6, **fields), runner=ScriptedRunner(voice)
        ).text()

    assert said() == said(frequency_penalty=0, repetition_penalty=1) == "aaaaaa"
    assert said(presence_penalty=1) == "abaaaa"
    assert said(frequency_penalty=0.4) != "aaaaaa"
    assert said(repetition_penalty=1.3)[0] == "a" and said(repetition_penalty=1.3) != "aaaaaa"
    # Only repetition sees the prompt.
    seen = request(prompt=b"a", temperature=0, max_tokens=1, repetition_penalty=1.3)
    unseen = request(prompt=b"a", temperature=0, max_tokens=1, presence_penalty=2)
    assert answer(seen, runner=ScriptedRunner(voice)).text() == "b"
    assert answer(unseen, runner=ScriptedRunner(voice)).text() == "a"


def test_min_tokens_masks_every_stop() -> None:
    got = answer(
        request(temperature=0, min_tokens=5, stop_token_ids=(0,)), runner=ScriptedRunner(says({}))
    )
    assert len(got.tokens()) == 6 and got.tokens()[-1] == EOS and EOS not in got.tokens()[:-1]
    assert 0 not in got.tokens()


def test_zero_tokens_is_a_prompt_without_an_answer() -> None:
    got = answer(request(max_tokens=0, prompt_logprobs=0))
    assert got.tokens() == [] and got.reason() == ("length", None)
    assert len(got.prompt_scores) == 2


# --- logprobs ---


def test_scores_come_with_every_token_even_when_its_text_is_held_back() -> None:
    runner = ScriptedRunner(says({b"hi": [*b"a##", *"é".encode()]}))
    got = answer(request(temperature=0, logprobs=2, stop=("###",)), runner=runner)
    assert got.text() == "a##é" and len(got.scores()) == len(got.tokens()) == 6
    for token, scores in zip(got.tokens(), got.scores(), strict=True):
        assert scores.token_ids[0] == token and len(scores.texts) == len(scores.token_ids)
    assert [s.texts[0] for s in got.scores()] == ["a", "#", "#", "", "é", ""]


def test_cumulative_logprob_is_the_sum_and_absent_when_nobody_needs_it() -> None:
    got = answer(request(seed=1, logprobs=0))
    end = got.deltas[-1].end
    assert end is not None and end.cumulative_logprob is not None
    assert end.cumulative_logprob == pytest.approx(sum(s.logprobs[0] for s in got.scores()))
    plain = answer(request(seed=1)).deltas[-1].end
    assert plain is not None and plain.cumulative_logprob is None
    ranked = answer(request(seed=1, n=1, best_of=3))
    assert {d.choice for d in ranked.deltas} == {0, 1, 2}
    assert all(d.end.cumulative_logprob is not None for d in ranked.deltas if d.end)


@pytest.mark.parametrize("budget", [4, 64])
def test_prompt_logprobs_equal_a_step_by_step_reading(budget: int) -> None:
    prompt = b"some prompt"
    got = answer(
        request(prompt=prompt, prompt_logprobs=2, logprobs=2, max_tokens=3), token_budget=budget
    )
    assert got.prompt_scores[0] is None and len(got.prompt_scores) == len(prompt)
    voice = ScriptedRunner().voice
    for i in range(1, len(prompt)):
        scores = got.prompt_scores[i]
        z = voice(prompt[:i]).astype(np.float64)
        z -= np.log(np.exp(z).sum())
        assert scores is not None and scores.token_ids[0] == prompt[i]
        assert scores.logprobs[0] == pytest.approx(z[prompt[i]], abs=1e-4)
        assert scores.ranks[0] == 1 + int((z > z[prompt[i]]).sum())
        assert scores.texts[0] == chr(prompt[i])


def test_prompt_logprobs_are_the_same_with_a_warm_cache() -> None:
    engine = make_engine()
    run(engine, request(1, b"shared prefix and X"))
    warm = run(engine, request(2, b"shared prefix and Y", prompt_logprobs=3))[2]
    cold = answer(request(2, b"shared prefix and Y", prompt_logprobs=3))
    assert warm.prompt_scores == cold.prompt_scores and warm.finished.num_cached_tokens == 0


def test_prompt_logprobs_under_top_k_are_minus_infinity_where_it_cuts() -> None:
    got = answer(request(prompt=b"Zabc", prompt_logprobs=1, top_k=1))
    values = [s.logprobs[0] for s in got.prompt_scores if s is not None]
    assert -math.inf in values and not any(math.isnan(v) for v in values)


def test_prompt_logprobs_survive_preemption() -> None:
    small = ScriptedRunner(kv_tokens=100, max_model_len=100, max_batch_tokens=16)
    made = [request(k, bytes([97 + k]) * 80, prompt_logprobs=1, max_tokens=9) for k in range(3)]
    got = run(make_engine(small, token_budget=16), *made)
    for m in made:
        assert got[m.key].prompt_scores == answer(m).prompt_scores


# --- beams ---


def brute_force(voice: Any, prompt: bytes, length: int) -> list[tuple[float, list[int]]]:
    """Every continuation of a fixed length over three letters, best first."""
    found: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(length):
        grown = []
        for total, tokens in found:
            z = voice([*prompt, *tokens]).astype(np.float64)
            z -= np.log(np.exp(z).sum())
            grown += [(total + z[t], [*tokens, t]) for t in (97, 98, 99)]
        found = grown
    return sorted(found, key=lambda entry: -entry[0])


def letters(token_ids: Sequence[int]) -> Any:
    """Three letters, how likely depends on all that came before."""
    logits = np.full(259, -30.0, np.float32)
    logits[97:100] = np.random.default_rng(hash(tuple(token_ids)) & 0xFFFF).standard_normal(3) * 2
    return logits


def test_a_wide_beam_finds_the_best_continuations() -> None:
    made = request(
        temperature=0,
        use_beam_search=True,
        n=4,
        best_of=9,
        max_tokens=4,
        ignore_eos=True,
        logprobs=1,
    )
    runner = ScriptedRunner(letters)
    got = answer(made, runner=runner, slots=9)
    best = brute_force(letters, b"hi", 4)[:4]
    assert [got.tokens(c) for c in range(4)] == [tokens for _, tokens in best]
    for choice, (total, _) in enumerate(best):
        end = got.of(choice)[-1].end
        assert end is not None and end.cumulative_logprob == pytest.approx(total, abs=1e-3)
        assert len(got.scores(choice)) == 4 and len(got.text(choice)) == 4
    assert got.finished.num_generated_tokens == 16


def test_beams_are_the_same_beside_others_and_with_little_room() -> None:
    beam = request(1, temperature=0, use_beam_search=True, n=2, best_of=3, max_tokens=12)
    alone = answer(beam, runner=ScriptedRunner(letters))
    others = [request(k, bytes([k]) * 9, seed=k, max_tokens=30) for k in range(2, 6)]
    runner = ScriptedRunner(letters, kv_tokens=60, max_model_len=60, max_rows=5)
    got = run(make_engine(runner), others[0], others[1], beam, *others[2:])[1]
    assert [got.tokens(c) for c in (0, 1)] == [alone.tokens(c) for c in (0, 1)]


def test_length_penalty_and_early_stopping_decide_which_ends_win() -> None:
    def voice(token_ids: Sequence[int]) -> Any:
        logits = np.full(259, -30.0, np.float32)
        logits[EOS], logits[97] = 0.1, 0.0
        return logits

    def said(**fields: Any) -> str:
        made = request(temperature=0, use_beam_search=True, n=1, best_of=2, max_tokens=8, **fields)
        return answer(made, runner=ScriptedRunner(voice)).text()

    assert said() == ""
    assert len(said(length_penalty=6.0)) > 0
    assert said(early_stopping=True) == ""


def test_stop_strings_end_beams() -> None:
    made = request(temperature=0, use_beam_search=True, n=2, best_of=3, max_tokens=9, stop=("b",))
    got = answer(made, runner=ScriptedRunner(letters))
    assert all("b" not in got.text(c) for c in (0, 1))
    assert ("stop", "b") in [got.reason(c) for c in (0, 1)]


def test_fewer_beams_than_answers_wanted_are_refused() -> None:
    made = request(
        temperature=0,
        use_beam_search=True,
        n=2,
        best_of=3,
        max_tokens=4,
        ignore_eos=True,
        allowed_token_ids=(97,),
    )
    error = answer(made, runner=ScriptedRunner(letters)).error
    assert isinstance(error, errors.InvalidArgument)
    assert error.field == "n" and "found 1 of n=2 answers" in error.message
    alone = dataclasses.replace(made, sampling=dataclasses.replace(made.sampling, n=1))
    assert answer(alone, runner=ScriptedRunner(letters)).text() == "aaaa"


# --- resume ---


@pytest.mark.parametrize("seed", range(8))
def test_a_request_goes_on_elsewhere_from_any_cut(seed: int) -> None:
    rng = random.Random(seed)
    made = request(
        prompt=b"resume me",
        n=2,
        seed=seed,
        temperature=1.2,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        stop=("qz", "ab"),
        logprobs=1,
        max_tokens=25,
        min_tokens=3,
    )
    whole = answer(made)
    cuts = [rng.randint(0, len(whole.tokens(c))) for c in (0, 1)]
    resumed = []
    for choice, cut in enumerate(cuts):
        tokens = tuple(whole.tokens(choice)[:cut])
        total = sum(s.logprobs[0] for s in whole.scores(choice)[:cut])
        resumed.append(Resumed(choice, tokens, cut == len(whole.tokens(choice)), total))
    rest = answer(dataclasses.replace(made, resumed=tuple(resumed)))
    for choice, cut in enumerate(cuts):
        if resumed[choice].is_finished:
            assert not rest.of(choice)
            continue
        assert rest.of(choice)[0].token_offset == cut
        joined = [t for d in rest.of(choice) for t in d.token_ids]
        assert joined == whole.tokens(choice)[cut:]
        told = "".join(d.text for d in whole.of(choice)[:cut])
        assert told + rest.text(choice) == whole.text(choice)
        assert rest.reason(choice) == whole.reason(choice)
        end, expected = rest.of(choice)[-1].end, whole.of(choice)[-1].end
        assert end is not None and end.cumulative_logprob is not None
        assert expected is not None and expected.cumulative_logprob is not None
        assert end.cumulative_logprob == pytest.approx(expected.cumulative_logprob)
    assert rest.finished.num_generated_tokens == whole.finished.num_generated_tokens


def test_an_end_that_was_lost_on_the_way_is_told_again() -> None:
    made = request(max_tokens=3, resumed=(Resumed(0, tuple(b"abc")),))
    got = answer(made)
    assert got.deltas[-1].token_ids == () and got.reason() == ("length", None)


def test_a_request_whose_choices_have_all_ended_is_finished() -> None:
    got = answer(request(resumed=(Resumed(0, tuple(b"abc"), is_finished=True),)))
    assert not got.deltas and got.finished.num_generated_tokens == 3


# --- what is refused ---


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt", {"prompt": b""}),
        ("prompt", {"prompt": b"x" * 512}),
        ("n", {"n": 0}),
        ("n", {"n": 1000}),
        ("best_of", {"n": 3, "best_of": 2}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": math.nan}),
        ("temperature", {"temperature": math.inf}),
        ("top_p", {"top_p": 0.0}),
        ("top_p", {"top_p": 1.1}),
        ("top_k", {"top_k": 0}),
        ("top_k", {"top_k": -2}),
        ("min_p", {"min_p": -0.1}),
        ("presence_penalty", {"presence_penalty": 2.1}),
        ("frequency_penalty", {"frequency_penalty": math.nan}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("logit_bias", {"logit_bias": ((259, 1.0),)}),
        ("logit_bias", {"logit_bias": ((1, math.inf),)}),
        ("allowed_token_ids", {"allowed_token_ids": ()}),
        ("allowed_token_ids", {"allowed_token_ids": (300,)}),
        ("min_tokens", {"min_tokens": 21}),
        ("stop", {"stop": ("a", "")}),
        ("logprobs", {"logprobs": 101}),
        ("prompt_logprobs", {"prompt_logprobs": 101}),
        ("early_stopping", {"early_stopping": True}),
        ("length_penalty", {"length_penalty": 1.5}),
        ("temperature", {"use_beam_search": True, "n": 2, "temperature": 1.0}),
        ("best_of", {"use_beam_search": True, "temperature": 0}),
        ("best_of", {"use_beam_search": True, "temperature": 0, "n": 5}),
        ("resume", {"resumed": (Resumed(1, (97,)),)}),
        ("resume", {"resumed": (Resumed(0, (999,)),)}),
    ],
)
def test_a_fault_is_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    engine = make_engine()
    with pytest.raises(errors.CandorError) as caught:
        engine.submit(request(**fields))
    assert caught.value.field == field and caught.value.is_client_fault
    assert not engine.has_work


def test_a_context_larger_than_the_store_is_no_promise() -> None:
    runner = ScriptedRunner(kv_tokens=100, max_model_len=500)
    engine = make_engine(runner)
    with pytest.raises(errors.InvalidArgument, match="100"):
        engine.submit(request(prompt=b"x" * 120))
    got = run(engine, request(prompt=b"x" * 80, ignore_eos=True, max_tokens=400))[1]
    assert len(got.tokens()) == 20 and got.reason() == ("length", None)


def test_stop_ids_beyond_the_vocabulary_are_harmless() -> None:
    assert answer(request(stop_token_ids=(5000,), min_tokens=2)).finished
