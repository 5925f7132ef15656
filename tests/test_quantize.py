"""Packing and unpacking, the quantized layers, whole models of every family, and the command."""

import json
import resource
import shutil
import subprocess
import sys
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import SPARSE, plain_twin, random_blocks, read_model, write_random
from conftest import ROOT, default_gguf, greedy, only_torch, random_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import quantize
from checkpoint import Writer, empty_model, read_quantization
from cli import UserError
from config import Config
from costs import roofline, total_weight_bytes, weight_bytes
from formats import FORMATS, Quantization, QuantizedEmbedding, QuantizedLinear, Scheme, pack
from layers import ExpertStack, gated
from load import load_model
from quantize import quantize_checkpoint

ROUNDING = 3e-7  # float32 rounding errors, as a fraction of the largest weight


def unpacked(packed: dict, groupsize: int, C: int) -> torch.Tensor:
    """The float32 matrix that packed tensors stand for."""
    format = next(format for format in FORMATS.values() if {part.name for part in format.parts} == packed.keys())
    return format.unpack(packed, groupsize or C, C)


def by_column(numbers, groupsize, C):
    return numbers.float().repeat_interleave(groupsize or C, 1)[:, :C]


KINDS = ["normal", "constant rows", "zeros", "one outlier", "subnormal", "tiny", "large", "positive", "bfloat16"]


def matrix(N, C, kind, seed):
    w = torch.randn(N, C, generator=torch.Generator().manual_seed(seed))
    if kind == "constant rows":
        w = w[:, :1].expand(N, C).clone()
    if kind == "one outlier":
        w[:, seed % C] = 3e4
    scale = {"zeros": 0.0, "subnormal": 1e-40, "tiny": 1e-7, "large": 1e4}.get(kind, 1.0)
    w = w.abs() if kind == "positive" else w * scale
    return w.bfloat16() if kind == "bfloat16" else w


