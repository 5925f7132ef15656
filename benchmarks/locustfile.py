"""Users of the server, for locust: `locust -f benchmarks/locustfile.py --host http://127.0.0.1:8000`.

Every user sends its next request as soon as the last one was answered. Append a class name to run only that class.

  StoryUser     the mix of the BLOOM inference story (docs/bloom.md): /v1/completions, prompts cut at random, 20 new
                tokens, half of the requests greedy and half sampled with top-p 0.9, with seeds
  LongTailUser  streamed /v1/completions, also of other servers. The lengths of prompts and answers have a log-normal
                distribution: most are short, few are ten times as long.

Times to the first token, times per later token and refused requests (429) have rows of their own in locust's table. A
refused request is no failure. Its user waits as long as Retry-After says, at most 5 seconds.
"""

import json
import math
import random
import time
from pathlib import Path

from locust import FastHttpUser, task
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS

TEXT = "\n".join(path.read_text("utf-8") for path in sorted(Path(__file__).resolve().parents[1].glob("docs/*.md")))
WORDS = TEXT.split()
FIRST_TOKEN, LATER_TOKEN = "time to first token", "time per later token"
NEW_TOKENS = "new tokens"
REFUSED, LONGEST_WAIT_S = "refused", 5.0
TAIL = 10  # no length is more than this many times the median


class Client(FastHttpUser):
    abstract = True
    network_timeout = 600.0
    default_headers = {"Connection": "close"}  # llama-server has a thread per connection: kept ones shut others out

    def ask(self, path: str, body: dict):
        start, stream = time.perf_counter(), "stream" in body
        with self.client.post(path, json=body, stream=stream, catch_response=True) as response:
            if response.status_code == 429:
                response.request_meta["name"] = REFUSED
                response.success()
            elif response.ok and stream:
                try:
                    self.listen(response, start)
                except (*FAILURE_EXCEPTIONS, ValueError) as error:
                    response.failure(error)
                response.request_meta["response_time"] = 1e3 * (time.perf_counter() - start)
        if response.status_code == 429:
            time.sleep(min(float(response.headers.get("Retry-After", 1)), LONGEST_WAIT_S))

    def listen(self, response, start: float):
        """Read a stream to its end. Its times and new tokens go to the request's context, too, for ramp.py."""
        times, usage = [], {}
        while line := bytes(response.stream.readline(b"\n")):
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                if event.get("choices"):
                    times.append(time.perf_counter())
        if not times or not usage:
            raise ValueError("the stream broke off")
        new = usage["completion_tokens"]
        found = {FIRST_TOKEN: times[0] - start, LATER_TOKEN: (times[-1] - times[0]) / max(1, new - 1)}
        for name, seconds in found.items():
            about = {"request_type": "stream", "response_length": 0, "exception": None}
            self.environment.events.request.fire(name=name, response_time=1e3 * seconds, **about)
        response.request_meta["context"] |= found | {NEW_TOKENS: new}


def greedy_or_sampled() -> dict:
    return random.choice([{"temperature": 0}, {"temperature": 1, "top_p": 0.9, "seed": random.randrange(2**31)}])


class StoryUser(Client):
    @task
    def complete(self):
        start = random.randrange(len(TEXT) - 200)
        body = {"prompt": TEXT[start : start + random.randrange(1, 200)], "max_tokens": 20}
        self.ask("/v1/completions", body | greedy_or_sampled())


class LongTailUser(Client):
    prompt_words, new_tokens = 40, 20  # medians

    @task
    def complete(self):
        words, new = self.length(self.prompt_words), self.length(self.new_tokens)
        start = random.randrange(len(WORDS) - words)
        body = {"prompt": " ".join(WORDS[start : start + words]), "max_tokens": new, "ignore_eos": True}
        body |= greedy_or_sampled()
        self.ask("/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}})

    def length(self, median: int) -> int:
        return min(TAIL * median, max(2, round(random.lognormvariate(math.log(median), 1.0))))
