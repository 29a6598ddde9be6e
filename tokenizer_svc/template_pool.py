"""Runs templates that came with requests in processes that can be killed.

A template is a program. In a thread it could not be stopped, and one with two nested loops would hold the
interpreter lock for minutes; so each gets a process that ends itself when time is up, and the next template
gets a new one. The model's own template was chosen by whoever runs the server and is not sent here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from candor.errors import Internal, InvalidArgument, ResourceExhausted
from tokenizer_svc.chat_template import Conversation, TemplateLimits

log = logging.getLogger("tokenizer_svc")

_ROOT = Path(__file__).resolve().parent.parent
_START_S = 30.0
"""For a process to come up; on a busy machine an interpreter can take seconds."""


@dataclass(frozen=True)
class PoolLimits:
    """What templates of requests may use."""

    processes: int = 1
    max_waiting: int = 64
    timeout_s: float = 2.0
    memory_bytes: int = 512 * 1024 * 1024
    templates: int = 64
    """Compiled templates that each process remembers."""
    sizes: TemplateLimits = dataclasses.field(default_factory=TemplateLimits)


class TemplatePool:
    """Up to `processes` renderers, started when first needed."""

    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self._idle: list[asyncio.subprocess.Process] = []
        self._slots = asyncio.Semaphore(limits.processes)
        self.waiting = 0
        """Calls that wait for a renderer."""
        self.rendering = 0
        """Calls that have one."""

    async def render(
        self, template: str, special_tokens: Mapping[str, str], conversation: Conversation
    ) -> str:
        """Render in a process. Raises InvalidArgument for a template that fails or uses too much."""
        conversation.check()
        if self.waiting >= self._limits.max_waiting:
            raise ResourceExhausted(
                f"{self.waiting} chat templates wait to be rendered; {self._limits.max_waiting} may",
                reason="QUEUE_FULL",
                retry_after_s=self._limits.timeout_s,
            )
        job = _frame(
            {
                "template": template,
                "special_tokens": dict(special_tokens),
                "conversation": vars(conversation),
            }
        )
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.rendering += 1
        try:
            answer = await self._ask(job)
        finally:
            self.rendering -= 1
            self._slots.release()
        if "error" in answer:
            raise InvalidArgument(answer["error"], reason="TEMPLATE_FAILED", field=answer["field"])
        return str(answer["text"])

    async def close(self) -> None:
        """End the idle processes. Called when nothing is being rendered any more."""
        while self._idle:
            await _leave(self._idle.pop())

    async def _ask(self, job: bytes) -> dict[str, Any]:
        process = await self._take()
        try:
            # The process watches its own time; this wait only covers one that is not even scheduled.
            async with asyncio.timeout(self._limits.timeout_s + _START_S):
                await _send(process, job)
                answer = await _receive(process)
        except (asyncio.IncompleteReadError, ConnectionError):
            await _leave(process)
            raise self._why_it_ended(process.returncode) from None
        except BaseException:
            await asyncio.shield(_kill(process))
            raise
        self._idle.append(process)
        return answer

    async def _take(self) -> asyncio.subprocess.Process:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            log.warning("an idle template process ended", extra={"returncode": process.returncode})
            await _leave(process)
        return await self._start()

    def _why_it_ended(self, returncode: int | None) -> Exception:
        if returncode == -signal.SIGALRM:
            text = f"the chat template did not finish within {self._limits.timeout_s:g} s"
        elif returncode is not None and (returncode > 0 or returncode == -signal.SIGSEGV):
            # Out of memory or stack in a place where Python could not say so.
            text = f"the chat template needs more than {self._limits.memory_bytes} bytes of memory"
        else:
            return Internal(f"the template process ended with {returncode}")
        return InvalidArgument(text, reason="TEMPLATE_FAILED", field="chat_template")

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tokenizer_svc.template_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd=_ROOT,
            # A template has no business with our environment; the interpreter may need its libraries.
            env={k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"},
            start_new_session=True,  # Ctrl-C is for the server, which then closes the pipe
        )
        limits = self._limits
        greeting = {
            "memory_bytes": limits.memory_bytes,
            "timeout_s": limits.timeout_s,
            "templates": limits.templates,
            "sizes": dataclasses.asdict(limits.sizes),
        }
        assert process.stdin is not None
        process.stdin.write(_frame(greeting))
        return process


def _frame(value: Mapping[str, Any]) -> bytes:
    try:
        data = orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise InvalidArgument(
            f"the conversation cannot be handed to the template: {error}",
            reason="TEMPLATE_FAILED",
            field="messages",
        ) from error
    return len(data).to_bytes(4, "big") + data


async def _send(process: asyncio.subprocess.Process, frame: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(frame)
    await process.stdin.drain()


async def _receive(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    length = int.from_bytes(await process.stdout.readexactly(4), "big")
    value: dict[str, Any] = orjson.loads(await process.stdout.readexactly(length))
    return value


async def _leave(process: asyncio.subprocess.Process) -> None:
    """Close the pipe, whereupon the process ends, if it has not already."""
    # No signal here: sending one may reap the process past asyncio, and its return code is lost.
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_START_S):
            await process.wait()
    except TimeoutError:
        await _kill(process)


async def _kill(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
