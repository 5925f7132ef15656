"""What gated delta nets cost (docs/hybrid.md), on a Qwen3.5 file such as that of random_qwen35.py.

share     the time of the delta rule in a decode step, relative to reading and writing its states as
          torch's multiplication in place does. Before each, other memory is read, as weights are in
          a step.
verify    a pass over 1 + --drafted tokens, relative to a pass over one, in turns with the model of
          --plain, a transformer with as many bytes of weights
context   the tokens/s of decoding at --context positions, relative to 128, and what they would be
          if the keys and values of the long context were read at the rate of the weights
turn      how many tokens of a conversation of --turn tokens are read again in its second turn
"""

from functools import partial
from statistics import median

import measure
import torch

from cli import run_command
from engine import Engine, Request, generate
from kernels import gated_delta
from load import load_model, open_checkpoint
from model import Transformer
from report import weight_bytes

SHORT = 128
STEPS = 32
ANSWER = 40  # tokens of an answer
FIRST = 96  # the position of the passes of `verify`
TIMES = 9


# ---------------------------------------------------------------- the delta rule by itself


def unit_vectors(*sizes: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(sizes), dim=-1)


def measure_share(args, model: Transformer) -> dict:
    """Seconds of the delta rule for one token, beside reading and writing the states.

    The rows of one layer stand for the layers of one row, which the fused operation runs in one
    call, too.
    """
    net = model.config.delta_net
    rows = len(net.layers)
    model.setup_caches(rows, SHORT, snapshot_bytes=0)
    state = model.blocks[net.layers[0]].state
    numbers = torch.ones(2**25, dtype=torch.int64)  # more than the processor's caches hold
    q = unit_vectors(rows, 1, net.n_key_head, net.key_dim)
    k = unit_vectors(rows, 1, net.n_key_head, net.key_dim)
    v = unit_vectors(rows, 1, net.n_value_head, net.value_dim)
    log_decay = -torch.rand(rows, 1, net.n_value_head)
    beta = torch.rand(rows, 1, net.n_value_head)
    state.decays.fill_(1.0)
    positions = torch.full((rows, 1), SHORT + 1)  # one token is pending, as in plain decoding

    def update():
        state.base.fill_(SHORT)
        numbers.sum()
        return measure.seconds(lambda: gated_delta(q, k, v, log_decay, beta, state, positions, None))

    def read_and_write():
        numbers.sum()
        return measure.seconds(lambda: state.matrix.mul_(0.5))

    times = measure.take_turns({"rule": update, "memory": read_and_write}, args.rounds * TIMES, warm_up=TIMES)
    found = measure.ratio("share", times["rule"], times["memory"])
    return found | {"rule_s": median(times["rule"]), "read_and_write_s": median(times["memory"])}


# ---------------------------------------------------------------- verification


def pass_s(model: Transformer, S: int) -> float:
    """The median seconds of a pass over S tokens with the logits of all."""
    tokens = torch.arange(300, 300 + FIRST + S)[None]
    positions = torch.arange(FIRST + S)[None]
    model(tokens[:, :FIRST], positions[:, :FIRST])
    last = (tokens[:, FIRST:], positions[:, FIRST:])
    return measure.seconds(lambda: model(*last, all_logits=True), TIMES)


def measure_verification(args, models: dict[str, Transformer]) -> dict:
    turns = {}
    for name, model in models.items():
        model.setup_caches(1, 2 * SHORT)
        for S in (1, 1 + args.drafted):
            turns[name, S] = partial(pass_s, model, S)
    times = measure.take_turns(turns, args.rounds)
    found = {}
    for name in models:
        one = times[name, 1]
        more = times[name, 1 + args.drafted]
        found[name] = {"one_s": median(one), "more_s": median(more)} | measure.ratio("ratio", more, one)
    return found


# ---------------------------------------------------------------- contexts and turns


def measure_contexts(args, model: Transformer) -> dict:
    engine = Engine(model, 1, args.context + STEPS + 8)

    def step_s(context: int) -> float:
        return measure.time_decode(engine, context, STEPS).decode_s / STEPS

    contexts = {"short": SHORT, "long": args.context}
    times = measure.take_turns({name: partial(step_s, n) for name, n in contexts.items()}, args.rounds)
    weights = weight_bytes(model, 1) + model.recurrent_bytes
    extra = model.kv_bytes([args.context]) - model.kv_bytes([SHORT])
    found = measure.ratio("rate", times["short"], times["long"])
    found |= {"rate_by_bytes": weights / (weights + extra), "short_s": median(times["short"])}
    return found | {"long_s": median(times["long"]), "extra_kv_bytes": extra}


def measure_turn(args, model: Transformer) -> dict:
    """The prompt of the second turn has the first one without its last tokens, as templates do."""
    engine = Engine(model, 1, args.turn + 512)
    numbers = torch.randint(300, 4000, (args.turn + 64,), generator=torch.Generator().manual_seed(0)).tolist()
    opening = numbers[:4]  # what opens an answer
    question = numbers[args.turn :]
    said = numbers[4 : args.turn - ANSWER]
    first = Request(said + opening, measure.GREEDY, ANSWER)
    generate(engine, [first])
    second = Request(said + first.new_tokens + question, measure.GREEDY, 1)
    generate(engine, [second])
    new = len(first.new_tokens) + len(question)
    return {"again": len(second.prompt) - new - second.cached_tokens, "cached": second.cached_tokens, "new": new}


@torch.no_grad()
def main():
    parser = measure.make_parser(__doc__, {"--rounds": 7, "--context": 16384, "--turn": 4096, "--drafted": 4})
    parser.add_argument("--plain", help="a model without gated delta nets, for `verify`")
    args = parser.parse_args()

    source = open_checkpoint(args.checkpoint_path)
    model = load_model(source)
    models = {"hybrid": model}
    if args.plain:
        models["plain"] = load_model(open_checkpoint(args.plain))
    result = {"model": source.name, "weight_bytes": weight_bytes(model, 1), "state_bytes": model.recurrent_bytes}
    result["share"] = measure_share(args, model)
    result["verify"] = measure_verification(args, models)
    result["turn"] = measure_turn(args, model)
    result["context"] = measure_contexts(args, model)
    for name in ("share", "verify", "turn", "context"):
        print(name, result[name])
    measure.save("hybrid", result, args.out)


if __name__ == "__main__":
    run_command(main)
