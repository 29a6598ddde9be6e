"""The supervisor: order, restarts with back-off, refusal to loop on a wrong setting, clean stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from candor.cli.supervisor import (
    MAX_LINE_BYTES,
    Backoff,
    Service,
    StartFailed,
    State,
    Status,
    Supervisor,
    readable,
)

_SAY_UP = "print('up', flush=True); signal.pause()"
SLEEPER = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); {_SAY_UP}"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {_SAY_UP}"


class World:
    """A supervisor over small Python programs, with everything it said."""

    def __init__(self, tmp_path: Path, programs: dict[str, str], **options: float) -> None:
        self.changes: list[tuple[str, State]] = []
        self.changed = asyncio.Event()
        self.up: set[str] = set()
        self.supervisor = Supervisor(
            [
                Service(name, [sys.executable, "-c", program], self._ready(name))
                for name, program in programs.items()
            ],
            log_dir=tmp_path / "logs",
            on_change=self._on_change,
            on_line=self._on_line,
            start_timeout_s=options.get("start_timeout_s", 20),
            stop_grace_s=options.get("stop_grace_s", 10),
        )

    def _ready(self, name: str) -> Callable[[int], Awaitable[bool]]:
        async def ask(_pid: int) -> bool:
            return name in self.up

        return ask

    def _on_change(self, service: Service, status: Status) -> None:
        if status.state is not State.READY:
            self.up.discard(service.name)
        self.changes.append((service.name, status.state))
        self.changed.set()

    def _on_line(self, service: Service, line: str) -> None:
        if line == "up":
            self.up.add(service.name)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


async def test_services_start_in_order_and_all_stop(tmp_path: Path) -> None:
    world = World(tmp_path, {"a": SLEEPER, "b-0": SLEEPER, "b-1": SLEEPER})
    await world.supervisor.start()
    pids = [status.pid for status in world.supervisor.status.values()]
    await world.supervisor.stop()
    order = world.changes.index
    assert order(("a", State.READY)) < order(("b-0", State.STARTING))
    assert {s.state for s in world.supervisor.status.values()} == {State.STOPPED}
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert (tmp_path / "logs" / "a.log").read_text() == "up\n"


async def test_a_killed_process_is_started_again(tmp_path: Path) -> None:
    world = World(tmp_path, {"a": SLEEPER})
    await world.supervisor.start()
    status = world.supervisor.status["a"]
    first = status.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await world.until(lambda: status.state is State.READY and status.pid not in (None, first))
    assert status.restarts == 1
    await world.supervisor.stop()


async def test_a_line_without_end_is_cut_and_kills_nobody(tmp_path: Path) -> None:
    world = World(
        tmp_path, {"a": SLEEPER.replace("print('up'", "print('x' * 300_000); print('up'")}
    )
    await world.supervisor.start()
    status = world.supervisor.status["a"]
    assert [len(line) for line in status.tail] == [MAX_LINE_BYTES, 2]
    assert status.restarts == 0
    await world.supervisor.stop()


async def test_a_wrong_setting_is_reported_at_once_and_not_tried_again(tmp_path: Path) -> None:
    program = "import sys; print('svc: --slots=0 is below 1'); sys.exit(2)"
    world = World(tmp_path, {"a": program})
    with pytest.raises(StartFailed, match="--slots=0 is below 1"):
        await world.supervisor.start()
    await world.supervisor.stop()
    assert [state for _, state in world.changes].count(State.STARTING) == 1


async def test_a_service_that_never_becomes_ready_ends_the_start(tmp_path: Path) -> None:
    world = World(tmp_path, {"a": SLEEPER.replace("'up'", "'hm'")}, start_timeout_s=0.5)
    with pytest.raises(StartFailed, match=r"a not ready after 0\.5 s"):
        await world.supervisor.start()
    await world.supervisor.stop()


async def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    world = World(tmp_path, {"a": STUBBORN}, stop_grace_s=0.3)
    await world.supervisor.start()
    await world.supervisor.stop()
    assert world.supervisor.status["a"].exit_code == -signal.SIGKILL


def test_backoff_doubles_up_to_its_limit_and_forgets_after_a_long_life() -> None:
    backoff = Backoff(first_s=1, most_s=4, healthy_s=30)
    assert [backoff.after_death(0.1) for _ in range(4)] == [1, 2, 4, 4]
    assert backoff.after_death(31) == 1


def test_json_log_lines_are_made_readable_and_others_kept() -> None:
    assert readable('{"level": "error", "message": "no"}') == "error: no"
    assert readable("Traceback: [x]") == "Traceback: [x]"
    assert readable("[1]") == "[1]"
