"""A process that renders templates strangers sent, and may be killed at any time.

Frames on standard input and output: four bytes of length, then JSON. It gives itself a limit of memory and,
per template, of time: a timer whose signal ends the process, because no loop in a template (or in the C code
under it) can be relied on to look at a clock. Whoever started it sees the pipe close.
"""

from __future__ import annotations

import resource
import signal
import sys
from typing import Any, BinaryIO

import orjson

from candor.errors import InvalidArgument
from tokenizer_svc.chat_template import Conversation, TemplateCache, TemplateLimits


def main() -> None:
    """Serve frames until standard input closes. The first frame has the limits."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    limits = _read(source)
    assert limits is not None
    memory = int(limits["memory_bytes"])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    cache = TemplateCache(limits["templates"], TemplateLimits(**limits["sizes"]))
    while (job := _read(source)) is not None:
        signal.setitimer(signal.ITIMER_REAL, limits["timeout_s"])
        answer = _answer(cache, job)
        signal.setitimer(signal.ITIMER_REAL, 0)
        data = orjson.dumps(answer)
        sink.write(len(data).to_bytes(4, "big") + data)
        sink.flush()


def _answer(cache: TemplateCache, job: dict[str, Any]) -> dict[str, Any]:
    try:
        template = cache.get(job["template"], job["special_tokens"])
        return {"text": template.render(Conversation(**job["conversation"]))}
    except InvalidArgument as error:
        return {"error": error.message, "field": error.field}


def _read(source: BinaryIO) -> dict[str, Any] | None:
    head = source.read(4)
    if len(head) < 4:
        return None
    value: dict[str, Any] = orjson.loads(source.read(int.from_bytes(head, "big")))
    return value


if __name__ == "__main__":
    main()
