"""`/metrics`: vLLM's names, because routers and dashboards are drawn for them, with `kvarto:*` beside them.

Counts are plain integers and lists; text is made at a scrape by one collector. Labels are bounded: clients can invent
neither methods nor paths nor models.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvarto.core.errors import Overloaded
from kvarto.engine.adapter_quota import QUOTA_CODE
from kvarto.engine.messages import Ready, Stats
from kvarto.engine.open_request import OpenRequest
from kvarto.engine.scheduler import WAIT_CODE

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
INTERVALS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
CHOICES = (1, 2, 5, 10, 20, 50, 100)
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


class Histogram:
    """Counts by upper bound, and the sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts in Prometheus' form, and the sum."""
        total = 0
        listed: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            listed.append((bound, total))
        return listed, self._sum


class ServerMetrics:
    """Counts of one server; the engine's client tells it about requests, the middleware about HTTP."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_cached_tokens = 0
        self.num_engine_restarts = 0
        self.ended: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.http: Counter[tuple[str, str, int]] = Counter()
        self.histograms = {
            "time_to_first_token_seconds": Histogram(SECONDS),
            "inter_token_latency_seconds": Histogram(INTERVALS_S),
            "request_time_per_output_token_seconds": Histogram(INTERVALS_S),
            "e2e_request_latency_seconds": Histogram(REQUEST_S),
            "request_queue_time_seconds": Histogram(REQUEST_S),
            "request_prefill_time_seconds": Histogram(REQUEST_S),
            "request_decode_time_seconds": Histogram(REQUEST_S),
            "request_inference_time_seconds": Histogram(REQUEST_S),
            "request_prompt_tokens": Histogram(TOKENS),
            "request_generation_tokens": Histogram(TOKENS),
            "request_params_n": Histogram(CHOICES),
            "request_params_max_tokens": Histogram(TOKENS),
        }

    # --- told by the engine's client ---

    def tokens_arrived(self, request: OpenRequest, num_tokens: int, interval_s: float | None) -> None:
        """New tokens of one choice."""
        self.num_generation_tokens += num_tokens
        if interval_s is not None:
            self.histograms["inter_token_latency_seconds"].observe(interval_s)
        elif request.times.first_token_s is not None:
            waited_s = request.times.first_token_s - request.times.submitted_s
            self.histograms["time_to_first_token_seconds"].observe(waited_s)
            self.num_prompt_tokens += len(request.prompt)
            self.num_cached_tokens += request.num_cached_tokens

    def request_ended(self, request: OpenRequest, reason: str, now_s: float) -> None:
        """Sort a request into the histograms of whole requests."""
        self.ended[reason] += 1
        num_tokens = request.outputs.num_tokens
        seen = self.histograms
        seen["e2e_request_latency_seconds"].observe(now_s - request.times.submitted_s)
        seen["request_prompt_tokens"].observe(len(request.prompt))
        seen["request_generation_tokens"].observe(num_tokens)
        seen["request_params_n"].observe(request.sampling.n)
        seen["request_params_max_tokens"].observe(request.sampling.max_tokens or 0)
        self._phases(request, num_tokens)

    def request_refused(self, code: str) -> None:
        """One was answered 429."""
        self.refused[code] += 1

    def engine_restarted(self) -> None:
        """A fresh engine took over."""
        self.num_engine_restarts += 1

    def _phases(self, request: OpenRequest, num_tokens: int) -> None:
        times = request.times
        if times.scheduled_s is None:
            return
        seen = self.histograms
        seen["request_queue_time_seconds"].observe(times.scheduled_s - times.submitted_s)
        if times.first_token_s is None or times.last_token_s is None:
            return
        decode_s = times.last_token_s - times.first_token_s
        seen["request_prefill_time_seconds"].observe(times.first_token_s - times.scheduled_s)
        seen["request_decode_time_seconds"].observe(decode_s)
        seen["request_inference_time_seconds"].observe(times.last_token_s - times.scheduled_s)
        if num_tokens > 1:
            seen["request_time_per_output_token_seconds"].observe(decode_s / (num_tokens - 1))

    # --- told by the middleware ---

    def http_answered(self, handler: str, method: str, status: int) -> None:
        """An HTTP answer went out; `handler` is the path of a route of ours, or `other`."""
        self.http[handler, method if method in _METHODS else "other", status] += 1


class _Scrape(Collector):
    """All series at one moment."""

    def __init__(self, metrics: ServerMetrics, stats: Stats, ready: Ready, model_name: str) -> None:
        self._metrics = metrics
        self._stats = stats
        self._ready = ready
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """Every family, vLLM's first."""
        yield from self._gauges()
        yield from self._counters()
        for name, histogram in self._metrics.histograms.items():
            family = HistogramMetricFamily(
                f"vllm:{name}", name.replace("_", " ").capitalize() + ".", labels=[*self._labels]
            )
            buckets, total = histogram.buckets()
            family.add_metric([*self._labels.values()], buckets, total)
            yield family
        yield self._by_reason()
        yield self._refused()
        yield self._http()
        yield from self._memory()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], value)
        return family

    def _gauges(self) -> Iterator[Metric]:
        stats = self._stats
        used = stats.num_held_pages + stats.num_draining_pages
        yield self._gauge("vllm:num_requests_running", "Requests in execution batches.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting to be processed.", stats.num_waiting)
        usage = used / stats.num_pages if stats.num_pages else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of pages held by running requests, 0 to 1.", usage)
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Geometry of the KV cache.",
            labels=[*self._labels, "block_size", "num_gpu_blocks"],
        )
        info.add_metric([*self._labels.values(), str(self._ready.page_size), str(self._ready.num_pages)], 1)
        yield info
        yield self._lora_info()

    def _lora_info(self) -> Metric:
        """One series whose labels are lists of names and whose value is the time, as routers read it. What they want to
        know is where an adapter is on the device, not which ones run at this moment.
        """
        stats = self._stats
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters on the device, and adapters of requests that wait; the value is the time.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        names = (stats.resident_adapters, stats.waiting_adapters)
        family.add_metric([str(max(1, stats.num_adapters)), *(",".join(each) for each in names)], time.time())
        return family

    def _counters(self) -> Iterator[Metric]:
        metrics, stats = self._metrics, self._stats
        for name, text, value in (
            ("vllm:prompt_tokens", "Prefill tokens processed.", metrics.num_prompt_tokens),
            ("vllm:generation_tokens", "Generation tokens processed.", metrics.num_generation_tokens),
            ("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.", metrics.num_cached_tokens),
            ("vllm:num_preemptions", "Preemptions.", stats.num_preemptions),
            ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_queries_tokens),
            ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_hits_tokens),
            ("vllm:spec_decode_num_draft_tokens", "Tokens guessed by look-up.", stats.num_guessed_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Guessed tokens that were right.", stats.num_right_guesses),
            ("kvarto:adapter_loads", "Adapters brought to the device.", stats.num_adapter_loads),
            ("kvarto:adapter_load_seconds", "Of all loads, from wish to device.", stats.adapter_load_seconds),
            ("kvarto:adapter_evictions", "Adapters pushed out of the device.", stats.num_adapter_evictions),
            ("kvarto:adapter_hits", "Choices that found their adapter on the device.", stats.num_adapter_hits),
            ("kvarto:adapter_failures", "Loads that failed.", stats.num_adapter_failures),
            ("kvarto:adapter_steps", "Steps with an adapter.", stats.num_adapter_steps),
            ("kvarto:adapters_in_steps", "Distinct adapters of each step, added up.", stats.num_adapters_in_steps),
            ("kvarto:adapter_step_bytes", "Bytes of distinct adapters of each step.", stats.adapter_step_bytes),
            ("kvarto:steps", "Steps of the engine.", stats.num_steps),
            ("kvarto:engine_restarts", "Engines replaced after they died or fell silent.", metrics.num_engine_restarts),
        ):
            yield self._counter(name, text, value)

    def _by_reason(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success", "Ended requests by reason.", labels=[*self._labels, "finished_reason"]
        )
        for reason in sorted({"stop", "length", "abort", "error", *self._metrics.ended}):
            family.add_metric([*self._labels.values(), reason], self._metrics.ended[reason])
        return family

    def _refused(self) -> Metric:
        """By the code of the error: the queue, an adapter's share of it, or the line for adapters."""
        family = CounterMetricFamily("kvarto:requests_refused", "Requests answered 429.", labels=["code"])
        for code in sorted({Overloaded.code, QUOTA_CODE, WAIT_CODE, *self._metrics.refused}):
            family.add_metric([code], self._metrics.refused[code])
        return family

    def _http(self) -> Metric:
        family = CounterMetricFamily("http_requests", "HTTP answers.", labels=["handler", "method", "status"])
        for (handler, method, status), count in self._metrics.http.items():
            family.add_metric([handler, method, str(status)], count)
        return family

    def _memory(self) -> Iterator[Metric]:
        stats = self._stats
        pages = GaugeMetricFamily("kvarto:pages", "Pages of the pool by state; they add up to all.", labels=["state"])
        for state in ("free", "held", "evictable", "draining"):
            pages.add_metric([state], getattr(stats, f"num_{state}_pages"))
        yield pages
        pool = GaugeMetricFamily(
            "kvarto:pool_bytes", "Bytes of the arena by kind; they add up to it.", labels=["tier", "kind"]
        )
        for kind, num_bytes in sorted(stats.region_bytes.items()):
            pool.add_metric(["device", kind], num_bytes)
        yield pool
        adapters = GaugeMetricFamily("kvarto:adapter_bytes", "Bytes of adapters by tier.", labels=["tier"])
        adapters.add_metric(["device"], stats.adapter_device_bytes)
        adapters.add_metric(["host"], stats.adapter_host_bytes)
        yield adapters
        registered = GaugeMetricFamily("kvarto:adapters", "Registered adapters.")
        registered.add_metric([], stats.num_adapters)
        yield registered


def exposition(metrics: ServerMetrics, stats: Stats, ready: Ready, model_name: str) -> bytes:
    """The text of one scrape, with this process's own memory and CPU."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape(metrics, stats, ready, model_name))
    ProcessCollector(registry=registry)
    return generate_latest(registry)
