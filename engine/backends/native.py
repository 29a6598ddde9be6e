"""Our own loop on its own thread.

The thread takes commands from an inbox, makes a step, and hands everything the step said to the event loop at
once. It never waits for the network; without work it sleeps on a condition. Constraints are compiled on a
thread of their own, before the request enters the inbox.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from candor import errors
from engine.backends import Description, Frame, Load, Progress, Sink
from engine.core.engine import Engine
from engine.core.guided import Grammars
from engine.core.rates import Rates
from engine.core.sequence import Matcher
from engine.core.types import EngineLoad, Event, Failed, Finished, Request, StepStats

log = logging.getLogger("engine.native")

_MAX_UNREAD_STEPS = 512
"""Steps the event loop may be behind. It is behind only when this process is starved of processor time."""
_LAST_STEP_S = 10.0
_DIGESTS_EVERY_S = 1.0
_MAX_DIGESTS = 512
_BLOCKED_WAIT_S = 0.02
"""Between looks at a batch in which nothing can be computed, until a command changes that."""


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request
    matcher: Matcher | None
    came_at: float


@dataclass(frozen=True, slots=True)
class _Abort:
    key: int


class NativeBackend:
    """Runs an engine; see `engine.backends.Backend`. Made on the event loop that it will speak to."""

    def __init__(
        self,
        engine: Engine,
        grammars: Grammars,
        description: Description,
        *,
        max_requests: int,
        on_death: Callable[[], None],
        on_quiet_change: Callable[[], None] = lambda: None,
        on_frame: Callable[[Frame], None] = lambda _frame: None,
    ) -> None:
        """`max_requests`: open at a time; more are refused. `on_death`: the loop cannot go on.

        `on_quiet_change`: the load changed in a step that no sink hears of, such as one after an abort.
        `on_frame`: hears every frame before the sinks do. All on the event loop.
        """
        self.description = description
        self._engine = engine
        self._grammars = grammars
        self._max_requests = max_requests
        self._on_death = on_death
        self._on_quiet_change = on_quiet_change
        self._on_frame = on_frame
        self._loop = asyncio.get_running_loop()
        self._keys = itertools.count(1)
        # On the event loop: who is waiting for what.
        self._sinks: dict[int, Sink] = {}
        self._last = Frame(StepStats(), Load(engine.load), ())
        self._last_unix_ms = round(time.time() * 1000)
        self._digests: list[int] = []
        self._num_compiling = 0
        self._is_idle = asyncio.Event()
        # Between the threads. Bounded by the open requests: a submit and an abort each.
        self._wake = threading.Condition()
        self._inbox: deque[_Submit | _Abort] = deque()
        self._is_closing = False
        self._unread = threading.Semaphore(_MAX_UNREAD_STEPS)
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="constraints")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # --- on the event loop ---

    def next_key(self) -> int:
        """A key for a new request."""
        return next(self._keys)

    def submit(self, request: Request, sink: Sink) -> None:
        """Take a request; see the protocol."""
        if len(self._sinks) >= self._max_requests:
            full = errors.ResourceExhausted(
                f"this worker has {len(self._sinks)} requests and takes no more than "
                f"{self._max_requests}",
                retry_after_s=1.0,
            )
            self._say(sink, Failed(request.key, full))
            return
        self._sinks[request.key] = sink
        # The engine's clock: what a request waits for its constraint and for the step that runs is queueing.
        came_at = time.monotonic()
        if request.constraint is None:
            self._put(_Submit(request, None, came_at))
            return
        self._num_compiling += 1
        compiling = self._compiler.submit(self._grammars.compile, request.constraint)
        compiling.add_done_callback(lambda done: self._call(self._compiled, request, came_at, done))

    def abort(self, key: int) -> None:
        """Forget a request; see the protocol."""
        if self._sinks.pop(key, None) is not None:
            self._put(_Abort(key))
            self._note_idle()

    def progress(self) -> Progress:
        """How it is doing now."""
        return Progress(
            step_seq=self._last.stats.step_seq,
            step_unix_ms=self._last_unix_ms,
            # What is only being compiled makes no steps; that is no reason to take the loop for stuck.
            is_idle=len(self._sinks) <= self._num_compiling,
            load=self._last.load,
            digests=self._digests,
        )

    async def wait_idle(self) -> None:
        """Return once no request is open."""
        while self._sinks:
            self._is_idle.clear()
            await self._is_idle.wait()

    def close(self) -> bool:
        """Stop for good, after the step that is being computed; False when that does not end."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._thread.join(_LAST_STEP_S)
        return not self._thread.is_alive()

    def _compiled(self, request: Request, came_at: float, done: Future[Matcher]) -> None:
        self._num_compiling -= 1
        sink = self._sinks.get(request.key)
        if sink is None:
            return
        if done.cancelled():
            error: BaseException | None = errors.Cancelled("the worker is stopping")
        else:
            error = done.exception()
        if error is None:
            self._put(_Submit(request, done.result(), came_at))
        else:
            del self._sinks[request.key]
            self._note_idle()
            if not isinstance(error, errors.CandorError):
                log.error("a constraint failed to compile", exc_info=error)
                error = errors.Internal(str(error))
            self._say(sink, Failed(request.key, error))

    def _put(self, command: _Submit | _Abort) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _say(self, sink: Sink, event: Event) -> None:
        """Something that no step had a part in."""
        sink.deliver(Frame(self._last.stats, self._last.load, (event,)))

    def _deliver(self, frame: Frame, digests: list[int] | None) -> None:
        self._unread.release()
        if frame.stats.step_seq != self._last.stats.step_seq:
            self._last_unix_ms = round(time.time() * 1000)
        before, self._last = self._last.load.engine, frame
        self._on_frame(frame)
        if digests is not None:
            self._digests = digests
        shares: dict[int, tuple[Sink, list[Event]]] = {}
        for event in frame.events:
            # Without a sink: aborted while the step was on its way.
            sink = self._sinks.get(event.key)
            if sink is not None:
                shares.setdefault(id(sink), (sink, []))[1].append(event)
                if isinstance(event, Finished | Failed):
                    del self._sinks[event.key]
        for sink, events in shares.values():
            sink.deliver(Frame(frame.stats, frame.load, events))
        now = frame.load.engine
        if not shares and (now.num_running, now.num_waiting) != (
            before.num_running,
            before.num_waiting,
        ):
            self._on_quiet_change()
        self._note_idle()

    def _dead(self) -> None:
        sinks, self._sinks = self._sinks, {}
        for key, sink in sinks.items():
            self._say(sink, Failed(key, errors.Internal("the engine's loop died")))
        self._note_idle()
        self._on_death()

    def _note_idle(self) -> None:
        if not self._sinks:
            self._is_idle.set()

    # --- on the engine's thread ---

    def _run(self) -> None:
        try:
            self._steps()
        except Exception:
            log.exception("the engine's loop died")
            self._call(self._dead)

    def _steps(self) -> None:
        rates, digests_at = Rates(), 0.0
        is_blocked = False
        while True:
            commands = self._next_commands(_BLOCKED_WAIT_S if is_blocked else None)
            if commands is None:
                return
            refused = [event for command in commands if (event := self._obey(command))]
            events, stats = self._step()
            rates.add(stats)
            is_blocked = not (events or stats.num_prefill_tokens or stats.num_decode_tokens)
            if is_blocked and not commands:
                continue
            load: EngineLoad = self._engine.load
            digests: list[int] | None = None
            now = time.monotonic()
            if now - digests_at > _DIGESTS_EVERY_S or not self._engine.has_work:
                digests_at, digests = now, self._engine.kv.digests(_MAX_DIGESTS)
            frame = Frame(stats, Load(load, rates.prefill, rates.decode), [*refused, *events])
            if not self._hand_over(frame, digests):
                return

    def _next_commands(self, blocked_wait_s: float | None) -> list[_Submit | _Abort] | None:
        """What came in; waits for something while there is nothing to do. None: stop."""
        with self._wake:
            if blocked_wait_s is not None and self._engine.has_work:
                self._wake.wait_for(lambda: self._inbox or self._is_closing, blocked_wait_s)
            while not (self._inbox or self._is_closing or self._engine.has_work):
                self._wake.wait()
            if self._is_closing:
                return None
            commands, self._inbox = list(self._inbox), deque()
            return commands

    def _obey(self, command: _Submit | _Abort) -> Event | None:
        if isinstance(command, _Abort):
            self._engine.abort(command.key)
            return None
        try:
            self._engine.submit(command.request, command.matcher, submitted_at=command.came_at)
        except errors.CandorError as error:
            return Failed(command.request.key, error)
        except Exception as error:
            log.exception("submit failed", extra={"key": command.request.key})
            return Failed(command.request.key, error)
        return None

    def _step(self) -> tuple[list[Event], StepStats]:
        try:
            return self._engine.step()
        except Exception as error:
            # A fault of ours: what was running cannot be trusted any more, the loop can.
            log.exception("step failed")
            self._engine.fail_all(error)
            return self._engine.step()

    def _hand_over(self, frame: Frame, digests: list[int] | None) -> bool:
        """Give a step's frame to the event loop; False when this backend is closing."""
        while not self._unread.acquire(timeout=1.0):
            if self._is_closing:
                return False
        return self._call(self._deliver, frame, digests)

    def _call(self, act: Callable[..., None], *args: object) -> bool:
        """Have the event loop do something; False when it is gone."""
        try:
            self._loop.call_soon_threadsafe(act, *args)
        except RuntimeError:
            return False
        return True
