"""What /metrics shows: this process's own counts, and the scheduler's numbers at the time of the scrape.

The vllm:* families carry the names that dashboards for that server ask for; the candor_* families say what
those cannot. Counting happens on the event loop only, so plain numbers do: no locks on the hot path. No
label ever holds anything of a request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from gateway.catalog import Catalog, ModelCard, Stats, WorkerCard

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
LATENCY_S = (1, 2.5, 5, 10, 15, 20, 30, 40, 50, 60)
_CACHE_LABELS = (
    "block_size",
    "cache_dtype",
    "cpu_offload_gb",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "num_cpu_blocks",
    "num_gpu_blocks",
    "num_gpu_blocks_override",
    "sliding_window",
    "swap_space_bytes",
)
PARAMETERS = (1, 2, 5, 10, 20)


def token_bounds(most: int) -> tuple[float, ...]:
    """The 1-2-5 series up to `most`."""
    bounds, decade = [], 1
    while decade <= most:
        bounds += [decade * m for m in (1, 2, 5) if decade * m <= most]
        decade *= 10
    return tuple(bounds)


class Histogram:
    """Counts per bucket, and the sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Write the cumulative form into `family`."""
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        family.add_metric(labels, buckets=buckets, sum_value=self._sum)


class ModelMetrics:
    """What this process has counted for one model."""

    def __init__(self, max_model_len: int) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.successes: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0})
        self.first_token_s = Histogram(TTFT_S)
        self.per_token_s = Histogram(PER_TOKEN_S)
        self.latency_s = Histogram(LATENCY_S)
        lengths = token_bounds(max_model_len)
        self.request_prompt_tokens = Histogram(lengths)
        self.request_generation_tokens = Histogram(lengths)
        self.best_of = Histogram(PARAMETERS)
        self.n = Histogram(PARAMETERS)


@dataclass
class Metrics:
    """The process's counts."""

    models: dict[str, ModelMetrics] = field(default_factory=dict)
    http_requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(route, status) → requests."""
    open_streams: int = 0
    client_disconnects: int = 0
    slow_clients: int = 0

    def of(self, model: ModelCard) -> ModelMetrics:
        """The counts of one model."""
        if model.name not in self.models:
            self.models[model.name] = ModelMetrics(model.max_model_len)
        return self.models[model.name]

    def render(self, catalog: Catalog, stats: Stats | None) -> bytes:
        """The exposition text. `stats` None: the scheduler could not be asked."""
        for model in catalog.models:
            if not model.is_embedding:
                self.of(model)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Scrape(self, stats))
        return generate_latest(registry)


class _Scrape:
    """One scrape, as prometheus_client wants it."""

    def __init__(self, metrics: Metrics, stats: Stats | None) -> None:
        self._metrics, self._stats = metrics, stats

    def collect(self) -> Iterator[Metric]:
        yield from self._counters()
        yield from self._histograms()
        yield from self._gateway()
        if self._stats is not None:
            yield from self._vllm_gauges(self._stats)
            yield from self._scheduler(self._stats)

    def _counters(self) -> Iterator[Metric]:
        prompt = CounterMetricFamily(
            "vllm:prompt_tokens", "Prompt tokens processed.", labels=["model_name"]
        )
        generated = CounterMetricFamily(
            "vllm:generation_tokens", "Tokens generated.", labels=["model_name"]
        )
        success = CounterMetricFamily(
            "vllm:request_success", "Sequences ended.", labels=["model_name", "finished_reason"]
        )
        for name, counts in self._metrics.models.items():
            prompt.add_metric([name], counts.prompt_tokens)
            generated.add_metric([name], counts.generation_tokens)
            for reason, value in counts.successes.items():
                success.add_metric([name, reason], value)
        yield from (prompt, generated, success)

    def _histograms(self) -> Iterator[Metric]:
        for attribute, name, text in (
            ("first_token_s", "time_to_first_token_seconds", "Time to the first token."),
            ("per_token_s", "time_per_output_token_seconds", "Time per further token."),
            ("latency_s", "e2e_request_latency_seconds", "Time of a whole request."),
            ("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of a request."),
            (
                "request_generation_tokens",
                "request_generation_tokens",
                "Tokens generated per sequence.",
            ),
            ("best_of", "request_params_best_of", "best_of of a request."),
            ("n", "request_params_n", "n of a request."),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            for model, counts in self._metrics.models.items():
                getattr(counts, attribute).add_to(family, [model])
            yield family

    def _gateway(self) -> Iterator[Metric]:
        metrics = self._metrics
        requests = CounterMetricFamily(
            "candor_http_requests", "Requests answered.", labels=["route", "status"]
        )
        for (route, status), value in metrics.http_requests.items():
            requests.add_metric([route, status], value)
        yield requests
        yield GaugeMetricFamily(
            "candor_open_streams", "Requests being generated here.", value=metrics.open_streams
        )
        yield CounterMetricFamily(
            "candor_client_disconnects",
            "Requests whose client left before the end.",
            value=metrics.client_disconnects,
        )
        yield CounterMetricFamily(
            "candor_slow_clients",
            "Requests cancelled because their client did not read.",
            value=metrics.slow_clients,
        )
        yield GaugeMetricFamily(
            "candor_scheduler_up",
            "Whether the scheduler answered this scrape.",
            value=float(self._stats is not None),
        )

    def _vllm_gauges(self, stats: Stats) -> Iterator[Metric]:
        names = list(self._metrics.models)
        groups = {name: [w for w in stats.workers if w.model == name] for name in names}

        def gauge(name: str, text: str, values: dict[str, float]) -> Metric:
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            for model, value in values.items():
                family.add_metric([model], value)
            return family

        def total(attribute: str) -> dict[str, float]:
            return {n: float(sum(getattr(w, attribute) for w in groups[n])) for n in names}

        waiting = total("num_waiting")
        if names:
            # The queue is one for all models; it shows under the first.
            waiting[names[0]] += stats.num_queued
        yield gauge("num_requests_running", "Sequences running.", total("num_running"))
        yield gauge("num_requests_waiting", "Requests waiting.", waiting)
        yield gauge(
            "num_requests_swapped", "Sequences swapped out; never.", dict.fromkeys(names, 0.0)
        )
        yield gauge(
            "gpu_cache_usage_perc",
            "Share of KV in use; 1 is full.",
            {n: _ratio(groups[n], "kv_used_tokens", "kv_total_tokens", 0.0) for n in names},
        )
        yield gauge("cpu_cache_usage_perc", "Swapped KV; none.", dict.fromkeys(names, 0.0))
        yield gauge(
            "cpu_prefix_cache_hit_rate", "Off: nothing is swapped.", dict.fromkeys(names, -1.0)
        )
        yield gauge(
            "gpu_prefix_cache_hit_rate",
            "Share of prompt tokens whose KV was already there.",
            {n: _ratio(groups[n], "cached_tokens", "prompt_tokens", -1.0) for n in names},
        )
        yield gauge(
            "avg_prompt_throughput_toks_per_s", "Prefill rate, measured.", total("prefill_rate")
        )
        yield gauge(
            "avg_generation_throughput_toks_per_s", "Decode rate, measured.", total("decode_rate")
        )
        preemptions = CounterMetricFamily(
            "vllm:num_preemptions", "Sequences preempted.", labels=["model_name"]
        )
        for name, value in total("num_preemptions").items():
            preemptions.add_metric([name], value)
        yield preemptions
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "Configuration of the KV store.", labels=_CACHE_LABELS
        )
        kv_tokens = sum(w.kv_total_tokens for w in stats.workers)
        # KV is counted in tokens here, so a block is one; what has no meaning here is "None".
        known = {"block_size": "1", "num_gpu_blocks": str(kv_tokens), "num_cpu_blocks": "0"}
        known |= {"enable_prefix_caching": "True", "swap_space_bytes": "0"}
        config.add_metric([known.get(label, "None") for label in _CACHE_LABELS], 1)
        yield config
        for name, text in (
            ("draft_acceptance_rate", "Share of drafted tokens accepted."),
            ("efficiency", "Tokens emitted over the most that could be."),
        ):
            yield GaugeMetricFamily(f"vllm:spec_decode_{name}", text, labels=["model_name"])
        for name in ("accepted", "draft", "emitted"):
            text = f"Speculative tokens: {name}."
            name = f"vllm:spec_decode_num_{name}_tokens"
            yield CounterMetricFamily(name, text, labels=["model_name"])

    def _scheduler(self, stats: Stats) -> Iterator[Metric]:
        states = Counter(w.state for w in stats.workers)
        workers = GaugeMetricFamily("candor_workers", "Workers by state.", labels=["state"])
        for state in ("starting", "ready", "draining", "lost"):
            workers.add_metric([state], states[state])
        yield workers
        for name, text, value in (
            ("candor_queue_requests", "Requests queued in the scheduler.", stats.num_queued),
            ("candor_queue_tokens", "Prompt tokens queued.", stats.num_queued_tokens),
            ("candor_queue_limit", "Most requests that may be queued.", stats.max_queued),
            ("candor_requests_placed", "Requests placed on workers.", stats.num_running),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        for name, text, value in (
            ("candor_requests_refused", "Requests refused at admission.", stats.num_refused),
            ("candor_requests_cancelled", "Requests cancelled.", stats.num_cancelled),
        ):
            yield CounterMetricFamily(name, text, value=value)
        for attribute, text in (
            ("slots", "Sequences that can run at the same time."),
            ("num_running", "Sequences running."),
            ("num_waiting", "Sequences waiting inside the worker."),
            ("num_assigned", "Requests placed on the worker."),
            ("kv_used_tokens", "KV tokens in use."),
            ("kv_total_tokens", "KV tokens there are."),
        ):
            name = attribute.removeprefix("num_")
            family = GaugeMetricFamily(
                f"candor_worker_{name}", text, labels=["worker", "card", "model"]
            )
            for worker in stats.workers:
                family.add_metric(
                    [worker.worker_id, worker.card, worker.model], getattr(worker, attribute)
                )
            yield family


def _ratio(workers: Sequence[WorkerCard], part: str, whole: str, without: float) -> float:
    divisor = sum(getattr(w, whole) for w in workers)
    return sum(getattr(w, part) for w in workers) / divisor if divisor else without
