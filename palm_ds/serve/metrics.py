"""Metrics of a server, in the form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from palm_ds.serve.scheduler import BatchReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class ServerMetrics:
    """Counters and histograms of one server."""

    def __init__(self, texts_in_work: Callable[[], float]) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "palm_ds_requests", "Requests by endpoint and status.", ["endpoint", "status"],
            registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "palm_ds_request_seconds", "From the first byte to the answer.", ["endpoint"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._tokens = Histogram(
            "palm_ds_batch_tokens", "Tokens of a forward pass.", ["model"],
            buckets=_TOKENS, registry=registry,
        )  # fmt: skip
        self._batch_requests = Histogram(
            "palm_ds_batch_requests", "Requests that share a forward pass.", ["model"],
            buckets=(1, 2, 4, 8, 16, 32, 64, 128), registry=registry,
        )  # fmt: skip
        self._batch_seconds = Histogram(
            "palm_ds_batch_seconds", "Duration of a forward pass.", ["model"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._texts = Counter(
            "palm_ds_texts", "Texts computed.", ["model"], registry=registry
        )  # fmt: skip
        self._reloads = Counter(
            "palm_ds_reloads", "Reloads of the models.", ["result"], registry=registry
        )  # fmt: skip
        in_work = Gauge("palm_ds_texts_in_work", "Texts accepted, not answered.", registry=registry)
        in_work.set_function(texts_in_work)

    def request(self, endpoint: str, status: int, seconds: float) -> None:
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def batch(self, report: BatchReport) -> None:
        self._tokens.labels(report.model).observe(report.tokens)
        self._batch_requests.labels(report.model).observe(report.requests)
        self._batch_seconds.labels(report.model).observe(report.seconds)
        self._texts.labels(report.model).inc(report.texts)

    def reload(self, result: str) -> None:
        self._reloads.labels(result).inc()

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)
