"""What runs in the processes of tests/test_tp.py.

`python tp_worker.py cases DIR` with RANK and WORLD_SIZE: all cases of DIR/cases.pt, each over the first `ranks` of the
processes; rank 0 writes DIR/found.pt. `torchrun tp_worker.py sabotage RANK STEP HOW ARGUMENTS` is generate.py with one
rank that, in its prefill or decode, dies, stops or raises.
"""

import os
import signal
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from load import load_model
from tp import Shard

PROMPTS = [[5, 17, 33, 90, 2], [64], [3, 3, 80, 12, 9, 41, 77, 6, 25, 8, 51, 13]]  # ragged
NEW, FEW = 32, 8  # new tokens


def outcome(model, compiled: bool = False, draft=None) -> dict:
    """Everything that is compared, of every row: greedy tokens alone and in a batch, with and without penalty, drawn
    tokens, those with proposals of a draft (whole or split) and of the text itself, and all logits of a prefill."""
    from generate import compiled_steps, generate, prefill_rows
    from sampling import Sampling
    from speculative import Lookup, ModelDraft, Speculation

    steps = compiled_steps(compiled, False)
    model.setup_caches(3, 64)
    found = {}
    penalty, drawn = [1.3, 1.1, 0.8], ([7, 8, 9], [0.9, 1.0, 0.0], 20, 0.95, 0.01, 1.1)
    for name, settings, n in (
        ("greedy", Sampling.make(3, temperature=0.0), NEW),
        ("greedy, penalty", Sampling.make(3, temperature=0.0, repetition_penalty=penalty), FEW),
        ("drawn", Sampling.make(3, *drawn), FEW),
        ("drawn from all", Sampling.make(3, [10, 11, 12]), FEW),
    )[: 3 if compiled else 4]:
        found[name] = generate(model, PROMPTS, settings, n, steps=steps)
    greedy = Sampling.make(3, temperature=0.0)
    drafts = [ModelDraft(model, draft, steps.compiled, partial(prefill_rows, steps.prefill))] if draft else []
    for one in [*drafts, Lookup()] if draft or not compiled else ():
        speculation = Speculation(model, one, steps, 3, automatic=isinstance(one, Lookup))
        assert generate(model, PROMPTS, greedy, NEW, steps=steps, speculation=speculation) == found["greedy"]
        settings = Sampling.make(3, [4, 5, 6])
        found[f"speculated by {type(one).__name__}"] = drawn = generate(
            model, PROMPTS, settings, NEW, steps=steps, speculation=Speculation(model, one, steps, 2, False)
        )
        assert [len(ids) for ids, _ in drawn] == [NEW] * 3
    if not compiled:
        alone = Sampling.make(1, temperature=0.0)
        found["alone"] = generate(model, PROMPTS[:1], alone, NEW)
        ids, at = torch.zeros(3, 12, dtype=torch.int64), torch.full((3, 12), -1)
        for row, prompt in enumerate(PROMPTS):
            ids[row, : len(prompt)], at[row, : len(prompt)] = torch.tensor(prompt), torch.arange(len(prompt))
        with torch.no_grad():
            logits = model(ids, at, all_logits=True)
        found["logits"] = [logits[row, : len(prompt)] for row, prompt in enumerate(PROMPTS)]
    return found


def run_cases(folder: Path):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    cases, found = torch.load(folder / "cases.pt", weights_only=False), {}
    groups = {n: dist.new_group(range(n)) for n in sorted({case["ranks"] for case in cases.values()})}
    for name, case in cases.items():
        if rank >= case["ranks"]:
            continue
        group = groups[case["ranks"]]
        model = load_model(case["path"], "cpu", torch.float32, case["kernels"], shard=Shard.of(group))
        drafts = {"whole": None, "split": Shard.of(group)}
        if draft := case["draft"]:
            draft = load_model(case["path"], "cpu", torch.float32, shard=drafts[draft])
        mine = outcome(model, case["compiled"], draft)
        everyone = [None] * case["ranks"]
        dist.all_gather_object(everyone, mine, group)
        for other in everyone:  # ranks have parted where this fails
            assert all(other[kind] == mine[kind] for kind in mine if kind != "logits"), name
        sizes = {part: (tuple(t.shape), t.nbytes) for part, t in model.state_dict().items()}
        found[name] = mine | {"sizes": sizes}
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def sabotage(rank: int, step: str, how: str):
    import generate as program

    real, calls = getattr(program, step), []

    def broken(*arguments, **options):
        calls.append(None)
        if int(os.environ["RANK"]) == rank and len(calls) == (1 if step == "prefill" else 3):
            if how == "raise":
                raise ValueError("sabotage")
            os.kill(os.getpid(), getattr(signal, how))
        return real(*arguments, **options)

    setattr(program, step, broken)
    from tp import run_together

    run_together(program.main)


if __name__ == "__main__":
    if sys.argv[1] == "cases":
        run_cases(Path(sys.argv[2]))
    rank, step, how = int(sys.argv[2]), *sys.argv[3:5]
    del sys.argv[1:5]
    sabotage(rank, step, how)
