"""The tests of docs/exercises.md: each says that its exercise is not done yet, or whether it is right.

pytest runs this file only if it is named, because in this tree the exercises are not done. test_solutions.py beside it
runs it in a copy of the tree with the solutions.
"""

import importlib
import random
from dataclasses import replace
from functools import wraps
from importlib.util import find_spec

import gguf
import pytest
import torch
import transformers
from cases import plain_twin, read_model, write_random
from conftest import INTERPRET, greedy, hf_greedy, random_prompts, save_random
from gguf_writer import bpe_fields, write_gguf
from programs import main
from schedules import GREEDY, fuzz_states, random_requests, run_randomly
from tokenizers import Tokenizer

import config
import kernels
from convert_hf_checkpoint import convert
from drafts.retrieval import RetrievalDraft
from engine import Engine, Request, generate
from formats import FORMATS
from load import load_model
from model import pad_rows, soft_cap
from sampling import Sampling, SamplingParams, probabilities
from sources.families import FAMILIES
from sources.opening import open_gguf, open_hf
from speculative import Speculation

NEAR = 5e-6  # float32 sums in another order
LOGITS = 1e-4  # the same, for logits of order 1 after some layers


def need(is_done, todo: str):
    if not is_done:
        pytest.fail(f"not done yet: {todo}", pytrace=False)


def find(module: str, name: str):
    """What the reader has written in a file of its own."""
    need(find_spec(module) and hasattr(importlib.import_module(module), name), f"there is no {module}.{name}")
    return getattr(importlib.import_module(module), name)


def answers(engine, requests):
    generate(engine, requests)
    return [request.new_tokens for request in requests]


def test_sampling(tiny, capsys, monkeypatch):
    need("epsilon_cutoff" in SamplingParams.__dataclass_fields__, "there is no field SamplingParams.epsilon_cutoff")
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="^epsilon_cutoff must"):
            SamplingParams(epsilon_cutoff=value)
    assert SamplingParams(epsilon_cutoff=0.1).needs_all_logits and not SamplingParams().needs_all_logits

    names = {"temperature": "Temperature", "top_k": "TopK", "epsilon_cutoff": "Epsilon", "min_p": "MinP"}
    rows = [(1.0, 0, 0.02, 0.0), (1.0, 0, 0.0, 0.0), (1.7, 0, 0.3, 0.0), (0.6, 0, 0.999, 0.0), (1.3, 0, 0.02, 0.3)]
    rows += [(2.0, 9, 0.1, 0.0), (1e-3, 0, 1e-6, 0.0)]
    torch.manual_seed(1)
    B, logits, settings = len(rows), 2 * torch.randn(len(rows), 3, 53), Sampling.make(len(rows), 53)
    logits[:, 1, ::3] = float("-inf")
    logits[:5, 2] = logits[:5, 2].round()  # ties, also between the likeliest
    for i, row in enumerate(rows):
        settings.set_row(i, SamplingParams(**dict(zip(names, row))), [])
    found = probabilities(logits, torch.arange(B), torch.arange(1, B + 1), torch.zeros(B, 2).long(), settings)
    for probs, x, row in zip(found, logits, rows):
        for name, value in zip(names.values(), row):
            if value:
                x = getattr(transformers.generation.logits_process, f"{name}LogitsWarper")(value)(None, x)
        assert torch.equal(probs > 0, x.softmax(-1) > 0) and torch.allclose(probs, x.softmax(-1), atol=NEAR), row

    given = ("--checkpoint_path", str(tiny("llama-mha")[2]), "--prompt_ids", "5,6,7", "--json", "--dtype", "float32")
    greedy_ids, ids, same, likeliest = [
        main(capsys, monkeypatch, *given, "--temperature", *options)[0]["samples"][0]["token_ids"]
        for options in (["0"], ["1.5"], ["1.5", "--epsilon_cutoff", "0"], ["1.5", "--epsilon_cutoff", "1"])
    ]
    assert likeliest == greedy_ids != ids == same


