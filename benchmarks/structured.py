"""What a JSON schema costs: answers that must fit one beside plain answers, from our server and those of the peers.

All servers take turns with one stream and with eight, each plain and with a schema that no answer of --new_tokens can
complete, so that all answers have the same length. Every answer gets a schema of its own, which no server has seen.

  masked_over_plain  the rate with a schema / the rate without
  later_first_token  how much later the first token of one stream comes with a schema, in seconds
"""

import itertools
from functools import partial
from pathlib import Path
from statistics import median

import measure
from measure import ROOT, column, ratio
from serving import STREAMS, Prompts, throughput

from cli import run_command
from load import choose_device, open_checkpoint


def long_schema(n: int) -> dict:
    """A schema whose property names contain the number n. An answer has at least 99 items."""
    item = {"type": "object", "required": [f"name_{n}", "count", "tags"], "additionalProperties": False}
    tags = {"type": "array", "items": {"enum": ["a", "b", f"c_{n}"]}, "maxItems": 3}
    item["properties"] = {f"name_{n}": {"type": "string", "maxLength": 40}, "count": {"type": "integer"}, "tags": tags}
    return {"type": "array", "items": item, "minItems": 99}


def run(port: int, prompts: Prompts, numbers, count: int, masked: bool, shape: tuple[int, int]) -> dict:
    """The throughput of `count` streams. A peer that ends an answer too early gets another prompt."""
    streams = prompts.streams(count, *shape)
    for stream in streams if masked else []:
        schema = long_schema(next(numbers))  # each server knows one of these two fields, and ignores the other
        described = {"name": "answer", "schema": schema}
        stream.more = {"response_format": {"type": "json_schema", "json_schema": described}, "json_schema": schema}
    return throughput(port, streams)


def report(rounds: dict[str, list], names: list[str]) -> dict:
    ratios = {}
    for name, n in itertools.product(names, (1, STREAMS)):
        plain, masked = (column(rounds[f"{name} {n} {kind}"], "tokens_per_s") for kind in ("plain", "masked"))
        ratios |= ratio(f"{name}_{n}_masked_over_plain", masked, plain)
        ours = column(rounds[f"fastpath {n} masked"], "tokens_per_s")
        ratios |= ratio(f"masked_{n}_over_{name}", ours, masked)
    for name, value in ratios.items():
        if not name.endswith("_spread"):
            print(f"{name}: {value:.3f} ({ratios[f'{name}_spread'][0]:.3f}-{ratios[f'{name}_spread'][1]:.3f})")
    later = {}
    for name in names:
        plain, masked = (column(rounds[f"{name} 1 {kind}"], "first_token_s") for kind in ("plain", "masked"))
        later[name] = median(b - a for a, b in zip(plain, masked))
        print(f"{name}: the first token of one stream comes {1e3 * later[name]:.1f} ms later with a schema")
    found = {name: measure.medians(mine) for name, mine in rounds.items()}
    return {"servers": found, "ratios": ratios, "later_first_token_s": later}


def main():
    parser = measure.make_parser(__doc__, {"--rounds": 5, "--prompt_tokens": 32, "--new_tokens": 128})
    measure.add_server_options(parser)
    args = parser.parse_args()
    directory, out = measure.quantized(args.checkpoint_path, args.format), args.out
    out = out or ROOT / "benchmarks" / "results" / "structured.json"
    prompts, shape = (
        Prompts(open_checkpoint(str(directory)).config.vocab_size - 1),
        (args.prompt_tokens, args.new_tokens),
    )
    with measure.all_servers(args, Path(directory), out, STREAMS, sum(shape) + 64) as (ports, _):
        contestants, numbers = {}, itertools.count()
        for name, n in itertools.product(ports, (1, STREAMS)):
            for kind in ("plain", "masked"):
                work = partial(run, ports[name], prompts, numbers, n, kind == "masked", shape)
                contestants[f"{name} {n} {kind}"] = work
        found = report(measure.take_turns(contestants, args.rounds), list(ports))
    about = {"model": Path(directory).name, "prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens}
    measure.save("structured", about | {"streams": STREAMS} | found, out, choose_device(None))


if __name__ == "__main__":
    run_command(main)
