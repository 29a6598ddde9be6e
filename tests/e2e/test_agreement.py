"""One request, many ways to ask: streamed or whole, chat or completion, and /tokenize all tell the same.

AGREEMENT_EXAMPLES is how many random requests are compared (500 for a whole run, fewer in the suite),
AGREEMENT_REAL how many of them on the real model. The native runner gives the same bits whatever else
is in the batch, so nothing is forgiven there either.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from bench.stack import Running
from tests.fakes.agreement import PATHS, Answer, Body, of_body, of_stream, requests
from tests.fakes.fuzz import CHAT, COMPLETION, TOKENIZE

EXAMPLES = int(os.environ.get("AGREEMENT_EXAMPLES", "60"))
REAL_EXAMPLES = int(os.environ.get("AGREEMENT_REAL", "8"))
MODEL = "smollm2-135m"
TIMEOUT_S = 60.0


def run_of(examples: int) -> settings:
    """So many examples, without a memory of earlier runs."""
    return settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


async def both_ways(stack: Running, path: str, body: Body) -> tuple[httpx.Response, httpx.Response]:
    """The whole answer and the streamed one, asked for at the same time."""
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    if streamed.get("prompt_logprobs"):
        del streamed["prompt_logprobs"]  # not available in streams, and of no effect on the rest
    options: Body = {"base_url": stack.url, "timeout": TIMEOUT_S, "trust_env": False}
    async with httpx.AsyncClient(verify=False, **options) as client:  # loading certificates is slow
        whole, stream = await asyncio.gather(
            client.post(path, json=body), client.post(path, json=streamed)
        )
    return whole, stream


def post(stack: Running, path: str, body: Body) -> Any:
    """The JSON answer; it must be a 200."""
    reply = httpx.post(
        stack.url + path, json=body, timeout=TIMEOUT_S, verify=False, trust_env=False
    )
    assert reply.status_code == 200, (body, reply.text)
    return reply.json()


def compare(stack: Running, model: str, path: str, body: Body) -> int:
    """Send both ways and compare everything; the status."""
    body = {"model": model, **body}
    whole, stream = asyncio.run(both_ways(stack, path, body))
    assert stream.status_code == whole.status_code, (whole.text, stream.text)
    if whole.status_code != 200:
        assert whole.status_code == 400, whole.text
        assert stream.json()["message"] == whole.json()["message"]
        return whole.status_code
    assert "error" not in whole.json()
    events = [e.removeprefix("data: ") for e in stream.text.split("\n\n") if e]
    expected, got = of_body(whole.json()), of_stream(events)
    _compare_choices(body, expected, got)
    assert got.usage == expected.usage
    _check_counts(body, whole.json(), expected)
    return 200


def _compare_choices(body: Body, expected: Answer, got: Answer) -> None:
    assert sorted(got.choices) == sorted(expected.choices) == list(range(len(expected.choices)))
    running = 0
    for index, told in got.choices.items():
        other = expected.choices[index]
        running += told.num_tokens or 0
        if told.logprobs and "text_offset" in told.logprobs and other.logprobs:
            if _has_literal_tokens(body):
                assert told.logprobs["text_offset"] == other.logprobs["text_offset"]
            # Otherwise a stream counts what it sent and a body its tokens, which differ by what was cut.
            other.logprobs["text_offset"] = told.logprobs["text_offset"]
        told.num_tokens = None
        assert told == other, index
    if running:
        assert expected.usage and running == expected.usage["completion_tokens"]


def _has_literal_tokens(body: Body) -> bool:
    """Whether the tokens' texts joined are the text that is sent, character by character and at once."""
    return not ({"stop", "stop_token_ids", "echo"} & set(body)) and body.get("ignore_eos", False)


def _check_counts(body: Body, whole: Any, answer: Answer) -> None:
    usage = answer.usage
    assert usage is not None
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    if not answer.num_logprobs:
        return
    tokens = usage["completion_tokens"]
    if "prompt" in body and body.get("echo"):
        if body["max_tokens"] == 0:
            tokens = 0
        prompts = len(answer.choices) // body.get("n", 1)
        tokens += usage["prompt_tokens"] * len(answer.choices) // prompts
    assert answer.num_logprobs == tokens


