"""Speculation gives the tokens of plain decoding if the draft is deterministic, and otherwise its distribution."""

import dataclasses
import itertools
import json
import os
import shutil
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cases import SPARSE, random_heads, read_model, some_tokens, write_random
from conftest import random_prompts
from programs import ids, main
from schedules import GREEDY, masked_requests, random_requests, run_randomly
from table_model import DRAFT, MODEL, ROWS, SETTINGS, V, count, mask, p_value, settings_of

import speculative
from cli import UserError
from compile import compile_counts, compiled_steps, warm_up
from costs import weight_bytes
from drafts import draft_model, loading
from drafts.controller import Candidate
from drafts.draft import MAX_K, Draft, Proposal
from drafts.draft_model import ModelDraft, SelfDraft
from drafts.heads import MedusaDraft
from drafts.loading import lookup_name, read_lookup_text
from drafts.retrieval import RetrievalDraft
from engine import Engine, EngineOptions, Request, StepFunctions, generate
from formats import Quantization, quantize_model
from load import install_kernels, load_model
from options import DraftOption
from quantize import quantize_checkpoint
from sampling import SamplingParams, sample
from speculative import ProposalTensors, Report, Speculation

LENGTH = 96
KINDS = ["the same model", "another model", "a noisy copy", "int4-self", "lookup", "lookup in a text", "medusa"]
KINDS += ["lookup, medusa", "lookup, medusa, a noisy copy"]
DETERMINISTIC = ("lookup", "lookup in a text", "medusa", "lookup, medusa")


def make_drafts(kinds: str, tiny, name: str) -> list:
    return [make_draft(kind, tiny, name) for kind in kinds.split(", ")]


def make_draft(kind: str, tiny, name: str):
    if kind.startswith("lookup"):
        return RetrievalDraft([[*range(3, 131)] * 2] if kind == "lookup in a text" else [])
    if kind == "medusa":
        return MedusaDraft(install_kernels(random_heads(load_model(tiny(name)[2], dtype=torch.float32))))
    draft = load_model(tiny("llama-mha" if kind == "another model" else name)[2], dtype=torch.float32, kernels="torch")
    if kind == "a noisy copy":
        torch.manual_seed(1)
        for weight in draft.state_dict().values():
            weight += 0.05 * weight.std() * torch.randn_like(weight)
    vocabulary = install_kernels(some_tokens(draft)) if kind in ("int4-self", "another model") else None
    if kind == "int4-self":
        draft = quantize_model(draft, Quantization("int4", 32, "int8"))
    return (SelfDraft if kind == "int4-self" else ModelDraft)(install_kernels(draft), vocabulary)


def results(engine, requests: list[Request]) -> list[tuple]:
    """The results of an engine for copies of these requests, all added at once."""
    copies = [Request(r.prompt, r.params, r.max_new_tokens, r.stop_ids, r.on_token, r.logprobs) for r in requests]
    generate(engine, copies)
    return [(request.new_tokens, request.finish_reason) for request in copies]


