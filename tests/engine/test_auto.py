"""The choice of a runner: the faster one stays, and what cannot be loaded is not timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from engine.runners import Runner, StepInput, auto, open_runner


class Timed:
    """Takes as long for a step as it was told; the clock is the test's."""

    vocab_size, max_rows = 100, 8

    def __init__(self, name: str, step_s: float, clock: list[float]) -> None:
        self.name, self._step_s, self._clock = name, step_s, clock
        self.is_closed = False
        self.lengths = np.zeros(self.max_rows, int)

    def forward(self, step: StepInput) -> Any:
        self._clock[0] += self._step_s
        np.add.at(self.lengths, step.rows, 1)

    def trim(self, row: int, num_tokens: int) -> None:
        self.lengths[row] = num_tokens

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("engine.runners.auto.time.perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(("native_s", "picked"), [(0.01, "native"), (0.03, "llamacpp")])
def test_the_faster_one_stays_and_the_other_is_closed_with_nothing_left_in_it(
    tmp_path: Path, clock: list[float], native_s: float, picked: str
) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    made = {"native": Timed("native", native_s, clock), "llamacpp": Timed("llamacpp", 0.02, clock)}
    chosen = auto.choose(str(model), 4, lambda name: cast(Runner, made[name]))
    assert chosen.name == picked
    assert [r.name for r in made.values() if r.is_closed] == [n for n in made if n != picked]
    assert not any(r.lengths.any() for r in made.values())


def test_a_model_the_native_runner_does_not_know_goes_to_llamacpp_untimed(
    tmp_path: Path, clock: list[float]
) -> None:
    model = tmp_path / "m.gguf"
    model.touch()

    def load(name: str) -> Runner:
        if name == "native":
            raise ValueError("a 'mamba' model")
        return cast(Runner, Timed(name, 1, clock))

    assert auto.choose(str(model), 4, load).name == "llamacpp"
    assert clock == [0.0]


def test_weights_too_large_for_float32_are_not_even_loaded(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"x" * 1000)
    monkeypatch.setattr(auto, "_free_memory", lambda: 10_000)
    loaded: list[str] = []

    def load(name: str) -> Runner:
        loaded.append(name)
        return cast(Runner, Timed(name, 1, clock))

    auto.choose(str(model), 4, load)
    assert loaded == ["llamacpp"]


def test_where_the_batch_must_not_matter_native_is_taken_untimed_or_nothing(
    tmp_path: Path, clock: list[float]
) -> None:
    native = cast(Runner, Timed("native", 1, clock))
    loaded: list[str] = []

    def load(name: str) -> Runner:
        loaded.append(name)
        return native

    assert auto.choose(str(tmp_path), 4, load, batch_invariant=True) is native
    assert loaded == ["native"] and clock == [0.0]

    def refuse(name: str) -> Runner:
        raise ValueError(f"{name}: a 'mamba' model")

    with pytest.raises(ValueError, match="native: a 'mamba' model"):
        auto.choose(str(tmp_path), 4, refuse, batch_invariant=True)


@pytest.mark.model
def test_a_runner_whose_numbers_depend_on_the_batch_is_refused_by_name(model_path: Path) -> None:
    def attempt(name: str) -> Runner:
        return open_runner(
            name,
            str(model_path),
            max_rows=1,
            kv_tokens=64,
            max_batch_tokens=16,
            max_model_len=64,
            threads=1,
            batch_invariant=True,
        )

    with pytest.raises(ValueError, match=r"batch_invariant is on.*runner llamacpp depend"):
        attempt("llamacpp")
    runner = attempt("synthetic")
    assert runner.is_batch_invariant
    runner.close()


def test_an_unknown_runner_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown runner 'warp', none of auto, llamacpp, native"):
        open_runner(
            "warp",
            "x.gguf",
            max_rows=1,
            kv_tokens=1,
            max_batch_tokens=1,
            max_model_len=None,
            threads=1,
        )
