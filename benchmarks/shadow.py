"""What the shadow of the output head leaves to read (docs/how-it-gets-fast.md), token by token.

Each model continues a page of docs/ with temperature 0.8. charts.py draws the bytes of weights of a token, with all
logits and with the shadow, and the share of the head that each token has needed.
"""

from statistics import mean

import measure
import torch

from cli import UserError, print_status, run_command
from costs import weight_reads
from engine import Engine, Request
from load import load_engine, open_checkpoint
from options import ModelOptions
from sampling import SamplingParams

SAMPLED = SamplingParams(temperature=0.8, seed=1)  # a greedy text would soon repeat itself


def shares_read(engine: Engine, prompt: list[int], n: int) -> list[float]:
    """The share of the head's blocks that each of n steps reads."""
    shadow = engine.model.backend.drawable_logits
    engine.add(Request(prompt, SAMPLED, n + 1))
    engine.step()  # prefill
    shares = []
    while engine.has_requests:
        before = shadow.counts.sum(0)
        engine.step()
        read, all_blocks = (shadow.counts.sum(0) - before).tolist()
        shares.append(read / all_blocks if all_blocks else 1.0)  # no pass was made with a shadow set aside
    return shares


@torch.no_grad()
def main():
    parser = measure.make_parser(__doc__, {"--new_tokens": 256})
    parser.add_argument("--models", nargs="+", required=True, help="each as for --checkpoint_path")
    args = parser.parse_args()

    text = (measure.ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    models = []
    for source in args.models:
        checkpoint = open_checkpoint(None if source == "default" else source)
        print_status(checkpoint.name)
        prompt = checkpoint.tokenizer.encode(text)[:64]
        engine = load_engine(checkpoint, ModelOptions(), 1, len(prompt) + args.new_tokens + 1)
        shadow = engine.model.backend.drawable_logits
        if shadow is None:
            raise UserError(f"{checkpoint.name} has no shadow")
        shares = shares_read(engine, prompt, args.new_tokens)
        model = {"model": checkpoint.name, "shares": shares, "mean_share": mean(shares), "largest_share": max(shares)}
        model["weight_bytes"] = weight_reads(engine.model).total(1)
        model["head_bytes"] = shadow.head.weight.nbytes
        model["shadow_bytes"] = shadow.nbytes
        models.append(model)
        print({key: value for key, value in model.items() if key != "shares"})
    measure.save("shadow", {"head": models, "new_tokens": args.new_tokens}, args.out)


if __name__ == "__main__":
    run_command(main)