CASES = [
    ("llama-gqa-biased", "the same model", 1, 5), ("mistral-window", "another model", 2, 5),
    ("qwen3-gqa", "a noisy copy", 3, 1), ("bloom-5", "int4-self", 4, 5), ("qwen2-sliding", "lookup", 5, 5),
    ("llama-yarn", "lookup in a text", 6, 1), ("bloom-3", "a noisy copy", 7, 5), ("qwen2-gqa", "the same model", 8, 5),
    ("mistral-gqa", "int4-self", MAX_K, 1), ("llama-llama3", "medusa", 1, 5), ("bloom-3", "medusa", 8, 1),
    ("qwen3-gqa", "lookup, medusa", 3, 5), ("llama-gqa-biased", "lookup, medusa, a noisy copy", 4, 5),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name, kind, k, rows", CASES)
def test_tokens_are_those_of_plain_decoding(tiny, tiny_model, name, kind, k, rows):
    """Greedy tokens, and with a deterministic draft also sampled ones: up to the end of the context, in reused caches,
    and if a stop id, on_token or max_new_tokens ends a request inside a proposal."""
    model, prompts = tiny_model(name), random_prompts((4, 23, 1, 9, 14)[-rows:])
    drawn = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, repetition_penalty=1.2, seed=5)
    kinds = (GREEDY, SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.3))
    requests = [[Request(p, params, 99) for p in prompts] for params in (*kinds, *[drawn] * (kind in DETERMINISTIC))]
    plain = [results(Engine(model, rows, 50), some) for some in requests]
    for prompt, (tokens, reason) in zip(prompts, plain[0]):
        assert (len(tokens), reason) == (51 - len(prompt), "length"), "the last token is not read"
    speculation = Speculation(make_drafts(kind, tiny, name), k, automatic=False)
    engine = Engine(model, rows, 50, decoding=speculation)
    assert [results(engine, some) for some in requests] == plain
    ends = [r for some in requests for r in some]
    for i, request in enumerate(ends):
        whole = plain[i // rows][i % rows][0]
        request.stop_ids, request.max_new_tokens = frozenset([whole[7]] * (i % 3 == 0)), 9 + i % 4
        request.on_token = (lambda token, last=whole[8]: token == last) if i % 3 == 1 else None
    assert results(engine, ends) == results(Engine(model, rows, 50), ends)
    numbers = speculation.report.numbers(1.0)["speculation"]
    assert numbers["steps"] and (not numbers["plain_steps"] or kind in DETERMINISTIC)
    if kind in ("a noisy copy", "int4-self"):
        assert 0 < sum(speculation.report.accepted) < sum(speculation.report.verified)


@pytest.mark.parametrize("kind, rows", [(SelfDraft, 1), (SelfDraft, 3), (ModelDraft, 3)])
def test_a_draft_with_experts(tmp_path, kind, rows):
    """It counts its own experts, and what it reads is what the tokens of one pass use."""
    folder = write_random(tmp_path / "x", SPARSE)
    model = read_model(folder, torch.float32)
    draft = quantize_model(read_model(folder, torch.float32), Quantization("int4", 32, "int8"))
    requests = [Request(prompt, GREEDY, 20) for prompt in random_prompts((7, 30, 1))]
    plain = results(Engine(model, rows, 60), requests)
    speculation = Speculation([kind(draft)], 4, automatic=False)
    engine = Engine(model, rows, 60, decoding=speculation)
    assert results(engine, requests) == plain
    assert 0 < sum(speculation.report.accepted) < sum(speculation.report.verified)
    counts = engine.timing.expert_counts
    assert counts[:, :-1].sum(1).tolist() == [2 * verified_tokens(engine)] * 2, "two experts for each token"
    assert draft.expert_counts.min() > 0
    [(weights, _)] = [speculation.drafts[0].bytes_read(3, [0] * rows)]
    assert weights == 3 * weight_bytes(draft, rows)
    share = (weight_bytes(model, rows + 4) - weight_bytes(model, rows)) / weight_bytes(model, rows) / 4
    assert speculation.controller.extra_share(rows, 4) == pytest.approx(share, rel=0.05)  # without embeddings


def verified_tokens(engine) -> int:
    """How many tokens the target has read in decode steps: the newest of each row, and the proposed ones."""
    return engine.timing.row_steps + engine.decoding.report.proposed


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_and_go(tiny, tiny_model, kind, monkeypatch):
    """More requests than rows, which arrive and are cancelled at random. Each gets the tokens that it gets alone in a
    plain engine, or if a draft model samples, alone in an engine with the same draft."""
    name = "llama-gqa-biased"
    model = tiny_model(name)
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 9)
    for seed in range(2):
        steps = StepFunctions(fixed_shapes=seed == 1)  # True: as for compiled steps, with rows of padding
        speculation = Speculation(make_drafts(kind, tiny, name), 3, automatic=False)
        engine = Engine(model, 4, LENGTH, steps, speculation, EngineOptions(7))
        requests = random_requests(12, seed)
        run_randomly(engine, requests, seed)
        exact = [r for r in requests if r.params.temperature == 0 or kind in DETERMINISTIC]
        for request, (alone, reason) in zip(exact, results(Engine(model, 1, LENGTH), exact)):
            n = len(request.new_tokens)
            assert request.new_tokens == (alone[:n] if request.finish_reason == "cancelled" else alone)
            assert request.finish_reason in ("cancelled", reason)


