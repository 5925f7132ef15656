"""What experts cost in decode (docs/experts.md), on a file such as those of random_qwen35.py.

For each number of rows: how many experts a step reads in a layer, the bytes of weights that it reads
for each token, and its time, in turns with --dense, a model with as many weights as one token of
the other uses. The rows have different prompts, so they use different experts.

charts.py draws the bytes by the number of rows.
"""

from functools import partial
from statistics import mean, median

import measure
import torch

from cli import run_command
from costs import weight_reads
from engine import Engine, Request
from load import load_model, open_checkpoint
from model import Transformer
from report import expert_bytes_read

PROMPT = 32
STEPS = 24


def decode(model: Transformer, rows: int) -> dict:
    """The seconds and the bytes of weights of a step, and how many experts it reads in a layer."""
    engine = Engine(model, rows, PROMPT + STEPS + 8)
    prompts = torch.randint(300, 4000, (rows, PROMPT), generator=torch.Generator().manual_seed(rows))
    requests = [Request(prompt, measure.GREEDY, STEPS) for prompt in prompts.tolist()]
    for request in requests:
        engine.add(request)
    while min(len(request.new_tokens) for request in requests) < 2:  # all prompts have been read
        engine.step()

    engine.reset_timing()
    while not any(request.finish_reason for request in requests):  # with all rows
        engine.step()
    timing = engine.timing
    reads = weight_reads(model)
    nbytes = reads.dense + reads.row * rows + expert_bytes_read(reads, timing) / timing.decode_steps
    result = {"step_s": timing.decode_s / timing.decode_steps, "weight_bytes": nbytes}
    if reads.experts:
        read = timing.expert_counts[: len(reads.experts), -1]
        result["experts_read"] = read.double().mean().item() / timing.decode_steps
    return result


@torch.no_grad()
def main():
    parser = measure.make_parser(__doc__, {"--rounds": 5})
    parser.add_argument("--dense", required=True, help="a model with the weights that one token uses")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    args = parser.parse_args()

    source = open_checkpoint(args.checkpoint_path)
    models = {"sparse": load_model(source), "dense": load_model(open_checkpoint(args.dense))}
    reads = weight_reads(models["sparse"])
    result = {
        "model": source.name,
        "active_bytes": reads.total(1),
        "total_bytes": reads.dense + reads.n_expert * sum(reads.experts),
        "expert_bytes": mean(reads.experts),
        "n_expert": reads.n_expert,
        "n_active": reads.n_active,
        "rows": [],
    }
    for rows in args.rows:
        times = measure.take_turns({name: partial(decode, model, rows) for name, model in models.items()}, args.rounds)
        sparse = times["sparse"]
        row = {"rows": rows, "experts_read": median(measure.column(sparse, "experts_read"))}
        for name, rounds in times.items():
            row[f"{name}_bytes_per_token"] = median(measure.column(rounds, "weight_bytes")) / rows
            row[f"{name}_step_s"] = median(measure.column(rounds, "step_s"))
        dense_s = measure.column(times["dense"], "step_s")
        row |= measure.ratio("over_dense", dense_s, measure.column(sparse, "step_s"))
        result["rows"].append(row)
        print(row)
    measure.save("experts", result, args.out)


if __name__ == "__main__":
    run_command(main)