@settings(max_examples=300, deadline=None)
@given(
    N=st.integers(1, 19), C=st.integers(1, 300), groupsize=st.sampled_from([0, 32, 64, 128]),
    kind=st.sampled_from(KINDS), seed=st.integers(0, 10**6),
)  # fmt: skip
@pytest.mark.slow
def test_no_weight_is_further_off_than_half_a_level(N, C, groupsize, kind, seed):
    """The error is at most half a level, or the float16 rounding of an int4 group's minimum if that is more."""
    w = matrix(N, C, kind, seed)
    exact, most = w.float(), w.float().abs().max() * ROUNDING + 1e-42  # at most 127 times the least float32
    packed = pack(w, "int8", groupsize)
    error = (unpacked(packed, groupsize, C) - exact).abs()
    assert (error <= by_column(packed["scales"], groupsize, C) / 2 + most).all()
    packed = pack(w, "int4", groupsize)
    least = torch.stack([part.amin(1) for part in exact.split(groupsize or C, 1)], 1)
    offset = by_column((packed["mins"].float() - least).abs(), groupsize, C)
    error = (unpacked(packed, groupsize, C) - exact).abs()
    assert (error <= torch.maximum(by_column(packed["scales"], groupsize, C) / 2, offset) + most).all()
    G = -(-C // (groupsize or C))
    assert packed["packed"].shape == (N, -(-C // 2)) and packed["scales"].shape == packed["mins"].shape == (N, G)


def test_the_layout_on_disk():
    """By hand: the low nibble is the even column, each group has its own scale and min, and the last group is short."""
    w = torch.tensor([[0.0, 15, 3, 7, 1, 2, 9, 4] * 8])  # 64 columns on a grid of steps of 1
    packed = pack(torch.cat([w - 1, 10 * w[:, :15] + 20], 1), "int4", 64)
    assert packed["packed"][0, :3].tolist() == [0 | 15 << 4, 3 | 7 << 4, 1 | 2 << 4]
    assert packed["mins"].tolist() == [[-1.0, 20.0]] and packed["scales"].tolist() == [[1.0, 10.0]]
    assert packed["packed"][0, 32:35].tolist() == [0 | 15 << 4, 3 | 7 << 4, 1 | 2 << 4]
    assert packed["packed"].shape == (1, 40) and packed["packed"][0, 39] < 16, "79 columns leave the last nibble empty"
    scales, mins = torch.tensor([[2.0, 0.5]]).half(), torch.tensor([[-4.0, 1.0]]).half()
    q = torch.tensor([[0x10, 0x32, 0x0F]], dtype=torch.uint8)
    found = FORMATS["int4"].unpack({"packed": q, "scales": scales, "mins": mins}, 4, 5)
    assert found.tolist() == [[-4.0, -2.0, 0.0, 2.0, 8.5]]
    q = torch.tensor([[-127, 3, 0, 1, 127]], dtype=torch.int8)
    assert FORMATS["int8"].unpack({"weight": q, "scales": scales}, 4, 5).tolist() == [[-254.0, 6.0, 0.0, 2.0, 63.5]]
    assert pack(torch.tensor([[-254.0, 6, 0, 2, 63.5]]), "int8", 0)["weight"].tolist() == [[-127, 3, 0, 1, 32]]


ENCODED = [name for name, format in FORMATS.items() if format.quantize is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_iq4_nl_is_better_than_its_neighbours(kind):
    w = matrix(7, 96, kind, 3).float()
    values = FORMATS["iq4_nl"].unpack(pack(w, "iq4_nl", 32), 32, 96)
    steps = 127 * 2.0**-24  # of the smallest float16 scale
    assert (values - w).abs().max() <= w.abs().max() * 0.13 + steps  # more than half of the widest gap of the table
    if kind == "normal":
        other = FORMATS["int4"].unpack(pack(w, "int4", 32), 32, 96)
        assert (values - w).square().mean() < (other - w).square().mean()


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].halves_at])
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_blocks_of_gguf_files_equal_the_gguf_package(name):
    """Also hostile ones: every scale, negative, infinite and NaN too, and every level."""
    format, kind = FORMATS[name], gguf.GGMLQuantizationType[name.upper()]
    (part,), generator = format.parts, torch.Generator().manual_seed(1)
    assert gguf.GGML_QUANT_SIZES[kind] == (part.columns, part.count)
    blocks = torch.randint(0, 256, (300, 4 * part.count), generator=generator).byte()
    found = format.unpack({"blocks": blocks}, part.columns, 4 * part.columns)
    assert np.array_equal(found.numpy(), gguf.quants.dequantize(blocks.numpy(), kind), equal_nan=True)
    assert not format.is_finite({"blocks": blocks}) and not found.isfinite().all()
    sane = random_blocks(name, 7, 5 * part.columns)
    assert format.is_finite(sane) and format.unpack(sane, part.columns, 5 * part.columns).isfinite().all()
    for at in format.halves_at:
        sane["blocks"][3, 2 * part.count + at : 2 * part.count + at + 2] = torch.tensor([0, 0x7C]).byte()  # infinity
        assert not format.is_finite(sane)
        sane["blocks"][3, 2 * part.count + at + 1] = 0x7B


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e18])
def test_what_cannot_be_packed_is_refused(value):
    w = torch.randn(3, 40)
    w[1, 33] = value
    for format in ENCODED:
        with pytest.raises(ValueError, match="holds NaN or infinity|too large for float16"):
            pack(w, format, 32)


@pytest.mark.parametrize("format", ENCODED)
@pytest.mark.parametrize("N, C, groupsize", [(7, 45, 32), (50, 129, 128), (33, 64, 0), (1, 31, 0), (5, 70, 64)])
def test_layers_are_the_unpacked_matrix(monkeypatch, format, N, C, groupsize):
    """It is unpacked in blocks, here of few rows."""
    monkeypatch.setattr("formats.UNPACK_BLOCK", 4 * C)
    torch.manual_seed(N)
    w, bias, x = torch.randn(N, C), torch.randn(N), torch.randn(2, 3, C)
    scheme = Scheme(format, groupsize if groupsize in FORMATS[format].groupsizes else 32)
    packed = pack(w, *scheme)
    whole = FORMATS[format].unpack(packed, scheme.groupsize or C, C)
    layer = QuantizedLinear(C, N, True, scheme)
    layer.load_state_dict(packed | {"bias": bias})
    assert torch.allclose(layer(x), F.linear(x, whole, bias), atol=1e-5)
    table = QuantizedEmbedding(C, N, False, scheme)
    table.load_state_dict(packed)
    tokens = torch.randint(0, N, (2, 5))
    assert torch.equal(table(tokens), whole[tokens])
    assert torch.allclose(table.logits(x), F.linear(x, whole), atol=1e-5)


CASES = [
    ("llama-gqa-biased", Quantization("int4", 32, "int8")), ("llama-mha", Quantization("int8", 32, "int4")),
    ("qwen2-gqa", Quantization("int8", 0, "none")), ("bloom-2-untied", Quantization("int4", 0, "int4")),
]  # fmt: skip