@pytest.mark.parametrize("kind", ["a noisy copy", "int4-self"])
def test_neighbours_change_no_draws(tiny, tiny_model, kind):
    """With a draft model and sampling, a row's tokens are those that it gets alone with the same draft."""
    name = "qwen3-gqa"
    model, requests = tiny_model(name), random_requests(9, 3)
    requests = [r for r in requests if r.params.temperature > 0]
    engine = Engine(model, 4, LENGTH, decoding=Speculation(make_drafts(kind, tiny, name), 4, automatic=False))
    run_randomly(engine, requests, 3, cancel=0)
    for request in requests:
        alone = Engine(model, 1, LENGTH, decoding=Speculation(make_drafts(kind, tiny, name), 4, automatic=False))
        assert results(alone, [request]) == [(request.new_tokens, request.finish_reason)]


def test_a_cleared_engine_has_its_draft_forget(tiny, tiny_model):
    """Engine.clear: the next prompt is read from its beginning by both models."""
    draft = make_draft("a noisy copy", tiny, "qwen3-gqa")
    engine = Engine(tiny_model("qwen3-gqa"), 1, LENGTH, decoding=Speculation([draft], 3, automatic=False))
    [prompt], read = random_prompts((20,)), []
    draft.model.register_forward_pre_hook(lambda module, inputs: read.append(inputs[1].shape[1]))
    for clear in (False, True):
        results(engine, [Request(prompt, GREEDY, 3)])
        if clear:
            engine.clear()
        del read[:]
        results(engine, [Request(prompt, GREEDY, 3)])
        assert (max(read) > 10) == clear


@pytest.mark.parametrize(
    "kind, temperature", [("the same model", 0.0), ("a noisy copy", 0.0), ("lookup", 0.0), ("lookup", 0.8)]
)
def test_logits_that_are_not_finite_end_a_row_alone(tiny, tiny_model, kind, temperature):
    """A token makes all later logits of its row NaN. The row ends with that token, or before it if it was proposed."""
    name = "llama-mha"  # its output head is not tied
    model, params = tiny_model(name), SamplingParams(temperature=temperature, seed=8)
    n = 2 if temperature else None
    requests = [Request(prompt, params, 20, logprobs=n) for prompt in random_prompts((5, 8))]
    [(tokens, _), (other, _)] = results(Engine(model, 2, LENGTH), requests)
    harmless = {*tokens[:5], *other, *requests[0].prompt, *requests[1].prompt}
    end = next(i for i, token in enumerate(tokens) if token not in harmless)
    model.embedding.weight = torch.nn.Parameter(model.embedding.weight.clone(), requires_grad=False)
    model.embedding.weight[tokens[end]] = float("nan")
    engine = Engine(model, 2, LENGTH, decoding=Speculation(make_drafts(kind, tiny, name), 3, automatic=False))
    [(found, reason), beside] = results(engine, requests)
    assert beside == (other, "length") and reason == "error"
    assert end - 3 < len(found) <= end + 1 and found == tokens[: len(found)]
    assert results(engine, requests[1:]) == [beside], "nothing of it is left in the cache"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", ["llama-mha", "mistral-window", "qwen35-wide", "lfm2-biased", "mixtral-3"])
def test_rejected_tokens_that_are_not_finite_do_no_harm(tiny, name, kernels, dtype):
    """Neither in the pass that rejects them nor in later ones, with proposals of one length and of several."""

    class Poisoned(Draft):
        name = "poisoned"

        def propose(self, batch, k):
            """As many right tokens as are ready, then two that are not finite."""
            proposed = []
            for row in batch.rows:
                right = expected[tuple(row.request.prompt)][len(row.request.new_tokens) :]
                proposed.append([*right[: self.ready[row.index]], poison, poison])
            return Proposal(proposed, k)

    model = load_model(tiny(name)[2], dtype=dtype, kernels=kernels)
    prompts = random_prompts((5, 21))
    expected = {}
    for prompt in prompts:
        [(expected[tuple(prompt)], _)] = results(Engine(model, 1, LENGTH), [Request(prompt, GREEDY, 12)])
    known = {token for pair in expected.items() for tokens in pair for token in tokens}
    poison = next(token for token in range(3, 131) if token not in known)
    model.embedding.weight = torch.nn.Parameter(model.embedding.weight.clone(), requires_grad=False)
    for value, ready in (("nan", (1, 1)), ("inf", (0, 2)), ("-inf", (2, 2))):
        model.embedding.weight[poison] = float(value)
        draft = Poisoned()
        draft.ready = ready
        speculation = Speculation([draft], max(ready) + 2, automatic=False)
        engine = Engine(model, 2, LENGTH, decoding=speculation)
        found = results(engine, [Request(prompt, GREEDY, 12) for prompt in prompts])
        assert found == [(tokens, "length") for tokens in expected.values()], (value, ready)
        assert sum(speculation.report.accepted) > 0


