"""The load test of a server: what users get while their number grows beyond what it can serve.

`python benchmarks/load_test.py --llama_server PATH/llama-server --gguf MODEL.gguf` starts our server
and those of the peers that are named, with 8 rows each. They take turns for each number of users:
this many LongTailUsers send one request after another. The same seed gives all servers the same
sequence of requests. After a warm-up, what ends within --seconds is counted:

  throughput         new tokens per second, and answers per second
  first token        from the request to its first token, 50th and 95th percentile
  later token        the time per later token of an answer, 50th and 95th percentile
  refusals           their share of all responses, and the time within which 99 % of them came
  failures           all other responses; an overloaded server should have none

The JSON file also says from which number of users on a server is overloaded: where it begins to
refuse requests, and where its median time to the first token is more than twice the longest that it
has with at most one user per row.

The same users run with locust against any server: `locust -f benchmarks/load_test.py --host URL
USER`. Every user sends its next request as soon as the last one was answered. The classes of USER
are

  StoryUser     the mix of the BLOOM inference story (docs/bloom.md): /v1/completions, prompts cut at
                random, 20 new tokens, half of the requests greedy and half sampled with top-p 0.9,
                with seeds
  LongTailUser  streamed /v1/completions, which works with other servers, too. The lengths of
                prompts and answers have a log-normal distribution: most are short, few are ten
                times as long.

Times to the first token, times per later token and refused requests (429) have rows of their own in
locust's table. A refused request does not count as a failure. Its user waits as long as Retry-After
says, at most 5 seconds.
"""

import json
import math
import random
import sys
import time
from pathlib import Path

try:
    import locust.env  # before all others: it replaces blocking sockets and sleeps by cooperative ones
except ModuleNotFoundError:
    sys.exit("load_test.py: error: locust is missing: pip install -r requirements-bench.txt")
from charts import colour_of
from locust import FastHttpUser, task
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS
from matplotlib.figure import Figure
from measure import ROOT, add_server_options, all_servers, make_parser, print_table, quantized, save

from cli import positive, print_status, read_json, run_command
from load import choose_device, open_checkpoint

TEXT = "\n".join(path.read_text("utf-8") for path in sorted(ROOT.glob("docs/*.md")))
WORDS = TEXT.split()
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
COLUMNS = {
    "server": "",
    "users": "",
    "tokens_per_s": ".0f",
    "answers_per_s": ".1f",
    "first_token_p50_s": ".3f",
    "first_token_p95_s": ".3f",
    "later_token_p50_s": ".4f",
    "later_token_p95_s": ".4f",
    "refused_share": ".1%",
    "refusal_p99_s": ".4f",
    "failures": "",
}

# ---------------------------------------------------------------- users


class Client(FastHttpUser):
    abstract = True
    network_timeout = 600.0
    # llama-server has a thread per connection, so connections that are kept shut others out.
    default_headers = {"Connection": "close"}

    def ask(self, path: str, body: dict):
        """Send a request and read the response. If it is refused, wait before the next one."""
        start = time.perf_counter()
        stream = "stream" in body
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
        """Read a stream to its end. Its times and new tokens go to the request's context, too."""
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
        found = {FIRST_TOKEN: times[0] - start, LATER_TOKEN: later_token_s}
        about = {"request_type": "stream", "response_length": 0, "exception": None}
        for name, seconds in found.items():
            self.environment.events.request.fire(name=name, response_time=1e3 * seconds, **about)
        response.request_meta["context"] |= found | {NEW_TOKENS: new}


def greedy_or_sampled() -> dict:
    sampled = {"temperature": 1, "top_p": 0.9, "seed": random.randrange(2**31)}
    return random.choice([{"temperature": 0}, sampled])


class StoryUser(Client):
    @task
    def complete(self):
        start = random.randrange(len(TEXT) - 200)
        body = {"prompt": TEXT[start : start + random.randrange(1, 200)], "max_tokens": 20}
        self.ask("/v1/completions", body | greedy_or_sampled())


