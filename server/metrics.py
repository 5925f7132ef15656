"""The server's metrics, which /metrics shows in Prometheus's format."""

import asyncio
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from server.api import Choice
from server.pipe_messages import EngineStatus, Update


class Metrics:
    def __init__(self):
        self.registry = registry = CollectorRegistry()
        step_buckets = [0.001 * 2**n for n in range(15)]  # 1 ms to 16 s
        wait_buckets = [0.01 * 2**n for n in range(14)]  # 10 ms to 82 s

        def counter(name, text, *labels):
            return Counter(f"fastpath_{name}", text, labels, registry=registry)

        def histogram(name, text, buckets):
            return Histogram(f"fastpath_{name}_seconds", text, registry=registry, buckets=buckets)

        self.requests = counter("requests", "Prompts by outcome (a refused request counts once)", "outcome")
        self.prompt_tokens = counter("prompt_tokens_read", "Prompt tokens that were read")
        self.cached_tokens = counter("prompt_tokens_reused", "Prompt tokens that were in the cache already")
        self.completion_tokens = counter("tokens_written", "New tokens")
        self.waiting = Gauge("fastpath_requests_waiting", "Requests that wait for a row", registry=registry)
        self.active_rows = Gauge("fastpath_rows_active", "Rows that have a request", registry=registry)
        self.add_gauge("tasks", "Asynchronous tasks of the HTTP process", lambda: len(asyncio.all_tasks()))
        self.first_token = histogram("time_to_first_token", "From the request to its first token", wait_buckets)
        self.per_token = histogram("time_per_token", "Mean time per token of a request after the first", step_buckets)
        self.step = histogram("step", "A step of the engine", step_buckets)
        self.total_prefill_tokens = 0
        texts = {"steps": "Steps that verified the draft's proposals", "proposed_tokens": "Tokens that it proposed"}
        texts |= {"accepted_tokens": "Proposed tokens that were accepted", "seconds": "Time that it took to propose"}
        self.draft_counters = {key: counter(f"draft_{key}", text, "draft") for key, text in texts.items()}
        self.total_draft_counts = {}

    def add_gauge(self, name: str, text: str, value: Callable[[], float]):
        """A number that is computed when /metrics is requested."""
        Gauge(f"fastpath_{name}", text, registry=self.registry).set_function(value)

    def record_step(self, status: EngineStatus):
        if status.step_s:
            self.step.observe(status.step_s)
        self.waiting.set(status.waiting)
        self.active_rows.set(status.active_rows)
        self.prompt_tokens.inc(max(0, status.prefill_tokens - self.total_prefill_tokens))
        self.total_prefill_tokens = status.prefill_tokens
        for name, counts in status.drafts.items():
            label, before = name.encode(errors="replace").decode(), self.total_draft_counts.get(name, {})
            for key, metric in self.draft_counters.items():
                metric.labels(label).inc(counts.get(key, 0) - before.get(key, 0))
        self.total_draft_counts = status.drafts

    def record_update(self, choice: Choice, update: Update):
        now = time.perf_counter()
        self.completion_tokens.inc(update.completion_tokens - choice.counted_tokens)
        choice.counted_tokens = update.completion_tokens
        if choice.first_token_at is None and update.completion_tokens:
            choice.first_token_at = now
            self.first_token.observe(now - choice.parsed_at)
            self.cached_tokens.inc(update.cached_tokens)
        if update.finish_reason is not None:
            self.requests.labels(update.finish_reason).inc()
            if update.completion_tokens > 1:
                self.per_token.observe((now - choice.first_token_at) / (update.completion_tokens - 1))
