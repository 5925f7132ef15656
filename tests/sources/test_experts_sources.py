"""Experts in files: the fields about them, each way to store their matrices, GGUF files, and faults."""

import json
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
import transformers
from cases import plain_twin, read_model
from conftest import MIXTRAL, QWEN3_MOE, QWEN35_MOE, greedy, random_prompts, save_random
from gguf_writer import write_gguf
from safetensors.torch import load_file, save_file
from test_families import vocabulary_fields
from test_gguf import with_fields
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import checkpoint
from checkpoint import open_directory
from cli import UserError
from config import Experts
from convert_hf_checkpoint import convert
from formats import Quantization, StackedLinear
from load import load_model
from quantize import quantize_checkpoint
from sources.gguf_file import GgufFile
from sources.hf_directory import hf_config
from sources.opening import open_gguf, open_hf

Q = gguf.GGMLQuantizationType

SIZES = {"vocab_size": 67, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5}
DELTA |= {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 18}


def config_of(family: str, D=20, F=14, n_expert=3, n_active=2, **fields):
    sizes = SIZES | {"hidden_size": D, "num_experts_per_tok": n_active} | fields
    if family == "mixtral":
        return MIXTRAL(**sizes, intermediate_size=F, num_local_experts=n_expert)
    sizes |= {"moe_intermediate_size": F, "num_experts": n_expert}
    if family == "qwen3_moe":
        return QWEN3_MOE(**({"intermediate_size": 26, "norm_topk_prob": True} | sizes))
    return QWEN35_MOE(**DELTA, **sizes)


FAMILIES = ("mixtral", "qwen3_moe", "qwen35_moe")


def read_directory(folder):
    return read_model(open_hf(folder), dtype=torch.float32).state_dict()


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


# ---------------------------------------------------------------- config.json


def read_fields(folder, config, **changes):
    """The Config of a directory with only a config.json. Ellipsis removes a field."""
    kind = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "qwen3_5_moe_text": "Qwen3_5Moe"}[config.model_type]
    fields = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [f"{kind}ForCausalLM"]} | changes
    fields = {name: value for name, value in fields.items() if value is not Ellipsis}
    (folder / "config.json").write_text(json.dumps(fields))
    return hf_config(folder)


