"""How chat answers look: one JSON body, or a stream of chunks. Both are made from the same pieces.

A stream's chunks are joined from byte templates made once per request; only the text of each is encoded
anew. Knows no field rules (see `schema`, `sampling`) and sends nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.dialects.vllm05.answer import Assembly, Piece
from gateway.dialects.vllm05.heading import Heading, UsageRule, new_id, usage
from gateway.dialects.vllm05.logprobs import chat_entry, prompt_maps
from gateway.events import Delta, Tagged, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """What the request and the settings say about the form of the answer."""

    role: str
    echo: str = ""
    """Content of the last turn, where it is to be repeated in front of the answer."""
    tool_name: str | None = None
    """The named tool whose arguments the generated text is."""
    top_logprobs: int | None = None
    """Alternatives per token; None: no logprobs."""
    as_token_ids: bool = False

    def logprobs(self, entries: Iterable[TokenLogprobs]) -> dict[str, Any] | None:
        """The `logprobs` object of these tokens."""
        if self.top_logprobs is None:
            return None
        k, as_ids = self.top_logprobs, self.as_token_ids
        return {"content": [chat_entry(e, k, as_ids=as_ids) for e in entries]}


class ChatBody:
    """The whole answer as one JSON body."""

    def __init__(self, heading: Heading, assembly: Assembly, style: ChatStyle) -> None:
        self._heading, self._assembly, self._style = heading, assembly, style
        self._texts: list[list[str]] = [[] for _ in assembly.choices]
        self._entries: list[list[TokenLogprobs]] = [[] for _ in assembly.choices]

    def feed(self, events: Iterable[Tagged]) -> bytes:
        """Take events; nothing is sent before the end."""
        for tagged in events:
            for piece in self._assembly.feed(tagged):
                self._texts[piece.choice.index].append(piece.text)
                if piece.logprobs is not None:
                    self._entries[piece.choice.index].append(piece.logprobs)
        return b""

    def finish(self) -> bytes:
        """The body, when every choice has ended."""
        assembly = self._assembly
        body = {
            **self._heading.as_json("chat.completion"),
            "choices": [self._choice(i) for i in range(len(assembly.choices))],
            "usage": usage(assembly.num_prompt_tokens, assembly.num_completion_tokens),
            "prompt_logprobs": prompt_maps(assembly.prompts[0].logprobs),
        }
        return orjson.dumps(body)

    def _choice(self, index: int) -> dict[str, Any]:
        end = self._assembly.choices[index].end
        assert end is not None
        return {
            "index": index,
            "message": self._message("".join(self._texts[index])),
            "logprobs": self._style.logprobs(self._entries[index]),
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }

    def _message(self, text: str) -> dict[str, Any]:
        style = self._style
        calls = []
        if style.tool_name is not None:
            function = {"name": style.tool_name, "arguments": text}
            calls.append({"id": new_id("chatcmpl-tool-"), "type": "function", "function": function})
            text = ""
        return {"role": style.role, "content": style.echo + text, "tool_calls": calls}


class ChatStream:
    """The answer as chunks: a role chunk per choice, then one chunk per token and choice."""

    def __init__(
        self, heading: Heading, assembly: Assembly, style: ChatStyle, rule: UsageRule
    ) -> None:
        self._assembly, self._style, self._rule = assembly, style, rule
        self._has_begun = False
        self._heading = heading.opened("chat.completion.chunk")
        self._usage_end = b'}],"usage":null}\n\n' if rule.shows_null else b"}]}\n\n"
        self._heads = [
            b"data: " + self._heading + b',"choices":[{"index":%d,"delta":' % i
            for i in range(len(assembly.choices))
        ]
        self._delta_end = b"}"
        if style.tool_name is None:
            self._deltas = [head + b'{"content":' for head in self._heads]
        else:
            self._deltas = [
                head + b'{"tool_calls":[{"index":0,"function":{"arguments":' for head in self._heads
            ]
            self._delta_end = b"}}]}"
        self._plain_end = self._delta_end + b',"logprobs":null,"finish_reason":null'
        self._plain_tail = self._plain_end + self._usage_end

    def feed(self, events: Iterable[Tagged]) -> bytes:
        """The chunks that these events make."""
        out: list[bytes] = []
        is_plain = self._style.top_logprobs is None and not self._rule.is_running
        for tagged in events:
            if not self._has_begun and type(tagged.event) is Delta:
                out.append(self._begin())
            for piece in self._assembly.feed(tagged):
                if is_plain and piece.end is None:
                    head = self._deltas[piece.choice.index]
                    if piece.num_tokens > 1 or self._style.tool_name is None:
                        out.append(head + orjson.dumps(piece.text) + self._plain_tail)
                        continue
                out.append(self._chunk(piece))
        return b"".join(out)

    def finish(self) -> bytes:
        """The chunk with the sums, where it was asked for, and the end of the stream."""
        assembly = self._assembly
        total = usage(assembly.num_prompt_tokens, assembly.num_completion_tokens)
        return self._rule.closing(self._heading, total)

    def _begin(self) -> bytes:
        self._has_begun = True
        role = orjson.dumps({"role": self._style.role})
        nulls = b',"logprobs":null,"finish_reason":null'
        out = [head + role + nulls + self._usage_tail(i, 0) for i, head in enumerate(self._heads)]
        if self._style.echo:
            echo = orjson.dumps({"content": self._style.echo})
            out += [
                head + echo + nulls + self._usage_tail(i, 0) for i, head in enumerate(self._heads)
            ]
        return b"".join(out)

    def _chunk(self, piece: Piece) -> bytes:
        index = piece.choice.index
        parts = [self._delta(piece), self._delta_end, b',"logprobs":']
        entries = () if piece.logprobs is None else (piece.logprobs,)
        parts.append(orjson.dumps(self._style.logprobs(entries)))
        if piece.end is None:
            parts.append(b',"finish_reason":null')
        else:
            parts.append(b',"finish_reason":' + orjson.dumps(piece.end.finish_reason))
            parts.append(b',"stop_reason":' + orjson.dumps(piece.end.stop_reason))
        parts.append(self._usage_tail(index, piece.num_tokens))
        return b"".join(parts)

    def _delta(self, piece: Piece) -> bytes:
        text = orjson.dumps(piece.text)
        if self._style.tool_name is None or piece.num_tokens > 1:
            return self._deltas[piece.choice.index] + text
        # Clients join the strings of all deltas, so id and name are in the first one only.
        opening = b'{"tool_calls":[{"index":0,"id":%s,"type":"function","function":{"name":%s,"arguments":'
        names = orjson.dumps(new_id("chatcmpl-tool-")), orjson.dumps(self._style.tool_name)
        return self._heads[piece.choice.index] + opening % names + text

    def _usage_tail(self, index: int, num_tokens: int) -> bytes:
        if not self._rule.is_running:
            return self._usage_end
        numbers = usage(self._assembly.choices[index].prompt.num_tokens, num_tokens)
        return b'}],"usage":' + orjson.dumps(numbers) + b"}\n\n"