def test_processor(tiny, tiny_model):
    NoRepeat = find("text.no_repeat", "NoRepeat")
    chance, ids = random.Random(2), torch.arange(71)
    for case in range(150):
        n, alphabet = 1 + case % 4, chance.choice([[3, 31], [0, 32, 63], [*range(5, 70, 9)]])
        lengths = [chance.randint(*ends) for ends in ((1, 15), (0, 9), (0, 6))]
        prompt, answer, drafted = [[chance.choice(alphabet) for _ in range(length)] for length in lengths]
        grammar, masks = NoRepeat(prompt, n), torch.randint(-(2**31), 2**31, (9, 3), dtype=torch.int32)
        assert not any(grammar.accept(token) for token in answer), "it is never complete"
        for _ in range(2):  # to write masks changes no state
            grammar.fill(masks, drafted)
        for m in range(len(drafted) + 1):
            text = torch.tensor([prompt + answer + drafted[:m]])
            expected = transformers.NoRepeatNGramLogitsProcessor(n)(text, torch.zeros(1, 71))[0] == 0
            assert torch.equal((masks[m, ids // 32] >> ids % 32 & 1).bool(), expected), (text, n)

    oracle, prompts = tiny("llama-mha")[0], random_prompts((9, 23), seed=3)
    for n, decoding in ((1, None), (2, None), (1, Speculation([RetrievalDraft()], 5, automatic=False))):
        requests = [Request(prompt, GREEDY, 60, grammar=NoRepeat(prompt, n)) for prompt in prompts]
        found = answers(Engine(tiny_model("llama-mha"), 2, 96, decoding=decoding), requests)
        oracle.generation_config.no_repeat_ngram_size = n
        expected = [hf_greedy(oracle, prompt, 60) for prompt in prompts]
        oracle.generation_config.no_repeat_ngram_size = None
        assert found == expected and (n == 2 or found != [hf_greedy(oracle, prompt, 60) for prompt in prompts])


def test_family(tmp_path, capsys):
    need("ernie4_5" in FAMILIES, "there is no family ernie4_5 in sources.families.FAMILIES")
    for D, H, K, E, tied, biased in ((52, 6, 2, 22, False, True), (46, 3, 3, 26, True, False)):
        theirs = transformers.Ernie4_5Config(
            vocab_size=131, hidden_size=D, num_attention_heads=H, num_key_value_heads=K, head_dim=E, use_bias=biased,
            intermediate_size=62, num_hidden_layers=3, tie_word_embeddings=tied, max_position_embeddings=256,
        )  # fmt: skip
        oracle = save_random(theirs, tmp_path / str(D), seed=D)
        model = load_model(open_hf(tmp_path / str(D)), dtype=torch.float32)
        assert "unknown" not in capsys.readouterr().err, "a field of config.json was not read"
        [prompt] = random_prompts((90,), seed=D)
        model.setup_caches(1, 100)
        found = model(*pad_rows([prompt], [0]), all_logits=True)
        with torch.no_grad():
            expected = oracle(torch.tensor([prompt]), use_cache=False).logits
        assert (found - expected).abs().max() < LOGITS * expected.abs().max()
        prompts = random_prompts((5, 31), seed=E)
        assert greedy(model, prompts, 20) == [hf_greedy(oracle, one, 20) for one in prompts]
    sizes = '"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 8'
    (tmp_path / "46" / "config.json").write_text('{"model_type": "ernie4_5", "vocab_size": 9, ' + sizes + "}")
    usual, ours = transformers.Ernie4_5Config(), open_hf(tmp_path / "46").config
    assert (ours.n_kv_head, ours.head_dim, ours.norm_eps) == (2, 128, usual.rms_norm_eps), "the defaults of its config"
    assert (ours.rope_base, ours.tied_embeddings, ours.max_seq_length) == (usual.default_theta, True, 131072)


def test_mixer(tmp_path):
    need(hasattr(config, "MinGRU"), "there is no dataclass config.MinGRU")
    sizes = config.Config(3, 4, 2, 12, 40, 57, 131, 256, min_gru=config.MinGRU(layers=(0, 2), conv_channels=33))
    model = read_model(write_random(tmp_path / "x", sizes), torch.float32)
    model.setup_caches(4, 100)
    mixer = model.blocks[0].mixer
    for buffer in mixer.state.buffers():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)  # of an earlier request
    x = torch.randn(2, 50, 40, generator=torch.Generator().manual_seed(1))
    z, c = (x.double() @ mixer.inputs.weight.double().T).split(33, 2)
    states = [torch.zeros(2, 33).double()]
    for i in range(50):
        states.append(states[-1] + z[:, i].sigmoid() * (c[:, i] - states[-1]))
    expected = (torch.stack(states[1:], 1) @ mixer.out.weight.double().T).float()

    compiled = torch.compile(mixer, backend="eager", fullgraph=True)
    passes = [(mixer, 0, (30, 30)), (compiled, 30, (6, 6)), (mixer, 31, (9, 4)), (mixer, 33, (1, 1))]  # some go back
    for run, start, lengths in [*passes, (compiled, 34, (16, 16))]:
        positions = torch.tensor([[start + i if i < length else -1 for i in range(max(lengths))] for length in lengths])
        y = run(x[:, start : start + max(lengths)], positions, torch.tensor([3, 1]), None)
        near = torch.isclose(y, expected[:, start : start + max(lengths)], atol=4 * NEAR)
        assert near[positions >= 0].all(), (start, lengths)
    for seed in (0, 1):
        fuzz_states(load_model(tmp_path / "x", dtype=torch.float32), seed)


def test_format(tmp_path, byte_level):
    need("q2_k" in FORMATS, "there is no row q2_k in formats.FORMATS")
    format, kind = FORMATS["q2_k"], gguf.GGMLQuantizationType.Q2_K
    [part] = format.parts
    assert (format.bits, part.columns, part.count) == (2, *gguf.GGML_QUANT_SIZES[kind])
    blocks = torch.randint(0, 256, (300, 3 * part.count), generator=torch.Generator().manual_seed(1)).byte()
    found, expected = format.unpack({"blocks": blocks}, 256, 768), gguf.quants.dequantize(blocks.numpy(), kind)
    assert torch.equal(found.nan_to_num(7), torch.tensor(expected).nan_to_num(7)), "to the bit"
    for at in range(part.count - 1):  # the two bytes of infinity, anywhere in a block of zeros
        blocks = torch.zeros(1, part.count).byte()
        blocks[0, at : at + 2] = torch.tensor([0, 0x7C]).byte()
        is_finite = bool(format.unpack({"blocks": blocks}, 256, 256).isfinite().all())
        assert format.is_finite({"blocks": blocks}) == is_finite, at

    sizes = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512, "num_hidden_layers": 1}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=131, **sizes))
    file, library = tmp_path / "x.gguf", Tokenizer.from_file(str(byte_level / "tokenizer.json"))
    write_gguf(file, llama, bpe_fields(library, "gpt-2"), lambda name: kind)
    assert open_gguf(file).quantization.mode == "q2_k", "the file's weights stay as they are"
    kept = convert(open_gguf(file), tmp_path / "kept", torch.float32)
    plain = read_model(convert(open_gguf(file, dequantize=True), tmp_path / "plain", torch.float32), torch.float32)
    state = plain_twin(kept).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())
    prompts = random_prompts((5, 30))
    assert greedy(load_model(kept, dtype=torch.float32), prompts, 9) == greedy(plain, prompts, 9)


