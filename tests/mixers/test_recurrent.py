"""The gated delta rule, the states of its layers, and the snapshots from which later prompts go on."""

import copy
import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from cases import NARROW, WIDE, delta_inputs, delta_state
from conftest import only_torch, random_prompts, save_random, tiny_config
from schedules import fuzz_states

from checkpoint import empty_model
from config import Config
from convert_hf_checkpoint import convert
from cpu.build import load_kernels
from engine import Engine, EngineOptions, Request, generate
from formats import Quantization
from kernels import DELTA_WINDOW, has_kernel
from load import load_model
from mixers.recurrent import Snapshots, delta_tokens, gated_delta, snapshot_slots
from model import pad_rows
from quantize import quantize_checkpoint
from sampling import SamplingParams
from sources.opening import open_hf

NEAR = 1e-5  # float32 sums in another order
IMPLEMENTATIONS = {"torch": only_torch, "kernels": nullcontext}
CPU = torch.device("cpu")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    """Runs a test with gated_delta's reference, and with the kernel."""
    if request.param == "kernels":
        need_kernels()
    with IMPLEMENTATIONS[request.param]():
        yield


def need_kernels():
    if not load_kernels() or not has_kernel("gated_delta", CPU):
        pytest.skip("no kernels for this machine")


def outputs(net, tokens):
    """What the specification gives for rows (B,S) from position 0 on."""
    repeats = net.n_value_head // net.n_key_head
    rows = []
    for q, k, v, log_decay, beta in zip(*tokens):
        zeros = torch.zeros(net.n_value_head, net.key_dim, net.value_dim)
        rows.append(delta_tokens(zeros, q.repeat(1, repeats, 1), k.repeat(1, repeats, 1), v, log_decay, beta)[0])
    return torch.stack(rows)


def run(state, tokens, columns, positions=None, rows=None):
    """gated_delta over some columns of these tokens (B,S)."""
    part = [x[:, columns] for x in tokens]
    if positions is None:
        positions = torch.arange(columns.start, columns.stop).expand(len(tokens[0]), -1)
    return gated_delta(*part, state, positions, rows)


