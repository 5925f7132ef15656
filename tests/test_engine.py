"""The engine: every request gets the tokens that it would get alone, whichever requests join and leave beside it."""

import copy
import dataclasses
import pickle
import random
from functools import partial
from itertools import count

import pytest
import torch
from cases import SPARSE, read_model, write_random
from conftest import VOCABULARY, random_prompts
from schedules import GREEDY, fuzz_states, masked_requests, random_requests, run_randomly

import engine as engine_module
from cli import UserError
from compile import compile_counts, compile_per_shape, compiled_steps, warm_up
from drafts.retrieval import RetrievalDraft
from engine import Batch, Engine, EngineOptions, PlainDecoding, Request, StepFunctions, generate
from formats import Quantization
from kernels import has_kernel
from load import load_model
from quantize import quantize_checkpoint
from sampling import SamplingParams
from speculative import Speculation

LENGTH = 96


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory):
    """(name, format, dtype) -> a model, which is loaded once."""
    made = {}

    def get(name="llama-gqa-biased", format=None, dtype=torch.float32):
        if (name, format, dtype) not in made:
            directory = tiny(name)[2]
            if format:
                directory = tmp_path_factory.mktemp("quantized") / format
                quantize_checkpoint(tiny(name)[2], directory, Quantization(format, 32, "int8"))
            made[name, format, dtype] = load_model(directory, dtype=dtype)
        return made[name, format, dtype]

    return get


def tokens_of(model, request: Request, rows: int = 1, **options) -> list[int]:
    """The new tokens of a request with these settings, alone in an engine of its own."""
    alone = Request(request.prompt, request.params, request.max_new_tokens, request.stop_ids)
    generate(Engine(model, rows, LENGTH, **options), [alone])
    return alone.new_tokens


@pytest.mark.parametrize("format", [None, "int8", "int4"])
def test_schedules_change_no_tokens(models, format):
    model = models(format=format)
    for seed in range(3):
        requests = random_requests(14, seed)
        run_randomly(Engine(model, 4, LENGTH, options=EngineOptions(chunk_tokens=7)), requests, seed)
        for request in requests:
            alone = tokens_of(model, request)
            if request.finish_reason == "cancelled":
                assert request.new_tokens == alone[: len(request.new_tokens)]
            else:
                assert (request.new_tokens, request.finish_reason) == (alone, "length")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    return read_model(write_random(tmp_path_factory.mktemp("sparse") / "x", SPARSE), torch.float32)


@pytest.mark.parametrize("seed", range(3))
def test_schedules_of_a_model_with_experts(sparse, seed):
    """Rows that reuse prefixes, beside others, with drafts of which some are rejected."""
    fuzz_states(sparse, seed)