def test_logprobs_are_those_of_plain_decoding(tiny, tiny_model):
    model = tiny_model("llama-gqa-biased")
    for kind, params in (("lookup", SamplingParams(seed=3)), ("a noisy copy", GREEDY)):
        plain, speculated = (Request([7, 8, 9, 7, 8], params, 25, logprobs=2) for _ in range(2))
        generate(Engine(model, 1, LENGTH), [plain])
        speculation = Speculation(make_drafts(kind, tiny, "llama-gqa-biased"), 4, automatic=False)
        generate(Engine(model, 1, LENGTH, decoding=speculation), [speculated])
        assert speculated.new_tokens == plain.new_tokens and len(plain.token_logprobs) == 25
        for (a, best_a), (b, best_b) in zip(plain.token_logprobs, speculated.token_logprobs):
            assert a == pytest.approx(b, abs=1e-5) and [t for t, _ in best_a] == [t for t, _ in best_b]


def test_a_draft_with_a_smaller_table(tiny, tiny_model):
    """The model's embedding table may have more padding than the draft's. Ids beyond the draft's table are handled."""
    model = tiny_model("llama-gqa-biased")
    V = model.config.vocab_size
    draft = make_draft("the same model", tiny, "llama-gqa-biased")
    draft.model.config = dataclasses.replace(model.config, vocab_size=V - 70)
    table = draft.model.embedding
    table.weight = torch.nn.Parameter(table.weight[: V - 70], False)
    for params in (GREEDY, SamplingParams(seed=1)):
        requests = [Request(prompt, params, 30) for prompt in ([5, V - 1, 7], [V - 2])]
        plain = results(Engine(model, 2, LENGTH), requests)
        assert any(token >= V - 70 for tokens, _ in plain for token in tokens)
        engine = Engine(model, 2, LENGTH, decoding=Speculation([draft], 3, automatic=False))
        got = results(engine, requests)
        assert got == plain if params == GREEDY else {reason for _, reason in got} == {"length"}


@pytest.mark.parametrize("n_draft, n_model", [(90, None), (131, 120), (90, 120)])
def test_padding_of_a_table_is_never_proposed_or_drawn(tiny, tiny_model, n_draft, n_model):
    """Ids that exist only in the larger table are never proposed, those of the smaller one are."""
    model, draft = tiny_model("qwen2-gqa"), make_draft("the same model", tiny, "qwen2-gqa")
    model.config = dataclasses.replace(model.config, n_token=n_model)
    draft.model.config = dataclasses.replace(draft.model.config, n_token=n_draft)
    engine = Engine(model, 2, LENGTH, decoding=Speculation([draft], 3, automatic=False))
    for params in (GREEDY, SamplingParams(temperature=1.1, seed=1)):
        requests = [Request(prompt, params, 25) for prompt in random_prompts((3, 8))]
        got = results(engine, requests)
        assert params != GREEDY or got == results(Engine(model, 2, LENGTH), requests)
        assert max(max(tokens) for tokens, _ in got) < (n_model or 131)
    assert sum(engine.decoding.report.accepted) > 0


