"""How completion answers look: one JSON body, or a stream of chunks, from the same pieces.

The legacy shape: text instead of messages, four parallel logprob lists, several prompts in one request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.dialects.vllm05.answer import Assembly, Choice, Piece
from gateway.dialects.vllm05.heading import Heading, UsageRule, usage
from gateway.dialects.vllm05.logprobs import CompletionLogprobs, prompt_maps
from gateway.events import Tagged
from gateway.sse import DONE, event


@dataclass(frozen=True, slots=True)
class CompletionStyle:
    """What the request and the settings say about the form of the answer."""

    echo: bool = False
    """Whether each choice begins with its prompt."""
    is_prompt_only: bool = False
    """Echo with max_tokens 0: the one token that was generated is counted but not shown."""
    logprobs: int | None = None
    """Alternatives per token; None: no logprobs."""
    as_token_ids: bool = False


class _Teller:
    """What a piece says, in text and logprobs; the same for body and stream."""

    def __init__(self, style: CompletionStyle) -> None:
        self._style = style

    def lists(self, offset: int) -> CompletionLogprobs | None:
        """Logprob lists that begin at this character, where they were asked for."""
        if self._style.logprobs is None:
            return None
        return CompletionLogprobs(offset, self._style.logprobs, as_ids=self._style.as_token_ids)

    def tell(self, piece: Piece, is_first: bool, lists: CompletionLogprobs | None) -> str:
        """The text that the piece adds; its tokens go to `lists`."""
        text = "" if self._style.is_prompt_only else piece.text
        if self._style.echo and is_first:
            text = piece.choice.prompt.text + text
            if lists is not None:
                _add_prompt(piece.choice, lists)
        if lists is not None and piece.logprobs is not None and not self._style.is_prompt_only:
            lists.add(piece.logprobs)
        return text


def _add_prompt(choice: Choice, lists: CompletionLogprobs) -> None:
    prompt = choice.prompt
    if prompt.token_ids:
        lists.add_first(prompt.token_ids[0], prompt.first_token)
    for position in prompt.logprobs or ():
        if position is not None:
            lists.add(position)


class CompletionBody:
    """The whole answer as one JSON body."""

    def __init__(self, heading: Heading, assembly: Assembly, style: CompletionStyle) -> None:
        self._heading, self._assembly = heading, assembly
        self._teller = _Teller(style)
        self._texts: list[list[str]] = [[] for _ in assembly.choices]
        self._lists = [self._teller.lists(0) for _ in assembly.choices]

    def feed(self, events: Iterable[Tagged]) -> bytes:
        """Take events; nothing is sent before the end."""
        for tagged in events:
            for piece in self._assembly.feed(tagged):
                texts, lists = self._texts[piece.choice.index], self._lists[piece.choice.index]
                texts.append(self._teller.tell(piece, not texts, lists))
        return b""

    def finish(self) -> bytes:
        """The body, when every choice has ended."""
        assembly = self._assembly
        body = {
            **self._heading.as_json("text_completion"),
            "choices": [self._choice(c) for c in assembly.choices],
            "usage": usage(assembly.num_prompt_tokens, assembly.num_completion_tokens),
        }
        return orjson.dumps(body)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        assert choice.end is not None
        lists = self._lists[choice.index]
        return {
            "index": choice.index,
            "text": "".join(self._texts[choice.index]),
            "logprobs": None if lists is None else lists.as_json(),
            "finish_reason": choice.end.finish_reason,
            "stop_reason": choice.end.stop_reason,
            "prompt_logprobs": prompt_maps(choice.prompt.logprobs),
        }


class CompletionEvent(CompletionBody):
    """The whole body as the only event of a stream: how this dialect streams ranked answers."""

    def finish(self) -> bytes:
        """The one event and the end of the stream."""
        return event(super().finish()) + DONE


class CompletionStream:
    """The answer as chunks, one per token and choice; no role chunk, every key always there."""

    def __init__(
        self, heading: Heading, assembly: Assembly, style: CompletionStyle, rule: UsageRule
    ) -> None:
        self._assembly, self._style, self._rule = assembly, style, rule
        self._teller = _Teller(style)
        self._has_told = [False] * len(assembly.choices)
        self._heading = heading.opened("text_completion")
        self._heads = [
            b"data: " + self._heading + b',"choices":[{"index":%d,"text":' % i
            for i in range(len(assembly.choices))
        ]
        self._plain_tail = (
            b',"logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}\n\n'
        )

    def feed(self, events: Iterable[Tagged]) -> bytes:
        """The chunks that these events make."""
        out: list[bytes] = []
        style = self._style
        is_plain = style.logprobs is None and not self._rule.is_running and not style.echo
        for tagged in events:
            for piece in self._assembly.feed(tagged):
                if is_plain and piece.end is None:
                    head = self._heads[piece.choice.index]
                    out.append(head + orjson.dumps(piece.text) + self._plain_tail)
                else:
                    out.append(self._chunk(piece))
        return b"".join(out)

    def finish(self) -> bytes:
        """The chunk with the sums, where it was asked for, and the end of the stream."""
        assembly = self._assembly
        total = usage(assembly.num_prompt_tokens, assembly.num_completion_tokens)
        return self._rule.closing(self._heading, total)

    def _chunk(self, piece: Piece) -> bytes:
        choice, end = piece.choice, piece.end
        lists = self._teller.lists(choice.num_chars)
        text = self._teller.tell(piece, not self._has_told[choice.index], lists)
        self._has_told[choice.index] = True
        choice.num_chars += len(text)
        numbers = None
        if self._rule.is_running:
            numbers = usage(choice.prompt.num_tokens, piece.num_tokens)
        tail = {
            "logprobs": None if lists is None else lists.as_json(),
            "finish_reason": None if end is None else end.finish_reason,
            "stop_reason": None if end is None else end.stop_reason,
        }
        return b"".join(
            (
                self._heads[choice.index],
                orjson.dumps(text),
                b"," + orjson.dumps(tail)[1:],
                b'],"usage":' + orjson.dumps(numbers) + b"}\n\n",
            )
        )
