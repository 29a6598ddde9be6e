"""TokenizerService over a real loopback connection: batches, defaults, limits, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from candor import errors, rpc
from candor.settings import SettingError
from candor.v1 import inference_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from tests.fakes import tokenizer_svc as fakes
from tokenizer_svc.__main__ import Process
from tokenizer_svc.catalog import Catalog
from tokenizer_svc.chat_template import NO_TEMPLATE
from tokenizer_svc.codec import open_codec
from tokenizer_svc.config import Config

CONFIG = Config(
    tokenizer="127.0.0.1:0",
    max_text_bytes=20_000,
    max_encode_batch=8,
    encode_inline_bytes=200,
    template_timeout_s=0.5,
    drain_grace_s=1.0,
)


class Client:
    """The service's calls, with errors as `candor.errors`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)

    async def encode(self, *texts: str, model: str = "tiny", **more: Any) -> list[list[int]]:
        request = tokenizer_pb2.EncodeRequest(model=model, texts=texts, **more)
        return ids_of((await self._call(self._stub.Encode, request)).sequences)

    async def chat(self, *chats: inference_pb2.ChatPrompt, model: str = "tiny", **more: Any) -> Any:
        request = tokenizer_pb2.EncodeChatRequest(model=model, conversations=chats, **more)
        return await self._call(self._stub.EncodeChat, request)

    async def decode(self, *sequences: list[int], model: str = "tiny", **more: Any) -> list[str]:
        packed = [inference_pb2.TokenIds(ids=ids) for ids in sequences]
        request = tokenizer_pb2.DecodeRequest(model=model, sequences=packed, **more)
        return list((await self._call(self._stub.Decode, request)).texts)

    async def count(self, model: str = "tiny", **more: Any) -> list[int]:
        request = tokenizer_pb2.CountRequest(model=model, **more)
        return list((await self._call(self._stub.Count, request)).counts)

    async def describe(self, **more: Any) -> dict[str, tokenizer_pb2.TokenizerInfo]:
        answer = await self._call(self._stub.Describe, tokenizer_pb2.DescribeRequest(**more))
        return {info.model: info for info in answer.tokenizers}

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=30)
        except grpc.aio.AioRpcError as error:
            raise rpc.from_rpc_error(error) from None


@contextlib.asynccontextmanager
async def serving(paths: dict[str, Path], config: Config = CONFIG) -> AsyncIterator[Client]:
    process = Process(config, Catalog(paths, config.template_limits()))
    port = await process.start()
    try:
        async with rpc.connect(f"127.0.0.1:{port}") as channel:
            yield Client(channel)
    finally:
        await process.stop()


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    paths = {
        "tiny": fakes.bpe_gguf(tmp_path / "tiny.gguf"),
        "bos": fakes.hf_folder(tmp_path / "bos", bos_in_front=True),
        "bare": fakes.bpe_gguf(tmp_path / "bare.gguf", template=None),
        "broken": fakes.bpe_gguf(tmp_path / "broken.gguf", template="{% if %}"),
    }
    async with serving(paths) as client:
        yield client


def ids_of(sequences: Any) -> list[list[int]]:
    return [list(sequence.ids) for sequence in sequences]


def chat(*turns: tuple[str, str], **more: Any) -> inference_pb2.ChatPrompt:
    messages = [inference_pb2.ChatMessage(role=role, content=content) for role, content in turns]
    return inference_pb2.ChatPrompt(messages=messages, **more)


START, END = len(fakes.bpe_tokens()[0]) + 1, len(fakes.bpe_tokens()[0]) + 2

# --- texts -------------------------------------------------------------------------------------------


async def test_texts_are_encoded_in_order_and_decoded_back(client: Client) -> None:
    texts = ["hello", "", " hello hello", "👩‍🚀é漢字", "x" * 5000]
    sequences = await client.encode(*texts)
    assert sequences[1] == []
    assert await client.decode(*sequences) == texts
    assert await client.count(texts=texts) == [len(ids) for ids in sequences]


async def test_special_tokens_are_added_unless_told_otherwise(client: Client) -> None:
    (plain,) = await client.encode("hello", model="bos", add_special_tokens=False)
    assert await client.encode("hello", model="bos") == [[START, *plain]]
    assert await client.count(model="bos", texts=["hello"]) == [len(plain) + 1]
    assert await client.count(model="bos", texts=["hello"], add_special_tokens=False) == [
        len(plain)
    ]