@pytest.mark.parametrize("now_and_then", [False, True])
def test_a_draft_proposes_its_own_continuation(tiny, tiny_model, now_and_then, monkeypatch):
    """After partial and full acceptance, plain steps in between, requests that come and go, reused prefixes and prompts
    that take several passes. A wrong entry in its caches would change its greedy text."""
    model, draft = tiny_model("qwen3-gqa"), make_draft("a noisy copy", tiny, "qwen3-gqa")
    alone = Engine(make_draft("a noisy copy", tiny, "qwen3-gqa").model, 1, 256)
    speculation, propose, lengths = Speculation([draft], 3, automatic=now_and_then), draft.propose, []
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 8)

    def watched(batch, k):
        found = propose(batch, k)
        for row, tokens in zip(batch.rows, found.tokens):
            assert len(tokens) in (0, k)  # 0 while it still reads the prompt
            [(expected, _)] = results(alone, [Request([*row.tokens, row.request.new_tokens[-1]], GREEDY, k)])
            assert tokens == expected[: len(tokens)]
            lengths.append(len(tokens))
        return found

    monkeypatch.setattr(draft, "propose", watched)
    if now_and_then:
        in_turn = itertools.cycle([0, 2, 0, 0, 0, 3, 1, 0, 1, 0, 0, 3])
        choices = (Candidate(0, k, k) if k else None for k in in_turn)
        monkeypatch.setattr(speculation.controller, "choose", lambda *_: next(choices))
    engine = Engine(model, 3, 256, None, speculation, EngineOptions(11))
    requests = [Request(prompt, GREEDY, 25) for prompt in random_prompts((5, 1, 12, 70, 30))]
    run_randomly(engine, requests, 1, cancel=0.02)
    turns = [Request([*r.prompt, *r.new_tokens, 77], GREEDY, 15) for r in requests]
    run_randomly(engine, turns, 2, cancel=0.02)
    assert any(turn.cached_tokens > 10 for turn in turns)
    assert lengths.count(0) > 4 and len(lengths) - lengths.count(0) > 20
    assert 0 < sum(speculation.report.accepted) < sum(speculation.report.verified)


def likeliest(inputs, settings):
    first = DRAFT.logits[inputs[0]].argmax(1)
    return torch.stack([first, DRAFT.logits[first].argmax(1)], 1)


OURS = SimpleNamespace(verify=speculative.verify, next_token=draft_model.next_token)


def three_tokens(module, how: dict, draw=None) -> torch.Tensor:
    """(ROWS,3): the three tokens after token 0 in each row, by steps with proposals of 2 tokens. draw(inputs, settings)
    draws them (n,2) deterministically; None: the module's next_token, with distributions."""
    settings = settings_of(ROWS, how)
    drafts_settings = settings.without_masks()
    texts, last = torch.zeros(ROWS, 10, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int64)  # the last place
    while len(rows := (last < 3).nonzero()[:, 0]):
        place = last[rows]
        inputs = torch.stack([texts[rows, place], place, rows])
        token, drafted, probs = inputs[0], [], []
        for at in (place, place + 1) if draw is None else ():
            token, p = module.next_token(DRAFT, (token[:, None], at[:, None], rows), drafts_settings, V, True)
            drafted.append(token)
            probs.append(p)
        drafted = torch.stack(drafted, 1) if draw is None else draw(inputs, settings)
        lengths = 2 - (rows % 5 == 0).long()  # some rows propose fewer tokens
        proposal = ProposalTensors(drafted, lengths, torch.stack(probs, 1) if probs else None)
        mask(settings, how, rows, place + 1, torch.cat([inputs[0][:, None], proposal.drafted], 1))
        found, n, logprobs, *_ = module.verify(MODEL, inputs, proposal, settings)
        before = torch.cat([inputs[0][:, None], found[:, :-1]], 1)
        expected = MODEL.logits.log_softmax(-1)[before, found]
        for i in range(3):
            there = i < n
            assert torch.allclose(logprobs[there, i], expected[there, i], atol=1e-5)
            texts[rows[there], (place + 1 + i)[there]] = found[there, i]
            count(settings, rows[there], found[there, i])
        last[rows] += n
    return texts[:, 1:4]


@pytest.mark.parametrize("how", SETTINGS, ids=repr)
@pytest.mark.slow
def test_tokens_have_the_distribution_of_the_model(how):
    assert p_value(three_tokens(OURS, how), how) > 0.001


@pytest.mark.slow
@pytest.mark.parametrize("how", SETTINGS, ids=repr)
def test_with_a_deterministic_draft_tokens_are_those_of_plain_sampling(how):
    settings, rows, plain = settings_of(ROWS, how), torch.arange(ROWS), []
    token = torch.zeros(ROWS, dtype=torch.int64)
    for i in range(3):
        position = torch.full((ROWS,), i + 1)
        mask(settings, how, rows, position, token[:, None])
        token = sample(MODEL.logits[token][:, None], rows, position, None, settings)[0][:, 0]
        count(settings, rows, token)
        plain.append(token)
    tokens = three_tokens(OURS, how, likeliest)
    assert torch.equal(tokens, torch.stack(plain, 1))
    assert p_value(tokens, how) > 0.001