@pytest.mark.parametrize("format", ["int8", "int4", "iq4_nl"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_bits_of_quantized_models_depend_on_a_row_s_own_tokens_alone(models, format, dtype):
    """With the CPU kernels they are the same for all chunks, neighbours and offsets, and whatever wrote the prefix."""
    model = models(format=format, dtype=dtype)
    if not model.backend.chunk_invariant:
        pytest.skip("the CPU kernels cannot run here")
    for seed in range(3):
        requests = random_requests(10, seed + 10, longest=60)
        for request in requests:
            request.logprobs = 0
        chunk_tokens = random.Random(seed).choice([3, 16, 17, 29])
        engine = Engine(model, 3, LENGTH, options=EngineOptions(chunk_tokens))
        run_randomly(engine, requests, seed, cancel=0)
        held = {row.index: cache_of(model, row.index, len(row.tokens)) for row in engine.rows}
        tokens = [list(row.tokens) for row in engine.rows]
        for text, index in zip(tokens, held):
            afresh = Engine(model, 1, LENGTH)
            generate(afresh, [Request(text, GREEDY, 0)])
            assert torch.equal(cache_of(model, 0, len(text)), held[index])
        for request in requests:
            alone = Request(request.prompt, request.params, request.max_new_tokens, logprobs=0)
            generate(Engine(model, 1, LENGTH), [alone])
            assert alone.token_logprobs == request.token_logprobs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_bits_of_plain_weights_do_not_depend_on_chunks(models, dtype):
    """This holds within prefill only. PyTorch does not promise it for its products, so this test probes it."""
    model = models(dtype=dtype)
    if not has_kernel("attention", model.device):
        pytest.skip("PyTorch's own attention rounds differently for other numbers of tokens")
    prompts = random_prompts([90, 61, 35, 17, 8])

    def caches(rows: int, chunk_tokens: int, beside: bool) -> list:
        engine = Engine(model, rows, 128, options=EngineOptions(chunk_tokens=chunk_tokens))
        if beside:  # a row that is always decoding, so that prompts are read in chunks
            engine.add(Request([5, 6, 7], GREEDY, 100))
            engine.step()
        found = []
        for prompt in prompts:
            request = Request(prompt, GREEDY, 0)
            engine.add(request)
            while request.finish_reason is None:
                engine.step()
            row = next(row for row in engine.rows if row.tokens == prompt)
            found.append(cache_of(model, row.index, len(prompt)))
            engine.clear()
        return found

    whole = caches(1, 256, beside=False)
    for rows, chunk_tokens in ((2, 256), (2, 32), (3, 19), (2, 7)):
        for prompt, expected, got in zip(prompts, whole, caches(rows, chunk_tokens, beside=True)):
            assert torch.equal(expected, got), f"a prompt of {len(prompt)} tokens in chunks of {chunk_tokens}"


def cache_of(model, row: int, n: int) -> torch.Tensor:
    caches = [cache for block in model.blocks for cache in (block.attention.cache.k, block.attention.cache.v)]
    return torch.stack([cache[row, :, :n].clone() for cache in caches])


def test_penalties_count_generated_tokens(tiny, models):
    """The oracle is transformers' logits with penalties in plain Python."""
    penalties = {"repetition_penalty": 2.1, "frequency_penalty": 0.9, "presence_penalty": 0.6}
    params = SamplingParams(**penalties, temperature=0.0)
    oracle, prompt, said = tiny("llama-gqa-biased")[0], random_prompts([9])[0], []
    for _ in range(20):
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + said])).logits[0, -1].tolist()
        for i in {*prompt, *said}:
            logits[i] = logits[i] * 2.1 if logits[i] < 0 else logits[i] / 2.1
        scores = [x - 0.9 * said.count(i) - 0.6 * (i in said) for i, x in enumerate(logits)]
        said.append(max(range(VOCABULARY), key=scores.__getitem__))
    requests = [Request(prompt, GREEDY, 20), Request(prompt, params, 20)]
    generate(Engine(models(), 2, LENGTH), requests)
    assert requests[1].new_tokens == said != requests[0].new_tokens


def test_prefixes_are_reused(models):
    model = models()
    engine = Engine(model, 3, LENGTH)
    prompt, other = random_prompts([30, 20])
    first = Request(prompt, GREEDY, 8)
    generate(engine, [first])
    assert first.cached_tokens == 0
    turn = Request(prompt + first.new_tokens + other[:5], GREEDY, 4)  # the next turn of a conversation
    generate(engine, [turn])
    assert turn.cached_tokens == 30 + 7, "the last new token was not read by the model"
    assert turn.new_tokens == tokens_of(model, turn)
    again = Request(prompt, GREEDY, 8)
    generate(engine, [again])
    assert again.cached_tokens == 29 and again.new_tokens == first.new_tokens, "the last token is read for its logits"


def test_a_prefix_of_a_busy_row_is_copied(models):
    model = models()
    engine = Engine(model, 2, LENGTH)
    prompt = random_prompts([30])[0]
    busy = Request(prompt, GREEDY, 30)
    engine.add(busy)
    for _ in range(4):
        engine.step()
    late = Request(prompt[:25] + [3, 4], GREEDY, 6)
    engine.add(late)
    while engine.has_requests:
        engine.step()
    assert late.cached_tokens == 25
    for request in (busy, late):
        assert request.new_tokens == tokens_of(model, request)


