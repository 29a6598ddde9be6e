"""`python -m scheduler.simulate`: runs a trace, or the table of all policies, and prints what came out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from scheduler.core import ORDERS, POLICIES
from scheduler.core.types import Limits
from scheduler.simulate import report, traces
from scheduler.simulate.cards import CardModel
from scheduler.simulate.scenarios import SCENARIOS, policy_table
from scheduler.simulate.twin import Twin

MAX_CARDS = 1000
BEGIN = "<!-- policy table: begin -->"
END = "<!-- policy table: end -->"


def main() -> None:
    """The command."""
    parser = _parser()
    arguments = parser.parse_args()
    names = list(SCENARIOS) if arguments.trace == "all" else [arguments.trace]
    if arguments.policies:
        if unknown := [name for name in names if name not in SCENARIOS]:
            parser.error(f"--policies takes a standard trace, not {unknown[0]}")
        lines = []
        for line in policy_table(arguments.seed, arguments.seconds, names):
            print(line, flush=True)
            lines.append(line)
        if arguments.into:
            _put_into(parser, arguments.into, lines)
        return
    for name in names:
        _one(parser, arguments, name)


def _put_into(parser: argparse.ArgumentParser, path: Path, lines: Sequence[str]) -> None:
    """Replace what stands between the two marks of a Markdown file."""
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        parser.error(f"{path} has no part between `{BEGIN}` and `{END}`")
    path.write_text("\n".join([before + begin, "", *lines, "", end + after]))


def _one(parser: argparse.ArgumentParser, arguments: argparse.Namespace, name: str) -> None:
    scenario = SCENARIOS.get(name)
    cards = list(scenario.cards) if scenario else [CardModel()] * 4
    tells_budgets = arguments.shed or (scenario is not None and scenario.tells_budgets)
    if scenario is not None:
        trace = scenario.make(arguments.seed, arguments.seconds)
    else:
        try:
            trace = traces.read(Path(name))
        except (OSError, ValueError) as error:
            parser.error(f"--trace {name}: {error}")
    if arguments.cards:
        cards = [cards[n % len(cards)] for n in range(arguments.cards)]
    if arguments.save:
        traces.write(arguments.save, trace)
    twin = Twin(
        cards,
        policy=arguments.placement,
        order=arguments.order,
        limits=Limits(max_queued_requests=arguments.max_queued_requests, max_queued_tokens=10**12),
        tells_budgets=tells_budgets,
        seed=arguments.seed,
    )
    result = twin.run(trace)
    about = scenario.about if scenario else name
    print(f"{about}; {len(cards)} cards, {arguments.order}, {arguments.placement}")
    for line in report.summarise(result).lines():
        print(line)
    print("TTFT")
    times = [1000 * o.ttft_s for o in result.outcomes if o.ttft_s is not None]
    for line in report.histogram(times):
        print(line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="candor simulate",
        description="Run the scheduler's core over modelled cards and a trace, under a virtual clock.",
        epilog="Traces: "
        + "; ".join(f"{name}: {s.about}" for name, s in SCENARIOS.items()).replace("%", "%%")
        + ". A file has one JSON object a line: at_s, prompt ([[name, tokens], ...]; equal names are equal "
        "text), output_tokens, and optionally tenant, priority, session, ttft_budget_ms.",
    )
    parser.add_argument(
        "--trace",
        default="zipf",
        help="a standard trace, `all` of them, or a JSONL file (default zipf)",
    )
    parser.add_argument(
        "--policies", action="store_true", help="print the table of all policies instead"
    )
    parser.add_argument(
        "--into", type=Path, help="put the table into this Markdown file, between its two marks"
    )
    parser.add_argument("--placement", default=next(iter(POLICIES)), choices=list(POLICIES))
    parser.add_argument("--order", default=next(iter(ORDERS)), choices=list(ORDERS))
    parser.add_argument(
        "--seconds", type=_positive, default=60.0, help="of generated traffic (default 60)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of traffic and ties (default 1)")
    parser.add_argument(
        "--cards", type=_num_cards, default=0, help=f"instead of the trace's own, up to {MAX_CARDS}"
    )
    parser.add_argument(
        "--max-queued-requests",
        type=int,
        default=10**6,
        help="more are refused (default: all wait)",
    )
    parser.add_argument(
        "--shed", action="store_true", help="tell the scheduler the budgets: it may refuse and shed"
    )
    parser.add_argument("--save", type=Path, help="write the trace to this JSONL file")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 86400")
    return value


def _num_cards(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_CARDS:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {MAX_CARDS}")
    return value


if __name__ == "__main__":
    main()
