"""Templates of strangers: rendered elsewhere, bounded in time and memory, and the next one still works."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable

import pytest

from candor.errors import InvalidArgument, ResourceExhausted
from tokenizer_svc.chat_template import Conversation, TemplateLimits
from tokenizer_svc.template_pool import PoolLimits, TemplatePool

HI = Conversation([{"role": "user", "content": "héllo"}], kwargs={"foo": "bar"})
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(x='0123456789') %}"
    "{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
)


@pytest.fixture
async def pool() -> AsyncIterator[TemplatePool]:
    limits = PoolLimits(
        timeout_s=0.5,
        max_waiting=2,
        memory_bytes=256 * 1024 * 1024,
        sizes=TemplateLimits(1000, 1000),
    )
    pool = TemplatePool(limits)
    yield pool
    await pool.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (the pool has no event for it)
            await asyncio.sleep(0)


async def refusal(pool: TemplatePool, template: str) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        await pool.render(template, {}, HI)
    assert caught.value.reason == "TEMPLATE_FAILED"
    return caught.value


async def test_a_template_renders_as_it_would_here(pool: TemplatePool) -> None:
    text = await pool.render(
        "{{ bos_token }}{{ messages[0].content }}{{ foo }}", {"bos_token": "§"}, HI
    )
    assert text == "§héllobar"


async def test_failures_keep_their_words_and_their_field(pool: TemplatePool) -> None:
    error = await refusal(pool, "{{ raise_exception('boom') }}")
    assert (error.message, error.field) == ("boom", "messages")
    assert (await refusal(pool, "{% if %}")).field == "chat_template"
    assert "at most 1000" in (await refusal(pool, "x" * 1001)).message
    assert "more than 1000" in (await refusal(pool, "{{ 'ab' * 501 }}")).message


async def test_an_endless_template_is_ended_and_the_next_one_works(pool: TemplatePool) -> None:
    error = await refusal(pool, ENDLESS)
    assert error.message == "the chat template did not finish within 0.5 s"
    assert error.field == "chat_template"
    assert await pool.render("{{ foo }}", {}, HI) == "bar"


async def test_a_template_that_eats_memory_is_refused(pool: TemplatePool) -> None:
    assert "memory" in (await refusal(pool, "{{ ('x' * 10**12) | length }}")).message
    assert "memory" in (await refusal(pool, DOUBLING)).message
    assert await pool.render("{{ foo }}", {}, HI) == "bar"


async def test_the_line_has_an_end(pool: TemplatePool) -> None:
    running = [asyncio.ensure_future(pool.render(ENDLESS, {}, HI)) for _ in range(3)]
    await until(lambda: pool.waiting == 2)  # one renders, two wait
    with pytest.raises(ResourceExhausted, match="2 chat templates wait") as caught:
        await pool.render("x", {}, HI)
    assert caught.value.retry_after_s == 0.5
    ends = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(end, InvalidArgument) for end in ends)


async def test_a_caller_that_goes_away_leaves_the_pool_usable(pool: TemplatePool) -> None:
    assert await pool.render("{{ foo }}", {}, HI) == "bar"
    gone = asyncio.ensure_future(pool.render(ENDLESS, {}, HI))
    await until(lambda: pool.rendering == 1)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert await pool.render("{{ foo }}", {}, HI) == "bar"


async def test_what_no_json_can_carry_is_refused(pool: TemplatePool) -> None:
    deep: list[object] = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(InvalidArgument, match="cannot be handed to the template"):
        await pool.render("x", {}, Conversation(HI.messages, kwargs={"deep": deep}))


async def test_conversations_are_checked_before_a_process_is_asked(pool: TemplatePool) -> None:
    with pytest.raises(InvalidArgument, match="messages must not be empty"):
        await pool.render("x", {}, Conversation([]))


async def test_a_process_that_was_killed_while_idle_is_replaced(pool: TemplatePool) -> None:
    assert await pool.render("{{ foo }}", {}, HI) == "bar"
    (process,) = pool._idle
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    assert await pool.render("{{ foo }}", {}, HI) == "bar"
    assert pool._idle != [process]