def test_a_conversation_survives_another_with_the_same_beginning(models):
    """A new request gets its own row, and not that of a conversation with the same system prompt."""
    engine = Engine(models(), 2, LENGTH)
    system, rest, other = random_prompts([10, 40, 6])
    conversation = Request(system + rest, GREEDY, 3)
    generate(engine, [conversation])
    newcomer = Request(system + other, GREEDY, 3)
    generate(engine, [newcomer])
    assert newcomer.cached_tokens == 10
    turn = Request(system + rest + conversation.new_tokens, GREEDY, 3)
    generate(engine, [turn])
    assert turn.cached_tokens == 52


def test_the_row_least_recently_used_is_overwritten(models):
    engine = Engine(models(), 3, LENGTH)
    prompts = [[i] * 9 for i in range(3, 7)]
    for prompt in prompts[:3]:
        generate(engine, [Request(prompt, GREEDY, 1)])
    generate(engine, [Request(prompts[0], GREEDY, 1)])  # used once more
    generate(engine, [Request(prompts[3], GREEDY, 1)])
    assert [row.tokens[0] for row in engine.rows] == [3, 6, 5]


def test_decoding_rows_go_on_while_a_prompt_is_read(models):
    engine = Engine(models(), 2, LENGTH, options=EngineOptions(chunk_tokens=10))
    first = Request([5, 6], GREEDY, 40)
    engine.add(first)
    engine.step()
    long = Request(random_prompts([55])[0], GREEDY, 1)
    engine.add(long)
    for _ in range(6):
        before = len(first.new_tokens)
        assert long.finish_reason is None
        engine.step()
        assert len(first.new_tokens) == before + 1
    assert long.finish_reason == "length", "six chunks of ten tokens"


def test_short_prompts_go_first_but_a_long_one_is_not_starved(models):
    engine = Engine(models(), 4, LENGTH, options=EngineOptions(chunk_tokens=8))
    engine.add(Request([5, 6], GREEDY, 90))
    engine.step()
    long = Request(random_prompts([60])[0], GREEDY, 1)
    engine.add(long)
    short_seed = count(100)
    steps = 0
    while long.finish_reason is None:
        while len(engine.waiting) < 2:  # short prompts keep arriving
            engine.add(Request(random_prompts([8], seed=next(short_seed))[0], GREEDY, 1))
        engine.step()
        steps += 1
    assert 8 <= steps <= 8 + engine_module.MAX_WAIT + 60 // 8 + 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_listener_ends_its_request_alone(models, fails):
    model, heard = models(), []

    def listen(token):
        heard.append(token)
        if fails and len(heard) == 3:
            raise RuntimeError("a broken pipe\nand more")
        return len(heard) == 3

    request, other = Request([5, 6], GREEDY, 9, on_token=listen), Request([7], GREEDY, 9)
    generate(Engine(model, 2, LENGTH), [request, other])
    assert (request.finish_reason, request.error) == (("error", "a broken pipe") if fails else ("stop", None))
    assert request.new_tokens == heard and len(heard) == 3
    assert other.new_tokens == tokens_of(model, other)


def test_stop_ids_end_a_request_with_the_token(models):
    model = models()
    text = tokens_of(model, Request([5, 6], GREEDY, 9))
    stop = next(token for i, token in enumerate(text) if i > 2 and token not in text[:i])
    request = Request([5, 6], GREEDY, 9, frozenset([stop, VOCABULARY]))
    generate(Engine(model, 1, LENGTH), [request])
    assert (request.finish_reason, request.new_tokens) == ("stop", text[: text.index(stop) + 1])