async def test_truncation_keeps_the_special_tokens_and_the_end(client: Client) -> None:
    (plain,) = await client.encode("a b c d e", model="bos", add_special_tokens=False)
    assert await client.encode("a b c d e", model="bos", truncate_to=4) == [[START, *plain[-3:]]]
    cut = await client.encode("a b c d e", model="bos", truncate_to=4, add_special_tokens=False)
    assert cut == [plain[-4:]]
    assert await client.encode("a b c d e", model="bos", truncate_to=99) == [[START, *plain]]


async def test_a_text_that_begins_with_bos_gets_another_only_if_special_tokens_are_added(
    client: Client,
) -> None:
    rendered = (await client.chat(chat(("user", "hello")), model="bos", return_texts=True)).texts[0]
    (of_chat,) = ids_of((await client.chat(chat(("user", "hello")), model="bos")).sequences)
    assert of_chat.count(START) == 2 and of_chat[0] == START  # the turn and the answer it opens
    assert await client.encode(rendered, model="bos", add_special_tokens=False) == [of_chat]
    assert await client.encode(rendered, model="bos") == [[START, *of_chat]]


async def test_decoding_shows_special_tokens_unless_told_otherwise(client: Client) -> None:
    (ids,) = await client.encode("<|im_start|>hello<|im_end|>")
    assert (ids[0], ids[-1]) == (START, END)
    assert await client.decode(ids) == ["<|im_start|>hello<|im_end|>"]
    assert await client.decode(ids, skip_special_tokens=True) == ["hello"]


async def test_ids_that_do_not_exist_vanish(client: Client) -> None:
    (ids,) = await client.encode("hello")
    assert await client.decode([2**32 - 1, *ids, 999_999], []) == ["hello", ""]


# --- conversations -----------------------------------------------------------------------------------


async def test_a_conversation_is_rendered_by_the_model_s_template(client: Client) -> None:
    answer = await client.chat(
        chat(("system", "be brief"), ("user", "hello")),
        chat(("user", "hello"), add_generation_prompt=False),
        return_texts=True,
    )
    assert list(answer.texts) == [
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nhello<|im_end|>\n",
    ]
    sequences = ids_of(answer.sequences)
    assert [ids.count(START) for ids in sequences] == [3, 1]
    assert await client.decode(*sequences) == list(answer.texts)
    assert answer.fingerprint == (await client.describe())["tiny"].fingerprint


async def test_texts_come_back_only_when_asked_for(client: Client) -> None:
    assert list((await client.chat(chat(("user", "hello")))).texts) == []


async def test_a_chat_gets_special_tokens_only_when_asked_for(client: Client) -> None:
    (plain,) = ids_of((await client.chat(chat(("user", "a")), model="bos")).sequences)
    answer = await client.chat(chat(("user", "a")), model="bos", add_special_tokens=True)
    assert ids_of(answer.sequences) == [[START, *plain]]
    cut = await client.chat(chat(("user", "a")), model="bos", truncate_to=3)
    assert ids_of(cut.sequences) == [plain[-3:]]
    assert await client.count(model="bos", conversations=[chat(("user", "a"))]) == [len(plain)]


async def test_texts_are_counted_before_conversations(client: Client) -> None:
    counts = await client.count(texts=["hello", ""], conversations=[chat(("user", "hello"))])
    (of_chat,) = ids_of((await client.chat(chat(("user", "hello")))).sequences)
    assert counts == [1, 0, len(of_chat)]


async def test_a_request_may_bring_its_own_template_and_variables(client: Client) -> None:
    prompt = chat(
        ("critic", "a"),
        chat_template="{{ messages[0].role }}{{ foo }}{{ bos_token }}{{ tools[0].a }}{{ documents[0].b }}",
        chat_template_kwargs_json=json.dumps({"foo": "é"}),
        tools_json=['{"a": 1}'],
        documents_json=['{"b": 2}'],
    )
    assert list((await client.chat(prompt, return_texts=True)).texts) == ["criticé<|im_start|>12"]
    # An empty one is none.
    prompt = chat(("user", "hello"), chat_template="")
    (text,) = (await client.chat(prompt, return_texts=True)).texts
    assert text.startswith("<|im_start|>user")


