"""The server's metrics, which /metrics shows in Prometheus's format."""

import asyncio
import time
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from server.api import Choice
from server.pipe_messages import EngineStatus, Update

STEP_BUCKETS = [0.001 * 2**n for n in range(15)]  # 1 ms to 16 s
WAIT_BUCKETS = [0.01 * 2**n for n in range(14)]  # 10 ms to 82 s
DRAFT_COUNTS = {  # the keys of speculative.Report's counts that are shown
    "steps": "Steps that verified the draft's proposals",
    "proposed_tokens": "Tokens that it proposed",
    "accepted_tokens": "Proposed tokens that were accepted",
    "seconds": "Time that it took to propose",
}


class Metrics:
    def __init__(self):
        self.registry = CollectorRegistry()
        shared = {"namespace": "fastpath", "registry": self.registry}
        counter = partial(Counter, **shared)
        histogram = partial(Histogram, **shared, unit="seconds")
        # A metric that shows a number as it is now: `set` it, or give it a `set_function`.
        self.add_gauge = partial(Gauge, **shared)

        self.requests = counter("requests", "Prompts by outcome (a refused request counts once)", ["outcome"])
        self.prompt_tokens = counter("prompt_tokens_read", "Prompt tokens that were read")
        self.cached_tokens = counter("prompt_tokens_reused", "Prompt tokens that were in the cache already")
        self.completion_tokens = counter("tokens_written", "New tokens")
        self.waiting = self.add_gauge("requests_waiting", "Requests that wait for a row")
        self.active_rows = self.add_gauge("rows_active", "Rows that have a request")
        tasks = self.add_gauge("tasks", "Asynchronous tasks of the HTTP process")
        tasks.set_function(lambda: len(asyncio.all_tasks()))

        first = "From the request to its first token"
        self.first_token = histogram("time_to_first_token", first, buckets=WAIT_BUCKETS)
        mean = "Mean time per token of a request after the first"
        self.per_token = histogram("time_per_token", mean, buckets=STEP_BUCKETS)
        self.step = histogram("step", "A step of the engine", buckets=STEP_BUCKETS)

        # The engine's totals in its latest status. The counters get the differences.
        self.total_prefill_tokens = 0
        self.total_draft_counts = {}
        self.draft_counters = {key: counter(f"draft_{key}", text, ["draft"]) for key, text in DRAFT_COUNTS.items()}

    def record_step(self, status: EngineStatus):
        if status.step_s:
            self.step.observe(status.step_s)
        self.waiting.set(status.waiting)
        self.active_rows.set(status.active_rows)

        self.prompt_tokens.inc(max(0, status.prefill_tokens - self.total_prefill_tokens))
        self.total_prefill_tokens = status.prefill_tokens

        for name, counts in status.drafts.items():
            label = name.encode(errors="replace").decode()
            before = self.total_draft_counts.get(name, {})
            for key, metric in self.draft_counters.items():
                metric.labels(label).inc(counts.get(key, 0) - before.get(key, 0))
        self.total_draft_counts = status.drafts

    def record_update(self, choice: Choice, update: Update):
        now = time.perf_counter()
        self.completion_tokens.inc(update.completion_tokens - choice.counted_tokens)
        choice.counted_tokens = update.completion_tokens
        is_first = choice.first_token_at is None and update.completion_tokens > 0
        if is_first:
            choice.first_token_at = now
            self.first_token.observe(now - choice.parsed_at)
        if is_first or update.embedding is not None:
            self.cached_tokens.inc(update.cached_tokens)

        if update.finish_reason is not None:
            choice.finished_at = now
            self.requests.labels(update.finish_reason).inc()
            if update.completion_tokens > 1:
                since_first = now - choice.first_token_at
                self.per_token.observe(since_first / (update.completion_tokens - 1))