def test_draft(tiny_model):
    BigramDraft = find("drafts.bigram", "BigramDraft")
    model, seen = tiny_model("qwen3-gqa"), []
    model.config = replace(model.config, n_token=120)  # the prompts have some of the other 11 tokens, too

    class Checked(BigramDraft):
        def propose(self, batch, k):
            proposal, expected = super().propose(batch, k), []
            for row in batch.rows:
                text, found = row.request.prompt + row.request.new_tokens, []
                follow, room = dict(zip(text, text[1:])), self.engine.length - 1 - len(row.tokens)
                while len(found) < min(k, room) and follow.get([*text, *found][-1], 120) < 120:
                    found.append(follow[[*text, *found][-1]])
                expected.append(found)
            assert (proposal.tokens if proposal else None) == (expected if any(expected) else None)
            seen.extend(map(len, expected))
            return proposal

    two = SamplingParams(temperature=0.9, logit_bias=((7, 90.0), (4, 90.0)), seed=5)  # answers of two tokens
    for seed, length, k in ((0, 64, 5), (1, 48, 1), (2, 50, 15)):
        requests = random_requests(6, seed) + [Request(prompt, two, 40) for prompt in random_prompts((3, 30, 31))]
        speculation = Speculation([Checked()], k, automatic=False)
        run_randomly(Engine(model, 3, length, decoding=speculation), requests, seed)
        copies = [Request(request.prompt, request.params, request.max_new_tokens) for request in requests]
        for request, alone in zip(requests, answers(Engine(model, 4, length), copies)):
            cut = len(request.new_tokens) if request.finish_reason == "cancelled" else len(alone)
            assert request.new_tokens == alone[:cut]
        assert sum(speculation.report.accepted) > 20
    assert {0, 1, 15} <= set(seen)


