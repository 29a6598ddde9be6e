"""Writes the reference pages: `python -m gateway.dialects.reference [folder]`.

A page is made from what a dialect declares and from nothing else; a test holds the committed pages against
this module's output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from gateway.dialects import fields
from gateway.dialects.vllm05 import reference as vllm05

FOLDER = Path("docs/dialects")
README = Path("README.md")
TABLE_BEGIN, TABLE_END = "<!-- made by python -m gateway.dialects.reference -->", "<!-- end -->"


def pages() -> dict[str, str]:
    """File name → text of every page."""
    text = page(vllm05.NAME, vllm05.ABOUT, vllm05.ENDPOINTS, vllm05.DECISIONS)
    return {f"{vllm05.NAME}.md": text}


def page(
    name: str, about: str, endpoints: Sequence[fields.Endpoint], decisions: Sequence[str]
) -> str:
    """One dialect's page."""
    return "\n".join(_lines(name, about, endpoints, decisions)) + "\n"


def _lines(
    name: str, about: str, endpoints: Sequence[fields.Endpoint], decisions: Sequence[str]
) -> Iterator[str]:
    yield f"# Dialect {name}"
    yield ""
    yield "<!-- Made by `python -m gateway.dialects.reference` from the request models; do not edit. -->"
    yield ""
    yield about
    yield ""
    yield "| status | means |"
    yield "|---|---|"
    yield "| honoured | changes the outcome |"
    yield "| accepted | legal and checked; without effect by the dialect's own rule |"
    yield "| refused | a 400 that names it |"
    yield ""
    yield (
        "Proofs are ids of vectors in `tests/vectors`, or names of tests. `GET /v1/compat` has the same"
        " content as JSON."
    )
    yield ""
    yield "## Where it differs from the original on purpose"
    yield ""
    yield from (f"{number}. {text}" for number, text in enumerate(decisions, 1))
    for endpoint in endpoints:
        yield ""
        yield f"## {endpoint.path}"
        yield ""
        yield "| field | type | default | range | status | rule | proof |"
        yield "|---|---|---|---|---|---|---|"
        for field in endpoint.declarations():
            rule = field.rule
            default = (
                "required" if field.default is fields.REQUIRED else f"`{json.dumps(field.default)}`"
            )
            cells = (
                f"`{field.name}`",
                field.type,
                default,
                rule.range,
                rule.status,
                rule.says,
                _proofs(rule.proof),
            )
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""
        yield f"{endpoint.unknown.says} Proof: {_proofs(endpoint.unknown.proof)}"
        if endpoint.known_unknowns:
            names = ", ".join(f"`{name}`" for name in endpoint.known_unknowns)
            yield f"Among them: {names}."


def _proofs(proofs: Sequence[str]) -> str:
    return ", ".join(f"`{proof}`" for proof in proofs)


def support_table() -> str:
    """The README's table: what each endpoint honours and refuses, with the names of the few."""
    lines = [
        "| endpoint | fields honoured | without effect by rule | refused by name |",
        "|---|---|---|---|",
    ]
    for endpoint in vllm05.ENDPOINTS:
        by_status: dict[str, list[str]] = {"honoured": [], "accepted": [], "refused": []}
        for field in endpoint.declarations():
            by_status[field.rule.status].append(f"`{field.name}`")
        known = [f"`{name}`" for name in endpoint.known_unknowns]
        refused = [*by_status["refused"], "every unknown field"]
        if known:
            refused[-1] += f" ({', '.join(known[:4])} …)"
        cells = (
            f"`{endpoint.path}`",
            str(len(by_status["honoured"])),
            ", ".join(by_status["accepted"]) or "–",
            ", ".join(refused),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_support_table(readme: str) -> str:
    """The README with its table made anew between the two marks."""
    head, _, rest = readme.partition(TABLE_BEGIN)
    _, _, tail = rest.partition(TABLE_END)
    return f"{head}{TABLE_BEGIN}\n\n{support_table()}\n\n{TABLE_END}{tail}"


def main(arguments: Sequence[str]) -> int:
    """Write every page."""
    folder = Path(arguments[0]) if arguments else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, text in pages().items():
        (folder / file_name).write_text(text, encoding="utf-8")
        print(folder / file_name)
    if README.exists():
        README.write_text(with_support_table(README.read_text("utf-8")), "utf-8")
        print(README)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
