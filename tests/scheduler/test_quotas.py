"""What tenants may use: per minute, at once; and how the limits are written down."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from candor import errors, settings
from scheduler.config import Config
from scheduler.core import POLICIES, Scheduler
from scheduler.core.quotas import Quotas
from scheduler.core.types import (
    Limits,
    Model,
    Report,
    Request,
    TenantLimits,
    WorkerSpec,
    WorkerState,
)


def refused(quotas: Quotas, now: float, tenant: str, tokens: int = 1) -> errors.CandorError:
    with pytest.raises(errors.ResourceExhausted) as caught:
        quotas.check(now, tenant, tokens)
    assert caught.value.reason == "TENANT_QUOTA" and caught.value.field == "tenant"
    return caught.value


def test_requests_per_minute_refill_with_time() -> None:
    quotas = Quotas({"a": TenantLimits(requests_per_minute=2)}, 10)
    for _ in range(2):
        quotas.check(0.0, "a", 1)
        quotas.admitted(0.0, "a", 1)
    assert refused(quotas, 0.0, "a").retry_after_s == pytest.approx(30.0)
    assert refused(quotas, 20.0, "a").retry_after_s == pytest.approx(10.0)
    quotas.check(30.0, "a", 1)
    quotas.check(0.0, "b", 1)  # without limits


def test_tokens_count_prompt_at_once_and_output_at_the_end() -> None:
    quotas = Quotas({"a": TenantLimits(tokens_per_minute=600)}, 10)
    quotas.check(0.0, "a", 500)
    quotas.admitted(0.0, "a", 500)
    assert refused(quotas, 0.0, "a", 200).retry_after_s == pytest.approx(10.0)
    quotas.ended(0.0, "a", 300)
    error = refused(quotas, 0.0, "a", 1)
    assert error.retry_after_s == pytest.approx(20.1)
    assert "600 tokens a minute and has 0 left; this request takes 1" in error.message


def test_a_prompt_beyond_the_minutes_worth_waits_for_a_full_bucket() -> None:
    quotas = Quotas({"a": TenantLimits(tokens_per_minute=100)}, 10)
    quotas.check(0.0, "a", 1000)
    quotas.admitted(0.0, "a", 1000)
    assert refused(quotas, 0.0, "a", 1000).retry_after_s == pytest.approx(600.0)


def test_everybody_else_has_buckets_of_their_own() -> None:
    quotas = Quotas({"*": TenantLimits(concurrent=1), "a": TenantLimits()}, 10)
    for tenant in ("x", "y"):
        quotas.check(0.0, tenant, 1)
        quotas.admitted(0.0, tenant, 1)
    for _ in range(3):
        quotas.check(0.0, "a", 1)
        quotas.admitted(0.0, "a", 1)
    assert refused(quotas, 0.0, "x").retry_after_s == 1.0
    quotas.ended(0.0, "x", 0)
    quotas.check(0.0, "x", 1)


def test_tenants_in_flight_are_never_forgotten() -> None:
    quotas = Quotas({"*": TenantLimits(concurrent=1)}, 2)
    quotas.admitted(0.0, "busy", 1)
    for n in range(10):
        quotas.admitted(0.0, f"t{n}", 1)
        quotas.ended(0.0, f"t{n}", 1)
    refused(quotas, 0.0, "busy")


def machine(**tenants: TenantLimits) -> Scheduler:
    core = Scheduler(
        Limits(window_slack=0, max_queued_requests=1),
        POLICIES["expected_wait"].make(),
        random.Random(1),
        tenants=tenants,
    )
    model = Model("m", max_model_len=100, vocab_size=10)
    worker, _ = core.worker_registered(0.0, WorkerSpec("w", "i", model, 1))
    core.worker_linked(0.0, worker)
    core.worker_reported(0.0, worker, Report(WorkerState.READY, 0, True))
    return core


def ask(request_id: str, **fields: Any) -> Request:
    return Request(request_id, "m", 3, 4, **fields)


def test_the_core_counts_what_is_in_flight_and_refunds_refusals() -> None:
    core = machine(a=TenantLimits(concurrent=2, requests_per_minute=3))
    core.submit(0.0, ask("1", tenant="a"))
    core.submit(0.0, ask("2", tenant="a"))
    with pytest.raises(errors.ResourceExhausted, match="2 requests in flight"):
        core.submit(0.0, ask("3", tenant="a"))
    record = core.find("1")
    assert record is not None
    core.cancel(0.0, record)
    with pytest.raises(errors.NotFound):
        core.submit(0.0, Request("x", "unknown", 3, 4, tenant="a"))
    core.submit(0.0, ask("3", tenant="a"))  # the third; refusals cost nothing
    for left in ("2", "3"):
        record = core.find(left)
        assert record is not None
        core.cancel(0.0, record)
    with pytest.raises(errors.ResourceExhausted, match="3 requests a minute"):
        core.submit(0.0, ask("4", tenant="a"))
    core.submit(0.0, ask("4", tenant="b"))


def test_limits_come_from_the_setting_or_a_file(tmp_path: Path) -> None:
    text = '{"a": {"requests_per_minute": 60, "weight": 2.5}, "*": {"concurrent": 4}}'
    wanted = {
        "a": TenantLimits(requests_per_minute=60, weight=2.5),
        "*": TenantLimits(concurrent=4),
    }
    assert Config(tenants=text).tenant_limits() == wanted
    (tmp_path / "tenants.json").write_text(text)
    assert Config(tenants=f"@{tmp_path}/tenants.json").tenant_limits() == wanted
    assert Config().tenant_limits() == {}


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"a": 1}', "`a` is not an object"),
        ('{"a": {"rpm": 1}}', "`a` has no limit rpm"),
        ('{"a": {"concurrent": 1.5}}', "concurrent is 1.5"),
        ('{"a": {"weight": 0}}', "weight is 0, it must be a positive number"),
        ('{"a": {"weight": true}}', "weight is True"),
        ("@/nowhere/at/all", "cannot be read"),
    ],
)
def test_a_wrong_limit_is_named(text: str, words: str) -> None:
    with pytest.raises(settings.SettingError, match=words):
        Config(tenants=text)