@pytest.mark.parametrize("name, quantization", CASES, ids=lambda value: value if isinstance(value, str) else value.mode)
@pytest.mark.slow
def test_a_quantized_model_equals_its_unpacked_weights(tiny, tmp_path, name, quantization):
    """From a checkpoint on disk, tied or untied, with or without biases, in a batch of different lengths."""
    kept = quantize_checkpoint(tiny(name)[2], tmp_path / "q", quantization)
    assert read_quantization(tmp_path / "q") == quantization
    untouched = all(("norm" in name or name.endswith("bias")) for name in kept)
    assert untouched == (quantization.head != "none")
    model = load_model(tmp_path / "q", dtype=torch.float32)
    prompts = random_prompts((3, 17, 40, 1))
    with only_torch():
        expected = greedy(plain_twin(tmp_path / "q"), prompts, 24)
    assert greedy(model, prompts, 24) == expected
    model = load_model(tmp_path / "q", dtype=torch.float32, kernels="torch")  # the kernels' own layout would be padded
    found = roofline(model.config, 1e9, torch.float32, 5, 2, quantization)
    assert found["weight_bytes_per_token"] * 2 == pytest.approx(weight_bytes(model, 2))
    assert found["flops_per_token"] == roofline(model.config, 1e9, torch.float32, 5, 2)["flops_per_token"]
    stored = sum(t.nbytes for t in load_file(tmp_path / "q" / "model.safetensors").values())
    assert stored == sum(t.nbytes for t in model.state_dict().values()), "a tied table is stored once"


@pytest.mark.slow
def test_compiled_equals_eager(tiny, tmp_path):
    """Both formats in plain torch, as on a machine without kernels. (test_kernels_cpu.py compiles the kernels.)"""
    torch._dynamo.reset()
    name, quantization = CASES[1]
    quantize_checkpoint(tiny(name)[2], tmp_path / "q", quantization)
    model, prompts = load_model(tmp_path / "q", dtype=torch.float32, kernels="torch"), random_prompts((3, 40, 18))
    model.blocks = model.blocks[:1]  # a second one would be compiled to the same code
    decode = torch.compile(lambda *x: model(*x), fullgraph=True, dynamic=False)
    with only_torch():
        assert greedy(model, prompts, 20, decode=decode) == greedy(model, prompts, 20)