@pytest.mark.parametrize("is_trial", [False, True])
def test_trials_of_threads_teach_the_controller_nothing(tiny_model, is_trial):
    """A step with another number of threads takes another time."""
    speculation = Speculation([RetrievalDraft()])
    engine = Engine(tiny_model("llama-gqa-biased"), 1, LENGTH, decoding=speculation)
    threads, real = engine.threads, engine.threads.of

    @contextmanager
    def of(*arguments, **options):
        threads.trials += is_trial
        with real(*arguments, **options):
            yield

    threads.of = of
    generate(engine, [Request([5, 6, 7], GREEDY, 20)])
    steps = speculation.report.plain_steps + speculation.report.steps
    assert steps > 2 and speculation.controller.steps == (0 if is_trial else steps)


def test_only_a_long_prompt_says_what_a_token_takes(tiny_model):
    speculation = Speculation([RetrievalDraft()])
    engine = Engine(tiny_model("llama-mha"), 1, LENGTH, decoding=speculation)
    for n, is_known in ((1, False), (15, False), (1, True)):  # 17 tokens together
        generate(engine, [Request(list(range(90 + n, 90 + 2 * n)), GREEDY, 2)])
        assert (speculation.controller.token_s is not None) == is_known


def test_reading_a_prompt_is_measured_apart_from_drafting(tiny, tiny_model, monkeypatch):
    """On a clock that only the draft model moves: by 1,000 s when it reads a prompt, and by 1 s for a token."""
    now, draft = [0.0], make_draft("the same model", tiny, "llama-mha")
    forward = draft.model.forward

    def slow_forward(tokens, *rest):
        now[0] += 1000.0 if tokens.shape[1] > 2 else 1.0
        return forward(tokens, *rest)

    monkeypatch.setattr(draft.model, "forward", slow_forward)
    monkeypatch.setattr(speculative.time, "perf_counter", lambda: now[0])
    speculation = Speculation([draft], 2, automatic=False)
    engine = Engine(tiny_model("llama-mha"), 2, LENGTH, decoding=speculation)
    generate(engine, [Request([*range(5, 25)], GREEDY, 9)])
    report, steps = speculation.report, speculation.report.steps
    assert steps > 1 and report.draft_s == report.drafts[draft.name]["seconds"] == 2.0 * steps
    timing = engine.timing
    assert (timing.prefill_s, timing.draft_prefill_s, timing.decode_s) == (0.0, 1000.0, 2.0 * steps)
    assert all(seconds < 1000 for seconds in engine.threads.kinds["draft draft model 2"].average_s.values())


def test_the_report_counts_places():
    report = Report()
    report.add("a", [2, 0, 1], [3, 3, 1])
    report.add("b", [0, 2], [0, 2])  # nothing was proposed for the first row
    report.count("b", seconds=0.5)
    assert report.accepted[:4] == [3, 2, 0, 0] and report.verified[:4] == [4, 2, 1, 0]
    numbers = report.numbers(2.0)
    assert numbers["mean_accepted_tokens"] == 5 / 4
    assert numbers["speculation"]["mean_proposed_tokens"] == 9 / 4
    assert numbers["speculation"]["acceptance_by_place"] == [3 / 4, 1.0, 0.0]
    assert numbers["speculation"]["drafts"] == [
        {"name": "a", "steps": 1, "proposed_tokens": 7, "accepted_tokens": 3, "share_of_time": 0.0},
        {"name": "b", "steps": 1, "proposed_tokens": 2, "accepted_tokens": 2, "share_of_time": 0.25},
    ]
    assert report.numbers(0)["speculation"]["drafts"][1]["share_of_time"] is None


