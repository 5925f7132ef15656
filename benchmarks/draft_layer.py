"""What an MTP layer costs and gains, by how often it is right (docs/speculation.md).

    python benchmarks/random_qwen35.py 0.8B QWEN2.gguf random.BF16.gguf --mtp
    llama-quantize random.BF16.gguf random.Q4_K_M.gguf Q4_K_M
    python benchmarks/draft_layer.py --checkpoint_path random.Q4_K_M.gguf

In such a file each token is followed by a fixed one, and the layer is always right. Noise is added to
the matrix that joins the token and the hidden state, as much as it takes for each of --agreements.
With agreement 0 the matrix is random. Each is decoded in turns with the same model without the layer,
by --rows rows, with the number of drafted tokens that the controller chooses.

With a layer that is always right, steps that draft a fixed number of tokens are measured as well: what
drafting takes, and what verifying takes, relative to a plain step. (The costs of the other runs mean
nothing: these are means over steps with and without drafts.)
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import measure
import torch
from random_qwen35 import CYCLE, STEP

from cli import run_command
from drafts.draft import MAX_K
from drafts.mtp import CHOICES, MtpDraft, ReducedHead
from engine import Engine, Request, generate
from layers import Linear
from load import load_model, open_checkpoint
from model import Transformer
from speculative import Report, Speculation

NEW = 128  # tokens of each answer
PROBES = 512  # tokens on which the agreement is measured


def set_noise(model: Transformer, noise: torch.Tensor, size: float):
    """Let the layer join the token with this noise (D,D), of a size relative to the token's."""
    D = model.config.dim
    matrix = torch.cat([torch.eye(D) + size * noise, torch.zeros(D, D)], dim=1)
    model.mtp.proj = Linear(2 * D, D, bias=False)
    model.mtp.proj.to(model.dtype).weight.copy_(matrix)


def agreement(model: Transformer) -> float:
    """How often the layer drafts the token that follows in the cycle."""
    head = ReducedHead(model)
    agreeing = 0
    cycle = (3 + STEP * torch.arange(PROBES)) % CYCLE
    for tokens in cycle.split(8):  # batches as in decoding, which run the same operations
        embedded = model.block_inputs(tokens[:, None])
        drafted = model.mtp.norm(model.mtp.join(embedded, torch.zeros_like(embedded)))
        found = head.logits(model, drafted)[:, 0].float().argmax(-1)
        agreeing += int((found == (tokens + STEP) % CYCLE).sum())
    return agreeing / PROBES


def find_noise(model: Transformer, noise: torch.Tensor, wanted: float) -> float:
    """The size of the noise with which the layer agrees this often with the model."""
    if wanted == 0:
        return 1e4
    low = 0.0
    high = 32.0
    for _ in range(12):
        middle = (low + high) / 2
        set_noise(model, noise, middle)
        if agreement(model) > wanted:
            low = middle
        else:
            high = middle
    return low if wanted < 1 else 0.0


def decode(engine: Engine) -> dict:
    """Decode an answer in each row. Returns the rate and the tokens, and with a draft what it did."""
    engine.clear()
    engine.reset_timing()
    requests = [Request([100 + 7 * row, 3 + row], measure.GREEDY, NEW) for row in range(len(engine.rows))]
    report = Report()
    if isinstance(engine.decoding, Speculation):
        engine.decoding.report = report
    generate(engine, requests)

    timing = engine.timing
    found = {"tokens": [request.new_tokens for request in requests], "steps": timing.decode_steps}
    found |= {"tokens_per_s": timing.decode_tokens / timing.decode_s, "step_s": timing.decode_s / timing.decode_steps}
    steps = max(1, report.steps)
    found |= {"draft_s": report.draft_s / steps, "verify_s": report.target_s / steps}
    found["accepted"] = sum(report.accepted) / max(1, sum(report.verified))
    found["plain_steps"] = report.plain_steps
    return found


def decode_with(model: Transformer, engine: Engine, change: Callable) -> dict:
    change(model)
    return decode(engine)


def make_engine(model: Transformer, rows: int, k: int | None = None) -> Engine:
    """An engine whose steps draft k tokens, or with None as many as its controller chooses."""
    decoding = Speculation([MtpDraft(model)], k or MAX_K, automatic=k is None)
    return Engine(model, rows, 2 * NEW, None, decoding)


def compare(plain: Engine, engines: dict[str, tuple[Engine, Callable]], rounds: int) -> dict:
    """Decode with each engine in turns with `plain`. For each, a function changes the model before."""
    turns = {"plain": partial(decode, plain)}
    for name, (engine, change) in engines.items():
        turns[name] = partial(decode_with, engine.model, engine, change)
    results = measure.take_turns(turns, rounds)

    base = results["plain"]
    base_rates = [one["tokens_per_s"] for one in base]
    found = {}
    for name in engines:
        own = results[name]
        assert all(one["tokens"] == other["tokens"] for one, other in zip(own, base)), f"{name}: other tokens"
        numbers = measure.ratio("over_plain", [one["tokens_per_s"] for one in own], base_rates)
        for key in ("accepted", "plain_steps", "steps"):
            numbers[key] = median(one[key] for one in own)
        for key in ("draft", "verify"):  # relative to a plain step
            numbers[f"{key}_cost"] = median(one[f"{key}_s"] / other["step_s"] for one, other in zip(own, base))
        found[name] = numbers
    return found


@torch.no_grad()
def main():
    parser = measure.make_parser(__doc__, {"--rounds": 5})
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--agreements", type=float, nargs="+", default=[0, 0.2, 0.4, 0.6, 0.8, 0.9, 1])
    args = parser.parse_args()

    source = open_checkpoint(args.checkpoint_path)
    without = load_model(source)
    model = load_model(source, draft=["mtp"])
    noise = torch.randn(model.config.dim, model.config.dim, generator=torch.Generator().manual_seed(1))
    noise /= model.config.dim**0.5
    sizes = {wanted: find_noise(model, noise, wanted) for wanted in args.agreements}

    result = {"model": source.name, "by_agreement": {}, "by_k": {}}
    for rows in args.rows:
        plain = Engine(without, rows, 2 * NEW)
        by_agreement = {}
        for wanted, size in sizes.items():
            change = partial(set_noise, noise=noise, size=size)
            by_agreement[str(wanted)] = (make_engine(model, rows), change)
        result["by_agreement"][rows] = compare(plain, by_agreement, args.rounds)
        right = partial(set_noise, noise=noise, size=0.0)
        by_k = {str(k): (make_engine(model, rows, k), right) for k in CHOICES}
        result["by_k"][rows] = compare(plain, by_k, args.rounds)
        for kind in ("by_agreement", "by_k"):
            for name, numbers in result[kind][rows].items():
                print(rows, kind, name, numbers)
    measure.save("draft_layer", result, args.out)


if __name__ == "__main__":
    run_command(main)