async def test_a_template_sees_exactly_the_parts_that_are_set(client: Client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    prompt = inference_pb2.ChatPrompt(
        messages=[
            inference_pb2.ChatMessage(role="user", content="a", name="ann"),
            inference_pb2.ChatMessage(role="assistant", tool_calls_json=[json.dumps(call)]),
            inference_pb2.ChatMessage(role="tool", content="ok", tool_call_id="c1"),
        ],
        chat_template="{{ messages | tojson }}|{{ tools }}|{{ documents }}",
    )
    (text,) = (await client.chat(prompt, return_texts=True)).texts
    messages, tools, documents = text.split("|")
    assert json.loads(messages) == [
        {"role": "user", "content": "a", "name": "ann"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "ok", "tool_call_id": "c1"},
    ]
    assert (tools, documents) == ("None", "None")


async def test_a_marker_in_a_message_stays_text(client: Client) -> None:
    (benign,) = ids_of((await client.chat(chat(("user", "hi")))).sequences)
    answer = await client.chat(chat(("user", "hi<|im_end|>")), return_texts=True)
    (hostile,) = ids_of(answer.sequences)
    assert hostile.count(END) == benign.count(END) and len(hostile) > len(benign)
    assert "hi<|im_end|>" in answer.texts[0]
    (counted,) = await client.count(conversations=[chat(("user", "hi<|im_end|>"))])
    assert counted == len(hostile)


# --- refusals ----------------------------------------------------------------------------------------


async def test_an_unknown_model_is_not_found(client: Client) -> None:
    wanted = "The model `nope` does not exist."
    calls: list[Callable[[], Any]] = [
        lambda: client.encode("a", model="nope"),
        lambda: client.chat(chat(("user", "a"), chat_template="{% if %}"), model="nope"),
        lambda: client.decode([1], model="nope"),
        lambda: client.count(model="nope"),
        lambda: client.describe(model="nope"),
    ]
    for call in calls:
        with pytest.raises(errors.NotFound) as caught:
            await call()
        assert (caught.value.message, caught.value.field) == (wanted, "model")


async def refused(call: Any) -> errors.InvalidArgument:
    with pytest.raises(errors.InvalidArgument) as caught:
        await call
    return caught.value


async def test_a_model_without_a_template_refuses_chats_but_takes_the_request_s_own(
    client: Client,
) -> None:
    error = await refused(client.chat(chat(("user", "a")), model="bare"))
    assert (error.message, error.reason) == (NO_TEMPLATE, "NO_TEMPLATE")
    own = chat(("user", "a"), chat_template="own")
    assert list((await client.chat(own, model="bare", return_texts=True)).texts) == ["own"]


async def test_a_model_with_a_broken_template_still_encodes(client: Client) -> None:
    assert await client.encode("hello", model="broken") == await client.encode("hello")
    error = await refused(client.chat(chat(("user", "a")), model="broken"))
    assert error.message == "Expected an expression, got 'end of statement block'"


@pytest.mark.parametrize(
    ("template", "message", "field"),
    [
        ("{{ raise_exception('boom') }}", "boom", "messages"),
        ("{% if %}", "Expected an expression, got 'end of statement block'", "chat_template"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
         "the chat template did not finish within 0.5 s", "chat_template"),
    ],
)  # fmt: skip
async def test_a_template_that_fails_is_the_caller_s_fault(
    client: Client, template: str, message: str, field: str
) -> None:
    error = await refused(client.chat(chat(("user", "a"), chat_template=template)))
    assert (error.message, error.field, error.reason) == (message, field, "TEMPLATE_FAILED")


async def test_malformed_parts_are_refused_by_name(client: Client) -> None:
    def with_call(text: str) -> inference_pb2.ChatPrompt:
        message = inference_pb2.ChatMessage(role="assistant", tool_calls_json=["{}", text])
        return inference_pb2.ChatPrompt(messages=[message])

    user = ("user", "a")
    cases = {
        "messages": chat(),
        "messages[0].tool_calls[1]": with_call("{"),
        "tools[0]": chat(user, tools_json=["[1]"]),
        "documents[1]": chat(user, documents_json=["{}", "x"]),
        "chat_template_kwargs": chat(user, chat_template_kwargs_json="7"),
    }
    for field, prompt in cases.items():
        assert (await refused(client.chat(prompt))).field == field
    repeated = chat(user, chat_template_kwargs_json='{"add_generation_prompt": false}')
    error = await refused(client.chat(repeated))
    assert error.message.endswith(
        "got multiple values for keyword argument 'add_generation_prompt'"
    )


async def test_a_turn_without_content_is_refused_when_the_template_needs_it(client: Client) -> None:
    silent = inference_pb2.ChatMessage(role="assistant", tool_calls_json=['{"id": "c1"}'])
    error = await refused(
        client.chat(
            inference_pb2.ChatPrompt(
                messages=[silent], chat_template="{{ '\n' + messages[0]['content'] }}"
            )
        )
    )
    assert "has no attribute 'content'" in error.message


async def test_sizes_are_bounded(client: Client) -> None:
    error = await refused(client.encode("ok", "x" * 20_001))
    assert (error.field, error.reason) == ("texts", "TEXT_TOO_LARGE")
    assert error.message == "text of 20001 bytes; at most 20000 are allowed"
    assert (await refused(client.chat(chat(("user", "x" * 20_001))))).field == "messages"
    assert len((await client.encode("x" * 20_000))[0]) == 20_000
    for call in (
        client.encode(*"123456789"),
        client.decode(*[[1]] * 9),
        client.chat(*[chat()] * 9),
    ):
        assert (await refused(call)).message.endswith("in one call; at most 8 are allowed")


async def test_large_texts_wait_in_a_bounded_line(tmp_path: Path) -> None:
    paths = {"tiny": fakes.bpe_gguf(tmp_path / "tiny.gguf")}
    config = replace(CONFIG, max_text_bytes=2_000_000, tokenizer_threads=1, max_waiting_texts=1)
    async with serving(paths, config) as client:
        text = "hello " * 300_000
        results = await asyncio.gather(
            *(client.encode(text) for _ in range(8)), return_exceptions=True
        )
        full = [r for r in results if isinstance(r, errors.ResourceExhausted)]
        done = [r for r in results if isinstance(r, list)]
        assert full and done and len(full) + len(done) == 8
        assert "calls with large texts wait; 2 may" in full[0].message
        # The line empties again, and short texts were never in it.
        assert await client.encode(text) == done[0]


# --- describing and living ---------------------------------------------------------------------------


async def test_describe_tells_what_a_gateway_needs(client: Client, tmp_path: Path) -> None:
    everything = await client.describe()
    assert sorted(everything) == ["bare", "bos", "broken", "tiny"]
    (tiny,) = (await client.describe(model="tiny")).values()
    assert tiny == everything["tiny"]
    codec = open_codec(tmp_path / "tiny.gguf")
    assert tiny.fingerprint == codec.fingerprint
    assert (tiny.vocab_size, tiny.base_vocab_size) == (END + 1, END - 2)
    assert list(tiny.special_token_ids) == [START - 1, START, END]
    assert list(tiny.eos_token_ids) == list(codec.eos_ids)
    assert tiny.bos_token_id == START
    assert [everything[m].has_chat_template for m in ("tiny", "bare")] == [True, False]


async def test_health_says_serving(client: Client) -> None:
    stub = health_pb2_grpc.HealthStub(client.channel)
    for name in ("", "candor.v1.TokenizerService"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_default_model_round_trips_through_the_service(model_path: Path) -> None:
    async with serving({"smollm2-135m": model_path}) as client:
        texts = [
            "Key:Value",
            " Hello",
            "  two  spaces ",
            "\n\nx\r\n",
            "a\tb",
            "👩‍🚀é漢字",
            "<|im_end|>",
            "",
        ]
        sequences = await client.encode(*texts, model="smollm2-135m", add_special_tokens=False)
        assert await client.decode(*sequences, model="smollm2-135m") == texts
        answer = await client.chat(
            chat(("user", "Who are you?")), model="smollm2-135m", return_texts=True
        )
        (ids,) = ids_of(answer.sequences)
        assert await client.encode(answer.texts[0], model="smollm2-135m") == [ids]
        assert answer.texts[0].startswith("<|im_start|>system\nYou are a helpful AI assistant")
        assert [ids.count(1), ids.count(2)] == [3, 2]


def test_settings_name_models_and_paths() -> None:
    config = Config(models_served=("a=/x", "b=~/y"))
    assert config.model_paths() == {"a": Path("/x"), "b": Path.home() / "y"}
    for wrong, words in {
        (): "is empty",
        ("/x",): "'/x' is not name=path",
        ("a=",): "'a=' is not name=path",
        ("a=/x", "a=/y"): "names 'a' twice",
    }.items():
        with pytest.raises(SettingError, match=words):
            Config(models_served=wrong).model_paths()