def test_kernel(monkeypatch):
    need("soft_cap" in kernels.OPERATIONS, "there is no operation soft_cap in kernels.py")
    pytest.importorskip("triton")
    with INTERPRET:
        import kernels_triton as kt
    need(hasattr(kt, "soft_cap"), "there is no function kernels_triton.soft_cap")
    device, calls, run = "cuda" if torch.cuda.is_available() else "cpu", [], kt.soft_cap
    monkeypatch.setattr(kt, "soft_cap", wraps(run)(lambda *given: calls.append(1) or run(*given)))
    monkeypatch.setattr(kernels, "KERNELS", {})
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    logits = torch.linspace(-60, 60, 3 * 7 * 211, device=device).view(3, 7, 211)
    with torch.library._scoped_library("fastpath", "IMPL") as library:
        kt.register(library, device.upper())
        kernels.find_kernels(device)
        assert kernels.has_kernel("soft_cap", logits.device), "register in kernels_triton.py does not name it"
        # The roundings of a result. The interpreter truncates to bfloat16.
        for dtype, rounding in ((torch.float32, 3e-7), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)):
            wide = torch.nn.functional.pad(logits, (0, 5), value=7.0).to(dtype)
            for x in (wide[..., :211], wide[..., :211].transpose(0, 2), wide[:1, :1, :1], wide[0, 0, :0]):
                calls.clear()
                found = soft_cap(x, 5.0)
                assert calls and found.dtype == dtype and found.shape == x.shape, "model.soft_cap runs the kernel"
                assert torch.allclose(found.float(), 5 * torch.tanh(x.float() / 5), atol=5 * rounding, rtol=0)
        strange = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -3e38], device=device)
        assert torch.equal(soft_cap(strange, 5.0).nan_to_num(9), torch.tensor([9.0, 5, -5, 0, -5], device=device))
        torch.library.opcheck(torch.ops.fastpath.soft_cap, (logits, 5.0), test_utils=("test_schema", "test_faketensor"))
        leaf = logits.clone().requires_grad_()
        soft_cap(leaf, 5.0).sum().backward()
        assert torch.allclose(leaf.grad, 1 - torch.tanh(logits / 5) ** 2, atol=NEAR), "a kernel has no gradient"
    kernels.find_kernels(device)
    assert torch.equal(soft_cap(logits.cpu(), 5.0), 5 * torch.tanh(logits.cpu() / 5)), "the reference runs without it"
