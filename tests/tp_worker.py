"""The processes of tests/test_tp.py.

`python tp_worker.py cases DIR` with RANK and WORLD_SIZE runs all cases of DIR/cases.pt, each on the first `ranks`
processes, and rank 0 writes DIR/found.pt. `torchrun tp_worker.py sabotage RANK STEP HOW ARGUMENTS` is generate.py
with one rank that dies, stops or raises an exception in its prefill or decode.
"""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from cases import random_heads

from compile import compiled_steps
from drafts.draft_model import ModelDraft
from drafts.heads import MedusaDraft
from drafts.mtp import MtpDraft
from drafts.retrieval import RetrievalDraft
from engine import Engine, EngineOptions, Request, SingleProcess, generate
from load import load_model
from sampling import SamplingParams
from speculative import Speculation
from tp import Shard

PROMPTS = [[5, 17, 33, 90, 2], [64], [3, 3, 80, 12, 9, 41, 77, 6, 25, 8, 51, 13]]  # of different lengths
NEW = 11  # new tokens
FEW = 6  # new tokens of runs that need fewer
ROWS = 2  # fewer rows than prompts, so that one joins later
LENGTH = 64

GREEDY = [SamplingParams(temperature=0.0)] * 3
DRAWN = [SamplingParams(seed=seed) for seed in (10, 11, 12)]
FILTERS = {"top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.2}
MIXED = [SamplingParams(temperature=0.9, seed=7, **FILTERS)]
MIXED += [SamplingParams(temperature=0.0, repetition_penalty=1.3), DRAWN[0]]


class GroupRanks:
    """The part of tp.Ranks that the engine needs, for a process group."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    def share(self, work=lambda: None):
        box = [work() if self.rank == 0 else None]
        dist.broadcast_object_list(box, group_src=0, group=self.group)
        return box[0]


def run(engine: Engine, params: list[SamplingParams], n: int, prompts=PROMPTS) -> list | None:
    """The new tokens of each prompt on rank 0 (where alone on_token ends one request early), None on the others."""
    if engine.ranks.rank:
        return engine.follow()
    requests = [Request(prompt, how, n) for prompt, how in zip(prompts, params)]
    requests[-1].on_token = lambda token: len(requests[-1].new_tokens) == n - 2
    generate(engine, requests)
    engine.close()
    assert [len(request.new_tokens) for request in requests] == [n] * (len(prompts) - 1) + [n - 2]
    return [request.new_tokens for request in requests]


def outcome(model, ranks=None, compiled: bool = False, draft=None) -> dict:
    """Everything that is compared: greedy tokens alone and in a batch, those of rows with other settings each, the
    logits of a prefill, and with a draft (a model, whole or split) tokens with it, with prompt lookup and with heads.
    What cache rows hold in the end, and how many tokens have used each expert, must be the same on every rank."""
    steps = compiled_steps(compiled, False)
    options = EngineOptions(5, ranks=ranks or SingleProcess())
    found = {}

    def note(name: str, params: list[SamplingParams], n: int, speculation=None, prompts=PROMPTS):
        engine = Engine(model, ROWS, LENGTH, steps, speculation, options)
        found[name] = run(engine, params, n, prompts)
        found[f"{name}: cache"] = [row.tokens for row in engine.rows]
        if model.expert_counts is not None:
            found[f"{name}: experts"] = model.expert_counts.tolist()

    note("greedy", GREEDY, NEW)
    note("mixed", MIXED, FEW)
    if not compiled:
        note("alone", GREEDY, FEW, prompts=PROMPTS[:1])
    drafts = {}
    if draft:
        drafts["model"] = lambda: [ModelDraft(draft)]
        drafts["lookup"] = lambda: [RetrievalDraft()]
        drafts["lookup and heads"] = lambda: [RetrievalDraft(), MedusaDraft(random_heads(model))]
    for kind, make in drafts.items():
        note(f"greedy, {kind}", GREEDY, NEW, Speculation(make(), 3, kind != "model"))
        note(f"drawn, {kind}", DRAWN, NEW, Speculation(make(), 2, False))
        assert found[f"greedy, {kind}"] == found["greedy"]
    if model.mtp is not None:
        draft = LoggedDraft(model)
        note("greedy, mtp", GREEDY, NEW, Speculation([draft], 3, False))
        found["proposals"] = draft.proposals
        assert found["greedy, mtp"] == found["greedy"]
    if not compiled:
        found["logits"] = prefill_logits(model)
    return found


class LoggedDraft(MtpDraft):
    """Keeps what it proposes."""

    def begin(self, engine):
        super().begin(engine)
        self.proposals = []

    def propose(self, batch, k):
        proposal = super().propose(batch, k)
        self.proposals.append(proposal.tokens)
        return proposal


@torch.no_grad()
def prefill_logits(model) -> list[torch.Tensor]:
    """The logits of all tokens of each prompt, from one prefill."""
    model.setup_caches(3, LENGTH)
    ids = torch.zeros(3, 12, dtype=torch.int64)
    at = torch.full((3, 12), -1)
    for row, prompt in enumerate(PROMPTS):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        at[row, : len(prompt)] = torch.arange(len(prompt))
    logits = model(ids, at, all_logits=True)
    return [logits[row, : len(prompt)] for row, prompt in enumerate(PROMPTS)]


def run_cases(folder: Path):
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    cases = torch.load(folder / "cases.pt", weights_only=False)
    sizes = sorted({case["ranks"] for case in cases.values()})
    groups = {n: dist.new_group(range(n)) for n in sizes}
    found = {}
    for name, case in cases.items():
        if rank >= case["ranks"]:
            continue
        group = groups[case["ranks"]]
        how = {"kernels": case["kernels"], "shard": Shard.in_group(group)}
        model = load_model(case["path"], dtype=torch.float32, draft=case["drafts"], **how)
        draft = load_model(case["path"], dtype=torch.float32) if case["draft"] else None
        mine = outcome(model, GroupRanks(group), case["compiled"], draft)
        everyone = [None] * case["ranks"]
        dist.all_gather_object(everyone, mine, group)
        for other in everyone:  # this fails if ranks have diverged
            shared = [kind for kind in mine if kind.endswith((": cache", ": experts"))]
            assert all(other[kind] == mine[kind] for kind in shared), name
        found[name] = mine
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def sabotage(rank: int, step: str, how: str):
    import engine
    import generate as program

    real = getattr(engine, step)
    calls = []
    last = 1 if step == "prefill" else 3

    def broken(*arguments):
        calls.append(None)
        if int(os.environ["RANK"]) == rank and len(calls) == last:
            if how == "raise":
                raise ValueError("sabotage")
            os.kill(os.getpid(), getattr(signal, how))
        return real(*arguments)

    program.load_engine = with_step(program.load_engine, step, broken)
    from tp import run_together

    run_together(program.main)


def with_step(load_engine, step: str, function):
    """A load_engine whose engine has this function instead of one of its steps."""

    def load(*arguments):
        engine = load_engine(*arguments)
        engine.next_steps = replace(engine.steps, **{step: function})
        return engine

    return load


if __name__ == "__main__":
    if sys.argv[1] == "cases":
        run_cases(Path(sys.argv[2]))
    rank, step, how = sys.argv[2:5]
    del sys.argv[1:5]
    sabotage(int(rank), step, how)
