"""The official client, unchanged, against the real model."""

from __future__ import annotations

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from bench.stack import Running

ASK: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
]
MODEL = "smollm2-135m"


@pytest.fixture
def client(real: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0)


def test_it_answers_in_sensible_english(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=40)
    choice = answer.choices[0]
    assert "Paris" in str(choice.message.content)
    assert (choice.finish_reason, choice.message.role) == ("stop", "assistant")
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=40)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "stop" and not any(reasons[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_chat_logprobs_carry_the_alternatives_asked_for(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0
        assert bytes(entry.bytes or []).decode() == entry.token


def test_completions_stop_where_they_are_told(client: openai.OpenAI) -> None:
    free = client.completions.create(
        model=MODEL, prompt="1, 2, 3, 4,", temperature=0, max_tokens=24
    )
    cut = client.completions.create(
        model=MODEL, prompt="1, 2, 3, 4,", temperature=0, max_tokens=24, stop=["8"]
    )
    text = free.choices[0].text
    assert "8" in text
    assert cut.choices[0].text == text[: text.index("8")]
    assert cut.choices[0].finish_reason == "stop"


def test_completion_logprobs_are_four_lists_of_one_length(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The sky is", temperature=0, max_tokens=6, logprobs=2, echo=True
    )
    lists = answer.choices[0].logprobs
    assert lists is not None and lists.tokens and lists.token_logprobs and lists.top_logprobs
    assert answer.usage is not None
    lengths = {len(lists.tokens), len(lists.token_logprobs), len(lists.top_logprobs)}
    assert lengths == {len(lists.text_offset or []), answer.usage.total_tokens}
    assert "".join(lists.tokens) == answer.choices[0].text
    assert lists.token_logprobs[0] is None


def test_a_seeded_answer_repeats_and_another_seed_differs(client: openai.OpenAI) -> None:
    def say(seed: int) -> str:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a short story."}],
            temperature=1.0,
            max_tokens=24,
            seed=seed,
        )
        return str(answer.choices[0].message.content)

    assert say(7) == say(7) != say(8)


def test_a_mistake_is_a_400_that_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=4, extra_body={"top_q": 0.5}
        )
    assert "top_q" in caught.value.message
    with pytest.raises(openai.NotFoundError, match="no-such"):
        client.chat.completions.create(model="no-such", messages=ASK)


def test_models_and_aliases_are_listed_and_usable(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "smollm2-135m-ALIAS"]
    answer = client.chat.completions.create(
        model="smollm2-135m-ALIAS", messages=ASK, temperature=0, max_tokens=1
    )
    assert answer.model == MODEL