@pytest.mark.parametrize("temperature, n", [(0.0, 9), (0.8, 9), (0.0, 0)])
def test_logits_that_are_not_finite_end_their_request_alone(models, temperature, n):
    """Also of a request that only reads its prompt (n = 0)."""
    model = copy.deepcopy(models("qwen3-gqa"))  # its output head is not tied
    params = SamplingParams(temperature=temperature)
    other = Request([7, 8, 9], params, 9)
    expected = tokens_of(model, other)
    model.embedding.weight = torch.nn.Parameter(model.embedding.weight.clone(), requires_grad=False)
    poison = next(token for token in range(3, VOCABULARY) if token not in (7, 8, 9, *expected))
    model.embedding.weight[poison] = float("nan")
    engine = Engine(model, 2, LENGTH)
    bad = Request([5, poison, 6], params, n, logprobs=1)
    generate(engine, [bad, other])
    assert (bad.finish_reason, bad.new_tokens) == ("error", []) and "not finite" in bad.error
    assert (other.finish_reason, other.new_tokens) == ("length", expected)
    after = Request([5, poison], params, min(n, 2))
    generate(engine, [after])
    assert after.cached_tokens == 0, "the cache of a failed row is not reused"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", ["llama-mha", "mistral-window", "qwen35-wide", "lfm2-biased", "mixtral-3"])
def test_a_prefix_of_a_request_that_is_not_finite_can_be_reused(tiny, name, kernels, dtype):
    """A request with this prefix comes while the other one waits, is read, or has ended, and gets its usual tokens."""
    model = load_model(tiny(name)[2], dtype=dtype, kernels=kernels)
    shared, first, second, third = random_prompts([30, 9, 13, 20], seed=2)
    prompts = [shared + second, third]
    expected = [tokens_of(model, Request(prompt, GREEDY, 6)) for prompt in prompts]
    known = {*shared, *first, *second, *third, *expected[0], *expected[1]}
    poison = next(token for token in range(3, VOCABULARY) if token not in known)
    model.embedding.weight = torch.nn.Parameter(model.embedding.weight.clone(), requires_grad=False)
    cached = []
    ways = [("nan", 50, 1, "error"), ("inf", 34, 1, "error"), ("-inf", 17, 0, "error"), ("nan", 17, 9, "error")]
    for value, chunk, steps, reason in [*ways, ("nan", 34, 1, "cancelled"), ("inf", 17, 2, "cancelled")]:
        model.embedding.weight[poison] = float(value)
        engine = Engine(model, 3, LENGTH, options=EngineOptions(chunk_tokens=chunk, always_chunk=True))
        bad = Request([*shared, poison, *first, poison], GREEDY, 6)
        requests = [Request(prompt, GREEDY, 6, logprobs=1) for prompt in prompts]
        engine.add(bad)
        for _ in range(steps):
            engine.step()
        if reason == "cancelled":
            engine.cancel(bad)
        generate(engine, requests)
        assert (bad.finish_reason, bad.new_tokens) == (reason, [])
        assert [request.new_tokens for request in requests] == expected, (value, chunk, steps)
        cached.append(requests[0].cached_tokens)
    assert max(cached) > 0


def test_the_functions_of_a_step_may_be_replaced_during_it(models):
    """As compile.compile_while_serving does in another thread: a step is run by those with which it has begun."""
    model, shapes = models(), []

    def decode(model, inputs, sampling):
        shapes.append(inputs.shape)
        return engine_module.decode(model, inputs, sampling)

    def prefill_first(*arguments):
        engine.next_steps = StepFunctions(decode=decode, fixed_shapes=True)
        assert engine.steps.prefill is prefill_first
        return engine_module.prefill(*arguments)

    engine = Engine(model, 3, LENGTH, StepFunctions(prefill=prefill_first))
    requests = [Request(prompt, GREEDY, 4) for prompt in random_prompts([4, 6])]
    for request in requests:
        engine.add(request)
    while engine.has_requests:
        engine.step()
    assert set(shapes) == {(3, 3)}, "these functions take one row or all rows"
    assert [request.new_tokens for request in requests] == [tokens_of(model, request) for request in requests]


class Recorded(torch.Tensor):
    """A tensor that records the names of the methods by which it is read."""

    calls: list[str] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)


def test_each_pass_is_waited_for(models):
    """Also one after which no prompt is complete: reading a value waits for a GPU."""
    prefill = lambda *arguments: engine_module.prefill(*arguments).as_subclass(Recorded)  # noqa: E731
    engine = Engine(models(), 1, LENGTH, StepFunctions(prefill=prefill), options=EngineOptions(8, always_chunk=True))
    engine.add(Request(random_prompts([40])[0], GREEDY, 1))
    engine.step()
    assert {"item", "tolist", "__bool__"} & {*Recorded.calls}