@pytest.mark.parametrize("step", [1, 2, 3, 7])
@pytest.mark.parametrize("dense", [None, [], [1], [0, 2, 5]])
def test_the_sparse_layers_of_qwen3_moe_are_those_of_transformers(tmp_path, step, dense):
    theirs = config_of("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=step, mlp_only_layers=dense)
    with torch.device("meta"):
        layers = transformers.Qwen3MoeForCausalLM(theirs).model.layers
    sparse = tuple(i for i, layer in enumerate(layers) if isinstance(layer.mlp, Qwen3MoeSparseMoeBlock))
    found = read_fields(tmp_path, theirs)
    assert found.experts == (Experts(sparse, 3, 2, 14) if sparse else None) and found.hidden_dim == 26


def test_fields_about_experts(tmp_path, capsys):
    config = config_of("qwen3_moe")
    left_out = dict.fromkeys(("norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "num_local_experts"), ...)
    both = {"num_local_experts": 3, "num_experts": 3}
    experts = Experts((0, 1), 3, 2, 14, normalized=False)
    assert read_fields(tmp_path, config, **left_out, num_experts=3).experts == experts
    assert read_fields(tmp_path, config, **(left_out | both)).experts == experts
    default = read_fields(tmp_path, config, **left_out, moe_intermediate_size=..., num_experts_per_tok=...).experts
    theirs = QWEN3_MOE()
    assert default == Experts(
        (0, 1), theirs.num_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size, False
    )
    assert read_fields(tmp_path, config, sliding_window=9).sliding_window is None
    assert read_fields(tmp_path, config, sliding_window=9, use_sliding_window=True).sliding_window == 9

    config = config_of("mixtral")
    training = {"output_router_logits": True, "router_aux_loss_coef": 0.02, "router_jitter_noise": 0.1}
    found = read_fields(tmp_path, config, **training, sliding_window=7)
    assert (found.experts, found.sliding_window, found.hidden_dim) == (Experts((0, 1), 3, 2, 14), 7, 14)
    default = read_fields(tmp_path, config, num_local_experts=..., num_experts_per_tok=...).experts
    assert default == Experts((0, 1), MIXTRAL().num_local_experts, MIXTRAL().num_experts_per_tok, 14)

    config = config_of("qwen35_moe")
    assert read_fields(tmp_path, config).experts == Experts((0, 1), 3, 2, 14, shared_dim=18)
    left_out = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    default = read_fields(tmp_path, config, **dict.fromkeys(left_out, ...)).experts
    assert default == Experts((0, 1), *(getattr(QWEN35_MOE(), name) for name in left_out[:3]), shared_dim=512)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("family, fields, why", [
    ("qwen3_moe", {"num_experts_per_tok": 4}, "a token cannot use 4 of 3 experts"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "wrong type or size"),
    ("qwen3_moe", {"mlp_only_layers": 1}, "wrong type or size"),
    ("qwen3_moe", {"norm_topk_prob": "no"}, "normalized must be true or false"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size = 8 changes"),
    ("qwen3_moe", {"layer_types": ["sliding_attention"] * 2}, "differs from use_sliding_window"),
    ("qwen35_moe", {"num_experts": 0}, "n_expert must be a positive integer"),
    ("qwen35_moe", {"norm_topk_prob": False}, "norm_topk_prob = false changes"),
    ("mixtral", {"num_local_experts": None}, "n_expert must be a positive integer"),
    ("mixtral", {"kv_lora_rank": 512}, "kv_lora_rank = 512 changes"),
    ("mixtral", {"n_shared_experts": 1}, "n_shared_experts = 1 changes"),
], ids=str)  # fmt: skip
def test_fields_that_are_refused(tmp_path, family, fields, why):
    with pytest.raises(UserError, match=why):
        read_fields(tmp_path, config_of(family), **fields)


@pytest.mark.parametrize("kind", ["DeepseekV2", "DeepseekV3", "Qwen2Moe", "Olmoe", "GptOss", "Glm4Moe", "PhiMoE"])
def test_other_families_are_refused_by_name(tmp_path, kind):
    name = f"{kind}ForCausalLM"
    for model_type in ("deepseek_v3", "mixtral", "qwen3_moe"):
        with pytest.raises(UserError, match=f"architecture {name} .model_type {model_type}. is not known"):
            read_fields(tmp_path, config_of("mixtral"), architectures=[name], model_type=model_type)


# ---------------------------------------------------------------- Hugging Face tensors


def fused(state, transposed=False):
    """The tensors of a directory, with those of all experts of a layer in two tensors."""
    state = dict(state)
    parts = {"gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"), "down_proj": ("down_proj", "w2")}
    for stem in {name.rpartition("experts.")[0] for name in state if ".experts." in name}:
        own = {name.removeprefix(f"{stem}experts."): name for name in state if name.startswith(f"{stem}experts.")}
        X = 1 + max(int(name.split(".")[0]) for name in own)
        for target, kinds in parts.items():
            kinds = [kind for kind in kinds if f"0.{kind}.weight" in own]
            experts = [torch.cat([state.pop(own[f"{e}.{kind}.weight"]) for kind in kinds]) for e in range(X)]
            stack = torch.stack(experts)
            state[f"{stem}experts.{target}"] = (stack.transpose(1, 2) if transposed else stack).contiguous()
    return state


@pytest.mark.parametrize("D, F", [(20, 14), (20, 10), (14, 14)], ids=["different", "D = 2F", "D = F"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_of_all_experts(tmp_path, family, D, F):
    """Both ways round, with one of the two layers as it was, and by Mixtral's other names."""
    save_random(config_of(family, D, F), tmp_path, seed=1)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    expected = read_directory(tmp_path)
    one, other = fused(state), fused(state, transposed=True)
    assert one.keys() == other.keys() and not one.keys() >= state.keys()
    first = {name: tensor for name, tensor in other.items() if "layers.0." in name}
    second = {name: tensor for name, tensor in state.items() if "layers.0." not in name}
    renamed = [{name.replace("block_sparse_moe", "mlp"): stored[name] for name in stored} for stored in (state, one)]
    for stored in (one, other, first | second, *renamed):
        save_file(stored, path)
        assert_same(read_directory(tmp_path), expected)


def test_experts_of_different_dtypes(tmp_path):
    save_random(config_of("qwen3_moe"), tmp_path, seed=1)
    path = tmp_path / "model.safetensors"
    state = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    state["model.layers.1.mlp.experts.2.up_proj.weight"] = torch.full((14, 20), 0.123456)
    save_file(state, path)
    found = read_directory(tmp_path)["blocks.1.experts.gate_up.weight"].view(3, 2, 14, 20)
    assert torch.equal(found[2, 1], state["model.layers.1.mlp.experts.2.up_proj.weight"])
    assert torch.equal(found[0, 0], state["model.layers.1.mlp.experts.0.gate_proj.weight"].float())


EXPERTS = "model.layers.1.mlp.experts"
DOWN, GATE_UP = f"{EXPERTS}.down_proj", f"{EXPERTS}.gate_up_proj"


@pytest.mark.parametrize("changes, why", [
    ({f"{EXPERTS}.2.up_proj.weight": None}, f"lacks tensor {EXPERTS}.2.up_proj.weight"),
    ({f"{EXPERTS}.3.up_proj.weight": (14, 20)}, rf"holds tensor {EXPERTS}.3.up_proj.weight \(14, 20\), which"),
    ({"model.layers.1.mlp.gate.weight": (4, 20)}, r"gate.weight is \(4, 20\), .* should be \(3, 20\)"),
    ({"model.layers.1.mlp.gate.bias": (3,)}, "holds tensor model.layers.1.mlp.gate.bias"),
    ({GATE_UP: (3, 28, 20)}, r"experts.\d.\w+_proj.weight .\d+, \d+., which the model does not have"),
    ({GATE_UP: None}, f"lacks tensor {GATE_UP}"),
    ({GATE_UP: (3, 20, 28)}, r"gate_up_proj is \(3, 20, 28\), but by its config it should be \(3, 28, 20\)"),
    ({DOWN: (3, 20, 13)}, r"down_proj is \(3, 20, 13\), but by its config it should be \(3, 20, 14\)"),
], ids=str)  # fmt: skip
def test_wrong_experts_are_named(tmp_path, changes, why):
    save_random(config_of("qwen3_moe"), tmp_path, seed=1)
    state = load_file(tmp_path / "model.safetensors")
    if "_proj" in why and ".weight" not in why:
        state = fused(state)
    change(state, changes, tmp_path, why)


def change(state, changes, folder, why):
    """Write tensors with other ones of these shapes, or without them, and expect an error."""
    for name, shape in changes.items():
        state.pop(name, None)
        if shape is not None:
            state[name] = torch.ones(shape)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UserError, match=why) as error:
        read_directory(folder)
    assert "\n" not in str(error.value)


def test_how_often_a_file_is_opened(tmp_path, monkeypatch):
    """Seldom, because that takes as long as its header is, but again and again, so that little of it stays mapped."""
    save_random(config_of("qwen3_moe", n_expert=33), tmp_path, seed=1)
    expected = read_directory(tmp_path)
    opened = []
    original = checkpoint.safe_open
    monkeypatch.setattr(checkpoint, "safe_open", lambda *args: opened.append(args) or original(*args))
    for limit, least, most in ((1 << 24, 1, 10), (12_000, 6, 30), (0, 3 * 2 * 33, 300)):
        monkeypatch.setattr(checkpoint, "MAPPED_VALUES", limit)
        opened.clear()
        assert_same(read_directory(tmp_path), expected)
        assert least <= len(opened) <= most


# ---------------------------------------------------------------- our directories


@pytest.mark.parametrize("family", FAMILIES)
def test_converted_and_quantized(tmp_path, family):
    config = config_of(family, 64, 32, 5, 3, max_position_embeddings=64)
    save_random(config, tmp_path / "hf", seed=2)
    ours = convert(open_hf(tmp_path / "hf"), tmp_path / "ours", torch.float32)
    assert_same(read_model(ours, dtype=torch.float32).state_dict(), read_directory(tmp_path / "hf"))
    assert open_directory(ours).config == open_hf(tmp_path / "hf").config

    quantize_checkpoint(ours, tmp_path / "q", Quantization("int4", 0, "int8"))
    prompts = random_prompts((5, 21), 67)
    model = load_model(tmp_path / "q", dtype=torch.float32, kernels="torch")
    assert model.blocks[0].experts.down.stored_as == "int4"
    assert greedy(model, prompts, 12, length=64) == greedy(plain_twin(tmp_path / "q"), prompts, 12, length=64)


# ---------------------------------------------------------------- GGUF files


def gguf_file(path, byte_level, family, kinds=None, tensors=None, extra=None, **sizes):
    """Write a random model. kinds: (gate, up), each a type or None for float32, of separate gates and ups."""
    oracle = save_random(config_of(family, **sizes), path.parent / "hf", seed=3)
    changes = {}
    if kinds is not None:
        for i, layer in enumerate(oracle.model.layers):
            gate, up = layer.mlp.experts.gate_up_proj.detach().chunk(2, dim=1)
            place = f"blk.{i}.ffn_{{}}_exps.weight"
            parts = {"gate_up": None, "gate": gate.numpy(), "up": up.numpy()}
            changes |= {place.format(name): value for name, value in parts.items()}

    def kind_of(name):
        kind = name.split(".")[-2]
        if kinds is not None and kind in ("ffn_gate_exps", "ffn_up_exps"):
            return kinds[kind == "ffn_up_exps"]
        return Q.Q8_0 if kinds not in (None, (None, None)) and kind == "ffn_down_exps" else None

    write_gguf(path, oracle, vocabulary_fields(byte_level), kind_of, extra, changes | (tensors or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_has_the_bits_of_the_directory(tmp_path, byte_level, family):
    for kinds in (None, (None, None)):
        gguf_file(tmp_path / "x.gguf", byte_level, family, kinds)
        source = open_gguf(tmp_path / "x.gguf", dequantize=True)
        assert replace(source.config, norm_eps=1.0) == replace(open_hf(tmp_path / "hf").config, norm_eps=1.0)
        found = read_model(source, dtype=torch.float32).state_dict()
        expected = read_directory(tmp_path / "hf")
        assert found.keys() == expected.keys()
        for name in found:
            if not name.endswith("decay.weight"):  # the exponential function of another library
                assert torch.equal(found[name], expected[name]), name


KINDS = [(Q.Q4_K, Q.Q4_K), (Q.Q4_K, Q.Q5_K), (Q.Q8_0, None), (None, Q.Q6_K), (Q.F16, None), (Q.Q8_0, Q.Q4_0)]


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_quantized_matrices_of_experts_are_kept(tmp_path, byte_level, kinds):
    """In one stack if gate and up have the same format, and in two pieces otherwise."""
    path = tmp_path / "x.gguf"
    gguf_file(path, byte_level, "qwen3_moe", kinds, D=256, F=32, max_position_embeddings=64)
    file = GgufFile(path)
    X, D, F = 3, 256, 32
    model = load_model(open_gguf(path), dtype=torch.float32, kernels="torch")
    x = torch.randn(4, D)
    for i, block in enumerate(model.blocks):
        gate, up = (file.read(f"blk.{i}.ffn_{name}_exps.weight").view(X, F, D) for name in ("gate", "up"))
        gate_up = block.experts.gate_up
        are_quantized = [kind not in (None, Q.F16) for kind in kinds]
        assert isinstance(gate_up, StackedLinear) == (any(are_quantized) and kinds[0] != kinds[1])
        assert block.experts.down.stored_as == "q8_0"
        for e in range(X):
            expected = torch.cat([x @ gate[e].float().T, x @ up[e].float().T], dim=-1)
            torch.testing.assert_close(gate_up.multiply_expert(x, e), expected, rtol=1e-5, atol=1e-4)

    prompts = random_prompts((5, 21), 67)
    kept = greedy(model, prompts, 12, length=64)
    dense = load_model(open_gguf(path, dequantize=True), dtype=torch.float32, kernels="torch")
    assert greedy(dense, prompts, 12, length=64) == kept
    convert(open_gguf(path), tmp_path / "ours", torch.float32)
    ours = load_model(tmp_path / "ours", dtype=torch.float32, kernels="torch")
    assert_same(ours.state_dict(), model.state_dict())


@pytest.fixture(scope="module")
def files(tmp_path_factory, byte_level):
    folder = tmp_path_factory.mktemp("experts")
    for family in FAMILIES:
        gguf_file(folder / f"{family}.gguf", byte_level, family)
    return folder


def opened(files, family, **fields):
    path = files / f"{family}.gguf"
    architecture = GgufFile(path).architecture
    return with_fields(path, **{f"{architecture}.{name}": value for name, value in fields.items()})


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_of_gguf_files_that_change_nothing(files, capsys, family):
    config = opened(files, family).config()
    equal = {"expert_used_count": [2, 2], "expert_feed_forward_length": [14, 14]}
    neutral = {"expert_weights_norm": True, "expert_weights_scale": 1.0, "expert_gating_func": 1}
    zeros = {
        "expert_weights_scale": 0.0, "expert_gating_func": 0, "expert_group_count": 0,
        "expert_group_used_count": 0,
    }  # fmt: skip
    for fields in (equal, neutral, zeros):
        assert opened(files, family, **fields).config() == config
    assert capsys.readouterr().err == ""


def test_the_width_of_experts_in_older_files(files):
    """As in llama.cpp: the width of the MLP, or a part of it."""
    fields = {"expert_feed_forward_length": None, "feed_forward_length": 36}
    assert opened(files, "qwen3_moe", **fields).config().experts.hidden_dim == 18
    assert opened(files, "mixtral", **fields).config().experts.hidden_dim == 36


@pytest.mark.parametrize("fields, why", [
    ({"expert_weights_norm": False}, "expert_weights_norm = false changes what the model computes"),
    ({"expert_gating_func": 2}, "expert_gating_func = 2 changes what the model computes"),
    ({"expert_group_count": 3}, "expert_group_count = 3 changes what the model computes"),
    ({"expert_used_count": None}, "lacks .*expert_used_count"),
    ({"expert_used_count": 4}, "a token cannot use 4 of 3 experts"),
    ({"expert_used_count": [1, 2]}, "expert_used_count = .1, 2. differs by layer"),
    ({"expert_count": [3, 3]}, "expert_count = .3, 3. is not an integer"),
    ({"expert_count": -3}, "n_expert must be a positive integer"),
    ({"expert_latent_length": 8}, "expert_latent_length = 8 is not supported"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_fields_of_gguf_files_that_are_refused(files, family, fields, why):
    with pytest.raises(UserError, match=why):
        opened(files, family, **fields).config()


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_files_whose_tensors_do_not_fit(tmp_path, byte_level, family):
    shape = (3, 28, 20)

    def expect(why, extra=None, **tensors):
        changes = {f"blk.1.{name}.weight": value for name, value in tensors.items()}
        gguf_file(tmp_path / "x.gguf", byte_level, family, None, changes, extra)
        with pytest.raises(UserError, match=why) as error:
            open_gguf(tmp_path / "x.gguf")
        assert "\n" not in str(error.value)

    expect("lacks tensor blk.1.ffn_down_exps.weight", ffn_down_exps=None)
    expect("lacks tensor blk.1.ffn_gate_exps.weight and 1 more", ffn_gate_up_exps=None)
    wrong = np.ones((4, *shape[1:]), np.float32)
    expect(r"ffn_gate_up_exps.weight is \(4, 28, 20\), but .* should be \(3, 28, 20\)", ffn_gate_up_exps=wrong)
    expect("holds tensor blk.1.ffn_gate_exps.weight", ffn_gate_exps=np.ones((3, 14, 20), np.float32))
    expect("holds tensor blk.1.ffn_exp_probs_b.weight", ffn_exp_probs_b=np.ones(3, np.float32))
    if family != "qwen35_moe":
        expect("holds tensor blk.1.ffn_down_shexp.weight", ffn_down_shexp=np.ones((20, 18), np.float32))


def test_gguf_files_without_tensors_of_experts(tiny, tmp_path, byte_level):
    """A dense model that claims to have experts, and one whose architecture has none."""
    for name, why in (
        ("llama-mha", "which the model does not have"),
        ("qwen3-gqa", "expert_count = 8 makes this a mixture of experts, which is not supported"),
    ):
        architecture = name.partition("-")[0]
        extra = {f"{architecture}.expert_count": 8, f"{architecture}.expert_used_count": 2}
        write_gguf(tmp_path / "x.gguf", tiny(name)[0], vocabulary_fields(byte_level), extra=extra)
        with pytest.raises(UserError, match=why):
            open_gguf(tmp_path / "x.gguf")
