"""A message that spells a control token writes letters, not the token.

Otherwise a user could close the own turn and open a system turn. The markers that the texts of a conversation
spell are replaced by stand-ins before the template sees them, and restored behind it, where the text between
the template's own markers is encoded as plain text. A conversation that spells no marker (nearly all) takes
the direct way. Knows no templates and no protobuf.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from candor.errors import InvalidArgument
from tokenizer_svc.chat_template import Conversation
from tokenizer_svc.codec import Codec

_STAND_INS = range(0xF0000, 0x10FFFE)
"""Characters for private use, of which a text that has any is a rarity; those that it has are left alone."""


@dataclass(frozen=True)
class Rendered:
    """A prompt text, and what its stand-ins stand for."""

    text: str
    spelled: Mapping[int, str] = field(default_factory=dict)
    """Character → marker, as `str.translate` takes it."""

    @property
    def shown(self) -> str:
        """The text as a person would read it."""
        return self.text.translate(self.spelled)


class Markers:
    """The control tokens of one tokenizer."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        texts = {codec.piece(i).decode("utf-8", "replace") for i in codec.special_ids} - {""}
        words = "|".join(map(re.escape, sorted(texts, key=lambda t: (-len(t), t))))
        self._pattern = re.compile(f"({words})" if words else r"([^\s\S])")

    def hide(self, conversation: Conversation) -> tuple[Conversation, dict[int, str]]:
        """The conversation with stand-ins for the markers it spells, and what each stands for.

        Raises InvalidArgument when there is no character left to stand in.
        """
        parts = (conversation.messages, conversation.tools, conversation.documents)
        texts = [text for part in parts for text in _texts(part)]
        found = {marker for text in texts for marker in self._pattern.findall(text)}
        if not found:
            return conversation, {}
        taken = set().union(*texts)
        free = (chr(code) for code in _STAND_INS if chr(code) not in taken)
        stand_ins = dict(zip(sorted(found), free, strict=False))
        if len(stand_ins) < len(found):
            raise InvalidArgument(
                "the messages spell control tokens and leave no character for private use unused",
                field="messages",
            )

        def hidden(value: Any) -> Any:
            if isinstance(value, str):
                return self._pattern.sub(lambda match: stand_ins[match[0]], value)
            if isinstance(value, Mapping):
                return {hidden(key): hidden(item) for key, item in value.items()}
            return [hidden(item) for item in value] if isinstance(value, list) else value

        messages, tools, documents = (
            None if part is None else hidden(list(part)) for part in parts
        )
        changed = replace(conversation, messages=messages or [], tools=tools, documents=documents)
        return changed, {ord(char): marker for marker, char in stand_ins.items()}

    def encode(self, prompt: Rendered, add_special_tokens: bool) -> list[int]:
        """The token ids: control tokens where the template wrote them, and nowhere else."""
        codec = self._codec
        if not prompt.spelled:
            return codec.encode(prompt.text, add_special_tokens)
        ids: list[int] = list(codec.prefix_ids) if add_special_tokens else []
        # A pattern with one group splits into text, marker, text, marker ... text.
        for number, part in enumerate(self._pattern.split(prompt.text)):
            if part:
                text = part.translate(prompt.spelled)
                ids += codec.encode(text, add_special_tokens=False, parse_special=bool(number % 2))
        if add_special_tokens:
            ids += codec.suffix_ids
        return ids


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
