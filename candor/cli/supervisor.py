"""Keeps a set of processes running: starts them in order, restarts what dies, stops all of them.

Knows processes, ports and log lines; nothing about what the services do.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import logging.handlers
import os
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

LOG_FILE_BYTES = 10 * 1024 * 1024
MAX_LINE_BYTES = 64 * 1024
TAIL_LINES = 20
"""Lines of a process's output that are kept to explain its death."""


class State(StrEnum):
    """What a process is doing."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"


@dataclass
class Backoff:
    """How long to wait before the next start: doubles with each early death, forgets after a long life."""

    first_s: float = 0.25
    most_s: float = 15.0
    healthy_s: float = 30.0
    _next_s: float = field(default=0.0, init=False)

    def after_death(self, lived_s: float) -> float:
        """Seconds to wait after a process that lived `lived_s` has died."""
        if lived_s >= self.healthy_s or self._next_s == 0.0:
            self._next_s = self.first_s
        wait = self._next_s
        self._next_s = min(self._next_s * 2, self.most_s)
        return wait


@dataclass(frozen=True)
class Service:
    """One process to keep running."""

    name: str
    command: Sequence[str]
    is_ready: Callable[[int], Awaitable[bool]]
    """Asked repeatedly with the process id after a start; never raises."""
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Status:
    """What is known about a service now."""

    state: State = State.WAITING
    pid: int | None = None
    restarts: int = 0
    exit_code: int | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))


class StartFailed(Exception):
    """A service never became ready; the message has its last words."""


class Supervisor:
    """Runs services, each watched by its own task.

    `on_change(service, status)` is called after every change of state, `on_line(service, line)` for each
    line a process writes.
    """

    def __init__(
        self,
        services: Sequence[Service],
        *,
        log_dir: Path,
        on_change: Callable[[Service, Status], None],
        on_line: Callable[[Service, str], None],
        start_timeout_s: float,
        stop_grace_s: float,
    ) -> None:
        self.status = {service.name: Status() for service in services}
        self._services = list(services)
        self._log_dir = log_dir
        self._on_change = on_change
        self._on_line = on_line
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self) -> None:
        """Start every service in the order given, each when the one before is ready.

        Services whose names share the part before "-" start together. Raises StartFailed.
        """
        self._log_dir.mkdir(parents=True, exist_ok=True)
        groups: dict[str, list[Service]] = {}
        for service in self._services:
            groups.setdefault(service.name.split("-")[0], []).append(service)
        for group in groups.values():
            ready = [asyncio.Event() for _ in group]
            watchers = [
                asyncio.create_task(self._watch(service, event), name=f"watch {service.name}")
                for service, event in zip(group, ready, strict=True)
            ]
            self._watchers += watchers
            waits = [asyncio.create_task(event.wait()) for event in ready]
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    await self._all_ready(group, waits, watchers)
            except TimeoutError:
                late = [s.name for s, e in zip(group, ready, strict=True) if not e.is_set()]
                raise StartFailed(
                    f"{', '.join(late)} not ready after {self._start_timeout_s:g} s"
                    + self._last_words(late)
                ) from None
            finally:
                for wait in waits:
                    wait.cancel()

    async def _all_ready(
        self,
        group: Sequence[Service],
        waits: Sequence[asyncio.Task[bool]],
        watchers: Sequence[asyncio.Task[None]],
    ) -> None:
        pending: set[asyncio.Task[bool] | asyncio.Task[None]] = set(waits)
        while pending:
            done, _ = await asyncio.wait({*pending, *watchers}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task in watchers:
                    await task  # raises what ended the watcher
            pending -= done

    async def stop(self) -> None:
        """Stop every process: SIGTERM in reverse order of start, SIGKILL after the grace."""
        self._stopping = True
        for service in reversed(self._services):
            process = self._processes.get(service.name)
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
        if self._watchers:
            _, late = await asyncio.wait(self._watchers, timeout=self._stop_grace_s)
            if late:
                for process in self._processes.values():
                    if process.returncode is None:
                        with contextlib.suppress(ProcessLookupError):
                            process.kill()
                await asyncio.wait(self._watchers, timeout=5)
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    def is_stopping(self) -> bool:
        """Whether `stop` was called: deaths are expected from then on."""
        return self._stopping

    async def _watch(self, service: Service, ready: asyncio.Event) -> None:
        status, backoff = self.status[service.name], Backoff()
        handler = logging.handlers.RotatingFileHandler(
            self._log_dir / f"{service.name}.log", maxBytes=LOG_FILE_BYTES, backupCount=1
        )
        try:
            while not self.is_stopping():
                started_at = time.monotonic()
                try:
                    await self._run_once(service, status, ready, handler)
                except Exception as fault:
                    # Whatever happened to our own reading of it: the service must live on.
                    status.tail.append(f"supervisor: {fault!r}")
                if self.is_stopping():
                    break
                if not ready.is_set() and status.exit_code == 2:
                    # A wrong setting: trying again cannot help, and the process said why.
                    raise StartFailed(
                        f"{service.name} refused to start{self._last_words([service.name])}"
                    )
                status.restarts += 1
                wait_s = backoff.after_death(time.monotonic() - started_at)
                self._set(service, State.RESTARTING)
                await asyncio.sleep(wait_s)
        finally:
            handler.close()
            self._set(service, State.STOPPED)

    async def _run_once(
        self,
        service: Service,
        status: Status,
        ready: asyncio.Event,
        handler: logging.handlers.RotatingFileHandler,
    ) -> None:
        process = await asyncio.create_subprocess_exec(
            *service.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **service.environ},
            preexec_fn=_die_with_parent,
            start_new_session=True,  # Ctrl-C reaches us alone; we stop them in order
        )
        self._processes[service.name] = process
        status.pid, status.exit_code = process.pid, None
        self._set(service, State.STARTING)
        probe = asyncio.create_task(self._probe(service, process, ready))
        try:
            assert process.stdout is not None
            async for line in _lines(process.stdout):
                status.tail.append(line)
                handler.emit(logging.makeLogRecord({"msg": line.replace("%", "%%")}))
                self._on_line(service, line)
            status.exit_code = await process.wait()
        finally:
            probe.cancel()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        status.pid = None

    async def _probe(
        self, service: Service, process: asyncio.subprocess.Process, ready: asyncio.Event
    ) -> None:
        while not await service.is_ready(process.pid):  # noqa: ASYNC110 - another process, no event
            await asyncio.sleep(0.05)
        self._set(service, State.READY)
        ready.set()

    def _set(self, service: Service, state: State) -> None:
        status = self.status[service.name]
        if status.state is not state:
            status.state = state
            self._on_change(service, status)

    def _last_words(self, names: Sequence[str]) -> str:
        lines = [readable(line) for name in names for line in list(self.status[name].tail)[-5:]]
        return ":\n  " + "\n  ".join(lines) if lines else ""


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of a process, cut where they are longer than anybody reads."""
    rest, is_cut = b"", False
    while chunk := await stream.read(1 << 16):
        *whole, rest = (rest + chunk).split(b"\n")
        for raw in whole:
            if not is_cut:
                yield raw[:MAX_LINE_BYTES].decode(errors="replace")
            is_cut = False
        if len(rest) > MAX_LINE_BYTES:
            if not is_cut:
                yield rest[:MAX_LINE_BYTES].decode(errors="replace")
            rest, is_cut = b"", True
    if rest and not is_cut:
        yield rest.decode(errors="replace")


def readable(line: str) -> str:
    """A log line for people: level, message and extras of a JSON line, or the line itself."""
    try:
        record = json.loads(line)
        text = f"{record['level']}: {record['message']}"
    except (ValueError, KeyError, TypeError):
        return line
    if "exception" in record:
        text += f" ({record['exception'].strip().splitlines()[-1]})"
    return text


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    # Even a supervisor killed outright leaves nothing behind (Linux; elsewhere the call is missing).
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
