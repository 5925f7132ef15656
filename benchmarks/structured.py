"""What a JSON schema costs: answers that must fit one beside plain answers, from our server and those of the peers.

All servers take turns with one stream and with eight, each plain and with a schema that no answer of
--new_tokens can complete, so that all answers have the same length. Every answer gets a schema of
its own, which no server has seen.

  masked_over_plain  the rate with a schema / the rate without
  later_first_token  how much later the first token of one stream comes with a schema, in seconds
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import measure
from measure import ROOT, column, ratio
from serving import STREAMS, Prompts, Stream, throughput

from cli import run_command
from load import choose_device, open_checkpoint


def long_schema(n: int) -> dict:
    """A schema whose property names contain the number n. An answer has at least 99 items."""
    name = f"name_{n}"
    tags = {"type": "array", "items": {"enum": ["a", "b", f"c_{n}"]}, "maxItems": 3}
    item = {
        "type": "object",
        "properties": {
            name: {"type": "string", "maxLength": 40},
            "count": {"type": "integer"},
            "tags": tags,
        },
        "required": [name, "count", "tags"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": 99}


def run_plain(port: int, streams: Callable[[], list[Stream]]) -> dict:
    return throughput(port, streams())


def run_masked(port: int, streams: Callable[[], list[Stream]], numbers: Iterator[int]) -> dict:
    """The throughput of streams that must each fit a schema of their own."""
    masked = streams()
    for stream in masked:
        stream.more["json_schema"] = long_schema(next(numbers))  # llama-server's field, which ours has, too
    return throughput(port, masked)


def report(rounds: dict[str, list], names: list[str]) -> dict:
    ratios = {}
    for name, n in itertools.product(names, (1, STREAMS)):
        plain = column(rounds[f"{name} {n} plain"], "tokens_per_s")
        masked = column(rounds[f"{name} {n} masked"], "tokens_per_s")
        ours = column(rounds[f"fastpath {n} masked"], "tokens_per_s")
        ratios |= ratio(f"{name}_{n}_masked_over_plain", masked, plain)
        ratios |= ratio(f"masked_{n}_over_{name}", ours, masked)
    for name, value in ratios.items():
        if not name.endswith("_spread"):
            low, high = ratios[f"{name}_spread"]
            print(f"{name}: {value:.3f} ({low:.3f}-{high:.3f})")

    later = {}
    for name in names:
        plain = column(rounds[f"{name} 1 plain"], "first_token_s")
        masked = column(rounds[f"{name} 1 masked"], "first_token_s")
        later[name] = median(b - a for a, b in zip(plain, masked))
        print(f"{name}: the first token of one stream comes {1e3 * later[name]:.1f} ms later with a schema")

    found = {name: measure.medians(mine) for name, mine in rounds.items()}
    return {"servers": found, "ratios": ratios, "later_first_token_s": later}


def main():
    parser = measure.make_parser(__doc__, {"--rounds": 5, "--prompt_tokens": 32, "--new_tokens": 128})
    measure.add_server_options(parser)
    args = parser.parse_args()

    directory = measure.quantized(args.checkpoint_path, args.format)
    out = args.out or ROOT / "benchmarks" / "results" / "structured.json"
    prompts = Prompts(open_checkpoint(str(directory)).config.vocab_size - 1)
    numbers = itertools.count()
    length = args.prompt_tokens + args.new_tokens + 64
    with measure.all_servers(args, directory, out, STREAMS, length) as ports:
        contestants = {}
        for (name, port), n in itertools.product(ports.items(), (1, STREAMS)):
            streams = partial(prompts.streams, n, args.prompt_tokens, args.new_tokens)
            contestants[f"{name} {n} plain"] = partial(run_plain, port, streams)
            contestants[f"{name} {n} masked"] = partial(run_masked, port, streams, numbers)
        found = report(measure.take_turns(contestants, args.rounds), list(ports))

    about = {"model": directory.name, "prompt_tokens": args.prompt_tokens}
    about |= {"new_tokens": args.new_tokens, "streams": STREAMS} | found
    measure.save("structured", about, out, choose_device(None))


if __name__ == "__main__":
    run_command(main)