def test_cancelling(models):
    model = models()
    engine = Engine(model, 1, LENGTH)
    running, waiting, last = (Request(prompt, GREEDY, 20) for prompt in random_prompts([4, 6, 5]))
    for request in (running, waiting, last):
        engine.add(request)
    for _ in range(3):
        engine.step()
    for request in (waiting, running, running, waiting):  # cancelling twice has the effect of once
        engine.cancel(request)
    ended = engine.step()
    assert len(ended) == 2 and set(ended) == {running, waiting} and engine.rows[0].request is last
    while engine.has_requests:
        engine.step()
    assert [request.finish_reason for request in (running, waiting, last)] == ["cancelled", "cancelled", "length"]
    assert len(running.new_tokens) == 3 and waiting.new_tokens == [] and last.new_tokens == tokens_of(model, last)


@pytest.mark.parametrize("prompt, why", [
    ([], "empty"), ([1] * 25, "25 tokens, the context is 24"), ([VOCABULARY], "outside the vocabulary"), ([-1], "-1"),
])  # fmt: skip
def test_prompts_that_cannot_be_served_are_refused(models, prompt, why):
    with pytest.raises(UserError, match=why):
        Engine(models(), 1, 24).add(Request(prompt, GREEDY))


def test_logprobs_are_those_of_transformers(tiny, models, monkeypatch):
    model, oracle = models(), tiny("llama-gqa-biased")[0]
    monkeypatch.setattr(engine_module, "SCORED_POSITIONS", 7)
    rows_of_head = []
    head = type(model).head
    monkeypatch.setattr(type(model), "head", lambda self, x, *rest: rows_of_head.append(len(x)) or head(self, x, *rest))
    params = SamplingParams(temperature=0.9, top_k=30, repetition_penalty=1.3, seed=4)
    prompts = random_prompts([33, 1, 8])
    requests = [Request(prompt, params, 6, logprobs=3, prompt_logprobs=2) for prompt in prompts]
    engine = Engine(model, 2, LENGTH, options=EngineOptions(chunk_tokens=9))
    generate(engine, [Request(prompts[0], GREEDY, 1)])
    generate(engine, requests)  # two rows side by side; cached prefixes are not used
    assert max(rows_of_head) <= 7
    for request in requests:
        ids = request.prompt + request.new_tokens
        expected = oracle(torch.tensor([ids])).logits[0].detach().log_softmax(-1)
        got = request.prompt_token_logprobs + request.token_logprobs
        assert (len(request.prompt_token_logprobs), len(request.token_logprobs)) == (len(request.prompt) - 1, 6)
        for i, (own, best) in enumerate(got):
            assert own == pytest.approx(float(expected[i, ids[i + 1]]), abs=2e-5)
            values, tokens = expected[i].topk(2 if i < len(request.prompt) - 1 else 3)
            assert [token for token, _ in best] == tokens.tolist()
            assert [value for _, value in best] == pytest.approx(values.tolist(), abs=2e-5)


def test_ids_that_only_pad_the_table_have_no_probability(models, monkeypatch):
    """Neither in sampling nor in log-probabilities, although a prompt may contain them."""
    model = models()
    monkeypatch.setattr(model, "config", dataclasses.replace(model.config, n_token=100))
    request = Request([5, 6, 7], GREEDY, 6, logprobs=2)
    generate(Engine(model, 1, LENGTH), [request])
    text = Request([5, 6, 7, *request.new_tokens, 120], GREEDY, 0, prompt_logprobs=200)
    generate(Engine(model, 1, LENGTH), [text])
    scored = [own for own, _ in text.prompt_token_logprobs]
    assert scored[2:-1] == pytest.approx([own for own, _ in request.token_logprobs], abs=2e-5)
    assert scored[-1] == float("-inf")
    assert max(token for _, best in text.prompt_token_logprobs for token, _ in best) == 99


