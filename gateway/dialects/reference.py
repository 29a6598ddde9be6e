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


def main(arguments: Sequence[str]) -> int:
    """Write every page."""
    folder = Path(arguments[0]) if arguments else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, text in pages().items():
        (folder / file_name).write_text(text, encoding="utf-8")
        print(folder / file_name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
