"""Log probabilities in the two shapes of this dialect: the completion's lists and the chat's objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.events import TokenLogprobs

FLOOR = -9999.0
"""What JSON shows for -inf and anything below."""


def finite(value: float) -> float:
    """A logprob that JSON can carry."""
    return value if value > FLOOR else FLOOR


def _name(token_id: int, text: str, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else text


def chat_entry(entry: TokenLogprobs, k: int, *, as_ids: bool) -> dict[str, Any]:
    """One element of `logprobs.content`: the sampled token, then the first k of the position's list."""
    names = [_name(t, x, as_ids) for t, x in zip(entry.token_ids, entry.texts, strict=True)]
    values = [finite(v) for v in entry.logprobs]
    return {
        "token": names[0],
        "logprob": values[0],
        "bytes": list(entry.texts[0].encode()),
        "top_logprobs": [
            {"token": name, "logprob": value, "bytes": list(name.encode())}
            for name, value in zip(names[:k], values[:k], strict=True)
        ],
    }


def prompt_maps(
    positions: Sequence[TokenLogprobs | None] | None,
) -> list[dict[str, Any] | None] | None:
    """The `prompt_logprobs` field: a map per prompt token from id to logprob, rank and text."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {"logprob": finite(value), "rank": rank, "decoded_token": text}
            for token_id, value, rank, text in zip(*position, strict=True)
        }
        for position in positions
    ]


class CompletionLogprobs:
    """The four parallel lists of a completion, from some character on.

    `text_offset` sums the lengths of the token strings, also where these are not literally in the text.
    """

    def __init__(self, offset: int, k: int, *, as_ids: bool) -> None:
        self._offset, self._k, self._as_ids = offset, k, as_ids
        self._lists: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }

    def add(self, entry: TokenLogprobs) -> None:
        """One generated token, or one prompt token behind the first."""
        shown = min(self._k + 1, len(entry.token_ids))
        # Alternatives of the same text share a key; the last value stays.
        top = {
            _name(entry.token_ids[i], entry.texts[i], self._as_ids): finite(entry.logprobs[i])
            for i in range(shown)
        }
        name = _name(entry.token_ids[0], entry.texts[0], self._as_ids)
        self._append(name, finite(entry.logprobs[0]), top)

    def add_first(self, token_id: int, text: str) -> None:
        """The first prompt token, which nothing predicted."""
        self._append(_name(token_id, text, self._as_ids), None, None)

    def as_json(self) -> dict[str, list[Any]]:
        """The `logprobs` object."""
        return self._lists

    def _append(self, name: str, value: float | None, top: dict[str, float] | None) -> None:
        lists = self._lists
        lists["text_offset"].append(self._offset)
        lists["token_logprobs"].append(value)
        lists["tokens"].append(name)
        lists["top_logprobs"].append(top)
        self._offset += len(name)
