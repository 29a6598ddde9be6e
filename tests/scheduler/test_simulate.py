"""The digital twin: that it does what cards do, and that the scheduler's aims hold in it (at small sizes)."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.core import ORDERS, POLICIES
from scheduler.core.types import Limits
from scheduler.simulate import CardModel, Outcome, Result, TraceRequest, Twin, report, traces
from scheduler.simulate.cards import Card, CardSequence
from scheduler.simulate.report import percentile, summarise
from scheduler.simulate.scenarios import SCENARIOS

SMALL = CardModel(slots=8)
EVERYTHING_WAITS = Limits(max_queued_requests=10**6, max_queued_tokens=10**12, max_wait_s=1e6)


def ttft(result: Result, share: float, tenant: str | None = None) -> float:
    times = (
        o.ttft_s
        for o in result.outcomes
        if o.ttft_s is not None and tenant in (None, o.request.tenant)
    )
    return percentile(times, share)


# --- the model ---


def test_a_step_costs_what_it_computes_and_decodes_come_first() -> None:
    card = Card(CardModel(token_budget=100))
    card.waiting.append(CardSequence(1, 150, 2, ()))
    plan = card.plan()
    assert plan.duration_s == pytest.approx(0.010 + 100 * 0.0001)
    assert card.finish(plan) == []
    card.waiting.append(CardSequence(2, 300, 1, ()))
    plan = card.plan()
    assert [(s.handle, size) for s, size in plan.prefill] == [(1, 50), (2, 50)]
    assert [s.handle for s in card.finish(plan)] == [1]
    plan = card.plan()
    assert [s.handle for s in plan.decoding] == [1] and plan.prefill[0][1] == 99
    card.finish(plan)
    assert [s.handle for s in card.running] == [2]


def test_what_was_computed_is_cached_until_the_room_is_needed() -> None:
    card = Card(CardModel(kv_tokens=256, slots=1))
    for handle, digests in ((1, (1, 2, 3)), (2, (1, 2, 9)), (3, (4, 5, 6)), (4, (1, 2, 3))):
        card.waiting.append(CardSequence(handle, 200, 1, digests))
        while card.has_work:
            plan = card.plan()
            sequence = card.running[0]
            card.finish(plan)
        assert sequence.cached_tokens == {1: 0, 2: 128, 3: 0, 4: 64}[handle]


def test_a_cancelled_sequence_leaves_nothing_behind() -> None:
    card = Card(SMALL)
    for handle in (1, 2, 3):
        card.waiting.append(CardSequence(handle, 1000, 5, ()))
    plan = card.plan()
    card.cancel(1)
    card.cancel(3)
    assert card.finish(plan) == []
    while card.has_work:
        card.finish(card.plan())
    assert card.kv_used == 0 and card.computed_tokens == 512 + 1000


def test_equal_names_at_equal_places_are_equal_text() -> None:
    def digests(*prompt: tuple[str, int]) -> tuple[int, ...]:
        return TraceRequest(0.0, prompt, 1).digests()

    one, other = digests(("p", 130), ("a", 100)), digests(("p", 130), ("b", 100))
    assert len(one) == len(other) == 3 and one[:2] == other[:2] and one[2] != other[2]
    assert digests(("x", 64), ("p", 64))[1] != digests(("p", 128))[1]


def test_a_run_loses_nothing_and_depends_on_its_seed_alone() -> None:
    trace = traces.conversations(3, 10, 8)
    runs = [Twin([SMALL] * 3, seed=5).run(trace) for _ in range(2)]
    assert [(o.worker, o.ended_at) for o in runs[0].outcomes] == [
        (o.worker, o.ended_at) for o in runs[1].outcomes
    ]
    assert all(report.is_finished(o) for o in runs[0].outcomes)
    assert summarise(runs[0]).num_finished == len(trace) > 50


def test_traces_survive_a_file(tmp_path: Path) -> None:
    trace = traces.overload(1, 2, 20, 1.5) + traces.conversations(1, 5, 4)
    trace.sort(key=lambda request: request.at_s)
    traces.write(tmp_path / "trace.jsonl", trace)
    assert traces.read(tmp_path / "trace.jsonl") == trace


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "line 2"),
        ('{"at_s": 1}', "line 2: KeyError"),
        ('{"at_s": 1, "prompt": [], "output_tokens": 1}', "prompt is not a list"),
        ('{"at_s": 1, "prompt": [["a", 0]], "output_tokens": 1}', "must be positive"),
        ('{"at_s": 1, "prompt": [["a", 1]], "output_tokens": 1, "tennant": ""}', "tennant"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n" + line)
    with pytest.raises(ValueError, match=words):
        traces.read(path)


def test_numbers_are_what_they_are_called() -> None:
    assert (
        percentile([3, 1, 2], 0.5) == 2 and report.jain([1, 1]) == 1 and report.jain([1, 0]) == 0.5
    )
    assert report.weighted_percentile({1.0: 90, 5.0: 10}, 0.95) == 5.0
    late = Outcome(TraceRequest(0.0, (("a", 1),), 2, ttft_budget_s=1.0), num_tokens=2)
    late.first_token_at, late.ended_at = 1.5, 1.6
    assert not report.is_good(late)
    late.first_token_at = 0.9
    assert not report.is_good(late)  # 700 ms for the second token
    late.ended_at = 0.95
    assert report.is_good(late)
    assert report.histogram([0.5, 3.0, 3.5])[-1].endswith("2")


# --- the aims ---


@pytest.mark.parametrize("order", ["vtc", "deficit_prefix"])
@pytest.mark.parametrize("times", [10, 50])
def test_a_flooded_tenant_waits_a_quarter_of_first_come_first_served(
    order: str, times: int
) -> None:
    trace = traces.flood(1, 20, 14, times)
    plain, fair = (Twin([SMALL], order=o).run(trace) for o in ("fcfs", order))
    assert ttft(fair, 0.5, "polite") <= 0.25 * ttft(plain, 0.5, "polite")
    assert fair.duration_s == pytest.approx(plain.duration_s, rel=0.01)  # the same tokens


def test_with_a_tight_window_a_flood_costs_a_polite_tenant_at_most_twice_its_wait() -> None:
    trace = traces.flood(1, 15, 90, 50)
    alone = [request for request in trace if request.tenant == "polite"]
    tight = replace(EVERYTHING_WAITS, window_slack=0)
    flooded = ttft(Twin([CardModel()] * 4, limits=tight).run(trace), 0.95, "polite")
    assert flooded <= 2 * ttft(Twin([CardModel()] * 4).run(alone), 0.95)


def test_estimates_of_the_wait_are_right_within_a_quarter() -> None:
    for order in ("fcfs", "vtc", "deficit_prefix"):
        result = Twin([SMALL] * 2, order=order).run(traces.flood(4, 20, 28, 10))
        errors = report.eta_errors(result.outcomes)
        assert len(errors) > 100 and percentile(errors, 0.5) <= 0.25


def test_refusing_and_shedding_serve_more_in_time_than_letting_all_wait() -> None:
    trace = traces.overload(1, 30, 32, 2.0)
    plain = Twin([SMALL] * 2, order="fcfs").run(trace)
    shed = Twin([SMALL] * 2, tells_budgets=True).run(trace)
    good = [sum(map(report.is_good, r.outcomes)) / r.duration_s for r in (plain, shed)]
    assert good[1] >= 1.5 * good[0]
    refused = [o for o in shed.outcomes if o.refused]
    assert {o.refused for o in refused} <= {"DEADLINE_INFEASIBLE", "TTFT_BUDGET"}
    # From when the drain rate has been measured: before that, all are let in.
    known = [o for o in shed.outcomes if o.request.at_s > 5]
    admitted = [o for o in known if not o.refused or o.ended_at != o.request.at_s]
    in_time = sum(not o.refused and o.ttft_s is not None and o.ttft_s <= 2.0 for o in admitted)
    assert in_time >= 0.93 * len(admitted)
    # Hardly anything is computed for nothing.
    assert sum(o.placed_at is not None for o in known if o.refused) <= 0.02 * len(admitted)


def test_shared_prefixes_let_deficit_serve_more_than_counting_tokens() -> None:
    trace = traces.shared_prefix_tenants(1, 600, num_prefixes=12)
    finished, jain = {}, {}
    for order in ("vtc", "deficit_prefix"):
        card = CardModel(slots=16, kv_tokens=32_768)
        result = Twin([card], order=order, limits=EVERYTHING_WAITS, stop_at_s=25).run(trace)
        s = summarise(result)
        finished[order], jain[order] = s.num_finished, s.jain
    assert finished["deficit_prefix"] >= 1.5 * finished["vtc"] > 0
    assert jain["deficit_prefix"] >= 0.98


def test_placement_by_expected_wait_reuses_prefixes_and_halves_the_wait() -> None:
    trace = traces.zipf_prefixes(1, 15, 24)
    best, plain = (
        Twin([CardModel()] * 4, policy=p).run(trace) for p in ("expected_wait", "round_robin")
    )
    assert ttft(best, 0.5) <= 0.5 * ttft(plain, 0.5)
    assert summarise(best).imbalance <= 1.25
    ideal = Twin([CardModel(slots=128, kv_tokens=4 * 65_536)]).run(trace)
    assert summarise(best).hit >= 0.9 * summarise(ideal).hit


def test_without_sharing_it_is_as_good_as_least_load() -> None:
    trace = traces.long_prompts(1, 30, 15)
    best, plain = (
        Twin([CardModel()] * 4, policy=p).run(trace) for p in ("expected_wait", "least_requests")
    )
    assert ttft(best, 0.5) <= 1.05 * ttft(plain, 0.5)
    assert ttft(best, 0.99) <= 1.05 * ttft(plain, 0.99)


def test_a_slow_card_costs_a_fifth_at_most() -> None:
    trace = traces.long_prompts(1, 40, 24)
    cards = [CardModel()] * 7
    equal = Twin([*cards, CardModel()]).run(trace)
    uneven = Twin([*cards, CardModel(slowness=2.0)]).run(trace)
    assert ttft(uneven, 0.99) <= 1.2 * ttft(equal, 0.99)


def test_a_thousand_cards_are_simulated() -> None:
    result = Twin([CardModel()] * 1000).run(traces.zipf_prefixes(1, 0.2, 2000, output_tokens=4))
    assert all(report.is_finished(o) for o in result.outcomes) and len(result.outcomes) > 300


# --- the command ---


def simulate(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "candor.cli", "simulate", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_runs_a_trace_saves_it_and_replays_it(tmp_path: Path) -> None:
    file = str(tmp_path / "t.jsonl")
    made = simulate("--trace", "zipf-slack", "--seconds", "2", "--save", file)
    assert made.returncode == 0 and "TTFT ms" in made.stdout, made.stderr
    again = simulate("--trace", file, "--cards", "8")
    assert made.stdout.splitlines()[1:] == again.stdout.splitlines()[1:]
    assert len(Path(file).read_text().splitlines()) == json.loads(
        made.stdout.split("requests   ")[1].split(",")[0]
    )
    wrong = simulate("--trace", "nowhere.jsonl")
    assert wrong.returncode == 2 and "nowhere.jsonl" in wrong.stderr


def test_the_command_prints_the_table_of_policies() -> None:
    done = simulate("--policies", "--trace", "hot", "--seconds", "1")
    assert done.returncode == 0, done.stderr
    header, _, row = done.stdout.splitlines()
    assert header.count("|") == row.count("|") == 7 and "expected_wait" in header


def test_the_table_goes_between_the_marks_of_a_file(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- policy table: begin -->\nold\n<!-- policy table: end -->\nb\n")
    flags = ("--policies", "--trace", "hot", "--seconds", "1", "--into")
    done = simulate(*flags, str(page))
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("a", "b") and "old" not in lines
    assert [line for line in lines if line.startswith("|")] == done.stdout.splitlines()
    page.write_text("no marks")
    assert simulate(*flags, str(page)).returncode == 2 and page.read_text() == "no marks"


def test_the_page_has_a_row_for_every_trace_and_a_column_for_every_policy() -> None:
    page = Path("docs/scheduling.md").read_text()
    table = page.partition("policy table: begin -->")[2].partition("<!--")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line]
    headers = [row[1:] for row in rows if row[0] in ("TTFT p50 / p99 ms", "order")]
    assert headers == [list(POLICIES), list(ORDERS)]
    abouts = [s.about for s in SCENARIOS.values()]
    assert [row[0] for row in rows if row[0] in abouts] == abouts