class LongTailUser(Client):
    prompt_words = 40  # the median
    new_tokens = 20  # the median

    @task
    def complete(self):
        words = self.length(self.prompt_words)
        new = self.length(self.new_tokens)
        start = random.randrange(len(WORDS) - words)
        prompt = " ".join(WORDS[start : start + words])
        body = {"prompt": prompt, "max_tokens": new, "ignore_eos": True} | greedy_or_sampled()
        self.ask("/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}})

    def length(self, median: int) -> int:
        return min(TAIL * median, max(2, round(random.lognormvariate(math.log(median), 1.0))))


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


def overload(rows: list[dict]) -> dict:
    """The numbers of users from which on a server refuses requests, and first tokens come late.

    None means that it does not happen.
    """
    refusing = [row["users"] for row in rows if row["refusals"]]
    medians = {row["users"]: row["first_token_p50_s"] for row in rows if row["answers"]}
    early = [median for users, median in medians.items() if users <= ROWS]
    limit = 2 * max(early, default=float("inf"))
    late = [users for users, median in medians.items() if median > limit]
    return {"refuses_from": next(iter(refusing), None), "first_token_late_from": next(iter(late), None)}


# ---------------------------------------------------------------- the picture

CAPTION = (
    "users, each sending one request after another; "
    "solid: median or total, dashed: 95th percentile\n"
    "ring: the median is more than twice that with a row for every user; "
    "dotted: requests are refused from here on"
)


def draw_panel(axes, result: dict, title: str, keys: list[str], factor: float = 1):
    """Draw lines of all servers against the number of users: the first key solid, the second dashed.

    A ring marks from where first tokens come late, and a dotted line from where requests are
    refused.
    """
    for name, rows in result["servers"].items():
        colour = colour_of(name)
        users = [row["users"] for row in rows]
        for key, line in zip(keys, ("o-", "o--")):
            values = [float("nan") if row[key] is None else factor * row[key] for row in rows]
            label = name if key == keys[0] else None
            axes.plot(users, values, line, color=colour, markersize=3, label=label)

        late = result["overload"][name]["first_token_late_from"]
        if late and "first_token_p50_s" in keys:
            y = rows[users.index(late)]["first_token_p50_s"]
            axes.plot(late, y, "o", markersize=9, color=colour, fillstyle="none")
        refuses = result["overload"][name]["refuses_from"]
        if refuses:
            axes.axvline(refuses, color=colour, linewidth=1, linestyle=":")

    axes.set_xscale("log", base=2)
    axes.set_xticks(users, [str(n) for n in users], fontsize=8)
    axes.minorticks_off()
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def draw(result: dict, path: Path):
    figure = Figure(figsize=(9, 6), dpi=200, layout="constrained", facecolor="white")
    machine = f"{result['machine']['cpu']}, threads: {result['machine']['threads']}"
    figure.suptitle(f"{result['model']}, {ROWS} rows\n{machine}, {result['date']}", fontsize=11)
    tokens, first, later, refused = figure.subplots(2, 2).flat
    draw_panel(tokens, result, "throughput, new tokens/s", ["tokens_per_s"])
    draw_panel(first, result, "time to first token, s", ["first_token_p50_s", "first_token_p95_s"])
    draw_panel(later, result, "time per later token, ms", ["later_token_p50_s", "later_token_p95_s"], 1e3)
    draw_panel(refused, result, "refused, % of the responses", ["refused_share"], 100)

    tokens.set_ylim(0, None)
    later.set_ylim(0, None)
    refused.set_ylim(0, 100)
    first.set_yscale("log")
    first.yaxis.set_major_formatter("{x:g}")
    tokens.legend(frameon=False, fontsize=9)
    figure.supxlabel(CAPTION, fontsize=8, color="0.35")
    figure.savefig(path, format="png")


def main():
    parser = make_parser(__doc__, {"--seconds": 20, "--prompt_words": 40, "--new_tokens": 20, "--max_seq_length": 2048})
    parser.add_argument("--users", type=positive, nargs="+", default=USERS, help=f"default: {USERS}")
    add_server_options(parser)
    args = parser.parse_args()

    LongTailUser.prompt_words = args.prompt_words
    LongTailUser.new_tokens = args.new_tokens
    directory = quantized(args.checkpoint_path, args.format)
    out = args.out or ROOT / "benchmarks/results/ramp.json"
    picture = args.out.with_suffix(".png") if args.out else ROOT / "docs/ramp.png"
    with all_servers(args, directory, out, ROWS, args.max_seq_length) as (ports, _):
        servers = ramp(ports, sorted(args.users), args.seconds)

    print_table([{"server": name} | row for name, rows in servers.items() for row in rows], COLUMNS)
    about = {"model": open_checkpoint(str(directory)).name, "rows": ROWS}
    about |= {key: getattr(args, key) for key in ("seconds", "prompt_words", "new_tokens", "max_seq_length")}
    about |= {"servers": servers, "overload": {name: overload(rows) for name, rows in servers.items()}}
    save("load_test", about, out, choose_device(None))
    draw(read_json(out), picture)


if __name__ == "__main__":
    run_command(main)
