"""What each tenant may use in a minute and at once: token buckets, refilled by the time that passes.

Knows tenants and numbers. What is refused here was never charged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from candor import errors
from scheduler.core.types import TenantLimits

ANY_TENANT = "*"
"""Stands for every tenant that has no entry of its own; each has its own buckets all the same."""
_MINUTE_S = 60.0
_UNMEASURED_S = 1.0


@dataclass(slots=True)
class _Bucket:
    """Holds at most a minute's worth. May be in debt: output is known only when it is there."""

    per_minute: float
    level: float
    at: float

    def refill(self, now: float) -> None:
        gained = (now - self.at) * self.per_minute / _MINUTE_S
        self.level, self.at = min(self.per_minute, self.level + gained), now

    def wait_s(self, wanted: float) -> float:
        """Until so much is there; more than a full bucket waits for a full one."""
        lacking = min(wanted, self.per_minute) - self.level
        return max(0.0, lacking * _MINUTE_S / self.per_minute) if lacking > 1e-9 else 0.0


@dataclass(slots=True)
class _Use:
    requests: _Bucket | None
    tokens: _Bucket | None
    num_in_flight: int = 0


class Quotas:
    """The use of all tenants that have a limit. Idle ones are forgotten when they are many."""

    def __init__(self, limits: Mapping[str, TenantLimits], max_tenants: int) -> None:
        self._limits = limits
        self._max_tenants = max_tenants
        self._uses: OrderedDict[str, _Use] = OrderedDict()

    def limits_of(self, tenant: str) -> TenantLimits:
        """What applies to the tenant."""
        return self._limits.get(tenant) or self._limits.get(ANY_TENANT) or _UNLIMITED

    def weight(self, tenant: str) -> float:
        """The tenant's share where tenants compete."""
        return self.limits_of(tenant).weight

    def check(
        self, now: float, tenant: str, num_prompt_tokens: int, seat_s: float | None = None
    ) -> None:
        """Raise when the tenant has used up what it may. `seat_s`: how long a request stays, if measured."""
        if not self._limits:
            return
        limits, use = self.limits_of(tenant), self._use(now, tenant)
        if limits.concurrent is not None and use.num_in_flight >= limits.concurrent:
            raise _refusal(
                f"tenant `{tenant}` has {use.num_in_flight} requests in flight, "
                f"its limit is {limits.concurrent}",
                seat_s or _UNMEASURED_S,
            )
        for bucket, wanted, unit in (
            (use.requests, 1, "requests"),
            (use.tokens, num_prompt_tokens, "tokens"),
        ):
            if bucket is None:
                continue
            bucket.refill(now)
            wait_s = bucket.wait_s(wanted)
            if wait_s > 0:
                raise _refusal(
                    f"tenant `{tenant}` may use {bucket.per_minute:g} {unit} a minute and has "
                    f"{max(0.0, bucket.level):.0f} left; this request takes {wanted}",
                    wait_s,
                )

    def admitted(self, now: float, tenant: str, num_prompt_tokens: int) -> None:
        """Charge a request that was let in."""
        if not self._limits:
            return
        use = self._use(now, tenant)
        use.num_in_flight += 1
        if use.requests is not None:
            use.requests.level -= 1
        if use.tokens is not None:
            use.tokens.level -= num_prompt_tokens

    def ended(self, now: float, tenant: str, num_output_tokens: int) -> None:
        """The request is over; what it generated is charged now."""
        if not self._limits:
            return
        use = self._uses[tenant]
        use.num_in_flight -= 1
        if use.tokens is not None:
            use.tokens.refill(now)
            use.tokens.level -= num_output_tokens

    def _use(self, now: float, tenant: str) -> _Use:
        use = self._uses.get(tenant)
        if use is None:
            self._forget_one(now)
            limits = self.limits_of(tenant)
            use = self._uses[tenant] = _Use(
                _bucket(now, limits.requests_per_minute), _bucket(now, limits.tokens_per_minute)
            )
        self._uses.move_to_end(tenant)
        return use

    def _forget_one(self, now: float) -> None:
        """Make room: the tenant that was idle longest, as only then its buckets are likely to be full."""
        if len(self._uses) < self._max_tenants:
            return
        idle = next((t for t, use in self._uses.items() if not use.num_in_flight), None)
        if idle is not None:
            del self._uses[idle]


_UNLIMITED = TenantLimits()


def _bucket(now: float, per_minute: float | None) -> _Bucket | None:
    return None if per_minute is None else _Bucket(per_minute, per_minute, now)


def _refusal(message: str, retry_after_s: float) -> errors.ResourceExhausted:
    return errors.ResourceExhausted(
        message, reason="TENANT_QUOTA", field="tenant", retry_after_s=retry_after_s
    )
