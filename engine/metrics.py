"""A worker's own /metrics: what its steps and its requests cost, and how full it is.

Knows frames and Prometheus; nothing of how either is made. Counters that the engine keeps anyway are read when
somebody asks, so a step pays for four histogram entries and no more. Without an address nothing listens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from candor.settings import host_port
from engine.backends import Frame
from engine.core.types import EngineLoad, Failed, Finished

PORTS_TRIED = 64
"""Workers of one host may share a setting: each takes the first free port from the given one on."""
_STEP_US = (10, 25, 50, 100, 250, 500, 1e3, 2.5e3, 5e3, 1e4, 2.5e4, 5e4, 1e5, 2.5e5, 5e5, 1e6)
_REQUEST_US = tuple(10.0**power * digit for power in range(2, 8) for digit in (1, 2.5, 5))


class EngineMetrics:
    """Collects; `observe` is called with every frame of the backend, on one thread."""

    def __init__(
        self, *, model: str, runner: str, is_batch_invariant: bool, speculates: bool
    ) -> None:
        """The labels of `candor_engine_info`."""
        self.registry = CollectorRegistry()
        self._info = {
            "model": model,
            "runner": runner,
            "batch_invariant": str(is_batch_invariant).lower(),
            "speculation": "lookup" if speculates else "off",
        }
        self._load = EngineLoad()
        self._step_seq = 0
        steps = Histogram(
            "candor_engine_step_microseconds",
            "Time of a step, by phase",
            ["phase"],
            buckets=_STEP_US,
            registry=self.registry,
        )
        self._plan, self._forward, self._sample, self._emit = (
            steps.labels(phase) for phase in ("plan", "forward", "sample", "emit")
        )
        spent = Histogram(
            "candor_engine_request_microseconds",
            "Time of a finished request, by phase",
            ["phase"],
            buckets=_REQUEST_US,
            registry=self.registry,
        )
        self._queue, self._prefill, self._decode = (
            spent.labels(phase) for phase in ("queue", "prefill", "decode")
        )
        ended = Counter(
            "candor_engine_requests",
            "Requests that ended, aborted ones left out",
            ["outcome"],
            registry=self.registry,
        )
        self._finished, self._failed = ended.labels("finished"), ended.labels("failed")
        self.registry.register(_Reader(self))

    def observe(self, frame: Frame) -> None:
        """Take a frame into account."""
        self._load = frame.load.engine
        stats = frame.stats
        if stats.step_seq != self._step_seq:  # a frame without a forward pass repeats the number
            self._step_seq = stats.step_seq
            self._plan.observe(stats.plan_s * 1e6)
            self._forward.observe(stats.forward_s * 1e6)
            self._sample.observe(stats.sample_s * 1e6)
            self._emit.observe(stats.emit_s * 1e6)
        for event in frame.events:
            if isinstance(event, Finished):
                self._finished.inc()
                self._queue.observe(event.queue_s * 1e6)
                self._prefill.observe(event.prefill_s * 1e6)
                self._decode.observe(event.decode_s * 1e6)
            elif isinstance(event, Failed):
                self._failed.inc()

    def families(self) -> Iterator[Metric]:
        """What is read from the engine's own counts at the time of asking."""
        load, totals = self._load, self._load.totals
        info = GaugeMetricFamily("candor_engine_info", "What runs here", labels=list(self._info))
        info.add_metric(list(self._info.values()), 1)
        yield info
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts that were taken", totals.prompt_tokens),
            ("generated_tokens", "Tokens that were generated", totals.generated_tokens),
            ("cached_tokens", "Prompt tokens whose KV was there already", totals.cached_tokens),
            ("draft_tokens", "Tokens that were drafted", totals.draft_tokens),
            ("accepted_draft_tokens", "Drafted tokens that were right", totals.accepted_tokens),
            ("preemptions", "Rows that were given up for want of KV", totals.num_preemptions),
            ("failed_steps", "Forward passes that failed", totals.num_failed_steps),
        ):
            yield CounterMetricFamily(f"candor_engine_{name}", text, value=value)
        yield _states(
            "candor_engine_sequences",
            "Sequences that are open, by state",
            {"running": load.num_running, "waiting": load.num_waiting},
        )
        free = load.kv_total_tokens - load.kv_used_tokens - load.kv_cached_tokens
        yield _states(
            "candor_engine_kv_tokens",
            "Token positions of the KV store, by state",
            {"used": load.kv_used_tokens, "cached": load.kv_cached_tokens, "free": free},
        )


class _Reader:
    """The part that a registry asks."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        yield from self._metrics.families()


class MetricsServer:
    """The HTTP door, on a thread of its own."""

    def __init__(self, metrics: EngineMetrics, address: str) -> None:
        """Raises OSError when neither the port nor one of its neighbours is free."""
        host, first = host_port(address)
        self._server, self._thread = _listen(metrics, host, first)
        port = self._server.server_port
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _listen(metrics: EngineMetrics, host: str, first: int) -> tuple[WSGIServer, threading.Thread]:
    for port in range(first, first + PORTS_TRIED):
        try:
            return start_http_server(port, host, metrics.registry)
        except OSError:
            if port == first + PORTS_TRIED - 1 or port == 65535:
                raise
    raise AssertionError("unreachable")


def _states(name: str, text: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["state"])
    for state, value in values.items():
        family.add_metric([state], value)
    return family