def test_an_invalid_quantization(tiny, tmp_path):
    shutil.copytree(tiny("llama-mha")[2], tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    for fields, why in (
        ({"mode": "int3"}, "mode must be one of"), ({"head": None}, "head must be one of"), ({"bits": 4}, "bits"),
        ({"groupsize": 31}, "groupsize of mode .int4. must be one of"),
        ({"groupsize": 32.0}, "groupsize of mode .int4. must be one of"),
        ({"exceptions": {"blocks.0.mlp.down": "int2"}}, "blocks.0.mlp.down must be one of"),
        ({"exceptions": ["blocks.0.mlp.down"]}, "exceptions must name formats"),
    ):  # fmt: skip
        config["quantization"] = {"mode": "int4", "groupsize": 32, "head": "int8"} | fields
        (tmp_path / "x" / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=why):
            load_model(tmp_path / "x")


@pytest.mark.parametrize("mode", ["int8", "int4-gptq"])
def test_a_second_loss_is_named_before_it_begins(capsys, mode):
    dense = quantize.open_dense(str(default_gguf()), Quantization(mode, 32, "none"))
    assert dense.quantization is None
    result = total_weight_bytes(empty_model(dense.config, Quantization(mode, 32, "none")), torch.bfloat16)
    expected = f"quantized already (q4_1, q8_0); its weights are rounded again, to {mode}; "
    expected += f"the checkpoint will have {result / 1e6:.0f} MB, the file has 98 MB\n"
    assert expected in capsys.readouterr().err


def test_bad_sources_are_one_line_and_leave_nothing(tiny, tmp_path):
    source, q = tiny("llama-mqa-linear")[2], Quantization("int4", 32, "int8")
    quantize_checkpoint(source, tmp_path / "q", q)
    same = source / ".." / source.name
    for directory, out, quantization, why in (
        (tmp_path / "q", tmp_path / "out", q, "is quantized already"),
        (source, tmp_path / "out", Quantization("int4", 64, "int8"), "64 is more than the"),
        (tmp_path / "no", tmp_path / "out", q, "has no config.json"),
        (source, same, q, "is the checkpoint to be quantized"),
    ):
        with pytest.raises(UserError, match=why):
            quantize_checkpoint(directory, out, quantization)
    shutil.copytree(source, tmp_path / "bad")
    tensors = load_file(source / "model.safetensors")
    down, norm = "blocks.1.mlp.down.weight", "norm.weight"
    spoiled = tensors[down].clone()
    spoiled[3, 5] = float("nan")
    for name, tensor, why in (
        (down, spoiled, f"{down} holds NaN or infinity"),
        (down, None, f"lacks tensor {down}"),
        ("more", torch.zeros(3), r"holds tensor more \(3,\), which"),
        (down, tensors[down].t().contiguous(), f"{down} is \\("),
        (down, tensors[down].long(), f"{down} is I64, but by its config it should be BF16 or F16 or F32"),
        (norm, tensors[norm].double(), f"{norm} is F64"),
        (norm, tensors[norm] * torch.inf, f"{norm} holds NaN or infinity"),
    ):
        changed = {key: value for key, value in (tensors | {name: tensor}).items() if value is not None}
        save_file(changed, tmp_path / "bad" / "model.safetensors")
        for mode in ("int4", "int4-gptq"):
            with pytest.raises(UserError, match=why):
                quantize_checkpoint(tmp_path / "bad", tmp_path / "q", Quantization(mode, 32, "int8"))
    assert {path.name for path in tmp_path.iterdir()} == {"q", "bad"} and load_model(tmp_path / "q")
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    tensors["blocks.0.mlp.down.scales"] = tensors["blocks.0.mlp.down.scales"].to(torch.int8)
    save_file(tensors, tmp_path / "q" / "model.safetensors")
    with pytest.raises(UserError, match="blocks.0.mlp.down.scales is I8, but by its config it should be F16"):
        load_model(tmp_path / "q")


@pytest.mark.slow
def test_the_command(tiny, tmp_path, monkeypatch):
    shutil.copytree(tiny("llama-gqa-biased")[2], tmp_path / "x")

    def run(*args, **options):
        command = [sys.executable, str(ROOT / "quantize.py"), "--checkpoint_path", str(tmp_path / "x"), *args]
        return subprocess.run(command, capture_output=True, text=True, **options)

    done = run("--mode", "int4")
    assert done.stdout.strip() == str(tmp_path / "x-int4-g32") and done.returncode == 0
    kept, written = done.stderr.splitlines()
    assert kept.startswith("not quantized: attention.out.bias,") and kept.endswith(", mlp_norm.weight, norm.weight")
    assert written.endswith(f"to run it: python generate.py --checkpoint_path {tmp_path / 'x-int4-g32'}")
    for why, *args in (
        ("invalid choice: 48", "--mode", "int8", "--groupsize", "48"),
        ("64 is more than the", "--mode", "int8", "--groupsize", "64"),
        ("--calibration_file", "--mode", "int4-gptq", "--calibration_file", str(tmp_path / "none")),
    ):
        monkeypatch.setattr(sys, "argv", ["quantize.py", "--checkpoint_path", str(tmp_path / "x"), *args])
        with pytest.raises(UserError, match=why):
            quantize.main()
    small = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (270_000, 270_000))}  # as if full
    bad = run("--mode", "int8", **small)
    assert bad.returncode == 2 and len(bad.stderr.splitlines()) <= 2, bad.stderr
    assert "nothing was left behind" in bad.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"x", "x-int4-g32"}
    assert len(greedy(load_model(tmp_path / "x-int4-g32"), [[5, 6, 7]], 20)[0]) == 20


