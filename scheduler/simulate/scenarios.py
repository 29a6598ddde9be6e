"""The standard traces with the cards they run on, one row each in `SCENARIOS`, and the table of policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from scheduler.core import ORDERS, POLICIES
from scheduler.simulate import traces
from scheduler.simulate.cards import CardModel
from scheduler.simulate.report import Summary, percentile, summarise
from scheduler.simulate.traces import TraceRequest
from scheduler.simulate.twin import Result, Twin

CARD = CardModel()
EIGHT = (CARD,) * 8
FOUR = (CARD,) * 4
ONE_SLOW = (*EIGHT[:-1], CardModel(slowness=2.0))


@dataclass(frozen=True, slots=True)
class Scenario:
    """A trace and its cards. `make` takes the seed and the seconds of traffic."""

    about: str
    make: Callable[[int, float], list[TraceRequest]]
    cards: Sequence[CardModel]
    compares: str = "placement"
    """What its rows in the table vary: placement or order."""
    tells_budgets: bool = False

    def run(self, seed: int, duration_s: float, policy: str = "", order: str = "") -> Result:
        """One run; unnamed policies are the defaults."""
        twin = Twin(
            self.cards,
            policy=policy or next(iter(POLICIES)),
            order=order or next(iter(ORDERS)),
            # First come first served is the yardstick: nobody is refused, whoever is late is late.
            tells_budgets=self.tells_budgets and order != "fcfs",
            seed=seed,
        )
        return twin.run(self.make(seed, duration_s))


SCENARIOS: dict[str, Scenario] = {
    "zipf": Scenario(
        "64 Zipf prefixes of 2,000 tokens, 45 requests/s on 8 cards",
        lambda seed, s: traces.zipf_prefixes(seed, s, 45),
        EIGHT,
    ),
    "zipf-slack": Scenario(
        "the same, 16 requests/s",
        lambda seed, s: traces.zipf_prefixes(seed, s, 16),
        EIGHT,
    ),
    "hot": Scenario(
        "60 % share one prefix, 45 requests/s on 8 cards",
        lambda seed, s: traces.hot_prefix(seed, s, 45),
        EIGHT,
    ),
    "long": Scenario(
        "15 % of 6,000-token prompts, no sharing, 30 requests/s on 8 cards",
        lambda seed, s: traces.long_prompts(seed, s, 30),
        EIGHT,
    ),
    "slow-card": Scenario(
        "the same, one card half as fast",
        lambda seed, s: traces.long_prompts(seed, s, 30),
        ONE_SLOW,
    ),
    "chat": Scenario(
        "conversations of 6 turns, 12 requests/s on 4 cards",
        lambda seed, s: traces.conversations(seed, s, 12),
        FOUR,
    ),
    "flood-10": Scenario(
        "two tenants 10 : 1, 90 requests/s on 4 cards (overload)",
        lambda seed, s: traces.flood(seed, s, 90, 10),
        FOUR,
        compares="order",
    ),
    "flood-50": Scenario(
        "two tenants 50 : 1, 90 requests/s on 4 cards (overload)",
        lambda seed, s: traces.flood(seed, s, 90, 50),
        FOUR,
        compares="order",
    ),
    "shared": Scenario(
        "4 backlogged tenants with 30 prefixes of 3,000 tokens each on 1 card",
        lambda seed, s: traces.shared_prefix_tenants(seed, round(40 * s)),
        (CARD,),
        compares="order",
    ),
    "overload": Scenario(
        "1.5 times what 4 cards can do, first token wanted within 2 s",
        lambda seed, s: traces.overload(seed, s, 100, 2.0),
        FOUR,
        compares="order",
        tells_budgets=True,
    ),
}


def policy_table(seed: int, duration_s: float, names: Sequence[str]) -> Iterator[str]:
    """Markdown, line by line as the runs are done: placement policies, then order policies."""
    placement = [name for name in names if SCENARIOS[name].compares == "placement"]
    if placement:
        yield "| TTFT p50 / p99 ms | " + " | ".join(POLICIES) + " |"
        yield "|--|" + "--|" * len(POLICIES)
        for name in placement:
            scenario = SCENARIOS[name]
            cells = [
                _cell(summarise(scenario.run(seed, duration_s, policy=policy)))
                for policy in POLICIES
            ]
            yield _row(scenario, cells)
    order = [name for name in names if SCENARIOS[name].compares == "order"]
    if order:
        yield ""
        yield "| order | " + " | ".join(ORDERS) + " |"
        yield "|--|" + "--|" * len(ORDERS)
        for name in order:
            scenario = SCENARIOS[name]
            yield _row(
                scenario,
                [
                    _order_cell(name, scenario.run(seed, duration_s, order=order))
                    for order in ORDERS
                ],
            )


def _row(scenario: Scenario, cells: Sequence[str]) -> str:
    return f"| {scenario.about} | " + " | ".join(cells) + " |"


def _cell(s: Summary) -> str:
    return f"{s.ttft_p50:,.0f} / {s.ttft_p99:,.0f}, hit {s.hit:.2f}, imb {s.imbalance:.2f}"


def _order_cell(name: str, result: Result) -> str:
    s = summarise(result)
    if name.startswith("flood"):
        polite, flooding = (
            percentile(
                (
                    1000 * o.ttft_s
                    for o in result.outcomes
                    if o.ttft_s is not None and o.request.tenant == tenant
                ),
                0.5,
            )
            for tenant in ("polite", "flood")
        )
        return f"polite {polite:,.0f}, flood {flooding:,.0f}; {s.tokens_per_s:,.0f} tokens/s"
    if name == "shared":
        rate = s.num_finished / result.duration_s
        return f"{rate:.1f} requests/s, hit {s.hit:.2f}"
    return f"{s.goodput:.1f} good requests/s of {s.num_requests / result.duration_s:.0f}"
