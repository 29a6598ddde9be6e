"""What a run's numbers say: percentiles, goodput, hit share, balance, fairness. Arithmetic and text only."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scheduler.simulate.twin import Outcome, Result

DEFAULT_BUDGET_S = 2.0
"""For the first token, of requests that bring none of their own: what goodput is counted by."""
TPOT_S = 0.1
"""Mean time per further token that still counts as good."""
_BAR = 40


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which that share lies; NaN of nothing."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def weighted_percentile(counts: Mapping[float, int], share: float) -> float:
    """The same of a histogram."""
    total, seen = sum(counts.values()), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen > share * total:
            return value
    return float("nan")


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 is equal shares, 1/n is one that has it all."""
    squares = sum(v * v for v in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers. Times in milliseconds."""

    num_requests: int
    num_finished: int
    refused: Counter[str]
    tokens_per_s: float
    """Generated, over the time the run took."""
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    goodput: float
    """Requests a second whose first token and pace were in time."""
    hit: float
    """Share of the prompt tokens of started requests that were cached."""
    imbalance: float
    """Busiest card over the mean."""
    eta_error_p50: float
    """Median of |promised wait − wait| / wait, over those that were told."""
    jain: float
    """Of the tenants' served work."""

    def lines(self) -> list[str]:
        """For people."""
        refused = ", ".join(f"{n} {reason}" for reason, n in self.refused.most_common()) or "none"
        return [
            f"requests   {self.num_requests}, finished {self.num_finished}, refused or shed: {refused}",
            f"TTFT ms    p50 {self.ttft_p50:.0f}  p90 {self.ttft_p90:.0f}  p99 {self.ttft_p99:.0f}",
            f"ITL ms     p50 {self.itl_p50:.1f}  p99 {self.itl_p99:.1f}",
            f"tokens/s   {self.tokens_per_s:.0f}   goodput {self.goodput:.2f} requests/s",
            f"cache hits {self.hit:.2f}   busiest/mean card {self.imbalance:.2f}   "
            f"Jain {self.jain:.3f}   ETA error p50 {self.eta_error_p50:.2f}",
        ]


def summarise(result: Result) -> Summary:
    """All of a run."""
    started = [o for o in result.outcomes if o.first_token_at is not None]
    ttft = [1000 * o.ttft_s for o in started if o.ttft_s is not None]
    duration = max(result.duration_s, 1e-9)
    busy = [card.busy_s for card in result.cards]
    prompts = sum(o.request.prompt_tokens for o in started)
    return Summary(
        num_requests=len(result.outcomes),
        num_finished=sum(is_finished(o) for o in started),
        refused=Counter(o.refused for o in result.outcomes if o.refused),
        tokens_per_s=sum(o.num_tokens for o in started) / duration,
        ttft_p50=percentile(ttft, 0.5),
        ttft_p90=percentile(ttft, 0.9),
        ttft_p99=percentile(ttft, 0.99),
        itl_p50=1000 * weighted_percentile(result.gaps, 0.5),
        itl_p99=1000 * weighted_percentile(result.gaps, 0.99),
        goodput=sum(map(is_good, started)) / duration,
        hit=sum(o.cached_tokens for o in started) / prompts if prompts else 0.0,
        imbalance=max(busy) / statistics.mean(busy) if any(busy) else 1.0,
        eta_error_p50=percentile(eta_errors(result.outcomes), 0.5),
        jain=jain(list(work_by_tenant(result.outcomes).values())),
    )


def is_finished(outcome: Outcome) -> bool:
    """Whether its client got all of it."""
    return outcome.num_tokens == outcome.request.output_tokens and not outcome.refused


def is_good(outcome: Outcome) -> bool:
    """Whether it was finished in time: its first token, and the pace of the others."""
    if not is_finished(outcome) or outcome.ttft_s is None:
        return False
    budget = outcome.request.ttft_budget_s or DEFAULT_BUDGET_S
    assert outcome.ended_at is not None and outcome.first_token_at is not None
    pace = (outcome.ended_at - outcome.first_token_at) / max(1, outcome.num_tokens - 1)
    return outcome.ttft_s <= budget and pace <= TPOT_S


def eta_errors(outcomes: Iterable[Outcome]) -> list[float]:
    """Relative errors of the first estimate that each waiting request was told."""
    errors = []
    for outcome in outcomes:
        if outcome.promised_at is not None and outcome.placed_at is not None:
            waited = outcome.placed_at - outcome.promised_at
            if waited > 0:
                errors.append(abs(outcome.promised_s - waited) / waited)
    return errors


def work_by_tenant(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Computed tokens in the ledger's currency."""
    work: defaultdict[str, float] = defaultdict(float)
    for outcome in outcomes:
        work[outcome.request.tenant] += outcome.work
    return dict(work)


def histogram(values: Sequence[float], unit: str = "ms") -> list[str]:
    """Bars over doubling ranges, for a terminal."""
    if not values:
        return []
    edges = [1.0]
    while edges[-1] < max(values):
        edges.append(edges[-1] * 2)
    counts = [0] * len(edges)
    for value in values:
        counts[next(n for n, edge in enumerate(edges) if value <= edge)] += 1
    most = max(counts)
    first = next(n for n, number in enumerate(counts) if number)
    return [
        f"≤ {edge:>7.0f} {unit} {'█' * round(_BAR * number / most):<{_BAR}} {number}"
        for edge, number in list(zip(edges, counts, strict=True))[first:]
    ]