def test_tokens_beyond_the_end_of_a_request_have_no_logprobs(models):
    """Speculation may find more tokens than the request asked for."""
    model, prompt = models(), [5, 6, 7, 8] * 5
    said = tokens_of(model, Request(prompt, GREEDY, 30))
    draft = RetrievalDraft([prompt + said] * 2)
    for n in range(1, 12):
        request = Request(prompt, GREEDY, n, logprobs=0)
        generate(Engine(model, 1, LENGTH, decoding=Speculation([draft], 7, automatic=False)), [request])
        assert request.new_tokens == said[:n] and len(request.token_logprobs) == n


class Recorder:
    """Stands for several ranks: it records the plans, which a follower then executes."""

    def __init__(self, rank: int, plans: list):
        self.rank, self.size, self.plans = rank, 2, plans

    def share(self, work=None):
        if self.rank == 0:
            return self.plans.append(pickle.dumps(work()))
        return pickle.loads(self.plans.pop(0))


def test_a_follower_does_what_the_first_rank_does(models):
    model, plans = models(), []
    leader = Engine(model, 3, LENGTH, options=EngineOptions(9, ranks=Recorder(0, plans)))
    requests = random_requests(12, 5)
    for request in requests[::3]:
        request.on_token = lambda token, request=request: len(request.new_tokens) >= 3  # only rank 0 calls it
    run_randomly(leader, requests, 5)
    held, texts = [cache_of(model, row.index, len(row.tokens)) for row in leader.rows], [r.tokens for r in leader.rows]
    leader.close()
    follower = Engine(model, 3, LENGTH, options=EngineOptions(9, ranks=Recorder(1, plans)))
    follower.follow()
    follower.close()
    assert [row.tokens for row in follower.rows] == texts and not plans
    assert [row.request for row in follower.rows] == [None] * 3
    for row, expected in zip(follower.rows, held):
        assert torch.equal(cache_of(model, row.index, len(row.tokens)), expected)


