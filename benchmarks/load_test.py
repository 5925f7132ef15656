"""The load test of a server: what users get while their number grows beyond what it can serve.

`python benchmarks/load_test.py --llama_server PATH/llama-server --gguf MODEL.gguf` starts our server
and those of the peers that are named, with 8 rows each. They take turns for each number of users:
this many users stream one completion after another. Most prompts and answers are short, few are ten
times as long (their lengths have a log-normal distribution). Half of the requests are greedy, half
sampled with top-p 0.9. The same seed gives all servers the same sequence of requests. After a
warm-up, what ends within --seconds is counted:

  throughput         new tokens per second, and answers per second
  first token        from the request to its first token, 50th and 95th percentile
  later token        the time per later token of an answer, 50th and 95th percentile
  refusals           their share of all responses, and the time within which 99 % of them came
  failures           all other responses; an overloaded server should have none

A refused request (429) is no failure. Its user waits as long as Retry-After says, at most 5 seconds.
charts.py draws the result.
"""

import json
import math
import random
import re
import sys
import time

try:
    import locust.env  # before all others: it replaces blocking sockets and sleeps by cooperative ones
except ModuleNotFoundError:
    sys.exit("load_test.py: error: locust is missing: pip install -r requirements-bench.txt")
from locust import FastHttpUser, task
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS
from measure import ROOT, add_server_options, all_servers, make_parser, print_table, quantized, save

from cli import positive, print_status, run_command
from load import choose_device, open_checkpoint

TEXT = "\n".join(path.read_text("utf-8") for path in sorted(ROOT.glob("docs/*.md")))
WORDS = re.findall("[A-Za-z]+", TEXT)  # without the cells of tables, some of which have 45 tokens
FIRST_TOKEN = "time to first token"
LATER_TOKEN = "time per later token"
NEW_TOKENS = "new tokens"
REFUSED = "refused"
LONGEST_WAIT_S = 5.0
TAIL = 10  # no length is more than this many times the median
ROWS = 8
USERS = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128]
WARM_UP = 0.5  # a share of --seconds
PATIENCE_S = 300.0  # the longest that the end of a step waits for answers
COLUMNS = {"server": "", "users": "", "tokens_per_s": ".0f", "answers_per_s": ".1f"}
COLUMNS |= dict.fromkeys(("first_token_p50_s", "first_token_p95_s"), ".3f")
COLUMNS |= dict.fromkeys(("later_token_p50_s", "later_token_p95_s"), ".4f")
COLUMNS |= {"refused_share": ".1%", "refusal_p99_s": ".4f", "failures": ""}

# ---------------------------------------------------------------- users


class LongTailUser(FastHttpUser):
    network_timeout = 600.0
    # llama-server has a thread per connection, so connections that are kept shut others out.
    default_headers = {"Connection": "close"}
    prompt_words = 40  # the median
    new_tokens = 20  # the median

    @task
    def complete(self):
        """Send a request and read the response. If it is refused, wait before the next one."""
        words = self.length(self.prompt_words)
        new = self.length(self.new_tokens)
        start = random.randrange(len(WORDS) - words)
        body = {"prompt": " ".join(WORDS[start : start + words]), "max_tokens": new, "ignore_eos": True}
        sampled = {"temperature": 1, "top_p": 0.9, "seed": random.randrange(2**31)}
        body |= random.choice([{"temperature": 0}, sampled])
        body |= {"stream": True, "stream_options": {"include_usage": True}}

        start_s = time.perf_counter()
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True) as response:
            if response.status_code == 429:
                response.request_meta["name"] = REFUSED
                response.success()
            elif response.ok:
                try:
                    response.request_meta["context"] |= listen(response, start_s)
                except (*FAILURE_EXCEPTIONS, ValueError) as error:
                    response.failure(error)
                response.request_meta["response_time"] = 1e3 * (time.perf_counter() - start_s)

        if response.status_code == 429:
            time.sleep(min(float(response.headers.get("Retry-After", 1)), LONGEST_WAIT_S))

    def length(self, median: int) -> int:
        return min(TAIL * median, max(2, round(random.lognormvariate(math.log(median), 1.0))))


