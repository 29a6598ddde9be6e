"""What passes cost is measured in a row that is given back, within what the runner can hold."""

from __future__ import annotations

import pytest

from engine.core.speculation import StepCosts
from engine.runners import StepInput
from engine.runners.timing import SIZES, pass_times
from tests.fakes.engine import ScriptedRunner, noise


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("engine.runners.timing.time.perf_counter", lambda: now[0])
    return now


def test_each_size_is_timed_and_nothing_stays(clock: list[float]) -> None:
    def lasts(step: StepInput) -> None:
        clock[0] += 0.005 + 0.001 * len(step.token_ids)

    runner = ScriptedRunner(noise, before_forward=lasts)
    times = pass_times(runner)
    assert [size for size, _ in times] == list(SIZES)
    assert StepCosts(times)(5) == pytest.approx(0.010)
    assert runner.books.used == 0 and runner.books.lengths[0] == 0


def test_sizes_stay_within_the_smallest_limit(clock: list[float]) -> None:
    runner = ScriptedRunner(noise, kv_tokens=23)
    assert [size for size, _ in pass_times(runner)] == [1, 2, 3, 4, 6]
    tiny = ScriptedRunner(noise, max_batch_tokens=4)
    assert pass_times(tiny) == []