@pytest.mark.parametrize("path", PATHS)
def test_streamed_equals_whole(scripted: Running, path: str) -> None:
    statuses: Counter[int] = Counter()

    @seed(20240823)
    @run_of(EXAMPLES // 2)
    @given(requests(path))
    def judge(body: Body) -> None:
        statuses[compare(scripted, "synthetic", path, body)] += 1

    judge()
    print(path, dict(statuses))
    assert statuses[200] > EXAMPLES // 4


@pytest.mark.parametrize("path", PATHS)
def test_streamed_equals_whole_on_the_real_model(exact: Running, path: str) -> None:
    statuses: Counter[int] = Counter()

    @seed(20240823)
    @run_of(REAL_EXAMPLES // 2)
    @given(requests(path))
    def judge(body: Body) -> None:
        statuses[compare(exact, MODEL, path, body)] += 1

    judge()
    print(path, dict(statuses))
    assert statuses[200] > REAL_EXAMPLES // 4


def agree(stack: Running, model: str, chat: Body) -> None:
    """A chat, the completion of the ids that /tokenize gives for it, and the counts of all three."""
    form: Body = {k: chat[k] for k in ("messages", "add_generation_prompt") if k in chat}
    rendered = post(stack, TOKENIZE, {"model": model, **form})
    assert rendered["count"] == len(rendered["tokens"])
    rest = {k: v for k, v in chat.items() if k not in form}
    said = post(stack, CHAT, {"model": model, **chat})
    completed = post(stack, COMPLETION, {"model": model, **rest, "prompt": rendered["tokens"]})
    assert said["usage"] == completed["usage"]
    assert said["usage"]["prompt_tokens"] == rendered["count"]
    for one, other in zip(said["choices"], completed["choices"], strict=True):
        assert one["message"]["content"] == other["text"]
        assert one["finish_reason"] == other["finish_reason"]
        assert one["stop_reason"] == other["stop_reason"]


def chats() -> st.SearchStrategy[Body]:
    """Chat bodies of fields that completions have too, with the same meaning."""
    both = {
        *("seed", "temperature", "n", "best_of", "stop", "max_tokens", "min_tokens", "top_p"),
        *("frequency_penalty", "repetition_penalty", "messages", "add_generation_prompt"),
        *("use_beam_search", "length_penalty", "early_stopping", "ignore_eos", "guided_regex"),
    }
    return requests(CHAT).map(lambda body: {k: v for k, v in body.items() if k in both})


def test_chat_completion_and_tokenize_agree(scripted: Running) -> None:
    @seed(5)
    @run_of(EXAMPLES // 3)
    @given(chats())
    def judge(body: Body) -> None:
        agree(scripted, "synthetic", body)

    judge()


def test_chat_completion_and_tokenize_agree_on_the_real_model(exact: Running) -> None:
    @seed(5)
    @run_of(REAL_EXAMPLES // 2)
    @given(chats())
    def judge(body: Body) -> None:
        agree(exact, MODEL, body)

    judge()


def test_text_prompts_count_what_tokenize_counts(scripted: Running) -> None:
    @seed(11)
    @run_of(EXAMPLES // 3)
    @given(st.text(min_size=1, max_size=60), st.booleans())
    def judge(text: str, special: bool) -> None:
        form = {"model": "synthetic", "prompt": text, "add_special_tokens": special}
        encoded = post(scripted, TOKENIZE, form)
        body = {**form, "max_tokens": 2, "ignore_eos": True, "echo": True, "logprobs": 0, "seed": 1}
        answer = post(scripted, COMPLETION, body)
        assert answer["usage"]["prompt_tokens"] == encoded["count"]
        assert answer["usage"]["completion_tokens"] == 2
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == encoded["count"] + 2
        assert answer["choices"][0]["text"].startswith(text)

    judge()