@pytest.mark.slow
@pytest.mark.parametrize("name, kind, k, rows", [
    ("qwen3-gqa", "a noisy copy", 1, 1), ("mistral-window", "lookup", 3, 3),
    ("qwen2-gqa", "medusa, the same model", 3, 1),
])  # fmt: skip
def test_rehearsal_compiles_everything(tiny, tiny_model, name, kind, k, rows, monkeypatch):
    """After warm-up, no graph is missing for steps of any number of tokens, plain steps, one row or all rows, greedy or
    sampled. The tokens are those of eager steps. (test_rows_come_and_go tests draft models with padding rows.)"""
    torch._dynamo.reset()
    if kind != "lookup":  # without Inductor, which takes a minute; when a graph is compiled, Dynamo decides
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = tiny_model(name)
    everything = RetrievalDraft(random_prompts([40_000]))  # contains most pairs of tokens
    speculation = Speculation([everything] if kind == "lookup" else make_drafts(kind, tiny, name), k)
    engine = Engine(model, rows, LENGTH, compiled_steps(True, False), speculation, EngineOptions(9))
    for drawn in (False, True):
        warm_up(engine, random_prompts([5, 9, 3]), drawn)
    assert not speculation.rehearsing and speculation.report.steps == 0
    before = compile_counts()
    steps = itertools.count()

    def choose(rows, candidates):
        choices = [None, *candidates]
        return choices[next(steps) % len(choices)]

    monkeypatch.setattr(speculation.controller, "choose", choose)
    requests = random_requests(14, 4)
    run_randomly(engine, requests, 4)
    generate(engine, [Request([5, 6], SamplingParams(seed=2), 20), *masked_requests(5)])
    assert compile_counts() == before and before[0] >= 5 and speculation.report.steps > 10
    for request in requests:
        if request.params.temperature == 0 or kind == "lookup":
            [(alone, _)] = results(Engine(model, 1, LENGTH), [request])
            assert request.new_tokens == alone[: len(request.new_tokens)]


def test_the_program_speculates(tiny, capsys, monkeypatch):
    ours, prompts = tiny("qwen3-gqa")[2], random_prompts((4, 19))
    args = [part for prompt in prompts for part in ("--prompt_ids", ids(prompt))]
    args += ["--checkpoint_path", ours, "--max_new_tokens", 30, "--dtype", "float32"]
    args += ["--json", "--report", "--temperature", 0]
    plain, _ = main(capsys, monkeypatch, *args)
    assert plain["mean_accepted_tokens"] is None
    for more in (["--draft", "int4-self", "--speculate_k", 4], ["--draft_checkpoint_path", ours, "--speculate_k", 3]):
        result, err = main(capsys, monkeypatch, *args, *more)
        assert [s["token_ids"] for s in result["samples"]] == [s["token_ids"] for s in plain["samples"]]
        about = result["speculation"]
        assert sum(about["share_of_time"].values()) == pytest.approx(1) and " proposed tokens accepted, in " in err
        assert result["weight_bytes_per_token"] > 0 and len(about["acceptance_by_place"]) == more[-1]
    assert result["mean_accepted_tokens"] == pytest.approx(3, abs=0.3)  # limited by the room in the cache
    assert about["plain_steps"] == 0
    monkeypatch.setattr(loading, "read_heads", None)  # lookup needs no heads and no fingerprint of the model
    main(capsys, monkeypatch, *args, "--draft", "prompt-lookup", "--speculate_k", "auto")


@pytest.mark.parametrize("arguments, said", [
    (["--speculate_k", "16", "--draft", "prompt-lookup"], "must be auto, or between 1 and 15, not 16"),
    (["--speculate_k", "x", "--draft", "prompt-lookup"], "must be auto, or between 1 and 15, not x"),
    (["--draft_checkpoint_path", ""], "the path of a model is empty"),
    (["--draft", "prompt-lookup", "--roofline", "40"], "--roofline generates nothing"),
    (["--draft", "lookup:missing.txt"], "the checkpoint has no tokenizer"),
    (["--draft", "medusa:"], "'medusa:' is not one of"),
    (["--draft", "medusa:nowhere.safetensors"], "nowhere.safetensors"),
    (["--draft", "medusa:{other}/model.safetensors"], "is not a file of Medusa heads"),
    (["--draft", "int4-self", "--draft_checkpoint_path", "{other}"], "is another model"),
    (["--draft", "int4-self", "--checkpoint_path", "{int4}"], "has 4 bits already, and a draft should be smaller"),
    (["--draft_checkpoint_path", "nowhere"], "nowhere"), (["--draft_checkpoint_path", "{small}"], "has 77 tokens"),
])  # fmt: skip
def test_what_is_refused(tiny, tmp_path, capsys, monkeypatch, arguments, said):
    """Before the weights are read, which may take minutes."""
    monkeypatch.setattr("load.read_weights", lambda *_: pytest.fail("the weights were read"))
    ours, other = tiny("qwen3-gqa")[2], tiny("llama-mha")[2]
    small, int4 = tmp_path / "small", tmp_path / "int4"
    shutil.copytree(other, small)
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": 77}))
    if "{int4}" in arguments:
        quantize_checkpoint(other, int4, Quantization("int4", 32, "int8"))
    arguments = [argument.format(ours, other=other, small=small, int4=int4) for argument in arguments]
    with pytest.raises((UserError, SystemExit)) as end:
        main(capsys, monkeypatch, "--checkpoint_path", ours, "--prompt_ids", "5,6", *arguments)
    assert said in str(end.value) + capsys.readouterr().err


