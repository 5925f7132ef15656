"""What the server measures, for /metrics, in Prometheus's format."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from server.api import Event


@dataclass
class Running:
    """A request that the engine has, for the HTTP process."""

    call: object  # the http_server.Call that hears of it
    added: float = field(default_factory=time.perf_counter)
    first: float | None = None  # when its first token came


class Metrics:
    """What /metrics tells, in Prometheus's format."""

    def __init__(self):
        self.registry = registry = CollectorRegistry()
        steps = [0.001 * 2**n for n in range(15)]  # 1 ms to 16 s
        waits = [0.01 * 2**n for n in range(14)]  # 10 ms to 82 s

        def counter(name, text, *labels):
            return Counter(f"fastpath_{name}", text, labels, registry=registry)

        def histogram(name, text, buckets):
            return Histogram(f"fastpath_{name}_seconds", text, registry=registry, buckets=buckets)

        self.requests = counter("requests", "Requests by outcome", "outcome")
        self.read = counter("prompt_tokens_read", "Tokens of prompts that were read")
        self.reused = counter("prompt_tokens_reused", "Tokens of prompts that a cache row held already")
        self.written = counter("tokens_written", "New tokens")
        self.waiting = Gauge("fastpath_requests_waiting", "Requests that wait for a row", registry=registry)
        self.active = Gauge("fastpath_rows_active", "Rows that have a request", registry=registry)
        self.show("tasks", "Asynchronous tasks of the HTTP process", lambda: len(asyncio.all_tasks()))
        self.first_token = histogram("time_to_first_token", "From the request to its first token", waits)
        self.per_token = histogram("time_per_token", "Of a request's later tokens, on average", steps)
        self.step = histogram("step", "A step of the engine", steps)
        self.prefilled = 0
        texts = {"steps": "Steps that verified its proposals", "proposed_tokens": "Tokens that it proposed"}
        texts |= {"accepted_tokens": "Its tokens that were accepted", "seconds": "The time in which it proposed"}
        self.of_drafts = {key: counter(f"draft_{key}", text, "draft") for key, text in texts.items()}
        self.drafts = {}

    def show(self, name: str, text: str, value: Callable[[], float]):
        """A number that is looked up when somebody asks."""
        Gauge(f"fastpath_{name}", text, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def note_step(self, seconds: float, waiting: int, active: int, prefilled: int):
        if seconds:
            self.step.observe(seconds)
        self.waiting.set(waiting)
        self.active.set(active)
        self.read.inc(max(0, prefilled - self.prefilled))
        self.prefilled = prefilled

    def note_drafts(self, drafts: dict[str, dict[str, float]]):
        """drafts: speculative.Report.drafts so far."""
        for name, counts in drafts.items():
            label, before = name.encode(errors="replace").decode(), self.drafts.get(name, {})
            for key, metric in self.of_drafts.items():
                metric.labels(label).inc(counts.get(key, 0) - before.get(key, 0))
        self.drafts = drafts

    def note_event(self, running: Running, event: Event):
        now = time.perf_counter()
        if running.first is None and event.tokens:
            running.first = now
            self.first_token.observe(now - running.added)
            self.reused.inc(event.cached)
        if event.reason is not None:
            self.requests.labels(event.reason).inc()
            self.written.inc(event.tokens)
            if event.tokens > 1:
                self.per_token.observe((now - running.first) / (event.tokens - 1))