def listen(response, start_s: float) -> dict:
    """Read a stream to its end, and return its times and its number of new tokens."""
    times = []
    usage = {}
    while line := bytes(response.stream.readline(b"\n")):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if event.get("choices"):
                times.append(time.perf_counter())
    if not times or not usage:
        raise ValueError("the stream broke off")

    new = usage["completion_tokens"]
    later_token_s = (times[-1] - times[0]) / max(1, new - 1)
    return {FIRST_TOKEN: times[0] - start_s, LATER_TOKEN: later_token_s, NEW_TOKENS: new}


# ---------------------------------------------------------------- one number of users


def run_users(port: int, users: int, seconds: float) -> list[dict]:
    """Let users send requests, and return the responses that came after the warm-up."""
    environment = locust.env.Environment(user_classes=[LongTailUser], stop_timeout=PATIENCE_S)
    LongTailUser.host = f"http://127.0.0.1:{port}"
    responses = []
    counted = False

    def note(request_type, name, response_time, exception, context=None, **others):
        if counted and request_type == "POST":
            kind = "answer"
            if exception:
                kind = "failure"
            elif name == REFUSED:
                kind = "refusal"
            responses.append({"kind": kind, "seconds": response_time / 1e3} | (context or {}))

    environment.events.request.add_listener(note)
    runner = environment.create_local_runner()
    random.seed(f"{users} users for {seconds} s")
    runner.spawn_users({LongTailUser.__name__: users})
    time.sleep(WARM_UP * seconds)
    counted = True
    time.sleep(seconds)
    counted = False
    # Each user's last request is answered first, so that the next server has the machine for itself.
    runner.quit()
    return responses


def percentile(values: list[float], percent: int) -> float | None:
    """The smallest value that at least this percentage of the values do not exceed.

    None if there are no values.
    """
    return sorted(values)[math.ceil(percent * len(values) / 100) - 1] if values else None


def summary(responses: list[dict], users: int, seconds: float) -> dict:
    answers = [one for one in responses if one["kind"] == "answer"]
    refusals = [one["seconds"] for one in responses if one["kind"] == "refusal"]
    row = {"users": users, "answers": len(answers), "refusals": len(refusals)}
    row["failures"] = len(responses) - len(answers) - len(refusals)
    row["tokens_per_s"] = sum(one[NEW_TOKENS] for one in answers) / seconds
    row["answers_per_s"] = len(answers) / seconds
    for key, name in (("first_token", FIRST_TOKEN), ("later_token", LATER_TOKEN)):
        for percent in (50, 95):
            row[f"{key}_p{percent}_s"] = percentile([one[name] for one in answers], percent)
    row["refused_share"] = len(refusals) / max(1, len(responses))
    return row | {"refusal_p99_s": percentile(refusals, 99)}


# ---------------------------------------------------------------- all of them


def ramp(ports: dict[str, int], numbers: list[int], seconds: float) -> dict[str, list[dict]]:
    """Return what was measured on each server for each number of users.

    The servers take turns, and the order is reversed from one number of users to the next.
    """
    found = {name: [] for name in ports}
    for name, port in ports.items():
        print_status(f"warming up {name}")
        run_users(port, ROWS, seconds / 4)

    order = list(ports)
    for users in numbers:
        for name in order:
            row = summary(run_users(ports[name], users, seconds), users, seconds)
            print_status(f"{name}, {users} users: {row['tokens_per_s']:.1f} tokens/s")
            found[name].append(row)
        order.reverse()
    return found


def main():
    parser = make_parser(__doc__, {"--seconds": 20, "--prompt_words": 40, "--new_tokens": 20, "--max_seq_length": 2048})
    parser.add_argument("--users", type=positive, nargs="+", default=USERS, help=f"default: {USERS}")
    add_server_options(parser)
    args = parser.parse_args()

    LongTailUser.prompt_words = args.prompt_words
    LongTailUser.new_tokens = args.new_tokens
    directory = quantized(args.checkpoint_path, args.format)
    out = args.out or ROOT / "benchmarks/results/ramp.json"
    with all_servers(args, directory, out, ROWS, args.max_seq_length) as ports:
        servers = ramp(ports, sorted(args.users), args.seconds)

    print_table([{"server": name} | row for name, rows in servers.items() for row in rows], COLUMNS)
    about = {"model": open_checkpoint(str(directory)).name, "rows": ROWS}
    about |= {key: getattr(args, key) for key in ("seconds", "prompt_words", "new_tokens", "max_seq_length")}
    save("load_test", about | {"servers": servers}, out, choose_device(None))


if __name__ == "__main__":
    run_command(main)
