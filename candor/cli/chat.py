"""`candor chat`: a conversation in the terminal over the gateway's HTTP door."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console


class ChatError(Exception):
    """The conversation cannot go on; the message says why."""


@dataclass(frozen=True)
class Options:
    """How to reach the gateway and how to generate."""

    url: str
    model: str
    system: str
    temperature: float
    max_tokens: int | None
    api_key: str


def run(options: Options, question: str, console: Console) -> int:
    """Ask one question, or hold a conversation when there is none. Returns the exit code."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    timeout = httpx.Timeout(10.0, read=300.0)
    with httpx.Client(
        base_url=options.url, headers=headers, timeout=timeout, trust_env=False
    ) as client:
        model = options.model or _first_model(client)
        history = [{"role": "system", "content": options.system}] if options.system else []
        if question:
            _turn(client, model, options, [*history, _user(question)])
            return 0
        console.print(f"{model} at {options.url}. /new starts over, Ctrl-D ends.", style="dim")
        while True:
            try:
                text = console.input("[bold]> [/]").strip()
            except EOFError:
                return 0
            if text == "/new":
                history = history[:1] if options.system else []
            elif text:
                history.append(_user(text))
                try:
                    answer = _turn(client, model, options, history)
                except ChatError as error:
                    history.pop()
                    console.print(str(error), style="red", markup=False)
                else:
                    history.append({"role": "assistant", "content": answer})


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _first_model(client: httpx.Client) -> str:
    try:
        reply = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ChatError(
            f"no gateway at {client.base_url} ({error}): start one with `candor serve`, or name"
            " another with --url"
        ) from None
    _check(reply.status_code, reply.text)
    served = reply.json()["data"]
    if not served:
        raise ChatError("the gateway serves no model yet")
    return str(served[0]["id"])


def _turn(
    client: httpx.Client, model: str, options: Options, messages: list[dict[str, str]]
) -> str:
    body: dict[str, object] = {"model": model, "messages": messages, "stream": True}
    body["temperature"] = options.temperature
    if options.max_tokens:
        body["max_tokens"] = options.max_tokens
    said, reason = [], None
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                _check(reply.status_code, reply.read().decode(errors="replace"))
            for event in _events(reply):
                if "error" in event:
                    raise ChatError(event["error"].get("message", "the stream failed"))
                for choice in event.get("choices", []):
                    piece = choice["delta"].get("content") or ""
                    said.append(piece)
                    sys.stdout.write(piece)
                    sys.stdout.flush()
                    reason = choice.get("finish_reason") or reason
    except httpx.HTTPError as error:
        raise ChatError(f"the connection failed: {error}") from None
    finally:
        sys.stdout.write("\n")
    if reason == "length":
        print("[cut: length]", file=sys.stderr)
    return "".join(said)


def _events(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in reply.iter_lines():
        if line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                return
            yield json.loads(data)


def _check(status: int, text: str) -> None:
    if status == 200:
        return
    try:
        body = json.loads(text)
        message = body.get("message") or body.get("error")
        message = message.get("message") if isinstance(message, dict) else message
    except ValueError:
        message = text
    raise ChatError(f"HTTP {status}: {message}")
