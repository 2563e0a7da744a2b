"""Figures for Prometheus: of the engine, read when asked, and of the requests."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from openv41.server.gate import Gate

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOME = "openv41.outcome"  # key of an ASGI scope: what came of the request, if not its status
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(frozen=True)
class Figure:
    """One figure of the engine: its name in EngineStats and what it tells."""

    name: str
    kind: Literal["counter", "gauge"]
    about: str


FIGURES = (
    Figure("queued", "gauge", "Requests that wait in the engine."),
    Figure("running", "gauge", "Requests that hold pages."),
    Figure("pages_used", "gauge", "Pages in use."),
    Figure("pages_free", "gauge", "Pages left."),
    Figure("pages_cached", "gauge", "Pages in use that the prefix cache holds."),
    Figure("prompt_tokens", "counter", "Prompt tokens taken in; rate() gives tokens per second."),
    Figure("generated_tokens", "counter", "Tokens drawn; rate() gives tokens per second."),
    Figure("prefix_hit_tokens", "counter", "Prompt tokens found in the prefix cache."),
    Figure("prefill_rows", "counter", "Rows of prompts, each layer on its own."),
    Figure("prefill_rows_skipped", "counter", "Those of them that no layer had to compute."),
    Figure("preemptions", "counter", "Requests sent back to the queue for want of pages."),
    Figure("images_encoded", "counter", "Images that the vision encoder has seen."),
    Figure("image_hits", "counter", "Images whose embeddings were still there."),
    Figure("image_bytes", "gauge", "Bytes of image embeddings held."),
    Figure("engram_rows", "counter", "Engram rows read."),
    Figure("engram_hits", "counter", "Engram rows that were there before they were needed."),
    Figure("engram_bytes", "counter", "Bytes of Engram rows read."),
    Figure("engram_stalls", "counter", "Steps that waited for Engram rows."),
    Figure("draft_steps", "counter", "Steps that drafted."),
    Figure("draft_budget", "gauge", "Drafts that the last step of decoding requests verified."),
    Figure("draft_rounds", "counter", "Rounds of requests whose drafts were verified."),
    Figure("drafts_verified", "counter", "Drafts computed by the model, by position."),
    Figure("drafts_accepted", "counter", "Those of them that are part of an answer."),
    Figure("draft_acceptance", "gauge", "Accepted over verified drafts, by position."),
    Figure("mean_accepted_length", "gauge", "Tokens of a round, the one behind drafts included."),
    Figure("wasted_rows", "counter", "Rows computed for drafts that did not hold."),
)


class Metrics:
    """A registry of its own: a process may hold several servers."""

    def __init__(self, stats: Callable[[], object], gate: Gate) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats, gate))
        self._requests = Counter(
            "openv41_http_requests",
            "Requests to /v1 that came to an end; 'left' for clients that did not wait.",
            ["endpoint", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "openv41_http_request_seconds",
            "From a request to /v1 to the end of its answer.",
            buckets=SECONDS,
            registry=self._registry,
        )
        self.first_token = Histogram(
            "openv41_time_to_first_token_seconds",
            "From a request to the first token of each of its choices.",
            buckets=SECONDS,
            registry=self._registry,
        )

    def count(self, endpoint: str, status: str, seconds: float) -> None:
        """Note the end of a request."""
        self._requests.labels(endpoint, status).inc()
        self._seconds.observe(seconds)

    def text(self) -> bytes:
        """All figures in Prometheus' format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engine's figures at the moment of a scrape."""

    def __init__(self, stats: Callable[[], object], gate: Gate) -> None:
        self._stats = stats
        self._gate = gate

    def describe(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Nothing: registering need not read the engine."""
        return ()

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Yield every figure."""
        waiting = "Sequences that wait before the engine."
        yield GaugeMetricFamily("openv41_http_waiting", waiting, value=self._gate.waiting)
        stats = self._stats()
        for figure in FIGURES:
            yield _family(figure, getattr(stats, figure.name))


def _family(
    figure: Figure, value: int | float | tuple[float, ...]
) -> CounterMetricFamily | GaugeMetricFamily:
    family = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
    name = f"openv41_{figure.name}"
    if not isinstance(value, tuple):
        return family(name, figure.about, value=value)
    found = family(name, figure.about, labels=["position"])
    for position, count in enumerate(value, 1):
        found.add_metric([str(position)], count)
    return found
