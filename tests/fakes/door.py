"""A client of a whole stack: sends one request at a time and gives back what it came to.

Knows the paths and the two forms of an answer; knows no rules of the dialect.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

from bench.stack import Running
from tests.fakes.agreement import Answer, Body, Told, of_body, of_stream
from tests.fakes.fuzz import CHAT, COMPLETION, DETOKENIZE, TOKENIZE

MODEL = "smollm2-135m"
TIMEOUT_S = 60.0


class Door:
    """Requests to one stack, for one model."""

    def __init__(self, stack: Running, model: str = MODEL) -> None:
        self.stack, self.model = stack, model
        self._client = httpx.Client(
            base_url=stack.url, timeout=TIMEOUT_S, trust_env=False, verify=False
        )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def send(self, path: str, body: Body | bytes, **headers: str) -> httpx.Response:
        """Any request; the model's name is added where the body has none."""
        if isinstance(body, bytes):
            kind = {"content-type": "application/json", **headers}
            return self._client.post(path, content=body, headers=kind)
        return self._client.post(path, json={"model": self.model, **body}, headers=headers)

    def body(self, path: str, **fields: Any) -> Any:
        """The JSON of an answer that must be a 200, parsed strictly."""
        reply = self.send(path, fields)
        assert reply.status_code == 200, reply.text
        return json.loads(reply.text, parse_constant=_refuse)

    def chat(self, content: str, **fields: Any) -> Told:
        """What the only choice of a chat with one turn says."""
        return _only(of_body(self.body(CHAT, **_turn(content), **fields)))

    def complete(self, prompt: Any, **fields: Any) -> Told:
        """What the only choice of a completion says."""
        return _only(of_body(self.body(COMPLETION, prompt=prompt, **fields)))

    def stream_chat(self, content: str, **fields: Any) -> Told:
        """The same as `chat`, streamed."""
        return _only(of_stream(self.events(CHAT, **_turn(content), **fields)))

    def stream_completion(self, prompt: Any, **fields: Any) -> Told:
        """The same as `complete`, streamed."""
        return _only(of_stream(self.events(COMPLETION, prompt=prompt, **fields)))

    def events(self, path: str, **fields: Any) -> list[str]:
        """The data of every event of a stream that must be a 200."""
        reply = self.send(path, {**fields, "stream": True})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        return [event.removeprefix("data: ") for event in reply.text.split("\n\n") if event]

    def chunks(self, path: str, **fields: Any) -> list[Body]:
        """The JSON of every event but [DONE], which must be the last."""
        *events, done = self.events(path, **fields)
        assert done == "[DONE]"
        return [json.loads(event, parse_constant=_refuse) for event in events]

    def both(self, path: str, **fields: Any) -> Answer:
        """The answer, which must be the same streamed and whole."""
        whole = of_body(self.body(path, **fields))
        streamed = of_stream(self.events(path, **fields))
        assert streamed.choices == whole.choices
        return whole

    def refused(self, path: str, **fields: Any) -> str:
        """The message of a 400."""
        reply = self.send(path, fields)
        assert reply.status_code == 400, reply.text
        assert reply.headers["content-type"] == "application/json"
        return str(reply.json()["message"])

    def tokens(self, prompt: str | list[Body], **fields: Any) -> list[int]:
        """What /tokenize says."""
        form = "prompt" if isinstance(prompt, str) else "messages"
        return list(self.body(TOKENIZE, **{form: prompt}, **fields)["tokens"])

    def text(self, tokens: list[int]) -> str:
        """What /detokenize says."""
        return str(self.body(DETOKENIZE, tokens=tokens)["prompt"])


def _turn(content: str) -> Body:
    return {"messages": [{"role": "user", "content": content}]}


def _only(answer: Answer) -> Told:
    (told,) = answer.choices.values()
    return told


def _refuse(word: str) -> Any:
    raise AssertionError(f"{word} is no JSON")