@pytest.mark.slow
def test_another_number_of_threads_needs_no_new_graph_of_prefill(models, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    engine, before = Engine(models(), 1, LENGTH, compiled_steps(False, True)), torch.get_num_threads()
    counts = []
    try:
        for threads in (2, 1, 2):
            torch.set_num_threads(threads)
            engine.clear()
            generate(engine, [Request(random_prompts([30])[0], GREEDY, 1)])
            counts.append(compile_counts()[0])
    finally:
        torch.set_num_threads(before)
    assert counts[0] > 0 and len(set(counts)) == 1


@pytest.mark.slow
def test_no_graph_is_compiled_again(models, monkeypatch):
    """After warm-up, for any settings, lengths or numbers of rows. The tokens are those of eager steps. Dynamo alone
    decides when a graph is compiled, so Inductor is left out: test_generate.py runs what it compiles."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = models()
    engine = Engine(model, 4, LENGTH, compiled_steps(True, False), options=EngineOptions(chunk_tokens=9))
    for drawn in (False, True):
        assert warm_up(engine, random_prompts([5, 9, 3, 12]), drawn) > 0
    before = compile_counts()
    assert before[0] > 0
    requests = random_requests(50, 7)
    run_randomly(engine, requests, 7)
    generate(engine, masked_requests(7))
    assert compile_counts() == before
    for request in requests:
        assert request.new_tokens == tokens_of(model, request)[: len(request.new_tokens)]
        assert request.finish_reason in ("length", "cancelled")


def test_code_that_cannot_be_compiled_is_named_in_one_line(models, monkeypatch):
    model = models()
    monkeypatch.setattr(type(model), "head", lambda self, x: print(x) or self.linear_head(x))
    engine = Engine(model, 1, LENGTH, compiled_steps(True, False))
    with pytest.raises(UserError, match=r"--compile cannot compile .*test_engine.py:\d+, .* leave out --compile"):
        warm_up(engine, [[5, 6]], False)


def test_graphs_do_not_check_modules_again(models, monkeypatch):
    """Whatever the arguments are called: a change of a module that its guards would notice needs no new graph."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    target, other = models(), models()
    target.setup_caches(1, 8)
    x = torch.randn(1, 3, target.config.dim)
    step, counts = compile_per_shape(lambda target, x, table: table(target.norm(x))), []
    for eps in (1e-5, 1e-3):  # a constant of the graph
        target.norm.eps = other.norm.eps = eps
        step(target, x, other.norm)
        counts.append(compile_counts()[0])
    assert counts[0] == counts[1] > 0


def test_with_always_chunk_every_step_reads_one_chunk(models):
    """Also while no row is decoding; a short prompt that comes later is read before the rest of a long one."""
    model = models()
    engine = Engine(model, 2, LENGTH, options=EngineOptions(8, always_chunk=True))
    long, short = (Request(prompt, GREEDY, 4) for prompt in random_prompts([40, 5]))
    engine.add(long)
    engine.step()
    assert [len(row.tokens) for row in engine.rows if row.request is long] == [8]
    engine.add(short)
    engine.step()
    assert len(short.new_tokens) == 1 and not long.new_tokens
    while engine.has_requests:
        before = engine.timing.prefill_tokens
        engine.step()
        assert engine.timing.prefill_tokens - before <= 8
    assert [request.new_tokens for request in (long, short)] == [tokens_of(model, one) for one in (long, short)]


@pytest.mark.parametrize("prompt", ["hello", ["he", "llo"], torch.tensor([5, 6])], ids=str)
def test_a_prompt_that_is_no_list_of_ids_says_what_to_do(prompt):
    with pytest.raises(TypeError, match=r"expected a list of token ids; tokenizer.encode\(text\)") as caught:
        Request(prompt)
    assert "\n" not in str(caught.value) and f"is a {type(prompt).__name__}," in str(caught.value)


def test_a_request_runs_once(tiny_model):
    engine = Engine(tiny_model("llama-mha"), 1, 32)
    request = Request([5, 6], SamplingParams(temperature=0.0), 3)
    generate(engine, [request])
    before = list(request.new_tokens)
    with pytest.raises(ValueError, match="added to an engine before, and runs once; make a new Request"):
        engine.add(request)
    assert not engine.has_requests and request.new_tokens == before


def test_a_run_that_fails_leaves_nothing_in_the_engine(tiny_model):
    """Nor one whose second request is refused: the next run is as if there had been none."""
    engine = Engine(tiny_model("llama-mha"), 2, 32)
    greedy = SamplingParams(temperature=0.0)
    expected = Request([5, 6], greedy, 9)
    generate(engine, [expected])
    wrong = [Request([7, 8], greedy, 9, 3), Request([7, 8], greedy, None), Request([7, 8], greedy, 9, logprobs="2")]
    for requests in ([wrong[0]], [wrong[1]], [wrong[2]], [Request([5, 9], greedy, 9), Request([], greedy, 9)]):
        with pytest.raises(Exception):  # noqa: B017
            generate(engine, requests)
        request = Request([5, 6], greedy, 9)
        generate(engine, [request])
        assert request.new_tokens == expected.new_tokens and not engine.has_requests


def test_a_full_row_ends_a_request(models):
    request = Request(random_prompts([20])[0], GREEDY, 100)
    generate(Engine(models(), 1, 24), [request])
    assert (request.finish_reason, len(request.new_tokens)) == ("length", 5), "the last token is not read"


def test_a_plan_is_made_without_changing_anything(models):
    """Rows, queue and cache stay as they are: making it once more gives the same plan."""
    model = models("qwen35-wide")
    engine = Engine(model, 3, LENGTH)
    prompts = random_prompts([20, 30, 40, 25])
    for request in [Request(prompt, GREEDY, 30) for prompt in prompts[:2]]:
        engine.add(request)
    engine.step()
    engine.cancel(engine.rows[0].request)
    for prompt in prompts[2:]:
        engine.add(Request(prompts[0][:9] + prompt, GREEDY, 5))
    waiting = list(engine.waiting)

    def state():
        return copy.deepcopy([vars(row) for row in engine.rows]), held_state(model)

    before, tensors = state()
    plan = engine.make_plan()
    assert (plan.ended, [admission.request for admission in plan.admitted], plan.decoding) == ([0], waiting, [1])
    after, others = state()
    assert repr(before) == repr(after) and list(engine.waiting) == waiting
    assert all(torch.equal(one, other) for one, other in zip(tensors, others))
    engine.cancel(engine.rows[0].request)
    assert engine.make_plan() == plan
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.decoding = []


def held_state(model) -> list[torch.Tensor]:
    return [tensor.clone() for state in model.states for tensor in state.buffers()]


def test_requests_that_join_together_reuse_each_other_s_prefix(models):
    """The plan takes into account which rows the requests before in the queue will get."""
    model = models()
    engine = Engine(model, 3, LENGTH)
    prompt, *ends = random_prompts([30, 5, 6, 7])
    generate(engine, [Request(prompt, GREEDY, 1)])
    requests = [Request(prompt[:n] + end, GREEDY, 5) for n, end in zip((20, 30, 30), ends)]
    generate(engine, requests)
    assert [request.cached_tokens for request in requests] == [20, 20, 20], "the first one continues in the row"
    assert [request.new_tokens for request in requests] == [tokens_of(model, request) for request in requests]


def test_requests_that_join_together_keep_each_other_s_snapshots(models):
    """The new snapshot of the first one's turn would replace the snapshot that the second one reuses."""
    model = models("qwen35-wide")
    model.setup_caches(1, 8)
    size = sum(state.snapshot_bytes(model.dtype) for state in model.snapshots.states)
    engine = Engine(model, 2, LENGTH, options=EngineOptions(snapshot_bytes=2 * size))
    earlier = [Request(prompt, GREEDY, 25) for prompt in random_prompts([40, 60])]
    generate(engine, earlier)
    turn = Request(earlier[0].prompt + earlier[0].new_tokens, GREEDY, 3)
    other = Request(earlier[1].prompt[:55] + [5, 6, 7], GREEDY, 3)
    generate(engine, [turn, other])
    assert (turn.cached_tokens, other.cached_tokens) == (64, 44)
    assert [one.new_tokens for one in (turn, other)] == [tokens_of(model, one) for one in (turn, other)]


def test_a_prefix_is_copied_again_from_a_row_that_has_just_got_it(models):
    """Its first row is overwritten in between, so its snapshots, which were copied as well, are needed in another."""
    engine = Engine(models("qwen35-wide"), 3, 150)
    first, rest, old, late, new, end, other_end = random_prompts([60, 50, 90, 80, 20, 3, 4])
    conversation = Request(first, GREEDY, 3)
    generate(engine, [Request(old, GREEDY, 1)])
    generate(engine, [conversation])
    generate(engine, [Request(first + conversation.new_tokens + rest, GREEDY, 3)])
    generate(engine, [Request(late, GREEDY, 1)])
    requests = [Request(prompt, GREEDY, 3) for prompt in (first[:50] + end, new, first[:50] + other_end)]
    for request in requests:
        engine.add(request)
    plan = engine.make_plan()
    assert [(one.row, one.source, one.reused) for one in plan.admitted] == [(0, 1, 44), (1, 1, 0), (2, 0, 44)]
    generate(engine, [])
    assert [request.new_tokens for request in requests] == [tokens_of(models("qwen35-wide"), one) for one in requests]


def test_a_step_of_plain_decoding_needs_its_batch_alone(models):
    model = models()
    engine = Engine(model, 2, LENGTH)
    requests = [Request(prompt, GREEDY, 3) for prompt in random_prompts([7, 9])]
    for request in requests:
        engine.add(request)
    engine.step()
    columns = [(row.request.new_tokens[-1], len(row.tokens), row.index) for row in engine.rows]
    inputs = torch.tensor(list(zip(*columns)))
    batch = Batch(engine.rows, inputs, model, engine.sampling, StepFunctions(), engine.threads, engine.timing)
    with torch.no_grad():
        [*new] = PlainDecoding().step(batch).new_tokens
    assert new == [tokens_of(model, request)[1:2] for request in requests]