@pytest.mark.parametrize("net", [NARROW, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("S", [1, 2, 15, 16, 17, 18, 64, 65, 200])
def test_a_pass_from_the_start(implementation, net, S):
    tokens = delta_inputs(net, 2, S, seed=S)
    state = delta_state(net, 3)
    state.matrix.fill_(torch.nan)  # of an earlier request
    rows = torch.tensor([2, 0])
    y = run(state, tokens, slice(0, S), rows=rows)
    torch.testing.assert_close(y, outputs(net, tokens), rtol=NEAR, atol=20 * NEAR)
    assert state.base.tolist() == [max(0, S - DELTA_WINDOW), 0, max(0, S - DELTA_WINDOW)]
    assert state.matrix[1].isnan().all(), "the other row is left alone"


@pytest.mark.parametrize("at", [3, 70, 95])  # of 100 tokens, the last 16 of which are pending
def test_what_is_not_finite_reaches_only_later_tokens(implementation, at):
    tokens = delta_inputs(WIDE, 1, 100)
    expected = outputs(WIDE, tokens)
    tokens[1][:, at] = torch.nan
    y = run(delta_state(WIDE, 1), tokens, slice(0, 100))
    torch.testing.assert_close(y[:, :at], expected[:, :at], rtol=NEAR, atol=20 * NEAR)
    assert y[:, at:].isnan().all()


@pytest.mark.parametrize("seed", range(8))
def test_drafted_tokens_are_taken_back(implementation, seed):
    """Passes of all lengths, after each of which some of the last tokens are rejected and then read again."""
    choose = random.Random(seed)
    S = 120
    tokens = delta_inputs(NARROW, 1, S, seed)
    wrong = delta_inputs(NARROW, 1, S, seed + 1000)
    expected = outputs(NARROW, tokens)
    state = delta_state(NARROW, 2)
    rows = torch.tensor([1])
    done = 0
    while done < S:
        count = min(S - done, choose.choice([1, 1, 2, 5, 16, 17, 33]))
        kept = choose.randint(max(1, count - DELTA_WINDOW), count)
        mixed = [torch.cat([a[:, : done + kept], b[:, done + kept :]], 1) for a, b in zip(tokens, wrong)]
        y = run(state, mixed, slice(done, done + count), rows=rows)
        torch.testing.assert_close(y[:, :kept], expected[:, done : done + kept], rtol=NEAR, atol=30 * NEAR)
        done += kept


def test_a_pass_that_is_repeated_gives_the_same(implementation):
    tokens = delta_inputs(NARROW, 1, 40)
    state = delta_state(NARROW, 1)
    run(state, tokens, slice(0, 30))
    for columns in (slice(25, 33), slice(33, 34)):
        first = run(state, tokens, columns)
        stored = [buffer.clone() for buffer in state.buffers()]
        assert torch.equal(run(state, tokens, columns), first)
        assert all(map(torch.equal, stored, state.buffers()))


def test_padding_and_separate_tokens_of_a_row(implementation):
    """Padding names real rows and leaves them alone. The tokens of a row may be batch rows of their own."""
    tokens = delta_inputs(NARROW, 1, 31)
    one, other = delta_state(NARROW, 2), delta_state(NARROW, 2)
    for state in (one, other):
        run(state, tokens, slice(0, 20), rows=torch.tensor([1]))
    before = [buffer.clone() for buffer in one.buffers()]
    nothing = run(one, tokens, slice(20, 23), positions=torch.full((1, 3), -1), rows=torch.tensor([1]))
    assert nothing.isfinite().all() and all(map(torch.equal, before, one.buffers()))
    expected = run(one, tokens, slice(20, 27), rows=torch.tensor([1]))
    order = torch.tensor([3, 0, 6, 1, 2, 5, 4])
    separate = [x[0, 20:27][order][:, None] for x in tokens]
    y = gated_delta(*separate, other, (20 + order)[:, None], torch.ones(7, dtype=torch.int64))
    assert torch.equal(y[:, 0], expected[0, order]) and all(map(torch.equal, one.buffers(), other.buffers()))


def test_positions_that_cannot_follow_are_refused(implementation):
    tokens = delta_inputs(NARROW, 1, 60)
    state = delta_state(NARROW, 1)
    run(state, tokens, slice(0, 40))
    for start in (DELTA_WINDOW, 23, 41):
        with pytest.raises(RuntimeError, match=rf"row 0 cannot go on at position {start}: its state is that of 24"):
            run(state, tokens, slice(start, start + 2))
    run(state, tokens, slice(24, 25))


# The passes over a model's three rows: (row, first position, tokens) of each batch row. Some go back by up to 16
# tokens, some are padded, and in some of them several batch rows have tokens of one row.
PASSES = [
    [(0, 0, 40), (2, 0, 9)], [(0, 37, 5), (1, 0, 2), (2, 9, 1)], [(2, 9, 17), (1, 0, 1), (0, 40, 0)],
    [(1, 3, 1), (1, 1, 1), (1, 2, 1)], [(1, 0, 16)], [(0, 41, 18)], [(0, 43, 3), (2, 10, 16)], [(0, 46, 1)],
    [(2, 26, 60)],
]  # fmt: skip


def passes(model):
    """The last hidden states of each pass of PASSES over a model."""
    [tokens] = random_prompts((200,), seed=6)
    model.setup_caches(3, 100)
    found = []
    for batch in PASSES:
        parts = [tokens[start : start + count] for _, start, count in batch]
        inputs, input_pos = pad_rows(parts, [start for _, start, _ in batch])
        rows = torch.tensor([row for row, _, _ in batch])
        with torch.no_grad():
            states = model.hidden(inputs, input_pos, rows)
        found.append(states[input_pos >= 0])
    return found


@pytest.mark.parametrize("name", ["lfm2-tied", "lfm2-biased"])
def test_short_convolutions_in_all_kinds_of_passes(tiny, name):
    """The fused blocks equal plain torch, and their states do. Both equal one pass from the start."""
    need_kernels()
    path = tiny(name)[2]
    fused = load_model(path, dtype=torch.float32)
    with only_torch():
        plain = load_model(path, dtype=torch.float32, kernels="torch")
        expected = passes(plain)
        [tokens] = random_prompts((200,), seed=6)
        whole = copy.deepcopy(plain)
        whole.setup_caches(1, 100)
        with torch.no_grad():
            at_once = whole.hidden(torch.tensor([tokens[:90]]), torch.arange(90)[None])[0]
    assert fused.backend.run_blocks is not None
    fused.backend = replace(fused.backend, max_fused_tokens=1000)  # also passes that torch would do faster
    for batch, one, other in zip(PASSES, passes(fused), expected):
        torch.testing.assert_close(one, other, rtol=NEAR, atol=20 * NEAR)
        positions = [at for _, start, count in batch for at in range(start, start + count)]
        torch.testing.assert_close(other, at_once[positions], rtol=NEAR, atol=20 * NEAR)
    blocks = load_model(path, dtype=torch.bfloat16).blocks
    conv = next(block.mixer for block in blocks if block.mixer.state.is_recurrent).conv
    assert {x.dtype for x in (conv.weight, conv.bias) if x is not None} == {torch.float32}
    for one, other in zip(fused.blocks, plain.blocks):
        state, plain_state = one.mixer.state, other.mixer.state
        if state.is_recurrent:
            assert state.base.tolist() == plain_state.base.tolist() == [46, 0, 70]
            torch.testing.assert_close(state.tail[:, :-1], plain_state.tail[:, :-1], rtol=NEAR, atol=20 * NEAR)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_positions_that_cannot_follow_are_refused_by_short_convolutions(tiny, kernels):
    model = load_model(tiny("lfm2-tied")[2], dtype=torch.float32, kernels=kernels)
    model.setup_caches(2, 100)
    model(torch.ones(1, 40, dtype=torch.int64), torch.arange(40)[None], torch.tensor([1]))
    for start in (DELTA_WINDOW, 23, 41):
        with pytest.raises(RuntimeError, match=f"row 1 cannot go on at position {start}: its state is that of 24"):
            model(torch.ones(1, 2, dtype=torch.int64), torch.tensor([[start, start + 1]]), torch.tensor([1]))
    model(torch.ones(1, 1, dtype=torch.int64), torch.tensor([[24]]), torch.tensor([1]))


def test_short_convolutions_compile(tiny):
    """In plain torch, without a break of the graph."""
    model = load_model(tiny("lfm2-biased")[2], dtype=torch.float32, kernels="torch")
    model.setup_caches(3, 100)
    layer = model.blocks[1].short_conv
    twin = copy.deepcopy(layer)
    compiled = torch.compile(lambda *inputs: twin(*inputs), fullgraph=True, backend="aot_eager", dynamic=False)
    rows = torch.tensor([2, 0])
    for start, S in ((0, 20), (14, 6)):
        x = torch.randn(2, S, 48, generator=torch.Generator().manual_seed(S))
        input_pos = torch.arange(start, start + S).expand(2, -1).contiguous()
        input_pos[1, 5:] = -1
        with torch.no_grad():
            expected = layer(x, input_pos, rows)
            found = compiled(x, input_pos, rows)
        torch.testing.assert_close(found[input_pos >= 0], expected[input_pos >= 0], rtol=NEAR, atol=NEAR)
        assert twin.state.base.tolist() == layer.state.base.tolist()


def held(snapshots):
    return [[snapshot.position for snapshot in row] for row in snapshots.rows]


def test_the_snapshot_that_is_worth_least_goes():
    state = delta_state(NARROW, 4)
    snapshots = Snapshots([state], 2, rows=4)
    tokens = delta_inputs(NARROW, 1, 1200)
    for row, unread in ((0, 0), (1, 100), (2, 0)):
        run(state, tokens, slice(0, 1100), rows=torch.tensor([row]))
        snapshots.offer(row, unread)
    assert held(snapshots) == [[1084], [], [1084], []], "that in a long prompt goes first"
    snapshots.reuse(0, 0, 1084)
    run(state, tokens, slice(0, 1100), rows=torch.tensor([3]))
    snapshots.offer(3, unread=0)
    assert held(snapshots) == [[1084], [], [], [1084]], "then the least recently used"
    none = Snapshots([delta_state(NARROW, 1)], 0, rows=1)
    none.offer(0, unread=0)
    assert held(none) == [[]]


def test_number_of_snapshots():
    size = 4 * 6 * 10 * 21 + 3 * (2 * 30 + 126) * 2
    config = Config(3, 4, 2, 6, 35, 44, 97, 9000, delta_net=NARROW)
    states = empty_model(config).recurrent_states
    assert snapshot_slots(states, 5, 9000, 0, torch.bfloat16, None) == 20
    assert snapshot_slots(states, 5, 9000, 77 * size, torch.bfloat16, None) == 77
    assert snapshot_slots(states, 5, 1300, 77 * size, torch.bfloat16, None) == 50
    assert snapshot_slots(states, 5, 9000, 77 * size, torch.bfloat16, 3 * size - 1) == 2
    assert snapshot_slots(states, 5, 9000, 77 * size, torch.bfloat16, 0) == 0
    states = empty_model(replace(config, mtp=True)).recurrent_states
    assert snapshot_slots(states, 5, 9000, 77 * size, torch.bfloat16, 3 * (size + 2 * 35) - 1) == 2


@pytest.fixture(scope="module", params=["qwen35-grouped", "lfm2-tied"])
def model(tiny, request):
    return load_model(tiny(request.param)[2], dtype=torch.float32)


def answer(engine, prompt, n, **params):
    request = Request(list(prompt), SamplingParams(**params), n)
    generate(engine, [request])
    return request


@pytest.mark.parametrize("chunk_tokens", [1, 13, 55, 128])
def test_a_second_turn_reads_little_again(model, chunk_tokens):
    """A conversation whose prompts lose their last tokens in the next turn, as those with thoughts do."""
    engine = Engine(model, 2, 400, options=EngineOptions(chunk_tokens=chunk_tokens, always_chunk=True))
    [prompt] = random_prompts((120,), seed=3)
    first = answer(engine, prompt, 30)
    second = answer(engine, prompt[:-4] + [7, 8, 9], 20)
    assert len(prompt) - 2 * DELTA_WINDOW <= second.cached_tokens <= len(prompt) - 4
    third = answer(engine, second.prompt + second.new_tokens + [5, 6], 5)
    assert third.cached_tokens == len(second.prompt) + len(second.new_tokens) - 1
    again = answer(engine, prompt, 30)
    assert again.new_tokens == first.new_tokens and again.cached_tokens >= len(prompt) - 2 * DELTA_WINDOW


@pytest.mark.parametrize("always_chunk", [True, False])
def test_a_long_prefix_is_reused(model, always_chunk):
    """Two prompts that share their first 1,300 tokens: the second one goes on from one of the snapshots between, and
    the third one from where they part."""
    engine = Engine(model, 1, 1500, options=EngineOptions(always_chunk=always_chunk))
    prefix, one, other = random_prompts((1300, 100, 90), seed=5)
    answer(engine, prefix + one, 2)
    assert 1024 <= answer(engine, prefix + other, 2).cached_tokens < 1300
    assert answer(engine, prefix + one[::-1], 2).cached_tokens >= 1300 - DELTA_WINDOW


@pytest.mark.parametrize("chunk_tokens", [64, 100, 128, 256, 529, 700, 4000])
def test_the_first_snapshot_of_a_long_prompt(model, chunk_tokens):
    """It is at position 512 for every size of chunk, and an edited prompt goes on from there or from the next one."""
    engine = Engine(model, 1, 1500, options=EngineOptions(chunk_tokens=chunk_tokens, always_chunk=True))
    [prompt] = random_prompts((1400,), seed=7)
    answer(engine, prompt, 2)
    positions = sorted(snapshot.position for snapshot in model.snapshots.rows[0])
    assert positions[:2] == [512, 1024]
    assert answer(engine, prompt[:900] + prompt[1000:], 2).cached_tokens == 512
    assert answer(engine, prompt[:900] + prompt[1000:1200], 2).cached_tokens >= 900


@pytest.mark.parametrize("chunk_tokens, rows", [(1, 1), (13, 3), (55, 2), (128, 2)])
def test_a_system_prompt_is_read_twice(model, chunk_tokens, rows):
    """The second conversation takes a snapshot where it parts from the first, and the third goes on from there."""
    engine = Engine(model, rows, 400, options=EngineOptions(chunk_tokens=chunk_tokens, always_chunk=chunk_tokens < 128))
    prefix, *questions = random_prompts((111, 67, 45, 83, 52), seed=6)
    requests = [answer(engine, prefix + question, 9) for question in questions]
    cached = [request.cached_tokens for request in requests]
    assert cached[:2] == [0, 0] and all(111 - DELTA_WINDOW < n <= 111 for n in cached[2:])
    for request in requests:
        assert answer(Engine(model, 1, 400), request.prompt, 9).new_tokens == request.new_tokens


WITHOUT_ATTENTION = [("qwen35-wide", "linear_attention"), ("lfm2-biased", "conv")]


@pytest.mark.parametrize("name, kind", WITHOUT_ATTENTION)
def test_the_fused_blocks_check_the_positions_and_rows_of_states(tmp_path, name, kind):
    need_kernels()
    config = tiny_config(name)
    config.layer_types = [kind] * config.num_hidden_layers
    save_random(config, tmp_path, seed=1)
    model = load_model(open_hf(tmp_path), dtype=torch.float32)
    model.setup_caches(3, 40)
    x = torch.randn(2, 5, config.hidden_size)
    positions = torch.arange(5).expand(2, -1)
    ropes = model.positions.ropes(positions)
    with pytest.raises(RuntimeError, match="input_pos: expected"):
        model.backend.run_blocks(model.blocks, x, ropes, positions[:, :2], None)
    state = model.blocks[1].mixer.state
    for name, buffer in list(state.named_buffers()):
        setattr(state, name, buffer[:1].contiguous())
    with pytest.raises(RuntimeError, match="states of 1 and 3 rows"):
        model.backend.run_blocks(model.blocks, x, ropes, positions, torch.tensor([2, 1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen35-grouped", "lfm2-tied"])
def test_bits_of_a_quantized_model(tmp_path, name):
    """With the kernels, logits depend on a row's tokens alone: not on chunks, threads, other rows, or reuse."""
    need_kernels()
    config = tiny_config(name)
    config.hidden_size = 96
    config.num_attention_heads = 4
    save_random(config, tmp_path / "hf", seed=3)
    exact = convert(open_hf(tmp_path / "hf"), tmp_path / "exact", torch.float32)
    quantize_checkpoint(exact, tmp_path / "q", Quantization("int4", 32, "int8"))
    model = load_model(tmp_path / "q")
    assert model.backend.chunk_invariant
    prompts = random_prompts((150, 31, 75, 9, 140, 3, 16, 17), seed=8)

    def entries(engine, prompts):
        requests = [Request(prompt, SamplingParams(temperature=0.0), 12, logprobs=3) for prompt in prompts]
        generate(engine, requests)
        return [request.token_logprobs for request in requests]

    expected = entries(Engine(model, 1, 200), prompts)
    threads = torch.get_num_threads()
    try:
        for n, chunk in ((1, 1), (2, 7), (1, 16), (2, 17), (1, 128)):
            torch.set_num_threads(n)
            options = EngineOptions(chunk_tokens=chunk, always_chunk=True, fixed_threads=True)
            engine = Engine(model, 8, 200, options=options)
            assert entries(engine, prompts) == expected, chunk
            assert entries(engine, prompts[::-1]) == expected[::-1], "with reused prefixes"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_schedules_change_no_token(model, seed):
    fuzz_states(model, seed)


WIDE_CONVOLUTION = [("qwen35-wide", {"linear_conv_kernel_dim": 17}), ("lfm2-biased", {"conv_L_cache": 17})]


@pytest.mark.parametrize("name, kind", [*WITHOUT_ATTENTION, *WIDE_CONVOLUTION])
def test_a_model_without_attention_or_with_a_wide_convolution(tmp_path, name, kind):
    """Wider ones than the fused blocks support run operation by operation."""
    config = tiny_config(name)
    fields = kind if isinstance(kind, dict) else {"layer_types": [kind] * config.num_hidden_layers}
    for field, value in fields.items():
        setattr(config, field, value)
    oracle = save_random(config, tmp_path, seed=1)
    [prompt] = random_prompts((70,), seed=2)
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt]), use_cache=False).logits[0]
    model = load_model(open_hf(tmp_path), dtype=torch.float32)
    request = Request(prompt, SamplingParams(temperature=0.0), 1, prompt_logprobs=1)
    generate(Engine(model, 2, 100), [request])
    assert request.new_tokens == [int(expected[-1].argmax())]
    found = [entry[0] for entry in request.prompt_token_logprobs]
    theirs = expected.log_softmax(-1)[range(69), prompt[1:]]
    assert (torch.tensor(found) - theirs).abs().max() < 1e-4