@pytest.mark.slow
def test_quantizing_and_loading_hold_little(tmp_path):
    """For 240 MB of weights in 8 layers, quantizing needs a few times the largest tensor, and loading little more than
    the weights."""
    config = Config(8, 16, 4, 64, 1024, 2800, 16_000, 64)
    with Writer(tmp_path / "big") as writer:
        writer.add_config(config)
        numbers = torch.randn(2**20).bfloat16()
        for name, tensor in empty_model(config).state_dict().items():
            repeated = numbers.repeat(-(-tensor.numel() // 2**20))[: tensor.numel()]
            writer.add(name, repeated.view(tensor.shape))
    code = """if True:
        import sys, torch
        from pathlib import Path
        from checkpoint import empty_model, read_config
        from cpu.build import load_kernels
        from formats import Quantization
        from load import load_model
        from quantize import quantize_checkpoint
        from report import peak_memory
        source, task = Path(sys.argv[1]), sys.argv[2]
        empty_model(read_config(source))  # for which torch imports much more of itself
        before = peak_memory(torch.device("cpu"))
        if task == "quantize":
            quantize_checkpoint(source, source.with_name("q"), Quantization("int4", 32, "int8"))
        else:
            has_kernels = load_kernels()  # without, weights are unpacked, unless plain PyTorch is asked for
            model = load_model(source.with_name("q"), kernels="auto" if has_kernels else "torch")
        print(peak_memory(torch.device("cpu")) - before)"""
    grown = {}
    for task in ("quantize", "load"):
        command = [sys.executable, "-c", code, str(tmp_path / "big"), task]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        grown[task] = int(done.stdout)
    largest, whole = 33e6, 240e6
    assert (tmp_path / "big" / "model.safetensors").stat().st_size > whole
    assert grown["quantize"] < 5 * largest  # mapped pages of a file count while they are copied
    assert grown["load"] < (tmp_path / "q" / "model.safetensors").stat().st_size + 2 * largest + 30e6 < whole


# ---------------------------------------------------------------- GPTQ


@pytest.mark.parametrize("N, C, groupsize", [(60, 200, 32), (33, 300, 64), (7, 45, 0)])
def test_gptq_changes_outputs_less_than_rounding_does(N, C, groupsize):
    """On correlated inputs, with levels on the same grid."""
    generator = torch.Generator().manual_seed(C)
    mixing = torch.randn(C, C, generator=generator) * C**-0.5
    x = torch.randn(4000, C, generator=generator) @ mixing
    x[:, 3] = 0  # an input that is always 0
    w = torch.randn(N, C, generator=generator)
    ours, nearest = quantize.pack_gptq(w, x.T @ x, groupsize), pack(w, "int4", groupsize)
    assert torch.equal(ours["scales"], nearest["scales"]) and torch.equal(ours["mins"], nearest["mins"])
    new = torch.randn(1000, C, generator=generator) @ mixing
    new[:, 3] = 0
    error, before = (((new @ (unpacked(p, groupsize, C) - w).T) ** 2).mean() for p in (ours, nearest))
    assert error < 0.7 * before


@pytest.mark.slow
@pytest.mark.parametrize("name, groupsize", [("bloom-8", 32), ("gemma4-unified", 32), ("gemma4-e2b", 0)])
def test_gptq_of_a_whole_model(tiny, tmp_path, monkeypatch, name, groupsize):
    """Calibrated on text that the model writes. The checkpoint is read like any int4 checkpoint, and on other text its
    outputs are nearer to the model's than those of rounding."""
    monkeypatch.setattr(quantize, "SEQUENCE_LENGTH", 128)
    source, logits = tiny(name)[2], {}
    tokens, at = torch.tensor(random_prompts((200,) * 8, seed=5)), torch.arange(200).expand(8, 200)
    for mode in (None, "int4", "int4-gptq"):
        directory = source if mode is None else tmp_path / mode
        if mode:
            quantize_checkpoint(source, directory, Quantization(mode, groupsize, "none"))
        model = load_model(directory, dtype=torch.float32)
        model.setup_caches(8, 200)
        logits[mode] = model(tokens, at, all_logits=True).log_softmax(-1)
    assert read_quantization(tmp_path / "int4-gptq").mode == "int4-gptq"
    error, before = ((logits[None].exp() * (logits[None] - logits[mode])).sum() for mode in ("int4-gptq", "int4"))
    assert 0 < error < 0.95 * before


def test_cpu_may_be_deleted(tiny, tmp_path):
    """The program writes the same files without the folder."""
    source = tiny("llama-mqa-linear")[2]
    script = "import sys\nif sys.argv.pop(1) == 'deleted': sys.modules['cpu'] = None\nimport quantize\nquantize.main()"
    for how in ("there", "deleted"):
        command = [sys.executable, "-c", script, how, source, "--mode", "int4", "--out", tmp_path / how]
        done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    weights = [(tmp_path / how / "model.safetensors").read_bytes() for how in ("there", "deleted")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("n", [1, 32, 64, 128])
def test_an_expert_with_few_inputs_does_not_fit_them_alone(n):
    """On other inputs, outputs change hardly more than by rounding, also with fewer inputs than columns."""
    generator = torch.Generator().manual_seed(n)
    mixing = torch.randn(128, 128, generator=generator) * 128**-0.5
    with torch.device("meta"):
        stack = ExpertStack(128, 96, 2)
    weight = torch.randn(2 * 96, 128, generator=generator)
    stack.load_state_dict({"weight": weight.clone()}, assign=True)
    packed = quantize.pack_expert(stack, 1, torch.randn(n, 128, generator=generator) @ mixing, 32)
    new = torch.randn(1000, 128, generator=generator) @ mixing
    both = packed, pack(weight[96:], "int4", 32)
    error, before = ((new @ (unpacked(parts, 32, 128) - weight[96:]).T).square().mean() for parts in both)
    assert error < (1.15 if n < 64 else 0.95) * before
    assert torch.equal(stack.weight[:96], weight[:96]) and torch.equal(stack.weight[96:], unpacked(packed, 32, 128))


BESIDE_MLP = replace(SPARSE.experts, shared_dim=0, expert_scales=True, beside_mlp=True)
BESIDE_MLP = replace(SPARSE, mlp="geglu", norm_placement="both", float32_norms=True, experts=BESIDE_MLP)


@pytest.mark.parametrize("config", [SPARSE, BESIDE_MLP], ids=["instead of an MLP", "beside an MLP"])
def test_gptq_of_experts(tmp_path, monkeypatch, capsys, config):
    """Each with its own inputs. The last expert of one layer is never chosen: it is rounded, and named."""
    monkeypatch.setattr(quantize, "SEQUENCE_LENGTH", 128)
    source = write_random(tmp_path / "x", config)
    weights = load_file(source / "model.safetensors")
    router = weights["blocks.2.experts.router.weight"]
    router[2:4] = -router[:2]
    router[4] = 0  # two of the other logits are positive
    weights = {name: weight.bfloat16() for name, weight in weights.items()}  # GPTQ reads them so
    save_file(weights, source / "model.safetensors")
    for mode in ("int4", "int4-gptq"):
        quantize_checkpoint(source, tmp_path / mode, Quantization(mode, 32, "none"))
    rounded = "no token of the calibration text chose these, which are rounded: expert 4 of layer 2\n"
    assert capsys.readouterr().err.endswith(rounded)

    model, nearest, ours = (read_model(tmp_path / name, torch.float32) for name in ("x", "int4", "int4-gptq"))
    model.setup_caches(8, 100)
    x = []
    model.blocks[2].experts.register_forward_pre_hook(lambda module, inputs: x.append(inputs[0]))
    model(torch.tensor(random_prompts((100,) * 8, seed=5)), torch.arange(100).expand(8, 100))
    layers = [each.blocks[2].experts for each in (model, nearest, ours)]
    ids = layers[0].choose(x[0])[0]
    errors = torch.zeros(2)  # of GPTQ and of rounding, for down
    for e in range(4):
        h = layers[0].normed(x[0][(ids == e).any(2)])
        products = [layer.gate_up.multiply_expert(h, e) for layer in layers]
        hidden = gated(config.mlp, *products[0].chunk(2, dim=1))
        outputs = [layer.down.multiply_expert(hidden, e) for layer in layers]
        error, worst = ((product - products[0]).square().mean() for product in (products[2], products[1]))
        assert error < 0.9 * worst, e
        errors += torch.stack([(output - outputs[0]).square().mean() for output in (outputs[2], outputs[1])])
    assert errors[0] < 0.98 * errors[1], "hidden units correlate little"
    for name in ("gate_up", "down"):
        stacks = [getattr(layer, name).parts() for layer in layers[1:]]
        N = layers[0].get_submodule(name).out_features // 5
        assert all(torch.equal(stacks[0][part][4 * N :], stacks[1][part][4 * N :]) for part in stacks[0])


@pytest.mark.slow
def test_calibration_text_of_a_file(default_checkpoint, tmp_path):
    from text.tokenizer import Tokenizer

    model, tokenizer, path = load_model(default_checkpoint), Tokenizer(default_checkpoint), tmp_path / "text"
    path.write_text("one two three " * 900)
    sequences = quantize.calibration_text(model, tokenizer, path)
    assert {len(ids) for ids in sequences} == {512} and len(sequences) == 32
    assert sequences[-1][-1] in tokenizer.encode(" three three ")
    for text, why in ((b"", "has 0 tokens, but at least 2048 are needed"), (b"\xff\x00", "cannot be read")):
        path.write_bytes(text)
        with pytest.raises(UserError, match=why):
            quantize.calibration_text(model, tokenizer, path)