def test_lookup_reads_only_regular_files(tmp_path):
    """Reading a pipe would wait for its writer, and reading a device might never end."""
    os.mkfifo(tmp_path / "pipe")
    tokenizer = SimpleNamespace(vocabulary={"a": 0}, encode=lambda text, add_bos: [0] * len(text))
    checkpoint = SimpleNamespace(tokenizer=tokenizer, config=SimpleNamespace(vocab_size=1))
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(UserError, match=f"^{path} is not a regular file$"):
            read_lookup_text(str(path), checkpoint)
    with pytest.raises(UserError, match="missing cannot be read: .*No such file"):
        read_lookup_text(str(tmp_path / "missing"), checkpoint)
    (tmp_path / "text").write_text("aaa")
    (tmp_path / "link").symlink_to(tmp_path / "text")
    assert read_lookup_text(str(tmp_path / "link"), checkpoint) == [0, 0, 0]


@pytest.mark.slow
def test_another_tokenizer_is_refused_and_the_default_models_is_not(default_checkpoint, tmp_path, capsys, monkeypatch):
    other = tmp_path / "other"
    shutil.copytree(default_checkpoint, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = (next(text for text, i in vocabulary.items() if i == n) for n in (1234, 4321))
    vocabulary[a], vocabulary[b] = 4321, 1234
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    args = ["--draft_checkpoint_path", other, "--max_new_tokens", 12, "--prompt", "One, two, one, two, one,"]
    with pytest.raises(UserError, match="token 1234 is"):
        main(capsys, monkeypatch, "--checkpoint_path", default_checkpoint, *args)
    source = tmp_path / "source.txt"
    source.write_text("One, two, one, two, one, two, three.")
    args[:2] = ["--draft", f"lookup:{source}", "--speculate_k", 5, "--temperature", 0]
    result, _ = main(capsys, monkeypatch, "--checkpoint_path", default_checkpoint, *args, "--json")
    assert result["speculation"]["steps"] > 0


@pytest.mark.slow
def test_each_draft_is_reported(tiny, capsys, monkeypatch):
    """By the name that the user gave it, also if it never proposed."""
    ours = tiny("qwen3-gqa")[2]
    args = ["--checkpoint_path", ours, "--prompt_ids", "5,6,7,8,5,6,7,8", "--max_new_tokens", 30, "--dtype", "float32"]
    args += ["--json", "--report", "--temperature", 0, "--draft", "prompt-lookup"]
    for more, name in ((["--draft", "int4-self"], "int4-self"), (["--draft_checkpoint_path", ours], ours.name)):
        result, err = main(capsys, monkeypatch, *args, *more, "--speculate_k", 4)
        about = result["speculation"]
        lookup, model = about["drafts"]
        assert (lookup["name"], model["name"]) == ("prompt-lookup", name) and model["accepted_tokens"] > 0
        assert lookup["steps"] + model["steps"] == about["steps"]
        assert 0 < lookup["share_of_time"] + model["share_of_time"] <= about["share_of_time"]["draft"]
        assert f"\n{name}: {model['accepted_tokens']} of {model['proposed_tokens']} proposed " in err
    texts = ["medusa:lookup", "lookup:/books/a.txt", "prompt-lookup", "lookup:b.txt", "int4-self"]
    assert lookup_name([DraftOption.parse(text) for text in texts]) == "lookup:a.txt+prompt-lookup+lookup:b.txt"
